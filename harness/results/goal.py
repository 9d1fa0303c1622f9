"""Goal of a search, and outcomes as scores; `manifest` and journal store the goal as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from harness.base.statistics import Interval, rebuilt_ci, stderr_from_interval
from harness.config.objective import Minimize
from harness.measure.records import Failed, Outcome
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
        latency: Median of the samples in milliseconds, see `harness.base.statistics.rebuilt_ci`.
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
