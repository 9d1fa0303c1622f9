"""What commands make of paths and tables before they print them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from harness.cli.common import print_table, short_path


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("here/out", "here/out"),
        ("here/specs/../out", "here/out"),
        ("{root}/work/here/specs/../out", "here/out"),
        ("../beside", "../beside"),
        ("here/../../beside/x", "../beside/x"),
        ("{root}/work/here", "here"),
        ("here/", "here"),
    ],
)
def test_a_path_is_shown_without_detours(tmp_path, monkeypatch, given, shown):
    root = tmp_path / "a long name that nobody wants to read twice"
    (root / "work" / "here" / "specs").mkdir(parents=True)
    monkeypatch.chdir(root / "work")
    assert short_path(Path(given.format(root=root))) == Path(shown)


def test_what_is_far_away_stays_absolute(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b" / "c" / "d" / "e"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert short_path(Path("/x/../y")) == Path("/y")


def test_a_link_keeps_its_name_and_is_followed_where_it_is_left_by_dots(tmp_path, monkeypatch):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    monkeypatch.chdir(tmp_path)
    assert short_path(Path("link")) == Path("link")
    assert short_path(Path("link/..")) == Path("real")


def test_a_pipe_gets_the_headings_too(capsys):
    print_table(("name", "value"), [("a", "1"), ("b", "2")])
    assert capsys.readouterr().out.splitlines() == ["name\tvalue", "a\t1", "b\t2"]


def test_cells_are_text_and_no_markup_on_a_terminal(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Screen())
    print_table(("what", "state"), [("tensorrt", "pip install '.[tensorrt]'"), ("[bold]x[/]", "ok")])
    assert "'.[tensorrt]'" in sys.stdout.getvalue()
    assert "[bold]x[/]" in sys.stdout.getvalue()
