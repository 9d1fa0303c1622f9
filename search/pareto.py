"""Pareto fronts of points; all coordinates are minimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Values = npt.NDArray[np.float64]


def front_numbers(values: Values, noise: Values | None = None) -> npt.NDArray[np.int64]:
    """Return each point's front number, shape (points,): 0 if no other dominates it, 1 if only front 0 does, and so on.

    One point dominates another if no coordinate is larger and at least one is smaller (Deb et al. 2002, "A fast and
    elitist multiobjective genetic algorithm: NSGA-II", section III A); the first coordinate counts as smaller only if
    the difference exceeds the noise. All pairs are compared.

    Args:
        values: Shape (points, coordinates).
        noise: Standard error of each point's first coordinate, shape (points,); None: 0.
    """
    first, second = values[:, None, :], values[None, :, :]
    smaller = first < second
    if values.shape[1]:
        error = np.zeros(len(values)) if noise is None else noise
        smaller[..., 0] = second[..., 0] - first[..., 0] > np.hypot(error[:, None], error[None, :])
    dominates = np.asarray((first <= second).all(axis=2) & smaller.any(axis=2))
    front = np.full(len(values), -1)
    above = dominates.sum(axis=0)  # how many points without a front dominate each
    number = 0
    while (front < 0).any():
        here = (front < 0) & (above == 0)
        front[here] = number
        above -= dominates[here].sum(axis=0)
        number += 1
    return front


def insert_nondominated(front: list[T], new: T, values: Callable[[T], Sequence[float]]) -> bool:
    """Add an entry to a front unless one dominates it, and remove the entries that it dominates.

    Args:
        front: Entries of which none dominates another; changed in place.
        new: Entry to add.
        values: Function that returns the coordinates of an entry.

    Returns:
        Whether the entry was added.
    """
    if any(dominates(values(known), values(new)) for known in front):
        return False
    front[:] = [*(known for known in front if not dominates(values(new), values(known))), new]
    return True


def dominates(one: Sequence[float], other: Sequence[float], noise: float = 0.0) -> bool:
    """Return whether a point has no coordinate larger than another point and at least one smaller.

    Args:
        one: Coordinates of the point.
        other: Coordinates of the other point.
        noise: Largest difference of the first coordinates that counts as equal.
    """
    pairs = list(zip(one, other, strict=True))
    first = other[0] - one[0] > noise
    return (first or any(a < b for a, b in pairs[1:])) and all(a <= b for a, b in pairs)


def crowding_distance(values: Values) -> Values:
    """Return the crowding distance of each point, shape (points,); infinite at the smallest and largest coordinates.

    It is the sum, over the coordinates, of the distance between the neighbours on both sides as a share of the range
    (Deb et al. 2002, section III B).

    Args:
        values: The points of one front, shape (points, coordinates).
    """
    room = np.zeros(len(values))
    for column in values.T:
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        room[order[[0, -1]]] = np.inf
        if len(order) > 2 and ordered[-1] > ordered[0]:
            room[order[1:-1]] += (ordered[2:] - ordered[:-2]) / (ordered[-1] - ordered[0])
    return room


def nsga_ranking(values: Values, noise: Values | None = None) -> npt.NDArray[np.int64]:
    """Return point indices front by front, the least crowded first within a front; ties keep their order.

    Args:
        values: Shape (points, coordinates).
        noise: Standard error of each point's first coordinate, shape (points,); None: 0.
    """
    front = front_numbers(values, noise)
    room = np.empty(len(values))
    for number in np.unique(front):
        room[front == number] = crowding_distance(values[front == number])
    return np.lexsort((-room, front))


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the exact volume that points dominate up to a reference point; smaller coordinates are better.

    Computed by slices along the last coordinate (Zitzler 1999, dissertation, section 3.1). Points that are not below
    the reference in every coordinate add nothing.
    """
    inside = [tuple(point) for point in points if all(p < r for p, r in zip(point, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return reference[0] - min(point[0] for point in inside)
    levels = sorted({point[-1] for point in inside})
    volume = 0.0
    for level, following in zip(levels, [*levels[1:], reference[-1]], strict=True):
        below = [point[:-1] for point in inside if point[-1] <= level]
        volume += (following - level) * hypervolume(below, reference[:-1])
    return volume
