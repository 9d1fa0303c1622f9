"""Tables drawn for a terminal: marked cells are styled, constant columns are in the caption, no line is cut."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from harness.report.report_table import ReportTable, escape_control_characters, split_wide_table

__all__ = ["TerminalTable"]

MARK_STYLES = {"best": "bold", "tied": "underline"}
MAX_COLUMN_CHARS = 28
"""Characters of a column; a longer cell, such as the reason of a failure, is wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTable:
    """Title, constant columns, rows with the best in bold and ties underlined, warnings and note.

    Names are plain text: no markup of rich, no control characters. Columns that do not fit the terminal go to a second
    table with the same rows.
    """

    table: ReportTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table for the width of the terminal."""
        table = self.table
        yield _styled_text(table.title, "bold")
        if table.caption:
            yield _styled_text(table.caption)
        for part in split_wide_table(table, options.max_width, space=2, widest=MAX_COLUMN_CHARS):
            yield _build_grid(part)
            yield ""
        for line in table.warnings:
            yield _styled_text(line, "yellow")
        for line in table.note.splitlines():
            yield _styled_text(line, "dim")
        yield ""


def _build_grid(table: ReportTable) -> Grid:
    columns = [str(column) for column in table.cells.columns]
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        grid.add_column(_styled_text(column), overflow="fold", max_width=MAX_COLUMN_CHARS)
    for number, line in enumerate(table.cells.astype(str).to_dict("records")):
        marks = [MARK_STYLES.get(table.mark(number, column), "") for column in columns]
        grid.add_row(*(_styled_text(line[column], style) for column, style in zip(columns, marks, strict=True)))
    return grid


def _styled_text(text: str, style: str = "") -> Text:
    return Text(escape_control_characters(text), style=style)
