"""Many replayed searches in worker processes, kept as files, so that a study goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import search
from harness.benchmark_table import BenchmarkTable, read_table
from harness.config.sections import PluginSpec
from harness.errors import UserError
from harness.progress import Observer
from harness.registry import load_plugin
from harness.search_loop.loop import MAX_CONSECUTIVE_DUPLICATES
from harness.statistics import stderr_of_median
from harness.studies.budget_tables import SearchCurves
from harness.studies.code_digest import code_digest, imported_by, normalised_ast
from harness.studies.path_cache import Indices, PathCache, SearchKey, SearchPath, write_part
from harness.studies.recorded_landscape import Landscape
from harness.studies.replay import initial_placements, is_valid_path, read_paths, replay_paths
from harness.studies.study_file import BudgetStudy, ReplayedSearcher
from search.space import Space

__all__ = ["ReplayBatch", "missing_batches", "replay_batches", "search_curves", "search_key"]

SEARCH_PACKAGE = Path(search.__file__).parent

SEARCHES_PER_BATCH = 10
"""Searches of one file: what an interruption costs at most, of each worker."""
LIBRARIES = {"optuna": "optuna", "scipy": "scipy", "sklearn": "scikit-learn", "torch": "torch"}
"""What draws and proposes, by the name of its module: another version may search differently from the same seed."""
LAZY_LIBRARIES = ("scipy", "torch")
"""What Optuna imports for some of its samplers alone; cmaes too, which need not be there, for one that is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBatch:
    """Some searches of one searcher on one table.

    Attributes:
        path: Takes their walks.
    """

    series: SearchKey
    table: Path
    searcher: PluginSpec
    seeds: tuple[int, ...]
    budget: int
    initial: tuple[str, ...]
    path: Path


def search_key(table: Path, contender: ReplayedSearcher, study: BudgetStudy) -> SearchKey:
    """The searches of a searcher on a table.

    No budget is in the digests, for a searcher is told none: a walk is the beginning of a longer one.

    Raises:
        UserError: No such searcher, or no such table.
    """
    asked = {"use": contender.use, "params": contender.params, "initial": study.initial}
    made_of: dict[str, Any] = {"patience": MAX_CONSECUTIVE_DUPLICATES, "libraries": _library_versions(contender)}
    code = (
        _table_digest(table),
        *(_searcher_code_digest(use) for use in _nested_searchers(contender)),
        *_observation_sources(),
    )
    return SearchKey(table.stem, contender.name, _settings_digest(asked), _settings_digest(made_of, *code))


def cached_paths(kept: PathCache, series: SearchKey, landscape: Landscape, study: BudgetStudy) -> dict[int, Indices]:
    """What was kept of such searches, by seed; what cannot be a search of this table was not."""
    told = dict.fromkeys(landscape.index(placement) for placement in initial_placements(landscape, study.initial))
    first = list(dict.fromkeys(landscape.identity[list(told)].tolist()))[: study.max_evaluations]
    found = {seed: walk.truncate_to_budget(study.max_evaluations) for seed, walk in kept.paths_by_seed(series).items()}
    return {
        seed: walk
        for seed, walk in found.items()
        if walk is not None
        and is_valid_path(landscape, walk)
        and landscape.identity[walk[: len(first)]].tolist() == first
    }


def missing_batches(
    kept: PathCache,
    series: SearchKey,
    table: Path,
    landscape: Landscape,
    contender: ReplayedSearcher,
    study: BudgetStudy,
) -> list[ReplayBatch]:
    """The searches that nobody kept, a few at a time."""
    there = cached_paths(kept, series, landscape, study)
    seeds = [seed for seed in range(contender.seeds or study.seeds) if seed not in there]
    some = [tuple(seeds[first : first + SEARCHES_PER_BATCH]) for first in range(0, len(seeds), SEARCHES_PER_BATCH)]
    return [
        ReplayBatch(
            series=series,
            table=table,
            searcher=contender,
            seeds=chunk,
            budget=study.max_evaluations,
            initial=study.initial,
            path=kept.new_part_file(series, chunk, study.max_evaluations),
        )
        for chunk in some
    ]


def replay_batches(chunks: Sequence[ReplayBatch], workers: int, observer: Observer) -> None:
    """Replay what is missing.

    Raises:
        UserError: An unknown searcher or placement, or a worker died.
    """
    with observer.work("replay", len(chunks)) as step:
        for chunk in _iter_finished(chunks, workers):
            step.advance(f"{chunk.searcher.name} on {chunk.table.stem}")


def search_curves(
    kept: PathCache, series: SearchKey, landscape: Landscape, contender: ReplayedSearcher, study: BudgetStudy
) -> SearchCurves:
    """What was replayed, all seeds together."""
    there = cached_paths(kept, series, landscape, study)
    walks = read_paths(
        landscape, {seed: there[seed] for seed in range(contender.seeds or study.seeds)}, study.max_evaluations
    )
    return SearchCurves(
        latency_ms=walks.latency_ms(landscape),
        found_ms=walks.found_ms(landscape),
        elapsed_s=walks.elapsed_s(landscape),
        evaluations=(walks.indices >= 0).sum(axis=1),
    )


def _iter_finished(chunks: Sequence[ReplayBatch], workers: int) -> Iterator[ReplayBatch]:
    """The chunks as they are done; in this very process where one worker is enough."""
    if min(workers, len(chunks)) < 2:
        for chunk in chunks:
            _replay_batch(chunk)
            yield chunk
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize_worker) as pool:
        waiting = {pool.submit(_replay_batch, chunk): chunk for chunk in chunks}
        try:
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        except BrokenProcessPool as error:
            raise UserError(
                "a worker died, perhaps for lack of memory; what is done is kept: run the same command again, with "
                "--workers 1"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _initialize_worker() -> None:
    """A worker begins: an interrupt ends it at once, unless nobody listens to any, and so does its parent's end."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of what a search loads only as it goes: Torch
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A killed parent gives no more work and ends nobody: without this its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _replay_batch(chunk: ReplayBatch) -> None:
    landscape = _load_landscape(chunk.table, chunk.table.stat().st_mtime_ns)
    walks = replay_paths(landscape, chunk.searcher, seeds=chunk.seeds, budget=chunk.budget, initial=chunk.initial)
    write_part(chunk.path, chunk.series, {seed: SearchPath(walk, chunk.budget) for seed, walk in walks.items()})


@lru_cache(maxsize=1)
def _load_landscape(table: Path, _written_ns: int) -> Landscape:
    """Read once for many chunks, unless it was written again."""
    return Landscape(read_table(table))


def _table_digest(table: Path) -> bytes:
    try:
        return hashlib.sha256(table.read_bytes()).digest()
    except OSError as error:
        raise UserError(f"{table}: cannot be read: {error.strerror or error}") from error


def _settings_digest(asked: Mapping[str, Any], *content: bytes) -> str:
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:24]


def _library_versions(contender: ReplayedSearcher) -> dict[str, str | None]:
    """Versions of what a searcher draws and proposes with, whatever hardware a wheel was built for."""
    modules = {
        name for use in _nested_searchers(contender) for name in imported_by(_searcher_file(use), SEARCH_PACKAGE)
    }
    names = {"numpy", *(name for module, name in LIBRARIES.items() if module in modules)}
    if "optuna" in modules:
        names |= {*LAZY_LIBRARIES, *(("cmaes",) if "CmaEs" in json.dumps(contender.params, default=str) else ())}
    return {name: _library_version(name) for name in sorted(names)}


def _library_version(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def _nested_searchers(contender: ReplayedSearcher) -> tuple[str, ...]:
    """A searcher, and those that its parameters name: what `per_pattern` and `portfolio` run may be somebody else's."""
    params = contender.params
    return (contender.use, *params.get("members", ()), *([params["searcher"]] if "searcher" in params else ()))


def _searcher_code_digest(use: str) -> bytes:
    """Digest of a searcher's code, which may be somebody else's."""
    return code_digest(_searcher_file(use), SEARCH_PACKAGE)


def _searcher_file(use: str) -> Path | None:
    """Where a searcher is written; None where nobody can tell."""
    try:
        file = inspect.getsourcefile(load_plugin("searcher", use))
    except TypeError:
        return None
    return None if file is None else Path(file)


@lru_cache(maxsize=1)
def _observation_sources() -> tuple[bytes, ...]:
    """The code that decides what a searcher is told."""
    files = (
        inspect.getsourcefile(told_by) for told_by in (Landscape, Space, BenchmarkTable, replay_paths, stderr_of_median)
    )
    return tuple(normalised_ast(Path(str(file)).read_bytes()) for file in files)
