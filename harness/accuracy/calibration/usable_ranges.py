"""Selection of the tensors whose ranges give a scale, and the reasons why the others stay float."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.base.errors import UserError
from harness.base.text import format_names
from harness.graph.quantize.numeric_choices import channel_tensor
from harness.graph.rules.operator_sets import MAX_CONSTANT_MAGNITUDE, MIN_CONSTANT_SCALE
from search.space import Edge, Space

Ranges = Mapping[str, tuple[float, float]]
"""Lowest and highest value by tensor name; they are made symmetric later if the dialect requires it."""

EMPTY_RANGE = (math.inf, -math.inf)
"""Range of a tensor that was not observed."""

_OUTSIDE = ""  # consumer of the outputs of the model, see `Edge`


class SentinelRange(NamedTuple):
    """Range of a tensor with a sentinel, such as -1e4 in a mask; infinite on the side of the sentinel."""

    low: float
    high: float


def finite_ranges(ranges: Ranges) -> Ranges:
    """Return the ranges from which a scale can be made, without infinite, huge and zero ones; see `range_warnings`."""
    return {
        name: pair
        for name, pair in ranges.items()
        if is_finite(pair) and (channel_tensor(name) or not _is_constant_zero(pair))
    }


def is_finite(pair: tuple[float, float]) -> bool:
    """Return whether the bounds of a range are finite and at most 1e30 in magnitude."""
    return all(abs(bound) <= MAX_CONSTANT_MAGNITUDE for bound in pair)


def _is_constant_zero(pair: tuple[float, float]) -> bool:
    return all(abs(bound) <= MIN_CONSTANT_SCALE for bound in pair)


def restrict_space(space: Space, ranges: Ranges) -> Space:
    """Return the space without the edges of tensors that stay float, and without dimensions that have no other edge.

    The edges of a dimension to one node stay float together, because a weight and its data must have the same
    precision; the inputs of a Concat are independent.
    """
    broken = ranges.keys() - finite_ranges(ranges).keys()
    apart = {edge.consumer for d in space.dimensions if d.role == "concat" for edge in d.edges} | {_OUTSIDE}
    kept = ((dimension, _quantizable_edges(dimension.edges, broken, apart)) for dimension in space.dimensions)
    return space.with_dimensions(tuple(replace(dimension, edges=edges) for dimension, edges in kept if edges))


def _quantizable_edges(edges: Iterable[Edge], broken: Collection[str], apart: Collection[str]) -> tuple[Edge, ...]:
    """Return the edges of one dimension except those of broken tensors and the other inputs of their consumers."""
    torn = {edge.consumer for edge in edges if edge.tensor in broken}.difference(apart)
    return tuple(edge for edge in edges if edge.tensor not in broken and edge.consumer not in torn)


def range_warnings(ranges: Ranges) -> tuple[str, ...]:
    """Return warnings about tensors that stay float, one line per reason; empty if there are none."""
    ranges = {name: pair for name, pair in ranges.items() if not channel_tensor(name)}
    sentinels = [name for name, pair in ranges.items() if isinstance(pair, SentinelRange)]
    unseen = [name for name, pair in ranges.items() if pair == EMPTY_RANGE]
    named = {*sentinels, *unseen}
    broken = [name for name, pair in ranges.items() if not is_finite(pair) and name not in named]
    dead = [name for name, pair in ranges.items() if _is_constant_zero(pair)]
    said = []
    if unseen:
        said.append(
            "behind plug-in operators, which calibration cannot run, or not there at the sizes of the samples, so they "
            f"stay float: {format_names(unseen)}"
        )
    if broken:
        said.append(f"NaN, infinite or huge on calibration data, so they stay float: {format_names(broken)}")
    if sentinels:
        said.append(
            "one large value (such as the -10000 of a mask) repeats on calibration data and no scale holds the others "
            f"next to it, so they stay float: {format_names(sentinels)}"
        )
    if dead:
        said.append(f"always 0, or without values, on calibration data (dead): {format_names(dead)}; they stay float")
    return tuple(said)


def require_quantizable(space: Space, ranges: Ranges, source: str) -> None:
    """Raise an error for a space in which calibration has left nothing to quantize.

    Raises:
        UserError: No dimension is left; the message starts with `source` and gives the reasons.
    """
    if not len(space):
        raise UserError(
            f"{source}: calibration leaves nothing to quantize: {'; '.join(range_warnings(ranges))}; "
            "check the calibration data and their preprocessing"
        )
