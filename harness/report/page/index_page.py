"""`index.html`: a results folder as one file that opens offline: verdicts, then tables, curves, graphs, sources."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from harness.report.frames.budget_frames import budget_frame
from harness.report.frames.confirmation_samples import sample_frame
from harness.report.frames.main_frame import main_frame
from harness.report.load.attribution_store import Effect
from harness.report.load.display_names import (
    BEYOND,
    CAPPED,
    METRICS,
    UNSCORED,
    judged,
    labels_of,
    metric_name,
    shown_drop,
)
from harness.report.load.results import CellResults, Results
from harness.report.page.html_document import document
from harness.report.page.interactive_charts import charts_of
from harness.report.plots.plot_files import Picture, explanations_of
from harness.report.report_table import Table, interval
from harness.report.tables.notes import noise, partial, progress
from harness.statistics import Interval

__all__ = ["index"]

WORDS = frozenset({
    "model", "device", "precision", "method", "verdict", "decision", "cell", "searcher", "placement", "first", "second",
    "reference", "variant", "parameters", "on", "in", "row",
})  # fmt: skip
"""Columns that are sorted as text; all others by their first number."""
WRONG = "wrong result"
KINDS = ("faster", BEYOND, UNSCORED, "tie", "slower", WRONG, "saturates", "missing", "without a speed")


def index(
    results: Results, tables: Sequence[Table], graphs: Mapping[str, Mapping[str, Any]], pictures: Sequence[Picture] = ()
) -> str:
    """The page.

    Args:
        results: The results folder.
        tables: Shown in this order, the first one open.
        graphs: By cell, see `harness.report.page.graph_snapshots.graph_of`; cells without one say so.
        pictures: Plots that are shown as they were drawn.
    """
    main, budgets, samples = main_frame(results), budget_frame(results), sample_frame(results)
    cells = []
    for cell in results.cells:
        labels = labels_of(cell, main)
        cells.append(
            {
                "name": cell.name,
                "labels": labels,
                "charts": charts_of(cell, main, budgets, samples[samples["cell"] == cell.name], labels),
                "graph": graphs.get(cell.name),
                "effects": _effects(cell),
                "best": next(iter(main[(main["cell"] == cell.name) & main["best"].astype(bool)]["row"]), ""),
            }
        )
    values = {
        "title": results.stored.name,
        "description": results.stored.description,
        "partial": partial(results),
        "progress": progress(results),
        "verdicts": [_verdict(cell, main[main["cell"] == cell.name]) for cell in results.cells],
        "tables": [_table(table) for table in tables],
        "pictures": [_embedded(picture) for picture in pictures if not picture.cell],
        "cells": [
            {
                "name": cell.name,
                "drawn": cell.name in graphs,
                "pictures": [_embedded(picture) for picture in pictures if picture.cell == cell.name],
            }
            for cell in results.cells
        ],
        "environments": _environments(results.cells),
        "yaml": results.stored.text,
        "commands": _commands(results),
    }
    scripts = ("plotly-basic.min.js", "graph.js", "charts.js", "page.js")
    return document("page.html.j2", scripts, {"cells": cells}, values)


def _embedded(picture: Picture) -> dict[str, str]:
    """A picture in the page itself; as an image it can neither run a script nor load anything."""
    data = base64.b64encode(picture.path.read_bytes()).decode()
    return {"title": picture.title, "source": f"data:image/svg+xml;base64,{data}"}


def _effects(cell: CellResults) -> dict[str, dict[str, dict[str, str]]]:
    """By row what each pattern and each insertion point is worth, in words, where that was measured."""
    return {
        found.row: {
            "patterns": {effect.pattern: _worth(effect, found.metric) for effect in found.patterns},
            "points": {effect.part: _worth(effect, found.metric) for effect in found.points},
        }
        for found in explanations_of(cell)
    }


def _worth(effect: Effect, metric: str | None) -> str:
    if effect.ratio is None:
        return f"not measured: {effect.reason}"
    without = Interval(**{k: 100 * (getattr(effect.ratio, k) - 1) for k in ("value", "low", "high")})
    time = f"without it {without.value:+.1f} % [{without.low:+.1f}, {without.high:+.1f}] time"
    return time if effect.drop is None else f"{time}; it costs {metric_name(metric)} {shown_drop(effect.drop, metric)}"


def _verdict(cell: CellResults, lines: pd.DataFrame) -> dict[str, Any]:
    """What came out of a cell, in words."""
    verdicts = [judged(line) for line in lines.to_dict("records") if line["verdict"] != "baseline"]
    counts = Counter(map(_kind, verdicts))
    tally = ", ".join(f"{counts[kind]} {kind.replace(',', ' but')}" for kind in KINDS if counts[kind])
    facts = [f"{len(verdicts)} methods: {tally}." if verdicts else ""]
    if cell.floor is not None:
        facts.append(f"A/A floor {cell.floor:.1%}.")
    named = {"cell": cell.name, "noise": noise(cell)}
    best = lines[lines["best"].astype(bool)].to_dict("records")
    tied = lines[lines["tied"].astype(bool) & ~lines["best"].astype(bool)]["method"]
    if len(tied):
        facts.append(f"Not distinguishable from the fastest: {', '.join(tied)}.")
    if not best:
        head = "no verdict yet" if not cell.complete else _nothing(cell)
        return {**named, "state": "partial" if not cell.complete else "none", "head": head, "facts": facts}
    top = best[0]
    methods = ", ".join(line["method"] for line in best)
    speedup = interval(top["speedup"], top["speedup_low"], top["speedup_high"])
    latency = interval(top["latency_ms"], top["latency_low_ms"], top["latency_high_ms"], 3)
    head = f"{methods}: {speedup} times the speed of the float model, {latency} ms"
    if top["verdict"] == "baseline":
        head = (
            f"nothing{' that keeps the bound' if cell.allowed is not None else ''} is faster than float, {latency} ms"
        )
    return {**named, "state": top["verdict"], "head": head, "facts": [_accuracy(cell, top), *facts]}


def _kind(verdict: str) -> str:
    """Return the kind that a verdict is counted as."""
    if verdict.startswith(WRONG):  # the runtime's name follows
        return WRONG
    return verdict if verdict in KINDS else KINDS[-1]


def _nothing(cell: CellResults) -> str:
    """Why no method of a finished cell is the best."""
    return "the float model itself scores nothing" if cell.blind else "no method obeys the bound"


def _accuracy(cell: CellResults, line: Mapping[Any, Any]) -> str:
    if pd.isna(line["score"]):
        return ""
    name, digits, unit = METRICS.get(line["metric"], (line["metric"], 4, ""))
    bound = "" if cell.allowed is None else f", allowed {cell.allowed:g}"
    known = not pd.isna(line["drop"]) and line["metric"] not in CAPPED
    drop = f" (drop {line['drop']:+.{digits}f}{bound})" if known else ""
    return f"{name} {line['score']:.{digits}f}{unit}{drop}, {line['pairs']:.0f} Q/DQ pairs."


def _table(table: Table) -> dict[str, Any]:
    """A table for the template; where all rows are of one model or device, that is said once above it."""
    cells, alike = table.cells.astype(str), table.alike
    columns = [str(column) for column in cells.columns if column not in alike]
    kinds = ["text" if column.rpartition(" ")[2] in WORDS else "number" for column in columns]
    rows = [
        [
            {"text": line[column], "kind": kind, "mark": table.mark(number, column)}
            for column, kind in zip(columns, kinds, strict=True)
        ]
        for number, line in enumerate(cells.to_dict("records"))
    ]
    return {
        "name": table.name,
        "title": table.title,
        "heads": [{"text": column, "kind": kind} for column, kind in zip(columns, kinds, strict=True)],
        "rows": rows,
        "alike": ", ".join(f"{name}: {value}" for name, value in alike.items()),
        "notes": table.note.splitlines(),
    }


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
    return [*lines, f"qdq reproduce {folder}", f"qdq report {folder}"]
