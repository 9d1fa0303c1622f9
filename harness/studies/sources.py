"""What code a searcher is made of, so that what was replayed with other code is known to be of other code."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

__all__ = ["code_digest"]

BY_NAME = "scope.py"
"""Of the package: finds searchers by their names. Whoever imports it may run any of them."""


def code_digest(file: Path | None, package: Path) -> bytes:
    """Digest of a searcher's file and of whatever it imports of a package, directly or not.

    Args:
        file: None where the searcher has none: the whole package then, as also where it finds others by name.
        package: Folder of the package `search`.
    """
    found = set(package.rglob("*.py")) if file is None else _with_imports(file, package)
    if package / BY_NAME in found:
        found |= set(package.rglob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.read_bytes())
    return digest.digest()


def _with_imports(file: Path, package: Path) -> set[Path]:
    found, left = {file}, [file]
    while left:
        fresh = set(_imports(left.pop(), package)) - found
        found |= fresh
        left += fresh
    return found


def _imports(file: Path, package: Path) -> Iterator[Path]:
    """Files of the package that a file imports; its imports are absolute, which the linter sees to."""
    for top, *rest in (name.split(".") for name in _names(file.read_bytes())):
        path = package.joinpath(*rest)
        if top == package.name:
            yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


@lru_cache(maxsize=256)
def _names(code: bytes) -> tuple[str, ...]:
    """What some code imports, modules and what may be modules; read once for all searchers that share it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)
