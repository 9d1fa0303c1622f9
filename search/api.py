"""Contract between the harness and a searcher; the only module that the author of a searcher needs.

Guarantees of a searcher (`search.testing` tests each one, as far as `ask` and `tell` show it):

1. `ask(n)` returns at most n placements, all valid for the space, all of different digests, and none that is still
   pending: parallel workers never build one model twice. An empty result means that nothing is left to propose or,
   while outcomes are pending, that nothing can be proposed before one of them arrives. A space may have no dimensions;
   then it has one placement.
2. `ask` after the same observations gives the same placements, bit for bit, for the same seed, in any process.
3. `tell` accepts placements that were never proposed (initial placements, replayed runs), failures, and the same
   placement more than once (a re-measured incumbent).
4. `tell` does not modify its argument, and neither method touches files, clocks or global state.
5. A smaller `Score.objective` is better; among violating scores the smaller violation is better, and any feasible score
   beats any violating one. Repeated scores of a placement are pooled (`search.archive.Archive`).

Searchers that continue from an incumbent give one more guarantee: `local`, `sensitivity_greedy`, `evolutionary`, and
`per_pattern` with one of these inside:

6. A difference within the standard errors is a tie, and a tie displaces nothing: the proposals are those that equal
   readings would lead to (`search.archive.Archive.incumbents`, `search.archive.improves`).

The others: `random` and `exhaustive` ignore the scores. `annealing` begins each cycle from such an incumbent, but may
move to a tie as it may to a slower placement. In `nsga2` no placement dominates a tie, but among ties those with the
lowest and the highest latency become parents first. `portfolio` gives no credit for a tie; its members decide the rest.
`random_mutation` uses the lowest latency, as ModelOpt does; `tpe` and `optuna` use the latencies unchanged; `auto` and
`surrogate` make candidates from the placements with the lowest latencies and choose by a model of all scores.
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
    """Result of a measured placement.

    Attributes:
        objective: Value to minimize; a latency in milliseconds unless the experiment sets another objective.
        stderr: Standard error of the objective, in its unit; 0 if unknown.
        violation: Amount by which a constraint is broken, in the constraint's unit; 0 if it holds.
        assumed: Whether the constraint was not checked, because the placement is no faster than the incumbent and
            cannot win. `violation` is 0 then, and the score ranks after all scores that are known to satisfy the
            constraint.
        metrics: Further values by name (accuracy, fidelity), for searchers that use them.
        objectives: All values that a search for a Pareto front minimizes, `objective` first; same length and order in
            every score of a run. Empty: only `objective` counts.
    """

    objective: float
    stderr: float = 0.0
    violation: float = 0.0
    assumed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    objectives: tuple[float, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """Return the values to minimize: `objectives`, or `objective` alone if it is empty."""
        return self.objectives or (self.objective,)

    @property
    def rank(self) -> tuple[float, bool, float]:
        """Return the sort key, smaller is better: feasible first, then assumed feasible, then by objective."""
        return (self.violation, self.assumed, self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure to build or measure a placement.

    Attributes:
        stage: Step that failed, for instance "build".
        reason: Message of the error.
    """

    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Outcome of one placement, whose `digest` is `Space.digest(placement)`."""

    placement: Placement
    digest: str
    outcome: Score | Failure


@runtime_checkable
class Searcher(Protocol):
    """Search algorithm: proposes placements and learns from their outcomes, with the guarantees of this module.

    An exception in a method, or a placement that is not valid for the space, ends only this search.
    """

    def ask(self, n: int) -> Sequence[Placement]:
        """Return up to n placements to evaluate next; empty if there is none, or none until an outcome arrives."""
        ...

    def tell(self, observation: Observation) -> None:
        """Receive the outcome of one placement, a `Score` or a `Failure`, also of one that `ask` did not return."""
        ...


CONTRACT = ("ask(n)", "tell(observation)")
"""Methods of a searcher, for error messages."""


class SearcherFactory(Protocol):
    """Class or function that an entry point of the group `qdq.searchers` names.

    Its parameters after `seed` are those of an experiment; it raises `ValueError` if one is invalid.
    """

    def __call__(self, space: Space, *, seed: int, **params: object) -> Searcher: ...


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise an error for a searcher's parameter below `low` or above `high`, or for NaN.

    Raises:
        ValueError: "NAME is LOW to HIGH, but got VALUE".
    """
    if not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{name} is {allowed}, but got {value}")
