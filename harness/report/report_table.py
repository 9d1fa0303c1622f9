"""One table, three markups: Markdown for people, CSV for readers, LaTeX (booktabs) for papers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

__all__ = [
    "MISSING_CELL",
    "ReportTable",
    "drop_repeated_lines",
    "escape_control_characters",
    "escape_markdown",
    "format_interval",
    "pluralize",
    "render_markdown",
    "render_note_markdown",
    "render_plain_text",
    "split_wide_table",
    "write_table",
]  # fmt: skip

MISSING_CELL = "-"
COLUMNS_SHOWN_ONCE = ("cell", "model", "device", "batch")
ROW_KEYS = ("cell", "model", "device", "precision", "quantized", "row", "method", "searcher", "first", "second")
"""Columns that identify a row: every part of a table that is split has them."""
PIPE_WIDTH_CHARS = 100
"""Columns of a table that is printed to a pipe or a file."""
LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)  # fmt: skip
CSV_FLOAT_FORMAT = "%.12g"
"""Of raw figures. The last ones of sums differ with the width of a processor's vectors; the same results give the same
file anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table ready to show.

    Attributes:
        name: Of its files.
        cells: Formatted text without any markup.
        raw: The figures behind it, for CSV.
        note: What a reader must know; shown below.
        bold: Row number and column of the best.
        underlined: Row number and column of what cannot be told from the best.
        title: Shown above it on the page.
        warnings: What casts doubt on it; shown before the note.
    """

    name: str
    cells: pd.DataFrame
    raw: pd.DataFrame
    note: str
    bold: frozenset[tuple[int, str]] = frozenset()
    underlined: frozenset[tuple[int, str]] = frozenset()
    title: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Warnings and note, line by line."""
        return (*self.warnings, *self.note.splitlines())

    @property
    def shared_values(self) -> dict[str, str]:
        """What all rows are of, by column: said once above the table where there is room for little."""
        cells = self.cells.astype(str)
        names = [name for name in COLUMNS_SHOWN_ONCE if name in cells and len(cells) > 1 and cells[name].nunique() == 1]
        return {name: cells[name].iloc[0] for name in names}

    @property
    def constant(self) -> dict[str, str]:
        """The one value of each unmarked column that says the same in all of several rows."""
        marked = {column for _, column in self.bold | self.underlined}
        cells = self.cells.astype(str)
        names = [str(name) for name in cells if len(cells) > 1 and name not in marked and cells[name].nunique() == 1]
        keys = [name for name in cells if name in ROW_KEYS]
        return {name: cells[name].iloc[0] for name in names if name not in keys or len(keys) > 1}

    @property
    def caption(self) -> str:
        """The constant columns in a line; "" if there are none, or only missing values."""
        known = [f"{name}: {value}" for name, value in self.constant.items() if value != MISSING_CELL]
        return f"All rows: {', '.join(known)}" if known else ""

    def mark(self, row: int, column: str) -> str:
        """How a cell stands out: "best", "tied" or ""."""
        if (row, column) in self.bold:
            return "best"
        return "tied" if (row, column) in self.underlined else ""


def format_interval(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """A figure with its limits where they are finite, or a dash where there is no figure."""
    if value is None or pd.isna(value):
        return MISSING_CELL
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def pluralize(count: int, noun: str) -> str:
    """So many of something: 1 table, 2 tables."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def render_markdown(table: ReportTable) -> str:
    """A pipe table; names in it can neither add a column nor be read as markup."""
    return _apply_marks(table, escape_markdown, {"best": "**{}**", "tied": "<u>{}</u>"}).to_markdown(
        index=False, disable_numparse=True
    )


def escape_control_characters(text: str) -> str:
    """Text without control characters: a name cannot move the cursor of a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def escape_markdown(text: str) -> str:
    """Text that Markdown and a terminal show as it stands: no markup, no control characters."""
    return re.sub(r"[\\|<*`]|\](?=[(\[:])", lambda found: f"\\{found[0]}", escape_control_characters(text))


def split_wide_table(
    table: ReportTable, width: int, space: int, marks: int = 0, widest: int | None = None
) -> Iterator[ReportTable]:
    """Split a table by columns into tables of at most `width` characters; each has the columns that identify a row.

    Columns that are the same in every row are left out (see `Table.constant`). A part has at least one column besides
    the keys, so very long names can make it wider.

    Args:
        table: The table to split.
        width: Characters of a line.
        space: Characters between two columns.
        marks: Characters of markup around a marked cell.
        widest: Characters after which a cell is wrapped; None if cells are never wrapped.
    """
    cells = table.cells.drop(columns=list(table.constant)).astype(str)
    heading = 2 if marks else 0  # tabulate pads headings
    widths = {name: max([len(str(name)) + heading, *map(len, cells[name])]) for name in cells}
    widths = {name: space + (value if widest is None else min(value, widest)) for name, value in widths.items()}
    widths |= {name: widths[name] + marks for _, name in table.bold | table.underlined}
    keys = [name for name in cells if name in ROW_KEYS]
    parts: list[list[str]] = [[]]
    used = start = sum(widths[name] for name in keys)
    for name in (str(name) for name in cells if name not in keys):
        if parts[-1] and used + widths[name] > width:
            parts.append([])
            used = start
        parts[-1].append(name)
        used += widths[name]
    for part in parts:
        yield replace(table, cells=cells[[*keys, *part]])


def drop_repeated_lines(tables: Iterable[ReportTable]) -> list[ReportTable]:
    """Return the tables without the warnings and lines of notes that an earlier one has."""
    seen: set[str] = set()

    def fresh(lines: Sequence[str]) -> tuple[str, ...]:
        found = tuple(line for line in lines if line not in seen)
        seen.update(found)
        return found

    return [
        replace(table, warnings=fresh(table.warnings), note="\n".join(fresh(table.note.splitlines())))
        for table in tables
    ]


def render_plain_text(table: ReportTable) -> str:
    """Return a table and its note as pipe tables of `PIPE_WIDTH_CHARS` columns; best bold, ties in italics."""
    marks = {"best": "**{}**", "tied": "*{}*"}
    parts = [
        _apply_marks(part, escape_markdown, marks).to_markdown(index=False, disable_numparse=True)
        for part in split_wide_table(table, PIPE_WIDTH_CHARS, space=3, marks=4)
    ]
    caption = [escape_markdown(table.caption)] if table.caption else []
    note = render_note_markdown(table).replace("underlined", "in italics").replace("Underlined", "In italics")
    return "\n\n".join(filter(None, [*caption, *parts, note]))


def render_note_markdown(table: ReportTable) -> str:
    """Warnings and note, line by line, names in them as harmless as in the table."""
    return "\n".join(escape_markdown(line) for line in table.lines)


def write_table(table: ReportTable, folder: Path) -> None:
    """Write the table as .md and .tex with its note, and its raw figures as .csv."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table.name}.md").write_text(
        f"{render_markdown(table)}\n\n{render_note_markdown(table)}\n", encoding="utf-8"
    )
    table.raw.to_csv(folder / f"{table.name}.csv", index=False, float_format=CSV_FLOAT_FORMAT)
    (folder / f"{table.name}.tex").write_text(_render_latex(table), encoding="utf-8")


def _render_latex(table: ReportTable) -> str:
    """A float of booktabs, no wider than the text; comments are the notes.

    The caption has the title, what all rows share, and the first two sentences of the note: what the figures are.
    """
    shown = _apply_marks(table, _escape_latex, {"best": r"\textbf{{{}}}", "tied": r"\underline{{{}}}"})
    shown = shown.drop(columns=[_escape_latex(name) for name in table.shared_values])
    body = shown.to_latex(index=False, escape=False, column_format="l" * len(shown.columns)).rstrip()
    shared = "; ".join(f"{name}: {value}" for name, value in table.shared_values.items())
    title = table.title or table.name
    caption = _escape_latex(
        " ".join(filter(None, [f"{title}.", shared and f"{shared}.", *_split_sentences(table.note)[:2]]))
    )
    notes = "".join(f"% {escape_control_characters(line)}\n" for line in table.lines)
    return (
        "% \\usepackage{booktabs,graphicx}\n"
        f"{notes}\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n\\label{{tab:{table.name}}}\n"
        f"\\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%\n{body}}}\n\\end{{table}}\n"
    )


def _split_sentences(note: str) -> list[str]:
    """Of the first line of a note."""
    return re.split(r"(?<=[.!?]) (?=[A-Z])", note.partition("\n")[0])


def _apply_marks(table: ReportTable, escape: Callable[[str], str], marks: Mapping[str, str]) -> pd.DataFrame:
    forms = {"": "{}", **marks}
    lines = [
        [forms[table.mark(number, str(column))].format(escape(text)) for column, text in line.items()]
        for number, line in enumerate(table.cells.astype(str).to_dict("records"))
    ]
    return pd.DataFrame(lines, columns=[escape(column) for column in table.cells.columns])


def _escape_latex(text: str) -> str:
    safe = escape_control_characters(text).translate(LATEX_ESCAPES)
    # At the start of a row LaTeX would read these as arguments of the line break before.
    return f"{{}}{safe}" if safe.startswith(("[", "*")) else safe
