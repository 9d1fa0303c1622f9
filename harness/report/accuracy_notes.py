"""Notes of the main table on accuracy: recovered files, losses on samples that took no part in the choice, classes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from harness.accuracy.metrics.intervals import decode_accuracy
from harness.report.class_losses import worst_class
from harness.report.load.display_names import metric_name
from harness.report.load.results import TaskResults
from harness.report.report_table import MISSING_CELL, format_interval
from harness.results_dir.artifacts import FLOAT_ROW, RECOVERED_PREFIX, recovered_row
from harness.results_dir.journal import read_journal
from harness.selection.cross_fitting import FOLDS, cross_fitted_drop

logger = logging.getLogger(__name__)


def accuracy_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield the notes of a task.

    Args:
        rows: Its rows by label.
    """
    yield from chain(recovery_notes(task), _cross_fitting_notes(task), _class_notes(task, rows))


def _cross_fitting_notes(task: TaskResults) -> Iterator[str]:
    """Yield for each search that chose on all samples the loss of its choice on samples that did not take part.

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
            own = estimate.interval
            yield (
                f"Cross-fitted over {FOLDS} folds of {estimate.images} samples, {task.name}: the choice of "
                f"{search.name} loses {format_interval(own.value, own.low, own.high, 4)} of "
                f"{metric_name(task.metric)} on samples that did not take part in the choice."
            )


def _class_notes(task: TaskResults, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield for each search the class that lost most with its choice."""
    searched = {pick.row for pick in task.picks if pick.kind == "search"}
    for label, row in rows.items():
        scores = [task.scores.get(name, {}) for name in (FLOAT_ROW, row)]
        if task.metric is None or row not in searched or not all("metrics" in score for score in scores):
            continue
        reference, found = map(decode_accuracy, scores)
        worst = worst_class(reference, found, task.metric)
        if worst is not None and worst.found < worst.reference:
            yield (
                f"Worst class of {label}, {task.name}: class {worst.label} ({worst.samples} samples), "
                f"{metric_name(task.metric)} {worst.reference:.3f} to {worst.found:.3f}."
            )


def recovery_notes(task: TaskResults) -> Iterator[str]:
    """Yield a line for each placement near the bound: its recovered file, or that nothing was gained."""
    for digest, facts in task.recovery.items():
        if "loss" not in facts:
            continue
        gains = [
            f"{step['step']} {step['before_db']:.1f} to {step['after_db']:.1f} dB"
            for step in facts["steps"]
            if step["kept"]
        ]
        gains += map(_format_left_float, facts.get("left_float", ()))
        steps = f" ({'; '.join(gains)})" if gains else ""
        found = f"is {recovered_row(facts['sha256'])}" if facts["within"] else "still misses the bound"
        before, after = (_format_loss(facts, suffix) for suffix in ("_before", ""))
        yield (
            f"Recovery in {task.name}: placement {digest} with {facts['label']}{steps} {found}; drop of "
            f"{metric_name(task.metric)} on the images of the search {before} before, {after} after."
        )


def _format_left_float(facts: Mapping[str, Any]) -> str:
    """Return the nodes that are left float with their cost, "Conv_1 and 2 after it left float, 3.3 dB if quantized"."""
    if "node" in facts:  # a record before groups of nodes were left float
        return f"{facts['node']} left float {facts['gain_db']:+.1f} dB"
    first, *others = (name or "the outputs" for name in facts["nodes"])
    return f"{first}{f' and {len(others)} after it' * bool(others)} left float, {facts['alone_db']:.1f} dB if quantized"


def _format_loss(facts: Mapping[str, Any], suffix: str) -> str:
    """Return a measured loss with the estimated one, "0.0054 (estimated 0.0062)"."""
    loss, estimate = facts.get(f"loss{suffix}"), facts.get(f"estimate{suffix}")
    text = MISSING_CELL if loss is None else f"{loss:.4f}"
    return text if estimate is None else f"{text} (estimated {estimate:.4f})"
