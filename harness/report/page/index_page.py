"""Page of a results folder, one file that opens offline: verdicts, tables, curves, graphs, sources."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.base.paths import hide_paths
from harness.base.statistics import Interval
from harness.report.frames import main_frame, rows_by_task
from harness.report.next_steps import describe_answers, describe_next_steps, ship_path
from harness.report.page.html_document import pack_json, render_html
from harness.report.plots.charts import answer_chart, plotly_figure, task_charts
from harness.report.plots.plot_files import PlotFile
from harness.report.report_table import ReportTable, format_interval, table_json
from harness.report.tables.notes import noise_note, partial_note, progress_note
from harness.report.tables.searchers import budget_frame
from harness.results.folder import Results, TaskResults, row_labels
from harness.results.scores import (
    BEYOND_BOUND_VERDICT,
    METRIC_CAPS,
    METRIC_FORMATS,
    UNSCORED_VERDICT,
    format_drop,
    format_score,
    metric_name,
    verdict_label,
)
from harness.results.task_files import PartEffect, read_attributions

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
    read_graph: Callable[[TaskResults], Mapping[str, Any] | None],
    pictures: Sequence[PlotFile] = (),
    base: Path | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        tables: Tables in order, the first one open.
        read_graph: Returns the graph of a task, see `harness.report.page.graph_layout.load_task_graph`, or None.
        pictures: Plots that are shown as images.
        base: See `harness.report.next_steps.describe_answers`.
    """
    main, budgets = main_frame(results), budget_frame(results)
    lines = rows_by_task(main)
    packed, tasks = [], []
    for task in results.tasks:
        own, graph = lines.get(task.name, ()), read_graph(task)
        task_data = {
            "labels": row_labels(task, own),
            "answer": answer_chart(task, main),
            "charts": list(map(plotly_figure, task_charts(task, main, budgets).values())),
            "graph": graph,
            "effects": _effects_by_row(task),
            "best": next((line["row"] for line in own if line["best"]), ""),
        }
        packed.append(pack_json(task_data))
        shown = [_embed_plot(picture) for picture in pictures if picture.task == task.name]
        tasks.append({"name": task.name, "drawn": graph is not None, "pictures": shown})
    commands = []
    for task in results.tasks:
        if (folder := ship_path(results.folder, task.name).parent).exists():
            path, name = hide_paths(str(folder)), next(iter(task.facts.get("inputs", {})), "NAME")
            commands += [["python", f"{path}/deploy.py", "--input", f"{name}=FILE.npy"], ["qdq", "verify", path]]
    steps = [step.split("\n- ") for step in describe_next_steps(results, main, base)]
    values = {
        "title": results.stored.name,
        "description": results.stored.description,
        "partial": partial_note(results),
        "progress": progress_note(results),
        "answers": {
            "lines": [hide_paths(line) for line in describe_answers(results, main, base)],
            "commands": list(map(shlex.join, commands)),
            "steps": [(head, remedies) for head, *remedies in steps],
        },
        "verdicts": [_task_verdict(task, lines.get(task.name, ())) for task in results.tasks],
        "tables": map(table_json, tables),  # lazily, as the cells of all tables take much memory
        "pictures": [_embed_plot(picture) for picture in pictures if not picture.task],
        "tasks": tasks,
        "environments": _environment_rows(results.tasks),
        "yaml": results.stored.text,
        "commands": _reproduction_commands(results),
    }
    scripts = ("plotly-basic.min.js", "graph.js", "charts.js", "page.js")
    return render_html("page.html.j2", scripts, packed, values)


def _embed_plot(picture: PlotFile) -> dict[str, str]:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    # An image can neither run a script nor load anything.
    return {"title": picture.title, "source": f"data:image/svg+xml;base64,{data}"}


def _effects_by_row(task: TaskResults) -> dict[str, dict[str, dict[str, str]]]:
    """Return the measured effect of each pattern and insertion point as text, by row."""
    return {
        report.row: {
            "patterns": {effect.pattern: _format_effect(effect, report.metric) for effect in report.patterns},
            "points": {effect.part: _format_effect(effect, report.metric) for effect in report.points},
        }
        for report in read_attributions(task)
    }


def _format_effect(effect: PartEffect, metric: str | None) -> str:
    if effect.ratio is None:
        return f"not measured: {effect.reason}"
    without = Interval(**{k: 100 * (getattr(effect.ratio, k) - 1) for k in ("value", "low", "high")})
    time = f"without it {without.value:+.1f} % [{without.low:+.1f}, {without.high:+.1f}] time"
    return time if effect.drop is None else f"{time}; it costs {metric_name(metric)} {format_drop(effect.drop, metric)}"


def _task_verdict(task: TaskResults, lines: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    """Return the summary of a task for the template."""
    verdicts = [verdict_label(line) for line in lines if line["verdict"] != "baseline"]
    # The runtime's name follows a wrong result.
    known = [WRONG_RESULT if verdict.startswith(WRONG_RESULT) else verdict for verdict in verdicts]
    counts = Counter(kind if kind in VERDICT_KINDS else VERDICT_KINDS[-1] for kind in known)
    tally = ", ".join(f"{counts[kind]} {kind.replace(',', ' but')}" for kind in VERDICT_KINDS if counts[kind])
    facts = [f"{len(verdicts)} methods: {tally}." if verdicts else ""]
    if task.noise_floor is not None:
        facts.append(f"Noise floor {task.noise_floor:.1%}.")
    named = {"task": task.name, "noise": noise_note(task), "facts": facts}
    best = [line for line in lines if line["best"]]
    if tied := [line["method"] for line in lines if line["tied"] and not line["best"]]:
        facts.append(f"Not distinguishable from the fastest: {', '.join(tied)}.")
    if not best and not task.complete:
        return {**named, "state": "partial", "head": "no verdict yet"}
    if not best:
        head = "the float model itself scores nothing" if task.blind else "no method obeys the bound"
        return {**named, "state": "none", "head": head}
    top = best[0]
    speedup = format_interval(top["speedup"], top["speedup_low"], top["speedup_high"])
    latency = format_interval(top["latency_ms"], top["latency_low_ms"], top["latency_high_ms"], 3)
    methods = ", ".join(line["method"] for line in best)
    head = f"{methods}: {speedup} times as fast as the float model, {latency} ms"
    if top["verdict"] == "baseline":
        within = "" if task.allowed is None else " within the bound"
        head = f"no method{within} is faster than float, {latency} ms"
    accuracy = ""
    if not pd.isna(top["score"]):
        digits = METRIC_FORMATS.get(top["metric"], ("", 4, ""))[1]
        bound = "" if task.allowed is None else f", allowed {task.allowed:g}"
        has_drop = not pd.isna(top["drop"]) and top["metric"] not in METRIC_CAPS
        drop = f" (drop {top['drop']:+.{digits}f}{bound})" if has_drop else ""
        accuracy = f"{format_score(top['score'], top['metric'])}{drop}, {top['pairs']:.0f} Q/DQ pairs."
    return {**named, "state": top["verdict"], "head": head, "facts": [accuracy, *facts]}


def _environment_rows(tasks: Sequence[TaskResults]) -> list[dict[str, str]]:
    """Return each distinct environment as JSON text with the names of its tasks."""
    tasks_by_text: dict[str, list[str]] = {}
    for task in tasks:
        text = json.dumps({**task.environment, "backend": task.facts["backend"]}, indent=1, sort_keys=True)
        tasks_by_text.setdefault(text, []).append(task.name)
    return [{"tasks": ", ".join(names), "text": text} for text, names in tasks_by_text.items()]


def _reproduction_commands(results: Results) -> list[str]:
    folder = shlex.quote(hide_paths(str(results.folder)))
    commits = {str(task.environment.get("git_commit", "")) for task in results.tasks} - {""}
    lines = [f"git checkout {commit}" for commit in sorted(c.removesuffix("+changes") for c in commits)]
    lines += ["pip install -c constraints.txt -e '.[modelopt]'"]
    return [*lines, f"qdq run {folder} --reproduce", f"qdq report {folder}"]
