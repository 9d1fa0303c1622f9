"""Accuracy cost of the parts of a placement: its score compared with that of the placement without each part."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.accuracy.metrics.intervals import drop_estimate
from harness.api import Accuracy
from harness.progress import Observer
from harness.records import Failed
from harness.results_dir.artifacts import ExportedModel
from harness.statistics import Interval
from harness.task_setup.task import Task
from harness.timing.workers.engines import Engines
from harness.verification.accuracy_store import AccuracyStore
from search.space import Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyAblation:
    """Scoring of placements of a task, and the loss of one against another.

    Attributes:
        engines: Engines with the task's evaluator.
        metric: Metric of the evaluator.
    """

    task: Task
    engines: Engines
    observer: Observer
    metric: str
    higher_is_better: bool

    def measure_drops(self, whole: Placement, others: Mapping[str, Placement]) -> dict[str, Interval]:
        """Return the loss of a placement against each of the others that can be scored, in the metric's unit.

        Limits are 95 %, by the paired bootstrap over images; NaN if the evaluator has no results of single images.
        """
        book = AccuracyStore(self.task.work, self.engines, self.observer)
        flat = book.float_score(self.task.model_file)  # an evaluator may have to see the float model first
        found: dict[str, Interval] = {}
        with self.observer.work("accuracy without each pattern", len(others) + 1) as step:
            own = self._score(book, whole, flat)
            step.advance()
            for name, placement in others.items():
                drop = None if own is None else self._drop(self._score(book, placement, flat), own)
                found |= {} if drop is None else {name: drop}
                step.advance()
        return found

    def _score(self, book: AccuracyStore, placement: Placement, flat: Accuracy | Failed) -> Accuracy | None:
        candidate = self.task.candidate(placement)
        row = ExportedModel(id=candidate.digest, file="", sha256=candidate.digest, pairs=len(candidate.edges))
        found = book.score_row(candidate, row) if candidate.edges else flat
        if isinstance(found, Failed):
            logger.warning("%s is not scored: %s: %s", candidate.digest, found.stage, found.reason)
            return None
        return found

    def _drop(self, reference: Accuracy | None, own: Accuracy) -> Interval | None:
        if reference is None:
            return None
        estimate = drop_estimate(reference, own, self.metric, higher_is_better=self.higher_is_better)
        if estimate is not None:
            return estimate.interval
        loss = reference.metrics[self.metric] - own.metrics[self.metric]
        return Interval(value=loss if self.higher_is_better else -loss, low=math.nan, high=math.nan)
