"""Rendering of an attribution as text, pictures and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from harness.base.files import explain_write_errors, write_text
from harness.base.progress import Observer
from harness.base.statistics import Interval
from harness.base.text import escape_markdown, truncate
from harness.insight.attribution import FEWEST_POINTS_STEP, attribute_row
from harness.report.plots.layer_plots import waterfall_frame
from harness.report.plots.plot_files import draw_attribution
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval, render_markdown
from harness.results.manifest import recorded
from harness.results.scores import METRIC_CAPS, format_drop, metric_name
from harness.results.task_files import AttributionReport, PartEffect, write_attribution

ATTRIBUTION_LEGEND = (
    "Without it: how much longer an inference takes without the part [95 %, Student's over builds]; gives: the same in "
    "microseconds; costs: what the whole placement loses in accuracy against itself without the part [95 % over "
    "images]; alone: speed over float with nothing else quantized. Pairs: those that disappear with the part; a pair "
    "that several parts use is in none of these counts."
)
DISTURBED_STEP_FACTOR = 2.0  # from this multiple of the median noise floor, a step is called disturbed
MAX_PRINTED_ROWS = 15  # of each printed table; the written file has all rows


def explain_and_save(folder: Path, where: str, *, base: Path, observer: Observer) -> tuple[Path, list[str]]:
    """Attribute the speed of a row, save it as data, Markdown and plots; return the file of the data and text lines.

    Args:
        where: Row of the main table, see `harness.insight.attribution.attribute_row`.
        base: Folder that relative paths of the experiment start from.
    """
    found, task = attribute_row(folder, where, base=base, observer=observer)
    path = write_attribution(found, task)
    lines = list(attribution_lines(found))
    with recorded(path.with_suffix(".md")):
        write_text(path.with_suffix(".md"), "\n".join([*lines, ""]))
    with explain_write_errors(folder / "report"):
        drawn = list(draw_attribution(task.name, found, folder / "report"))
    pictures = ", ".join(str(picture.path) for picture in drawn)
    text = f"pictures: {pictures}; qdq report {folder} puts them on the page" if drawn else "there is nothing to draw"
    return path, [*lines, "", f"Saved in {path}; {text}."]


def attribution_lines(found: AttributionReport) -> Iterator[str]:
    """Yield the attribution as lines of Markdown."""
    yield f"# {found.method} ({found.row})"
    if found.recovery:
        yield escape_markdown(
            f"Made by recovery ({found.recovery}): the measurements are of that placement as it was calibrated; "
            "recovered constants and nodes left float are no part of them."
        )
    placed = f"{found.pairs} Q/DQ pairs on {len(found.edges)} quantized edges"
    yield f"{_format_ratio(found.speedup)} times the speed of the float model, with {placed}."
    if found.drop is not None and found.metric not in METRIC_CAPS:
        yield f"{metric_name(found.metric)} lost against the float model: {format_drop(found.drop, found.metric)}."
    yield (
        f"Differences below {found.noise_floor:.1%} of the time are noise: by that share the placement differs from "
        "itself, rebuilt and timed in turns with its variants (median of the steps)."
    )
    noisy = [step for step in found.steps if step.noise_floor > DISTURBED_STEP_FACTOR * found.noise_floor]
    if noisy:
        steps = ", ".join(f"{step.title} ({step.noise_floor:.1%})" for step in noisy)
        yield f"Disturbed steps, with their noise floors: {steps}. Verdicts below these floors are withheld."
    yield from ("", "## Gain of each pattern", *_effect_table(found.patterns, found, "pattern"))
    if found.patterns:
        yield from ("", ATTRIBUTION_LEGEND)
    yield from ("", "## Insertion points, one left out at a time", *_effect_table(found.points, found, "point"))
    yield from ("", "## The fewest pairs that keep the gain")
    minimal = found.minimal
    if minimal is None:
        yield "There is no gain beyond the noise to keep."
    else:
        yield (
            f"{minimal.pairs} of {found.pairs} pairs ({len(minimal.points)} insertion points) keep it: "
            f"{_format_ratio(minimal.speedup)} times the speed of float, {_format_slowdown(minimal.ratio, '')} time "
            f"against all pairs; {minimal.tests} placements were tried."
        )
        for step in noisy:
            if step.title == FEWEST_POINTS_STEP:
                floor = f"{step.noise_floor:.1%}"
                yield f"This comparison was disturbed (noise of {floor}): explain the row again to be sure."
        yield from (f"- {name}" for name in minimal.points)
    yield from ("", "## What was fused", *_fusion_lines(found))
    if len(parts := waterfall_frame(found.before, found.after)):
        yield from ("", "## Where the time went, layer by layer")
        rows = [
            {
                "part": truncate(row["part"], 60),
                "float ms": f"{row['before_ms']:.3f}",
                "here ms": f"{row['after_ms']:.3f}",
                "change ms": f"{row['change_ms']:+.3f}",
            }
            for row in parts.to_dict("records")
        ]
        yield _markdown_table(rows)


def _format_ratio(ratio: Interval) -> str:
    return format_interval(ratio.value, ratio.low, ratio.high)


def _markdown_table(rows: Sequence[dict[str, str]]) -> str:
    cells = pd.DataFrame(rows)
    return render_markdown(ReportTable(name="", cells=cells, raw=cells, note=""))


def _effect_table(effects: Sequence[PartEffect], found: AttributionReport, kind: str) -> Iterator[str]:
    rows = []
    for effect in effects[:MAX_PRINTED_ROWS]:
        gained = None if found.latency_ms is None else effect.gain_us(found.latency_ms)
        if effect.ratio is None:
            verdict = "unknown"
        elif not effect.exceeds(found.noise_floor):
            verdict = "within noise"
        elif not effect.exceeds(effect.noise_floor):  # of its own step
            verdict = f"withheld: noise of {effect.noise_floor:.1%}"
        else:
            verdict = "carries gain" if effect.ratio.low > 1 else "costs time"
        row = {
            kind: effect.part,
            "operators": truncate(effect.operators, 50),
            "pairs": str(effect.pairs),
            "without it": _format_slowdown(effect.ratio, effect.reason),
            "gives": MISSING_CELL if gained is None else f"{gained.value:+.0f} µs",
            f"costs {metric_name(found.metric)}": MISSING_CELL
            if effect.drop is None
            else format_drop(effect.drop, found.metric),
            "alone": MISSING_CELL if effect.alone is None else f"{effect.alone.value:.2f}x",
            "verdict": verdict,
        }
        rows.append(row)
    if not rows:
        yield "None that is beyond the noise."
        return
    shown = [column for column in rows[0] if any(row[column] != MISSING_CELL for row in rows)]
    yield _markdown_table([{column: row[column] for column in shown} for row in rows])
    if len(effects) > MAX_PRINTED_ROWS:
        yield f"... and {len(effects) - MAX_PRINTED_ROWS} more in the file."


def _format_slowdown(ratio: Interval | None, reason: str) -> str:
    """Return the slowdown without a part as text, or the reason why it is unknown."""
    if ratio is None:
        return reason or "not measured"
    value, low, high = (100 * (x - 1) for x in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _fusion_lines(found: AttributionReport) -> Iterator[str]:
    counts = Counter(edge.fusion for edge in found.edges)
    if set(counts) <= {"unknown"}:
        yield "The runtime does not report fusion."
        return
    yield (
        f"Of {len(found.edges)} quantized edges {counts['fused']} were fused into their consumers, "
        f"{counts['not fused']} were not (the consumer computes in float), {counts['unknown']} are unknown."
    )
    unfused = [edge for edge in found.edges if edge.fusion == "not fused"]
    for edge in unfused[:MAX_PRINTED_ROWS]:
        yield escape_markdown(f"- not fused: {edge.tensor} at input {edge.slot} of {edge.consumer}: {edge.layer}")
    if len(unfused) > MAX_PRINTED_ROWS:
        yield f"... and {len(unfused) - MAX_PRINTED_ROWS} more in the file."
