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
from harness.report.load.attribution_store import PartEffect
from harness.report.load.display_names import (
    BEYOND_BOUND_VERDICT,
    METRIC_CAPS,
    METRIC_FORMATS,
    UNSCORED_VERDICT,
    format_drop,
    metric_name,
    row_labels,
    verdict_label,
)
from harness.report.load.results import CellResults, Results
from harness.report.page.html_document import render_html
from harness.report.page.interactive_charts import build_charts
from harness.report.plots.plot_files import PlotFile, read_task_attributions
from harness.report.report_table import ReportTable, format_interval
from harness.report.tables.notes import noise_note, partial_note, progress_note
from harness.statistics import Interval

__all__ = ["render_index"]

TEXT_SORTED_COLUMNS = frozenset({
    "model", "device", "precision", "method", "verdict", "decision", "cell", "searcher", "placement", "first", "second",
    "reference", "variant", "parameters", "on", "in", "row",
})  # fmt: skip
"""Columns that are sorted as text; all others by their first number."""
WRONG_RESULT = "wrong result"
VERDICT_KINDS = (
    "faster",
    BEYOND_BOUND_VERDICT,
    UNSCORED_VERDICT,
    "tie",
    "slower",
    WRONG_RESULT,
    "saturates",
    "missing",
    "without a speed",
)


def render_index(
    results: Results,
    tables: Sequence[ReportTable],
    graphs: Mapping[str, Mapping[str, Any]],
    pictures: Sequence[PlotFile] = (),
) -> str:
    """The page.

    Args:
        results: The results folder.
        tables: Shown in this order, the first one open.
        graphs: By cell, see `harness.report.page.graph_snapshots.load_task_graph`; cells without one say so.
        pictures: Plots that are shown as they were drawn.
    """
    main, budgets, samples = main_frame(results), budget_frame(results), sample_frame(results)
    cells = []
    for cell in results.cells:
        labels = row_labels(cell, main)
        cells.append(
            {
                "name": cell.name,
                "labels": labels,
                "charts": build_charts(cell, main, budgets, samples[samples["cell"] == cell.name], labels),
                "graph": graphs.get(cell.name),
                "effects": _effects_by_row(cell),
                "best": next(iter(main[(main["cell"] == cell.name) & main["best"].astype(bool)]["row"]), ""),
            }
        )
    values = {
        "title": results.stored.name,
        "description": results.stored.description,
        "partial": partial_note(results),
        "progress": progress_note(results),
        "verdicts": [_task_verdict(cell, main[main["cell"] == cell.name]) for cell in results.cells],
        "tables": [_table_data(table) for table in tables],
        "pictures": [_embed_plot(picture) for picture in pictures if not picture.cell],
        "cells": [
            {
                "name": cell.name,
                "drawn": cell.name in graphs,
                "pictures": [_embed_plot(picture) for picture in pictures if picture.cell == cell.name],
            }
            for cell in results.cells
        ],
        "environments": _environment_rows(results.cells),
        "yaml": results.stored.text,
        "commands": _reproduction_commands(results),
    }
    scripts = ("plotly-basic.min.js", "graph.js", "charts.js", "page.js")
    return render_html("page.html.j2", scripts, {"cells": cells}, values)


def _embed_plot(picture: PlotFile) -> dict[str, str]:
    """A picture in the page itself; as an image it can neither run a script nor load anything."""
    data = base64.b64encode(picture.path.read_bytes()).decode()
    return {"title": picture.title, "source": f"data:image/svg+xml;base64,{data}"}


def _effects_by_row(cell: CellResults) -> dict[str, dict[str, dict[str, str]]]:
    """By row what each pattern and each insertion point is worth, in words, where that was measured."""
    return {
        found.row: {
            "patterns": {effect.pattern: _format_effect(effect, found.metric) for effect in found.patterns},
            "points": {effect.part: _format_effect(effect, found.metric) for effect in found.points},
        }
        for found in read_task_attributions(cell)
    }


def _format_effect(effect: PartEffect, metric: str | None) -> str:
    if effect.ratio is None:
        return f"not measured: {effect.reason}"
    without = Interval(**{k: 100 * (getattr(effect.ratio, k) - 1) for k in ("value", "low", "high")})
    time = f"without it {without.value:+.1f} % [{without.low:+.1f}, {without.high:+.1f}] time"
    return time if effect.drop is None else f"{time}; it costs {metric_name(metric)} {format_drop(effect.drop, metric)}"


def _task_verdict(cell: CellResults, lines: pd.DataFrame) -> dict[str, Any]:
    """What came out of a cell, in words."""
    verdicts = [verdict_label(line) for line in lines.to_dict("records") if line["verdict"] != "baseline"]
    counts = Counter(map(_verdict_kind, verdicts))
    tally = ", ".join(f"{counts[kind]} {kind.replace(',', ' but')}" for kind in VERDICT_KINDS if counts[kind])
    facts = [f"{len(verdicts)} methods: {tally}." if verdicts else ""]
    if cell.floor is not None:
        facts.append(f"A/A floor {cell.floor:.1%}.")
    named = {"cell": cell.name, "noise": noise_note(cell)}
    best = lines[lines["best"].astype(bool)].to_dict("records")
    tied = lines[lines["tied"].astype(bool) & ~lines["best"].astype(bool)]["method"]
    if len(tied):
        facts.append(f"Not distinguishable from the fastest: {', '.join(tied)}.")
    if not best:
        head = "no verdict yet" if not cell.complete else _nothing_shippable_reason(cell)
        return {**named, "state": "partial" if not cell.complete else "none", "head": head, "facts": facts}
    top = best[0]
    methods = ", ".join(line["method"] for line in best)
    speedup = format_interval(top["speedup"], top["speedup_low"], top["speedup_high"])
    latency = format_interval(top["latency_ms"], top["latency_low_ms"], top["latency_high_ms"], 3)
    head = f"{methods}: {speedup} times the speed of the float model, {latency} ms"
    if top["verdict"] == "baseline":
        head = (
            f"nothing{' that keeps the bound' if cell.allowed is not None else ''} is faster than float, {latency} ms"
        )
    return {**named, "state": top["verdict"], "head": head, "facts": [_accuracy_text(cell, top), *facts]}


def _verdict_kind(verdict: str) -> str:
    """Return the kind that a verdict is counted as."""
    if verdict.startswith(WRONG_RESULT):  # the runtime's name follows
        return WRONG_RESULT
    return verdict if verdict in VERDICT_KINDS else VERDICT_KINDS[-1]


def _nothing_shippable_reason(cell: CellResults) -> str:
    """Why no method of a finished cell is the best."""
    return "the float model itself scores nothing" if cell.blind else "no method obeys the bound"


def _accuracy_text(cell: CellResults, line: Mapping[Any, Any]) -> str:
    if pd.isna(line["score"]):
        return ""
    name, digits, unit = METRIC_FORMATS.get(line["metric"], (line["metric"], 4, ""))
    bound = "" if cell.allowed is None else f", allowed {cell.allowed:g}"
    known = not pd.isna(line["drop"]) and line["metric"] not in METRIC_CAPS
    drop = f" (drop {line['drop']:+.{digits}f}{bound})" if known else ""
    return f"{name} {line['score']:.{digits}f}{unit}{drop}, {line['pairs']:.0f} Q/DQ pairs."


def _table_data(table: ReportTable) -> dict[str, Any]:
    """A table for the template; where all rows are of one model or device, that is said once above it."""
    cells, alike = table.cells.astype(str), table.shared_values
    columns = [str(column) for column in cells.columns if column not in alike]
    kinds = ["text" if column.rpartition(" ")[2] in TEXT_SORTED_COLUMNS else "number" for column in columns]
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


def _environment_rows(cells: Sequence[CellResults]) -> list[dict[str, str]]:
    """Each machine once, with the cells that ran on it."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        text = json.dumps({**cell.environment, "backend": cell.facts["backend"]}, indent=1, sort_keys=True)
        found.setdefault(text, []).append(cell.name)
    return [{"cells": ", ".join(names), "text": text} for text, names in found.items()]


def _reproduction_commands(results: Results) -> list[str]:
    folder = shlex.quote(str(results.folder))
    commits = {str(cell.environment.get("git_commit", "")) for cell in results.cells} - {""}
    lines = [f"git checkout {commit}" for commit in sorted(c.removesuffix("+changes") for c in commits)]
    lines += ["pip install -c constraints.txt -e '.[modelopt]'"]
    return [*lines, f"qdq reproduce {folder}", f"qdq report {folder}"]
