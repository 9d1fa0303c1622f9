"""Random search on a table, ten thousand times: the reference of every searcher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.studies.recorded_landscape import Floats, Landscape
from harness.studies.simulated_selection import TURNS_PER_RACE, Indices, draw_turns, simulate_selection
from search.space import Placement

__all__ = ["RANDOM_LABEL", "random_search"]

RANDOM_SEARCHES = 10_000
"""Their mean is ten times as sure as that of a hundred seeds."""
RANDOM_LABEL = f"random, {RANDOM_SEARCHES} searches"
"""What tables call it, to tell it from the searcher `random` with its seeds."""
READINGS_PER_MODEL = 1_000
"""Readings of each model that the searches share."""
MAX_RACES = 250
"""What each model reads in so many runoffs, which they share too; fewer where models are many."""
NUMBERS_PER_BATCH = 2**22
"""Numbers drawn at once."""
MAX_TURNS_IN_MEMORY = 2**26
"""Turns that are held at once."""


def random_search(landscape: Landscape, evaluations: int, first: Sequence[Placement] = ()) -> Floats:
    """Random searches as `harness.studies.replay.replay_once` runs them, but all at once and without a searcher.

    A search is told the same placements first as all others, which cost what they cost there: a model that was told
    already costs nothing. It then meets the others in a random order of the placements, without replacement; a model
    that several placements give comes up so much sooner, and once. A failure costs an evaluation and helps nobody. A
    runoff chooses, as for everybody (`harness.studies.simulated_selection`). So the searcher `random` has this mean
    whatever the
    table, the noise and the first placements are; it walks spaces of up to 4096 placements, and draws from larger ones
    less evenly than this.

    Returns:
        [search, evaluation]: recorded latency of the choice; the last one's where the table has no more models, the
        slowest that is allowed where there is none yet.
    """
    rng = np.random.default_rng(0)
    names, models, copies = np.unique(landscape.identity, return_index=True, return_counts=True)
    told = [int(np.searchsorted(names, landscape.identity[landscape.index(placement)])) for placement in first]
    told = list(dict.fromkeys(told))[:evaluations]
    rest = np.setdiff1d(np.arange(len(models)), told)
    readings = np.full((len(models), READINGS_PER_MODEL), np.inf)
    shared = min(MAX_RACES, max(1, MAX_TURNS_IN_MEMORY // (len(models) * TURNS_PER_RACE)))
    races = np.full((len(models), shared, TURNS_PER_RACE), np.inf, dtype=np.float32)
    for number, index in enumerate(models):
        if landscape.allowed[index]:
            readings[number] = landscape.readings_ms(int(index), rng, READINGS_PER_MODEL)
            races[number] = draw_turns(landscape, int(index), rng, shared)
    slowest_ms = landscape.latency_ms.max()
    found = []
    for size in _batch_slices(max(1, NUMBERS_PER_BATCH // len(models))):
        # The first of w uniform arrivals is ordered like one exponential arrival at the rate w.
        arrival = rng.exponential(size=(size, len(rest))) / copies[rest]
        order = rest[np.argsort(arrival, axis=1)[:, : evaluations - len(told)]]
        met = np.hstack([np.broadcast_to(np.array(told, dtype=int), (size, len(told))), order])
        once, again = rng.integers(READINGS_PER_MODEL, size=met.shape), rng.integers(shared, size=met.shape)

        def log_ms_of(
            rows: Indices, evaluations: Indices, met: Indices = met, again: Indices = again
        ) -> npt.NDArray[np.floating]:
            return races[met[rows[:, None], evaluations], again[rows[:, None], evaluations]]

        place = simulate_selection(readings[met, once], log_ms_of)
        handed = np.take_along_axis(landscape.latency_ms[models][met], np.maximum(place, 0), axis=1)
        found.append(np.where(place < 0, slowest_ms, handed))
    latency_ms: Floats = np.vstack(found)
    return np.pad(latency_ms, ((0, 0), (0, evaluations - latency_ms.shape[1])), mode="edge")


def _batch_slices(size: int) -> list[int]:
    return [min(size, RANDOM_SEARCHES - done) for done in range(0, RANDOM_SEARCHES, size)]
