"""Paths and tables in the output of commands."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from harness.cli.common import print_table, short_path


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("here/specs/../out", "here/out"),
        ("{root}/work/here/specs/../out", "here/out"),
        ("here/../../next/x", "../next/x"),
        ("{root}/work/here", "here"),
        ("here/", "here"),
        ("link/..", "here"),
        ("/x/../y", "/y"),
    ],
)
def test_short_path_is_shortest_without_dots(tmp_path, monkeypatch, given, shown):
    root = tmp_path / "a long name of the parent folder"
    work = root / "work"
    (work / "here" / "specs").mkdir(parents=True)
    (work / "link").symlink_to(work / "here" / "specs")
    monkeypatch.chdir(work)
    assert short_path(Path(given.format(root=root))) == Path(shown)


def test_print_table_to_terminal_escapes_markup(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    print_table(("what", "state"), [("tensorrt", "pip install '.[tensorrt]'"), ("[bold]x[/]", "ok")])
    assert "'.[tensorrt]'" in screen.getvalue()
    assert "[bold]x[/]" in screen.getvalue()
