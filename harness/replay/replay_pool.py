"""Replay of requested searches in worker processes; a folder caches them, and only those that it lacks are replayed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from threading import Thread

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.replay.path_cache import PathCache, SearchPath, write_part
from harness.replay.replay import Indices, ReplayRequest, initial_models, is_valid_path, load_landscape, replay
from harness.replay.search_key import SearchKey

SEARCHES_PER_BATCH = 10  # an interruption loses at most these in each worker
Batch = tuple[Path, SearchKey, ReplayRequest]
"""Part file to write, key of the searches, and the searches."""


def replay_cached(
    out: Path, requests: Mapping[SearchKey, ReplayRequest], observer: Observer, *, workers: int = 1
) -> dict[SearchKey, dict[int, Indices]]:
    """Return the paths of the requested searches by key and seed, from the cache in a folder or from a replay.

    Cached searches with damaged paths, or of other code, tables or libraries, are replayed again.

    Args:
        workers: Number of processes.

    Raises:
        UserError: A searcher or placement is unknown, a worker died, or the cache cannot be read or take more searches.
    """
    cache, batches, refused = PathCache(out), list[Batch](), list[str]()
    outdated = {key.question for key in cache.outdated_keys(requests)}
    for key, request in requests.items():
        cached = cache.paths_by_seed(key)
        usable = _usable_seeds(cached, request)
        seeds = [seed for seed in request.seeds if seed not in usable]
        damaged = any(cached[seed].budget >= request.budget for seed in seeds if seed in cached)
        if seeds and (damaged or key.question in outdated):
            refused.append(key.searcher)
        for first in range(0, len(seeds), SEARCHES_PER_BATCH):
            batch = tuple(seeds[first : first + SEARCHES_PER_BATCH])
            path = cache.new_part_file(key, batch, request.budget)
            batches.append((path, key, replace(request, seeds=batch)))
    if refused:
        again = ", ".join(dict.fromkeys(refused))
        observer.say(f"Replayed again, because the cache is of other code, tables or libraries, or damaged: {again}")
    with observer.work("replay", len(batches)) as step:
        for _, _, request in _replay_unordered(batches, workers):
            step.advance(f"{request.searcher.name} on {request.table.stem}")
    cache.compact(requests)
    return {
        key: {seed: cache.paths_by_seed(key)[seed].indices[: request.budget] for seed in request.seeds}
        for key, request in requests.items()
    }


def _usable_seeds(cached: Mapping[int, SearchPath], request: ReplayRequest) -> set[int]:
    """Return the seeds whose cached searches answer a request and can be searches of its table."""
    landscape = load_landscape(request.table)
    first = initial_models(landscape, request.initial)[: request.budget]
    paths = {seed: cached[seed].truncate_to_budget(request.budget) for seed in request.seeds if seed in cached}
    return {
        seed
        for seed, path in paths.items()
        if path is not None
        and is_valid_path(landscape, path)
        and landscape.identity[path[: len(first)]].tolist() == first
    }


def _replay_unordered(batches: Sequence[Batch], workers: int) -> Iterator[Batch]:
    """Replay batches, in this process if one worker is enough, and yield each when it is done."""
    if min(workers, len(batches)) < 2:
        for batch in batches:
            _replay_batch(*batch)
            yield batch
        return
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"  # the working folder is not on the import path of the workers
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize_worker) as pool:
            waiting = {pool.submit(_replay_batch, *batch): batch for batch in batches}
            try:
                for done in as_completed(waiting):
                    done.result()
                    yield waiting[done]
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker ended, possibly for lack of memory; finished searches are saved: run the same command again, "
            "with --workers 1"
        ) from error
    finally:
        os.environ["PYTHONSAFEPATH"] = before


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


def _replay_batch(path: Path, key: SearchKey, request: ReplayRequest) -> None:
    paths = replay(load_landscape(request.table), request)
    write_part(path, key, {seed: SearchPath(indices, request.budget) for seed, indices in paths.items()})
