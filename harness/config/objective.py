"""What a search minimises and within which bounds, as the experiment file says it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from harness.errors import UserError

__all__ = ["Minimize", "Objective", "absolute_bound", "parse_bound", "check_objective"]

Minimize = Literal["latency", "pareto", "accuracy"]
PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?) ?%")
DROP_SUFFIX = "_drop"


def _validate_bound(value: Any) -> float | str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and value >= 0:
        return float(value)
    if isinstance(value, str) and PERCENTAGE.fullmatch(value):
        return value
    raise ValueError("a number from 0, or a share of the float model's such as '1%'")


def parse_bound(text: str) -> float | str:
    """Return a bound that a command line gives: a number, or a share such as "1%".

    Raises:
        ValueError: It is neither.
    """
    try:
        return _validate_bound(float(text))
    except ValueError:
        return _validate_bound(text)


Bound = Annotated[float | str, BeforeValidator(_validate_bound)]


def absolute_bound(bound: float | str, reference: float) -> float:
    """A bound as a number: "1%" is a hundredth of the reference, a number is itself."""
    share = PERCENTAGE.fullmatch(bound) if isinstance(bound, str) else None
    return abs(reference) * float(share[1]) / 100 if share is not None else float(bound)


class Objective(BaseModel):
    """What a search minimises: latency, the loss of accuracy, or both at once.

    Attributes:
        minimize: "latency": alone or within `max_drop`. "pareto": latency and the loss of accuracy, as a front.
            "accuracy": the loss of accuracy, among placements that are as fast as `max_latency` asks.
        max_drop: Largest allowed loss of the metric against the float model, absolute (0.01) or as a share of the
            float model's figure ("1%"). `map_drop: 0.01` says so too, and which metric is meant.
        metric: The metric that is meant; None: the evaluator's own, whatever it is.
        max_latency: For "accuracy": in milliseconds (4.5), or as a share of the float model's latency ("50%").
        halves: Searches score on one half of the evaluator's data and never see the other, on which the finalists
            are scored.
        proxy: So many samples of calibration data every candidate's outputs are compared with the float model's on;
            the metric is left to those that may win by that. 0: the metric for all that are fast enough.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    minimize: Minimize = "latency"
    max_drop: Bound | None = None
    metric: str | None = None
    max_latency: Bound | None = None
    halves: bool = False
    proxy: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _split_metric_drop(cls, value: Any) -> Any:
        """`map_drop: 0.01` is `max_drop: 0.01` with `metric: map`."""
        if not isinstance(value, dict):
            return value
        named = [key for key in value if isinstance(key, str) and key.endswith(DROP_SUFFIX) and key != f"max{DROP_SUFFIX}"]
        if not named:
            return value
        if len(named) > 1 or {f"max{DROP_SUFFIX}", "metric"} & value.keys():
            raise ValueError(f"one bound on one metric, but got {', '.join(k for k in value if 'drop' in str(k))}")
        rest = {key: entry for key, entry in value.items() if key != named[0]}
        return {**rest, f"max{DROP_SUFFIX}": value[named[0]], "metric": named[0].removesuffix(DROP_SUFFIX)}

    @model_validator(mode="after")
    def _check_max_latency(self) -> Objective:
        if (self.minimize == "accuracy") != (self.max_latency is not None):
            raise ValueError("'minimize: accuracy' and 'max_latency' go together: the best accuracy of what is so fast")
        return self

    @property
    def uses_accuracy(self) -> bool:
        """Whether searches look at accuracy at all."""
        return self.minimize != "latency" or self.max_drop is not None


def check_objective(objective: Objective, metric: str | None, model: str) -> None:
    """Refuse an objective that has nothing to go by.

    Args:
        metric: Of the model's evaluator; None where it has none.
        model: What messages call the model.

    Raises:
        UserError: No evaluator where accuracy counts, or one of another metric.
    """
    named = objective.metric
    key = f"{named}_drop" if named is not None else "max_drop"
    if metric is None and objective.uses_accuracy:
        what = f"objective.{key}" if objective.minimize == "latency" else f"objective.minimize: {objective.minimize}"
        raise UserError(f"{what}: model {model!r} has no evaluator whose metric could drop")
    if metric is None and objective.halves:
        raise UserError(f"objective.halves: model {model!r} has no evaluator whose data could be halved")
    if None not in (named, metric) and named != metric:
        raise UserError(
            f"objective.{key}: the evaluator of model {model!r} gives {metric!r}; write {metric}_drop, or max_drop for "
            "whatever metric a model has"
        )
