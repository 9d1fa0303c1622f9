"""Synthetic problem: a space and a latency function on it whose optimum is known exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from search.api import Dimension, Edge, Observation, Placement, Score, Searcher, Space

ROLES = ("linear", "linear", "linear", "add", "activation", "movement", "pool", "concat")


def synthetic_space(
    dimensions: int = 40, *, groups: int = 8, precisions: Sequence[str] = ("int8",), seed: int = 0
) -> Space:
    """Return a random space with the traits of real ones: roles, costs, all three kinds of points, shared edges.

    Args:
        dimensions: Number of insertion points.
        groups: Number of patterns; each occurs in one to three regions.
        precisions: Choices of a point other than "float".
        seed: Seed of the space.
    """
    rng = np.random.default_rng(seed)
    regions = rng.integers(1, 4, size=groups)
    kinds = rng.choice(["node_input", "node_input", "node_input", "child_input", "output"], size=dimensions)
    roles = np.where(kinds == "node_input", rng.choice(ROLES, size=dimensions), "other")
    work = np.where(roles == "linear", rng.uniform(0.2, 1.0, size=dimensions), 0.0)
    cost = work / max(work.sum(), 1e-9)
    made: list[Dimension] = []
    for index in range(dimensions):
        group = f"p{index * groups // dimensions}"
        edges = tuple(Edge(f"t{index}.{r}", f"n{index}.{r}", 0) for r in range(regions[index * groups // dimensions]))
        if kinds[index] == "child_input" and made and made[-1].group == group:
            edges = made[-1].edges
        made.append(
            Dimension(
                name=f"{group}/{kinds[index]}/{index}",
                group=group,
                kind=kinds[index],
                choices=("float", *precisions),
                edges=edges,
                role=str(roles[index]),
                cost=float(cost[index]),
            )
        )
    return Space(tuple(made))


def common_initial_placements(space: Space) -> tuple[Placement, ...]:
    """Return the placements that every experiment evaluates first: float, all points, linear operators only."""
    return space.float_placement(), space.quantize_all(), space.quantize_roles({"linear"})


class SyntheticObjective:
    """Synthetic latency with a known optimum, from effects of points and of successive pairs on its logarithm.

    The latency depends on the resolved edges only, as a real one does. Quantizing a linear point saves time in
    proportion to its cost, and every point has a small random effect in addition. Two successive dimensions have a
    random pair effect if both are quantized, as with operators that fuse or tensors that are reformatted.

    Args:
        space: From `synthetic_space`; patterns of at most 12 dimensions that share no edges.
        seed: Seed of the effects and of the noise.
        noise: Standard deviation of one measurement, relative to the latency.
        coupling: Factor of the pair effects.
    """

    def __init__(self, space: Space, *, seed: int, noise: float = 0.01, coupling: float = 1.0) -> None:
        rng = np.random.default_rng([seed, 1])
        self._space = space
        self._noise = noise
        self._rng = np.random.default_rng([seed, 2])
        gain = np.array([-d.cost for d in space.dimensions])
        self._points = gain[:, None] + rng.normal(0.0, 0.02, size=(len(space), max(space.sizes, default=1)))
        self._pairs = coupling * rng.normal(-0.005, 0.03, size=max(len(space) - 1, 0))

    def latency_ms(self, placement: Placement) -> float:
        """Return the latency of a placement in ms without noise."""
        edges = dict(self._space.resolve(placement))
        shares = np.zeros_like(self._points)
        for index, dimension in enumerate(self._space.dimensions):
            for edge in dimension.edges:
                if edge in edges:
                    shares[index, dimension.choices.index(edges[edge])] += 1 / len(dimension.edges)
        on = shares.sum(axis=1)
        return float(10.0 * math.exp((self._points * shares).sum() + (self._pairs * on[:-1] * on[1:]).sum()))

    def observe(self, placement: Placement) -> Observation:
        """Return a measurement with noise as an observation."""
        latency_ms = self.latency_ms(placement)
        measured_ms = latency_ms * math.exp(self._noise * self._rng.normal())
        score = Score(objective=measured_ms, stderr=self._noise * latency_ms)
        return Observation(placement=placement, digest=self._space.digest(placement), outcome=score)

    @cached_property
    def optimum(self) -> Placement:
        """Return the exact best placement, by dynamic programming over the patterns.

        A pattern affects the following ones only by whether its last point is quantized. So all choices of a pattern
        are enumerated, and for each of the two cases the best placement of the patterns so far is kept.
        """
        best = {False: self._space.float_placement()}
        for members in self._space.groups.values():
            options = list(itertools.product(*(range(self._space.sizes[index]) for index in members)))
            longer: dict[bool, Placement] = {}
            for start, option in itertools.product(best.values(), options):
                choices = list(start.choices)
                for index, choice in zip(members, option, strict=True):
                    choices[index] = choice
                placement = Placement(tuple(choices))
                quantized = dict(self._space.resolve(placement))
                last = any(edge in quantized for edge in self._space.dimensions[members[-1]].edges)
                if last not in longer or self.latency_ms(placement) < self.latency_ms(longer[last]):
                    longer[last] = placement
            best = longer
        return min(best.values(), key=self.latency_ms)

    def regret(self, placement: Placement) -> float:
        """Return the noise-free latency relative to the optimum, minus 1: 0.1 is 10 % slower."""
        return self.latency_ms(placement) / self.latency_ms(self.optimum) - 1.0


def run_search_loop(
    searcher: Searcher,
    objective: SyntheticObjective,
    evaluations: int,
    *,
    batch: int = 1,
    initial: Sequence[Placement] = (),
) -> list[Observation]:
    """Evaluate the initial placements, then ask and tell until `evaluations` placements are known.

    A proposal that is known gets its earlier outcome and does not count, as in the harness. The loop also ends if the
    searcher proposes nothing, or 200 known placements in a row.

    Returns:
        The first observation of each placement, in order.
    """
    known: dict[str, Observation] = {}
    for placement in initial:
        observation = objective.observe(placement)
        searcher.tell(known.setdefault(observation.digest, observation))
    duplicates = 0
    while len(known) < evaluations and duplicates < 200:
        asked = searcher.ask(min(batch, evaluations - len(known)))
        if not asked:
            break
        for observation in [objective.observe(placement) for placement in asked]:
            duplicates = duplicates + 1 if observation.digest in known else 0
            searcher.tell(known.setdefault(observation.digest, observation))
    return list(known.values())
