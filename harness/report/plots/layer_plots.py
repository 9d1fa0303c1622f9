"""Pictures of one placement: where its latency went, layer by layer, and what each pattern is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.report.load.attribution_store import AttributionReport, PartEffect
from harness.report.load.display_names import truncate
from harness.report.plots.result_plots import SERIES_COLOURS, figure_file, wrap_name
from harness.statistics import Interval

__all__ = ["draw_gain_and_drop", "draw_sensitivity", "draw_waterfall"]


def draw_waterfall(parts: pd.DataFrame, title: str, path: Path) -> None:
    """From the float engine's time to the other's, part by part: what got shorter, what got longer.

    Args:
        parts: See `harness.report.frames.layer_waterfall.waterfall_frame`.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    before, after = float(parts["before_ms"].sum()), float(parts["after_ms"].sum())
    with figure_file(path, height=1.6 + 0.3 * (len(parts) + 2)) as axes:
        axes.barh(0, before, color="0.55", height=0.7)
        axes.text(before, 0, f" {before:.3f} ms", va="center")
        level = before
        for place, part in enumerate(parts.to_dict("records"), 1):
            change = part["change_ms"]
            colour, hatch = (SERIES_COLOURS[0], "") if change <= 0 else (SERIES_COLOURS[1], "//")
            axes.barh(place, change, left=level, color=colour, hatch=hatch, edgecolor="white", height=0.7)
            axes.plot([level, level], [place - 1, place], color="0.5", linewidth=0.7)
            level += change
            axes.text(max(level, level - change), place, f" {change:+.3f}", va="center")
        axes.barh(len(parts) + 1, after, color="0.55", height=0.7)
        axes.text(after, len(parts) + 1, f" {after:.3f} ms", va="center")
        labels = ["float", *(wrap_name(truncate(name, 60), 34) for name in parts["part"]), "this placement"]
        axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, 1.25 * max(before, after))
        axes.set_xlabel(
            "time of the layers as the runtime counts it, ms\nblue: shorter; orange, hatched: longer\n"
            "added, removed: layers of the runtime's own (conversions, reorders)"
        )
        axes.set_title(title)


def draw_sensitivity(effects: Sequence[PartEffect], floor: float, title: str, path: Path) -> None:
    """A dot a pattern: how much slower the placement is without it, with its interval; the noise floor in grey.

    Args:
        effects: Those with a ratio, in the order in which they are shown from top to bottom.
        floor: Relative noise floor.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    shown = [effect for effect in effects if effect.ratio is not None]
    with figure_file(path, height=1.5 + 0.3 * len(shown)) as axes:
        axes.axvspan(-100 * floor, 100 * floor, color="0.87")
        axes.axvline(0, color="0.5", linewidth=0.8)
        for place, effect in enumerate(shown):
            if effect.ratio is None:
                continue
            value, low, high = (100 * (x - 1) for x in (effect.ratio.value, effect.ratio.low, effect.ratio.high))
            clear = low > 100 * floor or high < -100 * floor
            axes.plot([low, high], [place, place], color=SERIES_COLOURS[0], linewidth=1.2)
            axes.plot(
                [value], [place], "o", color=SERIES_COLOURS[0], markerfacecolor=SERIES_COLOURS[0] if clear else "white"
            )
        axes.set_yticks(range(len(shown)), [_effect_label(effect) for effect in shown], fontsize=7.5)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel("% slower without it, 95 % interval\nfilled: beyond the noise floor (grey)")
        axes.set_title(title)


def _effect_label(effect: PartEffect) -> str:
    return wrap_name(f"{effect.part[:8]} {truncate(effect.operators, 40)} ({effect.pairs} pairs)", 40)


def draw_gain_and_drop(found: AttributionReport, metric: str, title: str, path: Path) -> None:
    """A dot a pattern: the accuracy that it costs against the microseconds that it gives, with their intervals.

    Numbers are those of the list below, the largest gain first; patterns that are within the noise both ways are grey
    and have none.

    Args:
        found: With a latency, and patterns that have a drop.
        metric: What it is called.
        title: Shown above the axes.
        path: Where to write, without suffix.
    """
    dots = list(_effects_with_drop(found))
    clear = [effect for effect, _, drop in dots if _exceeds_noise(effect, drop, found.floor)]
    with figure_file(path, height=4.0 + 0.16 * len(clear)) as axes:
        floor_us = 1000 * (found.latency_ms or 0.0) * found.floor
        axes.axvspan(-floor_us, floor_us, color="0.9")
        axes.axhline(0, color="0.5", linewidth=0.8)
        for effect, gained, drop in dots:
            known = np.isfinite([drop.low, drop.high]).all()
            axes.errorbar(
                [gained.value], [drop.value], xerr=[[gained.value - gained.low], [gained.high - gained.value]],
                yerr=[[drop.value - drop.low], [drop.high - drop.value]] if known else None, fmt="o", ms=5,
                elinewidth=0.8, color=SERIES_COLOURS[0] if effect in clear else "0.7",
                zorder=3 if effect in clear else 2,
            )  # fmt: skip
            if effect in clear:
                place = (gained.value, drop.value)
                number = str(clear.index(effect) + 1)
                axes.annotate(number, place, xytext=(5, 4), textcoords="offset points", fontsize=8)
        listed = [f"{number}  {_effect_description(effect)}" for number, effect in enumerate(clear, 1)]
        told = [
            "microseconds that the pattern gives, with 95 % intervals; band: noise of the time",
            "blue: beyond the noise in time or in accuracy; grey: in neither",
            *listed,
        ]
        axes.set_xlabel("\n".join(told), fontsize=8, loc="left")
        axes.set_ylabel(f"{metric} that it costs (below 0: that it wins)")
        axes.set_title(title)


def _effects_with_drop(found: AttributionReport) -> Iterator[tuple[PartEffect, Interval, Interval]]:
    for effect in found.patterns:
        gained = None if found.latency_ms is None else effect.gain_us(found.latency_ms)
        if gained is not None and effect.drop is not None:
            yield effect, gained, effect.drop


def _exceeds_noise(effect: PartEffect, drop: Interval, floor: float) -> bool:
    """Whether the pattern does something beyond the noise: to the time, or to the accuracy."""
    ratio = effect.ratio
    timed = ratio is not None and (ratio.low > 1 + floor or ratio.high < 1 / (1 + floor))
    return timed or drop.low > 0 or drop.high < 0


def _effect_description(effect: PartEffect) -> str:
    return f"{effect.part[:8]} {truncate(effect.operators, 70)} ({effect.pairs} pairs)"
