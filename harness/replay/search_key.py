"""Key of replayed searches: digests of their settings, and of the table, code and libraries that determine them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import search
from harness.base.errors import UserError
from harness.base.statistics import stderr_of_median
from harness.config.sections import PluginSpec
from harness.plugins.registry import load_plugin
from harness.replay.recorded_landscape import Landscape
from harness.replay.replay import replay
from harness.run.search.loop import MAX_CONSECUTIVE_DUPLICATES
from harness.runtimes.benchmark_table import BenchmarkTable
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
        new = set(_imported_files(pending.pop(), package, root)) - files
        files |= new
        pending += new
    return files | set(package.rglob("*.py")) if package / DYNAMIC_LOADER_MODULE in files else files


def _imported_files(file: Path, package: Path, own_root: Path) -> Iterator[Path]:
    for level, name in _imported_names(file.read_bytes()):
        top, *rest = name.split(".")
        if level:
            root = file.parents[min(level, len(file.parents)) - 1]
        elif top == package.name:
            root = package.parent
        elif own_root.name in LIBRARY_FOLDERS and not file.is_relative_to(own_root / top):
            continue
        else:
            root = own_root
        path = root.joinpath(top, *rest)
        yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


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
