"""Moves between placements: functions of a placement, its space and a random generator.

A dimension is quantized if its choice is not 0 ("float"). No function modifies a placement or a space.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

import numpy as np

from search.space import Placement, PointKind, Space


def assign(placement: Placement, indices: Iterable[int], choice: int, space: Space) -> Placement:
    """Return a copy of a placement with one choice at all `indices`, or a dimension's last choice if it has fewer."""
    choices = list(placement.choices)
    for index in indices:
        choices[index] = choice if choice < 2 else min(choice, space.sizes[index] - 1)  # at least two choices exist
    return Placement(tuple(choices))


def random_with_density(space: Space, rng: np.random.Generator, density: float) -> Placement:
    """Return a placement that quantizes each dimension with probability `density`, in a precision drawn uniformly."""
    choices = [0] * len(space)
    for index in np.flatnonzero(rng.random(len(space)) < density):
        size = space.sizes[index]
        choices[index] = 1 if size == 2 else int(rng.integers(1, size))  # no draw if there is one precision: faster
    return Placement(tuple(choices))


def flip(placement: Placement, space: Space, rng: np.random.Generator, count: int = 1) -> Placement:
    """Return a copy with another choice in `count` dimensions, drawn uniformly, or in all if there are fewer."""
    return _change_choices(placement, space, rng, rng.permutation(len(space))[:count])


def mutate_rate(placement: Placement, space: Space, rng: np.random.Generator, rate: float) -> Placement:
    """Return a copy in which each dimension has another choice with probability `rate`, and at least one has.

    A placement without dimensions is returned unchanged.
    """
    hit = np.flatnonzero(rng.random(len(space)) < rate)
    if not len(space):
        return placement
    return _change_choices(placement, space, rng, hit if len(hit) else rng.integers(len(space), size=1))


def mutate_per_kind(
    placement: Placement,
    space: Space,
    rng: np.random.Generator,
    maximum: int = 3,
    within: Collection[int] | None = None,
) -> Placement:
    """Return a copy in which one to `maximum` points of each kind were quantized, made float, or both.

    The mutation of ModelOpt's autotune (user guide "Autotune (ONNX)", 0.47): for each of node inputs, child region
    inputs and outputs, one of the three modes is drawn with equal probability; "both" adds first. An added point takes
    one of its precisions, drawn uniformly.

    Args:
        placement: The parent.
        space: Its space.
        rng: Source of all draws.
        maximum: Largest number of additions, and of removals, for one kind.
        within: Indices of the dimensions that may change; None: all.
    """
    choices = list(placement.choices)
    allowed = range(len(space)) if within is None else sorted(within)
    kinds: tuple[PointKind, ...] = ("node_input", "child_input", "output")
    for kind in kinds:
        points = [index for index in allowed if space.dimensions[index].kind == kind]
        if not points:
            continue
        mode = rng.integers(3)
        if mode != 1:
            for index in _sample_some(rng, [i for i in points if not choices[i]], maximum):
                choices[index] = int(rng.integers(1, space.sizes[index]))
        if mode != 0:
            for index in _sample_some(rng, [i for i in points if choices[i]], maximum):
                choices[index] = 0
    return Placement(tuple(choices))


def crossover_by_group(first: Placement, second: Placement, space: Space, rng: np.random.Generator) -> Placement:
    """Return a child that takes the whole scheme of each pattern from either parent with equal probability."""
    choices = list(first.choices)
    for indices in space.groups.values():
        if rng.random() < 0.5:
            for index in indices:
                choices[index] = second.choices[index]
    return Placement(tuple(choices))


def dimension_blocks(space: Space) -> tuple[tuple[int, ...], ...]:
    """Return sets of dimensions to change together: each role, each pattern, each role within a pattern.

    Sets of one dimension and repeated sets are left out; sets with a larger share of the model's cost come first.
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, dimension in enumerate(space.dimensions):
        for key in ((dimension.role, ""), ("", dimension.group), (dimension.role, dimension.group)):
            found[key].append(index)
    return _sort_new_sets((indices for indices in found.values() if len(indices) > 1), set(), space)


def _sample_some(rng: np.random.Generator, candidates: list[int], maximum: int) -> list[int]:
    if not candidates:
        return []
    count = rng.integers(1, min(maximum, len(candidates)) + 1)
    return [int(index) for index in rng.choice(candidates, size=count, replace=False)]


def _change_choices(
    placement: Placement, space: Space, rng: np.random.Generator, indices: Iterable[np.integer | int]
) -> Placement:
    choices = list(placement.choices)
    for index in indices:
        other = int(rng.integers(space.sizes[index] - 1))
        choices[index] = other + (other >= choices[index])
    return Placement(tuple(choices))


def next_inputs(space: Space) -> Mapping[int, int]:
    """Map the index of each node input to that of the first input of the next node in graph order.

    The next node usually reads the result of the first. Inputs of the last node are absent.
    """
    inputs = [index for index, dimension in enumerate(space.dimensions) if dimension.kind == "node_input"]
    consumers = {index: {edge.consumer for edge in space.dimensions[index].edges} - {""} for index in inputs}
    found: dict[int, int] = {}
    for index, after in reversed([*pairwise(inputs)]):
        same = consumers[index] & consumers[after]
        if not same:
            found[index] = after
        elif after in found:  # another input of the same node, so both have the same successor
            found[index] = found[after]
    return dict(reversed(found.items()))


def result_readers(space: Space) -> Mapping[int, tuple[int, ...]]:
    """Map the index of each node input to the points that read its node's result, as far as graph order tells.

    These are the next input (`next_inputs`) and all points on the same tensors.
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
    """Return each dimension's index as a set of its own; larger shares of the model's cost come first."""
    return _sort_new_sets(([index] for index in range(len(space))), set(), space)


def move_sets(space: Space) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return three lists of sets of dimensions to change together, from coarse to fine.

    1. Across patterns: a role, the readers of its results, both, and all points of one kind.
    2. Within a pattern: all its points, and the sets of list 1 limited to it; also the inputs of one node.
    3. Single points.

    No set is repeated; within a list, sets with a larger share of the model's cost come first.
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
