"""Tables as a terminal shows them: marks that are seen and not read, and no column that says the same in every row."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

from harness.report.tables import Table, printable

__all__ = ["Drawn"]

STYLES = {"best": "bold", "tied": "underline"}
ENDLESS = 10_000
WIDEST = 28
"""Characters of a column; what has more, such as the reason of a failure, is wrapped."""
INTERVAL = re.compile(r"(?<=\d) (\[[-+\d][^\]]*\])")
FORMS = (r" \1", r"\n\1", "")
"""Of an interval after its figure: beside it, below it, nowhere; the first that fits is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Title, what all rows are of, the rows with the best in bold and its equals underlined, warnings and note.

    Names in it stay text: no markup of rich, no control characters. Where rows are wider than the terminal, intervals
    stand below their figures, and where that is still too wide they are left out, which is said.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich prints."""
        table, alike = self.table, self.table.alike
        yield _text(table.title, "bold")
        if alike:
            yield _text(f"All rows: {', '.join(f'{name}: {value}' for name, value in alike.items())}")
        grids = [_grid(table, form) for form in FORMS]
        wanted = [Measurement.get(console, options.update(width=ENDLESS), grid).maximum for grid in grids]
        fits = [width <= options.max_width for width in wanted]
        chosen = fits.index(True) if any(fits) else len(FORMS) - 1
        yield grids[chosen]
        yield ""
        if FORMS[chosen] == "" and wanted[1] < wanted[0]:  # there are intervals
            yield _text("A wider terminal shows the intervals.", "yellow")
        for line in table.warnings:
            yield _text(line, "yellow")
        for line in table.note.splitlines():
            yield _text(line, "dim")
        yield ""


def _grid(table: Table, form: str) -> Grid:
    """The rows, with intervals in one of the `FORMS`."""
    columns = [str(column) for column in table.cells.columns if column not in table.alike]
    grid = Grid(box=None, padding=(0, 2 if form else 1, 0, 0), pad_edge=False)
    for column in columns:
        head = _text(column) if form else Text(printable(column.removesuffix(" [CI]")).replace(" ", "\n"))
        grid.add_column(head, overflow="fold", max_width=WIDEST)
    for number, line in enumerate(table.cells.astype(str).to_dict("records")):
        marks = [STYLES.get(table.mark(number, column), "") for column in columns]
        texts = [INTERVAL.sub(form, printable(line[column])) for column in columns]
        grid.add_row(*(Text(text, style=style) for text, style in zip(texts, marks, strict=True)))
    return grid


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
