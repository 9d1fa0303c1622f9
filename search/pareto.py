"""Pareto fronts of points whose every coordinate is to be minimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["crowding_distance", "front_numbers", "hypervolume", "insert_nondominated", "nsga_ranking"]

T = TypeVar("T")
Values = npt.NDArray[np.float64]


def front_numbers(values: Values, noise: Values | None = None, stop_after: int | None = None) -> npt.NDArray[np.int64]:
    """Return the front number of each point: 0 if no other dominates it, 1 if only points of front 0 do, and so on.

    One point dominates another if it is nowhere larger and somewhere smaller (Deb et al. 2002, "A fast and elitist
    multiobjective genetic algorithm: NSGA-II", section III A); in the first coordinate by more than the noise.

    Args:
        values: Shape (points, coordinates).
        noise: Standard error of each point's first coordinate, shape (points,); None: exact.
        stop_after: Once this number of points has a front, all others share the next number; None: no limit.
    """
    first, second = values[:, None, :], values[None, :, :]
    error = np.zeros(len(values)) if noise is None else noise
    smaller = first < second
    if values.shape[1]:
        smaller[..., 0] = second[..., 0] - first[..., 0] > np.hypot(error[:, None], error[None, :])
    dominates = np.asarray((first <= second).all(axis=2) & smaller.any(axis=2))
    front = np.full(len(values), -1)
    above = dominates.sum(axis=0)  # how many points without a front dominate each
    for number in range(len(values)):
        rest = front < 0
        here = rest if stop_after is not None and len(front) - rest.sum() >= stop_after else rest & (above == 0)
        front[here] = number
        above -= dominates[here].sum(axis=0)
        if (front >= 0).all():
            break
    return front


def insert_nondominated(front: list[T], new: T, values: Callable[[T], Sequence[float]]) -> bool:
    """Add an entry to a front unless an entry dominates it, remove the entries that it dominates, and return if added.

    Args:
        front: Entries of which none dominates another; changed in place.
        new: Entry to add.
        values: Coordinates of an entry, all to be minimised.
    """
    if any(_dominates(values(known), values(new)) for known in front):
        return False
    front[:] = [*(known for known in front if not _dominates(values(new), values(known))), new]
    return True


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def crowding_distance(values: Values) -> Values:
    """Return the crowding distance of each point on its front; infinite at both ends.

    The sum over the coordinates of the gap between both neighbours, as a share of the whole range (Deb et al. 2002,
    section III B).

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


def nsga_ranking(values: Values, noise: Values | None = None, stop_after: int | None = None) -> npt.NDArray[np.int64]:
    """Return point indices front by front, the least crowded first within a front; ties keep their order.

    Args:
        values: Shape (points, coordinates).
        noise: See `front_numbers`.
        stop_after: See `front_numbers`; points without a front come last.
    """
    front = front_numbers(values, noise, stop_after)
    room = np.empty(len(values))
    for number in np.unique(front):
        room[front == number] = crowding_distance(values[front == number])
    return np.lexsort((-room, front))


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the exact volume that points dominate below a reference point; meant for small fronts.

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
