"""Notes that several tables share: noise, noise floors, data, backends, searches that ended early, unfinished runs."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from harness.accuracy.metrics.average_precision import resampled_map
from harness.accuracy.metrics.intervals import Estimate, decode_accuracy, decode_evidence, metric_estimate
from harness.measure.provenance import format_scenario, lacks_vnni, processor_label
from harness.measure.turn_log import disturbance_note
from harness.plugins.api import Accuracy
from harness.report.report_table import MISSING_CELL, format_interval
from harness.results.artifacts import FLOAT_ROW, NOT_TRIED, RECOVERED_PREFIX, recovered_row
from harness.results.cross_fitting import FOLDS, cross_fitted_drop
from harness.results.folder import NOISY_FLOOR, Results, TaskResults
from harness.results.journal import read_journal
from harness.results.scores import METRIC_CAPS, metric_name
from harness.results.search_log import SearchLog
from harness.results.stored_experiment import StoredExperiment

T = TypeVar("T")
MAX_DISTURBED_SHARE = 0.10  # with more disturbed evaluations, a search may have selected a poor placement
WIDE_INTERVAL_SHARE = 0.25  # half-width of the float model's interval above which latencies in ms say little
LOSS_NOTE = (
    "The searches minimised the loss of accuracy and there was no final selection: the best and second best of their "
    "choices are those with the smallest loss in the search; the search's own samples break ties."
)


def noise_note(task: TaskResults) -> str:
    """Return a warning about noise in the figures of a task, or ""."""
    noise_floor = task.noise_floor or 0.0
    reasons = filter(None, [
        f"the noise floor is {noise_floor:.1%}" if noise_floor > NOISY_FLOOR else "",
        disturbance_note(task.disturbed),
        _disturbed_share_note(task),
        _wide_baseline_note(task),
    ])  # fmt: skip
    text = "; ".join(reasons)
    return f"Noisy machine, {task.name}: {text}. Close other work and repeat." if text else ""


def _disturbed_share_note(task: TaskResults) -> str:
    evaluations = sum(search.evaluations for search in task.searches)
    unstable = sum(int(search.cost.get("unstable", 0)) for search in task.searches)
    if unstable <= MAX_DISTURBED_SHARE * evaluations:
        return ""
    return f"{unstable} of {evaluations} evaluations stayed disturbed, so the searches may have made poor choices"


def _wide_baseline_note(task: TaskResults) -> str:
    if FLOAT_ROW not in task.summaries:
        return ""
    latency = task.summaries[FLOAT_ROW].latency_ms
    if latency.high <= latency.value * (1 + WIDE_INTERVAL_SHARE):
        return ""
    text = format_interval(latency.value, latency.low, latency.high, 3)
    return f"the float model took {text} ms, so use the speedups, which are paired, and not the latencies"


def noise_floor_note(tasks: Iterable[TaskResults]) -> str:
    """Return the noise floor of each task."""
    floors = [f"{task.name} {task.noise_floor:.1%}" for task in tasks if task.noise_floor is not None]
    if not floors:
        return "Noise floor: not measured yet."
    return (
        "Noise floor, the largest difference between the float model and its twin in single builds (in 95 % of the "
        f"builds; in all of them up to 20 builds): {', '.join(floors)}."
    )


def progress_note(results: Results) -> str:
    """Return the progress of a run in which no search has ended, or ""."""
    if any(task.picks for task in results.tasks):
        return ""
    if results.tasks:
        return "No search has ended yet."
    if not results.starting:
        return "No task has started yet."
    return f"{', '.join(results.starting)} started, but has no search yet."


def partial_note(results: Results) -> str:
    """Return what is missing in an unfinished run, and why tasks stopped, or ""."""
    names = [task.name for task in results.tasks if not task.complete] + list(results.waiting)
    if not names:
        return ""
    stopped = group_names((reason, name) for name, reason in results.stops.items())
    head = f"UNFINISHED, so these results are partial: {', '.join(names)}; repeat qdq run to continue."
    return " ".join([head, *(f"{tasks} stopped: {reason}" for reason, tasks in stopped.items())])


def group_names(pairs: Iterable[tuple[T, str]]) -> dict[T, str]:
    """Return by value the names of its (value, name) pairs, joined by commas, in their order and with repetitions."""
    groups: dict[T, list[str]] = {}
    for value, name in pairs:
        groups.setdefault(value, []).append(name)
    return {value: ", ".join(names) for value, names in groups.items()}


def backend_notes(tasks: Iterable[TaskResults]) -> tuple[str, ...]:
    """Return "BACKEND: NOTE." for each different `TaskResults.note`, a restriction on the use of its latencies."""
    notes = {task.note: str(task.facts["backend"].get("name")) for task in tasks if task.note}
    return tuple(f"{name}: {note}." for note, name in notes.items())


def scenario_notes(tasks: Sequence[TaskResults]) -> tuple[str, ...]:
    """Return a note with the scenario of each task; none if all are latency, whose threads the tables name."""
    options = {task.name: task.facts["backend"].get("options", {}) for task in tasks}
    if not any({"streams", "shapes"} & each.keys() for each in options.values()):
        return ()
    groups = group_names((format_scenario(each), name) for name, each in options.items())
    return tuple(f"Scenario of {names}: {scenario}." for scenario, names in groups.items())


def data_notes(tasks: Sequence[TaskResults]) -> Iterator[str]:
    """Yield a sentence for each limitation of the tasks' calibration and accuracy data, such as random inputs."""
    if random := sorted({task.facts["model"] for task in tasks if task.facts["calibrated_on"] == "random data"}):
        yield f"Calibrated on random data (no accuracy): {', '.join(random)}."
    for task in tasks:
        if note := task.scores.get(FLOAT_ROW, {}).get("note"):
            yield f"Accuracy of {task.name}: {note}."
    for task in tasks:
        if task.blind:
            yield (
                f"Accuracy of {task.name}: the float model itself scores {task.score(FLOAT_ROW):.4f}, so drops say "
                "nothing; check preprocessing, decoder, labels and the order of their classes."
            )
    scored = [task for task in tasks if FLOAT_ROW in task.scores and without_vnni(task)]
    if rough := [task.name for task in scored if not _has_seven_bit_weights(task)]:
        yield (
            f"Accuracy of {', '.join(rough)}: measured on a processor without VNNI, where INT8 products saturate; "
            "drops differ on one with VNNI."
        )
    if reduced := [task.name for task in scored if _has_seven_bit_weights(task)]:
        yield (
            f"Accuracy of {', '.join(reduced)}: measured on a processor without VNNI, where products of 8-bit weights "
            "saturate. Placements and quantize_static have 7-bit weights; models of ModelOpt and imported models keep "
            "their own."
        )
    estimates = ((task, float_estimate(task)) for task in tasks)
    caveats = group_names((each.caveat, task.name) for task, each in estimates if each is not None and each.caveat)
    yield from (f"Accuracy of {names}: {caveat}." for caveat, names in caveats.items())


def without_vnni(task: TaskResults) -> bool:
    """Return whether the device is an x86 processor without VNNI, where sums of INT8 products saturate."""
    processor = str(task.environment.get("cpu", {}).get("model"))
    device = task.facts["backend"].get("device")
    return lacks_vnni(task.environment) and device in {processor, processor_label(processor, task.environment)}


def _has_seven_bit_weights(task: TaskResults) -> bool:
    return str(task.facts["backend"].get("dialect", "")).endswith("_7bit")


def float_estimate(task: TaskResults) -> Estimate | None:
    """Return the metric of the float model with its interval over images; None if the record has no single images."""
    score = task.scores.get(FLOAT_ROW, {})
    if task.metric is None or task.metric in METRIC_CAPS or "metrics" not in score:
        return None
    return metric_estimate(decode_accuracy(score), task.metric)


def early_end_notes(results: Results) -> Iterator[str]:
    """Yield a note for each task and reason with the searches that ended before their budget was spent."""
    for task in results.tasks:
        groups: dict[str, list[SearchLog]] = {}
        for search in task.searches:
            if reason := _early_end_reason(search, task.budget, results.stored):
                groups.setdefault(reason, []).append(search)
        for reason, searches in groups.items():
            paths = [search.end.traceback_file for search in searches if search.end and search.end.traceback_file]
            traces = ", ".join(str(path.relative_to(results.folder)) for path in paths)
            names = ", ".join(search.name for search in searches)
            yield f"{task.name}: {names} {reason}{f'; traceback: {traces}' if traces else ''}."


def _early_end_reason(search: SearchLog, budget: int, stored: StoredExperiment) -> str:
    if search.end is not None:
        return search.end.reason
    if search.evaluations >= budget:
        return ""
    key = limit_reached(search, stored)
    limit = f": the time limit (budget.{key}: {stored.minutes[key]:g}) was reached" if key else ""
    return f"ended at {search.evaluations} of {budget}{limit}"


def limit_reached(search: SearchLog, stored: StoredExperiment) -> str:
    """Return the key of the time limit that ended a search before its budget was spent; "" without a limit."""
    limits = stored.minutes
    if "task_minutes" not in limits or not search.elapsed_s:
        return next(iter(limits), "")
    return "minutes" if search.elapsed_s[-1] >= 60 * limits.get("minutes", math.inf) else "task_minutes"


def loss_note(results: Results) -> list[str]:
    """Return a note on the selection of choices if the searches minimised the loss of accuracy, else no note."""
    return [LOSS_NOTE] if any(pick.loss is not None for task in results.tasks for pick in task.picks) else []


logger = logging.getLogger(__name__)


def accuracy_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield the notes of a task on cross-fitted drops and worst classes.

    Args:
        rows: Row id of each label in the main table.
    """
    yield from chain(recovery_notes(task), _cross_fitting_notes(task), _class_notes(task, rows))


def _cross_fitting_notes(task: TaskResults) -> Iterator[str]:
    """Yield a note for each search that chose on all samples: the cross-fitted drop of its choice.

    A search whose row is a recovered model has none: the journal has no scores of the models that recovery made.
    """
    score = task.scores.get(FLOAT_ROW, {})
    if task.allowed is None or task.facts.get("halves") or task.score(FLOAT_ROW) is None or task.metric is None:
        return
    reference = decode_accuracy(score)
    recovered = {f"{pick.method}-{pick.seed}" for pick in task.picks if pick.row.startswith(RECOVERED_PREFIX)}
    for search in task.searches:
        if search.name in recovered:
            continue
        outcomes = (entry.result.outcome for entry in read_journal(search.path) if entry.result is not None)
        try:
            estimate = cross_fitted_drop(
                outcomes, reference, task.metric, task.allowed, higher_is_better=task.higher_is_better
            )
        except ValueError as error:
            logger.warning("%s: no cross-fitted drop of %s: %s", task.folder, search.name, error)
            continue
        if estimate is not None:
            interval = estimate.interval
            yield (
                f"Cross-fitted over {FOLDS} folds of {estimate.images} samples, {task.name}: the choice of "
                f"{search.name} loses {format_interval(interval.value, interval.low, interval.high, 4)} of "
                f"{metric_name(task.metric)} on samples that did not take part in the choice."
            )


def _class_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each choice of a search with the class that lost most accuracy."""
    searched = {pick.row for pick in task.picks if pick.kind == "search"}
    for label, row in rows.items():
        scores = [task.scores.get(name, {}) for name in (FLOAT_ROW, row)]
        if task.metric is None or row not in searched or not all("metrics" in score for score in scores):
            continue
        reference, row_accuracy = map(decode_accuracy, scores)
        worst = worst_class(reference, row_accuracy, task.metric)
        if worst is not None and worst.quantized < worst.reference:
            yield (
                f"Worst class of {label}, {task.name}: class {worst.label} ({worst.samples} samples), "
                f"{metric_name(task.metric)} {worst.reference:.3f} to {worst.quantized:.3f}."
            )


def recovery_notes(task: TaskResults) -> Iterator[str]:
    """Yield a note for each placement near the bound: its recovered file, or that recovery gained nothing."""
    for digest, facts in task.recovery.items():
        if "loss" not in facts:
            if facts.get("label", "").startswith(NOT_TRIED):
                yield f"Recovery in {task.name}: placement {digest}: {facts['label']}."
            continue
        gains = [
            f"{step['step']} {step['before_db']:.1f} to {step['after_db']:.1f} dB"
            for step in facts["steps"]
            if step["kept"]
        ]
        gains += map(_format_left_float, facts.get("left_float", ()))
        steps = f" ({'; '.join(gains)})" if gains else ""
        result = f"is {recovered_row(facts['sha256'])}" if facts["within"] else "still misses the bound"
        before, after = (_format_loss(facts, suffix) for suffix in ("_before", ""))
        yield (
            f"Recovery in {task.name}: placement {digest} with {facts['label']}{steps} {result}; drop of "
            f"{metric_name(task.metric)} on the images of the search {before} before, {after} after."
        )


def _format_left_float(facts: Mapping[str, Any]) -> str:
    """Return text such as "Conv_1 and 2 after it left float, 3.3 dB if quantized" for a record of float nodes."""
    if "node" in facts:  # a record before groups of nodes were left float
        return f"{facts['node']} left float {facts['gain_db']:+.1f} dB"
    first, *others = (name or "the outputs" for name in facts["nodes"])
    return f"{first}{f' and {len(others)} after it' * bool(others)} left float, {facts['alone_db']:.1f} dB if quantized"


def _format_loss(facts: Mapping[str, Any], suffix: str) -> str:
    """Return a measured loss with the estimated one as text, "0.0054 (estimated 0.0062)"."""
    loss, estimate = facts.get(f"loss{suffix}"), facts.get(f"estimate{suffix}")
    text = MISSING_CELL if loss is None else f"{loss:.4f}"
    return text if estimate is None else f"{text} (estimated {estimate:.4f})"


MIN_CLASS_SAMPLES = 10
"""Smallest number of images of a class, for detection of its boxes, with which the class is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoss:
    """Metric of the float model and of a quantized model on the samples of one class.

    Attributes:
        label: Index of the class.
        samples: Number of its images; for detection, of its boxes.
        reference: Metric of the float model.
        quantized: Metric of the quantized model.
    """

    label: int
    samples: int
    reference: float
    quantized: float


def worst_class(reference: Accuracy, quantized: Accuracy, metric: str) -> ClassLoss | None:
    """Return the class with the largest loss (maybe a gain) among those with at least `MIN_CLASS_SAMPLES` samples.

    Args:
        metric: `top1`, `top5`, `map` or `miou`; others have no figures by class.

    Returns:
        The class; None if no class has enough samples, or the records have no figures by class.

    Raises:
        ValueError: The evidence is damaged.
    """
    before, after = (_class_figures(decode_evidence(each.evidence), metric) for each in (reference, quantized))
    losses = [
        ClassLoss(label=label, samples=samples, reference=figure, quantized=after[label][0])
        for label, (figure, samples) in before.items()
        if samples >= MIN_CLASS_SAMPLES and label in after
    ]
    return max(losses, key=lambda each: each.reference - each.quantized, default=None)


def _class_figures(facts: Mapping[str, Any], metric: str) -> dict[int, tuple[float, int]]:
    """Return the metric of each class and the number of its samples, by index of the class."""
    kind = facts.get("kind")
    try:
        if kind == "mean" and "classes" in facts and metric in facts:
            return _mean_by_class(facts["classes"], facts[metric])
        if kind == "map" and metric == "map":
            return {
                each["category"]: (_average_precision(facts["images"], each), len(each["truth"]))
                for each in facts["areas"][0]
                if "category" in each
            }
        return _iou_by_class(facts["areas"]) if kind == "miou" and metric == "miou" else {}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"the evidence of a score is damaged: {error!r}") from error


def _mean_by_class(classes: list[int], values: list[float]) -> dict[int, tuple[float, int]]:
    by_class: dict[int, list[float]] = defaultdict(list)
    for label, value in zip(classes, values, strict=True):
        by_class[label].append(value)
    return {label: (float(np.mean(figures)), len(figures)) for label, figures in by_class.items()}


def _average_precision(images: int, category: Mapping[str, Any]) -> float:
    everything = np.ones((1, images), np.int64)
    return float(resampled_map({"images": images, "areas": [[category]]}, "map", everything)[0])


def _iou_by_class(areas: list[list[int]]) -> dict[int, tuple[float, int]]:
    """Return the IoU of each labelled class over all images, and the number of images with it."""
    totals: dict[int, Any] = defaultdict(lambda: np.zeros(4, np.int64))
    for row in areas:
        for label, right, labelled, answered in zip(*(row[place::4] for place in range(4)), strict=True):
            totals[label] += (right, labelled, answered, labelled > 0)
    return {
        label: (float(right / (labelled + answered - right)), int(images))
        for label, (right, labelled, answered, images) in totals.items()
        if labelled
    }
