"""Set-up of the evaluators of a task: on all data or its halves, the proxy, and the objective of the searches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.accuracy.metrics.base import likely_causes, low_reference_warning
from harness.accuracy.metrics.intervals import metric_estimate, probability_within
from harness.base.errors import UserError
from harness.base.files import facts_digest
from harness.base.statistics import Interval
from harness.config.experiment import Experiment
from harness.config.sections import ModelSpec, Objective, PluginSpec, absolute_bound, check_objective
from harness.graph.model import Model
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Accuracy
from harness.results.cross_fitting import losses_on_other_folds
from harness.results.folder import TaskResults
from harness.results.scores import (
    METRIC_CAPS,
    METRIC_FORMATS,
    UNIT_INTERVAL_METRICS,
    format_drop,
    format_score,
    metric_name,
)
from harness.results.search_log import Goal
from harness.results.turns import baseline_latency
from harness.run.prepare.accuracy_store import AccuracyStore
from harness.run.prepare.model_loader import evaluator_spec
from harness.run.search.trial import AccuracyGate
from harness.workers.engines import FIRST_STAGE_EVALUATOR

SEARCH_EVALUATOR = "search"
"""Name of the evaluator of the searches, if it differs from that of the finalists."""
PROXY_EVALUATOR = "proxy"
MIN_STAGE_IMAGES = 30
"""Smallest number of images of the first stage."""
MAX_STAGE_STEP = 4
"""The first stage has at least every n-th image of the search, with this n."""
EXPECTED_WITHIN = 0.02
"""Difference from the expected score that is accepted: two points, of another metric a share of the expected score."""
MAX_FALSE_REJECTION = 0.01
"""Largest probability to keep the bound at which the first stage rejects a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Evaluators of a task and their data.

    Attributes:
        evaluators: Evaluators by name. `MAIN_BENCHMARKER` scores the finalists, `SEARCH_EVALUATOR` the candidates of
            searches on their half of the data, `FIRST_STAGE_EVALUATOR` their first images, `PROXY_EVALUATOR` is the
            proxy. Empty without an evaluator.
        metric: Metric of the evaluator; None without an evaluator.
        facts: Settings on which the scores of the searches depend, for the fingerprint.
        data: Digest of the data by name of the evaluator, if it reports one; part of the fingerprint too.
        expect: Known score of the float model; None: unknown, 0: unchecked.
    """

    objective: Objective
    evaluators: Mapping[str, PluginSpec]
    metric: str | None
    higher_is_better: bool
    facts: Mapping[str, Any]
    data: Mapping[str, str] = field(default_factory=dict)
    expect: float | None = None

    @property
    def search_evaluator(self) -> str:
        """Return the name of the evaluator of the searches."""
        return SEARCH_EVALUATOR if SEARCH_EVALUATOR in self.evaluators else MAIN_BENCHMARKER

    @property
    def cross_fitted(self) -> bool:
        """Return whether cross-fitting estimates the loss of the selected placement.

        That is so if there is a bound on the loss, and the data are not divided into one half for the searches and one
        for the finalists.
        """
        return self.objective.max_drop is not None and not self.objective.halves

    def goal(self, store: AccuracyStore, model_file: Path, folder: Path) -> Goal:
        """Return the goal of the searches; score the float model, the reference of losses, if it has no score.

        The goal is latency alone if there is no evaluator, or the objective does not use accuracy. The observer of the
        store gets the score of the float model, or a warning if it is close to 0.

        Args:
            store: Store of the task's scores.
            model_file: File of the float model.
            folder: Folder of the task, whose record of the noise floor has the latency of the float model.

        Raises:
            UserError: The float model itself cannot be scored, or has another score than `expect`.
        """
        if self.metric is None:
            return Goal()
        known = {name: store.known_float_score(model_file, name) for name in self.evaluators}
        if None in known.values():
            known = dict(self.prepare_evaluators(store, model_file))
        self._check_expected_score(known.get(MAIN_BENCHMARKER))
        said, main = "", known.get(MAIN_BENCHMARKER)
        for name, score in known.items():
            if score is not None and name != PROXY_EVALUATOR:
                params = self.evaluators[name].params
                said = said or low_reference_warning(score, self.metric, self.higher_is_better, params)
        # A metric that compares with the float model has no score of it.
        if not said and main is not None and self.metric in main.metrics and self.metric not in METRIC_CAPS:
            samples = f" on {len(main.per_item)} samples" if main.per_item else ""
            said = f"the float model scores {format_score(main.metrics[self.metric], self.metric)}{samples}"
        if said:
            store.observer.say(f"{folder.name}: {said}")
        own = known[self.search_evaluator]
        objective = self.objective
        if not objective.uses_accuracy or own is None:
            return Goal()
        reference = own.metrics[self.metric]
        float_ms = None if objective.minimize == "latency" else baseline_latency(folder)
        bound, limit = objective.max_drop, objective.max_latency
        return Goal(
            metric=self.metric,
            reference=reference,
            higher_is_better=self.higher_is_better,
            max_drop=None if bound is None else absolute_bound(bound, reference),
            minimize=objective.minimize,
            max_latency_ms=None if limit is None or float_ms is None else absolute_bound(limit, float_ms),
            float_ms=float_ms,
        )

    def _check_expected_score(self, own: Accuracy | None) -> None:
        """Raise an error if `expect` differs from the score by two points, and is outside of its 95 % interval."""
        value = None if own is None else own.metrics.get(self.metric or "")
        if not self.expect or own is None or value is None:
            return
        estimate = metric_estimate(own, self.metric or "")
        low, high = (value, value) if estimate is None else (estimate.interval.low, estimate.interval.high)
        tolerance = EXPECTED_WITHIN * (1.0 if self.metric in UNIT_INTERVAL_METRICS else abs(self.expect))
        if low <= self.expect <= high or abs(value - self.expect) <= tolerance:
            return
        interval = f" [{low:.4g}, {high:.4g}]" if low < high else ""
        where = "the half of the data for the report" if self.objective.halves else "the evaluator's data"
        raise UserError(
            f"expect: the float model has {self.metric} {value:.4g}{interval} on {where}, but {self.expect:g} is "
            f"expected. {likely_causes(self.evaluators[MAIN_BENCHMARKER].params, own.note)}; or give the score on "
            "these data"
        )

    def prepare_evaluators(self, store: AccuracyStore, model_file: Path) -> Mapping[str, Accuracy]:
        """Score the float model by all evaluators, and return its accuracy by the name of the evaluator.

        Call this before other models are scored, because an evaluator may compare with the float model.

        Raises:
            UserError: The float model itself cannot be scored.
        """
        return {name: store.require_float_score(model_file, name) for name in self.evaluators}

    def make_accuracy_gate(self, goal: Goal, store: AccuracyStore, model_file: Path) -> AccuracyGate:
        """Return the gate that accepts candidates by accuracy; call `goal` first, which scores the float model.

        Args:
            goal: Objective and bound of the searches.
            store: Store of the task's scores.
            model_file: File of the float model.
        """
        proxy = PROXY_EVALUATOR if PROXY_EVALUATOR in self.evaluators else None
        reference = store.known_float_score(model_file, FIRST_STAGE_EVALUATOR)
        staged = FIRST_STAGE_EVALUATOR in self.evaluators and reference is not None and goal.metric is not None
        own = store.known_float_score(model_file, MAIN_BENCHMARKER) if self.cross_fitted else None
        return AccuracyGate(
            goal=goal,
            evaluator=self.search_evaluator,
            proxy=proxy,
            rejected_loss=partial(rejected_loss, goal, reference) if staged and reference is not None else None,
            mixable=None if own is None else partial(mixable_record, goal, own),
        )


def rejected_loss(goal: Goal, reference: Accuracy, found: Accuracy) -> float | None:
    """Return the loss of a candidate on the first images if it violates the bound with high confidence, else None.

    This is a sequential test by a paired bootstrap: a rejected candidate is not scored on the other images. None also
    without a bound, or if the records allow no interval.

    Args:
        goal: Objective with the bound.
        reference: Accuracy of the float model on the first images.
        found: Accuracy of the candidate on the first images.
    """
    metric = goal.metric or ""
    if goal.max_drop is None:
        return None
    within = probability_within(reference, found, metric, goal.max_drop, higher_is_better=goal.higher_is_better)
    if within is None or within >= MAX_FALSE_REJECTION:
        return None
    loss = reference.metrics[metric] - found.metrics[metric]
    return loss if goal.higher_is_better else -loss


def mixable_record(goal: Goal, reference: Accuracy, found: Accuracy) -> str:
    """Return `found.mixable` if the candidate keeps the bound on the images outside of at least one fold, else "".

    `harness.results.cross_fitting.cross_fitted_drop` may select such a candidate. For the text see
    `harness.plugins.api.Accuracy`. A record equal to that of the float model is not stored again ("").
    """
    if found.mixable in ("", reference.mixable):
        return ""
    losses = losses_on_other_folds(reference, found, goal.metric or "", higher_is_better=goal.higher_is_better)
    kept = losses is not None and any(goal.loss_excess(float(loss)) == 0 for loss in losses)
    return found.mixable if kept else ""


def make_scoring(objective: Objective, spec: ModelSpec, model: Model, work: Path) -> Scoring:
    """Return the evaluators of a task.

    Args:
        objective: Objective of the experiment.
        spec: Entry of the model in the experiment.
        model: The float model.
        work: Scratch folder for outputs of the float model.

    Raises:
        UserError: The evaluator cannot be used, lacks the metric of the objective, or its data cannot be halved.
    """
    facts: dict[str, Any] = {
        "evaluator": None if spec.evaluator is None else spec.evaluator.model_dump(mode="json"),
        "preprocess": None if spec.preprocess is None else spec.preprocess.model_dump(mode="json"),
    }
    if objective.halves:
        facts["halves"] = True
    main = evaluator_spec(spec, model, work, "report" if objective.halves else None)
    if main is None:
        return Scoring(objective=objective, evaluators={}, metric=None, higher_is_better=True, facts=facts)
    factory: Any = registry.load_plugin("evaluator", main.use)
    check_objective(objective, factory.metric, spec.name)
    evaluators = {MAIN_BENCHMARKER: main}
    if objective.halves:
        evaluators[SEARCH_EVALUATOR] = _require_evaluator(evaluator_spec(spec, model, work, "search"))
    if objective.minimize == "latency" and objective.max_drop is not None and main.use != "fidelity":
        whole = evaluators.get(SEARCH_EVALUATOR, main)
        given = whole.params.get("data")
        if isinstance(given, Mapping) and "every" not in given and "reference" not in whole.params:
            made = registry.create_plugin("evaluator", whole.use, whole.params)
            every = min(MAX_STAGE_STEP, getattr(made, "inferences", 0) // MIN_STAGE_IMAGES)
            if every >= 2:  # else there are few images
                params = {**whole.params, "data": {**given, "every": every}}
                evaluators[FIRST_STAGE_EVALUATOR] = whole.model_copy(update={"params": params})
                facts["first_stage"] = every
    if objective.uses_accuracy and objective.proxy and main.use != "fidelity":
        evaluators[PROXY_EVALUATOR] = make_proxy_evaluator(objective.proxy, spec, model, work)
    data = {}
    for name, use in evaluators.items():  # digests of the data and the preprocessing, of evaluators that have them
        fingerprint = getattr(registry.create_plugin("evaluator", use.use, use.params), "fingerprint", None)
        if isinstance(fingerprint, str):
            data[name] = facts_digest(fingerprint)
    return Scoring(
        objective=objective,
        evaluators=evaluators,
        metric=factory.metric,
        higher_is_better=factory.higher_is_better,
        facts=facts,
        expect=spec.expect,
        data=data,
    )


def make_proxy_evaluator(samples: int, spec: ModelSpec, model: Model, work: Path) -> PluginSpec:
    """Return the evaluator that screens candidates by SQNR; tables do not show its values.

    Args:
        samples: Number of samples of the calibration data, or of random samples if the model has no such data.
        spec: Entry of the model in the experiment.
        model: The float model.
        work: Scratch folder; the float model's outputs are stored in its folder `proxy`.
    """
    data = spec.calibration.data
    params = {"samples": samples, "sqnr_only": True, **({} if data is None else {"data": data})}
    proxied = spec.model_copy(update={"evaluator": PluginSpec(use="fidelity", params=params)})
    return _require_evaluator(evaluator_spec(proxied, model, work / "proxy"))


def _require_evaluator(use: PluginSpec | None) -> PluginSpec:
    assert use is not None  # the model has an evaluator
    return use


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
            bound, metric = experiment.objective.max_drop, evaluator.metric
            if bound is None:
                words = f"none; {metric_name(metric)} is scored without a bound"
            elif metric in METRIC_CAPS and not isinstance(bound, str):
                cap = METRIC_CAPS[metric]
                words = (
                    f"{metric_name(metric)} has to be {cap - bound:g} dB or more, for the float model's own counts as "
                    f"{cap:g}; INT8 has 20 to 50 dB as a rule"
                )
            else:
                if isinstance(bound, str):
                    drop = f"{bound} of the float model's own"
                elif metric in UNIT_INTERVAL_METRICS:
                    points = f"{100 * bound:g}"
                    drop = f"{bound:g} ({points} point{'' if points == '1' else 's'})"
                else:
                    drop = f"{bound:g}{METRIC_FORMATS.get(metric, ('', 4, ''))[2]}"
                change = "drop" if evaluator.higher_is_better else "rise"
                words = f"{metric_name(metric)} may {change} by at most {drop}"
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


def _format_bound(bound: float | str | None) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
