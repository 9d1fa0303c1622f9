"""The raw readings behind figures, each with the file and the line that hold it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.accuracy.metrics.intervals import RESAMPLES
from harness.records import Measured, TrialResult
from harness.report.frames.confirmation_samples import valid_turns
from harness.report.load.display_names import METRIC_CAPS, METRIC_FORMATS
from harness.report.load.results import CellResults
from harness.results_dir.artifacts import FLOAT_ROW
from harness.results_dir.journal import read_journal
from harness.statistics import block_ci
from harness.timing.turn_log import Turn, TurnMatrix

__all__ = ["ProvenanceLine", "ValueSource", "row_sources", "trial_sources", "turn_source"]

JOURNAL_HEADER_LINES = 1
SCORE_COLUMNS = ("drop", "metric", *(name for name, _, _ in METRIC_FORMATS.values()))
"""How headings of scores begin, see `harness.report.load.display_names.score_column_title`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceLine:
    """A turn, a trial, or the values of single images.

    Attributes:
        short: In one line.
        whole: The same with every single reading; none where the line says all.
    """

    short: str
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """What a figure comes from, or a part of it.

    Attributes:
        head: The file that holds it, and what is known of it as a whole.
        readings: Gives them in the order in which they were taken; a journal may be long, so none is kept.
        result: How they come to the figure; "" where that is not told.
    """

    head: tuple[str, ...]
    readings: Callable[[], Iterable[ProvenanceLine]] = tuple
    result: str = ""

    def lines(self) -> Iterator[str]:
        """Every single reading."""
        yield from self.head
        for reading in self.readings():
            yield from reading.whole or (reading.short,)
        yield from filter(None, [self.result])

    def brief(self, last: int) -> Iterator[str]:
        """A line a reading, the last ones alone."""
        yield from self.head
        kept = deque(enumerate(self.readings()), maxlen=last)
        if kept and kept[0][0]:
            yield f"... {kept[0][0]} before these:"
        yield from (reading.short for _, reading in kept)
        yield from filter(None, [self.result])


def row_sources(cell: CellResults, line: Mapping[Any, Any], column: str) -> Iterator[ValueSource]:
    """Behind one figure of a row, by what the column shows.

    Args:
        cell: The row's.
        line: Raw figures of the row, see `harness.report.frames.main_frame.main_frame`.
        column: Heading, without the name of a precision before it.
    """
    if line["verdict"] == "missing" or not line["row"]:
        yield ValueSource(head=(f"nothing was measured: {line['reason'] or 'it is still to be run'}",))
    elif column.startswith(("latency", "speedup", "verdict", "decision")):
        yield turn_source(cell, line["row"], paired=not column.startswith("latency"))
    elif column.startswith("shrinkage"):
        yield turn_source(cell, line["row"], paired=True)
        yield from trial_sources(cell, line["method"].partition(" #")[0], int(line["seed"]))
    elif column.startswith(SCORE_COLUMNS):
        yield from _score_sources(cell, line["row"], dropped=column.startswith("drop"))
        if column.startswith("drop"):
            yield from _drop_sources(cell, line)
    elif column.startswith(("builds", "minutes")) and line["seed"] == line["seed"] and line["seed"] is not None:
        yield from trial_sources(cell, line["method"], int(line["seed"]))
    elif column.startswith("builds"):
        yield turn_source(cell, line["row"], paired=False)
    else:
        yield ValueSource(head=tuple(_row_facts(cell, line)))


def turn_source(cell: CellResults, row: str, *, paired: bool) -> ValueSource:
    """Every turn of a row in the confirmation, with the baseline's turn beside it where a ratio is asked for."""
    number = {id(event): place + 1 + JOURNAL_HEADER_LINES for place, event in enumerate(cell.events)}
    blocks = valid_turns(cell.events)
    base = {(b.build, b.group, b.round): b for b in blocks if paired and b.row == FLOAT_ROW != row}
    found = [
        _turn_line(block, base.get((block.build, block.group, block.round)), number)
        for block in sorted((b for b in blocks if b.row == row), key=lambda b: (b.build, b.group, b.round))
    ]
    for event in cell.events:
        if not isinstance(event, Turn) and event.row == row:
            failed = event.failed
            where = f"line {number[id(event)]}: build {event.build}"
            found.append(ProvenanceLine(short=f"{where} failed: {failed.stage}: {failed.reason}"))
    return ValueSource(
        head=(f"{cell.folder / 'confirm.jsonl'}; samples in ms, one line a turn",),
        readings=lambda: found,
        result=_summarize_turns(cell, row, ratios=paired and row != FLOAT_ROW),
    )


def _summarize_turns(cell: CellResults, row: str, *, ratios: bool) -> str:
    """How the readings come to the figure in the table; "" where there are none."""
    bases, owns = TurnMatrix(cell.events).paired_samples(row, FLOAT_ROW)
    builds = [np.divide(base, own) if ratios else np.array(own) for base, own in zip(bases, owns, strict=True)]
    if not builds:
        return ""
    what, unit = ("ratios", "") if ratios else ("turns", " ms")
    of = f"the median {what} of {len(builds)} builds" if len(builds) > 1 else f"the {what} of the one build"
    parts = [float(np.median(build)) for build in builds] if len(builds) > 1 else builds[0]
    listed = ", ".join(f"{part:.6g}" for part in parts)
    return f"geometric mean of {of} ({listed}): {block_ci(builds).value:.6g}{unit}"


def _turn_line(block: Turn, base: Turn | None, number: Mapping[int, int]) -> ProvenanceLine:
    """A turn, and the baseline's beside it."""
    where, middle, samples = _turn_result(block, number)
    short = f"{where}: median {middle:.6g} of {len(block.samples_ms)} samples"
    whole = f"{where}: median {middle:.6g} of {samples}"
    if base is None:
        return ProvenanceLine(short=short, whole=(whole,))
    where, other, samples = _turn_result(base, number)
    ratio = f"ratio {other / middle:.4f}"
    return ProvenanceLine(
        short=f"{short}; baseline {other:.6g}, line {number[id(base)]}; {ratio}",
        whole=(whole, f"    baseline: {where}: median {other:.6g} of {samples}; {ratio}"),
    )


def _turn_result(block: Turn, number: Mapping[int, int]) -> tuple[str, float, str]:
    """Where a turn stands, its median, and its samples."""
    where = f"line {number[id(block)]}: build {block.build}, turn {block.round}"
    return where, float(np.median(block.samples_ms)), _format_samples(block.samples_ms)


def _format_samples(samples_ms: tuple[float, ...]) -> str:
    return " ".join(f"{sample:.6g}" for sample in samples_ms)


def _score_sources(cell: CellResults, row: str, *, dropped: bool) -> Iterator[ValueSource]:
    path = cell.folder / "accuracy.json"
    for name in dict.fromkeys((row, FLOAT_ROW) if dropped else (row,)):
        score = cell.scores.get(name)
        if score is None:
            yield ValueSource(head=(f"{path}: no score of {name}",))
            continue
        head = [f"{path}: {cell.rows[name].sha256} {cell.rows[name].benchmarker} ({name})"]
        if "failed" in score:
            head.append(f"    failed: {score['failed']}: {score['reason']}")
        head += [f"    {metric}: {value}" for metric, value in score.get("metrics", {}).items()]
        yield ValueSource(head=tuple(head), readings=partial(_item_lines, score.get("per_item") or ()))


def _drop_sources(cell: CellResults, line: Mapping[Any, Any]) -> Iterator[ValueSource]:
    """How two scores come to a drop, and its limits; nothing where one of them is not there."""
    own, reference = cell.score(line["row"]), cell.score(FLOAT_ROW)
    if own is None or reference is None or line["row"] == FLOAT_ROW:
        return
    if line["metric"] in METRIC_CAPS:
        yield ValueSource(head=("no drop: the metric compares with the float model, whose own value is a cap",))
        return
    larger, smaller = (reference, own) if cell.higher_is_better else (own, reference)
    said = "float less this row" if cell.higher_is_better else "this row less float, for a lower figure is better"
    yield ValueSource(head=(f"drop: {larger:.6f} - {smaller:.6f} = {line['drop']:+.6f} ({said})",))
    if not pd.isna(line["drop_low"]):
        limits = f"[{line['drop_low']:+.6f}, {line['drop_high']:+.6f}]"
        yield ValueSource(head=(f"95 % of {RESAMPLES} draws of the images, subtracted draw by draw: {limits}",))


def _item_lines(items: tuple[float, ...]) -> Iterator[ProvenanceLine]:
    if items:
        listed = " ".join(f"{item:g}" for item in items)
        yield ProvenanceLine(short=f"    by item: {len(items)} values", whole=(f"    by item: {listed}",))


def trial_sources(cell: CellResults, searcher: str, seed: int) -> Iterator[ValueSource]:
    """Every trial of a search."""
    for search in cell.searches:
        if (search.searcher, search.seed) == (searcher, seed):
            yield ValueSource(head=(f"{search.path}; one line a trial",), readings=partial(_trial_lines, search.path))


def _trial_lines(path: Path) -> Iterator[ProvenanceLine]:
    for entry in read_journal(path):
        if entry.result is not None:
            yield _trial_line(entry.proposal.number, entry.proposal.digest, entry.result)


def _trial_line(number: int, digest: str, told: TrialResult) -> ProvenanceLine:
    where, outcome = f"{number}: {digest} at {told.elapsed_s:.1f} s", told.outcome
    if not isinstance(outcome, Measured):
        return ProvenanceLine(short=f"{where}: failed: {outcome.stage}: {outcome.reason}")
    said = f"median {float(np.median(outcome.samples_ms)):.6g} ms of {len(outcome.samples_ms)} samples"
    said += "".join(f", {name} {value:.6g}" for name, value in outcome.metrics.items())
    more = (f"    of another build: {_format_samples(samples_ms)}" for samples_ms in outcome.retaken_ms)
    return ProvenanceLine(
        short=f"{where}: {said}",
        whole=(f"{where}: {said}", f"    samples in ms: {_format_samples(outcome.samples_ms)}", *more),
    )


def _row_facts(cell: CellResults, line: Mapping[Any, Any]) -> Iterator[str]:
    row = cell.rows.get(line["row"])
    yield f"{cell.folder / 'cell.json'}, {cell.folder / 'env.json'}: model {cell.facts['model']}"
    yield f"backend: {cell.facts['backend']}"
    if row is not None:
        yield f"{cell.folder / 'rows.json'}: row {row.id}, {row.pairs} Q/DQ pairs"
        yield f"{cell.folder / 'models' / row.file}: sha256 {row.sha256}"
