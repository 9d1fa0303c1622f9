"""Report of `qdq replay` on a table, and on searchers that were replayed on it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.config.sections import ModelSpec, PluginSpec
from harness.replay.budget_tables import RISES
from harness.replay.landscape_metrics import estimate_drift, measure_difficulty
from harness.replay.recorded_landscape import NEAR_OPTIMUM_SHARE, Floats, Landscape, MetricBound
from harness.replay.replay import ReplayedSearches, check_table, initial_placements, optimum_in_initial_design, replay
from harness.replay.simulated_selection import RANDOM_LABEL, random_search
from harness.replay.study_file import MAX_EVALUATIONS_PER_SEARCH, MAX_SEEDS
from harness.report.report_table import format_interval, write_csv
from harness.report.statistics import quartiles
from harness.runtimes.benchmark_table import BenchmarkTable

LINE_STYLES = ("-", "--", "-.", ":")
TableText = tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]
"""Header, rows and notes of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Options of `qdq replay`.

    Attributes:
        seeds: Number of searches of each searcher, with seeds from 0.
        budget: Number of evaluations of each search.
        initial: Names of the initial placements.
        at_least: "METRIC=VALUE" that a placement must reach; None: no bound.
        model: Model that the table must be of; None: any.
    """

    seeds: int = 100
    budget: int = 100
    initial: tuple[str, ...] = ()
    at_least: str | None = None
    model: str | None = None


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


def replay_all(table: BenchmarkTable, searchers: Sequence[str], order: ReplayRequest, out: Path | None) -> TableText:
    """Replay searchers, and random search from the same start.

    Args:
        out: Folder for curves.csv (one line for each searcher, seed and evaluation; random search as the mean of its
            searches, with the seed -1) and curves.png; None: neither.

    Raises:
        UserError: The table is of another model, a searcher, placement or metric is unknown, or the folder cannot be
            written.
    """
    if order.budget > MAX_EVALUATIONS_PER_SEARCH or order.seeds > MAX_SEEDS:
        raise UserError(
            f"a replay has at most {MAX_EVALUATIONS_PER_SEARCH} evaluations and {MAX_SEEDS} seeds, but got "
            f"{order.budget} and {order.seeds}"
        )
    if order.model is not None:
        with tempfile.TemporaryDirectory() as work:
            check_table(table, ModelSpec(use=order.model, label="model"), Path(work))
    landscape = Landscape(table, None if order.at_least is None else _parse_bound(order.at_least))
    random_ms = random_search(landscape, order.budget, initial_placements(landscape, order.initial))
    replayed = [
        replay(landscape, PluginSpec(use=name), seeds=range(order.seeds), budget=order.budget, initial=order.initial)
        for name in searchers
    ]
    if out is not None:
        with explain_write_errors(out):
            _write_files(landscape, random_ms, replayed, out)
    marks = [n for n in (5, 10, 20, 50, 100, 200, 500, 1000) if n < order.budget] + [order.budget]
    header = ("searcher", *(str(mark) for mark in marks))
    optimum_ms = landscape.latency_ms[landscape.optimum]
    curves = [(RANDOM_LABEL, random_ms), *((searches.searcher, searches.latency_ms) for searches in replayed)]
    rows = [(name, *_format_row(latency_ms, marks, optimum_ms)) for name, latency_ms in curves]
    spent = f"after {', '.join(header[1:])} evaluations"
    columns = f"columns: latency above the optimum in % {spent}, median over searches [quartiles]"
    initial = _describe_initial_latency(landscape, order.initial)
    nothing = _explain_flat_table(landscape, order.initial)
    return header, rows, [columns, RISES, *filter(None, [initial, nothing]), *_format_notes(replayed)]


def _describe_initial_latency(landscape: Landscape, initial: Sequence[str]) -> str:
    """Return the latencies of the initial placements with the dimensions that the table fixes; "" for none."""
    named = zip(initial, initial_placements(landscape, initial), strict=True)
    initial = [f"{name} {landscape.latency_ms[landscape.index(placement)]:.3f} ms" for name, placement in named]
    return f"initial placements, with the dimensions that the table fixes: {', '.join(initial)}" if initial else ""


def _explain_flat_table(landscape: Landscape, initial: Sequence[str]) -> str:
    """Return a warning if all searchers are equal on this table, or ""."""
    name = optimum_in_initial_design(landscape, initial)
    return name and (
        f"all searchers are equal on {landscape.table.path.stem}: the initial placement {name!r} is within "
        f"{100 * NEAR_OPTIMUM_SHARE:.0f} % of the optimum; start without any (initial: none; here without --initial)"
    )


def _parse_bound(text: str) -> MetricBound:
    name, equals, value = text.partition("=")
    try:
        if not equals or not math.isfinite(float(value)):
            raise ValueError
        return MetricBound(metric=name, at_least=float(value))
    except ValueError:
        raise UserError(f"--at-least {text}: METRIC=VALUE, for instance sqnr_db=20") from None


def _format_row(latency_ms: Floats, marks: Sequence[int], optimum_ms: float) -> Iterator[str]:
    for mark in marks:
        yield format_interval(*quartiles(100 * (latency_ms[:, mark - 1] / optimum_ms - 1)))


def _format_notes(replayed: Sequence[ReplayedSearches]) -> Iterator[str]:
    for searches in replayed:
        yield (
            f"{searches.searcher}: {searches.evaluations} evaluations in {searches.wall_s:.2f} s "
            f"({searches.evaluations / searches.wall_s:.0f} a second), in place of {searches.build_s / 3600:.2f} h of "
            "builds and measurements"
        )


def _write_files(landscape: Landscape, random_ms: Floats, replayed: Sequence[ReplayedSearches], out: Path) -> None:
    optimum_ms = float(landscape.latency_ms[landscape.optimum])
    out.mkdir(parents=True, exist_ok=True)
    frames = [_curve_frame(RANDOM_LABEL, [-1], random_ms.mean(axis=0, keepdims=True), optimum_ms)]
    frames += [
        _curve_frame(searches.searcher, searches.walks.seeds, searches.latency_ms, optimum_ms) for searches in replayed
    ]
    write_csv(pd.concat(frames), out / "curves.csv")
    _draw_curves(landscape, random_ms, replayed, out / "curves.png")


def _curve_frame(searcher: str, seeds: Sequence[int], latency_ms: Floats, optimum_ms: float) -> pd.DataFrame:
    """Return one line for each seed and evaluation."""
    budget = latency_ms.shape[1]
    return pd.DataFrame(
        {
            "searcher": searcher,
            "seed": np.repeat(seeds, budget),
            "evaluations": np.tile(np.arange(1, budget + 1), len(seeds)),
            "latency_ms": latency_ms.ravel(),
            "regret": latency_ms.ravel() / optimum_ms - 1,
        }
    )


def _draw_curves(landscape: Landscape, random_ms: Floats, replayed: Sequence[ReplayedSearches], path: Path) -> None:
    """Plot median regret over evaluations: of random searches with a band of their quartiles, and of searchers."""
    from harness.report.plots.figures import COLOURS, figure_file

    optimum_ms = landscape.latency_ms[landscape.optimum]
    evaluations = np.arange(1, random_ms.shape[1] + 1)
    with figure_file(path, columns=(1,)) as (axes,):
        low, middle, high = 100 * (np.quantile(random_ms, (0.25, 0.5, 0.75), axis=0) / optimum_ms - 1)
        axes.fill_between(evaluations, low, high, step="post", color="0.9")
        axes.step(evaluations, middle, where="post", color="0.4", label=RANDOM_LABEL)
        for index, searches in enumerate(replayed):
            regret = 100 * (np.median(searches.latency_ms, axis=0) / optimum_ms - 1)
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINE_STYLES[index % len(LINE_STYLES)]}
            axes.step(evaluations, regret, where="post", label=searches.searcher, **style)
        axes.set_xlabel("evaluations")
        axes.set_ylabel("latency above the optimum, %, median over searches")
        axes.set_title(landscape.table.metadata.model)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
