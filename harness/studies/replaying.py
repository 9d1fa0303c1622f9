"""Many replayed searches in worker processes, kept as files, so that a study goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread

import numpy as np
import pandas as pd

import search
from harness.errors import UserError
from harness.measure.stats import stderr_of_median
from harness.registry import load
from harness.run.config import Use
from harness.run.engine import DUPLICATES_IN_A_ROW
from harness.run.observe import Observer
from harness.studies.budget_tables import Curves
from harness.studies.choosing import Walks
from harness.studies.landscape import Landscape
from harness.studies.replay import replay
from harness.studies.sources import code_digest, meaning_of
from harness.studies.study_file import BudgetStudy, Contender
from harness.tables import read_table

__all__ = ["Chunk", "chunks_of", "curves_of", "replay_all"]

CHUNK = 10
"""Searches of one file: what an interruption costs at most, of each worker."""
LIBRARIES = ("cmaes", "numpy", "optuna", "scikit-learn", "scipy", "torch")
"""What draws and proposes: another version may search differently from the same seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some searches of one searcher on one table.

    Attributes:
        first: Seed of the first search.
        end: Seed behind the last one.
        path: What comes of it.
    """

    table: Path
    searcher: Use
    first: int
    end: int
    budget: int
    initial: tuple[str, ...]
    path: Path


def chunks_of(table: Path, contender: Contender, study: BudgetStudy, folder: Path) -> list[Chunk]:
    """The searches of one searcher on one table.

    The name of a file changes with the table, with what is asked, with the code of the searcher and of the replay, and
    with the libraries that draw and propose.

    Raises:
        UserError: No such searcher, or no such table.
    """
    asked = {"use": contender.use, "params": contender.params, "budget": study.most, "initial": study.initial}
    asked["libraries"] = {name: _version(name) for name in LIBRARIES}
    asked["patience"] = DUPLICATES_IN_A_ROW
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
    for part in (_content(table), *map(_code, _involved(contender)), *_told_by()):
        digest.update(part)
    stem = f"{table.stem}-{re.sub(r'[^A-Za-z0-9._-]+', '-', contender.name)}-{digest.hexdigest()[:12]}"
    seeds = contender.seeds or study.seeds
    return [
        Chunk(
            table=table,
            searcher=contender,
            first=first,
            end=min(first + CHUNK, seeds),
            budget=study.most,
            initial=study.initial,
            path=_kept(folder / f"{stem}-{first}", min(first + CHUNK, seeds), first + CHUNK),
        )
        for first in range(0, seeds, CHUNK)
    ]


def _kept(stem: Path, least: int, most: int) -> Path:
    """The file of searches up to seed `least`; one that has more of them will do."""
    paths = [stem.with_name(f"{stem.name}-{end}.parquet") for end in range(least, most + 1)]
    return next((path for path in paths if path.exists()), paths[0])


def replay_all(chunks: Sequence[Chunk], workers: int, observer: Observer) -> None:
    """Replay what has no file yet.

    Raises:
        UserError: An unknown searcher or placement, or a worker died.
    """
    missing = [chunk for chunk in chunks if not chunk.path.exists()]
    with observer.work("replay", len(missing)) as step:
        for chunk in _replayed(missing, workers):
            step.advance(f"{chunk.searcher.name} on {chunk.table.stem}")


def curves_of(chunks: Sequence[Chunk], landscape: Landscape) -> Curves:
    """What was replayed, all seeds together."""
    read = [(pd.read_parquet(chunk.path), chunk.end) for chunk in chunks]
    frame = pd.concat([searches[searches["seed"] < end] for searches, end in read])
    shape = (-1, chunks[0].budget)
    walks = Walks(
        seeds=tuple(frame["seed"].to_numpy().reshape(shape)[:, 0].tolist()),
        indices=frame["index"].to_numpy(dtype=np.int64).reshape(shape),
        readings_ms=frame["reading_ms"].to_numpy(dtype=float).reshape(shape),
    )
    return Curves(
        latency_ms=walks.latency_ms(landscape),
        elapsed_s=walks.elapsed_s(landscape),
        evaluations=(walks.indices >= 0).sum(axis=1),
    )


def _replayed(chunks: Sequence[Chunk], workers: int) -> Iterator[Chunk]:
    """The chunks as they are done; in this very process where one worker is enough."""
    if min(workers, len(chunks)) < 2:
        for chunk in chunks:
            _replay(chunk)
            yield chunk
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
        waiting = {pool.submit(_replay, chunk): chunk for chunk in chunks}
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


def _begin() -> None:
    """A worker begins: an interrupt ends it at once, unless nobody listens to any, and so does its parent's end."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of what a search loads only as it goes: Torch
    Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A killed parent gives no more work and ends nobody: without this its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _replay(chunk: Chunk) -> None:
    seeds = range(chunk.first, chunk.end)
    landscape = _landscape(chunk.table, chunk.table.stat().st_mtime_ns)
    found = replay(landscape, chunk.searcher, seeds=seeds, budget=chunk.budget, initial=chunk.initial)
    chunk.path.parent.mkdir(parents=True, exist_ok=True)
    part = chunk.path.with_suffix(f".{os.getpid()}.part")  # another study may write to the same folder
    _frame(found.walks).to_parquet(part, index=False, compression="zstd")
    part.replace(chunk.path)


@lru_cache(maxsize=1)
def _landscape(table: Path, _written_ns: int) -> Landscape:
    """Read once for many chunks, unless it was written again."""
    return Landscape(read_table(table))


def _content(table: Path) -> bytes:
    try:
        return hashlib.sha256(table.read_bytes()).digest()
    except OSError as error:
        raise UserError(f"{table}: cannot be read: {error.strerror or error}") from error


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _involved(contender: Contender) -> tuple[str, ...]:
    """A searcher, and those that its parameters name: what `per_pattern` and `portfolio` run may be somebody else's."""
    params = contender.params
    return (contender.use, *params.get("members", ()), *([params["searcher"]] if "searcher" in params else ()))


def _code(use: str) -> bytes:
    """Digest of a searcher's code, which may be somebody else's."""
    try:
        file = inspect.getsourcefile(load("searcher", use))
    except TypeError:
        file = None
    return code_digest(None if file is None else Path(file), Path(search.__file__).parent)


@lru_cache(maxsize=1)
def _told_by() -> tuple[bytes, ...]:
    """The code that decides what a searcher is told."""
    files = (inspect.getsourcefile(told_by) for told_by in (Landscape, replay, stderr_of_median))
    return tuple(meaning_of(Path(str(file)).read_bytes()) for file in files)


def _frame(walks: Walks) -> pd.DataFrame:
    searches, budget = walks.indices.shape
    return pd.DataFrame({
        "seed": np.repeat(walks.seeds, budget),
        "evaluation": np.tile(np.arange(1, budget + 1), searches),
        "index": walks.indices.ravel(),
        "reading_ms": walks.readings_ms.ravel(),
    })  # fmt: skip
