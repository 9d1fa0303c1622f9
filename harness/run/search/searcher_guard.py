"""Fault isolation of a searcher: its first error ends its own search only.

Searchers get one thread for linear algebra. Their matrices are small, so more threads mostly wait for each other: with
two threads `auto` takes up to four times as much processor time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index

from threadpoolctl import ThreadpoolController

from harness.measure.records import Failed
from harness.workers.engines import as_outcome
from search.api import Observation, Searcher
from search.space import Placement, Space


class SearcherGuard:
    """Wrapper of a searcher that records its first exception; then it proposes nothing and ignores observations.

    A `UserError` and Ctrl-C are raised, because neither is a fault of the searcher.

    Args:
        searcher: Searcher, or the failure of its constructor.

    Attributes:
        failure: Exception of the searcher with the end of the traceback, or None.
        spent_s: Wall-clock seconds of `ask` and `tell` so far.
    """

    def __init__(self, searcher: Searcher | Failed, space: Space) -> None:
        self.failure = searcher if isinstance(searcher, Failed) else None
        self._searcher = searcher
        self._space = space
        self._libraries = ThreadpoolController()
        self.spent_s = 0.0

    def ask(self, n: int) -> Sequence[Placement]:
        """Return the searcher's proposals; invalid ones count as its failure."""
        searcher = self._searcher
        if self.failure is not None or isinstance(searcher, Failed):
            return []
        with self._catch_errors():
            found = as_outcome("search", lambda: _validate_proposals(searcher.ask(n), n, self._space))
        if isinstance(found, Failed):
            self.failure = found
            return []
        return found

    def tell(self, observation: Observation) -> None:
        searcher = self._searcher
        if self.failure is not None or isinstance(searcher, Failed):
            return
        with self._catch_errors():
            done = as_outcome("search", lambda: searcher.tell(observation))
        self.failure = done if isinstance(done, Failed) else None

    @contextmanager
    def _catch_errors(self) -> Iterator[None]:
        started_s = time.perf_counter()
        with self._libraries.limit(limits=1, user_api="blas"):
            yield
        self.spent_s += time.perf_counter() - started_s


def _validate_proposals(proposed: Sequence[Placement], n: int, space: Space) -> list[Placement]:
    """Return the proposals with Python integers as choices, because NumPy integers cannot be written as JSON.

    Raises:
        ValueError: Too many proposals, or one that is not valid for the space.
    """
    placements = [space.validate(Placement(tuple(map(index, placement.choices)))) for placement in proposed]
    if len(placements) > n:
        raise ValueError(f"ask({n}) gave {len(placements)} placements: more than were requested")
    return placements
