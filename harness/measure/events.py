"""What a confirmation writes down: one turn of one row after the other, and rows that failed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.records import Failed

__all__ = ["TWIN", "Block", "Dropped", "Event", "Key", "Readings", "decode_event", "disturbance_note", "encode_event"]

TWIN = "A/A twin"
"""Name of the row that is the baseline once more."""
DISTURBED = 0.10
"""Share of disturbed turns that is worth a word: medians over turns bear less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One turn of one row.

    Attributes:
        build: Number of the fresh build.
        group: Number of the worker within the build; rows are compared with the baseline of their own worker.
        worker: Of those of its build and group, one after the other: where one died or was interrupted, the turns of
            the next replace all of its.
        round: Number of the turn.
        row: `Row.name`, or `TWIN`.
        samples_ms: Latency of each inference, in order.
        discarded_ms: Readings of earlier attempts that the machine disturbed, so that they were repeated.
        disturbed: What disturbed the readings that count, too; "" where nothing was seen.
    """

    build: int
    group: int
    round: int
    row: str
    samples_ms: tuple[float, ...]
    discarded_ms: tuple[float, ...] = ()
    disturbed: str = ""
    worker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A row that failed; what it gave in this build does not count."""

    build: int
    group: int
    row: str
    failed: Failed


Event = Block | Dropped
Key = tuple[int, int]
"""Build and group: one fresh worker, whose rows can be compared turn by turn."""


class Readings:
    """Events put in order: for each row and each of its workers (build, group) the turns that count.

    Attributes:
        turns: Median latency in milliseconds of each turn.
        disturbed: Of each turn in which something else was at work, what was seen.
        workers: Number of the last worker of each build and group, see `Block.worker`.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.turns: dict[str, dict[Key, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.failed: dict[str, dict[Key, Failed]] = defaultdict(dict)
        self.disturbed: dict[str, dict[Key, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        self.workers: dict[Key, int] = {}
        for event in events:
            key = (event.build, event.group)
            if isinstance(event, Block):
                if event.worker > self.workers.setdefault(key, event.worker):
                    self._forget(key)
                    self.workers[key] = event.worker
                self.turns[event.row][key][event.round] = float(np.median(event.samples_ms))
                self.failed[event.row].pop(key, None)
                self.disturbed[event.row][key].pop(event.round, None)
                if event.disturbed:
                    self.disturbed[event.row][key][event.round] = event.disturbed
            else:
                for found in (self.turns, self.disturbed):
                    found[event.row].pop(key, None)
                self.failed[event.row][key] = event.failed

    def _forget(self, key: Key) -> None:
        for row in self.turns:
            self.turns[row].pop(key, None)
            self.disturbed[row].pop(key, None)

    @property
    def disturbed_share(self) -> float:
        """Share of the turns that something else disturbed; 0 where there are no turns."""
        turns, disturbed = (
            sum(len(turns) for found in table.values() for turns in found.values())
            for table in (self.turns, self.disturbed)
        )
        return disturbed / turns if turns else 0.0

    def paired(self, row: str, base: str) -> tuple[list[list[float]], list[list[float]]]:
        """For each worker that has both, the base's and the row's readings in the turns that both have."""
        bases, owns = [], []
        for key, turns in self.turns[row].items():
            other = self.turns.get(base, {}).get(key, {})
            if shared := sorted(set(turns) & set(other)):
                bases.append([other[turn] for turn in shared])
                owns.append([turns[turn] for turn in shared])
        return bases, owns


def encode_event(event: Event) -> str:
    """One line of JSON, without the newline."""
    kind = "block" if isinstance(event, Block) else "dropped"
    return json.dumps({"kind": kind, **asdict(event)}, separators=(",", ":"), allow_nan=False)


def decode_event(text: str) -> Event:
    """Read one line back.

    Raises:
        ValueError: Not one of ours; the text says what is wrong with it.
    """
    body: dict[str, Any] = json.loads(text)
    kind = body.pop("kind", None) if isinstance(body, dict) else None
    try:
        if kind == "block":
            samples = {name: tuple(body.get(name, ())) for name in ("samples_ms", "discarded_ms")}
            return Block(**{**body, **samples})
        if kind == "dropped":
            return Dropped(**{**body, "failed": Failed(**body["failed"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"line of a confirmation lacks or adds a field ({error}): {text[:80]}") from error
    raise ValueError(f"not a line of a confirmation: {text[:80]}")


def disturbance_note(share: float) -> str:
    """What readings are worth where so large a share of their turns was disturbed; "" where it was too small to matter.

    A pace that all engines share cancels in their ratios, other processes do not: they take whole slices of time, which
    the slower of two engines meets more of.
    """
    if share <= DISTURBED:
        return ""
    return f"something else was at work in {share:.0%} of the turns, which distorts speedups, upwards as a rule"
