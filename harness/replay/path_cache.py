"""Cache of replayed searches in one Parquet file, which interrupted studies continue from and later ones extend."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.base.errors import UserError
from harness.base.paths import replacing
from harness.base.untrusted import open_regular
from harness.replay.replay import Indices
from harness.replay.search_key import SearchKey

FILE, PARTS_FOLDER = "walks.parquet", "walks"
_TEXT_COLUMNS = ("table", "searcher", "asked", "made_of")
COLUMNS = pa.schema([
    *((name, pa.string()) for name in _TEXT_COLUMNS),
    ("seed", pa.int32()), ("budget", pa.int32()), ("walk", pa.list_(pa.int32())),
])  # fmt: skip
# A cache may come from another machine, so its memory is limited before it is decompressed: 16,000 seeds of sixteen
# searchers, with 128 evaluations each.
MAX_BYTES = 2**28
MAX_LINES, MAX_EVALUATIONS = 2**18, 2**25
MAX_NAME_BYTES, MAX_NAME_CHARS = 2**25, 1000  # bytes of all distinct names, characters of one name
LINES_PER_BATCH = 32  # equal names are stored once, so the size of the file does not limit that of a batch


@dataclass(frozen=True, slots=True)
class SearchPath:
    """Evaluations of one search; its readings follow from them, see `simulated_selection.Searches`.

    Attributes:
        indices: Indices of the evaluated placements on the landscape, in order.
        budget: Budget of the search; with fewer indices it ended because it had nothing left to propose.
    """

    indices: Indices
    budget: int

    def truncate_to_budget(self, budget: int) -> Indices | None:
        """Return the path at another budget, or None if this search was stopped by its own budget before."""
        is_complete = self.budget >= budget or len(self.indices) < self.budget
        return self.indices[:budget] if is_complete and len(self.indices) <= self.budget else None


class PathCache:
    """Searches of a folder in its file, and in part files that are not merged into it yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths = self._read_paths()

    def paths_by_seed(self, key: SearchKey) -> Mapping[int, SearchPath]:
        """Return the cached searches of a key by seed; empty without any."""
        return self._paths.get(key, {})

    def outdated_keys(self, keys: Collection[SearchKey]) -> list[SearchKey]:
        """Return the cached keys that differ from these in the digest of table, code and libraries only."""
        questions = {key.question for key in keys}
        return [key for key in self._paths if key.question in questions and key not in keys]

    def new_part_file(self, key: SearchKey, seeds: tuple[int, ...], budget: int) -> Path:
        """Return the path of a part file for new searches."""
        name = hashlib.sha256(json.dumps([astuple(key), seeds, budget]).encode()).hexdigest()[:24]
        return self._folder / PARTS_FOLDER / f"{name}.parquet"

    def compact(self, keys: Collection[SearchKey]) -> None:
        """Merge all parts into the one file, and drop the outdated searches of these keys."""
        parts, self._paths = self._part_files(), self._read_paths()
        outdated = self.outdated_keys(keys)
        if not parts and not outdated:
            return
        for key in outdated:
            del self._paths[key]
        _write_atomically(self._folder / FILE, self._paths)
        for path in (
            *parts,
            *(self._folder / PARTS_FOLDER).glob("*.part"),
            *self._folder.glob(f"{PARTS_FOLDER}.*.part"),
        ):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # a file of the user may be in it
            (self._folder / PARTS_FOLDER).rmdir()

    def _read_paths(self) -> dict[SearchKey, dict[int, SearchPath]]:
        """Read all files; parts replace searches in the file, as they are replayed only if those cannot be used."""
        found: dict[SearchKey, dict[int, SearchPath]] = {}
        for path in [self._folder / FILE, *self._part_files()]:
            for key, seed, walk in _read_lines(path) if os.path.lexists(path) else ():
                found.setdefault(key, {})[seed] = walk
        return found

    def _part_files(self) -> list[Path]:
        return sorted((self._folder / PARTS_FOLDER).glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)


def write_part(path: Path, key: SearchKey, paths: Mapping[int, SearchPath]) -> None:
    """Write searches of one searcher on one table, by seed, as a part of a cache; an existing file is replaced.

    Args:
        path: Result of `PathCache.new_part_file`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, {key: paths})


def _write_atomically(path: Path, paths: Mapping[SearchKey, Mapping[int, SearchPath]]) -> None:
    lines = [(*astuple(key), seed, each) for key, some in sorted(paths.items()) for seed, each in sorted(some.items())]
    ends = np.cumsum([0, *(len(line[-1].indices) for line in lines)], dtype=np.int64)
    if len(lines) > MAX_LINES or ends[-1] > MAX_EVALUATIONS:
        raise UserError(f"{path}: {len(lines)} searches are more than one file takes; use another --out for new ones")
    columns = zip(*((*line[:-1], line[-1].budget) for line in lines), strict=True)
    evaluated = np.concatenate([line[-1].indices for line in lines], dtype=np.int32)
    walks = pa.ListArray.from_arrays(ends.astype(np.int32), evaluated)
    with replacing(path) as part:
        table = pa.table([*map(list, columns), walks], schema=COLUMNS)
        pq.write_table(table, part, compression="zstd", compression_level=9, write_page_checksum=True)


def _read_lines(path: Path) -> Iterator[tuple[SearchKey, int, SearchPath]]:
    """Yield the searches of a file, which may come from another machine, with a limit of its memory."""
    try:
        with open_regular(path) as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
            if not file.schema_arrow.remove_metadata().equals(COLUMNS):
                raise ValueError("other columns")
            # Sizes are checked before decompressing, because a long run of one value takes a few bytes.
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            values = sum(group.column(group.num_columns - 1).num_values for group in groups)
            names = sum(group.column(i).total_uncompressed_size for group in groups for i in range(len(_TEXT_COLUMNS)))
            if path.stat().st_size > MAX_BYTES or names > MAX_NAME_BYTES or file.metadata.num_rows > MAX_LINES:
                raise ValueError(
                    f"more than {MAX_LINES} searches or {MAX_BYTES >> 20} MiB, or {MAX_NAME_BYTES >> 20} MiB of names"
                )
            if values > MAX_EVALUATIONS + MAX_LINES:  # an empty path counts as one
                raise ValueError(f"more than {MAX_EVALUATIONS} evaluations")
            for batch in file.iter_batches(batch_size=LINES_PER_BATCH):
                if any(column.null_count for column in batch.columns) or batch.column("walk").flatten().null_count:
                    raise ValueError("a value is missing")
                columns = zip(*(batch.column(name).to_pylist() for name in COLUMNS.names[:-1]), strict=True)
                for (*names, seed, budget), walk in zip(columns, batch.column("walk"), strict=True):
                    if max(map(len, names)) > MAX_NAME_CHARS:
                        raise ValueError(f"a name of more than {MAX_NAME_CHARS} characters")
                    yield SearchKey(*names), seed, SearchPath(walk.values.to_numpy(), budget)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: no cache of searches ({error}); remove it to replay them again") from error
