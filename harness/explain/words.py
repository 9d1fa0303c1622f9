"""An explanation in words, for the terminal and for a Markdown file beside its data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from harness.explain.attribution import explain_row
from harness.measure.stats import Interval
from harness.report.explained import Effect, Explanation, Fate, write_explanation
from harness.report.layers import waterfall_frame
from harness.report.tables import Table, interval, markdown
from harness.run.observe import Observer

__all__ = ["explain_into", "explanation_lines"]

SHOWN = 15
"""Lines of a table on the terminal; the file has all."""


def explain_into(folder: Path, where: str, *, base: Path, observer: Observer) -> list[str]:
    """Explain a row, keep what was measured in the cell's folder for the report, and say it in words.

    Args:
        folder: Results folder.
        where: Row of the main table, see `harness.explain.attribution.explain_row`.
        base: Folder that relative paths of the experiment start from.

    Raises:
        UserError: See `explain_row`; or the folder cannot be written.
    """
    found, cell = explain_row(folder, where, base=base, observer=observer)
    path = write_explanation(found, cell)
    return [*explanation_lines(found), "", f"{path}; pictures: qdq report {folder}"]


def explanation_lines(found: Explanation) -> Iterator[str]:
    """The explanation as Markdown."""
    yield f"# {found.method} ({found.row})"
    yield f"{_times(found.speedup)} times the speed of the float model, with {found.pairs} Q/DQ pairs."
    yield f"Differences below {found.floor:.1%} are noise on this machine."
    yield ""
    yield "## What each pattern gives"
    yield from _effects(found.patterns, found.floor, "pattern")
    yield ""
    yield "## Insertion points, one left out at a time"
    yield from _effects(found.points, found.floor, "point")
    yield ""
    yield "## The fewest pairs that keep the gain"
    yield from _minimal(found)
    yield ""
    yield "## What was fused"
    yield from _fates(found.fates)
    if len(parts := waterfall_frame(found.before, found.after)):
        yield ""
        yield "## Where the time went, layer by layer"
        yield from _layers(parts)


def _times(ratio: Interval) -> str:
    return interval(ratio.value, ratio.low, ratio.high)


def _effects(effects: Sequence[Effect], floor: float, kind: str) -> Iterator[str]:
    if not effects:
        yield "None that is beyond the noise."
        return
    lines = []
    for effect in effects[:SHOWN]:
        line = {kind: effect.part, "operators": effect.operators[:50], "pairs": str(effect.pairs)}
        line |= {"without it": _loss(effect.ratio, effect.reason), "alone": _alone(effect.alone)}
        lines.append({**line, "verdict": _verdict(effect.ratio, floor)})
    cells = pd.DataFrame(lines)
    yield markdown(
        Table(name="", cells=cells if kind == "pattern" else cells.drop(columns="alone"), raw=cells, note="")
    )
    if len(effects) > SHOWN:
        yield f"... and {len(effects) - SHOWN} more in the file."


def _loss(ratio: Interval | None, reason: str) -> str:
    """How much slower it is without the part."""
    if ratio is None:
        return reason or "not measured"
    value, low, high = (100 * (x - 1) for x in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _alone(speedup: Interval | None) -> str:
    return "-" if speedup is None else f"{speedup.value:.2f}x"


def _verdict(ratio: Interval | None, floor: float) -> str:
    if ratio is None:
        return "unknown"
    if ratio.low > 1 + floor:
        return "carries gain"
    return "costs time" if ratio.high < 1 / (1 + floor) else "within noise"


def _minimal(found: Explanation) -> Iterator[str]:
    kept = found.minimal
    if kept is None:
        yield "There is no gain beyond the noise to keep."
        return
    yield (
        f"{kept.pairs} of {found.pairs} pairs ({len(kept.points)} insertion points) keep it: {_times(kept.speedup)} "
        f"times the speed of float, {_loss(kept.ratio, '')} time against all pairs; {kept.tests} placements were tried."
    )
    yield from (f"- {name}" for name in kept.points)


def _fates(fates: Sequence[Fate]) -> Iterator[str]:
    counts = Counter(fate.fate for fate in fates)
    if set(counts) <= {"unknown"}:
        yield "The runtime does not tell."
        return
    yield (
        f"Of {len(fates)} quantized edges {counts['fused']} were fused into their consumers, {counts['alone']} stayed "
        f"alone (the consumer computes in float), {counts['unknown']} are not told."
    )
    alone = [fate for fate in fates if fate.fate == "alone"]
    yield from (f"- alone: {f.tensor} at input {f.slot} of {f.consumer}: {f.layer}" for f in alone[:SHOWN])
    if len(alone) > SHOWN:
        yield f"... and {len(alone) - SHOWN} more in the file."


def _layers(parts: pd.DataFrame) -> Iterable[str]:
    lines = [
        {
            "part": row["part"][:60],
            "float ms": f"{row['before_ms']:.3f}",
            "here ms": f"{row['after_ms']:.3f}",
            "change ms": f"{row['change_ms']:+.3f}",
        }
        for row in parts.to_dict("records")
    ]
    cells = pd.DataFrame(lines)
    return (markdown(Table(name="", cells=cells, raw=cells, note="")),)
