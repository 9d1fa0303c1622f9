"""Differences in latency between two engines of one model, layer by layer."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pandas as pd

from harness.api import Layer

__all__ = ["waterfall_frame"]

QDQ_NAME_TAG = "@qdq."
"""In the names of nodes that belong to Q/DQ pairs, see `harness.graph.quantize.protobuf_wire`."""
NAME_COUNTER_PATTERN = re.compile(r"(?<=[A-Za-z])_\d+$")
"""Runtimes count the nodes they make anew each time they read a model."""


def waterfall_frame(before: Sequence[Layer], after: Sequence[Layer], most: int = 12) -> pd.DataFrame:
    """What each part of the model took before and takes after, the largest changes first.

    Layers that share a node of the model are one part, however the runtime cut it in either engine; it is called after
    its slowest layer. What the runtime adds of its own (conversions, reorders) is summed up by kind, and called "added:
    KIND" where the other engine spends more on it, "removed: KIND" where it spends less.

    Args:
        before: Layers of the float engine.
        after: Layers of the other engine.
        most: Parts that are named; what is left is summed up as "all others".

    Returns:
        Columns part, before_ms, after_ms, change_ms; no row where one side has no times.
    """
    columns = ["part", "before_ms", "after_ms", "change_ms"]
    if not any(layer.time_ms for layer in before) or not any(layer.time_ms for layer in after):
        return pd.DataFrame(columns=columns)
    lines = [
        (part, first, second, second - first)
        for part, first, second in _connected_layer_times(before, _match_layer_names(after, before))
    ]
    lines.sort(key=lambda line: -abs(line[3]))
    rest = lines[most:]
    if rest:
        first, second = sum(line[1] for line in rest), sum(line[2] for line in rest)
        lines = [*lines[:most], (f"all others ({len(rest)})", first, second, second - first)]
    return pd.DataFrame(lines, columns=columns)


def _connected_layer_times(before: Sequence[Layer], after: Sequence[Layer]) -> Iterator[tuple[str, float, float]]:
    """What each part is called, and its time in either engine; the key of what the runtime added has no node."""
    owner = _first_node_of_part([*before, *after])
    names: dict[tuple[str, str], tuple[float, str]] = {}
    spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, layers in enumerate((before, after)):
        for layer in layers:
            nodes = _layer_nodes(layer)
            key = (owner[nodes[0]], "") if nodes else ("", layer.kind)
            time_ms = layer.time_ms or 0.0
            spent[key][side] += time_ms
            names[key] = max(names.get(key, (-1.0, "")), (time_ms, " ".join((layer.kind, *nodes[-1:]))))
    for key, (first, second) in spent.items():
        _, name = names[key]
        yield (name if key[0] else f"{_added_or_removed(first, second)}: {name}"), first, second


def _added_or_removed(before_ms: float, after_ms: float) -> str:
    """What became of layers that are the runtime's own."""
    if before_ms == after_ms:
        return "as before"
    return "added" if after_ms > before_ms else "removed"


def _match_layer_names(after: Sequence[Layer], before: Sequence[Layer]) -> list[Layer]:
    """The layers with the names that the first engine has for what differs in the runtime's running number alone."""
    one, two = _names_without_counter(before), _names_without_counter(after)
    shared = _layer_node_names(before) & _layer_node_names(after)
    known = {two[key]: one[key] for key in one.keys() & two.keys() if shared.isdisjoint((one[key], two[key]))}
    return [replace(layer, origin=tuple(known.get(name, name) for name in layer.origin)) for layer in after]


def _names_without_counter(layers: Iterable[Layer]) -> dict[tuple[str, str], str]:
    """By kind and name without its running number, the nodes of which an engine has one such."""
    names = {(layer.kind, name) for layer in layers for name in _layer_nodes(layer)}
    short = {(kind, name): (kind, NAME_COUNTER_PATTERN.sub("", name)) for kind, name in names}
    count = Counter(short.values())
    return {key: name for (kind, name), key in short.items() if count[key] == 1 and key[1] != name}


def _layer_nodes(layer: Layer) -> list[str]:
    """The model's nodes in a layer, without those of Q/DQ pairs."""
    return [name for name in layer.origin if QDQ_NAME_TAG not in name]


def _layer_node_names(layers: Iterable[Layer]) -> set[str]:
    return {name for layer in layers for name in _layer_nodes(layer)}


def _first_node_of_part(layers: Iterable[Layer]) -> dict[str, str]:
    """For each node the first node of its part (union-find)."""
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
