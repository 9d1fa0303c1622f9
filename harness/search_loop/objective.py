"""Objective of a search: outcomes as scores, and the state of the incumbent during the search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from harness.api import Accuracy
from harness.config.objective import Minimize
from harness.records import MAIN_BENCHMARKER, Failed, Measured, Outcome
from harness.statistics import Interval, median_ci, rebuilt_ci, stderr_from_interval
from harness.timing.workers.engines import FIRST_STAGE_EVALUATOR, Engines
from search.api import Failure, Score

PROXY = "proxy_sqnr_db"
"""Name of the proxy among an outcome's metrics: fidelity on a few samples, larger is closer to the float model."""
PREDICTED_METRIC = "believed"
"""Name of the best metric value that the proxy allows, in outcomes without a measured metric."""

LOSS_ROUND_OFF = 1e-9
"""One image of a hundred is 0.01, though 0.76 less 0.75 is a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Objective of a search: latency, the loss of a metric, or both, with bounds.

    Attributes:
        metric: Name of the metric that is bounded or minimised; None: latency alone.
        reference: The float model's value of it, on the data that the search scores with.
        higher_is_better: Direction of the metric.
        max_drop: Largest allowed loss, in the metric's unit; None: any.
        minimize: See `harness.config.objective.Objective`.
        max_latency_ms: Slowest allowed latency; None: any.
        float_ms: Latency of the float model, where something is measured against it.
    """

    metric: str | None = None
    reference: float = 0.0
    higher_is_better: bool = True
    max_drop: float | None = 0.0
    minimize: Minimize = "latency"
    max_latency_ms: float | None = None
    float_ms: float | None = None

    def loss(self, value: float) -> float:
        """Return the loss of a metric value against the float model."""
        return self.reference - value if self.higher_is_better else value - self.reference

    def loss_excess(self, loss: float) -> float:
        """Return by how much a loss exceeds the bound; 0 if it holds, up to round-off."""
        over = 0.0 if self.metric is None or self.max_drop is None else loss - self.max_drop
        return over if over > LOSS_ROUND_OFF else 0.0

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return by how much the loss exceeds the bound; 0 if it holds or the metric is unknown."""
        value = metrics.get(self.metric or "", metrics.get(PREDICTED_METRIC))
        return 0.0 if self.metric is None or value is None else self.loss_excess(self.loss(value))

    def latency_excess_ms(self, latency_ms: float) -> float:
        """Return by how much a latency exceeds the bound in milliseconds; 0 if it holds."""
        return 0.0 if self.max_latency_ms is None else max(0.0, latency_ms - self.max_latency_ms)


def encode_goal(goal: Goal) -> dict[str, Any]:
    """Return a goal as JSON; keys that a latency-only goal does not need are omitted."""
    usual = {field.name: field.default for field in fields(Goal)}
    facts = asdict(goal)
    return {name: facts[name] for name in facts if name in _ALWAYS_ENCODED_FIELDS or facts[name] != usual[name]}


_ALWAYS_ENCODED_FIELDS = ("metric", "reference", "higher_is_better", "max_drop")


def score_outcome(outcome: Outcome, goal: Goal) -> Score | Failure:
    """Return an outcome as a searcher's score, see `score_values`; rebuilds give the standard error."""
    if isinstance(outcome, Failed):
        return Failure(stage=outcome.stage, reason=outcome.reason)
    return score_values(rebuilt_ci(outcome.samples_ms, outcome.rebuilt_ms), outcome.metrics, goal)


def score_values(latency: Interval, metrics: Mapping[str, float], goal: Goal) -> Score:
    """Return the score of a latency and metrics.

    A front needs both coordinates: a placement without the metric has one and ranks last. If accuracy is the objective,
    the value is the loss or, while it is unknown, the largest loss possible.

    Args:
        latency: Median of the samples in milliseconds, see `harness.statistics.rebuilt_ci`.
        metrics: Of the outcome.
    """
    latency_ms, value = latency.value, metrics.get(goal.metric or "")
    violation = goal.violation(metrics) + goal.latency_excess_ms(latency_ms)
    objective, stderr = latency_ms, stderr_from_interval(latency)
    objectives: tuple[float, ...] = ()
    if goal.minimize == "pareto" and value is not None:
        objectives = (latency_ms, goal.loss(value))
    if goal.minimize == "accuracy":
        known = metrics.get(PREDICTED_METRIC) if value is None else value
        objective, stderr = abs(goal.reference) if known is None else goal.loss(known), 0.0
    return Score(
        objective=objective,
        stderr=stderr,
        violation=violation,
        assumed=goal.metric is not None and value is None and not violation,
        metrics=dict(metrics),
        objectives=objectives,
    )


def is_feasible(score: Score) -> bool:
    """Return whether a score may be the incumbent's: its accuracy was checked if it counts, and every bound holds."""
    return score.violation == 0.0 and not score.assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPlacement:
    """A placement whose metric was measured.

    Attributes:
        proxy: None where none was taken.
    """

    latency_ms: float
    value: float
    proxy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncumbentState(Interval):
    """The incumbent's latency in milliseconds, and what the search has learned of accuracy on its way.

    Attributes:
        scored: In the order of the tells, so that it depends on what was asked alone.
    """

    scored: tuple[ScoredPlacement, ...] = ()


def incumbent_state(best: Interval | None, scored: Sequence[ScoredPlacement]) -> Interval | None:
    """Return the incumbent with its known accuracy."""
    if best is None or not scored:
        return best
    return IncumbentState(value=best.value, low=best.low, high=best.high, scored=tuple(scored))


def scored_placement(outcome: Outcome, goal: Goal) -> ScoredPlacement | None:
    """Return the accuracy information of an outcome, or None if it has none."""
    if goal.metric is None or not isinstance(outcome, Measured) or goal.metric not in outcome.metrics:
        return None
    return ScoredPlacement(
        latency_ms=median_ci(outcome.samples_ms).value,
        value=outcome.metrics[goal.metric],
        proxy=outcome.metrics.get(PROXY),
    )


MIN_WITNESS_PLACEMENTS = 3
"""Number of placements closer to the float model by the proxy that suffice to exclude one further away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyGate:
    """Looks at accuracy as far as it takes: first at the proxy, and at the metric where the candidate may win.

    Attributes:
        evaluator: Name of the evaluator that the search scores with.
        proxy: Name of the evaluator of the proxy, a `harness.accuracy.metrics.fidelity.Fidelity`; None: there is none.
        rejected_loss: Returns the loss on the images of `FIRST_STAGE_EVALUATOR` if it is beyond the bound with a stated
            error, so that the others are not scored, else None; None: all images are scored.
        mixable: Returns what the journal keeps of a score as `harness.records.Measured.mixable`, usually "".
    """

    goal: Goal = field(default_factory=Goal)
    evaluator: str = MAIN_BENCHMARKER
    proxy: str | None = None
    rejected_loss: Callable[[Accuracy], float | None] | None = None
    mixable: Callable[[Accuracy], str] | None = None

    def latency_to_beat(self, incumbent: Interval | None) -> Interval | None:
        """Return the latency that a candidate must beat, or None if latency alone does not decide."""
        return incumbent if self.goal.minimize == "latency" else None

    def is_feasible(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics satisfy the accuracy bound; a candidate that violates it cannot win."""
        return self.goal.violation(metrics) == 0.0

    def evaluate_accuracy(
        self, engines: Engines, handle: int, measured: Measured, incumbent: Interval | None
    ) -> Outcome:
        """Return the candidate with its accuracy; an evaluator that fails makes it a failure."""
        if self.goal.metric is None:
            return measured
        started_s = time.monotonic()
        metrics: dict[str, float] = {}
        if self.proxy is not None:
            closeness = engines.evaluate(handle, self.proxy)
            if isinstance(closeness, Failed):
                return closeness
            metrics[PROXY] = closeness.metrics["sqnr_db"]
        scored = incumbent.scored if isinstance(incumbent, IncumbentState) else ()
        loss = loss_lower_bound(scored, metrics.get(PROXY), self.goal)
        per_item, mixable = tuple[float, ...](), ""
        wanted = self._can_improve(median_ci(measured.samples_ms).value, loss, incumbent, scored)
        if wanted and self.rejected_loss is not None:
            early = engines.evaluate(handle, FIRST_STAGE_EVALUATOR)
            if isinstance(early, Failed):
                return early
            rejected = self.rejected_loss(early)
            wanted, loss = rejected is None, loss if rejected is None else rejected
        if wanted:
            accuracy = engines.evaluate(handle, self.evaluator)
            if isinstance(accuracy, Failed):
                return accuracy
            metrics, per_item = {**metrics, **accuracy.metrics}, accuracy.per_item
            try:
                mixable = self.mixable(accuracy) if self.mixable else ""
            except ValueError as error:  # of an evaluator that is a plug-in
                return Failed(stage="evaluate", reason=str(error))
        elif loss is not None:
            metrics[PREDICTED_METRIC] = (
                self.goal.reference - loss if self.goal.higher_is_better else self.goal.reference + loss
            )
        spent_s = time.monotonic() - started_s if metrics else 0.0
        return replace(measured, metrics=metrics, per_item=per_item, mixable=mixable, evaluate_s=spent_s)

    def _can_improve(
        self, latency_ms: float, loss: float | None, incumbent: Interval | None, scored: Sequence[ScoredPlacement]
    ) -> bool:
        """Return whether a candidate with this minimum loss could become the incumbent or enter the front."""
        goal = self.goal
        if loss is not None and goal.loss_excess(loss) > 0:
            return False
        if goal.minimize == "latency":
            return incumbent is None or latency_ms < incumbent.value
        best = 0.0 if loss is None else loss
        if goal.minimize == "pareto":
            return not any(s.latency_ms <= latency_ms and goal.loss(s.value) <= best for s in scored)
        if goal.latency_excess_ms(latency_ms):
            return False
        return loss is None or not any(
            goal.loss(s.value) <= loss and not goal.latency_excess_ms(s.latency_ms) for s in scored
        )


def loss_lower_bound(scored: Sequence[ScoredPlacement], proxy: float | None, goal: Goal) -> float | None:
    """Return the smallest loss that the proxy score allows, or None if it allows no conclusion.

    The proxy is taken at its word where it has kept it so far: of those that are closer to the float model by it, the
    `MIN_WITNESS_PLACEMENTS` next ones must be known, and none that is further away than this placement may have lost
    less than they.
    """
    known = [] if proxy is None else [s for s in scored if s.proxy is not None]
    closer = sorted((s.proxy, goal.loss(s.value)) for s in known if s.proxy is not None and s.proxy >= (proxy or 0.0))
    if proxy is None or len(closer) < MIN_WITNESS_PLACEMENTS:
        return None
    least = min(loss for _, loss in closer[:MIN_WITNESS_PLACEMENTS])
    further = [goal.loss(s.value) for s in known if s.proxy is not None and s.proxy < proxy]
    return None if any(loss < least for loss in further) else least
