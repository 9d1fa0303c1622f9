"""What a replayed search hands over after each evaluation: the choice of a runoff among its best readings.

A live search does not believe the lowest of many noisy readings: its leaders are built afresh and timed in turns, and
those readings choose (`harness.pipeline.final_selection`). A replay that went by the lowest reading would get worse
with every lucky
one, which no user of `qdq run` sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.config.sections import Confirmation
from harness.records import Failed, Outcome
from harness.selection.racing import SAMPLES_PER_TURN
from harness.studies.recorded_landscape import Floats, Landscape
from harness.timing.racing_test import TURNS_PER_RACING_ROUND, race_winner

__all__ = ["TURNS_PER_RACE", "Indices", "SearchPaths", "draw_turns", "simulate_selection"]

Indices = npt.NDArray[np.intp]
DEFAULT_FINALISTS = Confirmation().contenders
TURNS_PER_BATCH = 2**24
"""Turns that are drawn at once."""
TURNS_PER_RACE = sum(TURNS_PER_RACING_ROUND)
"""Of one contender in a runoff, if it is there to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPaths:
    """What some searches evaluated, in order; both arrays are [search, evaluation].

    Attributes:
        seeds: One search each.
        indices: Of the placements on the landscape; -1 once a search has nothing left.
        readings_ms: What the search was told; infinite where that was a failure or broke the bound.
    """

    seeds: tuple[int, ...]
    indices: npt.NDArray[np.int64]
    readings_ms: npt.NDArray[np.float64]

    def latency_ms(self, landscape: Landscape) -> npt.NDArray[np.float64]:
        """Recorded latency of what each search would hand over; the slowest that is allowed while there is nothing."""
        at_once = max(1, TURNS_PER_BATCH // (self.indices.shape[1] * TURNS_PER_RACE))
        starts = range(0, len(self.seeds), at_once)
        place = np.vstack([self._selected_evaluations(landscape, slice(start, start + at_once)) for start in starts])
        handed = np.take_along_axis(self.indices, np.maximum(place, 0), axis=1)
        return np.where(place < 0, landscape.latency_ms.max(), landscape.latency_ms[handed])

    def _selected_evaluations(self, landscape: Landscape, some: slice) -> Indices:
        """Which evaluation some of the searches would hand over, after each of theirs."""
        indices, readings_ms = self.indices[some], self.readings_ms[some]
        log_ms = np.full((*indices.shape, TURNS_PER_RACE), np.inf, dtype=np.float32)
        for row, seed in enumerate(self.seeds[some]):
            rng = np.random.default_rng([seed, 0x0FF])
            for column in np.flatnonzero(np.isfinite(readings_ms[row])):
                log_ms[row, column] = draw_turns(landscape, int(indices[row, column]), rng)
        return simulate_selection(readings_ms, lambda rows, evaluations: log_ms[rows[:, None], evaluations])

    def found_ms(self, landscape: Landscape) -> npt.NDArray[np.float64]:
        """Recorded latency of the fastest that each search evaluated; the slowest while there is nothing allowed."""
        evaluated = np.where(np.isfinite(self.readings_ms), landscape.latency_ms[self.indices], np.inf)
        found: Floats = np.minimum(np.minimum.accumulate(evaluated, axis=1), landscape.latency_ms.max())
        return found

    def elapsed_s(self, landscape: Landscape) -> npt.NDArray[np.float64]:
        """Recorded wall-clock of all builds and measurements until then; once a search ended, its last."""
        spent_s = np.array([*(_recorded_duration_s(outcome) for outcome in landscape.outcomes), 0.0])
        return np.cumsum(spent_s[self.indices], axis=1)


def draw_turns(landscape: Landscape, index: int, rng: np.random.Generator, races: int = 1) -> Floats:
    """Logarithm of what a placement reads in the turns of runoffs, [race, turn]."""
    turns_ms = landscape.readings_ms(index, rng, races * TURNS_PER_RACE, SAMPLES_PER_TURN)
    read: Floats = np.log(turns_ms).reshape(races, TURNS_PER_RACE)
    return read


def simulate_selection(
    readings_ms: Floats, log_ms_of: Callable[[Indices, Indices], npt.NDArray[np.floating]]
) -> Indices:
    """Which evaluation each search would hand over after each of its evaluations.

    Args:
        readings_ms: What the search saw, shape (searches, evaluations); infinite for what may not be chosen.
        log_ms_of: Logarithm of what a runoff reads: for some searches, [row], and of each some evaluations, [row,
            contender], every turn of theirs, [row, contender, turn].

    Returns:
        [search, evaluation]: of the evaluations so far with the lowest readings (the earlier first where they are
        equal), as many as a runoff has contenders, the one that wins the race; -1 where there is none.
    """
    searches, evaluations = readings_ms.shape
    place = np.full((searches, evaluations), -1, dtype=np.intp)
    led = np.full((searches, DEFAULT_FINALISTS), -1, dtype=np.intp)
    wins = np.full(searches, -1, dtype=np.intp)
    for latest in range(evaluations):
        several = np.column_stack([led, np.full(searches, latest)])
        several = np.where(np.isfinite(_values_at(readings_ms, several)), several, -1)
        lowest = np.argsort(_values_at(readings_ms, several), axis=1, kind="stable")[:, :DEFAULT_FINALISTS]
        before, led = led, np.take_along_axis(several, lowest, axis=1)
        rows = np.flatnonzero((led != before).any(axis=1))  # else the same race again
        if len(rows):
            met = np.where((led[rows] >= 0)[..., None], log_ms_of(rows, np.maximum(led[rows], 0)), np.inf)
            wins[rows] = led[rows, race_winner(met)]
        place[:, latest] = wins
    return place


def _values_at(figures: Floats, evaluations: npt.NDArray[np.intp]) -> Floats:
    """Figures of these evaluations, of each search its own; infinite for -1."""
    taken: Floats = np.where(evaluations >= 0, np.take_along_axis(figures, evaluations, axis=1), np.inf)
    return taken


def _recorded_duration_s(outcome: Outcome) -> float:
    if isinstance(outcome, Failed):
        return outcome.wall_s
    return outcome.build_s + outcome.measure_s + outcome.evaluate_s
