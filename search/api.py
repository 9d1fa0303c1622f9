"""The contract between the harness and a searcher; the only module that a searcher's author needs.

Promises of a searcher (`search.testing` tests each one, as far as asks and tells show it):

1. `ask(n)` returns at most n placements, all valid for the space and all of different digests, and none
   that was asked before and still waits for its outcome: parallel workers never build one graph twice.
   None means: nothing left to propose or, while outcomes are awaited, nothing until one of them is told.
2. `ask` after the same tells gives the same placements, bit for bit, for the same seed, in any process.
3. `tell` takes placements that were never asked (the common seeds, replayed runs), failures, and the
   same placement more than once (a re-measured incumbent).
4. `tell` changes nothing that it is given, and neither method touches files, clocks or global state.
5. Smaller `Score.objective` is better; among scores with a violation the smaller violation is better,
   and any score without one beats any score with one. A placement told again has the pooled score
   (`search.archive.Archive`).

One more is for those that go on from an incumbent; of ours `local`, `sensitivity_greedy`, `evolutionary` and
`per_pattern`, with one of these inside, give it:

6. A difference within the standard errors is a tie, and a tie displaces nothing: the asks are those that equal
   readings would lead to (`search.archive.Archive.incumbents`, `search.archive.improves`).

The others: `random` and `exhaustive` go by no reading. `annealing` begins each cycle from such an incumbent, but
its walk may go to a tie, as it may to a loss. `nsga2` lets a tie dominate nothing, but of those that tie the fastest
and the slowest reading breed first. `portfolio` gives no credit for a tie; the rest is up to its members.
`random_mutation` goes by the lowest reading, as ModelOpt does; `tpe` and `optuna` by the readings as they are; `auto`
and `surrogate` make candidates from the lowest readings, and choose by what their model makes of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from search.space import FLOAT, Dimension, Edge, Placement, Resolved, Space

__all__ = [
    "CONTRACT", "FLOAT", "Dimension", "Edge", "Failure", "Observation", "Placement", "Resolved", "Score", "Searcher",
    "SearcherFactory", "Space", "check_range",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a placement was worth.

    Attributes:
        objective: To be minimised; a latency in milliseconds unless the experiment says otherwise.
        stderr: Standard error of the objective, in its unit; 0 where unknown.
        violation: By how much a constraint is broken, in the constraint's unit; 0 where it holds.
        assumed: Nobody looked whether the constraint holds, because the placement is no faster than the
            incumbent and so cannot win; `violation` is 0 then, and it ranks behind all that are known to hold it.
        metrics: Further figures by name (accuracy, fidelity), for searchers that use them.
        objectives: All that a search for a Pareto front minimises at once, `objective` first; as many and in
            the same order in every score of a run. Empty: `objective` alone counts.
    """

    objective: float
    stderr: float = 0.0
    violation: float = 0.0
    assumed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    objectives: tuple[float, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """What is minimised: `objectives`, or `objective` alone where there are none."""
        return self.objectives or (self.objective,)

    @property
    def rank(self) -> tuple[float, bool, float]:
        """Sort key, smaller is better: feasible first, what is only assumed to be behind it, then by objective."""
        return (self.violation, self.assumed, self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A placement that could not be built or measured."""

    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What became of one placement."""

    placement: Placement
    digest: str
    outcome: Score | Failure


@runtime_checkable
class Searcher(Protocol):
    """Proposes placements and learns from what became of them. See the module's promises."""

    def ask(self, n: int) -> Sequence[Placement]:
        """Up to n placements to evaluate next; empty when the searcher has nothing left."""
        ...

    def tell(self, observation: Observation) -> None:
        """Learn the outcome of one placement."""
        ...


CONTRACT = ("ask(n)", "tell(observation)")
"""What a searcher is asked for."""


class SearcherFactory(Protocol):
    """What an entry point of the group `qdq.searchers` names: a class or a function."""

    def __call__(self, space: Space, *, seed: int, **params: object) -> Searcher: ...


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse a searcher's parameter outside low to high, both allowed.

    Raises:
        ValueError: "NAME is LOW to HIGH, but got VALUE".
    """
    if not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{name} is {allowed}, but got {value}")
