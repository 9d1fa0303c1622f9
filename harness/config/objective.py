"""Objective of a search and its bounds, as the experiment file gives them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from harness.base.errors import MAX_COUNT, UserError
from harness.config.sections import ConfigSection

Minimize = Literal["latency", "pareto", "accuracy"]
PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?) ?%")
DROP_SUFFIX = "_drop"


def validate_bound(value: Any) -> float | str:
    """Return a bound that is a number from 0, or a percentage.

    Raises:
        ValueError: It is neither.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and value >= 0:
        return float(value)
    if isinstance(value, str) and PERCENTAGE.fullmatch(value):
        return value
    raise ValueError("a number from 0, or a percentage of the float model's such as '1%'")


def parse_bound(text: str) -> float | str:
    """Return a bound from the command line: a number, or a percentage such as "1%".

    Raises:
        ValueError: The text is neither.
    """
    try:
        return validate_bound(float(text))
    except ValueError:
        return validate_bound(text)


Bound = Annotated[float | str, BeforeValidator(validate_bound)]


def absolute_bound(bound: float | str, reference: float) -> float:
    """Return a bound as a number; a percentage is relative to the reference."""
    percentage = PERCENTAGE.fullmatch(bound) if isinstance(bound, str) else None
    return abs(reference) * float(percentage[1]) / 100 if percentage is not None else float(bound)


class Objective(ConfigSection):
    """Objective of a search: latency, loss of accuracy, or both.

    Attributes:
        minimize: "latency": with or without `max_drop`. "pareto": latency and loss of accuracy, as a front. "accuracy":
            loss of accuracy among the placements within `max_latency`.
        max_drop: Largest allowed loss of the metric against the float model, absolute (0.01) or as a percentage of the
            float model's score ("1%"). `map_drop: 0.01` sets the metric as well.
        metric: Name of the metric; None: that of the evaluator.
        max_latency: For "accuracy": in milliseconds (4.5), or as a percentage of the float model's latency ("50%").
        halves: Score searches on one half of the evaluator's data, and finalists on the other half.
        proxy: Number of calibration samples for a proxy metric, the deviation of a candidate's outputs from the float
            model's; the evaluator scores only candidates that may win by the proxy. 0: it scores all fast candidates.
        recover: Under a bound, apply recovery steps and other scales to the fastest placements near it. Files that keep
            the bound are finalists; among equally fast ones, the estimated loss decides.
    """

    minimize: Minimize = "latency"
    max_drop: Bound | None = None
    metric: str | None = None
    max_latency: Bound | None = None
    halves: bool = False
    proxy: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    recover: bool = True

    @model_validator(mode="before")
    @classmethod
    def _split_metric_drop(cls, value: Any) -> Any:
        """Replace `map_drop: 0.01` by `max_drop: 0.01` and `metric: map`."""
        if not isinstance(value, dict):
            return value
        drops = [key for key in value if isinstance(key, str) and key.endswith(DROP_SUFFIX) and key != "max_drop"]
        if not drops:
            return value
        if len(drops) > 1 or {"max_drop", "metric"} & value.keys():
            raise ValueError(f"one bound on one metric, but got {', '.join(k for k in value if 'drop' in str(k))}")
        others = {key: entry for key, entry in value.items() if key != drops[0]}
        return {**others, "max_drop": value[drops[0]], "metric": drops[0].removesuffix(DROP_SUFFIX)}

    @model_validator(mode="after")
    def _check_max_latency(self) -> Objective:
        if (self.minimize == "accuracy") != (self.max_latency is not None):
            raise ValueError("'minimize: accuracy' and 'max_latency' must be given together")
        return self

    @property
    def uses_accuracy(self) -> bool:
        """Return whether searches need scores."""
        return self.minimize != "latency" or self.max_drop is not None

    @property
    def drop_key(self) -> str:
        """Key of the bound in messages, such as "map_drop"."""
        return "max_drop" if self.metric is None else f"{self.metric}{DROP_SUFFIX}"


def check_objective(objective: Objective, metric: str | None, model: str) -> None:
    """Raise `UserError` if a model's evaluator does not fit the objective.

    Args:
        metric: Metric of the evaluator; None: there is no evaluator.
    """
    key = objective.drop_key
    if metric is None and objective.uses_accuracy:
        place = f"objective.{key}" if objective.minimize == "latency" else f"objective.minimize: {objective.minimize}"
        raise UserError(f"{place}: model {model!r} has no evaluator whose metric could drop")
    if metric is None and objective.halves:
        raise UserError(f"objective.halves: model {model!r} has no evaluator whose data could be halved")
    if None not in (objective.metric, metric) and objective.metric != metric:
        raise UserError(
            f"objective.{key}: the evaluator of model {model!r} gives {metric!r}; write {metric}_drop, or max_drop for "
            "the metric of each model"
        )
