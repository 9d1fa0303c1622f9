"""Raw samples of the confirmation as a frame, and what is read off them: ties between rows, sources of variance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from harness.report.load.results import CellResults, Results
from harness.results_dir.artifacts import FLOAT_ROW
from harness.statistics import Interval, block_ci, paired_ratio_ci, speedup_verdict
from harness.timing.turn_log import BuildKey, Turn, TurnEvent, TurnMatrix

__all__ = ["Turns", "paired_ratio", "sample_frame", "statistical_ties", "valid_turns", "variance_frame"]

Turns = Mapping[tuple[int, int], Mapping[int, float]]
"""For each worker (build, group) the median latency of each turn, in milliseconds."""
SAMPLE_COLUMNS = ["cell", "row", "build", "group", "round", "sample", "latency_ms"]


def valid_turns(events: Iterable[TurnEvent]) -> list[Turn]:
    """Turns of the last worker of a build and group, without rows that were lost; see `TurnMatrix`."""
    found: dict[BuildKey, dict[str, dict[int, Turn]]] = defaultdict(lambda: defaultdict(dict))
    workers: dict[BuildKey, int] = {}
    for event in events:
        key = (event.build, event.group)
        if isinstance(event, Turn):
            if event.worker > workers.setdefault(key, event.worker):
                found.pop(key)
                workers[key] = event.worker
            found[key][event.row][event.round] = event
        else:
            found[key].pop(event.row, None)
    return [block for rows in found.values() for turns in rows.values() for block in turns.values()]


def sample_frame(results: Results) -> pd.DataFrame:
    """Every sample of every confirmation that counts: cell, row, build, group, round, sample, latency_ms."""
    lines = [
        (cell.name, block.row, block.build, block.group, block.round, number, latency_ms)
        for cell in results.cells
        for block in valid_turns(cell.events)
        for number, latency_ms in enumerate(block.samples_ms)
    ]
    return pd.DataFrame(lines, columns=SAMPLE_COLUMNS)


def statistical_ties(cell: CellResults, best: str) -> frozenset[str]:
    """The rows whose confirmed latency cannot be told from that of the row `best`, itself included.

    By the rule of the verdicts: the interval of the ratio contains 1, or the difference is below 1 % or the A/A floor.
    """
    turns = TurnMatrix(cell.events).turns
    others = {
        row: speedup_verdict(ratio, cell.floor or 0.0)
        for row in cell.summaries
        if row != best and (ratio := paired_ratio(turns, best, row)) is not None
    }
    return frozenset({best, *(row for row, said in others.items() if said == "tie")})


def paired_ratio(turns: Mapping[str, Turns], row: str, other: str) -> Interval | None:
    """Latency of `other` over that of `row`, both confirmed; None where no build has both.

    Rows of one worker are paired turn by turn; rows of different workers by build, each over its own baseline. A row is
    as fast as itself, however few its turns.

    Args:
        turns: By row, see `harness.timing.turn_log.TurnMatrix`.
    """
    if row == other:
        return Interval(value=1.0, low=1.0, high=1.0)
    shared = [key for key in turns.get(row, {}) if key in turns.get(other, {})]
    pairs = [(_shared_values(turns[other][key], turns[row][key])) for key in shared]
    if pairs := [pair for pair in pairs if pair[0]]:
        return paired_ratio_ci([slow for slow, _ in pairs], [fast for _, fast in pairs])
    own, theirs = (_speedup_by_build(turns, name) for name in (row, other))
    builds = sorted(own.keys() & theirs.keys())
    return block_ci([[own[build] / theirs[build]] for build in builds]) if builds else None


def _shared_values(one: Mapping[int, float], two: Mapping[int, float]) -> tuple[list[float], list[float]]:
    both = sorted(one.keys() & two.keys())
    return [one[number] for number in both], [two[number] for number in both]


def _speedup_by_build(turns: Mapping[str, Turns], row: str) -> dict[int, float]:
    """Speedup of a row over the baseline beside it, by build."""
    found = {}
    for key, own in turns.get(row, {}).items():
        base, mine = _shared_values(turns.get(FLOAT_ROW, {}).get(key, {}), own)
        if base:
            found[key[0]] = float(np.median(np.divide(base, mine)))
    return found


def variance_frame(results: Results) -> pd.DataFrame:
    """How much single inferences, turns and fresh builds scatter: relative standard deviations, median over rows.

    Analysis of variance on logarithms, nested samples in turns in builds, by the method of moments: what the scatter
    of a level's means exceeds that of the level below it (Kalibera and Jones, "Rigorous benchmarking in reasonable
    time", ISMM 2013, section 6). A negative estimate counts as 0.
    """
    lines = []
    for cell in results.cells:
        found = [parts for part in _samples_by_row(cell).values() if (parts := _variance_components(part)) is not None]
        if found:
            inference, turn, build = (float(value) for value in np.median(np.array(found), axis=0))
            lines.append({"cell": cell.name, "rows": len(found), "inference": inference, "turn": turn, "build": build})
    return pd.DataFrame(lines, columns=["cell", "rows", "inference", "turn", "build"])


def _samples_by_row(cell: CellResults) -> dict[str, dict[tuple[int, int], list[tuple[float, ...]]]]:
    rows: dict[str, dict[tuple[int, int], list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for block in valid_turns(cell.events):
        rows[block.row][block.build, block.group].append(block.samples_ms)
    return rows


def _variance_components(
    builds: Mapping[tuple[int, int], list[tuple[float, ...]]],
) -> tuple[float, float, float] | None:
    """Standard deviations of inference, turn and build; None with fewer than two builds of two turns."""
    logs = [[np.log(turn) for turn in turns if len(turn) > 1] for turns in builds.values()]
    logs = [turns for turns in logs if len(turns) > 1]
    if len(logs) < 2:
        return None
    within = float(np.mean([turn.var(ddof=1) for turns in logs for turn in turns]))
    samples = float(np.mean([len(turn) for turns in logs for turn in turns]))
    means = [[float(turn.mean()) for turn in turns] for turns in logs]
    between_turns = float(np.mean([np.var(turns, ddof=1) for turns in means]))
    per_build = float(np.mean([len(turns) for turns in means]))
    between_builds = float(np.var([np.mean(turns) for turns in means], ddof=1))
    turn = max(0.0, between_turns - within / samples)
    build = max(0.0, between_builds - between_turns / per_build)
    return tuple(float(np.sqrt(v)) for v in (within, turn, build))  # type: ignore[return-value]
