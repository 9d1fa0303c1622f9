"""Replay of searchers on a recorded table, in memory at thousands of evaluations per second."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from harness.base.errors import UserError, suggest_names
from harness.base.statistics import median_ci, stderr_of_median
from harness.config.sections import PluginSpec
from harness.measure.records import Failed, Measured
from harness.plugins import registry
from harness.run.search.loop import MAX_CONSECUTIVE_DUPLICATES
from harness.runtimes.replay import BenchmarkTable, read_table
from harness.workers.engines import as_outcome
from search.api import Failure, Observation, Placement, Score, Searcher

Floats = npt.NDArray[np.float64]
NEAR_OPTIMUM_SHARE = 0.01  # relative to the optimum's latency; placements within it count as optimal


class Landscape:
    """A table as arrays over its placements, in the order of `TableSubspace.placements`.

    Args:
        table: The table.
        bound: A recorded metric and the value that a placement must reach, for instance an SQNR of 20 dB.

    Placements that failed or violate the bound have the latency of the slowest allowed one; averages are thus finite.

    Attributes:
        table: The table.
        sizes: Number of choices of each dimension.
        latency_ms: Median of the samples of each placement.
        allowed: Whether a placement was measured and keeps the bound.
        identity: Number of the model of each placement; placements with equal models share it.
        scores: Score of each placement without noise.

    Raises:
        UserError: No placement is allowed, or the table does not have the metric.
    """

    def __init__(self, table: BenchmarkTable, bound: tuple[str, float] | None = None) -> None:
        self.table = table
        self.sizes = table.subspace.space.sizes
        rows = [table.row(placement) for placement in table.subspace.placements()]
        self.outcomes, self.identity = [row.outcome for row in rows], np.array([row.number for row in rows])
        metric, at_least = bound or ("", -math.inf)
        known = {name for o in self.outcomes if isinstance(o, Measured) for name in o.metrics}
        if bound and metric not in known:
            raise UserError(f"{table.path}: no metric {metric!r} was recorded; {suggest_names(metric, known)}")
        self.scores: list[Score | Failure] = []
        for outcome in self.outcomes:
            if not isinstance(outcome, Measured):
                self.scores.append(Failure(stage=outcome.stage, reason=outcome.reason))
                continue
            found = outcome.metrics.get(metric, math.nan) if bound else math.inf
            if not found > -math.inf:  # nor NaN
                self.scores.append(Failure(stage="evaluate", reason=f"no {metric} was recorded"))
                continue
            self.scores.append(
                Score(
                    objective=median_ci(outcome.samples_ms).value,
                    stderr=stderr_of_median(outcome.samples_ms),
                    violation=max(0.0, at_least - found),
                    metrics=outcome.metrics,
                )
            )
        self.allowed = np.array([isinstance(s, Score) and s.violation == 0 for s in self.scores])
        if not self.allowed.any():
            raise UserError(f"{table.path}: no placement {'reaches the bound' if bound else 'could be measured'}")
        raw = np.array([s.objective if isinstance(s, Score) else np.inf for s in self.scores])
        self.latency_ms: Floats = np.where(self.allowed, raw, raw[self.allowed].max())
        self._samples = [np.sort(o.samples_ms if isinstance(o, Measured) else []) for o in self.outcomes]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return by how much `index` grows with the next choice of each dimension; 1 for the last dimension."""
        return tuple(math.prod(self.sizes[place + 1 :]) for place in range(len(self.sizes)))

    def index(self, placement: Placement) -> int:
        """Return the index of a placement of the subspace in the arrays."""
        return sum(map(operator.mul, placement.choices, self.strides))

    def observe(self, index: int, rng: np.random.Generator) -> Score | Failure:
        """Return the score of one measurement; see `readings_ms`."""
        score = self.scores[index]
        if isinstance(score, Failure):
            return score
        reading = float(self.readings_ms(index, rng, 1)[0])
        return Score(objective=reading, stderr=score.stderr, violation=score.violation, metrics=score.metrics)

    def readings_ms(self, index: int, rng: np.random.Generator, count: int, size: int = 0) -> Floats:
        """Return measurements of a placement that did not fail: medians of samples drawn from the recorded ones.

        Samples are drawn with replacement, so that readings have the noise of the machine.

        Args:
            count: Number of measurements.
            size: Number of samples per measurement; 0: as many as were recorded.
        """
        samples = self._samples[index]
        size = size or len(samples)
        drawn = (rng.random((count, size)) * len(samples)).astype(int)
        drawn.sort(axis=1)
        middle: Floats = (samples[drawn[:, (size - 1) // 2]] + samples[drawn[:, size // 2]]) / 2
        return middle

    @cached_property
    def optimum(self) -> int:
        """Return the index of the fastest allowed placement."""
        return int(np.argmin(np.where(self.allowed, self.latency_ms, np.inf)))

    @cached_property
    def anchors_ms(self) -> Mapping[str, float]:
        """Return the latency of the named placements that could be measured, by name."""
        whole, found = self.table.subspace.full_space, {}
        for name, choices in self.table.metadata.anchors.items():
            outcome = self.table.rows[whole.digest(Placement(choices))].outcome
            if isinstance(outcome, Measured):
                found[name] = median_ci(outcome.samples_ms).value
        return found


Indices = npt.NDArray[np.int32]
"""Path of a search: indices of its evaluated placements on the landscape, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Request for searches of one searcher on one table.

    Attributes:
        searcher: The searcher with its parameters.
        table: File of the table.
        seeds: Seed of each search.
        budget: Number of evaluations of one search; repeated models do not count.
        initial: Names of the initial placements (float, all, linear), which count.
    """

    searcher: PluginSpec
    table: Path
    seeds: Sequence[int]
    budget: int
    initial: Sequence[str] = ()


def load_landscape(table: Path) -> Landscape:
    """Return the search problem of a table's file, which is read once as long as it does not change."""
    return _read_landscape(table, table.stat().st_mtime_ns if table.is_file() else 0)


@lru_cache(maxsize=64)
def _read_landscape(table: Path, _written_ns: int) -> Landscape:
    return Landscape(read_table(table))


def replay(landscape: Landscape, request: ReplayRequest) -> dict[int, Indices]:
    """Return the path of each search by its seed.

    Raises:
        UserError: The searcher, a parameter or a name is unknown; or the searcher raised an error, with the end of its
            traceback.
    """
    use, budget = request.searcher, request.budget
    if budget < 1 or not request.seeds:
        raise UserError(f"a replay needs a budget and seeds of at least 1, but got {budget} and {len(request.seeds)}")
    space, first = landscape.table.subspace.space, initial_placements(landscape, request.initial)
    factory = registry.check_params("searcher", use.use, use.params, supplied=("space", "seed"))
    paths: dict[int, Indices] = {}
    with threadpool_limits(1):  # small matrices; see `harness.run.search.loop`
        for seed in request.seeds:
            searcher = registry.call_plugin(f"searcher {use.use!r}", partial(factory, space, seed=seed, **use.params))
            run = partial(replay_once, landscape, searcher, budget=budget, seed=seed, first=first)
            found = as_outcome("search", run)
            if isinstance(found, Failed):
                raise UserError(f"searcher {use.name!r}, seed {seed}, failed; {found.reason}\n{found.log_tail}")
            paths[seed] = np.array(found, dtype=np.int32)
    return paths


def replay_once(
    landscape: Landscape, searcher: Searcher, *, budget: int, seed: int, first: Sequence[Placement] = ()
) -> list[int]:
    """Replay one search like `harness.run.search.loop`; a repeated model is reported without an evaluation.

    Returns:
        The evaluated indices in order; for their readings see `harness.replay.simulated_selection.Searches`.
    """
    space, rng = landscape.table.subspace.space, reading_rng(seed)
    known: dict[int, Score | Failure] = {}
    path: list[int] = []
    waiting, duplicates = list(first)[::-1], 0
    while len(known) < budget and duplicates < MAX_CONSECUTIVE_DUPLICATES:
        asked = [waiting.pop()] if waiting else searcher.ask(1)
        if not asked:
            break
        index = landscape.index(space.validate(asked[0]))
        key = int(landscape.identity[index])
        outcome = known.get(key)
        duplicates = 0 if outcome is None else duplicates + 1
        if outcome is None:
            outcome = known[key] = landscape.observe(index, rng)
            path.append(index)
        searcher.tell(Observation(placement=asked[0], digest=space.digest(asked[0]), outcome=outcome))
    return path


def reading_rng(seed: int) -> np.random.Generator:
    """Return the generator of the readings of a search."""
    return np.random.default_rng([seed, 0x5EED])


def is_valid_path(landscape: Landscape, path: Indices) -> bool:
    """Return whether these can be the indices of one search: all on the landscape, and no model twice."""
    there = bool(np.all((path >= 0) & (path < len(landscape.outcomes))))
    return there and len(np.unique(landscape.identity[path])) == len(path)


def initial_placements(landscape: Landscape, initial: Sequence[str]) -> list[Placement]:
    """Return the placements of the names of initial placements: float, all, linear.

    Raises:
        UserError: A name is unknown.
    """
    space = landscape.table.subspace.space
    simple: dict[str, Callable[[], Placement]] = {
        "float": space.float_placement,
        "all": space.quantize_all,
        "linear": lambda: space.quantize_roles({"linear"}),
    }
    for name in initial:
        if name not in simple:
            raise UserError(f"initial: {name!r} is no placement of a replay; {suggest_names(name, simple)}")
    return [simple[name]() for name in initial]


def initial_models(landscape: Landscape, initial: Sequence[str]) -> list[int]:
    """Return the different models of the initial placements in order, as numbers of `Landscape.identity`."""
    indices = [landscape.index(placement) for placement in initial_placements(landscape, initial)]
    return list(dict.fromkeys(landscape.identity[indices].tolist())) if indices else []


def optimum_in_initial_design(landscape: Landscape, initial: Sequence[str]) -> str:
    """Return the name of the initial placement that is the optimum, or within 1 % of it; "" without one.

    All searches start with it, so they are equal on such a table.
    """
    near_ms = (1 + NEAR_OPTIMUM_SHARE) * float(landscape.latency_ms[landscape.optimum])
    found = zip(initial, initial_placements(landscape, initial), strict=True)
    measured = [(float(landscape.latency_ms[landscape.index(placement)]), name) for name, placement in found]
    latency_ms, name = min(measured, default=(float("inf"), ""))
    return name if latency_ms <= near_ms else ""
