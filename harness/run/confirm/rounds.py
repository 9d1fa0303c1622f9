"""Confirmation: candidates and baseline are rebuilt, timed in random turns and compared by paired ratios.

A search selects by its own samples, of which the lowest are low by chance; so reported figures come from new ones.
Every fresh worker builds the baseline twice. The second build is its A/A twin: the noise floor comes from the same
builds, the same minutes and the same arithmetic as the speedups that it limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from harness.base.errors import UserError
from harness.config.sections import Sampling, TurnSchedule
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.turn_log import (
    MAX_GROUP_ROWS,
    TWIN,
    BuildKey,
    RowFailure,
    Turn,
    TurnEvent,
    TurnMatrix,
    finished_rows,
)
from harness.plugins.api import Candidate
from harness.workers.engines import Engines, WorkerKilled

# A machine changes its speed within a second (work of a sibling thread or another cloud guest). With many short turns
# every row gets the same mixture of speeds.
MIN_CONFIRMATION_TURN_MS = 50.0
TURN_WARMUP_MS = 10.0  # before each turn, because other engines evicted this one from the caches
MAX_TURN_SAMPLES = 200
MIN_ROUNDS = 3  # of a build whose time is limited; the median of fewer follows a single disturbed round
MAX_KILLS = 3  # of workers of one group of rows in one build
UNREACHABLE_TARGET = 1e-9  # turns end by time, so that all rows get the same
_WORKER_LOSS_STAGES = ("crash", "timeout")

EngineFactory = Callable[[], AbstractContextManager[Engines]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRow:
    """Row of a comparison: a model, and the name in `WorkerSpec.benchmarkers` of the benchmarker that builds it."""

    name: str
    candidate: Candidate
    benchmarker: str = MAIN_BENCHMARKER


def confirm(
    rows: Sequence[TimedRow],
    baseline: TimedRow,
    *,
    open_engines: EngineFactory,
    schedule: TurnSchedule,
    rng: np.random.Generator,
    done: Iterable[TurnEvent] = (),
    seconds: float = math.inf,
) -> Iterator[TurnEvent]:
    """Time the rows against the baseline, and yield each event as it happens.

    For each build and each group of rows, a fresh worker builds all rows, and times each of them once in every round,
    in random order. A row that fails is left out of that build; if its worker died, the other rows start again in a
    fresh one. Rounds that other processes disturbed are repeated at the end of the build; turns of a repetition that is
    disturbed too are marked, and count.

    Args:
        open_engines: Function that opens engines in a fresh worker.
        schedule: Numbers of builds, rounds and samples.
        rng: Generator of the order of the rows.
        done: Events of an interrupted confirmation of the same rows. Finished workers are not repeated; the events of
            an unfinished one do not count.
        seconds: Time for all builds. If the first build exceeds its share, it ends after the current round, but has at
            least `MIN_ROUNDS`, and each later build has as many rounds.

    Raises:
        UserError: The baseline failed, so there is nothing to compare with.
        ValueError: Two rows have the same name.
    """
    names = [baseline.name, TWIN, *(row.name for row in rows)]
    if len(set(names)) != len(names):
        raise ValueError(f"rows of a confirmation need different names, but got {', '.join(names)}")
    groups = [rows[start : start + MAX_GROUP_ROWS] for start in range(0, len(rows), MAX_GROUP_ROWS)] or [()]
    known = TurnMatrix(done)
    finished = finished_rows(known, schedule.rounds)
    until_s = time.monotonic() + seconds / schedule.builds
    for build, streams in enumerate(rng.spawn(schedule.builds)):
        for group, (members, stream) in enumerate(zip(groups, streams.spawn(len(groups)), strict=True)):
            if finished[build, group].issuperset({baseline.name, TWIN, *(row.name for row in members)}):
                continue
            worker = known.workers.get((build, group), -1) + 1
            turns = BuildTurns((build, group), worker, baseline, schedule, stream, until_s)
            yield from turns.run(members, open_engines)
            schedule, until_s = schedule.model_copy(update={"rounds": turns.rounds}), math.inf


class BuildTurns:
    """Turns of one group of rows in one build.

    Attributes:
        worker: Number of the current worker, see `harness.measure.turn_log.Turn`.
        rounds: Number of rounds; fewer than those of the plan if the time `until_s` was up.
    """

    def __init__(
        self,
        key: BuildKey,
        worker: int,
        baseline: TimedRow,
        plan: TurnSchedule,
        rng: np.random.Generator,
        until_s: float = math.inf,
    ) -> None:
        self.worker, self.rounds, self._until_s = worker, plan.rounds, until_s
        self._key = {"build": key[0], "group": key[1]}
        self._bases = (baseline, replace(baseline, name=TWIN))
        count = max(3, plan.samples)
        self._sampling = Sampling(
            warmup_ms=TURN_WARMUP_MS,
            min_samples=count,
            max_samples=max(count, MAX_TURN_SAMPLES),
            max_ms=MIN_CONFIRMATION_TURN_MS,
            target=UNREACHABLE_TARGET,
        )
        self._rng = rng
        self._alive: dict[str, TimedRow] = {}

    def run(self, members: Sequence[TimedRow], open_engines: EngineFactory) -> Iterator[TurnEvent]:
        """Yield the events of this group of rows; a worker that dies is replaced by a fresh one.

        Raises:
            UserError: The baseline failed.
            WorkerKilled: Other processes killed more than three workers.
        """
        self._alive = {row.name: row for row in (*self._bases, *members)}
        complete, kills = False, 0
        while not complete:
            try:
                with open_engines() as engines:
                    complete = yield from self._run_worker(engines)
            except WorkerKilled:
                kills += 1
                if kills > MAX_KILLS:
                    raise
            self.worker += 1

    def _run_worker(self, engines: Engines) -> Generator[TurnEvent, None, bool]:
        """Yield the events of one worker; return False if it died early."""
        handles: dict[str, int] = {}
        for row in self._shuffle_rows():
            built = engines.build(self._alive[row].candidate, self._alive[row].benchmarker)
            if isinstance(built, Failed):
                yield self._drop_row(row, built)
                if built.stage in _WORKER_LOSS_STAGES:
                    return False
            else:
                handles[row] = built.handle
        withheld: dict[int, Sequence[Turn]] = {}
        for number in self._round_numbers():
            turns = yield from self._run_round(number, engines, handles)
            if turns is None:
                return False
            if any(turn.disturbed for turn in turns):
                withheld[number] = turns
            else:
                yield from turns
        # If most rounds were disturbed, the cause is permanent and a repetition would show the same.
        permanent = 2 * len(withheld) > self.rounds
        for number, first in withheld.items():
            turns = first
            if not permanent:
                again = yield from self._run_round(number, engines, handles)
                if again is None:
                    return False
                turns = _merge_repetition(again, first)
            yield from (turn for turn in turns if turn.row in self._alive)
        return True

    def _round_numbers(self) -> Iterator[int]:
        """Yield the numbers of the rounds until the time is up."""
        for number in range(self.rounds):
            if number >= MIN_ROUNDS and time.monotonic() > self._until_s:
                self.rounds = number
                return
            yield number

    def _run_round(
        self, number: int, engines: Engines, handles: Mapping[str, int]
    ) -> Generator[TurnEvent, None, Sequence[Turn] | None]:
        """Time each row once in random order; yield failures, and return the turns, or None if the worker died."""
        turns: list[Turn] = []
        for row in self._shuffle_rows():
            samples = engines.sample(handles[row], self._sampling)
            if isinstance(samples, Failed):
                yield self._drop_row(row, samples)
                if samples.stage in _WORKER_LOSS_STAGES:
                    return None
                continue
            turn = Turn(
                **self._key,
                worker=self.worker,
                round=number,
                row=row,
                samples_ms=samples.latency_ms,
                discarded_ms=samples.discarded_ms,
                disturbed=samples.disturbed,
                parts_ms=samples.parts_ms,
            )
            turns.append(turn)
        return turns

    def _drop_row(self, row: str, failed: Failed) -> RowFailure:
        if row in [base.name for base in self._bases]:
            why = f"{failed.stage}: {failed.reason}\n{failed.log_tail}"
            raise UserError(f"the baseline failed in the confirmation, so there is nothing to compare with; {why}")
        del self._alive[row]
        return RowFailure(**self._key, row=row, failed=failed)

    def _shuffle_rows(self) -> list[str]:
        names = list(self._alive)
        return [names[index] for index in self._rng.permutation(len(names))]


def _merge_repetition(turns: Iterable[Turn], first: Iterable[Turn]) -> list[Turn]:
    """Return the turns of a repeated round, with the readings of the first attempt as discarded ones."""
    earlier = {turn.row: (*turn.discarded_ms, *turn.samples_ms) for turn in first}
    return [replace(turn, discarded_ms=(*earlier.get(turn.row, ()), *turn.discarded_ms)) for turn in turns]
