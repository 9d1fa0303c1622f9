"""Pictures of one placement: where its latency went, layer by layer, and what each pattern is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.report.explained import Effect
from harness.report.plots import COLOURS, drawn, name_lines

__all__ = ["sensitivity", "waterfall"]


def waterfall(parts: pd.DataFrame, title: str, path: Path) -> None:
    """From the float engine's time to the other's, part by part: what got shorter, what got longer.

    Args:
        parts: See `harness.report.layers.waterfall_frame`.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    before, after = float(parts["before_ms"].sum()), float(parts["after_ms"].sum())
    with drawn(path, height=1.6 + 0.3 * (len(parts) + 2)) as axes:
        axes.barh(0, before, color="0.55", height=0.7)
        axes.text(before, 0, f" {before:.3f} ms", va="center")
        level = before
        for place, part in enumerate(parts.to_dict("records"), 1):
            change = part["change_ms"]
            colour, hatch = (COLOURS[0], "") if change <= 0 else (COLOURS[1], "//")
            axes.barh(place, change, left=level, color=colour, hatch=hatch, edgecolor="white", height=0.7)
            axes.plot([level, level], [place - 1, place], color="0.5", linewidth=0.7)
            level += change
            axes.text(max(level, level - change), place, f" {change:+.3f}", va="center")
        axes.barh(len(parts) + 1, after, color="0.55", height=0.7)
        axes.text(after, len(parts) + 1, f" {after:.3f} ms", va="center")
        labels = ["float", *(name_lines(name[:60], 34) for name in parts["part"]), "this placement"]
        axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, 1.25 * max(before, after))
        axes.set_xlabel("time of the layers as the runtime counts it, ms\nblue: shorter; orange, hatched: longer")
        axes.set_title(title)


def sensitivity(effects: Sequence[Effect], floor: float, title: str, path: Path) -> None:
    """A dot a pattern: how much slower the placement is without it, with its interval; the noise floor in grey.

    Args:
        effects: Those with a ratio, in the order in which they are shown from top to bottom.
        floor: Relative noise floor.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    shown = [effect for effect in effects if effect.ratio is not None]
    with drawn(path, height=1.5 + 0.3 * len(shown)) as axes:
        axes.axvspan(-100 * floor, 100 * floor, color="0.87")
        axes.axvline(0, color="0.5", linewidth=0.8)
        for place, effect in enumerate(shown):
            if effect.ratio is None:
                continue
            value, low, high = (100 * (x - 1) for x in (effect.ratio.value, effect.ratio.low, effect.ratio.high))
            clear = low > 100 * floor or high < -100 * floor
            axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=1.2)
            axes.plot([value], [place], "o", color=COLOURS[0], markerfacecolor=COLOURS[0] if clear else "white")
        axes.set_yticks(range(len(shown)), [_label(effect) for effect in shown], fontsize=7.5)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel("% slower without it, 95 % interval\nfilled: beyond the noise floor (grey)")
        axes.set_title(title)


def _label(effect: Effect) -> str:
    return name_lines(f"{effect.part[:8]} {effect.operators[:40]} ({effect.pairs} pairs)", 40)
