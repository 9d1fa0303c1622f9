"""Output of commands: paths, tables, JSON, and mistakes that are named together."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from small import qdq, save_chain
from small_results import TASK, write_folder

from harness.base.terminal_progress import EventProgress
from harness.cli.common import print_table, short_path
from harness.cli.main import COMMANDS


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


#: Commands that write files and print no table.
WITHOUT_TABLE = {"bench record", "calib-data", "gen-trt-engine", "init", "zoo", "bench score", "bench export"}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert qdq(*arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_every_command_with_table_has_json_option(capsys):
    for name in COMMANDS.keys() - WITHOUT_TABLE:
        assert qdq(*name.split(), "--help") == 0
        assert "--json" in capsys.readouterr().out, name


def test_a_report_and_a_comparison_have_raw_values(tmp_path, capsys):
    folder = write_folder(tmp_path)
    found = printed(capsys, "report", str(folder), "--json", "--no-plots")
    speedups = {row["method"]: row["speedup"] for row in found["tables"]["main"] if row["task"] == TASK}
    assert speedups["all"] == pytest.approx(4.0)
    assert isinstance(found["answers"], list)
    found = printed(capsys, "report", str(folder), "--compare", str(folder), "--json")
    assert found["rows"]
    assert found["differences"] == []
    found = printed(capsys, "report", str(folder), "--trace", "all:speedup", "--json")
    assert found["lines"]
    assert found["shown"].startswith("4.00")


def test_events_are_one_object_a_line(capsys):
    with EventProgress() as progress:
        progress.say("a\nb")
        with progress.work("search", 2) as step:
            step.advance("2.0x")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["line", "start", "step", "end"]
    assert (lines[2]["done"], lines[2]["total"], lines[2]["note"]) == (1, 2, "2.0x")


ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "experiments/specs/evaluate_classifier.yaml"


def test_mistakes_of_a_command_line_are_named_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").touch()
    model = str(save_chain(tmp_path / "net.onnx", (8, 4)))
    start = ("autotune", "-m", model, "-o", "out")
    for command, facts in (
        (("autotune", "net.onnx"), ["did you mean --onnx_path net.onnx?"]),
        (("ptq", "net.onnx"), ["did you mean --onnx_path net.onnx?"]),
        (("ptq", "--onnx_path", model, "--calibration=gone.npy"), ["gone.npy: no such file"]),
        ((*start, "--max_evals", "5", "--calibration_data", "gone.npy"), ["gone.npy: no such file", "at least 6"]),
        (start, ["out: is a file, not a folder"]),
    ):
        assert qdq(*command) == 2
        error = capsys.readouterr().err
        assert all(fact in error for fact in facts), error


@pytest.mark.assets
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
def test_classifier_example_gives_top1_with_interval(tmp_path, capsys):
    text = (ROOT / EXAMPLE).read_text(encoding="utf-8")
    (tmp_path / "classifier.yaml").write_text(text.replace("../../out", "out"), encoding="utf-8")
    assert qdq("evaluate", str(tmp_path / "classifier.yaml")) == 0
    line = capsys.readouterr().out.splitlines()[1].split("\t")
    assert line[:3] == ["classifier", "assets:models/squeezenet1.1.onnx", "float"]
    found = re.fullmatch(r"top1 (0\.\d{4}) \[(0\.\d{4}), (0\.\d{4})\]", line[3])
    assert found is not None
    top1, low, high = map(float, found.groups())
    assert low < top1 < high
    assert 0.6 < top1 < 0.85, "0.70 on 1300 images"
    assert (tmp_path / "out/classifier.evaluation.json").exists()
