"""The walks of a study, kept in one small file: it goes on where it stopped, and others add to it."""

from __future__ import annotations

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

__all__ = ["Kept", "Series", "Walk", "write_part"]

Walk = npt.NDArray[np.int32]
"""Indices on a landscape of what one search evaluated, in order; what it read there follows, see `replay.walks_of`."""
FILE, PARTS = "walks.parquet", "walks"
COLUMNS = pa.schema([
    ("table", pa.string()),
    ("searcher", pa.string()),
    ("digest", pa.string()),
    ("seed", pa.int32()),
    ("walk", pa.list_(pa.int32())),
])  # fmt: skip
MAX_DECODED = 2**31
AT_ONCE = 1024
"""Lines that are unpacked at once."""


@dataclass(frozen=True, slots=True, order=True)
class Series:
    """Searches of one searcher on one table.

    Attributes:
        table: Its name.
        searcher: Its label.
        digest: Of all that decides how it searches.
    """

    table: str
    searcher: str
    digest: str


class Kept:
    """What is there of the walks of a study: those of its file, and those that were not gathered into it yet.

    Raises:
        UserError: A file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._walks = self._read()

    @property
    def file(self) -> Path:
        return self._folder / FILE

    def of(self, series: Series) -> Mapping[int, Walk]:
        """By seed."""
        return self._walks.get(series, {})

    def stale(self, asked: Collection[Series]) -> list[Series]:
        """Of the same searchers on the same tables, by another digest: of other code or parameters, for one."""
        contested = {(each.table, each.searcher) for each in asked}
        return [each for each in self._walks if (each.table, each.searcher) in contested and each not in asked]

    def part(self, series: Series, first: int) -> Path:
        """Where some new walks go, those from one seed on."""
        return self._folder / PARTS / f"{series.digest}-{first}.parquet"

    def gather(self, asked: Collection[Series]) -> None:
        """Put all walks that are there by now into the one file.

        Args:
            asked: What the study asks now; what is stale beside it goes.
        """
        parts, self._walks = self._parts(), self._read()
        stale = self.stale(asked)
        if not parts and not stale:
            return
        for each in stale:
            del self._walks[each]
        _write(self.file, self._walks)
        for path in parts:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another study of this folder may have put something there
            (self._folder / PARTS).rmdir()

    def _read(self) -> dict[Series, dict[int, Walk]]:
        found: dict[Series, dict[int, Walk]] = {}
        for path in [self.file, *self._parts()]:
            if path.exists():
                for series, seed, walk in _lines(path):
                    found.setdefault(series, {})[seed] = walk
        return found

    def _parts(self) -> list[Path]:
        return sorted((self._folder / PARTS).glob("*.parquet"))


def write_part(path: Path, series: Series, walks: Mapping[int, Walk]) -> None:
    """Write some walks of one searcher on one table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, {series: walks})


def _write(path: Path, walks: Mapping[Series, Mapping[int, Walk]]) -> None:
    """It appears whole or not at all."""
    lines = [(series, seed, walk) for series, some in sorted(walks.items()) for seed, walk in sorted(some.items())]
    ends = np.cumsum([0, *(len(walk) for _, _, walk in lines)], dtype=np.int32)
    names = zip(*((*astuple(series), seed) for series, seed, _ in lines), strict=True)
    body = pa.ListArray.from_arrays(ends, np.concatenate([walk for _, _, walk in lines], dtype=np.int32))
    part = path.with_suffix(f".{os.getpid()}.part")
    pq.write_table(pa.table([*map(list, names), body], schema=COLUMNS), part, compression="zstd", compression_level=9)
    part.replace(path)


def _lines(path: Path) -> Iterator[tuple[Series, int, Walk]]:
    """What a file says, whoever wrote it.

    Raises:
        UserError: It is not of this kind, or unpacks to more than any study does.
    """
    decoded = 0
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.remove_metadata().equals(COLUMNS):
                raise ValueError("other columns")
            for batch in file.iter_batches(batch_size=AT_ONCE):
                decoded += batch.nbytes
                if decoded > MAX_DECODED:
                    raise ValueError(f"it unpacks to more than {MAX_DECODED >> 20} MiB")
                if any(column.null_count for column in batch.columns) or batch.column("walk").flatten().null_count:
                    raise ValueError("something is missing in it")
                *names, seeds = (batch.column(name).to_pylist() for name in COLUMNS.names[:-1])
                for *name, seed, walk in zip(*names, seeds, batch.column("walk"), strict=True):
                    yield Series(*name), seed, walk.values.to_numpy()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: no walks of a study ({error}); remove it to replay them again") from error
