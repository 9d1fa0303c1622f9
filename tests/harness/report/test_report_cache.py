"""A report that is there already is not drawn again; whatever it is made of counts."""

from __future__ import annotations

import importlib

import pytest
from typer.testing import CliRunner

from harness.base.files import read_json, write_json
from harness.cli.main import app
from harness.report.plots.plot_files import PLOT_FILE_FORMATS, PlotCache
from harness.results.manifest import describe_files, list_files

RENDER = importlib.import_module("harness.report.render")
TASK = "net-openvino-int8"
SAID = "Nothing has changed since they were drawn"


@pytest.fixture
def drawn(monkeypatch):
    """Counts how often plots are drawn, which takes long."""
    monkeypatch.setattr(RENDER, "CODE_SUFFIXES", frozenset())  # which others may be editing just now
    calls = []
    monkeypatch.setattr(RENDER, "draw_plots", lambda *_, **__: calls.append(1) or [])
    return calls


def report(folder) -> str:
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_unchanged_report_is_reused_and_its_tables_printed(folder, drawn):
    first = report(folder)
    page = folder / "report" / "index.html"
    written_ns = page.stat().st_mtime_ns
    second = report(folder)
    assert len(drawn) == 1
    assert page.stat().st_mtime_ns == written_ns
    assert SAID not in first
    assert second.startswith(first.rstrip())
    assert f"{SAID}; to draw them again, remove that folder." in second


def test_report_is_redrawn_after_any_change_of_results(folder, drawn, tmp_path):
    """A record, a page or a manifest; a folder that was moved, because the page names it in its commands."""
    report(folder)
    page = folder / "report" / "index.html"
    text = page.read_text()
    page.write_text("damaged")
    assert SAID not in report(folder)
    assert page.read_text() == text
    for name in ("experiment.yaml", "confirmation.jsonl", "runs/random-0.jsonl", "accuracy.json"):
        with (folder / ("" if name.endswith("yaml") else TASK) / name).open("a") as file:
            file.write('{"kind' if name.endswith(".jsonl") else "\n")
        assert SAID not in report(folder), name
    (folder / TASK / "stopped.txt").write_text("the disk is full\n")
    assert SAID not in report(folder)
    write_json(folder / TASK / "noise_floor.json", {"noise_floor": 0.05})
    assert SAID not in report(folder)
    assert SAID in report(folder)
    page.unlink()
    assert SAID not in report(folder)
    (folder / "report" / "manifest.json").write_bytes(b"\xff\xfe")
    assert SAID not in report(folder)
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    folder.rename(moved)
    assert SAID not in report(moved)
    assert len(drawn) == 11


def test_report_is_redrawn_after_change_of_code(folder, drawn, monkeypatch):
    report(folder)
    monkeypatch.setattr(RENDER, "version", lambda name: "another")
    assert SAID not in report(folder), "another version of a library may draw otherwise"
    monkeypatch.setattr(RENDER, "CODE_SUFFIXES", frozenset({".css"}))
    assert SAID not in report(folder)
    assert SAID in report(folder)


def test_the_report_of_another_user_is_drawn_again(folder, drawn, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    report(folder)
    page = folder / "report" / "index.html"
    page.write_text("<script>alert(1)</script>")
    files = describe_files(page.parent, list_files(page.parent))
    write_json(page.parent / "manifest.json", {**read_json(page.parent / "manifest.json"), "files": files})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    assert SAID not in report(folder)
    assert "alert(1)" not in page.read_text()
    assert SAID in report(folder)
    assert (tmp_path / "ours" / "qdq-bench" / "key").stat().st_mode & 0o077 == 0, "other users cannot read it"


@pytest.mark.parametrize(("name", "drawn"), [("x.svg", 0), ("../x.svg", 1), ("/x.svg", 1)])
def test_manifest_with_plot_outside_report_is_ignored(tmp_path, name, drawn):
    for kind in PLOT_FILE_FORMATS:
        (tmp_path / f"x.{kind}").touch()
    entry = {"inputs": "digest", "complete": True, "plots": [["title", name, True]]}
    write_json(
        tmp_path / "manifest.json", {"files": describe_files(tmp_path, list_files(tmp_path)), "plots": {TASK: entry}}
    )
    calls = []
    PlotCache(tmp_path, {TASK: "digest"}).draw(TASK, lambda: calls.append(1) or [], complete=True)
    assert len(calls) == drawn
