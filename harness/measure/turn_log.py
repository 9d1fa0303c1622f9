"""Log of a paired comparison: one event per timed turn of a row, and per row that failed."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from harness.base.untrusted import parse_json
from harness.measure.records import Count, Failed, LatencyMs, Readings, from_json

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
            key = (event.build, event.group)
            if isinstance(event, Turn):
                self._add(key, event)
            else:
                self.turns[event.row].pop(key, None)
                self.disturbed[event.row].pop(key, None)
                self.failed[event.row][key] = event.failed

    def _add(self, key: BuildKey, turn: Turn) -> None:
        if turn.worker > self.workers.setdefault(key, turn.worker):
            self._discard_worker(key)
            self.workers[key] = turn.worker
        self.turns[turn.row][key][turn.round] = statistics.median(turn.samples_ms)
        self.failed[turn.row].pop(key, None)
        self.disturbed[turn.row][key].pop(turn.round, None)
        if turn.disturbed:
            self.disturbed[turn.row][key][turn.round] = turn.disturbed

    def _discard_worker(self, key: BuildKey) -> None:
        for row in self.turns:
            self.turns[row].pop(key, None)
            self.disturbed[row].pop(key, None)

    @property
    def disturbed_share(self) -> float:
        """Return the share (0 to 1) of the turns that were disturbed; 0 without turns."""
        turns, disturbed = (
            sum(len(turns) for workers in table.values() for turns in workers.values())
            for table in (self.turns, self.disturbed)
        )
        return disturbed / turns if turns else 0.0

    def is_fully_disturbed(self, row: str) -> bool:
        """Return whether a row has turns and all of them were disturbed."""
        turns = self.turns.get(row, {})
        return any(turns.values()) and all(
            self.disturbed.get(row, {}).get(key, {}).keys() >= timed.keys() for key, timed in turns.items()
        )

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
