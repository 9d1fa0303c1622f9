"""Groups of insertion points that are moved together, from a space's names, roles and edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from search.space import Space

__all__ = ["move_sets", "next_inputs", "result_readers", "singletons"]


def next_inputs(space: Space) -> Mapping[int, int]:
    """Map each node input to the next one of another node in graph order, which usually reads that node's result."""
    inputs = [index for index, dimension in enumerate(space.dimensions) if dimension.kind == "node_input"]
    consumers = {index: {edge.consumer for edge in space.dimensions[index].edges} - {""} for index in inputs}
    found: dict[int, int] = {}
    for index, after in reversed([*pairwise(inputs)]):
        same = consumers[index] & consumers[after]
        if not same:
            found[index] = after
        elif after in found:  # another input of the same node: what follows that follows this
            found[index] = found[after]
    return dict(reversed(found.items()))


def result_readers(space: Space) -> Mapping[int, tuple[int, ...]]:
    """Map each node input to the points that read its node's result: the next input and all points that share its
    tensors.
    """
    sharing: dict[str, set[int]] = defaultdict(set)
    for index, dimension in enumerate(space.dimensions):
        for edge in dimension.edges:
            sharing[edge.tensor].add(index)
    return {
        index: tuple(sorted(set().union(*(sharing[edge.tensor] for edge in space.dimensions[after].edges))))
        for index, after in next_inputs(space).items()
    }


def singletons(space: Space) -> tuple[tuple[int, ...], ...]:
    """Return each dimension as a set of its own, larger shares of the model's cost first."""
    return _sort_new_sets(([index] for index in range(len(space))), set(), space)


def move_sets(space: Space) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return sets of dimensions to move together, coarse to fine, without repeats: across patterns, within them,
    points.

    Across patterns: a role, the readers of its results, both, and the outputs. Within patterns: a pattern, a role in
    it, the
    readers of its results, both, and the inputs of one node. The points are the dimensions that are not such a set
    already.
    """
    after = result_readers(space)
    wide: dict[str, list[int]] = defaultdict(list)
    narrow: dict[tuple[str, str], list[int]] = defaultdict(list)
    nodes: dict[str, set[int]] = defaultdict(set)
    for index, dimension in enumerate(space.dimensions):
        names = {
            dimension.role: [index],
            f"after {dimension.role}": after.get(index, ()),
            f"with {dimension.role}": (index, *after.get(index, ())),
        }
        for name, members in {**names, dimension.kind: [index]}.items():
            wide[name].extend(members)
            narrow[dimension.group, name].extend(members)
        narrow[dimension.group, ""].append(index)
        for edge in dimension.edges:
            nodes[edge.consumer].add(index)
    nodes.pop("", None)
    known: set[tuple[int, ...]] = set()
    single = [[index] for index in range(len(space))]
    return tuple(
        _sort_new_sets(sets, known, space) for sets in (wide.values(), (*narrow.values(), *nodes.values()), single)
    )


def _sort_new_sets(
    sets: Iterable[Iterable[int]], known: set[tuple[int, ...]], space: Space
) -> tuple[tuple[int, ...], ...]:
    unique = dict.fromkeys(tuple(sorted(set(members))) for members in sets)
    fresh = [members for members in unique if members and members not in known]
    known.update(fresh)
    return tuple(sorted(fresh, key=lambda members: -sum(space.dimensions[index].cost for index in members)))
