"""What `qdq trace` shows: a few lines as a rule, every single reading where it is asked for; see test_compare too."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from harness.cli.common import short_path
from harness.cli.main import app
from harness.report.load.results import load
from harness.report.trace import trace_cell

CELL = "net-openvino-int8"


def said(*arguments: object) -> list[str]:
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_ratio_is_a_line_a_turn_the_last_ones_and_how_they_come_to_the_figure(folder):
    head, place, hidden, *turns, result, more = said(folder, "random:speedup")
    assert head == f"row 6: {CELL}, random, speedup [CI]: 2.00 [2.00, 2.00]"
    assert place == f"{short_path(folder / CELL / 'confirm.jsonl')}; samples in ms, one line a turn"
    assert hidden == "... 1 before these:"
    assert len(turns) == 5
    number = int(turns[-1].removeprefix("line ").partition(":")[0])
    stored = json.loads((folder / CELL / "confirm.jsonl").read_text().splitlines()[number - 1])
    assert (stored["row"], stored["build"], stored["round"]) == ("aa", 2, 1)
    assert "build 2, turn 1: median 4 of 3 samples; baseline 8, line" in turns[-1]
    assert turns[-1].endswith("ratio 2.0000")
    assert result == "geometric mean of the median ratios of 3 builds (2, 2, 2): 2"
    assert more == "--raw shows every single reading."


def test_raw_shows_every_reading_of_turns_and_trials(folder):
    lines = said(folder, "random:speedup", "--raw")
    assert len(lines) == 2 + 6 * 2 + 1
    assert sum(line.endswith("median 4 of 4 4 4") for line in lines) == 6
    assert lines[-1].startswith("geometric mean"), "no word of --raw, for nothing is left out"
    lines = said(folder, "random:minutes", "--raw")
    assert "    samples in ms: 4 4 4 4 4 4 4" in lines


def test_so_many_as_are_asked_for(folder):
    assert sum("build" in line for line in said(folder, "random:latency", "--last", 2)) == 2 + 1
    assert not any("before these" in line for line in said(folder, "random:latency", "--last", 6))
    assert CliRunner().invoke(app, ["trace", str(folder), "random:latency", "--last", "0"]).exit_code == 2


def test_a_search_is_a_line_a_trial(folder):
    lines = said(folder, "random:minutes", "--table", "cost")
    trials = [line for line in lines if " at " in line]
    assert len(trials) == 2 * 3, "two searches"
    assert trials[1] == "1: 1 at 20.0 s: median 4 ms of 7 samples, top1 0.79"


def test_scores_name_the_images_and_show_their_values_raw(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    body["sha of aa main"]["per_item"] = [1.0, 0.79, 0.58]
    path.write_text(json.dumps(body))
    assert "    by item: 3 values" in said(folder, "random:top-1")
    assert "    by item: 1 0.79 0.58" in said(folder, "random:top-1", "--raw")
    assert "    top1: 0.79" in said(folder, "random:top-1", "--last", 1), "figures are never cut"


def test_a_drop_is_the_subtraction_of_two_scores(folder):
    lines = said(folder, "all:drop")
    assert lines[0] == f"row 3: {CELL}, all, drop [CI]: +0.1000"
    assert lines[-1] == "drop: 0.800000 - 0.700000 = +0.100000 (float less this row)"
    assert not any("drop: " in line for line in said(folder, "all:top-1"))
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    for row, share in (("float", 80), ("all", 70)):
        body[f"sha of {row} main"]["per_item"] = [1.0] * share + [0.0] * (100 - share)
    path.write_text(json.dumps(body))
    *_, drop, limits, more = said(folder, "all:drop")
    assert drop.startswith("drop: 0.800000 - 0.700000 = ")
    assert re.fullmatch(
        r"95 % of 1000 draws of the images, subtracted draw by draw: \[\+0\.0\d{5}, \+0\.1\d{5}\]", limits
    )
    assert more == "--raw shows every single reading."


def test_a_drop_of_what_is_better_lower_is_subtracted_the_other_way(folder):
    path = folder / CELL / "cell.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "higher_is_better": False}))
    lines = said(folder, "all:drop")
    assert lines[-1] == "drop: 0.700000 - 0.800000 = -0.100000 (this row less float, for a lower figure is better)"


def test_what_several_seeds_chose_is_shown_once(folder):
    found = trace_cell(load(folder), "random:2 evaluations", "budget")
    chosen = [line for line in found.lines if "at 2 evaluations" in line]
    assert chosen == [f"{CELL}, random, seed {seed} at 2 evaluations: bb" for seed in (0, 1)]
    assert sum(line.startswith("geometric mean") for line in found.lines) == 1


@pytest.mark.parametrize("address", ["random:Q/DQ", "tpe:latency"])
def test_facts_are_whole_and_ask_for_no_raw_readings(folder, address):
    assert said(folder, address) == said(folder, address, "--raw")
