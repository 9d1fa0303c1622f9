"""The key of a search changes with its code, table and libraries, and with nothing else."""

from __future__ import annotations

import hashlib
import shutil
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import search
from harness.base.errors import UserError
from harness.config.sections import PluginSpec
from harness.replay import path_cache
from harness.replay.path_cache import (
    SEARCH_PACKAGE,
    code_digest,
    describe_code,
    imported_modules,
    normalised_ast,
    search_key,
)


@pytest.fixture
def package(tmp_path):
    return Path(shutil.copytree(Path(search.__file__).parent, tmp_path / "search"))


def changes(package: Path, searcher: str, module: str) -> bool:
    """Whether the digest of a searcher changes with a module."""
    file, changed = package / "algorithms" / searcher, package / module
    before = code_digest(file, package)
    changed.write_text(changed.read_text() + "CHANGED = 1\n")
    return code_digest(file, package) != before


@pytest.mark.parametrize(
    ("searcher", "module", "expected"),
    [
        ("model_based.py", "algorithms/model_based.py", True),
        ("model_based.py", "acquisition.py", True),
        ("model_based.py", "pareto.py", True),  # by way of the archive
        ("random.py", "acquisition.py", False),
        ("random.py", "pareto.py", True),  # by way of archive
        ("bandit_portfolio.py", "algorithms/random.py", True),  # runs searchers by their names
    ],
)
def test_code_digest_covers_searcher_file_and_imports(package, searcher, module, expected):
    assert changes(package, searcher, module) is expected


@pytest.mark.parametrize(
    ("place", "line", "helper", "expected"),
    [
        ("mine.py", "import helpers", "helpers.py", True),
        ("mine.py", "from helpers import one", "helpers.py", True),
        ("mine.py", "import helpers.deep", "helpers/deep.py", True),
        ("mine.py", "import other", "helpers.py", False),
        ("mine.py", "import search.archive as archive", "search/archive.py", True),
        ("mine.py", "import json, unknown.module\nfrom . import missing", "search/archive.py", False),
        ("pack/mine.py", "from . import helpers", "pack/helpers.py", True),
        ("pack/mine.py", "from .helpers import one", "pack/helpers.py", True),
        ("pack/deep/mine.py", "from ..helpers import one", "pack/helpers.py", True),
        ("pack/mine.py", "from pack.helpers import one", "pack/helpers.py", True),
        ("site-packages/pack/mine.py", "from pack.helpers import one", "site-packages/pack/helpers.py", True),
        ("site-packages/pack/mine.py", "import library", "site-packages/library/__init__.py", False),
    ],
)
def test_code_digest_of_custom_searcher_covers_local_modules(package, tmp_path, place, line, helper, expected):
    """Libraries have a version of their own."""
    mine, other = tmp_path / place, tmp_path / helper
    for path in (mine, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path).parents:
            if folder.name not in ("", "site-packages"):
                (tmp_path / folder / "__init__.py").touch()
    mine.write_text(f"{line}\n")
    other.write_text("one = 1\n")
    before = code_digest(mine, package)
    other.write_text("one = 2\n")
    assert (code_digest(mine, package) != before) is expected


def test_normalised_ast_is_equal_in_every_python_version():
    """`ast.dump` would differ."""
    code = b"""
import numpy as np
class Mine(Base, metaclass=Meta):
    '''Text.'''
    def ask(self, n: int = 1, *rest, **more) -> list[int]: ...
def f(x, /, y=(), *, z=None):
    with open(x) as file, other: pass
    try: return f"{x!r:>{y}} {z}"
    except (A, B) as error: raise
    match x:
        case [1, *_]: yield from y
    return lambda: [a async for a in b if not c] or {**d, "e": -1j}
"""
    assert hashlib.sha256(normalised_ast(code)).hexdigest()[:16] == "4a1f7a42303245bc"


def test_imported_modules_determine_hashed_libraries(package):
    found = {
        name: imported_modules(package / "algorithms" / f"{name}.py", package)
        for name in ("random", "surrogate", "optuna_bridge")
    }
    assert "optuna" in found["optuna_bridge"]
    assert not {"optuna", "sklearn"} & found["random"]
    assert "sklearn" in found["surrogate"]


@pytest.mark.parametrize(
    ("use", "params"),
    [("per_pattern", {"searcher": "plug_inner:Own"}), ("portfolio", {"members": ["local", "plug_inner:Own"]})],
)
def test_changed_code_of_nested_searcher_changes_search_key(make_table, tmp_path, monkeypatch, use, params):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plug_inner", raising=False)
    table = make_table(path=tmp_path / "one.parquet").path
    code = "from search.algorithms.random import RandomSearcher\nclass Own(RandomSearcher):\n    {}\n"
    keys = []
    for body in ("pass", "'Other words.'", "other = 'code'"):
        (tmp_path / "plug_inner.py").write_text(code.format(body))
        keys.append(search_key(table, PluginSpec(use=use, params=params), ("float",)))
    assert keys[0] == keys[1]
    assert keys[1] != keys[2]


def test_missing_tables_libraries_and_sources(tmp_path, monkeypatch):
    searcher = PluginSpec(use="random")
    with pytest.raises(UserError, match=r"gone\.parquet: cannot be read: No such file"):
        search_key(tmp_path / "gone.parquet", searcher, ())
    monkeypatch.setattr(path_cache, "version", lambda name: (_ for _ in ()).throw(PackageNotFoundError(name)))
    assert describe_code(searcher)[1] == {"numpy": None}
    monkeypatch.setattr(path_cache, "load_plugin", lambda *_: 3)
    digests, _ = describe_code(searcher)
    assert digests == [code_digest(None, SEARCH_PACKAGE)], "without a file, the whole package"
