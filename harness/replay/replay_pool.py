"""Replay of many searches in worker processes, with every finished batch cached as a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Thread

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.config.sections import PluginSpec
from harness.replay.budget_tables import SearchCurves
from harness.replay.path_cache import Indices, PathCache, SearchPath, write_part
from harness.replay.recorded_landscape import Landscape
from harness.replay.replay import initial_placements, is_valid_path, read_paths, replay_paths
from harness.replay.search_key import SearchKey
from harness.replay.study_file import BudgetStudy, ReplayedSearcher
from harness.runtimes.benchmark_table import read_table

SEARCHES_PER_BATCH = 10  # an interruption loses at most these in each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBatch:
    """Searches of one searcher on one table; `path` is the part file to write."""

    key: SearchKey
    table: Path
    searcher: PluginSpec
    seeds: tuple[int, ...]
    budget: int
    initial: tuple[str, ...]
    path: Path


def _cached_paths(cache: PathCache, key: SearchKey, landscape: Landscape, study: BudgetStudy) -> dict[int, Indices]:
    """Return the cached searches by seed, without those that cannot be searches of this table."""
    initial = dict.fromkeys(landscape.index(placement) for placement in initial_placements(landscape, study.initial))
    first = list(dict.fromkeys(landscape.identity[list(initial)].tolist()))[: study.max_evaluations]
    paths = {seed: path.truncate_to_budget(study.max_evaluations) for seed, path in cache.paths_by_seed(key).items()}
    return {
        seed: path
        for seed, path in paths.items()
        if path is not None
        and is_valid_path(landscape, path)
        and landscape.identity[path[: len(first)]].tolist() == first
    }


def missing_batches(
    cache: PathCache,
    key: SearchKey,
    table: Path,
    landscape: Landscape,
    searcher: ReplayedSearcher,
    study: BudgetStudy,
) -> list[ReplayBatch]:
    """Return the searches that are not cached, in batches."""
    cached = _cached_paths(cache, key, landscape, study)
    seeds = [seed for seed in range(searcher.seeds or study.seeds) if seed not in cached]
    batches = [tuple(seeds[first : first + SEARCHES_PER_BATCH]) for first in range(0, len(seeds), SEARCHES_PER_BATCH)]
    return [
        ReplayBatch(
            key=key,
            table=table,
            searcher=searcher,
            seeds=batch,
            budget=study.max_evaluations,
            initial=study.initial,
            path=cache.new_part_file(key, batch, study.max_evaluations),
        )
        for batch in batches
    ]


def replay_batches(batches: Sequence[ReplayBatch], workers: int, observer: Observer) -> None:
    """Replay batches and write them to their files.

    Args:
        workers: Number of processes.

    Raises:
        UserError: A searcher or placement is unknown, or a worker died.
    """
    with observer.work("replay", len(batches)) as step:
        for batch in _replay_unordered(batches, workers):
            step.advance(f"{batch.searcher.name} on {batch.table.stem}")


def search_curves(
    cache: PathCache, key: SearchKey, landscape: Landscape, searcher: ReplayedSearcher, study: BudgetStudy
) -> SearchCurves:
    """Return the curves of the cached searches of all seeds.

    Raises:
        KeyError: A search is not cached; see `missing_batches`.
    """
    cached = _cached_paths(cache, key, landscape, study)
    paths = read_paths(
        landscape, {seed: cached[seed] for seed in range(searcher.seeds or study.seeds)}, study.max_evaluations
    )
    return SearchCurves(
        latency_ms=paths.latency_ms(landscape),
        found_ms=paths.found_ms(landscape),
        elapsed_s=paths.elapsed_s(landscape),
        evaluations=(paths.indices >= 0).sum(axis=1),
    )


@contextmanager
def _safe_import_path() -> Iterator[None]:
    """Keep the working folder out of the import path of processes that start meanwhile."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _replay_unordered(batches: Sequence[ReplayBatch], workers: int) -> Iterator[ReplayBatch]:
    """Replay batches, in this process if one worker is enough, and yield each when it is done."""
    if min(workers, len(batches)) < 2:
        for batch in batches:
            _replay_batch(batch)
            yield batch
        return
    context = multiprocessing.get_context("spawn")
    with (
        _safe_import_path(),
        ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize_worker) as pool,
    ):
        waiting = {pool.submit(_replay_batch, batch): batch for batch in batches}
        try:
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        except BrokenProcessPool as error:
            raise UserError(
                "a worker ended, possibly for lack of memory; finished searches are saved: run the same command again, "
                "with --workers 1"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _initialize_worker() -> None:
    """Let an interrupt end a worker at once, unless it is ignored, and end the worker with its parent."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # for libraries that are loaded late: Torch
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent process has ended; otherwise workers of a killed parent would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _replay_batch(batch: ReplayBatch) -> None:
    landscape = _load_landscape(batch.table, batch.table.stat().st_mtime_ns)
    paths = replay_paths(landscape, batch.searcher, seeds=batch.seeds, budget=batch.budget, initial=batch.initial)
    write_part(batch.path, batch.key, {seed: SearchPath(path, batch.budget) for seed, path in paths.items()})


@lru_cache(maxsize=1)
def _load_landscape(table: Path, _written_ns: int) -> Landscape:
    """Read a table, cached by path and time of the last change."""
    return Landscape(read_table(table))
