"""Requested searches from a cache in one Parquet file, which is extended by the searches that it lacks.

The searches of interrupted commands and of earlier ones are in it. Worker processes replay in batches, each of which is
written to a part file until all are merged.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import multiprocessing
import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import search
from harness.base.errors import UserError
from harness.base.files import open_regular
from harness.base.paths import replacing
from harness.base.progress import Observer
from harness.base.statistics import stderr_of_median
from harness.config.sections import PluginSpec
from harness.plugins.registry import load_plugin
from harness.replay.replay import (
    Indices,
    Landscape,
    ReplayRequest,
    initial_models,
    is_valid_path,
    load_landscape,
    replay,
)
from harness.run.search.loop import MAX_CONSECUTIVE_DUPLICATES
from harness.runtimes.replay import BenchmarkTable
from search.space import Space

SEARCH_PACKAGE = Path(search.__file__).parent
LIBRARY_FOLDERS = ("site-packages", "dist-packages")
DYNAMIC_LOADER_MODULE = "subspace.py"  # looks searchers up by name, so modules that import it may run any searcher
# Distribution by module of libraries whose version may change a search with the same seed.
LIBRARIES = {
    "kernel_tuner": "kernel-tuner", "nevergrad": "nevergrad", "optuna": "optuna", "scipy": "scipy",
    "sklearn": "scikit-learn", "smac": "smac", "syne_tune": "syne-tune", "torch": "torch",
}  # fmt: skip
# Code in whose modules the results are computed that a searcher receives.
READING_CODE = (Landscape, Space, BenchmarkTable, replay, stderr_of_median)
LAZY_LIBRARIES = ("scipy", "torch")  # Optuna imports these, and optionally cmaes, for some of its samplers only


@dataclass(frozen=True, slots=True, order=True)
class SearchKey:
    """Key of the searches of one searcher on one table.

    Attributes:
        asked: Digest of the settings: searcher, parameters and initial placements.
        made_of: Digest of the table, the code and the versions of libraries.
    """

    table: str
    searcher: str
    asked: str
    made_of: str

    @property
    def question(self) -> tuple[str, str, str]:
        """Return the key without `made_of`: (table, searcher, asked)."""
        return self.table, self.searcher, self.asked


def search_key(table: Path, searcher: PluginSpec, initial: Sequence[str]) -> SearchKey:
    """Return the key of the searches of a searcher on a table from the initial placements of these names.

    The budget is not part of the key: searchers do not know it, so a search with a smaller budget is the start of one
    with a larger budget.
    """
    asked = {"use": searcher.use, "params": searcher.params, "initial": initial}
    codes, libraries = describe_code(searcher)
    made_of = {"patience": MAX_CONSECUTIVE_DUPLICATES, "libraries": libraries}
    try:
        content = hashlib.sha256(table.read_bytes()).digest()
    except OSError as error:
        raise UserError(f"{table}: cannot be read: {error.strerror or error}") from error
    readings = [normalised_ast(Path(str(inspect.getsourcefile(each))).read_bytes()) for each in READING_CODE]
    return SearchKey(
        table.stem, searcher.name, _settings_digest(asked), _settings_digest(made_of, content, *codes, *readings)
    )


def _settings_digest(settings: dict[str, Any], *content: bytes) -> str:
    text = json.dumps(settings, sort_keys=True, default=str).encode()
    return hashlib.sha256(b"".join([text, *content])).hexdigest()[:24]


def describe_code(searcher: PluginSpec) -> tuple[list[bytes], dict[str, str | None]]:
    """Return the digests of the code of a searcher and of those in its parameters, and the versions of their libraries.

    The version of a library is without the build of a wheel; None if it is not installed.
    """
    params = searcher.params  # parameters may name further searchers, also plug-ins
    members = params.get("members")
    nested = (*(members if isinstance(members, list | tuple) else ()), params.get("searcher"))
    files: list[Path | None] = []
    for use in (searcher.use, *nested):
        if isinstance(use, str):
            try:
                source = inspect.getsourcefile(load_plugin("searcher", use))
            except TypeError:  # neither a class nor a function
                source = None
            files.append(None if source is None else Path(source))
    modules = {name for file in files for name in imported_modules(file, SEARCH_PACKAGE)}
    names = {"numpy", *(name for module, name in LIBRARIES.items() if module in modules)}
    if "optuna" in modules:
        names |= {*LAZY_LIBRARIES, *(("cmaes",) if "CmaEs" in json.dumps(params, default=str) else ())}
    versions: dict[str, str | None] = dict.fromkeys(sorted(names))
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name).partition("+")[0]
    return [code_digest(file, SEARCH_PACKAGE) for file in files], versions


def code_digest(file: Path | None, package: Path) -> bytes:
    """Return the digest of a searcher's file and of all files that it imports, directly or indirectly.

    Imports are followed into the package `search` and the searcher's own package (or the folder of a single file), not
    into installed libraries. Comments and docstrings do not count.

    Args:
        file: File of the searcher; None: all files of `package`, as for code that looks searchers up by name.
        package: Folder of the package `search`.
    """
    sources = [normalised_ast(path.read_bytes()) for path in sorted(_source_files(file, package))]
    return hashlib.sha256(b"".join(sources)).digest()


def imported_modules(file: Path | None, package: Path) -> set[str]:
    """Return the top-level names of the modules that the code of `code_digest` imports."""
    names = (each for path in _source_files(file, package) for each in _imported_names(path.read_bytes()))
    return {name.partition(".")[0] for level, name in names if not level}


@lru_cache(maxsize=256)
def normalised_ast(code: bytes) -> bytes:
    """Return the syntax tree of code without comments, docstrings and layout, equal for all versions of Python."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_docstring(each)] or [ast.Pass()]
        elif isinstance(node, ast.JoinedStr):  # Python 3.12 ends some format specifications by an empty text
            node.values = [each for each in node.values if not (isinstance(each, ast.Constant) and each.value == "")]
    return _dump_ast(tree).encode()


def _is_docstring(statement: ast.stmt) -> bool:
    """Return whether a statement is the docstring of a definition or of a constant."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _dump_ast(node: object) -> str:
    """Dump a node like `ast.dump`, without empty fields, which differ between versions of Python."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({', '.join(f'{name}={_dump_ast(value)}' for name, value in fields)})"
    return f"[{', '.join(map(_dump_ast, node))}]" if isinstance(node, list) else repr(node)


def _source_files(file: Path | None, package: Path) -> set[Path]:
    """Return the files that the code of a searcher consists of; see `code_digest`."""
    if file is None:
        return set(package.rglob("*.py"))
    root = file.parent  # folder on the module search path that contains the file
    while (root / "__init__.py").is_file():
        root = root.parent
    files, pending = {file}, [file]
    while pending:
        importer = pending.pop()
        for level, name in _imported_names(importer.read_bytes()):
            top, *rest = name.split(".")
            folder = root
            if level:
                folder = importer.parents[min(level, len(importer.parents)) - 1]
            elif top == package.name:
                folder = package.parent
            elif root.name in LIBRARY_FOLDERS and not importer.is_relative_to(root / top):
                continue
            path = folder.joinpath(top, *rest)
            for each in (path.with_suffix(".py"), path / "__init__.py"):
                if each.is_file() and each not in files:
                    files.add(each)
                    pending.append(each)
    return files | set(package.rglob("*.py")) if package / DYNAMIC_LOADER_MODULE in files else files


@lru_cache(maxsize=256)
def _imported_names(code: bytes) -> tuple[tuple[int, str], ...]:
    """Return the modules, and what may be modules, that code imports, each with the number of dots before it."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            inside = (f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names)
            found += [(node.level, name) for name in (node.module, *inside) if name]
    return tuple(found)


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
        landscape = load_landscape(request.table)
        first = initial_models(landscape, request.initial)[: request.budget]
        seeds = []
        for seed in request.seeds:
            known = cached[seed].truncate_to_budget(request.budget) if seed in cached else None
            if (
                known is None
                or not is_valid_path(landscape, known)
                or landscape.identity[known[: len(first)]].tolist() != first
            ):
                seeds.append(seed)
        damaged = any(cached[seed].budget >= request.budget for seed in seeds if seed in cached)
        if seeds and (damaged or key.question in outdated):
            refused.append(key.searcher)
        for start in range(0, len(seeds), SEARCHES_PER_BATCH):
            batch = tuple(seeds[start : start + SEARCHES_PER_BATCH])
            facts = json.dumps([astuple(key), batch, request.budget]).encode()
            path = out / PARTS_FOLDER / f"{hashlib.sha256(facts).hexdigest()[:24]}.parquet"
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

    def exit_with_parent() -> None:  # otherwise workers of a killed parent would wait forever
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()


def _replay_batch(path: Path, key: SearchKey, request: ReplayRequest) -> None:
    paths = replay(load_landscape(request.table), request)
    write_paths(path, {key: {seed: SearchPath(indices, request.budget) for seed, indices in paths.items()}})


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

    def compact(self, keys: Collection[SearchKey]) -> None:
        """Merge all parts into the one file, and drop the outdated searches of these keys."""
        parts, self._paths = self._part_files(), self._read_paths()
        outdated = self.outdated_keys(keys)
        if not parts and not outdated:
            return
        for key in outdated:
            del self._paths[key]
        write_paths(self._folder / FILE, self._paths)
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


def write_paths(path: Path, paths: Mapping[SearchKey, Mapping[int, SearchPath]]) -> None:
    """Write searches by key and seed as a cache, or a part of one, atomically; an existing file is replaced."""
    lines = [
        (*astuple(key), seed, found.budget, found.indices)
        for key, some in sorted(paths.items())
        for seed, found in sorted(some.items())
    ]
    if len(lines) > MAX_LINES or sum(len(indices) for *_, indices in lines) > MAX_EVALUATIONS:
        raise UserError(f"{path}: {len(lines)} searches are more than one file takes; use another --out for new ones")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        table = pa.table([list(column) for column in zip(*lines, strict=True)], schema=COLUMNS)
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
