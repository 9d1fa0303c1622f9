"""Several searchers share one budget; a bandit gives turns to those whose proposals improve the best.

The area-under-the-curve credit of OpenTuner (Ansel et al. 2014, section 4.2; Fialho et al. 2010, "Analyzing
bandit-based adaptive operator selection mechanisms") with the upper confidence bound of Auer et al. 2002.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from search.api import Observation, Placement, Score, Searcher, Space, check_range
from search.archive import Archive, improves
from search.subspace import known_outcome, load_searcher

__all__ = ["PortfolioSearcher"]

DEFAULT_MEMBERS = ("surrogate", "local", "evolutionary")


class PortfolioSearcher:
    """Run several searchers and give most evaluations to those that improved the best placement lately.

    A member's credit is the share of its last turns that improved the best, later ones counting more, plus a bonus for
    members that had few turns. Ties go to the member that is named first. What a member proposes although it is known
    already is answered from memory, three times; then the turn passes on, as it does when a member has nothing left.

    Args:
        space: What to search.
        seed: Fixes all draws; the member at position i gets seed + i.
        members: Searchers by name (or `package.module:Class`), without repeats.
        params: For members by name: their parameters.
        window: Turns that the credit looks back on.
        exploration: Weight of the bonus for members that had few of these turns.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        members: Sequence[str] = DEFAULT_MEMBERS,
        params: Mapping[str, Mapping[str, Any]] | None = None,
        window: int = 50,
        exploration: float = 0.1,
    ) -> None:
        check_range("window", window, 1)
        check_range("exploration", exploration, 0)
        if isinstance(members, str) or not members or len(set(members)) != len(members):
            raise ValueError(f"members is a list of different searchers, but got {members!r}")
        settings = dict(params or {})
        if unknown := sorted(settings.keys() - set(members)):
            raise ValueError(f"params is for members ({', '.join(members)}), but got {', '.join(unknown)}")
        self._space = space
        self._members: dict[str, Searcher] = {
            name: load_searcher(name)(space, seed=seed + number, **settings.get(name, {}))
            for number, name in enumerate(members)
        }
        self._exploration = exploration
        self._archive = Archive()
        self._turns: deque[tuple[str, bool]] = deque(maxlen=window)
        self._asked_by: dict[str, str] = {}
        self._best: Score | None = None

    def ask(self, n: int) -> Sequence[Placement]:
        return self._archive.ask(n, self._propose, self._space)

    def tell(self, observation: Observation) -> None:
        self._archive.tell(observation)
        for member in self._members.values():
            member.tell(observation)
        gained = self._update_best()
        if (name := self._asked_by.pop(observation.digest, None)) is not None:
            self._turns.append((name, gained))

    def _update_best(self) -> bool:
        """Whether the best is now better than it was by more than the noise; a tie does not become the best."""
        now = next((entry.score for entry in self._archive.incumbents(1)), None)
        before, self._best = self._best, now
        return now is not None and before is not None and improves(now, before)

    def _propose(self) -> Placement | None:
        for name in sorted(self._members, key=lambda name: -self._credit(name)):
            for _ in range(3):
                for placement in self._members[name].ask(1):
                    digest = self._space.digest(placement)
                    if digest not in self._archive:
                        self._asked_by[digest] = name
                        return placement
                    self._tell_known(name, placement, digest)
        return None

    def _tell_known(self, name: str, placement: Placement, digest: str) -> None:
        if (known := known_outcome(self._archive, placement, digest)) is not None:
            self._members[name].tell(known)

    def _credit(self, name: str) -> float:
        mine = [gained for turn, gained in self._turns if turn == name]
        waiting = sum(asker == name for asker in self._asked_by.values())
        count = len(mine) + waiting
        if not count:
            return math.inf
        later_counts_more = sum(position * gained for position, gained in enumerate(mine, start=1))
        share = 2 * later_counts_more / (len(mine) * (len(mine) + 1)) if mine else 0.0
        turns = len(self._turns) + len(self._asked_by)
        return round(share + self._exploration * math.sqrt(2 * math.log(turns) / count), 12)
