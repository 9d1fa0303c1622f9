"""Paths and tables in the output of commands."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from small import qdq, save_small

from harness.cli.common import print_table, short_path


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("here/out", "here/out"),
        ("here/specs/../out", "here/out"),
        ("{root}/work/here/specs/../out", "here/out"),
        ("../next", "../next"),
        ("here/../../next/x", "../next/x"),
        ("{root}/work/here", "here"),
        ("here/", "here"),
        ("link", "link"),
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


def test_gen_trt_engine_prints_short_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    save_small(tmp_path / "net.onnx")
    Path("specs/engine.yaml").write_text(
        "gen_trt_engine: {onnx_file: ../net.onnx, trt_engine: ../built/net.openvino}\n"
    )
    assert qdq("gen-trt-engine", "specs/engine.yaml", "--backend", "openvino") == 0
    assert capsys.readouterr().out.startswith("built/net.openvino: openvino ")
    assert Path("built/net.openvino").exists()


def test_error_shows_short_path_of_results_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert qdq("explain", "specs/../out") == 2
    assert capsys.readouterr().err.startswith("qdq: out: a results folder needs a row: qdq explain out ROW")


def test_print_table_to_pipe_has_headings_and_notes(capsys):
    print_table(("name", "value"), [("a", "1"), ("b", "2")], ["note"])
    assert capsys.readouterr().out.splitlines() == ["name\tvalue", "a\t1", "b\t2", "note"]


def test_print_table_to_terminal_escapes_markup(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    print_table(("what", "state"), [("tensorrt", "pip install '.[tensorrt]'"), ("[bold]x[/]", "ok")])
    assert "'.[tensorrt]'" in screen.getvalue()
    assert "[bold]x[/]" in screen.getvalue()
