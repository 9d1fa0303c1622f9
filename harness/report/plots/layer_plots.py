"""Plots of one placement: latency by layer (with its frame), effect of each pattern, and gain against drop."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd

from harness.base.text import truncate
from harness.plugins.api import Layer
from harness.report.plots.figures import COLOURS, plot_files
from harness.report.report_table import frame_rows
from harness.results.task_files import AttributionReport, PartEffect

QDQ_NAME_TAG = "@qdq."  # in the names of nodes of Q/DQ pairs, see `harness.graph.quantize.protobuf_wire`
NAME_COUNTER = re.compile(r"(?<=[A-Za-z])_\d+$")  # runtimes number the nodes that they add, separately in each model


def waterfall_frame(before: Sequence[Layer], after: Sequence[Layer], most: int = 12) -> pd.DataFrame:
    """Return the time of each part of the model in two engines, the largest changes first.

    Layers that share a node of the model are one part, named after its slowest layer. Layers of the runtime's own
    (conversions, reorders) are summed by kind: "added: KIND" if the other engine spends more time on it, else "removed:
    KIND".

    Args:
        before: Layers of the float engine.
        most: Number of named parts; the rest is summed as "all others".

    Returns:
        Columns part, before_ms, after_ms, change_ms; empty if one side has no times.
    """
    columns = ["part", "before_ms", "after_ms", "change_ms"]
    if not any(layer.time_ms for layer in before) or not any(layer.time_ms for layer in after):
        return pd.DataFrame(columns=columns)
    after = _match_layer_names(after, before)
    owner = _first_node_of_part([*before, *after])
    names: dict[tuple[str, str], tuple[float, str]] = {}
    spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, layers in enumerate((before, after)):
        for layer in layers:
            nodes = _layer_nodes(layer)
            key = (owner[nodes[0]], "") if nodes else ("", layer.kind)  # a layer of the runtime's own has no node
            time_ms = layer.time_ms or 0.0
            spent[key][side] += time_ms
            names[key] = max(names.get(key, (-1.0, "")), (time_ms, " ".join((layer.kind, *nodes[-1:]))))
    lines = []
    for key, (first, second) in spent.items():
        change = "as before" if first == second else "added" if second > first else "removed"
        lines.append((names[key][1] if key[0] else f"{change}: {names[key][1]}", first, second, second - first))
    lines.sort(key=lambda line: -abs(line[3]))
    others = lines[most:]
    if others:
        first, second = sum(line[1] for line in others), sum(line[2] for line in others)
        lines = [*lines[:most], (f"all others ({len(others)})", first, second, second - first)]
    return pd.DataFrame(lines, columns=columns)


def _match_layer_names(after: Sequence[Layer], before: Sequence[Layer]) -> list[Layer]:
    """Return the layers of the second engine, renamed to layers of the first if only the runtime's counter differs."""
    sides = []
    for layers in (before, after):
        names = {(layer.kind, name) for layer in layers for name in _layer_nodes(layer)}
        short = {(kind, name): (kind, NAME_COUNTER.sub("", name)) for kind, name in names}
        count = Counter(short.values())  # a name without counter must be unique in the engine
        sides.append({key: name for (_, name), key in short.items() if count[key] == 1 and key[1] != name})
    shared = set.intersection(
        *({name for layer in layers for name in _layer_nodes(layer)} for layers in (before, after))
    )
    one, two = sides
    known = {two[key]: one[key] for key in one.keys() & two.keys() if shared.isdisjoint((one[key], two[key]))}
    return [replace(layer, origin=tuple(known.get(name, name) for name in layer.origin)) for layer in after]


def _layer_nodes(layer: Layer) -> list[str]:
    return [name for name in layer.origin if QDQ_NAME_TAG not in name]


def _first_node_of_part(layers: Iterable[Layer]) -> dict[str, str]:
    """Return for each node the first node of its part (union-find)."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for layer in layers:
        nodes = _layer_nodes(layer)
        for name in nodes:
            parent[root(name)] = root(nodes[0])
    return {name: root(name) for name in parent}


def draw_waterfall(parts: pd.DataFrame, title: str, path: Path) -> None:
    """Draw the changes from the float engine's time to that of the other engine, part by part.

    Args:
        parts: See `waterfall_frame`.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    before, after = float(parts["before_ms"].sum()), float(parts["after_ms"].sum())
    with plot_files(path, height=1.6 + 0.3 * (len(parts) + 2)) as axes:
        axes.barh(0, before, color="0.55", height=0.7)
        axes.text(before, 0, f" {before:.3f} ms", va="center")
        level = before
        for place, part in enumerate(frame_rows(parts), 1):
            change = part["change_ms"]
            colour, hatch = (COLOURS[0], "") if change <= 0 else (COLOURS[1], "//")
            axes.barh(place, change, left=level, color=colour, hatch=hatch, edgecolor="white", height=0.7)
            axes.plot([level, level], [place - 1, place], color="0.5", linewidth=0.7)
            level += change
            axes.text(max(level, level - change), place, f" {change:+.3f}", va="center")
        axes.barh(len(parts) + 1, after, color="0.55", height=0.7)
        axes.text(after, len(parts) + 1, f" {after:.3f} ms", va="center")
        labels = ["float", *(fill(truncate(name, 60), 34) for name in parts["part"]), "this placement"]
        axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, 1.25 * max(before, after))
        axes.set_xlabel(
            "time of the layers by the runtime's profiler, ms\nblue: shorter; orange, hatched: longer\n"
            "added, removed: layers of the runtime's own (conversions, reorders)"
        )
        axes.set_title(title)


def draw_sensitivity(effects: Sequence[PartEffect], noise_floor: float, title: str, path: Path) -> None:
    """Draw the slowdown of the placement without each pattern, with its interval; the noise floor in grey.

    Args:
        effects: Effects from top to bottom; those without a ratio are left out.
        noise_floor: Relative noise floor.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    measured = [(effect, effect.ratio) for effect in effects if effect.ratio is not None]
    with plot_files(path, height=1.5 + 0.3 * len(measured)) as axes:
        axes.axvspan(-100 * noise_floor, 100 * noise_floor, color="0.87")
        axes.axvline(0, color="0.5", linewidth=0.8)
        for place, (effect, ratio) in enumerate(measured):
            value, low, high = (100 * (x - 1) for x in (ratio.value, ratio.low, ratio.high))
            clear = effect.exceeds(max(noise_floor, effect.noise_floor))
            axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=1.2)
            axes.plot([value], [place], "o", color=COLOURS[0], mfc=COLOURS[0] if clear else "white")
        labels = [fill(_describe_effect(effect, 40), 40) for effect, _ in measured]
        axes.set_yticks(range(len(measured)), labels, fontsize=7.5)
        axes.set_ylim(len(measured) - 0.4, -0.6)
        axes.set(xlabel="% slower without it, 95 % interval\nfilled: beyond the noise floor (grey)", title=title)


def draw_gain_and_drop(report: AttributionReport, metric: str, title: str, path: Path) -> None:
    """Draw the accuracy that each pattern costs against the microseconds that it saves, with their intervals.

    Patterns are numbered as in the list below the axes, the largest gain first; those within the noise of both are grey
    and have no number.

    Args:
        report: Attribution with a latency and patterns with a drop.
        metric: Name of the metric at the y axis.
        path: Output path without suffix; .png, .svg and .pdf are written.
    """
    dots, clear = [], []
    for effect in report.patterns:
        gained = None if report.latency_ms is None else effect.gain_us(report.latency_ms)
        if gained is not None and (drop := effect.drop) is not None:
            dots.append((effect, gained, drop))
            if effect.exceeds(max(report.noise_floor, effect.noise_floor)) or drop.low > 0 or drop.high < 0:
                clear.append(effect)
    with plot_files(path, height=4.0 + 0.16 * len(clear)) as axes:
        floor_us = 1000 * (report.latency_ms or 0.0) * report.noise_floor
        axes.axvspan(-floor_us, floor_us, color="0.9")
        axes.axhline(0, color="0.5", linewidth=0.8)
        for effect, gained, drop in dots:
            has_limits = np.isfinite([drop.low, drop.high]).all()
            axes.errorbar(
                [gained.value], [drop.value], xerr=[[gained.value - gained.low], [gained.high - gained.value]],
                yerr=[[drop.value - drop.low], [drop.high - drop.value]] if has_limits else None, fmt="o", ms=5,
                elinewidth=0.8, color=COLOURS[0] if effect in clear else "0.7",
                zorder=3 if effect in clear else 2,
            )  # fmt: skip
            if effect in clear:
                place = (gained.value, drop.value)
                number = str(clear.index(effect) + 1)
                axes.annotate(number, place, xytext=(5, 4), textcoords="offset points", fontsize=8)
        listed = [f"{number}  {_describe_effect(effect, 70)}" for number, effect in enumerate(clear, 1)]
        lines = [
            "microseconds that the pattern saves, with 95 % intervals; band: noise of the time",
            "blue: beyond the noise in time or accuracy; grey: in neither",
            *listed,
        ]
        axes.set_xlabel("\n".join(lines), fontsize=8, loc="left")
        axes.set(ylabel=f"{metric} that it costs (below 0: gains)", title=title)


def _describe_effect(effect: PartEffect, width: int) -> str:
    return f"{effect.part[:8]} {truncate(effect.operators, width)} ({effect.pairs} pairs)"
