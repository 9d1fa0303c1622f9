"""Confirmation: candidates and baseline are rebuilt, timed in random turns and compared by paired ratios.

A search selects by its own samples, of which the lowest are low by chance; so reported figures come from new ones.
Every fresh worker builds the baseline twice. The second build is its A/A twin: the noise floor comes from the same
builds, the same minutes and the same arithmetic as the speedups that it limits.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from harness.api import Candidate
from harness.config.sections import Sampling, TurnSchedule
from harness.errors import UserError
from harness.records import MAIN_BENCHMARKER, Failed
from harness.statistics import Interval, block_ci, noise_floor_from_ratios, paired_ratio_ci, speedup_verdict
from harness.timing.turn_log import TWIN, BuildKey, RowFailure, Turn, TurnEvent, TurnMatrix
from harness.timing.workers.engines import Engines
from harness.timing.workers.trial_pool import WorkerKilled

MAX_GROUP_ROWS = 10  # rows that share a worker with the baseline and its twin; more would only take memory
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """Result of the confirmation for one row.

    Attributes:
        latency_ms: Median latency in ms.
        speedup: Latency of the baseline over that of the row, paired by turns; above 1: the row is faster.
        verdict: "faster", "tie" or "slower"; "wrong result in RUNTIME" or "saturates" for an engine that computes
            something else than its file specifies, see `harness.verification.output_comparison`.
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


def confirm(  # noqa: PLR0913 - what, where and how
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
    finished = _finished_rows(known, schedule.rounds)
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
        worker: Number of the current worker, see `harness.timing.turn_log.Turn`.
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
    """Return a summary for each part of the latencies by name (`harness.api.ReportsParts`); empty without parts."""
    turns = list(events)
    parts = dict.fromkeys(part for event in turns if isinstance(event, Turn) for part in event.parts_ms)
    return {
        part: summarize_turns(
            [replace(e, samples_ms=(e.parts_ms[part],)) if isinstance(e, Turn) else e for e in turns], baseline
        )
        for part in parts
    }


def estimate_noise_floor(matrix: TurnMatrix, baseline: str) -> float:
    """Return the noise floor as a share: the gain of the baseline over its twin, see `harness.statistics`."""
    bases, twins = matrix.paired_samples(TWIN, baseline)
    ratios = [float(np.median(np.divide(base, twin))) for base, twin in zip(bases, twins, strict=True)]
    return noise_floor_from_ratios(ratios)


def _finished_rows(matrix: TurnMatrix, rounds: int) -> Mapping[BuildKey, set[str]]:
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
    for (build, _), names in _finished_rows(matrix, rounds).items():
        rows[build] |= names
    return sum(names == set().union(*rows.values()) for names in rows.values())
