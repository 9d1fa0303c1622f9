"""Main results as pandas frames of unrounded figures; `budget_frames` has those of the searches."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from harness.accuracy.metrics.intervals import decode_accuracy, drop_estimate
from harness.config.plan import TaskSpec
from harness.report.frames.budget_frames import search_float_ms
from harness.report.frames.confirmation_samples import statistical_ties
from harness.report.load.results import CellResults, Results
from harness.report.load.search_logs import SearchLog
from harness.results_dir.artifacts import FLOAT_ROW, Choice, best_choice
from harness.statistics import Interval
from harness.timing.provenance import processor_label
from harness.timing.turn_log import disturbance_note

__all__ = [
    "UNUSABLE_VERDICTS", "backend_label", "finalist_frame", "main_frame", "precision_frame", "with_backend_column",
]  # fmt: skip

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 60
MISSING_VERDICT = "missing"
UNUSABLE_VERDICTS = (
    "not shipped: accuracy",
    "not shipped: not scored",
    "not shipped: wrong result",
    "not shipped: saturates",
)
"""How decisions begin on what breaks the bound on accuracy, was not seen to keep it, or is computed wrongly."""
MAIN_COLUMNS = (
    "cell", "model", "backend", "device", "precision", "quantized", "method", "latency_ms", "latency_low_ms",
    "latency_high_ms", "speedup", "speedup_low", "speedup_high", "metric", "score", "drop", "drop_low", "drop_high",
    "pairs", "builds_ok", "builds", "minutes", "verdict", "beyond", "reason", "decision", "seed", "budget",
    "search_ms", "shrinkage", "runoff", "scored", "agreement", "row", "sha256", "best", "tied",
)  # fmt: skip


def main_frame(results: Results) -> pd.DataFrame:
    """One row a method: confirmed latency and speedup with 95 % intervals, accuracy, drop, cost, verdict, decision.

    A searcher stands with the best of its seeds at the largest budget, see
    `harness.results_dir.artifacts.best_choice`; the figures
    shown are fresh ones. `best` marks the fastest confirmed method of a finished cell among those that obey the bound
    on accuracy, `tied` those of them that cannot be told from it. What was asked for and is not there yet has a row
    with the verdict "missing". `beyond` marks the rows whose drop breaks that bound, however fast they are.
    """
    lines = [line for cell in results.cells for line in _main_rows(cell, results)]
    waiting = {spec.name: spec for spec in results.stored.cells if spec.name in results.waiting}
    for spec in waiting.values():
        lines += [_missing_row(_spec_columns(spec), method) for method in _expected_methods(results)]
    return pd.DataFrame(lines, columns=list(MAIN_COLUMNS))


def precision_frame(results: Results) -> pd.DataFrame:
    """The main rows of cells that have an accuracy, and of models that were quantized to several precisions."""
    main = main_frame(results)
    scored = main.groupby("cell")["score"].transform("count") > 0
    several = main.groupby(["model", "backend"])["quantized"].transform("nunique") > 1
    return main[scored | several].reset_index(drop=True)


def with_backend_column(main: pd.DataFrame) -> pd.DataFrame:
    """Lines of `main_frame` with the backend before their devices where there are several backends."""
    several = len(main) > 0 and main["backend"].nunique() > 1
    return main.assign(device=main["backend"] + " on " + main["device"]) if several else main


def _main_rows(cell: CellResults, results: Results) -> list[dict[str, Any]]:
    searches: dict[str, list[Choice]] = {}
    for pick in _final_choices(cell):
        if pick.rank == 0:
            searches.setdefault(pick.method, []).append(pick)
    chosen = [best_choice(p for p in picks if not cell.wrong(p.row)) or picks[0] for picks in searches.values()]
    lines = [_choice_row(cell, pick) for pick in (*(p for p in cell.picks if p.kind != "search"), *chosen)]
    there = {line["method"] for line in lines}
    lines += [_missing_row(_task_columns(cell), method) for method in _expected_methods(results) if method not in there]
    return _rank_rows(cell, lines)


def _rank_rows(cell: CellResults, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the fastest row of a finished cell and the rows that are not distinguishable from it.

    A tie with the float model is never the fastest (the float model itself is), and a slower row is never marked.
    """
    confirmed = [line for line in lines if line["speedup"] is not None] if cell.complete else []
    within = [line for line in confirmed if cell.obeys(line["row"]) and line["verdict"] != "slower"]
    top = max((line for line in within if line["verdict"] != "tie"), key=lambda line: line["speedup"], default=None)
    tied = statistical_ties(cell, top["row"]) if top is not None else frozenset()
    for line in lines:
        line["best"] = top is not None and line in within and line["row"] == top["row"]
        line["tied"] = line in within and line["row"] in tied
        line["decision"] = _shipping_decision(cell, line)
    return lines


def finalist_frame(results: Results) -> pd.DataFrame:
    """One row for each placement that a search sent to the confirmation: every seed, every rank.

    The second best of a search is called "METHOD #2". It stands here only: to put the better one of several
    by their confirmed figures into the main table would be to choose and report by the same samples.
    """
    lines = []
    for cell in results.cells:
        for pick in _final_choices(cell):
            line = _choice_row(cell, pick)
            lines.append({**line, "method": pick.method if pick.rank == 0 else f"{pick.method} #{pick.rank + 1}"})
    return pd.DataFrame(lines, columns=[c for c in MAIN_COLUMNS if c not in ("best", "tied", "decision")])


def _final_choices(cell: CellResults) -> Iterator[Choice]:
    """What the searches chose at the largest budget."""
    largest = cell.budget
    return (pick for pick in cell.picks if pick.kind == "search" and pick.budget == largest)


def _expected_methods(results: Results) -> tuple[str, ...]:
    return (FLOAT_ROW, *results.stored.baselines, *results.stored.searchers)


def _task_columns(cell: CellResults) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "model": cell.facts["model"],
        "backend": backend_label(cell),
        "device": _device_label(cell),
        "precision": cell.facts["precision"],
        "quantized": cell.facts["precision"],
        "metric": cell.metric,
    }


def _spec_columns(spec: TaskSpec) -> dict[str, Any]:
    backend = {"backend": spec.backend.name, "device": MISSING_VERDICT}
    facts = {"cell": spec.name, "model": spec.model.name, **backend, "metric": None}
    return {**facts, "precision": spec.precision, "quantized": spec.precision}


def _missing_row(facts: dict[str, Any], method: str) -> dict[str, Any]:
    """A row that was asked for and is not there."""
    nothing = dict.fromkeys(MAIN_COLUMNS)
    counts = {"builds_ok": 0, "builds": 0, "beyond": False, "best": False, "tied": False}
    words = {"method": method, "verdict": MISSING_VERDICT, "decision": MISSING_VERDICT, "reason": "", "row": ""}
    return {**nothing, **facts, **counts, **words}


def _shipping_decision(cell: CellResults, line: Mapping[str, Any]) -> str:
    """What to do with a row, by its verdict and the bound: ship it or not, and why not."""
    verdict = line["verdict"]
    if verdict == "baseline" or line["precision"] is None:
        return str(verdict)
    if verdict not in ("faster", "tie", "slower"):
        return f"not shipped: {verdict}" if verdict != MISSING_VERDICT else MISSING_VERDICT
    if cell.blind:
        return "not shipped: the float model scores nothing"
    if not cell.obeys(line["row"]):
        return "not shipped: accuracy" if line["score"] is not None else f"not shipped: {_unscored_reason(cell, line)}"
    if verdict != "faster":
        return "tie: use float" if verdict == "tie" and line["method"] != FLOAT_ROW else f"not shipped: {verdict}"
    shipped = _shipping_label(cell, line)
    return f"{shipped}, once confirmed on a quiet machine" if disturbance_note(cell.disturbed) else shipped


def _shipping_label(cell: CellResults, line: Mapping[str, Any]) -> str:
    """What may be said of a row that is faster: nobody ships what was held to no bound on accuracy."""
    if line["score"] is not None and cell.allowed is not None:
        return "ship: fastest" if line["best"] else "ship"
    why = "accuracy unknown" if line["score"] is None else "no bound on accuracy"
    return f"{'fastest' if line['best'] else 'faster'}, {why}"


def _unscored_reason(cell: CellResults, line: Mapping[str, Any]) -> str:
    """Why a row has no accuracy: outputs that are not finite, as a rule."""
    reason = cell.scores.get(line["row"], {}).get("reason")
    return "not scored" if reason is None else f"not scored ({_truncate_reason(str(reason))})"


def _truncate_reason(reason: str) -> str:
    return textwrap.shorten(reason, MAX_REASON_CHARS, placeholder=" ...")


def _choice_row(cell: CellResults, pick: Choice) -> dict[str, Any]:
    summary = cell.summaries.get(pick.row)
    row = cell.rows.get(pick.row)
    good, tried = _count_builds(cell, pick)
    drop = cell.drop(pick.row)
    verdict, reason = _speed_verdict(cell, pick)
    return {
        **_task_columns(cell),
        "precision": _precision_label(cell.facts, pick),
        "method": pick.method,
        **_interval_columns("latency{}_ms", None if summary is None else summary.latency_ms),
        **_interval_columns("speedup{}", None if summary is None else summary.speedup),
        "score": cell.score(pick.row),
        **_interval_columns("drop{}", _accuracy_drop(cell, pick.row)),
        "pairs": None if row is None else row.pairs,
        "builds_ok": good,
        "builds": tried,
        "minutes": pick.minutes,
        "verdict": verdict,
        "beyond": drop is not None and cell.goal.loss_excess(drop) > 0,
        "reason": reason,
        "seed": pick.seed,
        "budget": pick.budget,
        "search_ms": pick.search_ms,
        "shrinkage": _shrinkage(cell, pick),
        "runoff": pick.runoff,
        "scored": pick.scored,
        "agreement": pick.agreement,
        "row": pick.row,
        "sha256": None if row is None else row.sha256,
    }


def _interval_columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    values = (None,) * 3 if interval is None else (interval.value, interval.low, interval.high)
    shown = (None if value is None or np.isnan(value) else value for value in values)
    return {name.format(part): value for part, value in zip(("", "_low", "_high"), shown, strict=True)}


def _accuracy_drop(cell: CellResults, row: str) -> Interval | None:
    """Loss of accuracy, with its interval over images where the records allow one."""
    value = cell.drop(row)
    if value is None or cell.metric is None:
        return None
    if row != FLOAT_ROW:
        reference, found = (decode_accuracy(cell.scores[name]) for name in (FLOAT_ROW, row))
        try:
            estimate = drop_estimate(reference, found, cell.metric, higher_is_better=cell.higher_is_better)
        except ValueError as error:
            logger.warning("%s: no interval of the drop of %s: %s", cell.folder, row, error)
            estimate = None
        if estimate is not None:
            return estimate.interval
    return Interval(value=value, low=float("nan"), high=float("nan"))


def _shrinkage(cell: CellResults, pick: Choice) -> float | None:
    """By how much the confirmed speedup is less than the one that the search saw: what choosing by luck had added."""
    summary = cell.summaries.get(pick.row)
    search = _find_search(cell, pick)
    base_ms = None if search is None else search_float_ms(cell, search)
    if summary is None or base_ms is None or pick.search_ms is None:
        return None
    return summary.shrinkage(base_ms / pick.search_ms)


def _count_builds(cell: CellResults, pick: Choice) -> tuple[int, int]:
    """Builds that worked, of those tried: in the search for a searcher, in the confirmation for the others."""
    if pick.kind == "search":
        search = _find_search(cell, pick)
        return (0, 0) if search is None else (search.good, search.evaluations)
    summary = cell.summaries.get(pick.row)
    return (0, cell.lost.get(pick.row, 0)) if summary is None else (summary.builds_ok, summary.builds)


def _find_search(cell: CellResults, pick: Choice) -> SearchLog | None:
    return next((s for s in cell.searches if (s.searcher, s.seed) == (pick.method, pick.seed)), None)


def _speed_verdict(cell: CellResults, pick: Choice) -> tuple[str, str]:
    """Verdict for the table, and the whole reason where there is none."""
    summary, failed = cell.summaries.get(pick.row), cell.failed.get(pick.row)
    if cell.wrong(pick.row) and (pick.row != FLOAT_ROW or pick.kind != "float"):
        return cell.checks[pick.row].label, str(cell.checks[pick.row])
    if pick.reason:
        return _truncate_reason(pick.reason), pick.reason
    if summary is not None:
        return ("baseline" if pick.row == FLOAT_ROW and pick.kind == "float" else summary.verdict), ""
    return ("not confirmed", "") if failed is None else (f"failed: {failed.stage}", failed.reason)


def backend_label(cell: CellResults) -> str:
    """The backend by the label that the experiment gave it: what the cell's name has between model and precision."""
    prefix, suffix = f"{cell.facts['model']}-", f"-{cell.facts['precision']}"
    label = cell.name.removeprefix(prefix).removesuffix(suffix)
    return label if f"{prefix}{label}{suffix}" == cell.name else str(cell.facts["backend"].get("name"))


def _device_label(cell: CellResults) -> str:
    backend = cell.facts["backend"]
    device = str(backend.get("device", backend.get("name")))
    if device == cell.environment.get("cpu", {}).get("model"):  # older runs have the bare name
        device = processor_label(device, cell.environment)
    threads = backend.get("options", {}).get("threads")
    return device if threads is None else f"{device}, {threads} thread{'' if threads == 1 else 's'}"


def _precision_label(facts: Mapping[str, Any], pick: Choice) -> str:
    strongest = str(facts["backend"].get("float_precision", "float"))
    if pick.kind == "float":
        return pick.row.removeprefix(f"{FLOAT_ROW}-") if pick.row != FLOAT_ROW else strongest
    return f"{facts['precision']}+{strongest}"
