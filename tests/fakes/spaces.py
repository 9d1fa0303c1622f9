"""Spaces without overlapping edges, searchers by name, and outcomes for tests of searchers."""

from search.api import Dimension, Edge, Failure, Observation, Score, Space
from search.subspace import load_searcher


def make(name, space, seed=0, **params):
    return load_searcher(name)(space, seed=seed, **params)


def outcome(space, placement, result):
    return Observation(placement=placement, digest=space.digest(placement), outcome=result)


def scored(space, placement, objective, **facts):
    return outcome(space, placement, Score(objective=objective, **facts))


def failed(space, placement):
    return outcome(space, placement, Failure(stage="build", reason="no"))


def plain_space(count, group=lambda i: "g", kind=lambda i: "node_input", role=lambda i: "other", cost=None):
    return Space(tuple(
        Dimension(
            name=f"d{i}", group=group(i), kind=kind(i), choices=("float", "int8"), role=role(i),
            edges=(Edge(f"t{i}", f"n{i}", 0),), cost=cost or 1 / (i + 1),
        )
        for i in range(count)
    ))  # fmt: skip


def distance(first, second):
    return sum(a != b for a, b in zip(first.choices, second.choices, strict=True))
