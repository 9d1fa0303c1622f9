"""Usable ranges: the tensors that a scale can be made for, and the reasons why the others stay float."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.errors import UserError
from harness.graph.rules.operator_sets import LARGEST, SMALLEST
from search.space import Edge, Space

__all__ = ["UNSEEN", "Ranges", "Sentinel", "finite_ranges", "is_finite", "narrowed", "refuse_empty", "remarks"]

Ranges = Mapping[str, tuple[float, float]]
"""Lowest and highest value by tensor name. Symmetric or not is for the dialect to decide."""

UNSEEN = (math.inf, -math.inf)
"""The range of a tensor that was not observed."""

_OUTSIDE = ""  # the consumer of what leaves the model, see `Edge`
_SHOWN = 5


class Sentinel(NamedTuple):
    """The range of a tensor that holds a sentinel (see `harness.graph.rules.sentinels`): infinite on the side of it."""

    low: float
    high: float


def finite_ranges(ranges: Ranges) -> Ranges:
    """Return the ranges that a scale can be made of; the other tensors are to stay float, see `remarks`."""
    return {name: pair for name, pair in ranges.items() if is_finite(pair) and not _is_dead(pair)}


def is_finite(pair: tuple[float, float]) -> bool:
    """Return whether the bounds of a range are finite, and not huge."""
    return all(abs(bound) <= LARGEST for bound in pair)


def _is_dead(pair: tuple[float, float]) -> bool:
    return all(abs(bound) <= SMALLEST for bound in pair)


def narrowed(space: Space, ranges: Ranges) -> Space:
    """The space without the edges of tensors that are to stay float, and without the dimensions of no other edge.

    What goes together with such an edge stays float too, as a weight does with its data; inputs of a Concat do without
    each other.
    """
    broken = ranges.keys() - finite_ranges(ranges).keys()
    apart = {edge.consumer for d in space.dimensions if d.role == "concat" for edge in d.edges} | {_OUTSIDE}
    kept = ((dimension, _whole(dimension.edges, broken, apart)) for dimension in space.dimensions)
    return Space(tuple(replace(dimension, edges=edges) for dimension, edges in kept if edges))


def _whole(edges: Iterable[Edge], broken: Collection[str], apart: Collection[str]) -> tuple[Edge, ...]:
    """Edges of one dimension but for those of broken tensors, and what their consumers read besides."""
    torn = {edge.consumer for edge in edges if edge.tensor in broken}.difference(apart)
    return tuple(edge for edge in edges if edge.tensor not in broken and edge.consumer not in torn)


def remarks(ranges: Ranges) -> tuple[str, ...]:
    """Return what a reader of results should know about the ranges, a line for each kind; none where all is well."""
    sentinels = [name for name, pair in ranges.items() if isinstance(pair, Sentinel)]
    unseen = [name for name, pair in ranges.items() if pair == UNSEEN]
    named = {*sentinels, *unseen}
    broken = [name for name, pair in ranges.items() if not is_finite(pair) and name not in named]
    dead = [name for name, pair in ranges.items() if _is_dead(pair)]
    said = []
    if unseen:
        said.append(f"behind plug-in operators, which calibration cannot run, so they stay float: {_listed(unseen)}")
    if broken:
        said.append(f"NaN, infinite or huge on calibration data, so they stay float: {_listed(broken)}")
    if sentinels:
        said.append(
            "one large value (such as the -10000 of a mask) repeats on calibration data and no scale holds the others "
            f"beside it, so they stay float: {_listed(sentinels)}"
        )
    if dead:
        said.append(f"always 0 on calibration data (dead): {_listed(dead)}; they stay float")
    return tuple(said)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def refuse_empty(space: Space, ranges: Ranges, source: str) -> None:
    """Refuse a space in which calibration has left nothing to quantize.

    Raises:
        UserError: No dimension is left.
    """
    if not len(space):
        raise UserError(
            f"{source}: calibration leaves nothing to quantize: {'; '.join(remarks(ranges))}; "
            "check the calibration data and their preprocessing"
        )
