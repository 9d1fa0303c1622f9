"""Accuracy gate: evaluates only candidates that may still win by their latency and proxy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.records import MAIN_BENCHMARKER, Failed, Measured, Outcome
from harness.search_loop.objective import PREDICTED_METRIC, PROXY, Goal, IncumbentState, ScoredPlacement
from harness.statistics import Interval, median_ci
from harness.timing.workers.engines import Engines

__all__ = ["AccuracyGate", "loss_lower_bound"]

MIN_WITNESS_PLACEMENTS = 3
"""So many placements that are closer to the float model by the proxy bear witness against one that is further away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyGate:
    """Looks at accuracy as far as it takes: first at the proxy, and at the metric where the candidate may win.

    Attributes:
        evaluator: Name of the evaluator that the search scores with.
        proxy: Name of the evaluator of the proxy, a `harness.accuracy.metrics.fidelity.Fidelity`; None: there is none.
    """

    goal: Goal = field(default_factory=Goal)
    evaluator: str = MAIN_BENCHMARKER
    proxy: str | None = None

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
        per_item: tuple[float, ...] = ()
        if self._can_improve(median_ci(measured.samples_ms).value, loss, incumbent, scored):
            accuracy = engines.evaluate(handle, self.evaluator)
            if isinstance(accuracy, Failed):
                return accuracy
            metrics, per_item = {**metrics, **accuracy.metrics}, accuracy.per_item
        elif loss is not None:
            metrics[PREDICTED_METRIC] = (
                self.goal.reference - loss if self.goal.higher_is_better else self.goal.reference + loss
            )
        spent_s = time.monotonic() - started_s if metrics else 0.0
        return replace(measured, metrics=metrics, per_item=per_item, evaluate_s=spent_s)

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
