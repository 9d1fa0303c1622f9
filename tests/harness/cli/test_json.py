"""Commands that print a table print it as JSON too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small import qdq
from small_results import TASK, write_folder

from harness.base.terminal_progress import EventProgress
from harness.cli.main import COMMANDS

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
