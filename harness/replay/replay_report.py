"""Report of `qdq bench replay` on a table, and on searchers that were replayed on it."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.config.sections import ModelSpec, PluginSpec
from harness.replay.budget_study import RISES
from harness.replay.replay import (
    NEAR_OPTIMUM_SHARE,
    Floats,
    Landscape,
    ReplayRequest,
    initial_placements,
    optimum_in_initial_design,
    replay,
)
from harness.replay.simulated_selection import RANDOM_LABEL, Searches, random_search
from harness.report.report_table import format_interval, write_csv
from harness.report.statistics import quartiles
from harness.run.prepare.model_loader import open_model
from harness.runtimes.replay import BenchmarkTable
from search.api import Score

FLAT_LOG_LATENCY = 1e-9  # smaller differences of log latency are rounding


def measure_difficulty(landscape: Landscape) -> dict[str, float]:
    """Return the difficulty of a table for a search.

    Returns:
        near_optimum: Share of placements within 1 % of the optimum.
        random_evaluations: Evaluations that random search needs on average to find one of them; exact.
        fitness_distance: Correlation of log latency with the number of dimensions that differ from the nearest optimum:
            1 leads straight there, 0 and below mislead (Jones and Forrest, "Fitness distance correlation as a measure
            of problem difficulty for genetic algorithms", ICGA 1995).
        neighbour_correlation: Correlation of log latency over all pairs that differ in one dimension: 1 is
            smooth, 0 is rugged (Weinberger, "Correlated and uncorrelated fitness landscapes", Biological Cybernetics
            63, 1990, with the walk replaced by the whole table).
        local_optima: Share of placements that no single change improves by more than the noise of both.
        additive: Share of the variance of log latency that single dimensions explain.
        pairwise: Share that pairs of dimensions explain in addition (both: Sobol', "Sensitivity estimates for nonlinear
            mathematical models", 1993; exact, because the table is a full factorial).
    """
    lowest, sizes = landscape.latency_ms[landscape.optimum], landscape.sizes
    near = landscape.latency_ms <= lowest * (1 + NEAR_OPTIMUM_SHARE)
    grid = _grid(landscape)
    # In a random order of placements, a model of c placements precedes all C near-optimal ones with probability
    # c / (c + C); the mean number of evaluations is 1 plus the sum of these over the other models.
    _, place, copies = np.unique(landscape.identity, return_index=True, return_counts=True)
    far_copies = copies[~near[place]]
    choices = np.indices(sizes).reshape(len(sizes), -1)
    best = np.flatnonzero(landscape.allowed & (landscape.latency_ms <= lowest))
    distance = np.min([(choices != choices[:, [index]]).sum(axis=0) for index in best], axis=0)
    pairs = [
        (np.take(grid, first, axis=axis).ravel(), np.take(grid, second, axis=axis).ravel())
        for axis, size in enumerate(sizes)
        for first, second in itertools.combinations(range(size), 2)
    ]
    firsts, seconds = (np.concatenate(each) for each in zip(*pairs, strict=True))
    errors = [score.stderr / score.objective if isinstance(score, Score) else 0.0 for score in landscape.scores]
    noise, optimal = np.array(errors).reshape(sizes), np.ones(sizes, dtype=bool)
    for axis, size in enumerate(sizes):
        for step in range(1, size):
            other, its_noise = np.roll(grid, step, axis=axis), np.roll(noise, step, axis=axis)
            optimal &= other >= grid - 2 * np.hypot(noise, its_noise)
    additive, pairwise = _explained_variance(grid)
    return {
        "near_optimum": float(near.mean()),
        "random_evaluations": 1.0 + float((far_copies / (far_copies + int(near.sum()))).sum()),
        "fitness_distance": _correlation(grid.ravel(), distance.astype(float)),
        "neighbour_correlation": _correlation(np.append(firsts, seconds), np.append(seconds, firsts)),
        "local_optima": float((optimal.ravel() & landscape.allowed).mean()),
        "additive": additive,
        "pairwise": pairwise,
    }


def estimate_drift(landscape: Landscape) -> tuple[float, float]:
    """Return the change of log latency over the recording of a table, and its standard error (infinite if unknown).

    Placements were measured in random order, so a slope over the order in the residuals of a model of single
    dimensions is drift of the machine.
    """
    identity = landscape.identity
    inside = set(identity.tolist())
    first = max((row.number for row in landscape.table.rows.values() if row.number not in inside), default=-1)
    once = np.zeros(len(identity), dtype=bool)
    once[np.unique(identity, return_index=True)[1]] = True  # placements with the same model share one measurement
    used = landscape.allowed & (identity > first) & once
    if used.sum() < 3:
        return 0.0, math.inf
    grid = _grid(landscape)
    grid = grid - grid.mean()
    residuals = (grid - sum(_main_effects(grid))).ravel()[used]
    place = identity[used] - identity[used].mean()
    place = place / np.ptp(place)
    slope = float(place @ residuals / (place @ place))
    errors = residuals - residuals.mean() - slope * place
    return slope, float(np.sqrt(errors @ errors / (len(errors) - 2) / (place @ place)))


def _grid(landscape: Landscape) -> Floats:
    """Return log latency over the choices of each dimension."""
    logs: Floats = np.log(landscape.latency_ms).reshape(landscape.sizes)
    return logs


def _main_effects(grid: Floats) -> list[Floats]:
    """Return the mean over all other dimensions, for each dimension, in a shape that broadcasts over the grid."""
    axes = range(grid.ndim)
    return [grid.mean(axis=tuple(a for a in axes if a != axis), keepdims=True) for axis in axes]


def _explained_variance(grid: Floats) -> tuple[float, float]:
    """Return the shares of variance of first and of second order (Sobol' indices)."""
    if np.ptp(grid) < FLAT_LOG_LATENCY:
        return 1.0, 0.0
    grid = grid - grid.mean()
    total = float(grid.var())
    single, axes, pairs = _main_effects(grid), range(grid.ndim), 0.0
    for first, second in itertools.combinations(axes, 2):
        others = tuple(axis for axis in axes if axis not in (first, second))
        pairs += float((grid.mean(axis=others, keepdims=True) - single[first] - single[second]).var())
    return sum(float(effect.var()) for effect in single) / total, pairs / total


def _correlation(first: Floats, second: Floats) -> float:
    """Return Pearson's correlation; 0 if one side is constant."""
    if min(np.ptp(first), np.ptp(second)) < FLAT_LOG_LATENCY:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


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
        f"{len(np.unique(landscape.identity))} different models, {failed} failed or out of bounds; "
        f"drift over the recording {100 * drift:+.2f} % +- {200 * drift_se:.2f} %",
        f"optimum {landscape.latency_ms[landscape.optimum]:.3f} ms ({anchors}); dimensions quantized in it: {listed}",
        f"difficulty: {100 * hard['near_optimum']:.2f} % within 1 % of the optimum (random search needs "
        f"{hard['random_evaluations']:.0f} evaluations on average), fitness-distance correlation "
        f"{hard['fitness_distance']:+.2f}, neighbour correlation {hard['neighbour_correlation']:+.2f}, local optima "
        f"{100 * hard['local_optima']:.2f} %, variance explained by single dimensions {100 * hard['additive']:.0f} %, "
        f"by pairs {100 * hard['pairwise']:.0f} %",
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
        at_least: "METRIC=VALUE" that a placement must reach; None: no bound.
        model: Model that the table must be of; None: any.
        out: Folder for curves.csv (one line for each searcher, seed and evaluation; random search as the mean of its
            searches, with the seed -1) and curves.png; None: neither.
    """
    if model is not None:
        with tempfile.TemporaryDirectory() as work:
            check_table(table, ModelSpec(use=model, label="model"), Path(work))
    landscape, notes = Landscape(table, None if at_least is None else _parse_bound(at_least)), list[str]()
    curves = {RANDOM_LABEL: random_search(landscape, budget, initial)}
    if initial:
        named = zip(initial, initial_placements(landscape, initial), strict=True)
        listed = [f"{name} {landscape.latency_ms[landscape.index(placement)]:.3f} ms" for name, placement in named]
        notes.append(f"initial placements, with the dimensions that the table fixes: {', '.join(listed)}")
    if first := optimum_in_initial_design(landscape, initial):
        notes.append(
            f"all searchers are equal on {table.path.stem}: the initial placement {first!r} is within "
            f"{100 * NEAR_OPTIMUM_SHARE:.0f} % of the optimum; start without any (initial: none; here without "
            "--initial)"
        )
    for name in searchers:
        started_s = time.perf_counter()
        request = ReplayRequest(
            searcher=PluginSpec(use=name), table=table.path, seeds=range(seeds), budget=budget, initial=initial
        )
        searches = Searches(landscape, replay(landscape, request), budget)
        curves[name] = searches.latency_ms
        count, wall_s = int(searches.evaluations.sum()), time.perf_counter() - started_s
        notes.append(
            f"{name}: {count} evaluations in {wall_s:.2f} s ({count / wall_s:.0f} a second), in place of "
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
    spent = f"latency above the optimum in % after {', '.join(header[1:])} evaluations"
    return header, rows, [f"columns: {spent}, median over searches [quartiles]", RISES, *notes]


def check_table(table: BenchmarkTable, spec: ModelSpec, work: Path) -> None:
    """Raise `UserError` if a table is of another model than the given one."""
    model = open_model(spec, work)
    if model.sha256 != table.metadata.model_sha256:
        raise UserError(
            f"{table.path} is of another model: it was recorded of {table.metadata.source} "
            f"({table.metadata.model_sha256[:12]}), but {spec.use} is {model.sha256[:12]}"
        )


def _parse_bound(text: str) -> tuple[str, float]:
    metric, _, value = text.partition("=")
    try:
        bound = float(value)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise UserError(f"--at-least {text}: METRIC=VALUE, for instance sqnr_db=20")
    return metric, bound


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
