"""Notes below the tables: definitions, noise, data, accuracy, searches that ended early, unfinished runs."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from harness.accuracy.metrics.average_precision import resampled_map
from harness.accuracy.metrics.closeness import WORST_PREFIX
from harness.accuracy.metrics.intervals import Estimate, decode_accuracy, decode_evidence, metric_estimate
from harness.measure.provenance import format_scenario, lacks_vnni, processor_label
from harness.measure.turn_log import disturbance_note
from harness.plugins.api import Accuracy
from harness.report.frames import paired_accuracies
from harness.report.report_table import MISSING_CELL, format_interval, frame_rows
from harness.results.artifacts import ACCURACY_ONLY_VERDICT, FLOAT_ROW, NOT_TRIED, RECOVERED_PREFIX, recovered_row
from harness.results.cross_fitting import FOLDS, cross_fitted_drop
from harness.results.folder import NOISY_FLOOR, Results, TaskResults, row_labels
from harness.results.journal import read_journal
from harness.results.scores import BEYOND_BOUND_VERDICT, METRIC_CAPS, UNSCORED_VERDICT, metric_name
from harness.results.search_log import SearchLog
from harness.results.stored_experiment import StoredExperiment

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_DISTURBED_SHARE = 0.10  # with more disturbed evaluations, a search may have selected a poor placement
WIDE_INTERVAL_SHARE = 0.25  # half-width of the float model's interval above which latencies in ms say little
MIN_CLASS_SAMPLES = 10
"""Smallest number of images of a class, for detection of its boxes, with which the class is reported."""
LOSS_NOTE = (
    "The searches minimised the loss of accuracy and there was no final selection: the best and second best of their "
    "choices are those with the smallest loss in the search; the search's own samples break ties."
)


def noise_note(task: TaskResults) -> str:
    """Return a warning about noise in the figures of a task, or ""."""
    reasons = [f"the noise floor is {task.noise_floor:.1%}"] if (task.noise_floor or 0.0) > NOISY_FLOOR else []
    reasons += filter(None, [disturbance_note(task.disturbed)])
    evaluations = sum(search.evaluations for search in task.searches)
    unstable = sum(int(search.cost.get("unstable", 0)) for search in task.searches)
    if unstable > MAX_DISTURBED_SHARE * evaluations:
        poor = "so the searches may have made poor choices"
        reasons.append(f"{unstable} of {evaluations} evaluations stayed disturbed, {poor}")
    latency = task.summaries[FLOAT_ROW].latency_ms if FLOAT_ROW in task.summaries else None
    if latency is not None and not latency.high <= latency.value * (1 + WIDE_INTERVAL_SHARE):
        text = format_interval(latency.value, latency.low, latency.high, 3)
        paired = "so use the speedups, which are paired, and not the latencies"
        reasons.append(f"the float model took {text} ms, {paired}")
    return f"Noisy machine, {task.name}: {'; '.join(reasons)}. Close other work and repeat." if reasons else ""


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
    names = ", ".join(results.starting)
    return f"{names} started, but has no search yet." if names else "No task has started yet."


def partial_note(results: Results) -> str:
    """Return what is missing in an unfinished run, and why tasks stopped, or ""."""
    names = [task.name for task in results.tasks if not task.complete] + list(results.waiting)
    if not names:
        return ""
    stopped = _group_names((reason, name) for name, reason in results.stops.items())
    head = f"UNFINISHED, so these results are partial: {', '.join(names)}; repeat qdq run to continue."
    return " ".join([head, *(f"{tasks} stopped: {reason}" for reason, tasks in stopped.items())])


def _group_names(pairs: Iterable[tuple[T, str]]) -> dict[T, str]:
    """Return by value the names of its (value, name) pairs, joined by commas, in their order and with repetitions."""
    groups: dict[T, list[str]] = {}
    for value, name in pairs:
        groups.setdefault(value, []).append(name)
    return {value: ", ".join(names) for value, names in groups.items()}


def common_notes(tasks: Sequence[TaskResults]) -> Iterator[str]:
    """Yield the notes of every table: scenarios, limitations of the data, and restrictions of the backends.

    Without another scenario than latency, whose threads the tables name, there is no note on scenarios.
    """
    options = {task.name: task.facts["backend"].get("options", {}) for task in tasks}
    if any({"streams", "shapes"} & each.keys() for each in options.values()):
        groups = _group_names((format_scenario(each), name) for name, each in options.items())
        yield from (f"Scenario of {names}: {scenario}." for scenario, names in groups.items())
    if random := sorted({task.facts["model"] for task in tasks if task.facts["calibrated_on"] == "random data"}):
        yield f"Calibrated on random data (no accuracy): {', '.join(random)}."
    notes = {task.name: task.scores.get(FLOAT_ROW, {}).get("note") for task in tasks}
    yield from (f"Accuracy of {name}: {note}." for name, note in notes.items() if note)
    for task in tasks:
        if task.blind:
            yield (
                f"Accuracy of {task.name}: the float model itself scores {task.score(FLOAT_ROW):.4f}, so drops say "
                "nothing; check preprocessing, decoder, labels and the order of their classes."
            )
    saturating: dict[bool, list[str]] = {False: [], True: []}  # by whether the weights have 7 bits
    for task in tasks:
        if FLOAT_ROW in task.scores and without_vnni(task):
            saturating[str(task.facts["backend"].get("dialect", "")).endswith("_7bit")].append(task.name)
    if names := ", ".join(saturating[False]):
        yield (
            f"Accuracy of {names}: measured on a processor without VNNI, where INT8 products saturate; drops differ on "
            "one with VNNI."
        )
    if names := ", ".join(saturating[True]):
        yield (
            f"Accuracy of {names}: measured on a processor without VNNI, where products of 8-bit weights saturate. "
            "Placements and quantize_static have 7-bit weights; models of ModelOpt and imported models keep their own."
        )
    estimates = ((task.name, _float_estimate(task)) for task in tasks)
    caveats = _group_names((each.caveat, name) for name, each in estimates if each is not None and each.caveat)
    yield from (f"Accuracy of {names}: {caveat}." for caveat, names in caveats.items())
    restricted = {task.note: str(task.facts["backend"].get("name")) for task in tasks if task.note}
    yield from (f"{name}: {note}." for note, name in restricted.items())


def without_vnni(task: TaskResults) -> bool:
    """Return whether the device is an x86 processor without VNNI, where sums of INT8 products saturate."""
    processor = str(task.environment.get("cpu", {}).get("model"))
    device = task.facts["backend"].get("device")
    return lacks_vnni(task.environment) and device in {processor, processor_label(processor, task.environment)}


def _float_estimate(task: TaskResults) -> Estimate | None:
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
            if search.end is not None:
                groups.setdefault(search.end.reason, []).append(search)
            elif search.evaluations < task.budget:
                key = limit_reached(search, results.stored)
                limit = f": the time limit (budget.{key}: {results.stored.minutes[key]:g}) was reached" if key else ""
                groups.setdefault(f"ended at {search.evaluations} of {task.budget}{limit}", []).append(search)
        for reason, searches in groups.items():
            paths = [search.end.traceback_file for search in searches if search.end and search.end.traceback_file]
            traces = ", ".join(str(path.relative_to(results.folder)) for path in paths)
            names = ", ".join(search.name for search in searches)
            yield f"{task.name}: {names} {reason}{f'; traceback: {traces}' if traces else ''}."


def limit_reached(search: SearchLog, stored: StoredExperiment) -> str:
    """Return the key of the time limit that ended a search before its budget was spent; "" without a limit."""
    limits = stored.minutes
    if "task_minutes" not in limits or not search.elapsed_s:
        return next(iter(limits), "")
    return "minutes" if search.elapsed_s[-1] >= 60 * limits.get("minutes", math.inf) else "task_minutes"


def main_notes(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """Yield the notes of the main table: definitions, noise floors, and remarks on tasks."""
    tasks = results.tasks
    yield from _definitions(tasks)
    yield noise_floor_note(tasks)
    commits = ((str(task.environment.get("git_commit", "")), task.name) for task in tasks)
    versions = _group_names((commit[:12] + commit[40:], name) for commit, name in commits if commit)
    if len(versions) > 1:
        listed = "; ".join(f"{commit} {names}" for commit, names in versions.items())
        yield f"Started with different versions of this code: {listed}."
    yield from _score_notes(tasks)
    rows = {task.name: rows_by_label(task) for task in tasks}
    for task in tasks:
        yield from _check_notes(task, rows[task.name])
    for task in tasks:
        summaries = task.summaries
        disturbed = [n for n, row in rows[task.name].items() if row in summaries and summaries[row].fully_disturbed]
        if disturbed:
            yield f"All turns were disturbed, {task.name}: {', '.join(disturbed)}. Repeat on a quiet machine."
    yield from (
        f"Calibration of {task.name}: {text}." for task in tasks for text in task.facts.get("calibration_remarks", ())
    )
    for task in tasks:
        yield from recovery_notes(task)
        yield from _cross_fitting_notes(task)
        yield from _class_notes(task, rows[task.name])
    yield from (
        f"Initial placements of {task.name}: {text}." for task in tasks for text in task.facts.get("cache_remarks", ())
    )
    for task in tasks:
        if methods := ", ".join(f"{name} by {method}" for name, method in task.tool_methods.items()):
            requested = task.facts.get("calibration", {}).get("method")
            nearest = f"the nearest method of the tool to {requested}"
            yield f"Baselines of {task.name}: calibrated {methods}, {nearest}."
    yield from filter(None, [partial_note(results)])
    for task in tasks:
        notes = {row: str(score.get("note")).partition(WORST_PREFIX)[2] for row, score in task.scores.items()}
        if any(notes.values()):
            labels = row_labels(task, frame_rows(main[main["task"] == task.name]))
            worst = [f"{label}: {notes[row]}" for row, label in labels.items() if notes.get(row)]
            if worst:
                yield f"Worst output by fidelity, {task.name}: {'; '.join(worst)}."


def _definitions(tasks: Sequence[TaskResults]) -> Iterator[str]:
    """Yield the definitions of the columns and verdicts that the main table has."""
    bounds = sorted({task.allowed for task in tasks if task.allowed is not None})
    counts = " or ".join(map(str, sorted({task.builds for task in tasks if task.builds is not None}))) or "some"
    of_tools = any(pick.kind == "baseline" and pick.minutes is not None for task in tasks for pick in task.picks)
    within = f" with a drop of at most {' or '.join(f'{bound:g}' for bound in bounds)}" if bounds else ""
    groups = _group_names((_float_precision_label(task), task.name) for task in tasks)
    labels = [f"{label} ({names})" for label, names in groups.items()] if len(groups) > 1 else list(groups)
    baseline = " ".join(filter(None, ["the float model", ", ".join(labels)]))
    yield (
        f"Latency: geometric mean over {counts} fresh builds of the median over turns; the baseline has at least as "
        f"many builds. Speedup: over {baseline}, paired by turns, so it may differ slightly from the ratio of two "
        "latencies in the table. Intervals: 95 %, Student's t over builds."
    )
    yield (
        "Tie: the interval contains 1, or the gain is below 1 % or below the noise floor; use the float model then. "
        f"Bold: the fastest row of a finished task{within}. Underlined: not distinguishable from it by the same rule, "
        "paired. The row of a searcher is its best seed by the final selection, or by the search's own samples without "
        "one. Builds ok: of the search, for other methods of the confirmation. Minutes: wall-clock of the search"
        f"{', or of the tool' if of_tools else ''}."
    )
    caps = sorted({metric_name(task.metric) for task in tasks if task.metric in METRIC_CAPS})
    conditional = (
        (
            any(task.score(FLOAT_ROW) is not None and task.metric not in METRIC_CAPS for task in tasks),
            "Drop: loss against the float baseline, positive is worse; its interval: 95 %, bootstrap over images with "
            "the same draws for both, if the records have single images.",
        ),
        (bounds, f'"{BEYOND_BOUND_VERDICT}": the drop exceeds the bound of the experiment, so the row is not shipped.'),
        (
            any("failed" in score for task in tasks for score in task.scores.values()),
            f'"{UNSCORED_VERDICT}": the outputs could not be scored (as a rule, not finite), so it is not shipped.',
        ),
        (
            any(pick.reason.startswith(ACCURACY_ONLY_VERDICT) for task in tasks for pick in task.picks),
            f'"{ACCURACY_ONLY_VERDICT}": the device only emulates this precision, so the row is scored but not timed.',
        ),
        (caps, f"No drop of {', '.join(caps)}: the reference is the float model, whose own value is a cap."),
    )
    yield from (sentence for condition, sentence in conditional if condition)


def _float_precision_label(task: TaskResults) -> str:
    backend = task.facts["backend"]
    precision = backend.get("float_precision")
    if task.float_measured:
        return f"at {precision}, the fastest float precision by measurement"
    if precision is None:
        return "as it is"
    return f"at {precision} (pinned)" if len(backend.get("float_params", {})) > 1 else f"at {precision}"


def _score_notes(tasks: Sequence[TaskResults]) -> Iterator[str]:
    if halves := [task.name for task in tasks if task.facts.get("halves")]:
        yield f"Searches used one half of the evaluator's data, scores and drops the other half: {', '.join(halves)}."
    scores, usages = [], []
    for task in tasks:
        if (estimate := _float_estimate(task)) is not None:
            interval = estimate.interval
            score = format_interval(interval.value, interval.low, interval.high, 4)
            scores.append(f"{task.name} {metric_name(task.metric)} {score} ({estimate.images} images)")
        spent = {search.name: min(search.evaluations, task.budget) for search in task.searches}
        final = [p for p in task.picks if p.rank == 0 and p.budget == task.budget and p.scored is not None]
        texts = []
        for method in dict.fromkeys(pick.method for pick in final):
            own = [pick for pick in final if pick.method == method]
            total = sum(spent.get(f"{method}-{pick.seed}", task.budget) for pick in own)
            agreements = " and ".join(f"{pick.agreement:+.2f}" for pick in own if pick.agreement is not None)
            correlation = f" (rank correlation of proxy and metric {agreements})" if agreements else ""
            texts.append(f"{method} {sum(pick.scored or 0 for pick in own)} of {total}{correlation}")
        if texts:
            usages.append(f"Full evaluations of {task.name}: {', '.join(texts)}.")
    if scores:
        yield f"Scores of the float models with 95 % intervals over images: {', '.join(scores)}."
    if usages:
        yield "Full evaluations: those with a measured metric, sum over seeds."
        yield from usages


def _check_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each row with a wrong result, and for each reason why rows were not compared."""
    for name, row in rows.items():
        if task.wrong(row):
            check = task.checks[row]
            example = f"; {task.name}/{check.model} reproduces it, with a description next to it" if check.model else ""
            yield f"{name} of {task.name}: {check}{example}."
    named = [(task.checks[row], name) for name, row in rows.items() if row in task.checks]
    for verdict, said in (("not checked", "Not compared"), ("right", "Compared")):
        matching = ((check.reason, name) for check, name in named if check.verdict == verdict and check.reason)
        for reason, names in _group_names(matching).items():
            yield f"{said} with their files, {task.name}: {names} ({reason})."


def rows_by_label(task: TaskResults) -> dict[str, str]:
    """Return row ids by label, such as "all, linear (ROW)" with the methods that chose the row."""
    methods: dict[str, dict[str, None]] = {}
    for pick in task.picks:
        if pick.row:
            methods.setdefault(pick.row, {})[pick.method] = None
    return {f"{', '.join(names)} ({row})": row for row, names in methods.items()}


def _cross_fitting_notes(task: TaskResults) -> Iterator[str]:
    """Yield a note for each search that chose on all samples: the cross-fitted drop of its choice.

    A search whose row is a recovered model has none: the journal has no scores of the models that recovery made.
    """
    if task.allowed is None or task.facts.get("halves") or task.score(FLOAT_ROW) is None or task.metric is None:
        return
    reference = decode_accuracy(task.scores[FLOAT_ROW])
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
        for left in facts.get("left_float", ()):
            if "node" in left:  # a record before groups of nodes were left float
                gains.append(f"{left['node']} left float {left['gain_db']:+.1f} dB")
            else:
                first, *others = (name or "the outputs" for name in left["nodes"])
                names = f"{first} and {len(others)} after it" if others else first
                gains.append(f"{names} left float, {left['alone_db']:.1f} dB if quantized")
        steps = f" ({'; '.join(gains)})" if gains else ""
        result = f"is {recovered_row(facts['sha256'])}" if facts["within"] else "still misses the bound"
        losses = []
        for suffix in ("_before", ""):
            loss, estimate = facts.get(f"loss{suffix}"), facts.get(f"estimate{suffix}")
            text = MISSING_CELL if loss is None else f"{loss:.4f}"
            losses.append(text if estimate is None else f"{text} (estimated {estimate:.4f})")
        yield (
            f"Recovery in {task.name}: placement {digest} with {facts['label']}{steps} {result}; drop of "
            f"{metric_name(task.metric)} on the images of the search {losses[0]} before, {losses[1]} after."
        )


def _class_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each choice of a search with the class that lost most accuracy."""
    searched = {pick.row for pick in task.picks if pick.kind == "search"}
    for label, row in rows.items():
        pair = paired_accuracies(task, row) if row in searched else None
        worst = None if pair is None or task.metric is None else worst_class(*pair, task.metric)
        if worst is not None and worst[3] < worst[2]:
            index, samples, reference, quantized = worst
            yield (
                f"Worst class of {label}, {task.name}: class {index} ({samples} samples), "
                f"{metric_name(task.metric)} {reference:.3f} to {quantized:.3f}."
            )


def worst_class(reference: Accuracy, quantized: Accuracy, metric: str) -> tuple[int, int, float, float] | None:
    """Return the class with the largest loss (maybe a gain) among those with at least `MIN_CLASS_SAMPLES` samples.

    Args:
        metric: `top1`, `top5`, `map` or `miou`; others have no figures by class.

    Returns:
        Index of the class, number of its images (for detection of its boxes), and the metric of the float and of the
        quantized model; None if no class has enough samples, or the records have no figures by class.

    Raises:
        ValueError: The evidence is damaged.
    """
    before, after = (_class_figures(decode_evidence(each.evidence), metric) for each in (reference, quantized))
    losses = [
        (label, samples, figure, after[label][0])
        for label, (figure, samples) in before.items()
        if samples >= MIN_CLASS_SAMPLES and label in after
    ]
    return max(losses, key=lambda each: each[2] - each[3], default=None)


def _class_figures(facts: Mapping[str, Any], metric: str) -> dict[int, tuple[float, int]]:
    """Return the metric of each class and the number of its samples, by index of the class."""
    kind, found = facts.get("kind"), {}
    try:
        if kind == "mean" and "classes" in facts and metric in facts:
            by_class: dict[int, list[float]] = defaultdict(list)
            for label, value in zip(facts["classes"], facts[metric], strict=True):
                by_class[label].append(value)
            found = {label: (float(np.mean(values)), len(values)) for label, values in by_class.items()}
        elif kind == "map" and metric == "map":
            everything = np.ones((1, facts["images"]), np.int64)
            for each in facts["areas"][0]:
                if "category" in each:
                    alone = {"images": facts["images"], "areas": [[each]]}
                    precision = float(resampled_map(alone, "map", everything)[0])
                    found[each["category"]] = (precision, len(each["truth"]))
        elif kind == "miou" and metric == "miou":  # over all images that have the class
            totals: dict[int, Any] = defaultdict(lambda: np.zeros(4, np.int64))
            for row in facts["areas"]:
                for label, right, labelled, answered in zip(*(row[place::4] for place in range(4)), strict=True):
                    totals[label] += (right, labelled, answered, labelled > 0)
            for label, (right, labelled, answered, images) in totals.items():
                if labelled:
                    found[label] = (float(right / (labelled + answered - right)), int(images))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"the evidence of a score is damaged: {error!r}") from error
    return found
