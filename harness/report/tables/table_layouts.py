"""The tables of a results folder, ready to show: what is rounded how, what stands out, what a reader must know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.accuracy.metrics.closeness import WORST_PREFIX
from harness.report.frames.budget_frames import budget_frame, cost_frame, early_end_notes, failure_notes, target_frame
from harness.report.frames.confirmation_samples import variance_frame
from harness.report.frames.decision import BEST_FOUND_LABEL, decision_frame
from harness.report.frames.gain_over_fixed import fixed_frame, fixed_table
from harness.report.frames.main_frame import finalist_frame, main_frame, precision_frame, with_backend_column
from harness.report.frames.speedup_overview import overview_frame, overview_table
from harness.report.load.display_names import (
    METRIC_CAPS,
    METRIC_FORMATS,
    format_drop,
    row_labels,
    score_column_title,
    verdict_label,
)
from harness.report.load.results import Results
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval
from harness.report.tables.captions import (
    BUDGET_NOTE,
    COST_NOTE,
    FINALIST_NOTE,
    LOSS_NOTE,
    PRECISION_NOTE,
    RUNNER_UP_NOTE,
    TARGET_NOTE,
    VARIANCE_NOTE,
)
from harness.report.tables.notes import backend_notes, data_notes, decision_note, floor_note, main_note, noise_note
from harness.report.tables.study_layouts import study_tables
from harness.results_dir.artifacts import FLOAT_ROW
from harness.statistics import Interval

__all__ = ["TIMED_TABLES", "build_tables"]

LATENCY, SPEEDUP, SCORE = "latency ms [CI]", "speedup [CI]", "score"
NEVER_REACHED = "never"
TIMED_TABLES = frozenset({
    "main", "overview", "precision", "decision", "budget", "fixed", "targets", "finalists", "ablation", "pairs",
    "transfer", "transfer_models",
})  # fmt: skip
"""Tables of latencies: what casts doubt on those, and their floor, stands below each."""
NOISE_FLOOR_TABLES = frozenset({"main", "fixed"})
"""Those of them that tell the floors themselves."""
COMPLETE_BUDGET_TABLES = frozenset({"main", "overview", "budget", "fixed", "targets", "pairs", "ablation"})
"""Tables whose reader takes it that budgets were spent."""
SELECTION_TABLES = frozenset({"main", "decision", "finalists"})
"""Tables of what searches and their seeds have chosen, which tell by what."""


def build_tables(results: Results) -> Iterator[ReportTable]:
    """All tables that have a row, the main one first; each is made when it is asked for."""
    told = (*data_notes(results.cells), *backend_notes(results.cells))
    ends = early_end_notes(results)
    doubts = tuple(filter(None, map(noise_note, results.cells)))
    losses = [LOSS_NOTE] if any(pick.loss is not None for cell in results.cells for pick in cell.picks) else []

    def noted(table: ReportTable) -> ReportTable:
        floors = [floor_note(results.cells)] if table.name in TIMED_TABLES - NOISE_FLOOR_TABLES else []
        chosen, spent = (
            (losses if table.name in SELECTION_TABLES else []),
            (ends if table.name in COMPLETE_BUDGET_TABLES else []),
        )
        note = "\n".join([table.note, *chosen, *floors, *spent, *told])
        return replace(table, note=note, warnings=(*(doubts if table.name in TIMED_TABLES else ()), *table.warnings))

    return (noted(table) for table in _iter_tables(results) if len(table.cells))


def _worst_output_notes(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """Yield which output, or part of one, the fidelity of each row is of, where a model has several."""
    for cell in results.cells:
        labels, notes = row_labels(cell, main), {row: str(score.get("note")) for row, score in cell.scores.items()}
        worst = [f"{labels[row]}: {said}" for row in labels if (said := notes.get(row, "").partition(WORST_PREFIX)[2])]
        if worst:
            yield f"Worst output by fidelity, {cell.name}: {'; '.join(worst)}."


def _iter_tables(results: Results) -> Iterator[ReportTable]:
    main = main_frame(results)
    methods = {(cell.name, tool): method for cell in results.cells for tool, method in cell.tool_methods.items()}

    def main_row(row: dict[Any, Any]) -> dict[str, str]:
        method = methods.get((row["cell"], row["method"]))
        return {**_format_main_row(row), **({} if method is None else {"method": f"{row['method']} ({method})"})}

    note = "\n".join([main_note(results), *_worst_output_notes(results, main)])
    yield _mark_rows("main", "Main results", with_backend_column(main), main_row, note)
    yield overview_table(overview_frame(main, budget_frame(results)))
    precision = with_backend_column(precision_frame(results))
    yield _mark_rows("precision", "Precision and decision", precision, _format_precision_row, PRECISION_NOTE)
    yield _decision_table(with_backend_column(decision_frame(results)))
    yield _budget_table(budget_frame(results))
    yield fixed_table(fixed_frame(results))
    yield _target_table(target_frame(results))
    yield _finalist_table(finalist_frame(results))
    yield _cost_table(cost_frame(results), failure_notes(results))
    yield from study_tables(results)
    yield _variance_table(variance_frame(results))


def _mark_rows(
    name: str, title: str, raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]], note: str
) -> ReportTable:
    rows = raw.to_dict("records")

    def marked(key: str) -> frozenset[tuple[int, str]]:
        return frozenset((n, SPEEDUP) for n, row in enumerate(rows) if row[key])  # latencies are not paired

    cells = _format_rows(raw, show)
    return ReportTable(
        name=name, title=title, cells=cells, raw=raw, note=note, bold=marked("best"), underlined=marked("tied")
    )


def _format_rows(raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]]) -> pd.DataFrame:
    shown = pd.DataFrame([show(row) for row in raw.to_dict("records")])
    return shown.rename(columns={SCORE: score_column_title(raw.get("metric", ()))})


def _format_main_row(row: dict[Any, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "device": row["device"],
        "precision": row["precision"],
        "method": row["method"],
        LATENCY: format_interval(row["latency_ms"], row["latency_low_ms"], row["latency_high_ms"], 3),
        SPEEDUP: format_interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
        SCORE: _format_score(row),
        "drop [CI]": _format_drop(row),
        "Q/DQ pairs": MISSING_CELL if pd.isna(row["pairs"]) else f"{row['pairs']:.0f}",
        "builds ok": f"{row['builds_ok']}/{row['builds']}",
        "minutes": MISSING_CELL if pd.isna(row["minutes"]) else f"{row['minutes']:.1f}",
        "verdict": "tie: use float" if row["verdict"] == "tie" and row["method"] != FLOAT_ROW else verdict_label(row),
    }


def _format_precision_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _format_main_row(row)
    kept = ("model", "device", "precision", "method", LATENCY, SPEEDUP, SCORE, "drop [CI]")
    return {**{column: shown[column] for column in kept}, "decision": row["decision"]}


def _format_finalist_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _format_main_row(row)
    kept = ("method", LATENCY, SPEEDUP, SCORE, "drop [CI]", "Q/DQ pairs", "verdict")
    line = {"cell": row["cell"], **{column: shown[column] for column in kept}}
    line["shrinkage"] = MISSING_CELL if pd.isna(row["shrinkage"]) else f"{row['shrinkage']:+.2f}"
    return {**line, "seed": f"{row['seed']:.0f}", "placement": row["row"] or MISSING_CELL}


def _finalist_table(finalists: pd.DataFrame) -> ReportTable:
    cells = _format_rows(finalists, _format_finalist_row)
    second = [RUNNER_UP_NOTE] if finalists["method"].str.contains(" #").any() else []
    note = "\n".join([FINALIST_NOTE, *second])
    return ReportTable(name="finalists", title="Finalists", cells=cells, raw=finalists, note=note)


def _format_score(row: dict[Any, Any]) -> str:
    if pd.isna(row["score"]):
        return MISSING_CELL
    name, digits, unit = METRIC_FORMATS.get(row["metric"], (row["metric"], 4, ""))
    return f"{name} {row['score']:.{digits}f}{unit}"


def _format_drop(row: dict[Any, Any]) -> str:
    if pd.isna(row["drop"]) or row["metric"] in METRIC_CAPS:
        return MISSING_CELL
    low, high = (math.nan if pd.isna(row[limit]) else row[limit] for limit in ("drop_low", "drop_high"))
    return format_drop(Interval(value=row["drop"], low=low, high=high), row["metric"])


def _decision_table(decisions: pd.DataFrame) -> ReportTable:
    """One row a model, device and role; several precisions stand beside each other."""
    several = len(decisions) > 0 and decisions["quantized"].nunique() > 1
    score = score_column_title(decisions.get("metric", ()))
    lines: list[dict[str, str]] = []
    marks: dict[str, set[tuple[int, str]]] = {"best": set(), "tied": set()}
    for (model, _), part in decisions.groupby(["model", "backend"], sort=False) if len(decisions) else ():
        for role, roles in part.groupby("role", sort=False):
            line = {
                "model": str(model),
                "device": str(roles["device"].iloc[0]),
                "batch": _format_integer(roles["batch"].iloc[0]),
            }
            line["row"] = str(role)
            for row in roles.to_dict("records"):
                before = f"{row['quantized']} " if several else ""
                line |= {
                    f"{before}{score if head == SCORE else head}": text
                    for head, text in _format_decision_row(row).items()
                }
                for key, places in marks.items():
                    places |= {(len(lines), f"{before}{SPEEDUP}")} if row[key] else set()
            lines.append(line)
    cells = pd.DataFrame(lines).fillna(MISSING_CELL)
    cells = cells.drop(columns=[head for head in cells if set(cells[head]) == {MISSING_CELL}])
    bold, underlined = (frozenset(places) for places in marks.values())
    return ReportTable(
        name="decision", title="Decision", cells=cells, raw=decisions, note=decision_note(decisions), bold=bold,
        underlined=underlined,
    )  # fmt: skip


def _format_decision_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _format_main_row(row)
    size = MISSING_CELL if pd.isna(row["megabytes"]) else f"{row['megabytes']:.1f}"
    kept = {head: shown[head] for head in ("precision", LATENCY, SPEEDUP, SCORE, "drop [CI]", "Q/DQ pairs")}
    by = f" ({row['method']})" if row["role"] == BEST_FOUND_LABEL else ""
    return {**kept, "file MB": size, "decision": f"{row['decision']}{by}"}


def _format_integer(value: float | None) -> str:
    return MISSING_CELL if pd.isna(value) else f"{value:.0f}"


def _budget_table(budgets: pd.DataFrame) -> ReportTable:
    lines: list[dict[str, str]] = []
    marks: dict[str, set[tuple[int, str]]] = {"best": set(), "tied": set()}
    for (cell, searcher), part in budgets.groupby(["cell", "searcher"], sort=False):
        line = {"cell": str(cell), "searcher": str(searcher)}
        for row in part.to_dict("records"):
            column = f"{row['budget']} evaluations"
            line[column] = format_interval(row["speedup"], row["low"], row["high"])
            for key, places in marks.items():
                if row[key]:
                    places.add((len(lines), column))
        lines.append({**line, "seeds": str(part["seeds"].max())})
    best, tied = (frozenset(places) for places in marks.values())
    cells = pd.DataFrame(lines).fillna(MISSING_CELL)
    if "seeds" in cells:
        cells = cells[[column for column in cells if column != "seeds"] + ["seeds"]]
    return ReportTable(
        name="budget", title="Budgets", cells=cells, raw=budgets, note=BUDGET_NOTE, bold=best, underlined=tied
    )


def _target_table(targets: pd.DataFrame) -> ReportTable:
    lines = []
    for (cell, searcher), part in targets.groupby(["cell", "searcher"], sort=False) if len(targets) else ():
        line = {"cell": str(cell), "searcher": str(searcher)}
        for row in part.to_dict("records"):
            line[f"to {row['share']:.0%} of the best gain"] = _format_evaluations(row)
            line[f"reached {row['share']:.0%}"] = f"{row['reached']}/{row['seeds']}"
        lines.append(line)
    return ReportTable(
        name="targets",
        title="Evaluations to a target",
        cells=pd.DataFrame(lines).fillna(MISSING_CELL),
        raw=targets,
        note=TARGET_NOTE,
    )


def _format_evaluations(row: dict[Any, Any]) -> str:
    if not row["reached"]:
        return NEVER_REACHED
    middle, low, high = (_format_spent(row[f"evaluations{end}"], "{:.0f}") for end in ("", "_low", "_high"))
    shown = middle if row["seeds"] == 1 else f"{middle} [{low}, {high}]"
    return f"{shown} ({_format_spent(row['minutes'], '{:.2f} min')})"


def _format_spent(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else NEVER_REACHED


def _cost_table(cost: pd.DataFrame, failed: Sequence[str]) -> ReportTable:
    lines = []
    for (cell, searcher), part in cost.groupby(["cell", "searcher"], sort=False) if len(cost) else ():
        total_s = part["total_s"].sum()
        shares = {
            what: _format_time_share(part[f"{what}_s"].sum(skipna=False), total_s)
            for what in ("build", "sampling", "evaluation", "failures", "harness", "search")
        }
        line = {"cell": cell, "searcher": searcher, "seeds": str(len(part))}
        line["evaluations"] = str(part["evaluations"].sum())
        wanted = part["readings"].sum() + part["saved"].sum()
        racing = f"{part['saved'].sum() / wanted:.1%}" if wanted else MISSING_CELL
        counted = {
            "readings saved": racing, "built again": str(part["surprises"].sum()),
            "taken again": str(part["disturbed"].sum()), "unsteady": str(part["unsteady"].sum()),
        }  # fmt: skip
        lines.append({**line, "minutes": f"{total_s / 60:.1f}", **shares, **counted})
    replayed = len(cost) > 0 and cost["build_s"].isna().any()
    note = f"{COST_NOTE} A dash: builds that are replayed took their time elsewhere." if replayed else COST_NOTE
    note = "\n".join([note, *failed])
    cells = pd.DataFrame(lines)
    if len(cost) and cost["search_s"].isna().all():
        cells = cells.drop(columns="search")
    return ReportTable(name="cost", title="Cost of the searches", cells=cells, raw=cost, note=note)


def _format_time_share(spent_s: float, total_s: float) -> str:
    return f"{spent_s / total_s:.1%}" if total_s and not math.isnan(spent_s) else MISSING_CELL


def _variance_table(variance: pd.DataFrame) -> ReportTable:
    cells = _format_rows(
        variance,
        lambda row: {
            "cell": row["cell"],
            "rows": str(row["rows"]),
            **{f"between {what}s": f"{row[what]:.1%}" for what in ("inference", "turn", "build")},
        },
    )
    return ReportTable(name="variance", title="Where latency varies", cells=cells, raw=variance, note=VARIANCE_NOTE)
