"""Tables: declaration by columns, formatted table, and renderers: Markdown, CSV, LaTeX, terminal, JSON for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from harness.base.text import escape_csv, escape_latex, escape_markdown, printable
from harness.results.folder import Results

MISSING_CELL = "-"
COLUMNS_SHOWN_ONCE = ("task", "model", "device", "batch")
#: Columns that identify a row; each part of a split table repeats them.
ROW_KEYS = ("task", "model", "device", "precision", "quantized", "row", "method", "searcher", "first", "second")
PIPE_WIDTH_CHARS = 100
MAX_TERMINAL_COLUMN_CHARS = 28  # longer cells, such as the reason of a failure, are wrapped
CSV_FLOAT_FORMAT = "%.12g"  # further digits of sums depend on the vector width of the processor
MARKDOWN_MARKS = {"best": "**{}**", "tied": "<u>{}</u>"}
PLAIN_MARKS = {"best": "**{}**", "tied": "*{}*"}
LATEX_MARKS = {"best": r"\textbf{{{}}}", "tied": r"\underline{{{}}}"}
TERMINAL_STYLES = {"best": "bold", "tied": "underline", "": ""}
Row = Mapping[Any, Any]
#: Kind of the readings behind a cell, and the unrounded rows that it shows.
Origin = tuple[str, Sequence[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Formatted table with the unrounded figures behind it.

    Attributes:
        name: Name of its files, without suffix.
        cells: Formatted text without markup.
        raw: Unrounded figures, written as CSV.
        note: Caption and notes, shown below the table.
        marks: "best" (bold) or "tied" (underlined: not distinguishable from the best), by row number and column.
        title: Shown above the table.
        warnings: Doubts about the figures, shown before the note.
        text_columns: Columns that the page sorts as text; it sorts the others by their first number.
        origins: For each line, the origin of its cells by column.
    """

    name: str
    cells: pd.DataFrame
    raw: pd.DataFrame
    note: str
    marks: Mapping[tuple[int, str], str] = field(default_factory=dict)
    title: str = ""
    warnings: tuple[str, ...] = ()
    text_columns: frozenset[str] = frozenset()
    origins: Sequence[Mapping[str, Origin]] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of the warnings and the note."""
        return (*self.warnings, *self.note.splitlines())

    @property
    def shared_values(self) -> dict[str, str]:
        """Values that all of several rows share, by column."""
        cells = self.cells.astype(str)
        names = [str(name) for name in cells if len(cells) > 1 and cells[name].nunique() == 1]
        return {name: cells[name].iloc[0] for name in names}

    @property
    def shown_once(self) -> dict[str, str]:
        """Shared values that LaTeX and the page show above the table instead of in a column."""
        return {name: value for name, value in self.shared_values.items() if name in COLUMNS_SHOWN_ONCE}

    def marked_rows(self) -> Iterator[dict[str, tuple[str, str]]]:
        """Yield the text and the mark ("" without one) of each cell by column, row by row."""
        for number, line in enumerate(frame_rows(self.cells.astype(str))):
            yield {column: (text, self.marks.get((number, column), "")) for column, text in line.items()}

    @property
    def constant(self) -> dict[str, str]:
        """Shared values without those of marked columns and of a sole key column."""
        marked = {column for _, column in self.marks}
        keys = [name for name in self.cells if name in ROW_KEYS]
        return {n: v for n, v in self.shared_values.items() if n not in marked and (n not in keys or len(keys) > 1)}

    @property
    def caption(self) -> str:
        """Line with the constant columns whose value is known, or ""."""
        parts = [f"{name}: {value}" for name, value in self.constant.items() if value != MISSING_CELL]
        return f"All rows: {', '.join(parts)}" if parts else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the width of the terminal; names are plain text, without markup of rich."""
        yield Text(printable(self.title), style="bold")
        if self.caption:
            yield Text(printable(self.caption))
        for part in _split_wide_table(self, options.max_width, space=2, widest=MAX_TERMINAL_COLUMN_CHARS):
            grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
            for column in part.cells.columns:
                grid.add_column(Text(printable(str(column))), overflow="fold", max_width=MAX_TERMINAL_COLUMN_CHARS)
            for row in part.marked_rows():
                grid.add_row(*(Text(printable(text), style=TERMINAL_STYLES[mark]) for text, mark in row.values()))
            yield grid
            yield ""
        for style, lines in (("yellow", self.warnings), ("dim", self.note.splitlines())):
            yield from (Text(printable(line), style=style) for line in lines)
        yield ""


def is_missing(value: object) -> bool:
    """Return whether a field of a row has no value: None or NaN."""
    return bool(pd.isna(value))  # type: ignore[call-overload]


def frame_rows(frame: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return the same rows as `frame.to_dict("records")`, but faster."""
    columns: dict[Any, list[Any]] = frame.to_dict("list")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def format_interval(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """Return a figure with its limits if they are finite, or `MISSING_CELL` without a figure."""
    if value is None or pd.isna(value):
        return MISSING_CELL
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table.

    Attributes:
        heading: Text of the heading; that of a spread column may name fields of its row: "{budget} evaluations".
        format: Returns the text of a cell from its row.
        text: Whether the page sorts it as text, not as a number.
        marked: Whether cells are bold or underlined by the fields `best` and `tied` of the row.
        of: Readings behind a figure of a row, a key of `harness.report.trace.row_sources`; "" for facts of the row.
    """

    heading: str
    format: Callable[[Row], str]
    text: bool = False
    marked: bool = False
    of: str = ""


def text_column(heading: str, key: str = "", of: str = "") -> Column:
    """Return a column of the field `key` (default: the heading) as text."""
    return Column(heading, lambda row: str(row[key or heading]), text=True, of=of)


def number_column(heading: str, key: str = "", form: str = "{:.0f}", of: str = "") -> Column:
    """Return a column of the field `key` (default: the heading) as a number; a missing one is `MISSING_CELL`.

    The format `form` is for `str.format`.
    """

    def shown(row: Row) -> str:
        value = row[key or heading]
        return MISSING_CELL if is_missing(value) else form.format(value)

    return Column(heading, shown, of=of)


def interval_column(
    heading: str, value: str, low: str, high: str, digits: int = 2, *, marked: bool = False, of: str = ""
) -> Column:
    """Return a column of the field `value` with its limits; see `format_interval`."""
    return Column(heading, lambda row: format_interval(row[value], row[low], row[high], digits), marked=marked, of=of)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """Declaration of a table.

    Attributes:
        name: Name of its files, without suffix.
        columns: Columns in order; those of a group are formatted from its first row.
        caption: First lines of the note; its first two sentences are the caption in LaTeX.
        group_by: Fields whose equal values put rows in one line; without any, each row is a line.
        spread_by: Field whose values each add the columns of `spread`; numbers are sorted, others in order of the rows.
        spread: Columns of one value of `spread_by`, formatted from the row with that value.
        last: Headings after those of `spread`, with formatters of all rows of a line; means are those of speedups.
        drop_empty: Leave out columns without any value.
        timed: Whether the figures come from latencies, so that warnings about noise apply.
        states_noise_floor: Whether the table or its notes state the noise floors.
        assumes_budget: Whether figures assume that each search spent its budget.
        shows_selection: Whether rows were selected among seeds or candidates of a search.
        source: Readings behind a cell: those of its rows of the main table (which `raw` has in the order of the lines,
            if "aligned rows"), of all confirmed rows, of the searches' choices, or of the searches' trials (with the
            confirmation of their incumbents, if "confirmed trials").
        frame: Returns the `raw` figures of a table of a plug-in.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    caption: str = ""
    group_by: tuple[str, ...] = ()
    spread_by: str = ""
    spread: tuple[Column, ...] = ()
    last: tuple[tuple[str, Callable[[Sequence[Row]], str]], ...] = ()
    drop_empty: bool = False
    timed: bool = False
    states_noise_floor: bool = False
    assumes_budget: bool = False
    shows_selection: bool = False
    source: Literal["aligned rows", "rows", "confirmed rows", "choices", "trials", "confirmed trials"] = "trials"
    frame: Callable[[Results], pd.DataFrame] | None = None

    def build(
        self,
        raw: pd.DataFrame,
        notes: Iterable[str] = (),
        *,
        rows: Sequence[Row] | None = None,
        warnings: Iterable[str] = (),
        **words: str,
    ) -> ReportTable:
        """Return the formatted table.

        Args:
            raw: Unrounded figures; a row is a line, or one cell of a spread column.
            notes: Lines after the caption.
            rows: Rows to format instead of those of `raw`, with additional fields.
            words: Values of fields in the headings.
        """
        groups: dict[tuple[str, ...], list[Row]] = {}
        first: dict[Any, Row] = {}
        for number, row in enumerate(frame_rows(raw) if rows is None else rows):
            key = ["" if is_missing(row[name]) else str(row[name]) for name in self.group_by] or [str(number)]
            groups.setdefault(tuple(key), []).append(row)
            if self.spread:
                first.setdefault(row[self.spread_by], row)
        ordered = list(first) if any(isinstance(value, str) for value in first) else sorted(first)
        heads = {c.heading.format_map({**first[value], **words}): c for value in ordered for c in self.spread}
        lines: list[dict[str, str]] = []
        origins: list[dict[str, Origin]] = []
        marks: dict[tuple[int, str], str] = {}
        for group in groups.values():
            line: dict[str, str] = {}
            origin: dict[str, Origin] = {head: ("speedup", group) for head, _ in self.last}
            spread = [(column, row, [row]) for row in group for column in self.spread]
            for column, row, behind in (*((column, group[0], group) for column in self.columns), *spread):
                head = column.heading.format_map({**row, **words})
                line[head], origin[head] = column.format(row), (column.of, behind)
                if column.marked and (row["best"] or row["tied"]):
                    marks[len(lines), head] = "best" if row["best"] else "tied"
            plain = {head: text for head, text in line.items() if head not in heads}
            shown = {head: line.get(head, MISSING_CELL) for head in heads}
            lines.append({**plain, **shown, **{head: form(group) for head, form in self.last}})
            origins.append(origin)
        cells = pd.DataFrame(lines)
        if self.drop_empty:
            cells = cells.drop(columns=[head for head in cells if set(cells[head]) == {MISSING_CELL}])
        texts = {column.heading.format_map(words) for column in self.columns if column.text}
        return ReportTable(
            name=self.name, title=self.title, cells=cells, raw=raw, marks=marks, origins=origins,
            note="\n".join(filter(None, [self.caption, *notes])), warnings=tuple(warnings),
            text_columns=frozenset(texts | {head for head, column in heads.items() if column.text}),
        )  # fmt: skip


def drop_repeated_lines(tables: Iterable[ReportTable]) -> list[ReportTable]:
    """Return the tables without the warnings and note lines that an earlier table has."""
    seen: set[str] = set()
    fresh = []
    for table in tables:
        warnings = [line for line in table.warnings if line not in seen]
        notes = [line for line in table.note.splitlines() if line not in seen.union(warnings)]
        seen.update(warnings, notes)
        fresh.append(replace(table, warnings=tuple(warnings), note="\n".join(notes)))
    return fresh


def render_markdown(table: ReportTable, marks: Mapping[str, str] = MARKDOWN_MARKS) -> str:
    """Return a pipe table; names can neither add a column nor be read as markup."""
    return _apply_marks(table, escape_markdown, marks).to_markdown(index=False, disable_numparse=True)


def render_note_markdown(table: ReportTable) -> str:
    """Return the lines of warnings and note, escaped as the table is."""
    return "\n".join(escape_markdown(line) for line in table.lines)


def render_plain_text(table: ReportTable) -> str:
    """Return a table and its note as text of `PIPE_WIDTH_CHARS` columns; best and tied cells have Markdown marks."""
    split = _split_wide_table(table, PIPE_WIDTH_CHARS, space=3, marks=4)
    note = render_note_markdown(table).replace("underlined", "in italics").replace("Underlined", "In italics")
    parts = [escape_markdown(table.caption), *(render_markdown(part, PLAIN_MARKS) for part in split), note]
    return "\n\n".join(filter(None, parts))


def write_table(table: ReportTable, folder: Path) -> None:
    """Write the table as .md and .tex with its note, and its raw figures as .csv."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{render_markdown(table)}\n\n{render_note_markdown(table)}\n"
    (folder / f"{table.name}.md").write_text(text, encoding="utf-8")
    write_csv(table.raw, folder / f"{table.name}.csv", float_format=CSV_FLOAT_FORMAT)
    (folder / f"{table.name}.tex").write_text(_render_latex(table), encoding="utf-8")


def write_csv(frame: pd.DataFrame, path: Path, float_format: str | None = None) -> None:
    """Write a frame as CSV; text that a spreadsheet would read as a formula is escaped."""
    texts = {str(name): frame[name].map(escape_csv) for name in frame.select_dtypes(exclude="number")}
    frame.assign(**texts).rename(columns=escape_csv).to_csv(path, index=False, float_format=float_format)


def table_json(table: ReportTable) -> dict[str, Any]:
    """Return the table as JSON data for the page; `alike` has the values that are shown once above the table."""
    alike = table.shown_once
    kinds = {str(c): "text" if c in table.text_columns else "number" for c in table.cells if c not in alike}
    return {
        "name": table.name,
        "title": table.title,
        "heads": [{"text": name, "kind": kind} for name, kind in kinds.items()],
        "rows": [
            [{"text": row[name][0], "kind": kind, "mark": row[name][1]} for name, kind in kinds.items()]
            for row in table.marked_rows()
        ],
        "alike": ", ".join(f"{name}: {value}" for name, value in alike.items()),
        "notes": table.note.splitlines(),
    }


def _render_latex(table: ReportTable) -> str:
    """Return a LaTeX `table` environment, with the notes as comments before it.

    The caption has the title, the values that all rows share, and the first two sentences of the note.
    """
    alike = table.shown_once
    cells = _apply_marks(table, escape_latex, LATEX_MARKS).drop(columns=[escape_latex(name) for name in alike])
    body = cells.to_latex(index=False, escape=False, column_format="l" * len(cells.columns)).rstrip()
    shared = "; ".join(f"{name}: {value}" for name, value in alike.items())
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", table.note.partition("\n")[0])
    caption = " ".join(filter(None, [f"{table.title or table.name}.", shared and f"{shared}.", *sentences[:2]]))
    notes = "".join(f"% {printable(line)}\n" for line in table.lines)
    return (
        "% \\usepackage{booktabs,graphicx}\n"
        f"{notes}\\begin{{table}}\n\\centering\n\\caption{{{escape_latex(caption)}}}\n\\label{{tab:{table.name}}}\n"
        f"\\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%\n{body}}}\n\\end{{table}}\n"
    )


def _apply_marks(table: ReportTable, escape: Callable[[str], str], marks: Mapping[str, str]) -> pd.DataFrame:
    forms = {"": "{}", **marks}
    rows = [[forms[mark].format(escape(text)) for text, mark in row.values()] for row in table.marked_rows()]
    return pd.DataFrame(rows, columns=[escape(column) for column in table.cells.columns])


def _split_wide_table(
    table: ReportTable, width: int, space: int, marks: int = 0, widest: int | None = None
) -> Iterator[ReportTable]:
    """Split a table by columns into tables of at most `width` characters, without the constant columns.

    Each part repeats the columns that identify a row and has at least one other; thus long names can make it wider.

    Args:
        space: Characters between two columns.
        marks: Characters of markup around a marked cell.
        widest: Characters after which a cell is wrapped; None if cells are never wrapped.
    """
    cells = table.cells.drop(columns=list(table.constant)).astype(str)
    marked = {column for _, column in table.marks}
    widths = {}
    for name in map(str, cells):
        used = max([len(name) + 2 * bool(marks), *map(len, cells[name])])  # tabulate adds 2 to a heading
        widths[name] = space + (used if widest is None else min(used, widest)) + marks * (name in marked)
    keys = [name for name in widths if name in ROW_KEYS]
    parts: list[list[str]] = [[]]
    used = start = sum(widths[name] for name in keys)
    for name in (name for name in widths if name not in keys):
        if parts[-1] and used + widths[name] > width:
            parts.append([])
            used = start
        parts[-1].append(name)
        used += widths[name]
    for part in parts:
        yield replace(table, cells=cells[[*keys, *part]])
