"""Checks and descriptions of the bound on the loss of accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.base.errors import UserError
from harness.base.statistics import Interval
from harness.config.experiment import Experiment
from harness.config.sections import Objective, absolute_bound
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Accuracy
from harness.results.folder import TaskResults
from harness.results.scores import (
    METRIC_CAPS,
    METRIC_FORMATS,
    UNIT_INTERVAL_METRICS,
    format_drop,
    metric_name,
)
from harness.results.search_log import Goal

IMAGE_COUNT_METRICS = frozenset({"top1", "top5"})
"""Metrics that count images: each image is right or wrong, so one of n images changes the metric by 1/n."""
QUESTIONED_BOUND = 0.1
"""Largest bound, in a metric up to 1, that is not questioned."""
HALF_WIDTHS: Mapping[str, float] = {"map": 0.1, "miou": 0.12, "agreement": 0.36, "top1": 0.36, "top5": 0.36}
"""Typical half of the 95 % interval of a loss, times the root of the number of images; medians of our tables."""


def check_bound(objective: Objective, metric: str | None, model: str) -> None:
    """Raise an error for a bound without effect, such as 1 for a metric up to 1, which probably means one point.

    Args:
        metric: Metric of the model's evaluator; None without an evaluator.
        model: Name of the model in the message.

    Raises:
        UserError: The bound allows the loss of the whole range of a metric with a largest value, or of one in dB.
    """
    bound = objective.max_drop
    key = objective.drop_key
    most = METRIC_CAPS.get(metric or "")
    if bound is not None and most is not None and absolute_bound(bound, most) >= most:
        raise UserError(
            f"objective.{key}: {_format_bound(bound)} asks for {metric_name(metric)} of "
            f"{most - absolute_bound(bound, most):g} dB of model {model!r}; at 0 dB the error is as large as the "
            f"outputs, so it has no effect: the float model has {most:g} dB, and max_drop: {most - 35:g} keeps 35 dB"
        )
    if bound is None or metric not in UNIT_INTERVAL_METRICS or absolute_bound(bound, 1.0) < 1.0:
        return
    raise UserError(
        f"objective.{key}: {_format_bound(bound)} lets {metric_name(metric)} of model {model!r} drop to 0, so it "
        "has no effect; 0.01 is one point of a hundred, '1%' a hundredth of the float model's figure"
    )


def loose_bound_note(objective: Objective, metric: str | None) -> str:
    """Return a note if a bound is looser than `QUESTIONED_BOUND`, as if it were given in points; else ""."""
    bound = objective.max_drop
    if metric not in UNIT_INTERVAL_METRICS or not isinstance(bound, float) or bound <= QUESTIONED_BOUND:
        return ""
    return (
        f"objective.{objective.drop_key}: {bound:g} allows a loss of {100 * bound:g} points of {metric_name(metric)}; "
        f"{bound / 100:g} allows {bound:g}"
    )


def bound_resolution_note(objective: Objective, metric: str | None, images: int) -> str:
    """Return a note if the images cannot resolve the bound, else "".

    That is so if one wrong image exceeds it, or if it is less than half of the typical uncertainty of a loss, so that
    one in six files without any loss exceeds it. There is no note for a bound of 0, which allows no loss.

    Args:
        metric: Metric of the model's evaluator.
        images: Number of scored images; 0 if it is unknown.
    """
    bound = objective.max_drop
    most = 0.0 if bound is None else absolute_bound(bound, 1.0)
    if not most or not images or metric is None or metric not in HALF_WIDTHS:
        return ""
    if metric in IMAGE_COUNT_METRICS and 1 / images > most:
        return (
            f"one sample of {images} is {1 / images:.4f}, more than the bound {_format_bound(bound)}: a row that loses "
            "one exceeds it; use more samples, or a looser bound"
        )
    width = HALF_WIDTHS[metric] / math.sqrt(images)
    if most >= width / 2:
        return ""
    return (
        f"with {images} samples a loss of {metric_name(metric)} is known to about ±{width:.3f}, so the bound "
        f"{_format_bound(bound)} may reject files that lose nothing; use about {(HALF_WIDTHS[metric] / most) ** 2:.0f} "
        "samples, or a looser bound"
    )


def bound_lines(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each accuracy bound, with the models that share it; none for models without an evaluator."""
    found: dict[str, list[str]] = {}
    for model in experiment.models:
        if model.evaluator is not None:
            evaluator: Any = registry.load_plugin("evaluator", model.evaluator.use)
            words = _describe_bound(experiment.objective, evaluator.metric, evaluator.higher_is_better)
            found.setdefault(words, []).append(model.name)
    for words, names in found.items():
        yield f"bound: {words}" if len(found) == 1 else f"bound of {', '.join(names)}: {words}"


def bound_status(
    bound: float | str, reference: Accuracy | Failed, found: Accuracy | Failed, results: TaskResults
) -> tuple[bool, str]:
    """Return whether a model keeps a bound on the loss of accuracy, and a text with the figures or the missing score.

    Args:
        bound: Bound in the form of `objective.max_drop`.
        reference: Accuracy of the float model, or the failure of its evaluation.
        found: Accuracy of the model, or the failure of its evaluation.
        results: Results of the task, with the metric and its direction.
    """
    metric = results.metric or ""
    values = []
    for accuracy in (reference, found):
        value = accuracy.metrics.get(metric, math.nan) if isinstance(accuracy, Accuracy) else math.nan
        if not math.isfinite(value):
            why = f"there is no {metric}" if isinstance(accuracy, Accuracy) else f"{accuracy.stage}: {accuracy.reason}"
            return False, f"cannot be checked against {bound}: {why}"
        values.append(value)
    base, value = values
    limit = absolute_bound(bound, base)
    goal = Goal(metric=metric, reference=base, higher_is_better=results.higher_is_better, max_drop=limit)
    loss = goal.loss(value)
    within = goal.loss_excess(loss) == 0
    shown = f"drop {format_drop(Interval(value=loss, low=math.nan, high=math.nan), metric)}"
    if metric in METRIC_CAPS:  # a drop from a capped score is meaningless
        shown, limit = f"{metric_name(metric)} {value:.1f}", base - limit
    text = f"{shown} now, {'within' if within else 'beyond'} the bound {limit:g}"
    if results.blind:
        return False, f"{text}; the float model itself scores {base:.4f}, so the drop is meaningless"
    return within, text


def _describe_bound(objective: Objective, metric: str, higher_is_better: bool) -> str:
    bound, name = objective.max_drop, metric_name(metric)
    if bound is None:
        return f"none; {name} is scored without a bound"
    if metric in METRIC_CAPS and not isinstance(bound, str):
        return (
            f"{name} has to be {METRIC_CAPS[metric] - bound:g} dB or more, for the float model's own counts as "
            f"{METRIC_CAPS[metric]:g}; INT8 has 20 to 50 dB as a rule"
        )
    return f"{name} may {'drop' if higher_is_better else 'rise'} by at most {_format_drop(bound, metric)}"


def _format_drop(bound: float | str, metric: str) -> str:
    if isinstance(bound, str):
        return f"{bound} of the float model's own"
    if metric not in UNIT_INTERVAL_METRICS:
        return f"{bound:g}{METRIC_FORMATS.get(metric, ('', 4, ''))[2]}"
    points = f"{100 * bound:g}"
    return f"{bound:g} ({points} point{'' if points == '1' else 's'})"


def _format_bound(bound: float | str | None) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
