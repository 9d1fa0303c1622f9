"""The tables that compare searchers and runtimes, ready to show: scores, pairs, parts left out, transfer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.report.frames.component_ablation import ablation_frame, ablation_table
from harness.report.frames.hypervolume import hypervolume_frame
from harness.report.frames.searcher_statistics import pair_frame, rank_searchers, score_frame
from harness.report.frames.transfer import similarity_frame, transfer_frame
from harness.report.load.results import Results
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval, pluralize
from harness.report.statistics import FriedmanRanks, smallest_p_value
from harness.report.tables.captions import SEARCH_LATENCY_NOTE
from harness.statistics import median_ci

__all__ = ["study_tables"]

SCORE_NOTE = (
    "Share of what random search leaves that a searcher has found, on average over its evaluations after the initial "
    "placements, until random search itself has found 95 % of what these leave: 0 is random search, 1 the best "
    "placement at once. Cells where they leave less than 1 % have no line, nor have searchers that were told others "
    "first, as peers are. Random search is the mean over its seeds here; median over seeds [95 % interval; the range "
    "below six seeds]. " + SEARCH_LATENCY_NOTE
)
PAIR_NOTE = (
    "Confirmed speedup at the largest budget, first over second, medians over seeds: geometric mean over cells [95 %, "
    "Student's over cells; none of fewer than three]. Chance: that a seed of the first beats one of the second, ties "
    "half, mean over cells; 50 % is no effect. p (Holm): Wilcoxon's signed ranks over cells, corrected for all pairs."
)
TRANSFER_NOTE = (
    "The placement that the searches liked best on the backend of the row, run on that of the column: confirmed "
    "speedup over the column's float baseline [95 %, Student's over builds], and in parentheses the time that it "
    "saves, as a share of what the column's own best saves; none where that best is no gain beyond the noise."
)
INHERITED_NOTE = (
    "What the searches learned of the patterns of the row's model, put into the column's model by the pattern cache: "
    "confirmed speedup over its float baseline [95 %, Student's over builds], and in parentheses the time that it "
    "saves, as a share of what its own best saves; none where that best is no gain beyond the noise."
)
HYPERVOLUME_NOTE = (
    "Hypervolume of latency and accuracy at the end of the search, as a share of the box between the ideal (no time, "
    "no loss) and the float model's latency with the largest loss seen in the cell: median over seeds [95 % "
    "interval; the range below six seeds]. Scored: evaluations whose metric was measured, all seeds. "
    + SEARCH_LATENCY_NOTE
)


def study_tables(results: Results) -> Iterator[ReportTable]:
    """Those that the results have something to say on may have no row; the caller leaves them out."""
    yield _score_table(score_frame(results))
    yield _pair_table(pair_frame(results), rank_searchers(results))
    yield ablation_table(ablation_frame(results))
    yield from _transfer_tables(transfer_frame(results), similarity_frame(results))
    yield _hypervolume_table(hypervolume_frame(results.cells))


def _score_table(scores: pd.DataFrame) -> ReportTable:
    lines = [
        {
            "cell": row["cell"],
            "searcher": row["searcher"],
            "score [CI]": format_interval(row["score"], row["low"], row["high"]),
            "seeds": str(row["seeds"]),
        }
        for row in scores.to_dict("records")
    ]
    cells = pd.DataFrame(lines)
    return ReportTable(name="score", title="Score against random search", cells=cells, raw=scores, note=SCORE_NOTE)


def _pair_table(pairs: pd.DataFrame, found: FriedmanRanks | None) -> ReportTable:
    lines = []
    for row in pairs.to_dict("records"):
        line = {"first": row["first"], "second": row["second"], "cells": str(row["blocks"])}
        line |= {
            "ratio [CI]": format_interval(row["ratio"], row["low"], row["high"], 3),
            "chance": f"{row['chance']:.0%}",
        }
        lines.append({**line, "p (Holm)": MISSING_CELL if math.isnan(row["p_holm"]) else f"{row['p_holm']:.3f}"})
    most = int(pairs["blocks"].max()) if len(pairs) else 0
    least = f"The smallest p (Holm) that {pluralize(most, 'cell')} and {pluralize(len(pairs), 'pair')} can give is"
    note = "\n".join([PAIR_NOTE, f"{least} {smallest_p_value(most, len(pairs)):.3g}.", *_rank_notes(found)])
    return ReportTable(name="pairs", title="Searchers in pairs", cells=pd.DataFrame(lines), raw=pairs, note=note)


def _rank_notes(found: FriedmanRanks | None) -> Iterator[str]:
    """The ranks in words, and whether they mean anything."""
    if found is None:
        return
    means = ", ".join(f"{name} {rank:.2f}" for name, rank in found.mean.items())
    yield f"Mean ranks over the {found.blocks} cells that have all searchers: {means}."
    if found.untested_reason:
        yield f"{found.untested_reason[0].upper()}{found.untested_reason[1:]}."
    elif found.p_value is not None and found.critical_difference is not None:
        yield (
            f"Friedman's test: p = {found.p_value:.3g}; Nemenyi's critical difference of mean ranks at 5 %: "
            f"{found.critical_difference:.2f}."
        )


def _transfer_tables(transfer: pd.DataFrame, likeness: pd.DataFrame) -> Iterator[ReportTable]:
    alike = [
        f"{row['model']}, {row['precision']}: rank correlation of latencies on {row['first']} and {row['second']}: "
        f"{row['spearman']:+.2f} over {row['rows']} placements."
        for row in likeness.to_dict("records")
    ]
    between = transfer[transfer["across"] == "backends"]
    yield ReportTable(
        name="transfer", title="Transfer between backends", cells=_transfer_matrix(between, "model", "on"), raw=between,
        note="\n".join([TRANSFER_NOTE, *alike]),
    )  # fmt: skip
    among = transfer[transfer["across"] == "models"]
    yield ReportTable(
        name="transfer_models", title="Transfer between models", cells=_transfer_matrix(among, "backend", "in"),
        raw=among,
        note=INHERITED_NOTE,
    )  # fmt: skip


def _transfer_matrix(transfer: pd.DataFrame, within: str, word: str) -> pd.DataFrame:
    """One row a source, one column a target."""
    lines = []
    for (group, precision), part in transfer.groupby(["within", "precision"], sort=False):
        for source in dict.fromkeys(part["source"]):
            line = {within: str(group), "precision": str(precision), f"found {word}": str(source)}
            for row in part[part["source"] == source].to_dict("records"):
                line[f"run {word} {row['target']}"] = _format_transfer(row)
            lines.append(line)
    cells = pd.DataFrame(lines)
    order = [c for target in dict.fromkeys(transfer["target"]) if (c := f"run {word} {target}") in cells]
    return cells[[*cells.columns[:3], *order]].fillna(MISSING_CELL) if len(cells) else cells


def _format_transfer(row: dict[Any, Any]) -> str:
    share = "" if pd.isna(row["share"]) else f" ({row['share']:.0%})"
    return f"{format_interval(row['speedup'], row['low'], row['high'])}{share}"


def _hypervolume_table(volumes: pd.DataFrame) -> ReportTable:
    lines: list[dict[str, Any]] = []
    last = volumes.groupby(["cell", "searcher", "seed"], sort=False, as_index=False).last()
    for (cell, searcher), part in last.groupby(["cell", "searcher"], sort=False):
        middle = median_ci(part["volume"].to_numpy())
        shown = format_interval(middle.value, middle.low, middle.high, 3)
        line = {"cell": str(cell), "searcher": str(searcher), "hypervolume [CI]": shown}
        lines.append({**line, "scored": str(part["scored"].sum()), "seeds": str(len(part))})
    return ReportTable(
        name="volume",
        title="Front of latency and accuracy",
        cells=pd.DataFrame(lines),
        raw=volumes,
        note=HYPERVOLUME_NOTE,
    )
