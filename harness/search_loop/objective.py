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
        reference: Value of the metric for the float model, on the data that the search scores with.
        higher_is_better: Direction of the metric.
        max_drop: Largest allowed loss in the unit of the metric; None: no bound.
        minimize: "latency", "accuracy" or "pareto"; see `harness.config.objective.Objective`.
        max_latency_ms: Largest allowed latency in ms; None: no bound.
        float_ms: Latency of the float model in ms; None if the objective is latency alone.
    """

    metric: str | None = None
    reference: float = 0.0
    higher_is_better: bool = True
    max_drop: float | None = 0.0
    minimize: Minimize = "latency"
    max_latency_ms: float | None = None
    float_ms: float | None = None

    def loss(self, value: float) -> float:
        """Return the loss of a metric value relative to the float model; negative if the value is better."""
        return self.reference - value if self.higher_is_better else value - self.reference

    def loss_excess(self, loss: float) -> float:
        """Return the amount by which a loss exceeds the bound; 0 without one or within it, up to round-off."""
        over = 0.0 if self.metric is None or self.max_drop is None else loss - self.max_drop
        return over if over > LOSS_ROUND_OFF else 0.0

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return the amount by which the loss exceeds the bound; 0 within the bound, or if the metric is unknown."""
        value = metrics.get(self.metric or "", metrics.get(PREDICTED_METRIC))
        return 0.0 if self.metric is None or value is None else self.loss_excess(self.loss(value))

    def latency_excess_ms(self, latency_ms: float) -> float:
        """Return the milliseconds by which a latency exceeds the bound; 0 within the bound or without one."""
        return 0.0 if self.max_latency_ms is None else max(0.0, latency_ms - self.max_latency_ms)


def encode_goal(goal: Goal) -> dict[str, Any]:
    """Return a goal as JSON values, without fields that older versions lack and that have their defaults."""
    usual = {field.name: field.default for field in fields(Goal)}
    facts = asdict(goal)
    return {name: facts[name] for name in facts if name in _ALWAYS_ENCODED_FIELDS or facts[name] != usual[name]}


_ALWAYS_ENCODED_FIELDS = ("metric", "reference", "higher_is_better", "max_drop")


def score_outcome(outcome: Outcome, goal: Goal) -> Score | Failure:
    """Return the score of an outcome for the searcher, see `score_values`; its standard error includes rebuilds."""
    if isinstance(outcome, Failed):
        return Failure(stage=outcome.stage, reason=outcome.reason)
    return score_values(rebuilt_ci(outcome.samples_ms, outcome.rebuilt_ms), outcome.metrics, goal)


def score_values(latency: Interval, metrics: Mapping[str, float], goal: Goal) -> Score:
    """Return the score of a latency and metrics.

    For a Pareto front, a placement without the metric has no `objectives` and ranks last. If accuracy is minimized, the
    objective is the loss, its prediction if it was not measured, or else the loss of the whole metric.

    Args:
        latency: Median of the samples in milliseconds, see `harness.statistics.rebuilt_ci`.
        metrics: Metrics of the outcome by name.
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
    """Return whether a score violates no bound; False if the goal needs an accuracy that was not measured."""
    return score.violation == 0.0 and not score.assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPlacement:
    """Latency, metric and proxy (None if it was not measured) of a placement whose metric was measured."""

    latency_ms: float
    value: float
    proxy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncumbentState(Interval):
    """Latency of the incumbent in milliseconds, with the placements of the search whose metric was measured.

    Attributes:
        scored: These placements in the order of the proposals, which does not depend on the speed of workers.
    """

    scored: tuple[ScoredPlacement, ...] = ()


def incumbent_state(best: Interval | None, scored: Sequence[ScoredPlacement]) -> Interval | None:
    """Return the latency of the incumbent, together with the placements whose metric was measured, if any."""
    if best is None or not scored:
        return best
    return IncumbentState(value=best.value, low=best.low, high=best.high, scored=tuple(scored))


def scored_placement(outcome: Outcome, goal: Goal) -> ScoredPlacement | None:
    """Return latency, metric and proxy of an outcome, or None if its metric was not measured."""
    if goal.metric is None or not isinstance(outcome, Measured) or goal.metric not in outcome.metrics:
        return None
    return ScoredPlacement(
        latency_ms=median_ci(outcome.samples_ms).value,
        value=outcome.metrics[goal.metric],
        proxy=outcome.metrics.get(PROXY),
    )


MIN_WITNESS_PLACEMENTS = 3
"""Number of measured placements with a better proxy from which the loss of a placement is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyGate:
    """Screening of candidates by accuracy: first by the proxy, then by the metric if the candidate may win.

    Attributes:
        evaluator: Name of the evaluator of the search.
        proxy: Name of a fidelity evaluator (`harness.accuracy.metrics.fidelity.Fidelity`); None: no proxy.
        rejected_loss: Function that tests a score on the first images: it returns the loss if the bound is violated
            with high confidence, so that the other images are not scored, or None; None: all images are scored.
        mixable: Function that returns `harness.records.Measured.mixable` of a score; None: always "".
    """

    goal: Goal = field(default_factory=Goal)
    evaluator: str = MAIN_BENCHMARKER
    proxy: str | None = None
    rejected_loss: Callable[[Accuracy], float | None] | None = None
    mixable: Callable[[Accuracy], str] | None = None

    def latency_to_beat(self, incumbent: Interval | None) -> Interval | None:
        """Return `incumbent` if the objective is latency, so that a candidate must be faster to win; otherwise None."""
        return incumbent if self.goal.minimize == "latency" else None

    def is_feasible(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metrics keep the bound; a metric that was not measured does."""
        return self.goal.violation(metrics) == 0.0

    def evaluate_accuracy(
        self, engines: Engines, handle: int, measured: Measured, incumbent: Interval | None
    ) -> Outcome:
        """Score an engine as far as needed, and return the outcome with its metrics, or the evaluator's failure."""
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
        can_improve = self._can_improve(median_ci(measured.samples_ms).value, loss, incumbent, scored)
        if can_improve and self.rejected_loss is not None:
            early = engines.evaluate(handle, FIRST_STAGE_EVALUATOR)
            if isinstance(early, Failed):
                return early
            rejected = self.rejected_loss(early)
            can_improve, loss = rejected is None, loss if rejected is None else rejected
        if can_improve:
            accuracy = engines.evaluate(handle, self.evaluator)
            if isinstance(accuracy, Failed):
                return accuracy
            metrics, per_item = {**metrics, **accuracy.metrics}, accuracy.per_item
            try:
                mixable = self.mixable(accuracy) if self.mixable else ""
            except ValueError as error:  # a plug-in may return a damaged record
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
        """Return whether a candidate with at least this loss could become the incumbent or enter the Pareto front."""
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
    """Return a lower bound on the loss of a placement from its proxy, or None if there is none.

    The bound is the smallest loss of the `MIN_WITNESS_PLACEMENTS` measured placements whose proxy is next better. There
    is no bound with fewer of them, or if a measured placement with a worse proxy has a smaller loss than they.
    """
    known = [] if proxy is None else [s for s in scored if s.proxy is not None]
    closer = sorted((s.proxy, goal.loss(s.value)) for s in known if s.proxy is not None and s.proxy >= (proxy or 0.0))
    if proxy is None or len(closer) < MIN_WITNESS_PLACEMENTS:
        return None
    least = min(loss for _, loss in closer[:MIN_WITNESS_PLACEMENTS])
    further = [goal.loss(s.value) for s in known if s.proxy is not None and s.proxy < proxy]
    return None if any(loss < least for loss in further) else least
