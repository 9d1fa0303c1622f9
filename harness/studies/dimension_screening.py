"""Screening of the dimensions that influence latency most: one change at a time around a few placements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from search.space import Placement, Space

__all__ = ["most_influential", "neighbours", "sensitivity"]


def neighbours(space: Space, placement: Placement) -> Iterator[Placement]:
    """All placements that differ in one dimension: leave one in around float, leave one out around the others."""
    for index, size in enumerate(space.sizes):
        for choice in range(size):
            if choice != placement.choices[index]:
                choices = list(placement.choices)
                choices[index] = choice
                yield Placement(tuple(choices))


def sensitivity(
    space: Space, anchors: Sequence[Placement], latency_ms: Mapping[str, float]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Typical change of log latency when one dimension alone changes: root mean square over anchors and choices.

    Args:
        space: The dimensions.
        anchors: What they were changed around.
        latency_ms: By digest; what failed is absent and does not count.

    Returns:
        One value for each dimension; 0 where nothing could be compared.
    """
    squares: list[list[float]] = [[] for _ in range(len(space))]
    for anchor in anchors:
        here = latency_ms.get(space.digest(anchor))
        for other in neighbours(space, anchor):
            there = latency_ms.get(space.digest(other))
            if here is not None and there is not None:
                changed = next(i for i, (a, b) in enumerate(zip(anchor.choices, other.choices, strict=True)) if a != b)
                squares[changed].append(math.log(there / here) ** 2)
    return np.array([math.sqrt(sum(found) / len(found)) if found else 0.0 for found in squares])


def most_influential(space: Space, found: np.ndarray[Any, np.dtype[np.float64]], dimensions: int) -> tuple[int, ...]:
    """The dimensions that change most, in the space's order, with at most 2 ** dimensions placements."""
    chosen: list[int] = []
    for index in np.argsort(-found, kind="stable").tolist():
        if math.prod(space.sizes[i] for i in (*chosen, index)) <= 2**dimensions:
            chosen.append(index)
    return tuple(sorted(chosen))
