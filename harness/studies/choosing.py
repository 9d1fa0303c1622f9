"""What a replayed search hands over after each evaluation: the choice of a runoff among its best readings.

A live search does not believe the lowest of many noisy readings: its leaders are built afresh and timed in turns, and
those readings choose (`harness.run.runoff`). A replay that went by the lowest reading would get worse with every lucky
one, which no user of `qdq run` sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.records import Failed, Outcome
from harness.run.measuring import Confirmation
from harness.run.runoff import PLAN
from harness.studies.landscape import Floats, Landscape

__all__ = ["SAMPLES", "Walks", "chosen"]

CONTENDERS = Confirmation().contenders
SAMPLES = PLAN.builds * PLAN.rounds * PLAN.samples
"""Of one contender in a runoff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
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
        runoff_ms = np.full(self.indices.shape, np.inf)
        for row, seed in enumerate(self.seeds):
            rng = np.random.default_rng([seed, 0x0FF])
            for column in np.flatnonzero(np.isfinite(self.readings_ms[row])):
                index = int(self.indices[row, column])
                runoff_ms[row, column] = landscape.readings_ms(index, rng, 1, SAMPLES)[0]
        place = chosen(self.readings_ms, runoff_ms)
        handed = np.take_along_axis(self.indices, np.maximum(place, 0), axis=1)
        return np.where(place < 0, landscape.latency_ms.max(), landscape.latency_ms[handed])

    def elapsed_s(self, landscape: Landscape) -> npt.NDArray[np.float64]:
        """Recorded wall-clock of all builds and measurements until then; once a search ended, its last."""
        spent_s = np.array([*(_recorded_s(outcome) for outcome in landscape.outcomes), 0.0])
        return np.cumsum(spent_s[self.indices], axis=1)


def chosen(readings_ms: Floats, runoff_ms: Floats) -> npt.NDArray[np.intp]:
    """Which evaluation each search would hand over after each of its evaluations.

    Args:
        readings_ms: What the search saw, shape (searches, evaluations); infinite for what may not be chosen.
        runoff_ms: What a runoff reads of the same, likewise.

    Returns:
        [search, evaluation]: of the evaluations so far with the lowest readings (the earlier first where they are
        equal), as many as a runoff has contenders, the one with the lowest reading in it; -1 where there is none.
    """
    searches, evaluations = readings_ms.shape
    place = np.full((searches, evaluations), -1, dtype=np.intp)
    rows = np.arange(searches)
    led = np.full((searches, CONTENDERS), -1, dtype=np.intp)
    for latest in range(evaluations):
        several = np.column_stack([led, np.full(searches, latest)])
        lowest = np.argsort(_of(readings_ms, several), axis=1, kind="stable")[:, :CONTENDERS]
        led = np.take_along_axis(several, lowest, axis=1)
        standing = np.isfinite(_of(readings_ms, led))
        met = np.where(standing, _of(runoff_ms, led), np.inf)
        place[:, latest] = np.where(standing.any(axis=1), led[rows, met.argmin(axis=1)], -1)
    return place


def _of(figures: Floats, evaluations: npt.NDArray[np.intp]) -> Floats:
    """Figures of these evaluations, of each search its own; infinite for -1."""
    taken: Floats = np.where(evaluations >= 0, np.take_along_axis(figures, evaluations, axis=1), np.inf)
    return taken


def _recorded_s(outcome: Outcome) -> float:
    if isinstance(outcome, Failed):
        return outcome.wall_s
    return outcome.build_s + outcome.measure_s + outcome.evaluate_s
