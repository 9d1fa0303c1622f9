"""Simulated annealing over placements (Kirkpatrick et al. 1983, Science 220, 671), aware of noise."""

from __future__ import annotations

import math

from search.api import Observation, Placement, Score, Space, check_range
from search.archive import ArchiveSearcher, improves
from search.moves import assign, dimension_blocks, flip

MAX_ATTEMPTS = 50


class AnnealingSearcher(ArchiveSearcher):
    """Simulated annealing, which accepts faster placements, and slower ones with a decreasing probability.

    The temperature is the relative increase of latency that is accepted with probability 1/e. It decreases
    geometrically over a cycle of evaluations; the next cycle starts at the highest temperature from the incumbent. The
    noise of a comparison is added to the increase, so that a tie counts as slightly slower and not as faster (similar
    to the penalty for uncertain energies of Ceperley and Dewing 1999, J. Chem. Phys. 110, 9812). A placement with a
    larger violation than the present one is never accepted.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        hottest: Temperature at the start of a cycle.
        coldest: Temperature at the end of a cycle.
        cycle: Number of evaluations per cycle.
        block: Probability that a move sets a whole role or pattern at once instead of flipping points.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        hottest: float = 0.03,
        coldest: float = 0.001,
        cycle: int = 50,
        block: float = 0.2,
    ) -> None:
        check_range("coldest", coldest, 1e-9)
        check_range("hottest", hottest, coldest)
        check_range("cycle", cycle, 1)
        check_range("block", block, 0, 1)
        super().__init__(space, seed)
        self._hottest, self._coldest, self._cycle, self._block = hottest, coldest, cycle, block
        self._blocks = dimension_blocks(space)
        self._evaluated = 0
        self._base = space.float_placement()

    def tell(self, observation: Observation) -> None:
        base = self._archive.get(self._space.digest(self._base))
        own = observation.digest in self._archive.pending
        self._archive.tell(observation)
        entry = self._archive.get(observation.digest)
        self._evaluated += own
        again = base is not None and base.digest == observation.digest and entry != base  # the base was measured again
        if again or (own and self._evaluated % self._cycle == 0 and len(self._archive)):
            self._base = self._archive.incumbents(1)[0].placement
        elif entry is not None and (base is None or self._accepts(entry.score, base.score, own)):
            self._base = observation.placement

    def _accepts(self, new: Score, old: Score, own: bool) -> bool:
        """Return whether the base moves to the new placement.

        Args:
            new: Score of the new placement.
            old: Score of the base.
            own: Whether this searcher proposed the placement; any other must be better than the base.
        """
        if improves(new, old):
            return True
        if not own or new.violation > old.violation:
            return False
        progress = (self._evaluated % self._cycle) / self._cycle
        temperature = self._hottest * (self._coldest / self._hottest) ** progress
        loss = (new.objective - old.objective + math.hypot(new.stderr, old.stderr)) / abs(old.objective or 1.0)
        return bool(self._rng.random() < math.exp(-max(loss, 0.0) / temperature))

    def _propose(self) -> Placement | None:
        if self._is_new(self._base):
            return self._base
        return self._first_new(self._random_move, MAX_ATTEMPTS) or self._neighbour(self._base)

    def _random_move(self) -> Placement:
        if self._blocks and self._rng.random() < self._block:
            block = self._blocks[self._rng.integers(len(self._blocks))]
            return assign(self._base, block, int(self._rng.integers(max(self._space.sizes))), self._space)
        return flip(self._base, self._space, self._rng, int(self._rng.geometric(0.7)))
