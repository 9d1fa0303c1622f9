"""`index.html`: a results folder as one file that opens offline: verdicts, then tables, curves, graphs, sources."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.report.document import document
from harness.report.frames import main_frame
from harness.report.plots import COLOURS, envelope, front
from harness.report.results import CellResults, Results
from harness.report.samples import sample_frame
from harness.report.scenes import graph_of
from harness.report.searching import budget_frame, curve_frame
from harness.report.shown import METRICS, partial
from harness.report.tables import Table, interval
from harness.run.readback import evaluated
from harness.run.rows import FLOAT_ROW

__all__ = ["bounded", "index", "labels_of", "tried_frame"]

WORDS = frozenset({
    "model", "device", "precision", "method", "verdict", "decision", "cell", "searcher", "placement",
})  # fmt: skip
"""Columns that are sorted as text; all others by their first number."""
KINDS = ("faster", "tie", "slower", "missing", "without a figure")


def index(results: Results, tables: Sequence[Table]) -> str:
    """The page."""
    main, budgets, samples = main_frame(results), budget_frame(results), sample_frame(results)
    cells = []
    for cell in results.cells:
        labels = labels_of(cell, main)
        cells.append(
            {
                "name": cell.name,
                "labels": labels,
                "charts": _charts(cell, main, budgets, samples[samples["cell"] == cell.name], labels),
                "graph": graph_of(cell),
            }
        )
    values = {
        "title": results.stored.name,
        "description": results.stored.description,
        "partial": partial(results),
        "verdicts": [_verdict(cell, main[main["cell"] == cell.name]) for cell in results.cells],
        "tables": [_table(table) for table in tables],
        "cells": [{"name": cell["name"], "drawn": cell["graph"] is not None} for cell in cells],
        "environments": _environments(results.cells),
        "yaml": results.stored.text,
        "commands": _commands(results),
    }
    scripts = ("graph.js", "charts.js", "page.js")
    return document("page.html.j2", scripts, {"cells": cells, "colours": COLOURS}, values)


def labels_of(cell: CellResults, main: pd.DataFrame) -> dict[str, str]:
    """What the rows of a cell are called beside pictures: the methods of the main table that chose them.

    Rows that other seeds or smaller budgets chose are called so; the baseline stands first.
    """
    names: dict[str, dict[str, None]] = {}
    for line in main[(main["cell"] == cell.name) & (main["row"] != "")].to_dict("records"):
        name = line["method"] if line["method"] != FLOAT_ROW else f"{FLOAT_ROW} {line['precision']}"
        names.setdefault(line["row"], {})[name] = None
    others: dict[str, dict[str, None]] = {}
    for pick in cell.picks:
        if pick.row and pick.row not in names:
            others.setdefault(pick.row, {})[f"{pick.method}, seed {pick.seed} at {pick.budget}"] = None
    return {row: ", ".join(found) for row, found in {**names, **others}.items()}


def bounded(main: pd.DataFrame) -> pd.DataFrame:
    """Rows with latency and score, their latency's interval closed where a single build leaves it open."""
    points = main[main["score"].notna() & main["latency_ms"].notna()].copy()
    for column in ("latency_low_ms", "latency_high_ms"):
        points[column] = points[column].where(
            np.isfinite(points["latency_high_ms"].astype(float)), points["latency_ms"]
        )
    return points


def tried_frame(cell: CellResults) -> pd.DataFrame:
    """Latency and metric of every candidate that a search scored, by the search's own samples."""
    goal = cell.goal
    lines = [
        (trial.score.objective, trial.score.metrics[cell.metric])
        for search in cell.searches
        for trial in evaluated(search.entries, goal)
        if cell.metric is not None and cell.metric in trial.score.metrics
    ]
    return pd.DataFrame(lines, columns=["latency_ms", "score"]).drop_duplicates()


def _verdict(cell: CellResults, lines: pd.DataFrame) -> dict[str, Any]:
    """What came out of a cell, in words."""
    judged = [verdict for verdict in lines["verdict"] if verdict != "baseline"]
    counts = Counter(verdict if verdict in KINDS else KINDS[-1] for verdict in judged)
    tally = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    facts = [f"{len(judged)} methods: {tally}." if judged else ""]
    if cell.floor is not None:
        facts.append(f"A/A floor {cell.floor:.1%}.")
    best = lines[lines["best"].astype(bool)].to_dict("records")
    tied = lines[lines["tied"].astype(bool) & ~lines["best"].astype(bool)]["method"]
    if len(tied):
        facts.append(f"Not distinguishable from the fastest: {', '.join(tied)}.")
    if not best:
        state = "no verdict yet" if not cell.complete else "no method obeys the bound"
        return {"cell": cell.name, "state": "partial" if not cell.complete else "none", "head": state, "facts": facts}
    top = best[0]
    methods = ", ".join(line["method"] for line in best)
    speedup = interval(top["speedup"], top["speedup_low"], top["speedup_high"])
    latency = interval(top["latency_ms"], top["latency_low_ms"], top["latency_high_ms"], 3)
    head = f"{methods}: {speedup} times the speed of the float model, {latency} ms"
    return {"cell": cell.name, "state": top["verdict"], "head": head, "facts": [_accuracy(cell, top), *facts]}


def _accuracy(cell: CellResults, line: Mapping[Any, Any]) -> str:
    if pd.isna(line["score"]):
        return ""
    name, digits, unit = METRICS.get(line["metric"], (line["metric"], 4, ""))
    bound = f", allowed {cell.goal.max_drop:g}" if cell.goal.metric is not None else ""
    drop = f" (drop {line['drop']:+.{digits}f}{bound})" if not pd.isna(line["drop"]) else ""
    return f"{name} {line['score']:.{digits}f}{unit}{drop}, {line['pairs']:.0f} Q/DQ pairs."


def _table(table: Table) -> dict[str, Any]:
    columns = list(table.cells.columns)
    kinds = ["text" if column.rpartition(" ")[2] in WORDS else "number" for column in columns]
    rows = [
        [
            {"text": text, "kind": kind, "mark": table.mark(number, column)}
            for column, kind, text in zip(columns, kinds, line, strict=True)
        ]
        for number, line in enumerate(table.cells.astype(str).itertuples(index=False))
    ]
    heads = [{"text": column, "kind": kind} for column, kind in zip(columns, kinds, strict=True)]
    return {"name": table.name, "title": table.title, "heads": heads, "rows": rows, "notes": table.note.splitlines()}


def _charts(
    cell: CellResults, main: pd.DataFrame, budgets: pd.DataFrame, samples: pd.DataFrame, labels: Mapping[str, str]
) -> dict[str, Any]:
    curves = curve_frame([cell])
    marks = budgets[budgets["cell"] == cell.name]
    anytime = {
        over: [
            {"name": str(name), "x": _numbers(steps.index), **{key: _numbers(steps[key]) for key in steps}}
            for name, part in curves.groupby("searcher", sort=False)
            if len(steps := envelope(part, over))
        ]
        for over in ("evaluations", "minutes")
    }
    confirmed = [
        {"name": row["searcher"], "x": row["budget"], **{key: row[key] for key in ("speedup", "low", "high")}}
        for row in marks.to_dict("records")
    ]
    return {
        "anytime": anytime,
        "confirmed": confirmed,
        "latency": [
            {
                "name": labels[row],
                "quantiles": _numbers(np.quantile(part["latency_ms"], [0.05, 0.25, 0.5, 0.75, 0.95])),
                "builds": _numbers(part.groupby("build")["latency_ms"].median()),
            }
            for row in labels
            if len(part := samples[samples["row"] == row])
        ],
        "floor": cell.floor,
        "pareto": _pareto(cell, main[main["cell"] == cell.name], labels),
    }


def _pareto(cell: CellResults, lines: pd.DataFrame, labels: Mapping[str, str]) -> dict[str, Any] | None:
    points = bounded(lines)
    if points.empty or cell.metric is None:
        return None
    best = front(points, cell.higher_is_better)
    return {
        "metric": METRICS.get(cell.metric, (cell.metric, 4, ""))[0],
        "rows": [
            {
                "name": labels[row["row"]],
                "x": row["latency_ms"],
                "y": row["score"],
                "low": row["latency_low_ms"],
                "high": row["latency_high_ms"],
            }
            for row in points.drop_duplicates("row").to_dict("records")
        ],
        "front": [_numbers(best["latency_ms"]), _numbers(best["score"])],
        "tried": [_numbers(pair) for pair in tried_frame(cell).to_numpy()],
    }


def _numbers(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float)]


def _environments(cells: Sequence[CellResults]) -> list[dict[str, str]]:
    """Each machine once, with the cells that ran on it."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        text = json.dumps({**cell.environment, "backend": cell.facts["backend"]}, indent=1, sort_keys=True)
        found.setdefault(text, []).append(cell.name)
    return [{"cells": ", ".join(names), "text": text} for text, names in found.items()]


def _commands(results: Results) -> list[str]:
    folder = shlex.quote(str(results.folder))
    commits = {str(cell.environment.get("git_commit", "")) for cell in results.cells} - {""}
    lines = [f"git checkout {commit}" for commit in sorted(c.removesuffix("+changes") for c in commits)]
    lines += ["pip install -c constraints.txt -e ."]
    lines += [f"qdq run {folder}/experiment.yaml --out {folder}-again", f"qdq compare {folder} {folder}-again"]
    return [*lines, f"qdq report {folder}"]
