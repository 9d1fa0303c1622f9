"""Summary table, which `qdq run` prints: at most eight rows and six columns of the main table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from harness.report.frames.main_frame import UNUSABLE_DECISIONS
from harness.report.load.display_names import BEYOND_BOUND_VERDICT, format_score, score_column_title, verdict_label
from harness.report.load.results import Results
from harness.report.report_table import ReportTable, pluralize
from harness.report.table_spec import Column, Row, TableSpec, is_missing, text_column
from harness.report.tables.main import FIGURES, PAIRS
from harness.results_dir.artifacts import FLOAT_ROW

MAX_SUMMARY_ROWS = 8
LATENCY, SPEEDUP, SCORE, DROP = FIGURES


def _format_method(row: Row) -> str:
    other_precision = row["method"] == FLOAT_ROW and row["verdict"] != "baseline"
    return f"{row['method']} {row['precision']}" if other_precision else str(row["method"])


def _format_score(row: Row) -> str:
    """Return the score without its name, which is in the heading."""
    name = score_column_title([row["metric"]])
    return format_score(row["score"], row["metric"]).removeprefix(f"{name} ")


def _format_verdict(row: Row) -> str:
    """Return the verdict in few words, so that the table fits a terminal."""
    label = verdict_label(row)
    if label.startswith("wrong result"):
        return "wrong result"
    return "beyond the bound" if label == BEYOND_BOUND_VERDICT else label


METHOD = Column("method", _format_method, text=True)
BARE_SCORE = Column("{score}", _format_score)
VERDICT = Column("verdict", _format_verdict, text=True)
SUMMARY = TableSpec(
    name="summary",
    title="Summary",
    columns=(METHOD, SPEEDUP, BARE_SCORE, DROP, VERDICT),
    caption="Intervals: 95 %. Bold: the fastest row within the bound; underlined: not distinguishable from it, paired.",
    timed=True,
    states_noise_floor=True,
    source="aligned rows",
)
WITHOUT_SCORES = replace(SUMMARY, columns=(METHOD, LATENCY, SPEEDUP, PAIRS, VERDICT))


def summary_table(results: Results, main: pd.DataFrame) -> ReportTable:
    """Return the most important rows of the main table.

    Of one task: the float baseline, the fastest rows within the bound, then the fastest others, in the order of the
    main table. Of several: the fastest row of each.

    Args:
        main: See `harness.report.frames.main_frame.main_frame`.
    """
    several = len(results.tasks) > 1
    ranked = sorted(main.to_dict("records"), key=_rank)
    if several:
        fastest = {row["task"]: row for row in reversed(ranked) if row["method"] != FLOAT_ROW or row["best"]}
        kept = [fastest[task.name] for task in results.tasks if task.name in fastest][:MAX_SUMMARY_ROWS]
    else:
        kept = ranked[:MAX_SUMMARY_ROWS]
    names = {(row["task"], row["method"], row["precision"]) for row in kept}
    own = [tuple(key) in names for key in main[["task", "method", "precision"]].itertuples(index=False)]
    raw = main[own].reset_index(drop=True)
    spec = WITHOUT_SCORES if raw["score"].isna().all() else SUMMARY
    if several:
        spec = replace(spec, columns=(text_column("task"), *spec.columns))
    return spec.build(raw, list(_left_out(len(main) - len(raw), results)), score=score_column_title(raw["metric"]))


def _rank(row: Row) -> tuple[int, float]:
    """Return the importance of a row: smaller is more important."""
    usable = not str(row["decision"]).startswith(UNUSABLE_DECISIONS) and not row["beyond"]
    first = row["method"] == FLOAT_ROW and bool(row["verdict"] == "baseline")
    speedup = 0.0 if is_missing(row["speedup"]) else float(row["speedup"])
    return (0 if first else 1 if usable else 2, -speedup)


def _left_out(rows: int, results: Results) -> Iterator[str]:
    more = f"{pluralize(rows, 'more row')}, all" if rows else "All"
    yield f"{more} columns, tables and notes: qdq report {results.folder}"
