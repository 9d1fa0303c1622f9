"""Searches without feedback: random placements without repeats, the reference in comparisons, and all placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Literal, get_args

import numpy as np

from search.api import Placement, Space
from search.archive import ArchiveSearcher

Density = Literal["stratified", "uniform"]
MAX_ENUMERATED_PLACEMENTS = 4096
MAX_ATTEMPTS = 1000  # draws for an unseen placement


class RandomSearcher(ArchiveSearcher):
    """Searcher that draws placements at random, never the same model twice.

    Spaces of up to 4096 placements are shuffled once and enumerated; then `ask` returns nothing. Larger spaces are
    sampled; there `ask` returns fewer placements if 1000 draws in a row were known.

    Args:
        space: Space to draw from.
        seed: Seed of all draws.
        density: "uniform" draws every choice of a dimension with equal probability, so with many dimensions of two
            choices about half of the points are quantized. "stratified" first draws the share of quantized points
            uniformly from 0 to 1 and so covers sparse and dense placements equally. No effect on enumerated spaces.
    """

    def __init__(self, space: Space, *, seed: int, density: Density = "stratified") -> None:
        if density not in get_args(Density):
            raise ValueError(f"density is one of {get_args(Density)}, but got {density!r}")
        super().__init__(space, seed)
        self._density = density
        self._fresh = self._iter_placements()

    def _propose(self) -> Placement | None:
        return next(self._fresh, None)

    def _iter_placements(self) -> Iterator[Placement]:
        sizes = self._space.sizes
        total = math.prod(sizes)
        if total > MAX_ENUMERATED_PLACEMENTS:
            draw = partial(self._space.random, self._rng) if self._density == "uniform" else self._random_placement
            while (placement := self._first_new(draw, MAX_ATTEMPTS)) is not None:
                yield placement
            return
        every = np.indices(sizes).reshape(len(sizes), total).T
        placements = (Placement(tuple(choices)) for choices in every[self._rng.permutation(total)].tolist())
        yield from filter(self._is_new, placements)


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
        self._fresh = filter(self._is_new, self._by_quantized_count())

    def _propose(self) -> Placement | None:
        return next(self._fresh, None)

    def _by_quantized_count(self) -> Iterator[Placement]:
        dimensions, sizes = self._space.dimensions, self._space.sizes
        costly = sorted(range(len(sizes)), key=lambda index: -dimensions[index].cost)
        for weight in range(len(sizes) + 1):
            for points in itertools.combinations(costly, weight):
                for precisions in itertools.product(*(range(1, sizes[index]) for index in points)):
                    choices = [0] * len(sizes)
                    for index, choice in zip(points, precisions, strict=True):
                        choices[index] = choice
                    yield Placement(tuple(choices))
