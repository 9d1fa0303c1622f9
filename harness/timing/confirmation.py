"""Confirmation: contenders and baseline are rebuilt, timed in random turns and compared by paired ratios.

The samples of a search select; these report, so that a contender that looked best by chance does not keep its figure.
Every fresh worker holds the baseline twice. The second copy is its A/A twin: the noise floor comes from the same
builds, the same minutes and the same arithmetic as the speedups that it limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from harness.api import Candidate
from harness.errors import UserError
from harness.timing.workers.engines import MAIN, Engines
from harness.timing.turn_log import TWIN, Block, Dropped, Event, Key, Readings
from harness.statistics import Interval, block_ci, floor_from, paired_ratio_ci, verdict
from harness.records import Failed
from harness.config.experiment import Rounds, Sampling

__all__ = [
    "OpenEngines",
    "Row",
    "RowSummary",
    "Summary",
    "confirm",
    "floor_of",
    "summarise",
]  # fmt: skip

GROUP = 10  # rows that are open at once with the baseline and its twin; more would only cost memory
# Machines change their speed within a second (a sibling thread that works, another cloud guest): many short turns see
# the same mixture for every row, a few long ones do not.
TURN_MS = 50.0
WARMUP_MS = 10.0  # before each turn: loads an engine that others evicted back into the caches
MOST = 200
NEVER = 1e-9  # turns end by time, so that all rows get the same
_LOST = ("crash", "timeout")

OpenEngines = Callable[[], AbstractContextManager[Engines]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of a comparison: a model on one of the workers' benchmarkers."""

    name: str
    candidate: Candidate
    benchmarker: str = MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """Result of the confirmation for one row.

    Attributes:
        latency_ms: Median latency.
        speedup: Latency of the baseline over that of the row, paired by turns.
        verdict: "faster", "tie" or "slower"; "wrong result in RUNTIME" or "saturates" for an engine that computes
            something else than its file specifies, see `harness.verification.output_comparison`.
        builds: Number of fresh builds.
        builds_ok: Number of builds with readings.
    """

    latency_ms: Interval
    speedup: Interval
    verdict: str
    builds: int
    builds_ok: int

    @property
    def recommended(self) -> bool:
        """Whether to deliver this row and not the baseline: a tie does not justify a loss of accuracy."""
        return self.verdict == "faster"

    def shrinkage(self, search_speedup: float) -> float:
        """Return by how much the search overestimated the speedup; selecting the lowest reading makes this positive."""
        return search_speedup - self.speedup.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Result of a confirmation.

    Attributes:
        floor: Gain of the baseline over its twin; smaller gains are ties.
        builds: Number of builds that all rows completed.
        rows: By name, including the baseline, without rows that have no readings.
        failed: Last failure of each row that has one, by name.
        disturbed: Share of the turns that other processes disturbed.
    """

    floor: float
    builds: int
    rows: Mapping[str, RowSummary]
    failed: Mapping[str, Failed]
    disturbed: float = 0.0


def confirm(
    rows: Sequence[Row],
    baseline: Row,
    *,
    open_engines: OpenEngines,
    plan: Rounds,
    rng: np.random.Generator,
    done: Iterable[Event] = (),
) -> Iterator[Event]:
    """Time the rows against the baseline, and yield each event as it happens.

    For each of `plan.builds` and each group of rows, a fresh worker builds all rows, then each is timed once in
    each of `plan.rounds`, in random order. A row that fails leaves that build; if its worker died, the others start
    again in a fresh one. Rounds that other processes disturbed are withheld and repeated at the end of the build; a
    repetition that is disturbed again is marked, and counts.

    Args:
        done: Events of an interrupted confirmation of the same rows. Finished workers are not repeated; an unfinished
            one is replaced, and so are its events.

    Raises:
        UserError: The baseline failed, so there is nothing to compare with.
    """
    names = [baseline.name, TWIN, *(row.name for row in rows)]
    if len(set(names)) != len(names):
        raise ValueError(f"rows of a confirmation need different names, but got {', '.join(names)}")
    groups = [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)] or [()]
    known = Readings(done)
    finished = _finished(known, plan.rounds)
    for build, streams in enumerate(rng.spawn(plan.builds)):
        for group, (members, stream) in enumerate(zip(groups, streams.spawn(len(groups)), strict=True)):
            if finished[build, group].issuperset({baseline.name, TWIN, *(row.name for row in members)}):
                continue
            worker = known.workers.get((build, group), -1) + 1
            yield from _Turns((build, group), worker, baseline, plan, stream).run(members, open_engines)


class _Turns:
    """Turns of one group of rows in one build.

    Attributes:
        worker: See `Block.worker`.
    """

    def __init__(self, key: Key, worker: int, baseline: Row, plan: Rounds, rng: np.random.Generator) -> None:
        self.worker = worker
        self._key = {"build": key[0], "group": key[1]}
        self._bases = (baseline, replace(baseline, name=TWIN))
        self._rounds = plan.rounds
        count = max(3, plan.samples)
        self._sampling = Sampling(
            warmup_ms=WARMUP_MS,
            min_samples=count,
            max_samples=max(count, MOST),
            max_ms=TURN_MS,
            target=NEVER,
        )
        self._rng = rng
        self._alive: dict[str, Row] = {}

    def run(self, members: Sequence[Row], open_engines: OpenEngines) -> Iterator[Event]:
        """Yield the events of this group, over as many workers as its rows crash."""
        self._alive = {row.name: row for row in (*self._bases, *members)}
        complete = False
        while not complete:
            with open_engines() as engines:
                complete = yield from self._worker(engines)
            self.worker += 1

    def _worker(self, engines: Engines) -> Generator[Event, None, bool]:
        """Yield the events of one worker; return False if it died early."""
        handles: dict[str, int] = {}
        for row in self._shuffled():
            built = engines.build(self._alive[row].candidate, self._alive[row].benchmarker)
            if isinstance(built, Failed):
                yield self._drop(row, built)
                if built.stage in _LOST:
                    return False
            else:
                handles[row] = built.handle
        withheld: dict[int, Sequence[Block]] = {}
        for number in range(self._rounds):
            turns = yield from self._round(number, engines, handles)
            if turns is None:
                return False
            if any(turn.disturbed for turn in turns):
                withheld[number] = turns
            else:
                yield from turns
        # If most rounds were disturbed, the cause is permanent and a repetition would show the same.
        permanent = 2 * len(withheld) > self._rounds
        for number, first in withheld.items():
            turns = first
            if not permanent:
                again = yield from self._round(number, engines, handles)
                if again is None:
                    return False
                turns = _merge_repetition(again, first)
            yield from (turn for turn in turns if turn.row in self._alive)
        return True

    def _round(
        self, number: int, engines: Engines, handles: Mapping[str, int]
    ) -> Generator[Event, None, Sequence[Block] | None]:
        """Time each row once, in random order; yield failures, return the turns, or None if the worker died."""
        turns: list[Block] = []
        for row in self._shuffled():
            samples = engines.sample(handles[row], self._sampling)
            if isinstance(samples, Failed):
                yield self._drop(row, samples)
                if samples.stage in _LOST:
                    return None
                continue
            turn = Block(
                **self._key,
                worker=self.worker,
                round=number,
                row=row,
                samples_ms=samples.latency_ms,
                discarded_ms=samples.discarded_ms,
                disturbed=samples.disturbed,
            )
            turns.append(turn)
        return turns

    def _drop(self, row: str, failed: Failed) -> Dropped:
        if row in [base.name for base in self._bases]:
            why = f"{failed.stage}: {failed.reason}\n{failed.log_tail}"
            raise UserError(f"the baseline failed in the confirmation, so there is nothing to compare with; {why}")
        del self._alive[row]
        return Dropped(**self._key, row=row, failed=failed)

    def _shuffled(self) -> list[str]:
        names = list(self._alive)
        return [names[index] for index in self._rng.permutation(len(names))]


def _merge_repetition(turns: Iterable[Block], first: Iterable[Block]) -> list[Block]:
    """Return the turns of a repeated round, with the readings of the first attempt as discarded ones."""
    earlier = {turn.row: (*turn.discarded_ms, *turn.samples_ms) for turn in first}
    return [replace(turn, discarded_ms=(*earlier.get(turn.row, ()), *turn.discarded_ms)) for turn in turns]


def summarise(events: Iterable[Event], baseline: str, floor: float = 0.0) -> Summary:
    """Return latency, speedup and verdict of each row; `floor` is used if it exceeds the noise floor of the events."""
    matrix = Readings(events)
    floor = max(floor, floor_of(matrix, baseline))
    rows = {}
    for name in matrix.turns:
        base, own = matrix.paired(name, baseline)
        if own and name != TWIN:
            speedup = paired_ratio_ci(base, own)
            rows[name] = RowSummary(
                latency_ms=block_ci(own),
                speedup=speedup,
                verdict=verdict(speedup, floor),
                builds=len(own) + len(matrix.failed[name]),
                builds_ok=len(own),
            )
    return Summary(
        floor=floor,
        builds=_complete_builds(matrix),
        rows=rows,
        failed={name: list(found.values())[-1] for name, found in matrix.failed.items() if found},
        disturbed=matrix.disturbed_share,
    )


def floor_of(matrix: Readings, baseline: str) -> float:
    """Return the A/A noise floor: the gain of the baseline over its twin, see `harness.statistics`."""
    bases, twins = matrix.paired(TWIN, baseline)
    ratios = [float(np.median(np.divide(base, twin))) for base, twin in zip(bases, twins, strict=True)]
    return floor_from(ratios)


def _finished(matrix: Readings, rounds: int) -> Mapping[Key, set[str]]:
    """Return the rows that completed all rounds, or failed, by worker."""
    finished: dict[Key, set[str]] = defaultdict(set)
    for row in {*matrix.turns, *matrix.failed}:
        complete = [key for key, turns in matrix.turns[row].items() if len(turns) >= rounds]
        for key in (*complete, *matrix.failed[row]):
            finished[key].add(row)
    return finished


def _complete_builds(matrix: Readings) -> int:
    """Return the number of builds that all rows finished."""
    rounds = max((len(turns) for workers in matrix.turns.values() for turns in workers.values()), default=0)
    rows: dict[int, set[str]] = defaultdict(set)
    for (build, _), names in _finished(matrix, rounds).items():
        rows[build] |= names
    return sum(names == set().union(*rows.values()) for names in rows.values())
