"""One table, three markups: Markdown for people, CSV for readers, LaTeX (booktabs) for papers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

__all__ = ["interval", "markdown", "write_table"]

MISSING = "-"


def interval(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """A figure with its 95 % interval, or a dash where there is none."""
    if value is None or pd.isna(value):
        return MISSING
    if low is None or high is None or pd.isna(low) or pd.isna(high):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown(table: pd.DataFrame) -> str:
    """A pipe table; bars inside of cells are escaped, so that a name cannot add a column."""
    safe = table.astype(str).map(_escape_bar)
    return safe.rename(columns=_escape_bar).to_markdown(index=False, disable_numparse=True)


def write_table(table: pd.DataFrame, raw: pd.DataFrame, folder: Path, name: str, note: str) -> None:
    """Write `name`.md and .tex from the formatted table and `name`.csv from the raw figures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"{markdown(table)}\n\n{note}\n", encoding="utf-8")
    raw.to_csv(folder / f"{name}.csv", index=False)
    columns = "l" * len(table.columns)
    body = table.astype(str).to_latex(index=False, escape=True, column_format=columns)
    (folder / f"{name}.tex").write_text(f"% \\usepackage{{booktabs}}\n{body}", encoding="utf-8")


def _escape_bar(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
