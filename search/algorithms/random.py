"""Random search without repeats, the reference in comparisons of searchers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from search.api import Placement, Space
from search.archive import ArchiveSearcher
from search.moves import first_unseen, random_with_density

__all__ = ["RandomSearcher"]

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
            while (placement := first_unseen(self._draw, self._space, self._archive, MAX_ATTEMPTS)) is not None:
                yield placement
            return
        every = np.indices(sizes).reshape(len(sizes), total).T
        for choices in every[self._rng.permutation(total)].tolist():
            placement = Placement(tuple(choices))
            if self._space.digest(placement) not in self._archive:
                yield placement

    def _draw(self) -> Placement:
        if self._density == "uniform":
            return self._space.random(self._rng)
        return random_with_density(self._space, self._rng, self._rng.random())
