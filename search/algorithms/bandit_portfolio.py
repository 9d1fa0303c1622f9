"""Portfolio of searchers that share one budget; a bandit prefers those that improve the incumbent.

The credit is the area under the curve of OpenTuner (Ansel et al. 2014, section 4.2; Fialho et al. 2010, "Analyzing
bandit-based adaptive operator selection mechanisms") with the upper confidence bound of Auer et al. 2002.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from search.api import Observation, Placement, Score, Searcher, Space, check_range
from search.archive import ArchiveSearcher, improves
from search.subspace import known_outcome, load_searcher

DEFAULT_MEMBERS = ("surrogate", "local", "evolutionary")


class PortfolioSearcher(ArchiveSearcher):
    """Searcher that gives most evaluations to those of several searchers that improved the incumbent recently.

    A member's credit is the share of its recent turns that improved the incumbent, later turns weighted more, plus a
    bonus for members with few turns. Ties go to the member listed first. A member that proposes a known placement
    receives the known outcome, up to three times; then the turn passes to the next member, as it does if a member has
    no proposal.

    Args:
        space: Space to search.
        seed: Seed of all draws; the member at position i gets seed + i.
        members: Searchers by name (or `package.module:Class`), without repeats.
        params: Parameters of members, by member name.
        window: Number of turns that the credit covers.
        exploration: Weight of the bonus for members with few of these turns.
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
        super().__init__(space, seed)
        self._members: dict[str, Searcher] = {
            name: load_searcher(name)(space, seed=seed + number, **settings.get(name, {}))
            for number, name in enumerate(members)
        }
        self._exploration = exploration
        self._turns: deque[tuple[str, bool]] = deque(maxlen=window)
        self._asked_by: dict[str, str] = {}
        self._best: Score | None = None

    def tell(self, observation: Observation) -> None:
        self._archive.tell(observation)
        for member in self._members.values():
            member.tell(observation)
        before, self._best = self._best, next((entry.score for entry in self._archive.incumbents(1)), None)
        if (name := self._asked_by.pop(observation.digest, None)) is not None:
            gained = self._best is not None and before is not None and improves(self._best, before)
            self._turns.append((name, gained))

    def _propose(self) -> Placement | None:
        for name in sorted(self._members, key=lambda name: -self._credit(name)):
            for _ in range(3):
                for placement in self._members[name].ask(1):
                    digest = self._space.digest(placement)
                    if digest not in self._archive:
                        self._asked_by[digest] = name
                        return placement
                    if (known := known_outcome(self._archive, placement, digest)) is not None:
                        self._members[name].tell(known)
        return None

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
