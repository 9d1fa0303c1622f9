"""The tables of a results folder, ready to show: what is rounded how, what stands out, what a reader must know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.accuracy.metrics.closeness import WORST
from harness.report.frames.budget_frames import budget_frame, cost_frame, early_ends, failures, target_frame
from harness.report.frames.confirmation_samples import variance_frame
from harness.report.frames.decision import BEST, decision_frame
from harness.report.frames.gain_over_fixed import fixed_frame, fixed_table
from harness.report.frames.main_frame import finalist_frame, main_frame, precision_frame, told_apart
from harness.report.frames.speedup_overview import overview_frame, overview_table
from harness.report.load.display_names import CAPPED, METRICS, judged, labels_of, score_head, shown_drop
from harness.report.load.results import Results
from harness.report.report_table import MISSING, Table, interval
from harness.report.tables.captions import (
    BUDGET_NOTE,
    COST_NOTE,
    FINALIST_NOTE,
    LOSS_NOTE,
    PRECISION_NOTE,
    SECOND_NOTE,
    TARGET_NOTE,
    VARIANCE_NOTE,
)
from harness.report.tables.notes import backend_notes, data_notes, decision_note, floor_note, main_note, noise
from harness.report.tables.study_layouts import study_tables
from harness.results_dir.artifacts import FLOAT_ROW
from harness.statistics import Interval

__all__ = ["TIMED", "tables_of"]

LATENCY, SPEEDUP, SCORE = "latency ms [CI]", "speedup [CI]", "score"
NEVER = "never"
TIMED = frozenset({
    "main", "overview", "precision", "decision", "budget", "fixed", "targets", "finalists", "ablation", "pairs",
    "transfer", "transfer_models",
})  # fmt: skip
"""Tables of latencies: what casts doubt on those, and their floor, stands below each."""
FLOORED = frozenset({"main", "fixed"})
"""Those of them that tell the floors themselves."""
SPENT = frozenset({"main", "overview", "budget", "fixed", "targets", "pairs", "ablation"})
"""Tables whose reader takes it that budgets were spent."""
CHOSEN = frozenset({"main", "decision", "finalists"})
"""Tables of what searches and their seeds have chosen, which tell by what."""


def tables_of(results: Results) -> Iterator[Table]:
    """All tables that have a row, the main one first; each is made when it is asked for."""
    told = (*data_notes(results.cells), *backend_notes(results.cells))
    ends = early_ends(results)
    doubts = tuple(filter(None, map(noise, results.cells)))
    losses = [LOSS_NOTE] if any(pick.loss is not None for cell in results.cells for pick in cell.picks) else []

    def noted(table: Table) -> Table:
        floors = [floor_note(results.cells)] if table.name in TIMED - FLOORED else []
        chosen, spent = (losses if table.name in CHOSEN else []), (ends if table.name in SPENT else [])
        note = "\n".join([table.note, *chosen, *floors, *spent, *told])
        return replace(table, note=note, warnings=(*(doubts if table.name in TIMED else ()), *table.warnings))

    return (noted(table) for table in _made(results) if len(table.cells))


def _worst_outputs(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """Yield which output, or part of one, the fidelity of each row is of, where a model has several."""
    for cell in results.cells:
        labels, notes = labels_of(cell, main), {row: str(score.get("note")) for row, score in cell.scores.items()}
        worst = [f"{labels[row]}: {said}" for row in labels if (said := notes.get(row, "").partition(WORST)[2])]
        if worst:
            yield f"Worst output by fidelity, {cell.name}: {'; '.join(worst)}."


def _made(results: Results) -> Iterator[Table]:
    main = main_frame(results)
    methods = {(cell.name, tool): method for cell in results.cells for tool, method in cell.tool_methods.items()}

    def main_row(row: dict[Any, Any]) -> dict[str, str]:
        method = methods.get((row["cell"], row["method"]))
        return {**_main_row(row), **({} if method is None else {"method": f"{row['method']} ({method})"})}

    note = "\n".join([main_note(results), *_worst_outputs(results, main)])
    yield _marked("main", "Main results", told_apart(main), main_row, note)
    yield overview_table(overview_frame(main, budget_frame(results)))
    precision = told_apart(precision_frame(results))
    yield _marked("precision", "Precision and decision", precision, _precision_row, PRECISION_NOTE)
    yield _decision(told_apart(decision_frame(results)))
    yield _budgets(budget_frame(results))
    yield fixed_table(fixed_frame(results))
    yield _targets(target_frame(results))
    yield _finalists(finalist_frame(results))
    yield _cost(cost_frame(results), failures(results))
    yield from study_tables(results)
    yield _variance(variance_frame(results))


def _marked(
    name: str, title: str, raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]], note: str
) -> Table:
    rows = raw.to_dict("records")

    def marked(key: str) -> frozenset[tuple[int, str]]:
        return frozenset((n, SPEEDUP) for n, row in enumerate(rows) if row[key])  # latencies are not paired

    cells = _formatted(raw, show)
    return Table(
        name=name, title=title, cells=cells, raw=raw, note=note, bold=marked("best"), underlined=marked("tied")
    )


def _formatted(raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]]) -> pd.DataFrame:
    shown = pd.DataFrame([show(row) for row in raw.to_dict("records")])
    return shown.rename(columns={SCORE: score_head(raw.get("metric", ()))})


def _main_row(row: dict[Any, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "device": row["device"],
        "precision": row["precision"],
        "method": row["method"],
        LATENCY: interval(row["latency_ms"], row["latency_low_ms"], row["latency_high_ms"], 3),
        SPEEDUP: interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
        SCORE: _score(row),
        "drop [CI]": _drop(row),
        "Q/DQ pairs": MISSING if pd.isna(row["pairs"]) else f"{row['pairs']:.0f}",
        "builds ok": f"{row['builds_ok']}/{row['builds']}",
        "minutes": MISSING if pd.isna(row["minutes"]) else f"{row['minutes']:.1f}",
        "verdict": "tie: use float" if row["verdict"] == "tie" and row["method"] != FLOAT_ROW else judged(row),
    }


def _precision_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _main_row(row)
    kept = ("model", "device", "precision", "method", LATENCY, SPEEDUP, SCORE, "drop [CI]")
    return {**{column: shown[column] for column in kept}, "decision": row["decision"]}


def _finalist_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _main_row(row)
    kept = ("method", LATENCY, SPEEDUP, SCORE, "drop [CI]", "Q/DQ pairs", "verdict")
    line = {"cell": row["cell"], **{column: shown[column] for column in kept}}
    line["shrinkage"] = MISSING if pd.isna(row["shrinkage"]) else f"{row['shrinkage']:+.2f}"
    return {**line, "seed": f"{row['seed']:.0f}", "placement": row["row"] or MISSING}


def _finalists(finalists: pd.DataFrame) -> Table:
    cells = _formatted(finalists, _finalist_row)
    second = [SECOND_NOTE] if finalists["method"].str.contains(" #").any() else []
    note = "\n".join([FINALIST_NOTE, *second])
    return Table(name="finalists", title="Finalists", cells=cells, raw=finalists, note=note)


def _score(row: dict[Any, Any]) -> str:
    if pd.isna(row["score"]):
        return MISSING
    name, digits, unit = METRICS.get(row["metric"], (row["metric"], 4, ""))
    return f"{name} {row['score']:.{digits}f}{unit}"


def _drop(row: dict[Any, Any]) -> str:
    if pd.isna(row["drop"]) or row["metric"] in CAPPED:
        return MISSING
    low, high = (math.nan if pd.isna(row[limit]) else row[limit] for limit in ("drop_low", "drop_high"))
    return shown_drop(Interval(value=row["drop"], low=low, high=high), row["metric"])


def _decision(decisions: pd.DataFrame) -> Table:
    """One row a model, device and role; several precisions stand beside each other."""
    several = len(decisions) > 0 and decisions["quantized"].nunique() > 1
    score = score_head(decisions.get("metric", ()))
    lines: list[dict[str, str]] = []
    marks: dict[str, set[tuple[int, str]]] = {"best": set(), "tied": set()}
    for (model, _), part in decisions.groupby(["model", "backend"], sort=False) if len(decisions) else ():
        for role, roles in part.groupby("role", sort=False):
            line = {
                "model": str(model),
                "device": str(roles["device"].iloc[0]),
                "batch": _whole(roles["batch"].iloc[0]),
            }
            line["row"] = str(role)
            for row in roles.to_dict("records"):
                before = f"{row['quantized']} " if several else ""
                line |= {f"{before}{score if head == SCORE else head}": text for head, text in _decided(row).items()}
                for key, places in marks.items():
                    places |= {(len(lines), f"{before}{SPEEDUP}")} if row[key] else set()
            lines.append(line)
    cells = pd.DataFrame(lines).fillna(MISSING)
    cells = cells.drop(columns=[head for head in cells if set(cells[head]) == {MISSING}])
    bold, underlined = (frozenset(places) for places in marks.values())
    return Table(
        name="decision", title="Decision", cells=cells, raw=decisions, note=decision_note(decisions), bold=bold,
        underlined=underlined,
    )  # fmt: skip


def _decided(row: dict[Any, Any]) -> dict[str, str]:
    shown = _main_row(row)
    size = MISSING if pd.isna(row["megabytes"]) else f"{row['megabytes']:.1f}"
    kept = {head: shown[head] for head in ("precision", LATENCY, SPEEDUP, SCORE, "drop [CI]", "Q/DQ pairs")}
    by = f" ({row['method']})" if row["role"] == BEST else ""
    return {**kept, "file MB": size, "decision": f"{row['decision']}{by}"}


def _whole(value: float | None) -> str:
    return MISSING if pd.isna(value) else f"{value:.0f}"


def _budgets(budgets: pd.DataFrame) -> Table:
    lines: list[dict[str, str]] = []
    marks: dict[str, set[tuple[int, str]]] = {"best": set(), "tied": set()}
    for (cell, searcher), part in budgets.groupby(["cell", "searcher"], sort=False):
        line = {"cell": str(cell), "searcher": str(searcher)}
        for row in part.to_dict("records"):
            column = f"{row['budget']} evaluations"
            line[column] = interval(row["speedup"], row["low"], row["high"])
            for key, places in marks.items():
                if row[key]:
                    places.add((len(lines), column))
        lines.append({**line, "seeds": str(part["seeds"].max())})
    best, tied = (frozenset(places) for places in marks.values())
    cells = pd.DataFrame(lines).fillna(MISSING)
    if "seeds" in cells:
        cells = cells[[column for column in cells if column != "seeds"] + ["seeds"]]
    return Table(name="budget", title="Budgets", cells=cells, raw=budgets, note=BUDGET_NOTE, bold=best, underlined=tied)


def _targets(targets: pd.DataFrame) -> Table:
    lines = []
    for (cell, searcher), part in targets.groupby(["cell", "searcher"], sort=False) if len(targets) else ():
        line = {"cell": str(cell), "searcher": str(searcher)}
        for row in part.to_dict("records"):
            line[f"to {row['share']:.0%} of the best gain"] = _evaluations(row)
            line[f"reached {row['share']:.0%}"] = f"{row['reached']}/{row['seeds']}"
        lines.append(line)
    return Table(
        name="targets",
        title="Evaluations to a target",
        cells=pd.DataFrame(lines).fillna(MISSING),
        raw=targets,
        note=TARGET_NOTE,
    )


def _evaluations(row: dict[Any, Any]) -> str:
    if not row["reached"]:
        return NEVER
    middle, low, high = (_spent(row[f"evaluations{end}"], "{:.0f}") for end in ("", "_low", "_high"))
    shown = middle if row["seeds"] == 1 else f"{middle} [{low}, {high}]"
    return f"{shown} ({_spent(row['minutes'], '{:.2f} min')})"


def _spent(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else NEVER


def _cost(cost: pd.DataFrame, failed: Sequence[str]) -> Table:
    lines = []
    for (cell, searcher), part in cost.groupby(["cell", "searcher"], sort=False) if len(cost) else ():
        total_s = part["total_s"].sum()
        shares = {
            what: _share(part[f"{what}_s"].sum(skipna=False), total_s)
            for what in ("build", "sampling", "evaluation", "failures", "harness", "search")
        }
        line = {"cell": cell, "searcher": searcher, "seeds": str(len(part))}
        line["evaluations"] = str(part["evaluations"].sum())
        wanted = part["readings"].sum() + part["saved"].sum()
        racing = f"{part['saved'].sum() / wanted:.1%}" if wanted else MISSING
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
    return Table(name="cost", title="Cost of the searches", cells=cells, raw=cost, note=note)


def _share(spent_s: float, total_s: float) -> str:
    return f"{spent_s / total_s:.1%}" if total_s and not math.isnan(spent_s) else MISSING


def _variance(variance: pd.DataFrame) -> Table:
    cells = _formatted(
        variance,
        lambda row: {
            "cell": row["cell"],
            "rows": str(row["rows"]),
            **{f"between {what}s": f"{row[what]:.1%}" for what in ("inference", "turn", "build")},
        },
    )
    return Table(name="variance", title="Where latency varies", cells=cells, raw=variance, note=VARIANCE_NOTE)
