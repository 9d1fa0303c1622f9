"""Digest of a searcher's code, so that results replayed with other code are recognised."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

__all__ = ["code_digest", "imported_by", "normalised_ast"]

LIBRARY_FOLDERS = ("site-packages", "dist-packages")
"""Folders of libraries, in which only a searcher's own package is its own."""

DYNAMIC_LOADER_MODULE = "subspace.py"
"""Of the package: finds searchers by their names. Whoever imports it may run any of them."""


def code_digest(file: Path | None, package: Path) -> bytes:
    """Digest of a searcher's file and of whatever it imports of a package or from beside itself, directly or not.

    Beside itself is its own package, or where it is a module without one the folder that it lies in. What is installed
    (a library) is not followed. Comments and docstrings do not count.

    Args:
        file: None where the searcher has none: the whole package then, as also where it finds others by name.
        package: Folder of the package `search`.
    """
    digest = hashlib.sha256()
    for path in sorted(_transitive_sources(file, package)):
        digest.update(normalised_ast(path.read_bytes()))
    return digest.digest()


def imported_by(file: Path | None, package: Path) -> set[str]:
    """Top-level names of the modules that this code imports; see `code_digest`."""
    names = (
        name
        for path in _transitive_sources(file, package)
        for level, name in _imported_names(path.read_bytes())
        if not level
    )
    return {name.partition(".")[0] for name in names}


@lru_cache(maxsize=256)
def normalised_ast(code: bytes) -> bytes:
    """What some code does, whatever its comments, docstrings and layout say, and whichever Python reads it."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_docstring(each)] or [ast.Pass()]
    return _dump_ast(tree).encode()


def _dump_ast(node: object) -> str:
    """As `ast.dump`, less the fields that are empty: versions of Python differ in which of these there are."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({', '.join(f'{name}={_dump_ast(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump_ast, node))}]"
    return repr(node)


def _transitive_sources(file: Path | None, package: Path) -> set[Path]:
    """A searcher's file and all that it is made of."""
    found = set(package.rglob("*.py")) if file is None else _with_imports(file, package)
    return found | set(package.rglob("*.py")) if package / DYNAMIC_LOADER_MODULE in found else found


def _is_docstring(statement: ast.stmt) -> bool:
    """A docstring, or that of a constant."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _with_imports(file: Path, package: Path) -> set[Path]:
    found, left = {file}, [file]
    own = _import_root(file)
    while left:
        fresh = set(_imported_files(left.pop(), package, own)) - found
        found |= fresh
        left += fresh
    return found


def _import_root(file: Path) -> Path:
    """The folder in which imports find a file: above its packages."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _imported_files(file: Path, package: Path, own: Path) -> Iterator[Path]:
    """Files of the package, and of those beside the searcher, that a file imports."""
    for level, name in _imported_names(file.read_bytes()):
        top, *rest = name.split(".")
        if level:
            root = file.parents[min(level, len(file.parents)) - 1]
        elif top == package.name:
            root = package.parent
        elif own.name in LIBRARY_FOLDERS and not file.is_relative_to(own / top):
            continue
        else:
            root = own
        path = root.joinpath(top, *rest)
        yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


@lru_cache(maxsize=256)
def _imported_names(code: bytes) -> tuple[tuple[int, str], ...]:
    """What some code imports, modules and what may be modules, each with how many dots stand before it.

    Read once for all searchers that share it.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inside = (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
            found += [(node.level, name) for name in (module, *inside) if name]
    return tuple(found)
