"""Which insertion points belong together: what a space's names, roles and edges say about the graph behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from search.space import Space

__all__ = ["followers", "stages"]


def followers(space: Space) -> Mapping[int, int]:
    """For each node input the next one in graph order, which most often reads what its node computes."""
    inputs = [index for index, dimension in enumerate(space.dimensions) if dimension.kind == "node_input"]
    return dict(pairwise(inputs))


def stages(space: Space) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Sets of dimensions to move together, coarse to fine, no set twice: across patterns, within them, points.

    Across patterns: a role, what follows a role, both, and the outputs. Within: a pattern, a role in it, what follows a
    role in it, both, and the inputs of one node.
    """
    after = followers(space)
    wide: dict[str, list[int]] = defaultdict(list)
    narrow: dict[tuple[str, str], list[int]] = defaultdict(list)
    nodes: dict[str, set[int]] = defaultdict(set)
    for index, dimension in enumerate(space.dimensions):
        follower = [after[index]] if index in after else []
        names = {
            dimension.role: [index],
            f"after {dimension.role}": follower,
            f"with {dimension.role}": [index, *follower],
        }
        for name, members in {**names, dimension.kind: [index]}.items():
            wide[name] += members
            narrow[dimension.group, name] += members
        narrow[dimension.group, ""].append(index)
        for edge in dimension.edges:
            nodes[edge.consumer].add(index)
    nodes.pop("", None)
    known: set[tuple[int, ...]] = set()
    points = [[index] for index in range(len(space))]
    return tuple(_new(sets, known, space) for sets in (wide.values(), (*narrow.values(), *nodes.values()), points))


def _new(sets: Iterable[Iterable[int]], known: set[tuple[int, ...]], space: Space) -> tuple[tuple[int, ...], ...]:
    unique = dict.fromkeys(tuple(sorted(set(members))) for members in sets)
    fresh = [members for members in unique if members and members not in known]
    known.update(fresh)
    return tuple(sorted(fresh, key=lambda members: -sum(space.dimensions[index].cost for index in members)))
