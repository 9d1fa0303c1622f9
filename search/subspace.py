"""Subspaces with a searcher of their own, and searchers by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from search.api import Observation, Placement, Searcher, SearcherFactory, Space
from search.archive import Archive

__all__ = ["SubspaceSearcher", "known_outcome", "load_searcher"]

ENTRY_POINT_GROUP = "qdq.searchers"


def load_searcher(use: str) -> SearcherFactory:
    """The class or factory of an installed searcher, or of `package.module:Class`.

    Raises:
        ValueError: No searcher is called so; the text lists those that are.
    """
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if ":" in use:
        points[use] = EntryPoint(name=use, value=use, group=ENTRY_POINT_GROUP)
    if use not in points:
        raise ValueError(f"searcher is one of {', '.join(sorted(points))}, but got {use!r}")
    made: SearcherFactory = points[use].load()
    return made


def known_outcome(archive: Archive, placement: Placement, digest: str) -> Observation | None:
    """What became of a placement as far as it is known, to be told to a searcher that asks for it anew."""
    entry, failed = archive.get(digest), archive.failures.get(digest)
    if entry is not None:
        return Observation(placement=placement, digest=digest, outcome=entry.score)
    return None if failed is None else Observation(placement=placement, digest=digest, outcome=failed.outcome)


class SubspaceSearcher:
    """Some dimensions of a space, searched on their own while all others stay as they are.

    Args:
        space: The whole space.
        indices: The dimensions of this part.
        base: What all others stay like.
        make: Makes the searcher of this part from its space.
    """

    def __init__(
        self, space: Space, indices: Sequence[int], base: Placement, make: Callable[[Space], Searcher]
    ) -> None:
        self._indices = tuple(indices)
        self._base = base
        self._inside = Space(tuple(space.dimensions[index] for index in indices))
        self._searcher = make(self._inside)

    def ask(self, n: int) -> list[Placement]:
        """What the searcher of this part proposes, as placements of the whole space."""
        return [self._extend(proposal.choices) for proposal in self._searcher.ask(n)]

    def tell(self, observation: Observation) -> None:
        """Tell the searcher of this part, unless something differs outside: then it would learn the wrong thing."""
        inside = self._restrict(observation.placement)
        if self._extend(inside) == observation.placement:
            part = Placement(inside)
            self._searcher.tell(
                Observation(placement=part, digest=self._inside.digest(part), outcome=observation.outcome)
            )

    def embed(self, placement: Placement) -> Placement:
        """The base with this part as in another placement."""
        return self._extend(self._restrict(placement))

    def _restrict(self, placement: Placement) -> tuple[int, ...]:
        return tuple(placement.choices[index] for index in self._indices)

    def _extend(self, inside: Sequence[int]) -> Placement:
        choices = list(self._base.choices)
        for index, choice in zip(self._indices, inside, strict=True):
            choices[index] = choice
        return Placement(tuple(choices))
