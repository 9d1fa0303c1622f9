"""Random search without repeats: the reference of every table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from search.api import Observation, Placement, Space
from search.archive import Archive
from search.moves import first_unseen, random_with_density

__all__ = ["RandomSearcher"]

Density = Literal["stratified", "uniform"]
MAX_ENUMERATED_PLACEMENTS = 4096
MAX_ATTEMPTS = 1000


class RandomSearcher:
    """Draw placements at random, never the same graph twice.

    Spaces of up to 4096 placements are shuffled once and walked to the end, then `ask` returns
    nothing. Larger ones are drawn from; there `ask` returns less when 1000 draws in a row were known.

    Args:
        space: What to draw from.
        seed: Fixes all draws.
        density: "uniform" draws every choice of a dimension with equal probability, so that with many
            dimensions about half of a placement is quantized. "stratified" first draws the share of
            quantized points uniformly from 0 to 1 and so covers sparse and dense placements alike; it
            acts on spaces that are drawn from, not on those that are walked.
    """

    def __init__(self, space: Space, *, seed: int, density: Density = "stratified") -> None:
        if density not in get_args(Density):
            raise ValueError(f"density is one of {get_args(Density)}, but got {density!r}")
        self._space = space
        self._density = density
        self._archive = Archive()
        self._fresh = self._iter_placements(np.random.default_rng(seed))

    def ask(self, n: int) -> Sequence[Placement]:
        return self._archive.ask(n, lambda: next(self._fresh, None), self._space)

    def tell(self, observation: Observation) -> None:
        self._archive.tell(observation)

    def _iter_placements(self, rng: np.random.Generator) -> Iterator[Placement]:
        sizes = self._space.sizes
        total = math.prod(sizes)
        if total > MAX_ENUMERATED_PLACEMENTS:
            while (
                placement := first_unseen(lambda: self._draw(rng), self._space, self._archive, MAX_ATTEMPTS)
            ) is not None:
                yield placement
            return
        for number in rng.permutation(total):
            placement = Placement(tuple(int(choice) for choice in np.unravel_index(number, sizes)))
            if self._space.digest(placement) not in self._archive:
                yield placement

    def _draw(self, rng: np.random.Generator) -> Placement:
        if self._density == "uniform":
            return self._space.random(rng)
        return random_with_density(self._space, rng, rng.random())
