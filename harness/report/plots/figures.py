"""Pictures of analyses: a PNG with axes in a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

#: Colours that colour-blind readers can distinguish (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


@contextmanager
def figure_file(path: Path, columns: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield axes in a row with relative widths `columns`, and write them to the PNG `path` on exit."""
    with mpl.rc_context({"text.usetex": False, "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(3.2 * sum(columns) if len(columns) > 1 else 6.4, 4.0), layout="constrained")
        yield tuple(figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
