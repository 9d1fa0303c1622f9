"""Early answers: confirmations of the incumbent on fresh builds while its search runs.

An interrupted run delivers its last early answer; a complete run decides by final selection and confirmation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.config.sections import TurnSchedule
from harness.graph.qdq.qdq_graph import count_pairs
from harness.pipeline.runtime_checker import RuntimeChecker
from harness.progress import Observer
from harness.results_dir.artifacts import FLOAT_ROW
from harness.results_dir.io import explain_write_errors
from harness.runtimes.shape_set import ShapeSet
from harness.search_loop.loop import TrialEvent
from harness.selection.paired_timing import PairedComparison, run_comparison
from harness.task_setup.task import Task
from harness.timing.confirmation import ConfirmationSummary, TimedRow, summarize_turns
from harness.timing.turn_log import TurnEvent
from harness.timing.workers.engines import Engines
from search.space import Placement

SCHEDULE = TurnSchedule(builds=3, rounds=8, samples=3)
MIN_GAIN = 0.02
"""Smallest relative gain of a reading over that of the last answer that triggers a confirmation."""
MAX_SHARE = 0.2
"""Largest share of a search's time that is spent on answers after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyAnswer:
    """Placement that is faster than the float model beyond noise, confirmed while its search runs.

    Attributes:
        file: ONNX file of the placement, in the scratch folder of the task.
        runtime: Description of the benchmarker.
        method: Name of the searcher.
        digest: Digest of the placement.
        pairs: Number of Q/DQ pairs.
        summary: Confirmation with the rows `digest` and "float".
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


class EarlyAnswers:
    """Confirmation of the incumbent after the initial design, and again after each clear improvement.

    Args:
        task: Task of the searches.
        engines: Open engines, idle between two trials.
        open_engines: Function that opens engines in a fresh process.
        checker: Comparison of engines with their files; None if the benchmarker runs no model.
        noise_floor: Relative noise floor measured before the searches; smaller gains are ignored.
        metric: Name of the bounded metric, or None.
        shapes: Shapes at which placements are timed, or None for the shape of the search.
        sink: Function that receives each answer that is better than the last.
        observer: Receiver of the progress.
    """

    def __init__(  # noqa: PLR0913 - what, where and how
        self,
        task: Task,
        engines: Engines,
        open_engines: Callable[[], AbstractContextManager[Engines]],
        *,
        checker: RuntimeChecker | None,
        noise_floor: float,
        metric: str | None,
        shapes: ShapeSet | None,
        sink: AnswerSink,
        observer: Observer,
    ) -> None:
        self._task, self._engines, self._open_engines = task, engines, open_engines
        self._checker, self._metric = checker, metric
        self._shapes = {} if shapes is None else {shape.label: shape.inputs for shape in shapes.shapes}
        self._noise_floor = noise_floor
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
            candidate = None if trial.best_is_float else make_candidate(Placement(trial.asked.choices))
            reading_ms = trial.best_ms
            self._incumbents[method] = reading_ms, candidate
        if initial or trial.resumed or candidate is None or candidate.digest in self._tried:
            return
        if self._is_due(reading_ms):
            self._tried.add(candidate.digest)
            started_s = time.monotonic()
            self._confirm(method, candidate, trial.evaluations, reading_ms)
            self._spent_s += time.monotonic() - started_s

    def _is_due(self, reading_ms: float) -> bool:
        if self._best is None:
            return not self._tried or self._has_time
        return self._has_time and reading_ms * (1 + max(MIN_GAIN, self._noise_floor)) < self._answered_ms

    @property
    def _has_time(self) -> bool:
        return self._spent_s <= MAX_SHARE * (time.monotonic() - self._started_s)

    def _confirm(self, method: str, candidate: Candidate, evaluations: int, reading_ms: float) -> None:
        digest = candidate.digest
        file = self._write(candidate)
        candidate = replace(candidate, source=lambda: file)
        if self._checker is not None and self._checker.check(candidate, name=digest).is_wrong:
            return
        comparison = PairedComparison(
            name="early answer",
            baseline=TimedRow(name=FLOAT_ROW, candidate=self._task.candidate(self._task.space.float_placement())),
            rows=(TimedRow(name=digest, candidate=candidate),),
            schedule=SCHEDULE,
        )
        events = run_comparison(comparison, self._open_engines, self._observer)
        summary = summarize_turns(events, baseline=FLOAT_ROW, noise_floor=self._noise_floor)
        if digest not in summary.rows or not summary.rows[digest].recommended:
            if self._best is None:
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

    def _write(self, candidate: Candidate) -> Path:
        """Write the file to time and deliver; the model of an external searcher already is a file."""
        if not candidate.edges:
            return candidate.source()
        file = self._task.work / "answers" / f"{candidate.digest}.onnx"
        with explain_write_errors(file):
            file.parent.mkdir(exist_ok=True)
            self._task.inserter.export(candidate.edges, file)
        return file
