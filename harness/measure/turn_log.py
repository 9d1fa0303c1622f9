"""Log of a paired comparison: one event per timed turn of a row, and per row that failed."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field

from harness.base.files import from_json, parse_json
from harness.base.statistics import Interval, block_ci, noise_floor_from_ratios, paired_ratio_ci, speedup_verdict
from harness.measure.records import Count, Failed, LatencyMs, Readings

TWIN = "A/A twin"  # name of the row with the second build of the baseline
NOTED_DISTURBED_SHARE = 0.10  # medians over turns are robust against a smaller share of disturbed turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Timed turn of a row.

    Attributes:
        group: Number of the group of rows within the build; rows are compared with the baseline of their own group.
        worker: Number of the worker within its build and group; the turns of a worker that died or was interrupted do
            not count if there is a later one.
        row: Name of the row, or `TWIN`.
        samples_ms: Latency of each inference in order.
        discarded_ms: Latencies of earlier attempts that were disturbed and repeated.
        disturbed: Disturbance of `samples_ms`, or "".
        parts_ms: Median in ms of each part by name, see `harness.plugins.api.ReportsParts`.
        build: Number of the build, from 0.
        round: Number of the round within the build, from 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    build: Count
    group: Count
    round: Count
    row: str
    samples_ms: Annotated[Readings, Field(min_length=1)]
    discarded_ms: Readings = ()
    disturbed: str = ""
    worker: Count = 0
    parts_ms: Mapping[str, LatencyMs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """Failure of a row, whose turns in this build and group do not count."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    build: Count
    group: Count
    row: str
    failed: Failed


TurnEvent = Turn | RowFailure
BuildKey = tuple[int, int]
"""Build and group: one fresh worker, whose rows can be compared turn by turn."""


class TurnMatrix:
    """Events of a comparison by row, then by build and group, without turns that do not count.

    Attributes:
        turns: Median latency in ms of each turn, by round.
        disturbed: Description of the disturbance of each disturbed turn, by round.
        workers: Number of the last worker of each build and group.
        failed: Failure of each row that failed in a build and group.
    """

    def __init__(self, events: Iterable[TurnEvent]) -> None:
        self.turns: dict[str, dict[BuildKey, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.failed: dict[str, dict[BuildKey, Failed]] = defaultdict(dict)
        self.disturbed: dict[str, dict[BuildKey, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        self.workers: dict[BuildKey, int] = {}
        for event in events:
            row, key = event.row, (event.build, event.group)
            if isinstance(event, RowFailure):
                self.turns[row].pop(key, None)
                self.disturbed[row].pop(key, None)
                self.failed[row][key] = event.failed
                continue
            if event.worker > self.workers.setdefault(key, event.worker):
                for name in self.turns:
                    self.turns[name].pop(key, None)
                    self.disturbed[name].pop(key, None)
                self.workers[key] = event.worker
            self.turns[row][key][event.round] = statistics.median(event.samples_ms)
            self.failed[row].pop(key, None)
            self.disturbed[row][key].pop(event.round, None)
            if event.disturbed:
                self.disturbed[row][key][event.round] = event.disturbed

    @property
    def disturbed_share(self) -> float:
        """Return the share (0 to 1) of the turns that were disturbed; 0 without turns."""
        turns, disturbed = (
            sum(len(turns) for workers in table.values() for turns in workers.values())
            for table in (self.turns, self.disturbed)
        )
        return disturbed / turns if turns else 0.0

    def paired_samples(self, row: str, base: str) -> tuple[list[list[float]], list[list[float]]]:
        """Return the median latencies in ms of base and row in their common rounds, a list for each build and group.

        Builds without a common round are left out.
        """
        base_ms, row_ms = [], []
        for key, turns in self.turns[row].items():
            other = self.turns.get(base, {}).get(key, {})
            if shared := sorted(set(turns) & set(other)):
                base_ms.append([other[turn] for turn in shared])
                row_ms.append([turns[turn] for turn in shared])
        return base_ms, row_ms


def encode_turn_event(event: TurnEvent) -> str:
    """Return an event as one line of JSON, without the newline."""
    kind = "turn" if isinstance(event, Turn) else "failure"
    if isinstance(event, RowFailure):
        event = replace(event, failed=event.failed.without_paths())
    body = {"kind": kind, **asdict(event)}
    if not body.get("parts_ms"):
        body.pop("parts_ms", None)
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def decode_turn_event(text: str | bytes) -> TurnEvent:
    """Return the event that `encode_turn_event` wrote; raise `ValueError` for any other text."""
    body: dict[str, Any] = parse_json(text)
    kind = body.pop("kind", None) if isinstance(body, dict) else None
    if kind == "turn":
        return from_json(Turn, body)
    if kind == "failure":
        return from_json(RowFailure, body)
    raise ValueError(f"not a line of a confirmation: {text[:80]!r}")


def disturbance_note(share: float) -> str:
    """Return a warning for a share (0 to 1) of disturbed turns above 10 %, or "".

    Changes of speed that all engines share cancel in their ratios. Other processes take whole time slices, which
    interrupt the slower of two engines more often.
    """
    if share <= NOTED_DISTURBED_SHARE:
        return ""
    return f"{share:.0%} of the turns were disturbed, which distorts speedups, usually upwards"


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
            timed = matrix.turns[name].items()
            rows[name] = RowSummary(
                latency_ms=block_ci(own),
                speedup=speedup,
                verdict=speedup_verdict(speedup, noise_floor),
                builds=len(own) + len(matrix.failed[name]),
                builds_ok=len(own),
                fully_disturbed=all(matrix.disturbed[name][key].keys() >= turns.keys() for key, turns in timed),
            )
    rounds = max((len(turns) for workers in matrix.turns.values() for turns in workers.values()), default=0)
    finished: dict[int, set[str]] = defaultdict(set)
    for (build, _), names in finished_rows(matrix, rounds).items():
        finished[build] |= names
    return ConfirmationSummary(
        noise_floor=noise_floor,
        builds=sum(names == set().union(*finished.values()) for names in finished.values()),
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
