"""Subspaces with a searcher of their own, and searchers by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from search.api import Observation, Placement, Searcher, SearcherFactory, Space
from search.archive import Archive

ENTRY_POINT_GROUP = "qdq.searchers"
TRUST_VARIABLE = "QDQ_TRUST_PLUGINS"


def load_searcher(use: str) -> SearcherFactory:
    """Return the class or factory of an installed searcher, or of `package.module:Class` if plug-ins are trusted.

    An import runs code, so that `package.module:Class` needs the environment variable `QDQ_TRUST_PLUGINS=1`, which the
    option `--trust-plugins` of `qdq` sets.

    Raises:
        ValueError: No installed searcher has this name (the message lists those that are installed), plug-ins are not
            trusted, or `package.module:Class` is not a class with the methods `ask` and `tell`.
    """
    if ":" in use:
        if os.environ.get(TRUST_VARIABLE) != "1":
            raise ValueError(
                f"searcher {use!r} would run code of the module {use.partition(':')[0]}; if you trust it, give "
                f"--trust-plugins or set {TRUST_VARIABLE}=1"
            )
        made = EntryPoint(name=use, value=use, group=ENTRY_POINT_GROUP).load()
        if not inspect.isclass(made) or not all(callable(getattr(made, name, None)) for name in ("ask", "tell")):
            raise ValueError(f"searcher {use!r} is no class with ask() and tell()")
        return cast(SearcherFactory, made)
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if use not in points:
        raise ValueError(f"searcher is one of {', '.join(sorted(points))}, but got {use!r}")
    return cast(SearcherFactory, points[use].load())


def known_outcome(archive: Archive, placement: Placement, digest: str) -> Observation | None:
    """Return the observation that an archive has of a placement; None if it is unknown or still pending."""
    entry, failed = archive.get(digest), archive.failures.get(digest)
    if entry is not None:
        return Observation(placement=placement, digest=digest, outcome=entry.score)
    return None if failed is None else Observation(placement=placement, digest=digest, outcome=failed.outcome)


class SubspaceSearcher:
    """Search of some dimensions of a space while all others keep the values of a base placement.

    Args:
        space: The whole space.
        indices: Dimensions to search.
        base: Values of all other dimensions.
        make: Constructor of the inner searcher; called with the subspace.
    """

    def __init__(
        self, space: Space, indices: Sequence[int], base: Placement, make: Callable[[Space], Searcher]
    ) -> None:
        self._indices = tuple(indices)
        self._base = base
        self._inside = space.subspace(indices)
        self._searcher = make(self._inside)

    def ask(self, n: int) -> list[Placement]:
        """Return up to n proposals of the inner searcher as placements of the whole space."""
        return [self._extend(proposal.choices) for proposal in self._searcher.ask(n)]

    def tell(self, observation: Observation) -> None:
        """Tell the inner searcher an outcome, unless the placement differs from the base outside the subspace."""
        inside = self._restrict(observation.placement)
        if self._extend(inside) == observation.placement:
            part = Placement(inside)
            self._searcher.tell(
                Observation(placement=part, digest=self._inside.digest(part), outcome=observation.outcome)
            )

    def embed(self, placement: Placement) -> Placement:
        """Return the base placement with the dimensions of the subspace as in another placement."""
        return self._extend(self._restrict(placement))

    def _restrict(self, placement: Placement) -> tuple[int, ...]:
        return tuple(placement.choices[index] for index in self._indices)

    def _extend(self, inside: Sequence[int]) -> Placement:
        choices = list(self._base.choices)
        for index, choice in zip(self._indices, inside, strict=True):
            choices[index] = choice
        return Placement(tuple(choices))
