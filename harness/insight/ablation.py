"""Ablation of a placement: latency and accuracy without each part, and the smallest placement with the same gain."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.accuracy.metrics.intervals import drop_estimate
from harness.base.progress import Observer
from harness.base.statistics import MIN_CLAIMED_GAIN, Interval, noise_floor_from_ratios
from harness.config.sections import Confirmation
from harness.measure.records import Failed
from harness.measure.turn_log import TWIN, TurnMatrix
from harness.measure.turn_statistics import ConfirmationSummary, summarize_turns
from harness.plugins.api import Accuracy, Candidate
from harness.results.artifacts import ExportedModel
from harness.results.task_files import MeasuredStep
from harness.run.confirm.paired_timing import PairedComparison, run_comparison
from harness.run.confirm.rounds import EngineFactory, TimedRow
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.task import Task
from harness.workers.engines import Engines
from search.space import Placement, Space

WHOLE_PLACEMENT = "whole"
MAX_ELIMINATION_TESTS = 150  # placements that the search for the fewest points may build


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationTiming:
    """Latency of a placement relative to the whole one.

    Attributes:
        ratio: Latency over that of the whole placement; None if it could not be timed.
        reason: Why it could not be timed, or "".
        noise_floor: Relative loss of speed that noise explains in its step.
        tolerance: Largest relative loss of a placement that keeps the speed: the noise floor of its step, or the median
            of the steps until then if that is smaller, so that a disturbed step does not accept slow placements.
    """

    ratio: Interval | None = None
    reason: str = ""
    noise_floor: float = MIN_CLAIMED_GAIN
    tolerance: float = MIN_CLAIMED_GAIN

    @property
    def keeps_speed(self) -> bool:
        """Return whether the placement is as fast as the whole one within noise."""
        return self.ratio is not None and self.ratio.value <= 1 + self.tolerance


@dataclass(slots=True, kw_only=True)
class AblationTimer:
    """Timer of placements in turns with the whole placement, on fresh builds like a confirmation.

    Attributes:
        steps: Measured steps so far.
        whole_ms: Latency of the whole placement by the first readings; None before.
    """

    space: Space
    whole: Placement
    candidate: Callable[[Placement], Candidate]
    open_engines: EngineFactory
    plan: Confirmation
    observer: Observer
    steps: list[MeasuredStep] = field(default_factory=list)
    whole_ms: float | None = None

    @property
    def noise_floor(self) -> float:
        """Return the median noise floor of the steps, on which a disturbed step has no influence."""
        return float(np.median([step.noise_floor for step in self.steps]))

    def time(self, placements: Mapping[str, Placement], title: str) -> dict[str, AblationTiming]:
        """Return the timing of each placement by name, or why it failed; those of the same graph are timed once.

        The results are appended to `steps` under `title`.
        """
        whole_digest = self.space.digest(self.whole)
        digests = {name: self.space.digest(placement) for name, placement in placements.items()}
        tested = {digests[name]: placement for name, placement in placements.items() if digests[name] != whole_digest}
        summary, aa_ratios = self._confirm(tested, title)
        floor = max(MIN_CLAIMED_GAIN, noise_floor_from_ratios(aa_ratios))
        same = AblationTiming(ratio=Interval(value=1.0, low=1.0, high=1.0))
        timed = {digest: _read_timing(summary, digest) for digest in tested}
        found = {name: timed.get(digest, same) for name, digest in digests.items()}
        ratios = {name: timing.ratio for name, timing in found.items() if timing.ratio is not None}
        self.steps.append(MeasuredStep(title=title, noise_floor=floor, aa_ratios=tuple(aa_ratios), ratios=ratios))
        tolerance = min(floor, self.noise_floor)
        return {name: replace(timing, noise_floor=floor, tolerance=tolerance) for name, timing in found.items()}

    def _confirm(self, placements: Mapping[str, Placement], title: str) -> tuple[ConfirmationSummary, list[float]]:
        """Return the summary, and the latency ratio of the whole placement and its twin for each build."""
        comparison = PairedComparison(
            name=title,
            baseline=TimedRow(name=WHOLE_PLACEMENT, candidate=self.candidate(self.whole)),
            rows=tuple(TimedRow(name=digest, candidate=self.candidate(each)) for digest, each in placements.items()),
            schedule=self.plan,
        )
        events = run_comparison(comparison, self.open_engines, self.observer)
        summary = summarize_turns(events, baseline=WHOLE_PLACEMENT)
        own, twins = TurnMatrix(events).paired_samples(TWIN, WHOLE_PLACEMENT)
        aa_ratios = [float(np.median(np.divide(one, two))) for one, two in zip(own, twins, strict=True)]
        if self.whole_ms is None and WHOLE_PLACEMENT in summary.rows:
            self.whole_ms = summary.rows[WHOLE_PLACEMENT].latency_ms.value
        return summary, aa_ratios


def _read_timing(summary: ConfirmationSummary, digest: str) -> AblationTiming:
    if digest in summary.failed:
        failed = summary.failed[digest]
        return AblationTiming(reason=f"{failed.stage}: {failed.reason}")
    row = summary.rows.get(digest)
    if row is None or row.builds_ok < 2:
        return AblationTiming(reason="no readings")
    speedup = row.speedup
    ratio = Interval(value=1 / speedup.value, low=1 / speedup.high, high=1 / speedup.low)
    return AblationTiming(ratio=ratio)


def quantized(placement: Placement) -> list[int]:
    """Return the dimensions that a placement quantizes."""
    return [index for index, choice in enumerate(placement.choices) if choice]


def without(placement: Placement, indices: Sequence[int]) -> Placement:
    """Return the placement with these dimensions at float."""
    removed = set(indices)
    return Placement(tuple(0 if index in removed else choice for index, choice in enumerate(placement.choices)))


def backward_elimination(bench: AblationTimer, order: Sequence[int]) -> tuple[list[Placement], int]:
    """Return placements with fewer and fewer quantized dimensions that are as fast as the whole one within noise.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on
    Software Engineering 28, 2002): ever smaller chunks are left out; those that can be left out alone are left out
    together if that holds too, else the one that costs least. All tests of a step are timed in turns with the whole
    placement, so that small losses do not accumulate. As the best of many noisy tests are selected by chance, too, the
    results must be timed again together before they are reported.

    Args:
        order: The dimensions, least valuable first, so that early chunks consist of useless ones.

    Returns:
        The placements, the whole one first, and the number of placements built to find them.
    """
    kept, chunks, tests = list(order), min(8, len(order)), 0
    steps = [bench.whole]
    while kept and tests < MAX_ELIMINATION_TESTS:
        parts = [part.tolist() for part in np.array_split(kept, chunks) if len(part)]
        timings = _test_removals(bench, kept, parts)
        tests += len(parts)
        free = [(part, timing) for part, timing in zip(parts, timings, strict=True) if timing.keeps_speed]
        if len(free) > 1:
            together = [index for part, _ in free for index in part]
            tests += 1
            (joint,) = _test_removals(bench, kept, [together])
            free = [(together, joint)] if joint.keeps_speed else free
        if free:
            best = min((-len(part), _cost(timing), part) for part, timing in free)[-1]
            kept = [index for index in kept if index not in set(best)]
            steps.append(without(bench.whole, [index for index in order if index not in set(kept)]))
            chunks = min(max(2, chunks - 1), len(kept)) or 1
        elif chunks >= len(kept):
            break
        else:
            chunks = min(2 * chunks, len(kept))
    return steps, tests


def _test_removals(bench: AblationTimer, kept: Sequence[int], parts: Sequence[Sequence[int]]) -> list[AblationTiming]:
    """Return the timing after the removal of each part."""
    gone = [index for index in quantized(bench.whole) if index not in set(kept)]
    names = [", ".join(bench.space.dimensions[index].name for index in part) for part in parts]
    placements = {name: without(bench.whole, [*gone, *part]) for name, part in zip(names, parts, strict=True)}
    timed = bench.time(placements, f"fewest points, {len(kept)} left")
    return [timed[name] for name in names]


def _cost(timing: AblationTiming) -> float:
    return math.inf if timing.ratio is None else timing.ratio.value


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyAblation:
    """Scoring of placements of a task, and the loss of one against another.

    Attributes:
        metric: Name of the metric in `harness.plugins.api.Accuracy.metrics`.
        higher_is_better: Direction of the metric.
    """

    task: Task
    engines: Engines
    observer: Observer
    metric: str
    higher_is_better: bool

    def measure_drops(self, whole: Placement, others: Mapping[str, Placement]) -> dict[str, Interval]:
        """Return the loss of a placement against each of the others that can be scored, in the metric's unit.

        A loss is positive if `whole` is worse, for any direction of the metric; there is none if `whole` cannot be
        scored. Limits are 95 %, by the paired bootstrap over images; NaN without results of single images.
        """
        book = AccuracyStore(self.task.work, self.engines, self.observer)
        flat = book.float_score(self.task.model_file)  # some evaluators must be prepared with the float model
        found: dict[str, Interval] = {}
        with self.observer.work("accuracy without each pattern", len(others) + 1) as step:
            reference = self._score(book, whole, flat)
            step.advance()
            for name, placement in others.items():
                drop = None if reference is None else self._drop(self._score(book, placement, flat), reference)
                found |= {} if drop is None else {name: drop}
                step.advance()
        return found

    def _score(self, book: AccuracyStore, placement: Placement, flat: Accuracy | Failed) -> Accuracy | None:
        candidate = self.task.candidate(placement)
        row = ExportedModel(id=candidate.digest, file="", sha256=candidate.digest, pairs=len(candidate.edges))
        score = book.score_row(candidate, row) if candidate.edges else flat
        if isinstance(score, Failed):
            logger.warning("%s is not scored: %s: %s", candidate.digest, score.stage, score.reason)
            return None
        return score

    def _drop(self, reference: Accuracy | None, own: Accuracy) -> Interval | None:
        if reference is None:
            return None
        estimate = drop_estimate(reference, own, self.metric, higher_is_better=self.higher_is_better)
        if estimate is not None:
            return estimate.interval
        loss = reference.metrics[self.metric] - own.metrics[self.metric]
        return Interval(value=loss if self.higher_is_better else -loss, low=math.nan, high=math.nan)
