"""Raw readings behind a figure, as lines with the file and the line number that contain them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from harness.accuracy.metrics.intervals import RESAMPLES
from harness.base.statistics import block_ci
from harness.measure.records import Measured, TrialResult
from harness.measure.turn_log import Turn, TurnMatrix
from harness.report.frames.confirmation import valid_turns
from harness.report.table_spec import Row, is_missing
from harness.results.artifacts import FLOAT_ROW
from harness.results.display_names import METRIC_CAPS, METRIC_FORMATS
from harness.results.folder import TaskResults
from harness.results.journal import read_journal
from harness.results.lines import shown_path
from harness.results.turns import CONFIRMATION_LOG_NAME

FIRST_EVENT_LINE = 2  # after the header
SCORE_HEADINGS = ("drop", "metric", *(name for name, _, _ in METRIC_FORMATS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceLine:
    """Text for one turn or trial, or for the values of single images.

    Attributes:
        short: Summary in one line.
        whole: Lines with every reading; empty if `short` contains all.
    """

    short: str
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Source of a figure, or of a part of it.

    Attributes:
        head: Lines with the path of the file and facts about it.
        readings: Function that returns the readings in order of measurement.
        result: Line with the computation of the figure from the readings, or "".
    """

    head: tuple[str, ...]
    readings: Callable[[], Iterable[ProvenanceLine]] = tuple
    result: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of `head`, the lines with every reading (`ProvenanceLine.whole`), and `result`."""
        yield from self.head
        for reading in self.readings():
            yield from reading.whole or (reading.short,)
        yield from filter(None, [self.result])

    def brief(self, last: int) -> Iterator[str]:
        """Yield the lines of `head`, the last readings in a line each, and the computation of the figure.

        Args:
            last: Number of readings; if others precede them, one more line states how many.
        """
        yield from self.head
        shown = deque(enumerate(self.readings()), maxlen=last)
        if shown and shown[0][0]:
            yield f"... {shown[0][0]} before these:"
        yield from (reading.short for _, reading in shown)
        yield from filter(None, [self.result])


def row_sources(task: TaskResults, row: Row, column: str) -> Iterator[ValueSource]:
    """Yield the sources of one figure of a row of `main_frame`.

    Args:
        column: Heading, without a prefix for the precision.
    """
    searched = not is_missing(row.get("seed"))
    if row["verdict"] == "missing" or not row["row"]:
        yield ValueSource(head=(f"nothing was measured: {row['reason'] or 'it has not run yet'}",))
    elif column.startswith(("latency", "speedup", "verdict", "decision")):
        yield turn_source(task, row["row"], paired=not column.startswith("latency"))
    elif column.startswith("shrinkage"):
        yield turn_source(task, row["row"], paired=True)
        yield from trial_sources(task, row["method"].partition(" #")[0], int(row["seed"]))
    elif column.startswith(SCORE_HEADINGS):
        yield from _score_sources(task, row["row"], with_float=column.startswith("drop"))
        if column.startswith("drop"):
            yield from _drop_sources(task, row)
    elif column.startswith(("builds", "minutes")) and searched:
        yield from trial_sources(task, row["method"], int(row["seed"]))
    elif column.startswith("builds"):
        yield turn_source(task, row["row"], paired=False)
    else:
        yield ValueSource(head=tuple(_row_facts(task, row)))


def turn_source(task: TaskResults, row: str, *, paired: bool) -> ValueSource:
    """Return the turns of a row in the confirmation, with those of the baseline if `paired`."""
    numbers = {id(event): place for place, event in enumerate(task.events, FIRST_EVENT_LINE)}
    turns = sorted(valid_turns(task.events), key=lambda turn: (turn.build, turn.group, turn.round))
    base = {(t.build, t.group, t.round): t for t in turns if paired and t.row == FLOAT_ROW != row}
    lines = [_turn_line(t, base.get((t.build, t.group, t.round)), numbers) for t in turns if t.row == row]
    for event in task.events:
        if not isinstance(event, Turn) and event.row == row:
            failed = event.failed
            where = f"line {numbers[id(event)]}: build {event.build}"
            lines.append(ProvenanceLine(short=f"{where} failed: {failed.stage}: {failed.reason}"))
    return ValueSource(
        head=(f"{shown_path(task.folder / CONFIRMATION_LOG_NAME)}; samples in ms, one line a turn",),
        readings=lambda: lines,
        result=_summarize_turns(task, row, ratios=paired and row != FLOAT_ROW),
    )


def _summarize_turns(task: TaskResults, row: str, *, ratios: bool) -> str:
    baseline_builds, row_builds = TurnMatrix(task.events).paired_samples(row, FLOAT_ROW)
    builds = [
        np.divide(baseline_ms, row_ms) if ratios else np.array(row_ms)
        for baseline_ms, row_ms in zip(baseline_builds, row_builds, strict=True)
    ]
    if not builds:
        return ""
    what, unit = ("ratios", "") if ratios else ("turns", " ms")
    of = f"the median {what} of {len(builds)} builds" if len(builds) > 1 else f"the {what} of the one build"
    parts = [float(np.median(build)) for build in builds] if len(builds) > 1 else builds[0]
    listed = ", ".join(f"{part:.6g}" for part in parts)
    return f"geometric mean of {of} ({listed}): {block_ci(builds).value:.6g}{unit}"


def _turn_line(turn: Turn, base: Turn | None, numbers: Mapping[int, int]) -> ProvenanceLine:
    where, middle, samples = _turn_facts(turn, numbers)
    short = f"{where}: median {middle:.6g} of {len(turn.samples_ms)} samples"
    with_samples = f"{where}: median {middle:.6g} of {samples}"
    if base is None:
        return ProvenanceLine(short=short, whole=(with_samples,))
    where, other, samples = _turn_facts(base, numbers)
    ratio = f"ratio {other / middle:.4f}"
    return ProvenanceLine(
        short=f"{short}; baseline {other:.6g}, line {numbers[id(base)]}; {ratio}",
        whole=(with_samples, f"    baseline: {where}: median {other:.6g} of {samples}; {ratio}"),
    )


def _turn_facts(turn: Turn, numbers: Mapping[int, int]) -> tuple[str, float, str]:
    where = f"line {numbers[id(turn)]}: build {turn.build}, turn {turn.round}"
    return where, float(np.median(turn.samples_ms)), _format_samples(turn.samples_ms)


def _format_samples(samples_ms: tuple[float, ...]) -> str:
    return " ".join(f"{sample:.6g}" for sample in samples_ms)


def _score_sources(task: TaskResults, row: str, *, with_float: bool) -> Iterator[ValueSource]:
    path = task.folder / "accuracy.json"
    for name in dict.fromkeys((row, FLOAT_ROW) if with_float else (row,)):
        score = task.scores.get(name)
        if score is None:
            yield ValueSource(head=(f"{path}: no score of {name}",))
            continue
        head = [f"{path}: {task.rows[name].sha256} {task.rows[name].benchmarker} ({name})"]
        if "failed" in score:
            head.append(f"    failed: {score['failed']}: {score['reason']}")
        head += [f"    {metric}: {value}" for metric, value in score.get("metrics", {}).items()]
        yield ValueSource(head=tuple(head), readings=partial(_item_lines, score.get("per_item") or ()))


def _drop_sources(task: TaskResults, row: Row) -> Iterator[ValueSource]:
    own, reference = task.score(row["row"]), task.score(FLOAT_ROW)
    if own is None or reference is None or row["row"] == FLOAT_ROW:
        return
    if row["metric"] in METRIC_CAPS:
        yield ValueSource(head=("no drop: the reference is the float model, whose own value is a cap",))
        return
    larger, smaller = (reference, own) if task.higher_is_better else (own, reference)
    order = "float minus this row" if task.higher_is_better else "this row minus float, since lower is better"
    yield ValueSource(head=(f"drop: {larger:.6f} - {smaller:.6f} = {row['drop']:+.6f} ({order})",))
    if not is_missing(row["drop_low"]):
        limits = f"[{row['drop_low']:+.6f}, {row['drop_high']:+.6f}]"
        yield ValueSource(head=(f"95 % of {RESAMPLES} draws of the images, subtracted draw by draw: {limits}",))


def _item_lines(items: tuple[float, ...]) -> Iterator[ProvenanceLine]:
    if items:
        listed = " ".join(f"{item:g}" for item in items)
        yield ProvenanceLine(short=f"    by item: {len(items)} values", whole=(f"    by item: {listed}",))


def trial_sources(task: TaskResults, searcher: str, seed: int) -> Iterator[ValueSource]:
    """Yield the trials of a search; nothing if the task has no such search."""
    for search in task.searches:
        if (search.searcher, search.seed) == (searcher, seed):
            yield ValueSource(
                head=(f"{shown_path(search.path)}; one line a trial",), readings=partial(_trial_lines, search.path)
            )


def _trial_lines(path: Path) -> Iterator[ProvenanceLine]:
    for entry in read_journal(path):
        if entry.result is not None:
            yield _trial_line(entry.proposal.number, entry.proposal.digest, entry.result)


def _trial_line(number: int, digest: str, result: TrialResult) -> ProvenanceLine:
    where, outcome = f"{number}: {digest} at {result.elapsed_s:.1f} s", result.outcome
    if not isinstance(outcome, Measured):
        return ProvenanceLine(short=f"{where}: failed: {outcome.stage}: {outcome.reason}")
    text = f"{where}: median {float(np.median(outcome.samples_ms)):.6g} ms of {len(outcome.samples_ms)} samples"
    text += "".join(f", {name} {value:.6g}" for name, value in outcome.metrics.items())
    rebuilt = (f"    of another build: {_format_samples(samples_ms)}" for samples_ms in outcome.rebuilt_ms)
    whole = (text, f"    samples in ms: {_format_samples(outcome.samples_ms)}", *rebuilt)
    return ProvenanceLine(short=text, whole=whole)


def _row_facts(task: TaskResults, line: Row) -> Iterator[str]:
    row = task.rows.get(line["row"])
    yield f"{task.folder / 'task.json'}, {task.folder / 'env.json'}: model {task.facts['model']}"
    yield f"backend: {task.facts['backend']}"
    if row is not None:
        yield f"{task.folder / 'rows.json'}: row {row.id}, {row.pairs} Q/DQ pairs"
        yield f"{task.folder / 'models' / row.file}: sha256 {row.sha256}"
