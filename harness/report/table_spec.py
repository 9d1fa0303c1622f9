"""Declaration of a table: columns with formatters, caption, and the grouping of rows into lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from harness.report.report_table import MISSING_CELL, ReportTable, format_interval, frame_rows
from harness.results.folder import Results

Row = Mapping[Any, Any]


def is_missing(value: object) -> bool:
    """Return whether a field of a row has no value: None or NaN."""
    return bool(pd.isna(value))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table.

    Attributes:
        heading: Text of the heading; that of a spread column may name fields of its row: "{budget} evaluations".
        format: Returns the text of a cell from its row.
        text: Whether the page sorts it as text, not as a number.
        marked: Whether cells are bold or underlined by the fields `best` and `tied` of the row.
    """

    heading: str
    format: Callable[[Row], str]
    text: bool = False
    marked: bool = False


def text_column(heading: str, key: str = "") -> Column:
    """Return a column of the field `key` (default: the heading) as text."""
    return Column(heading, lambda row: str(row[key or heading]), text=True)


def number_column(heading: str, key: str = "", form: str = "{:.0f}") -> Column:
    """Return a column of the field `key` (default: the heading) as a number; a missing one is `MISSING_CELL`.

    The format `form` is for `str.format`.
    """

    def shown(row: Row) -> str:
        value = row[key or heading]
        return MISSING_CELL if is_missing(value) else form.format(value)

    return Column(heading, shown)


def interval_column(heading: str, value: str, low: str, high: str, digits: int = 2, *, marked: bool = False) -> Column:
    """Return a column of the field `value` with its limits; see `format_interval`."""
    return Column(heading, lambda row: format_interval(row[value], row[low], row[high], digits), marked=marked)


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
        last: Headings after those of `spread`, with formatters of all rows of a line.
        drop_empty: Leave out columns without any value.
        timed: Whether the figures come from latencies, so that warnings about noise apply.
        states_noise_floor: Whether the table or its notes state the noise floors.
        assumes_budget: Whether figures assume that each search spent its budget.
        shows_selection: Whether rows were selected among seeds or candidates of a search.
        source: Readings behind a cell: those of rows of the main table (in the order of `raw`, if "aligned rows"), of
            all confirmed rows, of the searches' choices, or of the searches' trials.
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
    source: Literal["aligned rows", "rows", "confirmed rows", "choices", "trials"] = "trials"
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
        rows = frame_rows(raw) if rows is None else rows
        heads = self._spread_headings(rows, words)
        lines: list[dict[str, str]] = []
        marks: dict[str, set[tuple[int, str]]] = {"best": set(), "tied": set()}
        for group in self._groups(rows):
            line: dict[str, str] = {}
            for column, row in self._cells(group):
                head = column.heading.format_map({**row, **words})
                line[head] = column.format(row)
                for key, places in marks.items() if column.marked else ():
                    places |= {(len(lines), head)} if row[key] else set()
            plain = {head: text for head, text in line.items() if head not in heads}
            spread = {head: line.get(head, MISSING_CELL) for head in heads}
            lines.append({**plain, **spread, **{head: form(group) for head, form in self.last}})
        cells = pd.DataFrame(lines)
        if self.drop_empty:
            cells = cells.drop(columns=[head for head in cells if set(cells[head]) == {MISSING_CELL}])
        texts = {column.heading.format_map(words) for column in self.columns if column.text}
        return ReportTable(
            name=self.name,
            title=self.title,
            cells=cells,
            raw=raw,
            note="\n".join(filter(None, [self.caption, *notes])),
            bold=frozenset(marks["best"]),
            underlined=frozenset(marks["tied"]),
            warnings=tuple(warnings),
            text_columns=frozenset(texts | {head for head, text in heads.items() if text}),
        )

    def _groups(self, rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
        if not self.group_by:
            return ([row] for row in rows)
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            key = tuple("" if is_missing(row[field]) else str(row[field]) for field in self.group_by)
            groups.setdefault(key, []).append(row)
        return groups.values()

    def _cells(self, group: Sequence[Row]) -> Iterator[tuple[Column, Row]]:
        yield from ((column, group[0]) for column in self.columns)
        yield from ((column, row) for row in group for column in self.spread)

    def _spread_headings(self, rows: Sequence[Row], words: Mapping[str, str]) -> dict[str, bool]:
        """Return the headings of the spread columns in order, and whether they are sorted as text."""
        first: dict[Any, Row] = {}
        for row in rows if self.spread else ():
            first.setdefault(row[self.spread_by], row)
        numeric = all(not isinstance(value, str) for value in first)
        return {
            column.heading.format_map({**first[value], **words}): column.text
            for value in (sorted(first) if numeric else first)
            for column in self.spread
        }
