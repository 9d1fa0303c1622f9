"""Confirmation of the rows of a task, and the noise floor before its searches.

Raw turns are stored: `confirmation.jsonl` grows turn by turn, so an interrupted confirmation continues;
`noise_floor.json` is written once.

A search selects by its own samples, of which the lowest are low by chance; so reported figures come from new ones:
candidates and baseline are rebuilt, timed in random turns and compared by paired ratios. Every fresh worker builds the
baseline twice. The second build is its A/A twin: the noise floor comes from the same builds, the same minutes and the
same arithmetic as the speedups that it limits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.base.errors import UserError
from harness.base.files import archive_existing, json_equal, parse_json
from harness.base.progress import Observer
from harness.config.sections import Confirmation, PluginSpec, Sampling, TurnSchedule
from harness.graph.io.digests import digest_file
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.turn_log import (
    MAX_GROUP_ROWS,
    TWIN,
    BuildKey,
    RowFailure,
    Turn,
    TurnEvent,
    TurnMatrix,
    disturbance_note,
    encode_turn_event,
    finished_rows,
    summarize_turns,
)
from harness.plugins import registry
from harness.plugins.api import Candidate, capabilities_of
from harness.results.artifacts import FLOAT_ROW, FinalistSet
from harness.results.journal import read_matching_record
from harness.results.lines import LineLog, read_lines, restore_lines, stored_path
from harness.results.manifest import recorded, recorded_log, write_record
from harness.results.turns import (
    CONFIRMATION_LOG_NAME,
    NOISE_FLOOR_FILE_NAME,
    baseline_latency,
    noise_floor_events,
    read_comparison,
)
from harness.workers.engines import Engines, WorkerKilled, WorkerSpec
from harness.workers.trial_pool import SpecEngineFactory
from search.space import edges_digest

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
        for number in range(self.rounds):
            if number >= MIN_ROUNDS and time.monotonic() > self._until_s:
                self.rounds = number
                break
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
                earlier = {turn.row: (*turn.discarded_ms, *turn.samples_ms) for turn in first}
                turns = [replace(turn, discarded_ms=(*earlier.get(turn.row, ()), *turn.discarded_ms)) for turn in again]
            yield from (turn for turn in turns if turn.row in self._alive)
        return True

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


TURN_ORDER_SEED = 0  # independent of the seeds of searches
_TurnKey = tuple[int, int, str, int]
"""Build, group, row and round of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Candidates with their baseline, the schedule of their turns, and the log.

    Attributes:
        name: Name in the progress bar and in messages.
        path: Log of the turns; None to keep them in memory only.
        header: Inputs of the comparison as JSON values; a log with another header is archived.
        noise_floor: Known noise floor; the one of the rebuilt baseline is used if it is larger.
        first_build: Number of the first build, above 0 if the log has earlier builds of other rows.
        seconds: Time after which fewer rounds are timed, see `confirm`; only without a log.
    """

    name: str
    baseline: TimedRow
    rows: tuple[TimedRow, ...]
    schedule: TurnSchedule
    path: Path | None = None
    header: dict[str, Any] = field(default_factory=dict)
    noise_floor: float = 0.0
    first_build: int = 0
    seconds: float = math.inf


def run_comparison(
    comparison: PairedComparison, open_engines: EngineFactory, observer: Observer, retry_failed: bool = False
) -> tuple[TurnEvent, ...]:
    """Time the turns that the log does not have yet, and return all turns.

    A log that was made with another header is archived as `NAME.<n>.jsonl`, and the comparison starts anew.

    Args:
        comparison: Candidates, baseline, schedule and log.
        retry_failed: Whether failed rows are timed again, together with the rows that shared their worker.

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    path, header, known = comparison.path, comparison.header, tuple[TurnEvent, ...]()
    if path is not None and stored_path(path) is not None:
        _, line = next(read_lines(path), (0, b""))
        own = dict.fromkeys(("kind", "schema", "log", "id"))  # of the file, not of the comparison
        if line and not json_equal({**parse_json(line), **own}, {**json.loads(json.dumps(header)), **own}):
            with recorded(path):
                restore_lines(path)
                archive_existing(path)
        known = read_comparison(path)
    events = [event for event in known if not (retry_failed and isinstance(event, RowFailure))]
    first, schedule = comparison.first_build, comparison.schedule
    left = _remaining_turns(comparison, events)
    failures: dict[str, list[str]] = {}  # rows with each failure, as every build of a row fails
    title = f"{comparison.name}: {len(comparison.rows)} rows" if comparison.rows else comparison.name
    with _open_log(path, header) as write, observer.work(title, len(left)) as step:
        for timed in confirm(
            comparison.rows,
            comparison.baseline,
            open_engines=open_engines,
            schedule=schedule,
            rng=np.random.default_rng(TURN_ORDER_SEED + first),
            done=[replace(event, build=event.build - first) for event in events if event.build >= first],
            seconds=comparison.seconds,
        ):
            event = replace(timed, build=timed.build + first)
            write(event)
            events.append(event)
            if isinstance(event, RowFailure):
                failure = f"{event.failed.stage}: {event.failed.reason}"
                same = failures.setdefault(failure, [])
                if event.row not in same:
                    observer.say(f"{comparison.name}: {event.row} failed: {f'as {same[0]}' if same else failure}")
                    same.append(event.row)
            for key in _turn_keys(event, schedule.rounds) & left:
                left.discard(key)
                step.advance(f"build {event.build + 1} of {first + schedule.builds}")
    if left:
        made = schedule.rounds - len({number for *_, number in left})
        observer.say(f"{comparison.name}: {made} of {schedule.rounds} rounds, because of the time limit")
    return tuple(events)


@contextmanager
def _open_log(path: Path | None, header: Mapping[str, Any]) -> Iterator[Callable[[TurnEvent], None]]:
    """Yield a function that appends an event to the log, or does nothing without a log."""
    if path is None:
        yield lambda event: None
        return
    with LineLog(path, header) as log, recorded_log(path):
        yield lambda event: log.append(encode_turn_event(event), sync=False)


def warn_if_disturbed(name: str, events: Iterable[TurnEvent], observer: Observer) -> None:
    """Report a comparison in which other processes disturbed more turns than `disturbance_note` allows."""
    if note := disturbance_note(TurnMatrix(events).disturbed_share):
        observer.say(f"{name}: {note}: close other work")


def _remaining_turns(comparison: PairedComparison, done: Iterable[TurnEvent]) -> set[_TurnKey]:
    """Return the turns that are not timed yet; the turns of an unfinished worker are timed again."""
    names, schedule, first = [row.name for row in comparison.rows], comparison.schedule, comparison.first_build
    whole = {
        (build, group, row, number)
        for build in range(first, first + schedule.builds)
        for group, start in enumerate(range(0, max(1, len(names)), MAX_GROUP_ROWS))
        for row in (comparison.baseline.name, TWIN, *names[start : start + MAX_GROUP_ROWS])
        for number in range(schedule.rounds)
    }
    missing = whole.difference(*(_turn_keys(event, schedule.rounds) for event in done))
    again = {key[:2] for key in missing}
    return {key for key in whole if key[:2] in again}


def _turn_keys(event: TurnEvent, rounds: int) -> set[_TurnKey]:
    """Return the turn of an event, or all turns that a row loses with its failure."""
    numbers = range(rounds) if isinstance(event, RowFailure) else (event.round,)
    return {(event.build, event.group, event.row, number) for number in numbers}


NOISE_FLOOR_SCHEDULE = Confirmation(builds=3, rounds=8, samples=3)
NOISY_TURN_SD = 0.02  # standard deviation of log latencies above which candidates are timed in turns with the baseline


def measure_noise_floor(
    open_engines: SpecEngineFactory,
    worker: WorkerSpec,
    model_file: Path,
    backend: Mapping[str, Any],
    folder: Path,
    observer: Observer,
    rows: Sequence[TimedRow] = (),
    seconds: float = math.inf,
) -> tuple[float, tuple[TurnEvent, ...]]:
    """Measure the noise floor of a task, or read it if it was measured before.

    It is the gain of the rebuilt baseline over itself as a share, so 0.02 is a speedup of 1.02; see
    `harness.base.statistics.noise_floor_from_ratios`.

    Args:
        open_engines: Function that opens engines on the machine of the task.
        worker: Specification of the worker.
        model_file: The float model.
        backend: Facts of the benchmarker.
        folder: Folder of the task.
        observer: Receiver of the progress.
        rows: Candidates that are timed in the same builds and rounds.
        seconds: Time after which fewer rounds are timed.

    Returns:
        The noise floor, and the turns of the baseline and the candidates; no turns if the floor was read.

    Raises:
        UserError: The baseline fails, or the floor was measured with another model, runtime or device.
    """
    path = folder / NOISE_FLOOR_FILE_NAME
    basis = {"model_sha256": digest_file(model_file), "backend": dict(backend)}
    if (record := read_matching_record(path, basis)) is not None:
        return float(record["noise_floor"]), ()
    float_model = Candidate(digest=edges_digest(()), edges=(), source=lambda: model_file)
    comparison = PairedComparison(
        name="A/A check and initial placements" if rows else "A/A check",
        baseline=TimedRow(name=FLOAT_ROW, candidate=float_model),
        rows=tuple(rows),
        schedule=NOISE_FLOOR_SCHEDULE,
        seconds=seconds,
    )
    started_s = time.monotonic()
    try:
        events = run_comparison(comparison, lambda: open_engines(worker), observer)
    except UserError as error:
        if not rows:
            raise
        left_s = max(0.0, seconds - (time.monotonic() - started_s))
        # For instance, the memory may not suffice for all rows.
        observer.say(f"{comparison.name}: {error}; the A/A check is repeated without initial placements")
        return measure_noise_floor(open_engines, worker, model_file, backend, folder, observer, (), left_s)
    noise_floor = summarize_turns(events, baseline=FLOAT_ROW).noise_floor
    observer.say(
        f"A/A check before the searches: the float model, rebuilt, differs from itself by up to {noise_floor:.1%} (the "
        "noise floor of the tables also covers the confirmation)"
    )
    warn_if_disturbed(comparison.name, events, observer)
    own = {FLOAT_ROW, TWIN}
    write_record(
        path,
        {
            "noise_floor": noise_floor,
            **basis,
            "events": [json.loads(encode_turn_event(e)) for e in events if e.row in own],
        },
    )
    return noise_floor, events


def reference_latency_if_noisy(
    folder: Path, backend: PluginSpec, interleave: Literal["auto", "always", "never"]
) -> float | None:
    """Return the baseline's latency in milliseconds if candidates are to be timed in turns with it, or None.

    Args:
        folder: Folder of the task.
        backend: Backend; None is returned if it cannot take turns (`interleaved` of
            `harness.plugins.api.Capabilities`).
        interleave: Setting of the experiment. "auto" means in turns if the logarithms of the baseline's turns before
            the searches have a standard deviation above `NOISY_TURN_SD`. The noise floor is no criterion, because it
            comes from paired turns, which are steady even on a machine whose speed changes.
    """
    if not capabilities_of(registry.load_plugin("benchmarker", backend.use)).interleaved:
        return None
    turns_ms = [float(np.median(event.samples_ms)) for event in noise_floor_events(folder) if isinstance(event, Turn)]
    if interleave == "never" or (interleave == "auto" and float(np.std(np.log(turns_ms), ddof=1)) <= NOISY_TURN_SD):
        return None
    return baseline_latency(folder)


def confirm_rows(
    plan: Confirmation,
    open_engines: SpecEngineFactory,
    worker: WorkerSpec,
    table: FinalistSet,
    backend: Mapping[str, Any],
    observer: Observer,
    retry_failed: bool = False,
) -> None:
    """Time the missing turns of the confirmation, and append them to its log.

    If the rows (by the digests of their files), the plan, the number of rows in a worker or the runtime changed, the
    confirmation starts anew, and the old log is archived as `confirmation.<n>.jsonl`.

    Args:
        plan: Numbers of builds, rounds and samples.
        open_engines: Function that opens engines on the machine of the task.
        worker: Specification of the worker.
        table: Exported rows.
        backend: Facts of the benchmarker.
        observer: Receiver of the progress.
        retry_failed: Whether failed rows are timed once more.

    Raises:
        UserError: The baseline fails, or the log cannot be written.
    """
    header = {
        "rows": {row.id: row.sha256 for row in table.rows},
        "plan": plan.model_dump(mode="json", exclude={"candidates"}),  # used only by the final selection
        "group": MAX_GROUP_ROWS,
        "backend": dict(backend),
    }
    timed_rows = {
        row.id: TimedRow(name=row.id, candidate=table.candidate(row), benchmarker=row.benchmarker) for row in table.rows
    }
    comparison = PairedComparison(
        name="confirmation",
        path=table.folder / CONFIRMATION_LOG_NAME,
        header=header,
        baseline=timed_rows.pop(FLOAT_ROW),
        rows=tuple(timed_rows.values()),
        schedule=plan,
    )
    events = run_comparison(comparison, lambda: open_engines(worker), observer, retry_failed)
    warn_if_disturbed(comparison.name, events, observer)
