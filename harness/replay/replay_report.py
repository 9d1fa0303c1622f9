"""Report of `qdq bench replay` on a table, and on searchers that were replayed on it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.config.sections import ModelSpec, PluginSpec
from harness.replay.budget_tables import RISES
from harness.replay.landscape_metrics import estimate_drift, measure_difficulty
from harness.replay.recorded_landscape import NEAR_OPTIMUM_SHARE, Floats, Landscape, MetricBound
from harness.replay.replay import ReplayRequest, initial_placements, optimum_in_initial_design, replay
from harness.replay.simulated_selection import RANDOM_LABEL, Searches, random_search
from harness.replay.study_file import MAX_EVALUATIONS_PER_SEARCH, MAX_SEEDS
from harness.report.report_table import format_interval, write_csv
from harness.report.statistics import quartiles
from harness.run.prepare.model_loader import open_model
from harness.runtimes.benchmark_table import BenchmarkTable

LINE_STYLES = ("-", "--", "-.", ":")
TableText = tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]
"""Header, rows and notes of a table."""


def table_lines(table: BenchmarkTable) -> list[str]:
    """Return lines about a table: its model and machine, its optimum, and its difficulty."""
    facts, landscape = table.metadata, Landscape(table)
    backend, hard, (drift, drift_se) = facts.backend, measure_difficulty(landscape), estimate_drift(landscape)
    space, best = table.subspace.space, list(table.subspace.placements())[landscape.optimum]
    quantized = [f"{d.name}={d.choices[c]}" for d, c in zip(space.dimensions, best.choices, strict=True) if c]
    fixed = [c for d, c in zip(facts.dimensions, facts.base, strict=True) if d.name not in facts.varied]
    listed = (
        f"{', '.join(quantized) or 'none'} of those that vary, {sum(c > 0 for c in fixed)} of the {len(fixed)} fixed"
    )
    failed = int((~landscape.allowed).sum())
    anchors = ", ".join(f"{name} {value:.3f} ms" for name, value in landscape.anchors_ms.items())
    return [
        f"{facts.model} ({facts.source}, {facts.model_sha256[:12]}) on {backend['name']} {backend['version']}, "
        f"{backend['device']}, floats in {backend['float_precision']}",
        f"{len(table.subspace)} placements of {len(space)} of {len(facts.dimensions)} dimensions, "
        f"{len(landscape.distinct_ms)} different models, {failed} failed or out of bounds; "
        f"drift over the recording {100 * drift:+.2f} % +- {200 * drift_se:.2f} %",
        f"optimum {landscape.latency_ms[landscape.optimum]:.3f} ms ({anchors}); dimensions quantized in it: {listed}",
        f"difficulty: {100 * hard.near_optimum:.2f} % within 1 % of the optimum (random search needs "
        f"{hard.random_evaluations:.0f} evaluations on average), fitness-distance correlation "
        f"{hard.fitness_distance:+.2f}, neighbour correlation {hard.neighbour_correlation:+.2f}, local optima "
        f"{100 * hard.local_optima:.2f} %, variance explained by single dimensions {100 * hard.additive:.0f} %, "
        f"by pairs {100 * hard.pairwise:.0f} %",
    ]


def replay_all(
    table: BenchmarkTable,
    searchers: Sequence[str],
    *,
    seeds: int = 100,
    budget: int = 100,
    initial: Sequence[str] = (),
    at_least: str | None = None,
    model: str | None = None,
    out: Path | None = None,
) -> TableText:
    """Replay searchers, and random search from the same start.

    Args:
        seeds: Number of searches of each searcher, with seeds from 0.
        budget: Number of evaluations of each search.
        initial: Names of the initial placements.
        at_least: "METRIC=VALUE" that a placement must reach; None: no bound.
        model: Model that the table must be of; None: any.
        out: Folder for curves.csv (one line for each searcher, seed and evaluation; random search as the mean of its
            searches, with the seed -1) and curves.png; None: neither.
    """
    if budget > MAX_EVALUATIONS_PER_SEARCH or seeds > MAX_SEEDS:
        raise UserError(
            f"a replay has at most {MAX_EVALUATIONS_PER_SEARCH} evaluations and {MAX_SEEDS} seeds, but got "
            f"{budget} and {seeds}"
        )
    if model is not None:
        with tempfile.TemporaryDirectory() as work:
            check_table(table, ModelSpec(use=model, label="model"), Path(work))
    landscape = Landscape(table, None if at_least is None else _parse_bound(at_least))
    curves = {RANDOM_LABEL: random_search(landscape, budget, initial)}
    notes = []
    for name in searchers:
        started_s = time.perf_counter()
        use = PluginSpec(use=name)
        request = ReplayRequest(searcher=use, table=table.path, seeds=range(seeds), budget=budget, initial=initial)
        searches = Searches(landscape, replay(landscape, request), budget)
        curves[use.name] = searches.latency_ms
        count, wall_s = int(searches.evaluations.sum()), time.perf_counter() - started_s
        notes.append(
            f"{use.name}: {count} evaluations in {wall_s:.2f} s ({count / wall_s:.0f} a second), in place of "
            f"{searches.elapsed_s[:, -1].sum() / 3600:.2f} h of builds and measurements"
        )
    optimum_ms = float(landscape.latency_ms[landscape.optimum])
    if out is not None:
        with explain_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            write_csv(pd.concat([_curve_frame(*curve, optimum_ms) for curve in curves.items()]), out / "curves.csv")
            _draw_curves(table.metadata.model, curves, optimum_ms, out / "curves.png")
    marks = [n for n in (5, 10, 20, 50, 100, 200, 500, 1000) if n < budget] + [budget]
    header = ("searcher", *(str(mark) for mark in marks))
    rows = [
        (name, *(format_interval(*quartiles(100 * (latency_ms[:, n - 1] / optimum_ms - 1))) for n in marks))
        for name, latency_ms in curves.items()
    ]
    spent = f"after {', '.join(header[1:])} evaluations"
    columns = f"columns: latency above the optimum in % {spent}, median over searches [quartiles]"
    return header, rows, [columns, RISES, *_describe_start(landscape, initial), *notes]


def check_table(table: BenchmarkTable, spec: ModelSpec, work: Path) -> None:
    """Raise `UserError` if a table is of another model than the given one."""
    model = open_model(spec, work)
    if model.sha256 != table.metadata.model_sha256:
        raise UserError(
            f"{table.path} is of another model: it was recorded of {table.metadata.source} "
            f"({table.metadata.model_sha256[:12]}), but {spec.use} is {model.sha256[:12]}"
        )


def _parse_bound(text: str) -> MetricBound:
    name, equals, value = text.partition("=")
    try:
        if not equals or not math.isfinite(float(value)):
            raise ValueError
        return MetricBound(metric=name, at_least=float(value))
    except ValueError:
        raise UserError(f"--at-least {text}: METRIC=VALUE, for instance sqnr_db=20") from None


def _describe_start(landscape: Landscape, initial: Sequence[str]) -> Iterator[str]:
    """Yield the latencies of the initial placements, and a warning if all searchers are equal on the table."""
    if initial:
        named = zip(initial, initial_placements(landscape, initial), strict=True)
        listed = [f"{name} {landscape.latency_ms[landscape.index(placement)]:.3f} ms" for name, placement in named]
        yield f"initial placements, with the dimensions that the table fixes: {', '.join(listed)}"
    if name := optimum_in_initial_design(landscape, initial):
        yield (
            f"all searchers are equal on {landscape.table.path.stem}: the initial placement {name!r} is within "
            f"{100 * NEAR_OPTIMUM_SHARE:.0f} % of the optimum; start without any (initial: none; here without "
            "--initial)"
        )


def _curve_frame(searcher: str, latency_ms: Floats, optimum_ms: float) -> pd.DataFrame:
    """Return one line for each seed and evaluation; the mean of all searches for random search."""
    seeds, budget = np.arange(len(latency_ms)), latency_ms.shape[1]
    if searcher == RANDOM_LABEL:
        seeds, latency_ms = np.array([-1]), latency_ms.mean(axis=0, keepdims=True)
    return pd.DataFrame(
        {
            "searcher": searcher,
            "seed": np.repeat(seeds, budget),
            "evaluations": np.tile(np.arange(1, budget + 1), len(seeds)),
            "latency_ms": latency_ms.ravel(),
            "regret": latency_ms.ravel() / optimum_ms - 1,
        }
    )


def _draw_curves(model: str, curves: Mapping[str, Floats], optimum_ms: float, path: Path) -> None:
    """Plot median regret over evaluations: of random searches with a band of their quartiles, and of searchers."""
    from harness.report.plots.figures import COLOURS, figure_file

    evaluations = np.arange(1, curves[RANDOM_LABEL].shape[1] + 1)
    with figure_file(path, columns=(1,)) as (axes,):
        for index, (name, latency_ms) in enumerate(curves.items(), -1):
            low, middle, high = 100 * (np.quantile(latency_ms, (0.25, 0.5, 0.75), axis=0) / optimum_ms - 1)
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINE_STYLES[index % len(LINE_STYLES)]}
            if name == RANDOM_LABEL:
                axes.fill_between(evaluations, low, high, step="post", color="0.9")
                style = {"color": "0.4"}
            axes.step(evaluations, middle, where="post", label=name, **style)
        axes.set_xlabel("evaluations")
        axes.set_ylabel("latency above the optimum, %, median over searches")
        axes.set_title(model)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
