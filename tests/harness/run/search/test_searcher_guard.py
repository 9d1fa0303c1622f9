"""Resources of the machine that a searcher may take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from threadpoolctl import threadpool_info

from harness.run.search.loop import SearcherGuard
from search.api import Observation, Placement, Score
from search.synthetic_problem import synthetic_space


def threads() -> set[int]:
    """Of the libraries of linear algebra."""
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


class Counting:
    """Notes how many threads it may use while it multiplies."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def ask(self, n: int) -> Sequence[Placement]:
        np.ones((8, 8)) @ np.ones((8, 8))
        self.seen.append(threads())
        return []

    def tell(self, observation: Observation) -> None:
        self.seen.append(threads())


def test_searcher_guard_limits_threads_to_one_and_restores_them():
    space, searcher, before = synthetic_space(4, groups=1), Counting(), threads()
    placement = space.float_placement()
    guarded = SearcherGuard(searcher, space)
    guarded.ask(1)
    guarded.tell(Observation(placement=placement, digest=space.digest(placement), outcome=Score(objective=1.0)))
    assert searcher.seen == [{1}, {1}]
    assert threads() == before
