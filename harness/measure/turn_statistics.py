"""Statistics of timed turns: latency, paired speedup and verdict of each row, and the noise floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from harness.base.statistics import Interval, block_ci, noise_floor_from_ratios, paired_ratio_ci, speedup_verdict
from harness.measure.records import Failed
from harness.measure.turn_log import TWIN, BuildKey, Turn, TurnEvent, TurnMatrix

MAX_GROUP_ROWS = 10  # rows that share a worker with the baseline and its twin; more would only take memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """Result of the confirmation for one row.

    Attributes:
        latency_ms: Median latency in ms.
        speedup: Latency of the baseline over that of the row, paired by turns; above 1: the row is faster.
        verdict: "faster", "tie" or "slower"; "wrong result in RUNTIME" or "saturates" for an engine that computes
            something else than its file specifies, see `harness.run.verify.output_comparison`.
        builds: Number of builds of the row, with failures.
        builds_ok: Number of builds that were timed.
        fully_disturbed: Whether other processes disturbed all turns of the row, so that its verdict is uncertain.
    """

    latency_ms: Interval
    speedup: Interval
    verdict: str
    builds: int
    builds_ok: int
    fully_disturbed: bool = False

    @property
    def recommended(self) -> bool:
        """Return whether to use this row instead of the baseline: a tie does not justify a loss of accuracy."""
        return self.verdict == "faster"

    def shrinkage(self, search_speedup: float) -> float:
        """Return the speedup by the search's own samples minus the confirmed one; usually positive."""
        return search_speedup - self.speedup.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationSummary:
    """Result of a confirmation.

    Attributes:
        noise_floor: Gain of the baseline over its twin as a share; smaller gains are ties.
        builds: Number of builds that all rows completed.
        rows: Results by name, with the baseline and without rows that have no readings.
        failed: Last failure of each row that failed, by name.
        disturbed: Share of the turns that other processes disturbed.
    """

    noise_floor: float
    builds: int
    rows: Mapping[str, RowSummary]
    failed: Mapping[str, Failed]
    disturbed: float = 0.0


def summarize_turns(events: Iterable[TurnEvent], baseline: str, noise_floor: float = 0.0) -> ConfirmationSummary:
    """Return latency, speedup and verdict of each row.

    Args:
        noise_floor: Smallest noise floor, as a share; that of the events is used if it is larger.
    """
    matrix = TurnMatrix(events)
    noise_floor = max(noise_floor, estimate_noise_floor(matrix, baseline))
    rows = {}
    for name in matrix.turns:
        base, own = matrix.paired_samples(name, baseline)
        if own and name != TWIN:
            speedup = paired_ratio_ci(base, own)
            rows[name] = RowSummary(
                latency_ms=block_ci(own),
                speedup=speedup,
                verdict=speedup_verdict(speedup, noise_floor),
                builds=len(own) + len(matrix.failed[name]),
                builds_ok=len(own),
                fully_disturbed=matrix.is_fully_disturbed(name),
            )
    return ConfirmationSummary(
        noise_floor=noise_floor,
        builds=_complete_builds(matrix),
        rows=rows,
        failed={name: list(found.values())[-1] for name, found in matrix.failed.items() if found},
        disturbed=matrix.disturbed_share,
    )


def summarize_parts(events: Iterable[TurnEvent], baseline: str) -> dict[str, ConfirmationSummary]:
    """Return a summary for each part of the latencies (`harness.plugins.api.ReportsParts`) by name, or none."""
    turns = list(events)
    parts = dict.fromkeys(part for event in turns if isinstance(event, Turn) for part in event.parts_ms)
    return {
        part: summarize_turns(
            [replace(e, samples_ms=(e.parts_ms[part],)) if isinstance(e, Turn) else e for e in turns], baseline
        )
        for part in parts
    }


def estimate_noise_floor(matrix: TurnMatrix, baseline: str) -> float:
    """Return the noise floor as a share: the gain of the baseline over its twin, see `harness.base.statistics`."""
    bases, twins = matrix.paired_samples(TWIN, baseline)
    ratios = [float(np.median(np.divide(base, twin))) for base, twin in zip(bases, twins, strict=True)]
    return noise_floor_from_ratios(ratios)


def finished_rows(matrix: TurnMatrix, rounds: int) -> Mapping[BuildKey, set[str]]:
    """Return the rows that completed all rounds or failed, by build and group."""
    finished: dict[BuildKey, set[str]] = defaultdict(set)
    for row in {*matrix.turns, *matrix.failed}:
        complete = [key for key, turns in matrix.turns[row].items() if len(turns) >= rounds]
        for key in (*complete, *matrix.failed[row]):
            finished[key].add(row)
    return finished


def _complete_builds(matrix: TurnMatrix) -> int:
    """Return the number of builds that all rows finished."""
    rounds = max((len(turns) for workers in matrix.turns.values() for turns in workers.values()), default=0)
    rows: dict[int, set[str]] = defaultdict(set)
    for (build, _), names in finished_rows(matrix, rounds).items():
        rows[build] |= names
    return sum(names == set().union(*rows.values()) for names in rows.values())
