"""Replay of searchers on a recorded table, in memory at thousands of evaluations per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from harness.base.errors import UserError, suggest_names
from harness.config.sections import ModelSpec, PluginSpec
from harness.measure.records import Failed
from harness.plugins import registry
from harness.replay.recorded_landscape import NEAR_OPTIMUM_SHARE, Landscape
from harness.replay.simulated_selection import SearchPaths
from harness.run.prepare.model_loader import open_model
from harness.run.search.loop import MAX_CONSECUTIVE_DUPLICATES
from harness.runtimes.benchmark_table import BenchmarkTable
from harness.workers.in_process import as_outcome
from search.api import Failure, Observation, Placement, Score, Searcher

__all__ = [
    "ReplayedSearches", "check_table", "initial_placements", "is_valid_path", "optimum_in_initial_design",
    "read_paths", "reading_rng", "replay", "replay_once", "replay_paths",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedSearches:
    """Replayed searches of one searcher on one table.

    Attributes:
        searcher: Name of the searcher.
        walks: Evaluations of the searches.
        latency_ms: Latency of the choice, of shape (seeds, evaluations); see `SearchPaths.latency_ms`.
        wall_s: Wall-clock of the replay.
        build_s: Recorded wall-clock of the builds and measurements that were replayed.
    """

    searcher: str
    walks: SearchPaths
    latency_ms: npt.NDArray[np.float64]
    wall_s: float
    build_s: float

    @property
    def evaluations(self) -> int:
        """Return the number of evaluations of all searches, which may end before their budget."""
        return int((self.walks.indices >= 0).sum())


def replay(
    landscape: Landscape, use: PluginSpec, *, seeds: Sequence[int], budget: int, initial: Sequence[str] = ()
) -> ReplayedSearches:
    """Replay a searcher once for each seed; arguments and errors are those of `replay_paths`."""
    started_s = time.perf_counter()
    found = replay_paths(landscape, use, seeds=seeds, budget=budget, initial=initial)
    walks = read_paths(landscape, found, budget)
    return ReplayedSearches(
        searcher=use.name,
        walks=walks,
        latency_ms=walks.latency_ms(landscape),
        wall_s=time.perf_counter() - started_s,
        build_s=float(walks.elapsed_s(landscape)[:, -1].sum()),
    )


def replay_paths(
    landscape: Landscape, use: PluginSpec, *, seeds: Sequence[int], budget: int, initial: Sequence[str] = ()
) -> dict[int, npt.NDArray[np.int32]]:
    """Return the indices of the evaluated placements in order, by seed.

    Args:
        use: The searcher with its parameters.
        budget: Number of evaluations of one search; repeated models do not count.
        initial: Names of the initial placements (float, all, linear), which count.

    Raises:
        UserError: The searcher, a parameter or a name is unknown; or the searcher raised an error, with the end of its
            traceback.
    """
    if budget < 1 or not seeds:
        raise UserError(f"a replay needs a budget and seeds of at least 1, but got {budget} and {len(seeds)}")
    space, first = landscape.table.subspace.space, initial_placements(landscape, initial)
    factory = registry.check_params("searcher", use.use, use.params, supplied=("space", "seed"))

    def searcher(seed: int) -> Any:
        return registry.call_plugin(f"searcher {use.use!r}", lambda: factory(space, seed=seed, **use.params))

    def run(seed: int) -> list[int]:
        made = searcher(seed)
        found = as_outcome("search", lambda: replay_once(landscape, made, budget=budget, seed=seed, first=first))
        if isinstance(found, Failed):
            raise UserError(f"searcher {use.name!r}, seed {seed}, failed; {found.reason}\n{found.log_tail}")
        return found

    with threadpool_limits(1):  # small matrices; see `harness.run.search.searcher_guard`
        return {seed: np.array(run(seed), dtype=np.int32) for seed in seeds}


def read_paths(landscape: Landscape, walks: Mapping[int, npt.NDArray[np.int32]], budget: int) -> SearchPaths:
    """Return searches with their readings, which follow from the seed and the evaluated placements.

    Args:
        walks: Indices of the evaluated placements in order, by seed.
        budget: Maximum number of evaluations of one search.

    Raises:
        ValueError: The indices cannot be those of a search on this landscape.
    """
    indices, readings_ms = np.full((len(walks), budget), -1), np.full((len(walks), budget), np.inf)
    for row, (seed, walk) in enumerate(walks.items()):
        rng = reading_rng(seed)
        if len(walk) > budget or not is_valid_path(landscape, walk):
            raise ValueError(f"seed {seed}: more than {budget} evaluations, or no search of this table")
        indices[row, : len(walk)] = walk
        readings_ms[row, : len(walk)] = [_reading_ms(landscape.observe(index, rng)) for index in walk.tolist()]
    return SearchPaths(seeds=tuple(walks), indices=indices, readings_ms=readings_ms)


def is_valid_path(landscape: Landscape, walk: npt.NDArray[np.int32]) -> bool:
    """Return whether these can be the indices of one search: all on the landscape, and no model twice."""
    there = bool(np.all((walk >= 0) & (walk < len(landscape.outcomes))))
    return there and len(np.unique(landscape.identity[walk])) == len(walk)


def reading_rng(seed: int) -> np.random.Generator:
    """Return the generator of the readings of a search."""
    return np.random.default_rng([seed, 0x5EED])


def _reading_ms(outcome: Score | Failure) -> float:
    """Return the reading in ms; infinite for a failure or a violated bound."""
    return outcome.objective if isinstance(outcome, Score) and outcome.violation == 0 else math.inf


def initial_placements(landscape: Landscape, initial: Sequence[str]) -> list[Placement]:
    """Return the initial placements of every search of a table.

    Args:
        initial: Names: float, all, linear.

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


def optimum_in_initial_design(landscape: Landscape, initial: Sequence[str]) -> str:
    """Return the name of the initial placement that is the optimum, or within 1 % of it; "" without one.

    All searches start with it, so they are equal on such a table.
    """
    near_ms = (1 + NEAR_OPTIMUM_SHARE) * float(landscape.latency_ms[landscape.optimum])
    found = zip(initial, initial_placements(landscape, initial), strict=True)
    measured = [(float(landscape.latency_ms[landscape.index(placement)]), name) for name, placement in found]
    latency_ms, name = min(measured, default=(float("inf"), ""))
    return name if latency_ms <= near_ms else ""


def replay_once(
    landscape: Landscape, searcher: Searcher, *, budget: int, seed: int, first: Sequence[Placement] = ()
) -> list[int]:
    """Replay one search like `harness.run.search.loop`; a repeated model is reported without an evaluation.

    Returns:
        The evaluated indices in order; for their readings see `read_paths`.
    """
    space, rng = landscape.table.subspace.space, reading_rng(seed)
    known: dict[int, Score | Failure] = {}
    walk: list[int] = []
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
            walk.append(index)
        searcher.tell(Observation(placement=asked[0], digest=space.digest(asked[0]), outcome=outcome))
    return walk


def check_table(table: BenchmarkTable, spec: ModelSpec, work: Path) -> None:
    """Check that a table is of a model.

    Raises:
        UserError: The table is of another model, or the model cannot be loaded.
    """
    model = open_model(spec, work)
    if model.sha256 != table.metadata.model_sha256:
        raise UserError(
            f"{table.path} is of another model: it was recorded of {table.metadata.source} "
            f"({table.metadata.model_sha256[:12]}), but {spec.use} is {model.sha256[:12]}"
        )
