"""Early answers: confirmations of the incumbent on fresh builds while its search runs.

The initial placements are timed together with the noise floor, so that the first answer needs no comparison of its own.
An interrupted run delivers its last early answer; a complete run decides by final selection and confirmation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.config.experiment import Experiment
from harness.graph.qdq.qdq_graph import count_pairs
from harness.measure.turn_log import TWIN, ConfirmationSummary, TurnEvent, summarize_turns
from harness.plugins.api import Candidate
from harness.results.artifacts import FLOAT_ROW
from harness.run.confirm.confirmation import NOISE_FLOOR_SCHEDULE, PairedComparison, TimedRow, run_comparison
from harness.run.prepare.methods import is_external_searcher, task_for_method
from harness.run.prepare.task import Task
from harness.run.search.loop import TrialEvent
from harness.run.time_limit import TimeLimit
from harness.run.verify.runtime_checker import RuntimeChecker
from harness.runtimes.shape_set import ShapeSet
from harness.workers.engines import Engines
from search.space import Placement

MIN_GAIN = 0.02
"""Smallest relative gain of a reading over that of the last answer that triggers a confirmation."""
MAX_SHARE = 0.2
"""Largest share of a search's time that is spent on answers after the first."""
MAX_INITIAL_ROWS = 4
"""Largest number of initial placements that are timed together with the noise floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyAnswer:
    """Placement that is faster than the float model beyond noise, confirmed while its search runs.

    Attributes:
        file: ONNX file of the placement, in the scratch folder of the task.
        runtime: Description of the benchmarker, with `name`, `version` and `options`.
        method: Name of the searcher.
        digest: Digest of the placement.
        pairs: Number of Q/DQ pairs.
        summary: Confirmation; its rows are named by `digest` and "float".
        events: Turns of the confirmation.
        evaluations: Number of evaluations before the answer.
        metric: Name of the metric whose bound the placement satisfies on the data of the search, or None.
        shapes: Shape of each input by the label of the timed shape; empty unless the task has several shapes.
    """

    task: Task
    file: Path
    runtime: dict[str, Any]
    method: str
    digest: str
    pairs: int
    summary: ConfirmationSummary
    events: Sequence[TurnEvent]
    evaluations: int
    metric: str | None
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Return the confirmed speedup over the float model."""
        return self.summary.rows[self.digest].speedup.value


AnswerSink = Callable[[EarlyAnswer], None]
_NoiseFloorMeasurement = Callable[[Sequence[TimedRow]], tuple[float, tuple[TurnEvent, ...]]]


class InitialTiming(NamedTuple):
    """Noise floor, and the initial placements that were timed with it.

    Attributes:
        noise_floor: Relative noise floor; smaller gains are ignored.
        method: Name of the searcher whose initial placements were timed; "" without one.
        rows: Timed placements; None: the run makes no early answers.
        events: Turns of the baseline and the placements; empty if the noise floor was read from an earlier run.
    """

    noise_floor: float
    method: str
    rows: tuple[TimedRow, ...] | None
    events: tuple[TurnEvent, ...]

    @property
    def share(self) -> float:
        """Return the share of the turns that were not the baseline's or its twin's."""
        timed = len(self.rows or ()) if self.events else 0
        return timed / (timed + 2)


def time_initial_rows(
    experiment: Experiment, task: Task, measure: _NoiseFloorMeasurement, *, answers: bool
) -> InitialTiming:
    """Measure the noise floor together with the first placements from which a search starts.

    Early answers need latency as objective, candidates that can be timed, and one trial at a time.

    Args:
        measure: Function that measures the noise floor in turns with rows, and returns it with the turns, see
            `harness.run.confirm.confirmation.measure_noise_floor`.
        answers: Whether early answers are wanted; without them no placement is timed.
    """
    executor = experiment.executor
    serial = (executor.tasks, executor.searches, executor.workers) == (1, 1, 1)
    answers &= serial and experiment.objective.minimize == "latency" and not task.accuracy_only
    method, rows = "", tuple[TimedRow, ...]()
    for run in task.spec.runs if answers else ():  # the first searcher with initial placements
        own = None if is_external_searcher(run.searcher) else task_for_method(task, run.searcher)
        if own is not None and own.initial_design:
            made = [own.candidate(seed.placement) for seed in own.initial_design]
            quantized = {each.digest: _timed_row(task, each) for each in made if each.edges}
            method, rows = run.searcher.name, tuple(quantized.values())[:MAX_INITIAL_ROWS]
            break
    noise_floor, events = measure(rows)
    if events:  # if they could not be timed with the baseline, its turns are the only ones
        rows = tuple(row for row in rows if any(event.row == row.name for event in events))
    return InitialTiming(noise_floor=noise_floor, method=method, rows=rows if answers else None, events=events)


def _timed_row(task: Task, candidate: Candidate) -> TimedRow:
    """Return the row of a candidate whose file is the one to deliver, written when it is first built.

    A file of an earlier run is replaced: it may be incomplete, or have other scales. The model of an external searcher
    already is a file.
    """

    @cache
    def source() -> Path:
        if not candidate.edges:
            return candidate.source()
        file = task.work / "answers" / f"{candidate.digest}.onnx"
        with explain_write_errors(file):
            file.parent.mkdir(exist_ok=True)
            return task.inserter.export(candidate.edges, file)

    return TimedRow(name=candidate.digest, candidate=replace(candidate, source=source))


class EarlyAnswers:
    """Confirmation of the incumbent after the initial design, and again after each clear improvement.

    Args:
        task: Task of the searches.
        engines: Open engines, idle between two trials.
        open_engines: Function that opens engines in a fresh process.
        checker: Comparison of engines with their files; None if the benchmarker runs no model.
        initial: Noise floor measured before the searches, and the initial placements that were timed with it.
        metric: Name of the bounded metric, or None.
        shapes: Shapes at which placements are timed, or None for the shape of the search.
        limit: Limit on the time of the task, or None.
        sink: Function that receives each answer that is better than the last.
        observer: Receiver of the progress.
    """

    def __init__(
        self,
        task: Task,
        engines: Engines,
        open_engines: Callable[[], AbstractContextManager[Engines]],
        *,
        checker: RuntimeChecker | None,
        initial: InitialTiming,
        metric: str | None,
        shapes: ShapeSet | None,
        limit: TimeLimit | None,
        sink: AnswerSink,
        observer: Observer,
    ) -> None:
        self._task, self._engines, self._open_engines = task, engines, open_engines
        self._checker, self._metric, self._limit = checker, metric, limit
        self._shapes = {} if shapes is None else {shape.label: shape.inputs for shape in shapes.shapes}
        self._noise_floor, self._initial_events = initial.noise_floor, initial.events
        self._initial = {row.name: row for row in initial.rows or ()}
        self._initial_method = initial.method
        self._sink, self._observer = sink, observer
        self._started_s, self._spent_s = time.monotonic(), 0.0
        self._incumbents: dict[str, tuple[float, Candidate | None]] = {}
        self._tried: set[str] = set()
        self._answered_ms = math.inf
        self._best: EarlyAnswer | None = None

    @property
    def note(self) -> str:
        """Return the confirmed speedup as text for the progress line, or "" before the first answer."""
        return "" if self._best is None else f"confirmed {self._best.speedup:.2f}x"

    def required_evaluations(self, design: Sequence[Candidate]) -> int:
        """Return the number of initial candidates up to the early answer made before the search; 0 without one.

        They are evaluated even if the time is up, because only evaluated placements can be finalists. In a run that
        continues, each timed placement counts, as it may have been that answer. With a bound there is none.
        """
        answered = set(self._initial) if not self._initial_events else {self._best.digest} if self._best else set()
        if self._metric is not None:
            answered = set()
        digests = list(dict.fromkeys(each.digest for each in design))
        return max((place for place, digest in enumerate(digests, start=1) if digest in answered), default=0)

    def answer_initial(self) -> None:
        """Deliver the fastest initial placement that is confirmed, before the search.

        Nothing is delivered if a bound needs its accuracy first, or if the noise floor is that of an earlier run.
        """
        if self._metric is not None or not self._initial_events:
            return
        rows = summarize_turns(self._initial_events, baseline=FLOAT_ROW).rows
        faster = [name for name in self._initial if name in rows and rows[name].recommended]
        for name in sorted(faster, key=lambda name: rows[name].speedup.value, reverse=True):
            self._tried.add(name)
            self._confirm(self._initial_method, self._initial[name].candidate, 0, rows[name].latency_ms.value)
            if self._best is not None:
                return

    def consider(
        self, method: str, trial: TrialEvent, make_candidate: Callable[[Placement], Candidate], *, initial: bool
    ) -> None:
        """Confirm the incumbent of a search after a trial if it improved enough and time is left.

        Args:
            method: Name of the searcher.
            trial: The trial that ended.
            make_candidate: Function that makes the candidate of a placement in the space of the search.
            initial: Whether the next trial belongs to the initial design; nothing is confirmed then.
        """
        reading_ms, candidate = self._incumbents.get(method, (math.inf, None))
        if trial.best_ms is not None and trial.best_ms != reading_ms:
            candidate = None if trial.best_is_float else make_candidate(Placement(trial.proposal.choices))
            reading_ms = trial.best_ms
            self._incumbents[method] = reading_ms, candidate
        if initial or trial.resumed or candidate is None or candidate.digest in self._tried:
            return
        improved = reading_ms * (1 + max(MIN_GAIN, self._noise_floor)) < self._answered_ms
        has_time = self._spent_s <= MAX_SHARE * (time.monotonic() - self._started_s)
        if (improved and has_time) if self._best else (has_time or not self._tried):
            self._tried.add(candidate.digest)
            started_s = time.monotonic()
            self._confirm(method, candidate, trial.evaluations, reading_ms)
            self._spent_s += time.monotonic() - started_s

    def _confirm(self, method: str, candidate: Candidate, evaluations: int, reading_ms: float) -> None:
        events: Sequence[TurnEvent]
        row = self._initial.get(candidate.digest) or _timed_row(self._task, candidate)
        digest, file = row.name, row.candidate.source()
        if self._checker is not None and self._checker.check(row.candidate, name=digest).is_wrong:
            return
        if row.name in self._initial and self._initial_events:  # it was timed with the noise floor
            events = [event for event in self._initial_events if event.row in {row.name, FLOAT_ROW, TWIN}]
        else:
            comparison = PairedComparison(
                name="early answer",
                baseline=TimedRow(name=FLOAT_ROW, candidate=self._task.candidate(self._task.space.float_placement())),
                rows=(row,),
                schedule=NOISE_FLOOR_SCHEDULE,
                seconds=math.inf if self._limit is None else self._limit.search_seconds(len(self._task.spec.runs)),
            )
            events = run_comparison(comparison, self._open_engines, self._observer)
        summary = summarize_turns(events, baseline=FLOAT_ROW, noise_floor=self._noise_floor)
        if digest not in summary.rows or not summary.rows[digest].recommended:
            if self._best is None and self._initial_events:  # else an earlier run may have made an answer
                self._observer.say("early answer: no file is faster than the float model beyond noise yet")
            return
        answer = EarlyAnswer(
            task=self._task,
            file=file,
            runtime=dict(self._engines.describe()),
            method=method,
            digest=digest,
            pairs=count_pairs(file),
            summary=summary,
            events=events,
            evaluations=evaluations,
            metric=self._metric,
            shapes=self._shapes,
        )
        if self._best is None or answer.speedup > self._best.speedup:
            self._best, self._answered_ms = answer, reading_ms
            self._sink(answer)
