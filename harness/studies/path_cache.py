"""The walks of a study, kept in one small file: it goes on where it stopped, and others add to it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import UserError

__all__ = ["FILE", "MAX_EVALUATIONS", "Indices", "PathCache", "SearchKey", "SearchPath", "write_part"]

Indices = npt.NDArray[np.int32]
FILE, PARTS_FOLDER = "walks.parquet", "walks"
COLUMNS = pa.schema([
    ("table", pa.string()),
    ("searcher", pa.string()),
    ("asked", pa.string()),
    ("made_of", pa.string()),
    ("seed", pa.int32()),
    ("budget", pa.int32()),
    ("walk", pa.list_(pa.int32())),
])  # fmt: skip
MAX_BYTES = 2**30
MAX_LINES, MAX_EVALUATIONS = 2**21, 2**29
"""Of one file: ten thousand seeds of sixteen searchers on ten tables, with two hundred evaluations each."""
MAX_NAME_BYTES, MAX_NAME_CHARS = 2**25, 1000
"""Bytes of all different names, characters of one."""
LINES_PER_BATCH = 32
"""Lines that are unpacked at once: equal names are stored once, so that the file does not tell their size."""


@dataclass(frozen=True, slots=True, order=True)
class SearchKey:
    """Searches of one searcher on one table.

    Attributes:
        table: Its name.
        searcher: Its label.
        asked: Digest of the question: the searcher, its parameters and what it is told first.
        made_of: Digest of what else decides how it searches: the table, the code and the libraries.
    """

    table: str
    searcher: str
    asked: str
    made_of: str

    @property
    def question(self) -> tuple[str, str, str]:
        """What it answers, whatever it is made of."""
        return self.table, self.searcher, self.asked


@dataclass(frozen=True, slots=True)
class SearchPath:
    """What one search evaluated; what it read there follows, see `replay.read_paths`.

    Attributes:
        indices: On a landscape, in order.
        budget: Evaluations that it had; fewer indices mean that nothing was left to evaluate.
    """

    indices: Indices
    budget: int

    def truncate_to_budget(self, budget: int) -> Indices | None:
        """The walk of this search with that budget, of which a searcher knows nothing; None where it goes further."""
        whole = self.budget >= budget or len(self.indices) < self.budget
        return self.indices[:budget] if whole and len(self.indices) <= self.budget else None


class PathCache:
    """What is there of the walks of a study: those of its file, and those that were not gathered into it yet.

    Raises:
        UserError: A file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._walks = self._read_paths()

    def paths_by_seed(self, series: SearchKey) -> Mapping[int, SearchPath]:
        """By seed."""
        return self._walks.get(series, {})

    def outdated_keys(self, asked: Collection[SearchKey]) -> list[SearchKey]:
        """Answers to the same questions that are made of something else: of other code, for one."""
        questions = {each.question for each in asked}
        return [each for each in self._walks if each.question in questions and each not in asked]

    def new_part_file(self, series: SearchKey, seeds: tuple[int, ...], budget: int) -> Path:
        """Where some new walks go."""
        asked = json.dumps([astuple(series), seeds, budget])
        return self._folder / PARTS_FOLDER / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.parquet"

    def compact(self, asked: Collection[SearchKey]) -> None:
        """Put all walks that are there by now into the one file.

        Args:
            asked: What the study asks now; what is stale beside it goes.

        Raises:
            UserError: They are more than one file takes.
        """
        parts, self._walks = self._part_files(), self._read_paths()
        stale = self.outdated_keys(asked)
        if not parts and not stale:
            return
        for each in stale:
            del self._walks[each]
        _write_atomically(self._folder / FILE, self._walks)
        for path in (
            *parts,
            *self._folder.glob(f"{PARTS_FOLDER}/*.part"),
            *self._folder.glob(f"{PARTS_FOLDER}.*.part"),
        ):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody may have put something there
            (self._folder / PARTS_FOLDER).rmdir()

    def _read_paths(self) -> dict[SearchKey, dict[int, SearchPath]]:
        """What was replayed later comes later: it was, because what was there would not do."""
        found: dict[SearchKey, dict[int, SearchPath]] = {}
        for path in [self._folder / FILE, *self._part_files()]:
            if path.exists():
                for series, seed, walk in _read_lines(path):
                    found.setdefault(series, {})[seed] = walk
        return found

    def _part_files(self) -> list[Path]:
        return sorted((self._folder / PARTS_FOLDER).glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)


def write_part(path: Path, series: SearchKey, walks: Mapping[int, SearchPath]) -> None:
    """Write some walks of one searcher on one table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, {series: walks})


def _write_atomically(path: Path, walks: Mapping[SearchKey, Mapping[int, SearchPath]]) -> None:
    """It appears whole or not at all."""
    lines = [(series, seed, walk) for series, some in sorted(walks.items()) for seed, walk in sorted(some.items())]
    ends = np.cumsum([0, *(len(walk.indices) for _, _, walk in lines)], dtype=np.int64)
    if len(lines) > MAX_LINES or ends[-1] > MAX_EVALUATIONS:
        raise UserError(f"{path}: {len(lines)} searches are more than one file takes; use another --out for new ones")
    names = zip(*((*astuple(series), seed, walk.budget) for series, seed, walk in lines), strict=True)
    evaluated = np.concatenate([walk.indices for _, _, walk in lines], dtype=np.int32)
    body = pa.ListArray.from_arrays(ends.astype(np.int32), evaluated)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        table = pa.table([*map(list, names), body], schema=COLUMNS)
        pq.write_table(table, part, compression="zstd", compression_level=9)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read_lines(path: Path) -> Iterator[tuple[SearchKey, int, SearchPath]]:
    """What a file says, whoever wrote it.

    Raises:
        UserError: It is not of this kind, or unpacks to more than any study does.
    """
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.remove_metadata().equals(COLUMNS):
                raise ValueError("other columns")
            _check_unpacked_size(path, file.metadata)
            for batch in file.iter_batches(batch_size=LINES_PER_BATCH):
                if any(column.null_count for column in batch.columns) or batch.column("walk").flatten().null_count:
                    raise ValueError("something is missing in it")
                names = zip(*(batch.column(name).to_pylist() for name in COLUMNS.names[:-1]), strict=True)
                for (*name, seed, budget), walk in zip(names, batch.column("walk"), strict=True):
                    if max(map(len, name)) > MAX_NAME_CHARS:
                        raise ValueError(f"a name of more than {MAX_NAME_CHARS} characters")
                    yield SearchKey(*name), seed, SearchPath(walk.values.to_numpy(), budget)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: no walks of a study ({error}); remove it to replay them again") from error


def _check_unpacked_size(path: Path, metadata: pq.FileMetaData) -> None:
    """Before anything is unpacked: a long run of one value takes a few bytes."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    values = sum(group.column(group.num_columns - 1).num_values for group in groups)
    names = sum(group.column(number).total_uncompressed_size for group in groups for number in range(4))
    if path.stat().st_size > MAX_BYTES or names > MAX_NAME_BYTES or metadata.num_rows > MAX_LINES:
        raise ValueError(
            f"more than {MAX_LINES} searches or {MAX_BYTES >> 20} MiB, or {MAX_NAME_BYTES >> 20} MiB of names"
        )
    if values > MAX_EVALUATIONS + MAX_LINES:  # an empty walk counts one
        raise ValueError(f"more than {MAX_EVALUATIONS} evaluations")
