"""Simulated final selection of replayed searches, and random search.

A search on a machine does not select by the lowest of many noisy readings: its best placements are rebuilt and timed in
turns, and those readings decide (`harness.run.select.final_selection`). Replays simulate this; selection by the lowest
reading would favour readings that are low by chance, unlike `qdq run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harness.config.sections import Confirmation
from harness.measure.elimination import TURNS_PER_RACING_ROUND, race_winner
from harness.measure.records import Failed, Outcome
from harness.replay.replay import Floats, Indices, Landscape, initial_models, is_valid_path, reading_rng
from harness.run.select.final_selection import SAMPLES_PER_TURN
from search.api import Score

Positions = npt.NDArray[np.intp]
DEFAULT_FINALISTS = Confirmation().candidates
TURNS_PER_BATCH = 2**24  # number of turns drawn at a time
TURNS_PER_RACE = sum(TURNS_PER_RACING_ROUND)  # number of turns of a candidate that is not eliminated
RANDOM_SEARCHES = 10_000  # their mean is ten times as precise as that of a hundred seeds
RANDOM_LABEL = f"random, {RANDOM_SEARCHES} searches"  # differs from the name of the searcher `random`
READINGS_PER_MODEL = 1_000  # readings of each model that the random searches share
MAX_RACES = 250  # races of each model that the random searches share; fewer if there are many models
NUMBERS_PER_BATCH = 2**22  # number of random numbers drawn at a time
MAX_TURNS_IN_MEMORY = 2**26


class Searches:
    """Replayed searches of one searcher on one table; all arrays have the shape (searches, evaluations).

    Args:
        landscape: The table.
        paths: Evaluated placements of each search by its seed; the readings follow from both.
        budget: Maximum number of evaluations of one search.

    Attributes:
        seeds: Seed of each search.
        indices: Indices of the placements on the landscape; -1 after the end of a search.
        readings_ms: Readings that the search received; infinite for failures and missed bounds.

    Raises:
        ValueError: The indices cannot be those of a search on this landscape.
    """

    def __init__(self, landscape: Landscape, paths: Mapping[int, Indices], budget: int) -> None:
        self._landscape, self.seeds = landscape, tuple(paths)
        self.indices = np.full((len(paths), budget), -1)
        self.readings_ms: Floats = np.full((len(paths), budget), np.inf)
        for row, (seed, path) in enumerate(paths.items()):
            if len(path) > budget or not is_valid_path(landscape, path):
                raise ValueError(f"seed {seed}: more than {budget} evaluations, or no search of this table")
            rng = reading_rng(seed)
            for column, index in enumerate(path.tolist()):
                outcome = landscape.observe(index, rng)
                self.indices[row, column] = index
                if isinstance(outcome, Score) and not outcome.violation:
                    self.readings_ms[row, column] = outcome.objective

    @property
    def evaluations(self) -> npt.NDArray[np.int64]:
        """Return the number of evaluations of each search, which may end before its budget."""
        counts: npt.NDArray[np.int64] = (self.indices >= 0).sum(axis=1)
        return counts

    @cached_property
    def latency_ms(self) -> Floats:
        """Return the recorded latency in ms of the final choice after each evaluation.

        Until a search has an allowed placement, it is the latency of the slowest allowed placement of the table.
        """
        at_once = max(1, TURNS_PER_BATCH // (self.indices.shape[1] * TURNS_PER_RACE))
        places = []
        for some in [slice(start, start + at_once) for start in range(0, len(self.seeds), at_once)]:
            indices, readings_ms = self.indices[some], self.readings_ms[some]
            log_ms = np.full((*indices.shape, TURNS_PER_RACE), np.inf, dtype=np.float32)
            for row, seed in enumerate(self.seeds[some]):
                rng = np.random.default_rng([seed, 0x0FF])
                for column in np.flatnonzero(np.isfinite(readings_ms[row])):
                    log_ms[row, column] = draw_turns(self._landscape, int(indices[row, column]), rng)
            places.append(
                simulate_selection(
                    readings_ms,
                    lambda rows, evaluations, log_ms=log_ms: log_ms[  # type: ignore[misc]
                        rows[:, None], evaluations
                    ],
                )
            )
        place = np.vstack(places)
        chosen = np.take_along_axis(self.indices, np.maximum(place, 0), axis=1)
        latency_ms = self._landscape.latency_ms
        choices: Floats = np.where(place < 0, latency_ms.max(), latency_ms[chosen])
        return choices

    @cached_property
    def found_ms(self) -> Floats:
        """Return the recorded latency in ms of the fastest placement up to each evaluation, chosen or not.

        Until a search has an allowed placement, it is the latency of the slowest allowed placement of the table.
        """
        evaluated = np.where(np.isfinite(self.readings_ms), self._landscape.latency_ms[self.indices], np.inf)
        found: Floats = np.minimum(np.minimum.accumulate(evaluated, axis=1), self._landscape.latency_ms.max())
        return found

    @cached_property
    def elapsed_s(self) -> Floats:
        """Return the recorded wall-clock of builds and measurements up to each evaluation; constant after the end."""
        spent_s = np.array([*(recorded_duration_s(outcome) for outcome in self._landscape.outcomes), 0.0])
        return np.cumsum(spent_s[self.indices], axis=1)


def draw_turns(landscape: Landscape, index: int, rng: np.random.Generator, races: int = 1) -> Floats:
    """Return the logarithms of a placement's readings in the turns of races, [race, turn]."""
    turns_ms = landscape.readings_ms(index, rng, races * TURNS_PER_RACE, SAMPLES_PER_TURN)
    read: Floats = np.log(turns_ms).reshape(races, TURNS_PER_RACE)
    return read


def simulate_selection(
    readings_ms: Floats, log_ms_of: Callable[[Positions, Positions], npt.NDArray[np.floating]]
) -> Positions:
    """Return the evaluation that each search would choose after each of its evaluations.

    Args:
        readings_ms: Readings of the searches, [search, evaluation]; infinite for what may not be chosen.
        log_ms_of: Returns the logarithms of the readings in a race, [row, candidate, turn], for some searches, [row],
            and some evaluations of each, [row, candidate].

    Returns:
        [search, evaluation]: the winner of a race among the evaluations with the lowest readings so far (the earlier
        first if equal), as many as a final selection has candidates; -1 if there is none.
    """
    searches, evaluations = readings_ms.shape
    place = np.full((searches, evaluations), -1, dtype=np.intp)
    finalists = np.full((searches, DEFAULT_FINALISTS), -1, dtype=np.intp)
    wins = np.full(searches, -1, dtype=np.intp)
    for latest in range(evaluations):
        contenders = np.column_stack([finalists, np.full(searches, latest)])
        contenders = np.where(np.isfinite(_values_at(readings_ms, contenders)), contenders, -1)
        lowest = np.argsort(_values_at(readings_ms, contenders), axis=1, kind="stable")[:, :DEFAULT_FINALISTS]
        before, finalists = finalists, np.take_along_axis(contenders, lowest, axis=1)
        rows = np.flatnonzero((finalists != before).any(axis=1))  # without a new finalist the race would be the same
        if len(rows):
            race_ms = np.where(
                (finalists[rows] >= 0)[..., None], log_ms_of(rows, np.maximum(finalists[rows], 0)), np.inf
            )
            wins[rows] = finalists[rows, race_winner(race_ms)]
        place[:, latest] = wins
    return place


def _values_at(figures: Floats, evaluations: Positions) -> Floats:
    """Return the figures of some evaluations of each search; infinite for -1."""
    taken: Floats = np.where(evaluations >= 0, np.take_along_axis(figures, evaluations, axis=1), np.inf)
    return taken


def recorded_duration_s(outcome: Outcome) -> float:
    """Return the recorded seconds of build, measurement and scoring of a placement, or until its failure."""
    if isinstance(outcome, Failed):
        return outcome.wall_s
    return outcome.build_s + outcome.measure_s + outcome.evaluate_s


def random_search(landscape: Landscape, evaluations: int, initial: Sequence[str] = ()) -> Floats:
    """Simulate `RANDOM_SEARCHES` searches like `harness.replay.replay.replay_once`, at once and without a searcher.

    A search evaluates the initial placements, at the same cost as other searches, and then the others in a
    random order, without replacement; a model that several placements give comes that much sooner, and once. Failures
    cost an evaluation. So the searcher `random` has this mean for every table, noise and initial design; it enumerates
    spaces of up to 4096 placements, and draws from larger ones less evenly.

    Returns:
        [search, evaluation]: recorded latency of the choice; the last one's if the table has no more models, the
        slowest that is allowed if there is none yet.
    """
    rng = np.random.default_rng(0)
    names, models, copies = np.unique(landscape.identity, return_index=True, return_counts=True)
    start = np.searchsorted(names, initial_models(landscape, initial))[:evaluations]
    remaining = np.setdiff1d(np.arange(len(models)), start)
    readings = np.full((len(models), READINGS_PER_MODEL), np.inf)
    shared = min(MAX_RACES, max(1, MAX_TURNS_IN_MEMORY // (len(models) * TURNS_PER_RACE)))
    races = np.full((len(models), shared, TURNS_PER_RACE), np.inf, dtype=np.float32)
    for number, index in enumerate(models):
        if landscape.allowed[index]:
            readings[number] = landscape.readings_ms(int(index), rng, READINGS_PER_MODEL)
            races[number] = draw_turns(landscape, int(index), rng, shared)
    batch = max(1, NUMBERS_PER_BATCH // len(models))
    curves = []
    for size in [min(batch, RANDOM_SEARCHES - done) for done in range(0, RANDOM_SEARCHES, batch)]:
        # The first of w uniform arrivals is ordered like one exponential arrival at the rate w.
        arrival = rng.exponential(size=(size, len(remaining))) / copies[remaining]
        order = remaining[np.argsort(arrival, axis=1)[:, : evaluations - len(start)]]
        met = np.hstack([np.broadcast_to(start, (size, len(start))), order])
        once = rng.integers(READINGS_PER_MODEL, size=met.shape)
        again: Positions = np.asarray(rng.integers(shared, size=met.shape))
        place = simulate_selection(
            readings[met, once],
            lambda rows, evaluations, met=met, again=again: races[  # type: ignore[misc]
                met[rows[:, None], evaluations], again[rows[:, None], evaluations]
            ],
        )
        chosen = np.take_along_axis(landscape.latency_ms[models][met], np.maximum(place, 0), axis=1)
        curves.append(np.where(place < 0, landscape.latency_ms.max(), chosen))
    latency_ms: Floats = np.vstack(curves)
    return np.pad(latency_ms, ((0, 0), (0, evaluations - latency_ms.shape[1])), mode="edge")
