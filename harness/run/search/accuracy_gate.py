"""Objective of a search: outcomes as scores, and the state of the incumbent during the search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.base.statistics import Interval, median_ci
from harness.measure.records import MAIN_BENCHMARKER, Failed, Measured, Outcome
from harness.plugins.api import Accuracy
from harness.results.search_log import PREDICTED_METRIC, PROXY, Goal
from harness.workers.engines import FIRST_STAGE_EVALUATOR, Engines


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
        mixable: Function that returns `harness.measure.records.Measured.mixable` of a score; None: always "".
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
