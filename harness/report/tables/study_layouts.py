"""The tables that compare searchers and runtimes, ready to show: scores, pairs, parts left out, transfer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.report.frames.component_ablation import ablation_frame, ablation_table
from harness.report.frames.hypervolume import volume_frame
from harness.report.frames.searcher_statistics import pair_frame, ranks, score_frame
from harness.report.frames.transfer import likeness_frame, transfer_frame
from harness.report.load.results import Results
from harness.report.report_table import MISSING, Table, interval, several
from harness.report.statistics import Ranks, smallest_p
from harness.report.tables.captions import LEVEL_NOTE
from harness.statistics import median_ci

__all__ = ["study_tables"]

SCORE_NOTE = (
    "Share of what random search leaves that a searcher has found, on average over its evaluations after the initial "
    "placements, until random search itself has found 95 % of what these leave: 0 is random search, 1 the best "
    "placement at once. Cells where they leave less than 1 % have no line, nor have searchers that were told others "
    "first, as peers are. Random search is the mean over its seeds here; median over seeds [95 % interval; the range "
    "below six seeds]. " + LEVEL_NOTE
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
VOLUME_NOTE = (
    "Hypervolume of latency and accuracy at the end of the search, as a share of the box between the ideal (no time, "
    "no loss) and the float model's latency with the largest loss seen in the cell: median over seeds [95 % "
    "interval; the range below six seeds]. Scored: evaluations whose metric was measured, all seeds. " + LEVEL_NOTE
)


def study_tables(results: Results) -> Iterator[Table]:
    """Those that the results have something to say on may have no row; the caller leaves them out."""
    yield _scores(score_frame(results))
    yield _pairs(pair_frame(results), ranks(results))
    yield ablation_table(ablation_frame(results))
    yield from _transfers(transfer_frame(results), likeness_frame(results))
    yield _volumes(volume_frame(results.cells))


def _scores(scores: pd.DataFrame) -> Table:
    lines = [
        {
            "cell": row["cell"],
            "searcher": row["searcher"],
            "score [CI]": interval(row["score"], row["low"], row["high"]),
            "seeds": str(row["seeds"]),
        }
        for row in scores.to_dict("records")
    ]
    cells = pd.DataFrame(lines)
    return Table(name="score", title="Score against random search", cells=cells, raw=scores, note=SCORE_NOTE)


def _pairs(pairs: pd.DataFrame, found: Ranks | None) -> Table:
    lines = []
    for row in pairs.to_dict("records"):
        line = {"first": row["first"], "second": row["second"], "cells": str(row["blocks"])}
        line |= {"ratio [CI]": interval(row["ratio"], row["low"], row["high"], 3), "chance": f"{row['chance']:.0%}"}
        lines.append({**line, "p (Holm)": MISSING if math.isnan(row["p_holm"]) else f"{row['p_holm']:.3f}"})
    most = int(pairs["blocks"].max()) if len(pairs) else 0
    least = f"The smallest p (Holm) that {several(most, 'cell')} and {several(len(pairs), 'pair')} can give is"
    note = "\n".join([PAIR_NOTE, f"{least} {smallest_p(most, len(pairs)):.3g}.", *_ranked(found)])
    return Table(name="pairs", title="Searchers in pairs", cells=pd.DataFrame(lines), raw=pairs, note=note)


def _ranked(found: Ranks | None) -> Iterator[str]:
    """The ranks in words, and whether they mean anything."""
    if found is None:
        return
    means = ", ".join(f"{name} {rank:.2f}" for name, rank in found.mean.items())
    yield f"Mean ranks over the {found.blocks} cells that have all searchers: {means}."
    if found.untested:
        yield f"{found.untested[0].upper()}{found.untested[1:]}."
    elif found.p_value is not None and found.critical_difference is not None:
        yield (
            f"Friedman's test: p = {found.p_value:.3g}; Nemenyi's critical difference of mean ranks at 5 %: "
            f"{found.critical_difference:.2f}."
        )


def _transfers(transfer: pd.DataFrame, likeness: pd.DataFrame) -> Iterator[Table]:
    alike = [
        f"{row['model']}, {row['precision']}: rank correlation of latencies on {row['first']} and {row['second']}: "
        f"{row['spearman']:+.2f} over {row['rows']} placements."
        for row in likeness.to_dict("records")
    ]
    between = transfer[transfer["across"] == "backends"]
    yield Table(
        name="transfer", title="Transfer between backends", cells=_matrix(between, "model", "on"), raw=between,
        note="\n".join([TRANSFER_NOTE, *alike]),
    )  # fmt: skip
    among = transfer[transfer["across"] == "models"]
    yield Table(
        name="transfer_models", title="Transfer between models", cells=_matrix(among, "backend", "in"), raw=among,
        note=INHERITED_NOTE,
    )  # fmt: skip


def _matrix(transfer: pd.DataFrame, within: str, word: str) -> pd.DataFrame:
    """One row a source, one column a target."""
    lines = []
    for (group, precision), part in transfer.groupby(["within", "precision"], sort=False):
        for source in dict.fromkeys(part["source"]):
            line = {within: str(group), "precision": str(precision), f"found {word}": str(source)}
            for row in part[part["source"] == source].to_dict("records"):
                line[f"run {word} {row['target']}"] = _moved(row)
            lines.append(line)
    cells = pd.DataFrame(lines)
    order = [c for target in dict.fromkeys(transfer["target"]) if (c := f"run {word} {target}") in cells]
    return cells[[*cells.columns[:3], *order]].fillna(MISSING) if len(cells) else cells


def _moved(row: dict[Any, Any]) -> str:
    share = "" if pd.isna(row["share"]) else f" ({row['share']:.0%})"
    return f"{interval(row['speedup'], row['low'], row['high'])}{share}"


def _volumes(volumes: pd.DataFrame) -> Table:
    lines: list[dict[str, Any]] = []
    last = volumes.groupby(["cell", "searcher", "seed"], sort=False, as_index=False).last()
    for (cell, searcher), part in last.groupby(["cell", "searcher"], sort=False):
        middle = median_ci(part["volume"].to_numpy())
        shown = interval(middle.value, middle.low, middle.high, 3)
        line = {"cell": str(cell), "searcher": str(searcher), "hypervolume [CI]": shown}
        lines.append({**line, "scored": str(part["scored"].sum()), "seeds": str(len(part))})
    return Table(
        name="volume", title="Front of latency and accuracy", cells=pd.DataFrame(lines), raw=volumes, note=VOLUME_NOTE
    )
