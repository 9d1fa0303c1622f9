"""Tables as a terminal shows them: marks that are seen and not read, and no column that says the same in every row."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table as Drawn
from rich.text import Text

from harness.report.tables import Table, printable

__all__ = ["drawn"]

STYLES = {"best": "bold", "tied": "underline"}


def drawn(table: Table) -> Group:
    """Title, what all rows are of, the rows with the best in bold and its equals underlined, warnings and note.

    Names in it stay text: no markup of rich, no control characters.
    """
    alike = table.alike
    columns = [str(column) for column in table.cells.columns if column not in alike]
    grid = Drawn(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(_text(column))
    for number, line in enumerate(table.cells.astype(str).to_dict("records")):
        grid.add_row(*(_text(line[column], STYLES.get(table.mark(number, column), "")) for column in columns))
    above = [_text(f"All rows: {', '.join(f'{name}: {value}' for name, value in alike.items())}")] if alike else []
    warnings = [_text(line, "yellow") for line in table.warnings]
    note = [_text(line, "dim") for line in table.note.splitlines()]
    return Group(_text(table.title, "bold"), *above, grid, *warnings, *note, "")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
