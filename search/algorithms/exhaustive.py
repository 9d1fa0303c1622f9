"""Every placement once: the truth about a small space, and a screening of single points in a large one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from search.api import Observation, Placement, Space
from search.archive import Archive

__all__ = ["ExhaustiveSearcher"]


class ExhaustiveSearcher:
    """Try all placements, by their number of quantized points; for small spaces and complete tables.

    Among equally many, points behind which there is more work come first. It ends when the space does, and asks
    nothing that was told already. Use it to record complete tables: n points of two choices have 2**n placements.

    Args:
        space: What to walk.
        seed: Without effect; the order is fixed.
    """

    def __init__(self, space: Space, *, seed: int) -> None:
        self._space = space
        self._archive = Archive()
        self._fresh = (p for p in _by_quantized_count(space) if space.digest(p) not in self._archive)

    def ask(self, n: int) -> Sequence[Placement]:
        return self._archive.ask(n, lambda: next(self._fresh, None), self._space)

    def tell(self, observation: Observation) -> None:
        self._archive.tell(observation)


def _by_quantized_count(space: Space) -> Iterator[Placement]:
    costly = sorted(range(len(space)), key=lambda index: -space.dimensions[index].cost)
    for weight in range(len(space) + 1):
        for points in itertools.combinations(costly, weight):
            for precisions in itertools.product(*(range(1, space.sizes[index]) for index in points)):
                chosen = dict(zip(points, precisions, strict=True))
                yield Placement(tuple(chosen.get(index, 0) for index in range(len(space))))
