"""Exhaustive search: all placements of a space, those with few quantized points first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from search.api import Placement, Space
from search.archive import ArchiveSearcher

__all__ = ["ExhaustiveSearcher"]


class ExhaustiveSearcher(ArchiveSearcher):
    """Searcher that proposes all placements by ascending number of quantized points; for small spaces.

    Among equal numbers, points with more multiply-accumulates come first. Known placements are left out. A space of n
    points with two choices has 2**n placements.

    Args:
        space: Space to enumerate.
        seed: No effect; the order is fixed.
    """

    def __init__(self, space: Space, *, seed: int) -> None:
        super().__init__(space, seed)
        self._fresh = (p for p in _by_quantized_count(space) if space.digest(p) not in self._archive)

    def _propose(self) -> Placement | None:
        return next(self._fresh, None)


def _by_quantized_count(space: Space) -> Iterator[Placement]:
    costly = sorted(range(len(space)), key=lambda index: -space.dimensions[index].cost)
    for weight in range(len(space) + 1):
        for points in itertools.combinations(costly, weight):
            for precisions in itertools.product(*(range(1, space.sizes[index]) for index in points)):
                chosen = dict(zip(points, precisions, strict=True))
                yield Placement(tuple(chosen.get(index, 0) for index in range(len(space))))
