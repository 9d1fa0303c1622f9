"""Figures as files, colour-blind safe and legible in grey.

Colours are those of Okabe and Ito (2008), then of Paul Tol's palette "muted".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter

from harness.base.text import printable_lines

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F",
    "#882255", "#999933", "#332288", "#AA4499",
)  # fmt: skip
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SETTINGS: dict[Any, Any] = {
    "text.usetex": False, "text.parse_math": False, "font.size": 9, "svg.hashsalt": "qdq-bench", "pdf.fonttype": 42,
}  # fmt: skip
PLOT_FILE_FORMATS = ("png", "svg", "pdf")
PLOT_METADATA: Mapping[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
PNG_DPI, MAX_PNG_HEIGHT_PX = 200, 4000  # limits memory: several copies of four bytes a pixel


class NotebookFigure(Figure):
    """Figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


@contextmanager
def figure_file(path: Path, columns: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield axes in a row with relative widths `columns`, and write them to the PNG `path` on exit."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(3.2 * sum(columns) if len(columns) > 1 else 6.4, 4.0), layout="constrained")
        yield tuple(figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=PNG_DPI)


@contextmanager
def plot_files(path: Path | None, height: float = 4.0, *, width: float = 6.4, grid: bool = True) -> Iterator[Axes]:
    """Yield the axes of a figure, which is written as PNG, SVG and PDF afterwards if there is a path (without suffix).

    Height and width are in inches. Files have no date and no random identifiers, so the same results give the same
    bytes. The PDF has TrueType fonts, which publishers ask for.
    """
    with mpl.rc_context(SETTINGS):
        figure = NotebookFigure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        yield axes
        if grid:
            axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        # Control characters are escaped in all texts, as XML and thus SVG forbids them.
        for axis in (axis for each in figure.axes for axis in (each.xaxis, each.yaxis)):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, FixedFormatter):
                formatter.seq = [printable_lines(str(label)) for label in formatter.seq]
        for text in figure.findobj(Text):
            text.set_text(printable_lines(text.get_text()))
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        dpi = min(PNG_DPI, MAX_PNG_HEIGHT_PX / height)
        for kind in PLOT_FILE_FORMATS:
            figure.savefig(path.with_name(f"{path.name}.{kind}"), dpi=dpi, metadata=PLOT_METADATA.get(kind))
            figure.set_layout_engine("none")  # the layout of the first format serves all; it takes a third of a save


def series_style(index: int) -> tuple[str, str, str]:
    """Return colour, line and mark of a series; used colours repeat with the next line and mark."""
    turn = index // len(COLOURS)
    return COLOURS[index % len(COLOURS)], LINES[(index + turn) % len(LINES)], MARKERS[(index + turn) % len(MARKERS)]


def add_legend(axes: Axes) -> None:
    """Draw the legend below the axes, in at most three columns of wrapped labels."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles, [fill(label, 24) for label in labels], loc="outside lower center", ncols=min(3, max(1, len(labels))),
        frameon=False, fontsize=8,
    )  # fmt: skip
