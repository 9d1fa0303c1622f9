"""The tables of a results folder, ready to show: what is rounded how, what stands out, what a reader must know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd

from harness.report.frames import finalist_frame, main_frame, precision_frame
from harness.report.results import CellResults, Results
from harness.report.samples import variance_frame
from harness.report.searching import budget_frame, cost_frame, target_frame
from harness.report.tables import MISSING, Table, interval

__all__ = ["METRICS", "partial", "tables_of"]

BUDGET_NOTE = (
    "Confirmed speedup over the float baseline of the incumbent after so many evaluations: median over seeds "
    "[95 % interval of the median; the range where there are fewer than six seeds]. Bold: the highest median of a "
    "cell; underlined: its interval meets that of the highest."
)
FINALIST_NOTE = (
    "Every placement that a search sent to the confirmation at its largest budget; METHOD #2 is the second best of a "
    "search by its own samples. The main table shows the best of each searcher by these samples, never by the "
    "confirmed ones."
)
COST_NOTE = (
    "Searches of a cell together, wall-clock from the first proposal; composing, calibration and confirmation are "
    "not in it. Harness: the share outside build, sampling, evaluation and failed candidates."
)
PRECISION_NOTE = (
    "Decision: shipped is what is faster than the float baseline beyond the noise, and whose drop of accuracy is "
    "within the bound where there is one. Brackets: 95 %; of the drop by the paired bootstrap over images, where the "
    "run kept what it takes."
)
SIDE_NOTE = "The same methods on the same model and device, quantized to different precisions; speedup over float."
TARGET_NOTE = (
    "Evaluations (minutes) until the incumbent had this share of the best gain that any search of the cell found, by "
    "search samples: median over seeds, range in brackets, and how many of the seeds came so far. Initial placements "
    "count."
)
VARIANCE_NOTE = (
    "Relative standard deviation of single inferences within a turn, of turns within a build, and of fresh builds: "
    "nested analysis of variance on logarithms, median over the rows of a cell."
)
METRICS = {"map": ("mAP", 4, ""), "top1": ("top-1", 4, ""), "sqnr_db": ("SQNR", 1, " dB")}
"""How a metric is shown: name, digits, unit. Others are shown under their own name with four digits."""
LATENCY, SPEEDUP = "latency ms [CI]", "speedup [CI]"


def tables_of(results: Results) -> Iterator[Table]:
    """All tables that have a row, the main one first."""
    main, precision = _told_apart(main_frame(results)), _told_apart(precision_frame(results))
    finalists = finalist_frame(results)
    found = (
        _marked("main", "Main results", main, _main_row, _note(results)),
        _marked("precision", "Precision and decision", precision, _precision_row, PRECISION_NOTE),
        _side_by_side(main),
        _budgets(budget_frame(results)),
        _targets(target_frame(results)),
        Table(
            name="finalists",
            title="Finalists",
            cells=_formatted(finalists, _finalist_row),
            raw=finalists,
            note=FINALIST_NOTE,
        ),
        _cost(cost_frame(results)),
        _variance(variance_frame(results)),
    )
    return (table for table in found if len(table.cells))


def _told_apart(main: pd.DataFrame) -> pd.DataFrame:
    """Devices with the backend before them where there are several backends."""
    several = main["backend"].nunique() > 1
    return main.assign(device=main["backend"] + " on " + main["device"]) if several else main


def partial(results: Results) -> str:
    """What a run that has not ended still lacks; "" where nothing."""
    names = [cell.name for cell in results.cells if not cell.complete] + list(results.waiting)
    return f"UNFINISHED, so this is partial: {', '.join(names)}; run the same command again to go on." if names else ""


def _marked(
    name: str, title: str, raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]], note: str
) -> Table:
    rows = raw.to_dict("records")

    def marked(key: str) -> frozenset[tuple[int, str]]:
        return frozenset((n, column) for n, row in enumerate(rows) if row[key] for column in (LATENCY, SPEEDUP))

    cells = _formatted(raw, show)
    return Table(
        name=name, title=title, cells=cells, raw=raw, note=note, bold=marked("best"), underlined=marked("tied")
    )


def _note(results: Results) -> str:
    floors = [f"{cell.name} {cell.floor:.1%}" for cell in results.cells if cell.floor is not None]
    random = sorted({cell.facts["model"] for cell in results.cells if cell.facts["calibrated_on"] == "random data"})
    bounds = sorted({cell.goal.max_drop for cell in results.cells if cell.goal.metric is not None})
    builds = sorted({cell.builds for cell in results.cells if cell.builds is not None})
    within = f" among those whose drop is at most {', '.join(f'{b:g}' for b in bounds)}" if bounds else ""
    lines = [
        f"Latency: geometric mean over {' or '.join(str(n) for n in builds) or 'some'} fresh builds (the baseline: "
        f"more) of their median turns. Speedup: {_denominator(results.cells)}, paired by turns. "
        "Intervals: 95 %, Student's over builds.",
        "Tie: the interval contains 1, or the gain is below 1 % or below the A/A floor. Drop: loss against the float "
        f"baseline, positive is worse. Bold: the fastest of a finished cell{within}. Underlined: not distinguishable "
        "from it by the same rule, paired. Builds ok: in the search for a searcher, in the confirmation for the "
        "others.",
        f"A/A floor: {', '.join(floors) if floors else 'not measured yet'}.",
    ]
    if random:
        lines.append(f"Calibrated on random data (no accuracy): {', '.join(random)}.")
    return "\n".join([*lines, *filter(None, [partial(results)])])


def _denominator(cells: Iterable[CellResults]) -> str:
    """What the speedups are over, by cell where cells differ."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(_float_baseline(cell), []).append(cell.name)
    if len(groups) == 1:
        return f"over the float model {next(iter(groups))}"
    parts = [f"{how} ({', '.join(names)})" for how, names in groups.items()]
    return f"over the float model {', '.join(parts)}"


def _float_baseline(cell: CellResults) -> str:
    backend = cell.facts["backend"]
    precision = backend.get("float_precision")
    if cell.float_measured:
        return f"at {precision}, the fastest float precision by measurement"
    if precision is None:
        return "as it is"
    return f"at {precision} (pinned)" if len(backend.get("float_params", {})) > 1 else f"at {precision}"


def _formatted(raw: pd.DataFrame, show: Callable[[dict[Any, Any]], dict[str, str]]) -> pd.DataFrame:
    return pd.DataFrame([show(row) for row in raw.to_dict("records")])


def _main_row(row: dict[Any, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "device": row["device"],
        "precision": row["precision"],
        "method": row["method"],
        LATENCY: interval(row["latency_ms"], row["latency_low_ms"], row["latency_high_ms"], 3),
        SPEEDUP: interval(row["speedup"], row["speedup_low"], row["speedup_high"]),
        "mAP or top-1": _score(row),
        "drop": _drop(row),
        "Q/DQ pairs": MISSING if pd.isna(row["pairs"]) else f"{row['pairs']:.0f}",
        "builds ok": f"{row['builds_ok']}/{row['builds']}",
        "minutes": MISSING if pd.isna(row["minutes"]) else f"{row['minutes']:.1f}",
        "verdict": row["verdict"],
    }


def _precision_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _main_row(row)
    kept = ("model", "device", "precision", "method", LATENCY, SPEEDUP, "mAP or top-1")
    drop = interval(row["drop"], row["drop_low"], row["drop_high"], _digits(row))
    return {**{column: shown[column] for column in kept}, "drop [CI]": drop, "decision": row["decision"]}


def _finalist_row(row: dict[Any, Any]) -> dict[str, str]:
    shown = _main_row(row)
    kept = ("method", LATENCY, SPEEDUP, "mAP or top-1", "drop", "Q/DQ pairs", "verdict")
    line = {"cell": row["cell"], **{column: shown[column] for column in kept}}
    return {**line, "seed": f"{row['seed']:.0f}", "placement": row["row"] or MISSING}


def _score(row: dict[Any, Any]) -> str:
    if pd.isna(row["score"]):
        return MISSING
    name, digits, unit = METRICS.get(row["metric"], (row["metric"], 4, ""))
    return f"{name} {row['score']:.{digits}f}{unit}"


def _drop(row: dict[Any, Any]) -> str:
    unit = METRICS.get(row["metric"], ("", 4, ""))[2]
    return MISSING if pd.isna(row["drop"]) else f"{row['drop']:+.{_digits(row)}f}{unit}"


def _digits(row: dict[Any, Any]) -> int:
    return METRICS.get(row["metric"], ("", 4, ""))[1]


def _side_by_side(main: pd.DataFrame) -> Table:
    """Methods by precision: for each precision its latency, speedup, drop and decision."""
    quantized = main[main["precision"] != "float"]
    lines = []
    for (model, _), part in quantized.groupby(["model", "backend"], sort=False):
        precisions = list(dict.fromkeys(part["quantized"]))
        for method in dict.fromkeys(part["method"]) if len(precisions) > 1 else ():
            line = {"model": str(model), "device": str(part["device"].iloc[0]), "method": str(method)}
            for precision in precisions:
                found = part[(part["method"] == method) & (part["quantized"] == precision)].to_dict("records")
                line |= _side(precision, found[0] if found else None)
            lines.append(line)
    cells = pd.DataFrame(lines).fillna(MISSING)
    return Table(name="side_by_side", title="Precisions side by side", cells=cells, raw=cells, note=SIDE_NOTE)


def _side(precision: str, row: dict[Any, Any] | None) -> dict[str, str]:
    names = [f"{precision} {what}" for what in (LATENCY, "speedup", "drop", "decision")]
    if row is None:
        return dict.fromkeys(names, MISSING)
    shown = _main_row(row)
    return dict(zip(names, (shown[LATENCY], shown[SPEEDUP], shown["drop"], row["decision"]), strict=True))


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
            figures = [_spent(row[name], "{:.0f}") for name in ("evaluations", "evaluations_low", "evaluations_high")]
            middle, low, high = figures
            column = f"to {row['share']:.0%} of the best gain"
            line[column] = f"{middle} [{low}, {high}] ({_spent(row['minutes'], '{:.2f} min')})"
            line[f"reached {row['share']:.0%}"] = f"{row['reached']}/{row['seeds']}"
        lines.append(line)
    return Table(
        name="targets",
        title="Evaluations to a target",
        cells=pd.DataFrame(lines).fillna(MISSING),
        raw=targets,
        note=TARGET_NOTE,
    )


def _spent(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "never"


def _cost(cost: pd.DataFrame) -> Table:
    lines = []
    for cell, part in cost.groupby("cell", sort=False) if len(cost) else ():
        total_s = part["total_s"].sum()
        shares = {
            what: f"{part[f'{what}_s'].sum() / total_s:.1%}" if total_s else MISSING
            for what in ("build", "sampling", "evaluation", "failures", "harness")
        }
        line = {"cell": cell, "searches": str(len(part)), "evaluations": str(part["evaluations"].sum())}
        lines.append({**line, "minutes": f"{total_s / 60:.1f}", **shares})
    return Table(name="cost", title="Cost of the searches", cells=pd.DataFrame(lines), raw=cost, note=COST_NOTE)


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
