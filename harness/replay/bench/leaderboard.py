"""Leaderboard: comparison of the searchers of submissions over blocks of tasks, and its pages."""

from __future__ import annotations

import base64
import html as markup
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from harness.base.errors import UserError
from harness.base.text import pluralize
from harness.replay.bench.submission import SearcherRecord, read_submission
from harness.replay.bench.tasks import TierName, read_catalogue, table_path
from harness.replay.budget_study import TableResult, mean_interval
from harness.replay.path_cache import PathCache
from harness.replay.replay import Floats, load_landscape
from harness.replay.simulated_selection import Searches
from harness.report.plots.figures import series_style
from harness.report.report_table import ReportTable, format_interval, frame_rows, render_markdown, render_note_markdown
from harness.report.statistics import FriedmanRanks, compare_pairs, compute_ranks, smallest_p_value

CONTROL = "auto"
#: Searchers that `CONTROL` is tested against at `PLANNED_BUDGET` on the test tasks, chosen before they were compared.
PLANNED = ("tpe", "smac", "random_mutation")
PLANNED_BUDGET = 25
#: Targets of a task: relative latencies above the optimum.
TARGETS = np.geomspace(0.005, 0.5, 41)
SHOWN_CURVES = 8  # number of curves in colour: those of `ALWAYS_SHOWN`, then by rank
ALWAYS_SHOWN = (CONTROL, "random", "random_mutation", "tpe")
PLOT_TEXT = "Regret and targets over evaluations, and mean ranks"
INTRODUCTION = """# Leaderboard of QDQ-Bench, tier {tier}

Searchers replayed on recorded tables of real measurements. [QDQ-Bench](reference/bench.md) explains tasks, tiers,
scores and limits, and [CONTRIBUTING](../CONTRIBUTING.md#submit-to-the-leaderboard) how to submit.
`qdq bench leaderboard` writes this page from the submissions, in the order of the mean rank over all budgets.
"""
Results = tuple[dict[str, SearcherRecord], list[TableResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Comparison of the searchers of all submissions over the tasks of a tier, those of the lowest mean rank first.

    Attributes:
        tables: Searchers, pairs with `CONTROL`, those on the test tasks, searchers by split.
        ranks: Ranks by budget.
        regret: Mean regret in % over blocks after each evaluation, by searcher.
        targets: Share of the targets that were reached after each evaluation, by searcher.
    """

    tables: tuple[ReportTable, ...]
    ranks: Mapping[int, FriedmanRanks]
    regret: Mapping[str, Floats]
    targets: Mapping[str, Floats]


def read_results(folders: Sequence[Path], tier: TierName) -> Results:
    """Return the records of all searchers of the submissions in `folders`, and their searches on each task.

    Raises:
        UserError: A submission is damaged or lacks a task or evaluations of the tier, or two submissions have a
            searcher of the same name.
    """
    catalogue = read_catalogue()
    budget, tasks = max(catalogue.tiers[tier].budgets), catalogue.tasks_of_tier(tier)
    records: dict[str, SearcherRecord] = {}
    searches: dict[str, dict[str, Searches]] = {task: {} for task in tasks}
    for folder in folders:
        submission, cache = read_submission(folder), PathCache(folder)
        for name, record in submission.searchers.items():
            if name in records:
                raise UserError(f"{folder}: a searcher called {name!r} is in another submission too; give it a label")
            if record.budget < budget or not record.tasks.keys() >= tasks.keys():
                raise UserError(f"{folder}: {name} lacks tasks or evaluations of the tier {tier}")
            records[name] = record.model_copy(update={"tasks": {task: record.tasks[task] for task in tasks}})
            for task in tasks:
                paths, seeds = cache.paths_by_seed(record.key(name, task)), range(record.tasks[task].seeds)
                if not paths.keys() >= set(seeds):
                    raise UserError(f"{folder}: {name} lacks searches on {task}")
                walks = {seed: paths[seed].indices[:budget] for seed in seeds}
                try:
                    searches[task][name] = Searches(load_landscape(table_path(task)), walks, budget)
                except ValueError as error:
                    raise UserError(f"{folder}: {name} on {task}: {error}") from error
    results = []
    for task, settings in tasks.items():
        landscape = load_landscape(table_path(task))
        facts = landscape.table.metadata
        block = f"{facts.model} on {facts.backend['name']}"  # whatever processor and threads
        results.append(
            TableResult(
                landscape, searches[task], budget, settings.initial,
                block=block, split=settings.split, mean_random=True,
            )
        )  # fmt: skip
    return records, results


def compare_searchers(results: Results, tier: TierName) -> Leaderboard:
    """Return the comparison of all searchers, those of the lowest mean rank first."""
    records, tasks = results
    budgets = read_catalogue().tiers[tier].budgets
    ranks = {}
    for budget in budgets:
        speeds = {name: _speeds_at(tasks, name, budget) for name in records}
        means = {name: {block: np.mean(some) for block, some in blocks.items()} for name, blocks in speeds.items()}
        ranks[budget] = compute_ranks(pd.DataFrame(means), unit="block")
    targets = {}
    order = sorted(records, key=lambda name: float(np.mean([at_budget.mean[name] for at_budget in ranks.values()])))
    for name in order:  # the share of all targets that a search has reached after each evaluation
        best = [np.minimum.accumulate(task.latency_ms(name), axis=1) / task.optimum_ms - 1 for task in tasks]
        shares = [(each[:, :, None] <= TARGETS).mean(axis=(0, 2)) for each in best]
        targets[name] = _over_blocks(tasks, shares).mean(axis=0)
    tables = [_searchers_table(order, records, tasks, ranks)]
    if CONTROL in records and len(records) > 1:
        others = [name for name in order if name != CONTROL]
        tables += [_pairs_table(others, tasks, budgets), _planned_table(others, tasks, budgets)]
    rows = [{"searcher": name} for name in order]
    for split in sorted({task.split for task in tasks}):
        some = [task for task in tasks if task.split == split]
        for row in rows:
            regret = _regret_percent(some, row["searcher"]).mean(axis=0)
            row[f"{split}, {pluralize(len(some), 'task')}"] = " / ".join(f"{regret[n - 1]:.2f}" for n in budgets)
    counts = ", ".join(map(str, budgets))
    note = f"Latency of the choice above the optimum in % at {counts} evaluations, mean over seeds and blocks."
    return Leaderboard(
        tables=(*tables, _table("splits", "Development and test tasks", rows, note)),
        ranks=ranks,
        regret={name: _regret_percent(tasks, name).mean(axis=0) for name in order},
        targets=targets,
    )


def _over_blocks(tasks: Sequence[TableResult], figures: Sequence[Floats]) -> Floats:
    """Return the means of the figures of tasks over the tasks of each block, [block, ...]."""
    blocks: dict[str, list[Floats]] = {}
    for task, figure in zip(tasks, figures, strict=True):
        blocks.setdefault(task.block, []).append(figure)
    return np.array([np.mean(parts, axis=0) for parts in blocks.values()])


def _regret_percent(tasks: Sequence[TableResult], searcher: str) -> Floats:
    """Return the latency of the choice above the optimum in %, mean over seeds, [block, evaluation]."""
    return _over_blocks(tasks, [task.regret_percent(searcher).mean(axis=0) for task in tasks])


def _searchers_table(
    order: Sequence[str],
    records: Mapping[str, SearcherRecord],
    tasks: Sequence[TableResult],
    ranks: Mapping[int, FriedmanRanks],
) -> ReportTable:
    rows = []
    for name in order:
        record, regret = records[name], _regret_percent(tasks, name)
        counts = sorted({len(task.searches[name].seeds) for task in tasks})
        scores = _over_blocks(tasks, [task.scores(name).mean() for task in tasks])
        row = {
            "searcher": name,
            "seeds": f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0]),
            "score": format_interval(*mean_interval(scores)),
        }
        row |= {f"{budget} evaluations": f"{regret[:, budget - 1].mean():.2f}" for budget in ranks}
        row["mean ranks"] = " / ".join(f"{at_budget.mean[name]:.1f}" for at_budget in ranks.values())
        row["searcher's seconds"] = f"{np.mean([each.searcher_s for each in record.tasks.values()]):.2f}"
        rows.append(row)
    last = next(iter(ranks.values()))
    difference = "none" if last.critical_difference is None else f"{last.critical_difference:.2f}"
    tests = ", ".join(
        f"{at_budget.p_value:.2g} at {n}" for n, at_budget in ranks.items() if at_budget.p_value is not None
    )
    blocks = f"{pluralize(len(tasks), 'task')} in {pluralize(last.blocks, 'block')} (model and runtime)"
    note = (
        f"{blocks}. Score: the share of the improvement left by random search of as many evaluations, on average over "
        "evaluations; 0 is random search, 1 the optimum at once; with its 95 % interval over blocks. Evaluations: "
        "latency of the choice above the optimum in %, mean over seeds and blocks. Mean ranks at "
        f"{', '.join(map(str, ranks))} evaluations; a difference below {difference} is none (Nemenyi, 5 %); Friedman's "
        f"p: {tests or 'none'}. Seconds: processor time of the searcher in one search of the largest budget, without "
        "builds and measurements."
    )
    return _table("searchers", "Searchers", rows, note)


def _speeds_at(tasks: Sequence[TableResult], searcher: str, budget: int) -> dict[str, list[float]]:
    """Return the shares of the optimum's speed at a budget by block: a mean over the seeds of each task."""
    speeds: dict[str, list[float]] = {}
    for task in tasks:
        means = (task.optimum_ms / task.latency_ms(searcher)).mean(axis=0)
        speeds.setdefault(task.block, []).append(float(means[budget - 1]))
    return speeds


def _compare(tasks: Sequence[TableResult], names: Sequence[str], budget: int) -> list[dict[str, Any]]:
    """Return the lines of `compare_pairs` for `CONTROL` and some other searchers."""
    return frame_rows(compare_pairs({name: _speeds_at(tasks, name, budget) for name in (CONTROL, *names)}, CONTROL))


def _pairs_table(others: Sequence[str], tasks: Sequence[TableResult], budgets: Sequence[int]) -> ReportTable:
    rows = {name: {"searcher": name} for name in others}
    ahead: list[str] = []
    bold: set[tuple[int, str]] = set()
    for budget in budgets:
        for line in _compare(tasks, others, budget):
            name, column = line["second"], f"{budget} evaluations"
            rows[name][column] = f"{line['ratio']:.3f} (p {line['p_holm']:.2f})"
            if line["p_holm"] < 0.05:
                bold.add((others.index(name), column))
            if line["ratio"] < 1:
                ahead.append(f"{name} at {budget} ({line['ratio']:.3f}, p {line['p_holm']:.2f})")
    blocks = len({task.block for task in tasks})
    count = f"{pluralize(blocks, 'block')} and {pluralize(len(others), 'comparison')}"
    note = (
        f"Speed of {CONTROL} over that of each other searcher, above 1 if {CONTROL} is faster: geometric mean over "
        "blocks. p: Wilcoxon's signed-rank test over blocks with Holm's correction for all searchers of a budget; "
        f"bold below 0.05; the smallest that {count} can give is {smallest_p_value(blocks, len(others)):.2g}. "
        f"Faster than {CONTROL} in the mean: {', '.join(ahead) or 'none'}."
    )
    table = _table("pairs", f"{CONTROL} and each other searcher", list(rows.values()), note)
    return replace(table, marks=dict.fromkeys(bold, "best"))


def _planned_table(others: Sequence[str], tasks: Sequence[TableResult], budgets: Sequence[int]) -> ReportTable:
    """Return the planned comparisons on the test tasks, and those with the best other searcher at each budget."""
    tests = [task for task in tasks if task.split == "test"]
    planned = [name for name in PLANNED if name in others] if PLANNED_BUDGET in budgets else []
    lines = []
    if planned:
        lines = [(PLANNED_BUDGET, "planned", each) for each in _compare(tests, planned, PLANNED_BUDGET)]
    for budget in budgets:
        best = min(_compare(tests, others, budget), key=lambda line: line["ratio"])
        lines.append((budget, "best other", best))
    rows = [
        {
            "evaluations": str(budget),
            "searcher": f"{line['second']} ({kind})",
            "ratio": format_interval(line["ratio"], line["low"], line["high"], digits=3),
            "p": f"{line['p_value']:.3f}",
            "p, Holm": f"{line['p_holm']:.3f}",
        }
        for budget, kind, line in lines
    ]
    blocks = pluralize(len({task.block for task in tests}), "block")
    note = (
        f"Speed of {CONTROL} over that of the searcher on the test tasks: geometric mean over "
        f"{blocks} with Student's 95 % interval; p: Wilcoxon's signed-rank test over blocks. Planned: chosen before "
        "any search of the tier extended was compared, with Holm's correction for the "
        f"{len(planned)} planned ones alone. Best other: the fastest of {pluralize(len(others), 'searcher')} in the "
        "mean, with Holm's correction for all of them."
    )
    return _table("planned", f"{CONTROL} on the test tasks", rows, note)


def _table(name: str, title: str, rows: list[dict[str, str]], note: str) -> ReportTable:
    cells = pd.DataFrame(rows)
    return ReportTable(name=name, title=title, cells=cells, raw=cells, note=note)


def write_page(board: Leaderboard, out: Path, tier: TierName, *, html: bool) -> None:
    """Write the Markdown page `out` and its plot `NAME.png`; with `html` also the self-contained `NAME.html`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    plot = out.with_suffix(".png")
    draw_leaderboard(board, plot)
    parts = [INTRODUCTION.format(tier=tier), f"![{PLOT_TEXT}]({plot.name})"]
    for table in board.tables:
        parts += [f"## {table.title}", render_markdown(table).replace("\\\\*\\\\*", "**"), render_note_markdown(table)]
    out.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    if not html:
        return
    image = base64.b64encode(plot.read_bytes()).decode()
    tables = "".join(
        f"<h2>{markup.escape(table.title)}</h2>{table.cells.to_html(index=False, border=0)}"
        f"<p>{markup.escape(table.note)}</p>"
        for table in board.tables
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Leaderboard of QDQ-Bench</title>'
        "<style>body{font:15px sans-serif;margin:2em auto;max-width:75em}td,th{padding:.2em .7em;text-align:left}"
        "tr:nth-child(even){background:#f3f3f3}img{max-width:100%}</style><h1>Leaderboard of QDQ-Bench</h1>"
        f'<img alt="{PLOT_TEXT}" src="data:image/png;base64,{image}">{tables}</html>\n'
    )
    out.with_suffix(".html").write_text(page, encoding="utf-8")


def draw_leaderboard(board: Leaderboard, path: Path) -> None:
    """Write a PNG with regret and reached targets over evaluations, and the mean ranks with the critical difference."""
    names = list(board.regret)
    first = dict.fromkeys([*(name for name in ALWAYS_SHOWN if name in names), *names])
    shown = [name for name in names if name in list(first)[:SHOWN_CURVES]]
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 8}):
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        regret, targets, ranks = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        _draw_curves(regret, board.regret, shown)
        regret.set(yscale="log", ylabel="latency of the choice above the optimum, %, mean over blocks")
        regret.yaxis.set_major_formatter("{x:g}")
        regret.yaxis.set_minor_formatter(NullFormatter())
        _draw_curves(targets, board.targets, shown)
        targets.set(ylabel="share of targets reached (0.5 to 50 % above the optimum)", ylim=(0, 1))
        regret.legend(fontsize=7)
        for index, (budget, found) in enumerate(board.ranks.items()):
            colour, _, mark = series_style(index)
            places = [found.mean[name] for name in names[::-1]]
            ranks.plot(places, range(len(names)), mark, color=colour, markersize=4, label=f"{budget} evaluations")
        difference = next(iter(board.ranks.values())).critical_difference
        if difference is not None:
            ranks.errorbar(1 + difference / 2, len(names), xerr=difference / 2, color="black", capsize=3)
            end_of_bar = 1 + difference, len(names)
            ranks.annotate("critical difference", end_of_bar, xytext=(5, -3), textcoords="offset points")
        ranks.set_yticks(range(len(names)), names[::-1])
        ranks.set(xlabel="mean rank over blocks, 1 is the best", ylim=(-1, len(names) + 1))
        ranks.grid(alpha=0.25)
        ranks.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        figure.savefig(path, dpi=130)


def _draw_curves(axes: Axes, curves: Mapping[str, Floats], shown: list[str]) -> None:
    for name, values in curves.items():
        evaluations = np.arange(1, len(values) + 1)
        if name in shown:
            colour, line, _ = series_style(shown.index(name))
            axes.step(evaluations, values, where="post", label=name, color=colour, linestyle=line, zorder=3)
        else:
            axes.step(evaluations, values, where="post", color="0.85", linewidth=0.8)
    axes.set(xlabel="evaluations (grey: the other searchers)", xscale="log", xlim=(1, None))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
