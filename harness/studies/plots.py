"""Plots of studies as PNG: searchers against random search, and the figure file that other plots use too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from harness.studies.random_search import RANDOM_LABEL
from harness.studies.recorded_landscape import Landscape
from harness.studies.replay import ReplayedSearches

__all__ = ["COLOURS", "draw_curves", "figure_file"]

#: Distinct for colour-blind readers too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LINE_STYLES = ("-", "--", "-.", ":")


def draw_curves(
    landscape: Landscape,
    random_ms: npt.NDArray[np.float64],
    replayed: Sequence[ReplayedSearches],
    title: str,
    path: Path,
) -> None:
    """Median regret over evaluations: of random searches with their quartiles as a band, and of searchers."""
    optimum_ms = landscape.latency_ms[landscape.optimum]
    evaluations = np.arange(1, random_ms.shape[1] + 1)
    with figure_file(path, columns=(1,)) as (axes,):
        low, middle, high = 100 * (np.quantile(random_ms, (0.25, 0.5, 0.75), axis=0) / optimum_ms - 1)
        axes.fill_between(evaluations, low, high, step="post", color="0.9")
        axes.step(evaluations, middle, where="post", color="0.4", label=RANDOM_LABEL)
        for index, found in enumerate(replayed):
            regret = 100 * (np.median(found.latency_ms, axis=0) / optimum_ms - 1)
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINE_STYLES[index % len(LINE_STYLES)]}
            axes.step(evaluations, regret, where="post", label=found.searcher, **style)
        axes.set_xlabel("evaluations")
        axes.set_ylabel("latency above the optimum, %, median over searches")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)


@contextmanager
def figure_file(path: Path, columns: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield axes in a row and write them to a PNG afterwards; text is not parsed as formulas."""
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(3.2 * sum(columns) if len(columns) > 1 else 6.4, 4.0), layout="constrained")
        yield tuple(figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
