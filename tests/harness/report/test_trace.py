"""Trace of table cells to their readings, and what `qdq report --trace` prints."""

import re

import pytest
from small_results import TASK, edit_json, edit_samples, trace_lines
from stored import read_records, write_records
from typer.testing import CliRunner

from harness.base.errors import UserError
from harness.cli.common import short_path
from harness.cli.main import app
from harness.report.tables.catalog import build_tables
from harness.report.trace import trace_cell
from harness.results.folder import load
from harness.results.lines import compress_lines


def printed(*arguments: object) -> list[str]:
    done = CliRunner().invoke(app, ["report", str(arguments[0]), "--trace", *map(str, arguments[1:])])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_trace_of_ratio_has_line_per_turn_and_computation(folder):
    head, place, hidden, *turns, result, more = printed(folder, "random:speedup")
    assert head == f"row 6: {TASK}, random, speedup [CI]: 2.00 [2.00, 2.00]"
    assert place == f"{short_path(folder / TASK / 'confirmation.jsonl')}; samples in ms, one line a turn"
    assert hidden == "... 1 before these:"
    assert len(turns) == 5
    number = int(turns[-1].removeprefix("line ").partition(":")[0])
    stored = read_records(folder / TASK / "confirmation.jsonl")[number - 1]
    assert (stored["row"], stored["build"], stored["round"]) == ("aa", 2, 1)
    assert "build 2, turn 1: median 4 of 3 samples; baseline 8, line" in turns[-1]
    assert turns[-1].endswith("ratio 2.0000")
    assert result == "geometric mean of the median ratios of 3 builds (2, 2, 2): 2"
    assert "--raw" in more
    for path in sorted((folder / TASK).rglob("*.jsonl")):
        compress_lines(path)
    for cell, file in (("random:speedup", "confirmation.jsonl.gz"), ("random:minutes", "runs/random-0.jsonl.gz")):
        assert printed(folder, cell)[1].startswith(f"{short_path(folder / TASK / file)};")


def test_the_number_of_turns_is_an_option(folder):
    assert sum("build" in line for line in printed(folder, "random:latency", "--last", 2)) == 2 + 1
    assert not any("before these" in line for line in printed(folder, "random:latency", "--last", 6))
    assert CliRunner().invoke(app, ["report", str(folder), "--trace", "random:latency", "--last", "0"]).exit_code == 2


def test_trace_of_drop_has_difference_of_scores(folder):
    lines = printed(folder, "all:drop")
    assert lines[0] == f"row 3: {TASK}, all, drop [CI]: +0.1000"
    assert lines[-1].startswith("drop: 0.800000 - 0.700000 = +0.100000")
    assert not any("drop: " in line for line in printed(folder, "all:top-1"))

    def add_images(body):
        for row, hits in (("float", 80), ("all", 70)):
            body[f"sha of {row} main"]["per_item"] = [1.0] * hits + [0.0] * (100 - hits)

    edit_json(folder / TASK / "accuracy.json", add_images)
    *_, drop, limits, more = printed(folder, "all:drop")
    assert drop.startswith("drop: 0.800000 - 0.700000 = ")
    assert re.fullmatch(r"95 % of 1000 draws of the images.*: \[\+0\.0\d{5}, \+0\.1\d{5}\]", limits)
    assert "--raw" in more
    edit_json(folder / TASK / "task.json", higher_is_better=False)
    assert printed(folder, "all:drop")[-3].startswith("drop: 0.700000 - 0.800000 = -0.100000")


def test_scores_that_are_missing_or_failed_are_named(folder):
    def change(scores):
        del scores["sha of float main"]
        scores["sha of all main"] = {"failed": "crash", "reason": "no memory"}

    edit_json(folder / TASK / "accuracy.json", change)
    lines = trace_lines(load(folder), "all:drop")
    assert any(line.endswith("accuracy.json: no score of float") for line in lines)
    assert "    failed: crash: no memory" in lines


@pytest.mark.parametrize(
    ("table", "address", "expected"),
    [
        ("main", "random:lat", "build 0, turn 0: median 4 of 4 4 4"),
        ("main", "random:speedup", "ratio 2.0000"),
        ("main", "1:speedup", "median 8 of 8 8 8"),
        ("main", f"{TASK}/linear:verdict", "build 2 failed: build: unsupported operator"),
        ("main", "all:drop", "sha of float main (float)"),
        ("main", "all:top-1", "top1: 0.7"),
        ("main", "random:builds", "2: 2 at 30.0 s: failed: build: no"),
        ("main", "random:minutes", "1: 1 at 20.0 s: median 4 ms of 7 samples"),
        ("main", "all:builds", "median 2 of 2 2 2"),
        ("main", "random:Q/DQ", "rows.json: row aa, 5 Q/DQ pairs"),
        ("main", "tpe:latency", "nothing was measured: nothing measured"),
        ("precision", "random:decision", "ratio 2.0000"),
        ("decision", "net/best found:speedup", "ratio 2.0000"),
        ("decision", "best found:top-1", "top1: 0.79"),
        ("finalists", "2:latency", "median 5 of 5 5 5"),
        ("finalists", "2:shrinkage", "1: 1 at 20.0 s: median 4 ms of 7 samples"),
        ("budget", "random:2 evaluations", "random, seed 1 at 2 evaluations: bb"),
        ("budget", "1:3 evaluations", "random, seed 0 at 3 evaluations: aa"),
        ("targets", "1:reached 95%", "1: 1 at 20.0 s: median 4 ms of 7 samples, top1 0.79"),
        ("cost", "random:build", "2: 2 at 30.0 s: failed: build: no"),
        ("volume", "1:hypervolume", "random-1.jsonl; one line a trial"),
        ("variance", "1:between builds", "build 2, turn 1: median 2 of 2 2 2"),
    ],
)
def test_cells_are_traced_to_their_readings(folder, table, address, expected):
    assert any(expected in line for line in trace_lines(load(folder), address, table))


def test_every_column_of_every_table_has_a_source(folder, monkeypatch):
    results = load(folder)
    tables = list(build_tables(results))
    monkeypatch.setattr("harness.report.trace.build_tables", lambda _: tables)  # once, not for each cell
    for table in tables:
        for head in table.cells.columns:
            found = trace_cell(results, f"1:{head}", table.name)
            assert found.sources, f"{table.name}: {head}"
            assert found.shown == str(table.cells[head].iloc[0])


@pytest.mark.parametrize(
    ("table", "address", "message"),
    [
        ("main", "random", "ROW:COLUMN, for instance"),
        ("main", "randm:latency", "no row 'randm' in the main table of 7 rows; did you mean 'random'"),
        ("main", "9:latency", "no row '9'"),
        ("main", "float:latency", r"several rows of the main table; .*: 1 \(net-openvino-int8, f32\), 2"),
        ("main", "random:speed of light", "no single column of the main table .* 'speed of light': model, device"),
        ("main", "random:", "no single column"),
        ("budgets", "1:latency", "no table 'budgets'; did you mean 'budget'"),
    ],
)
def test_a_wrong_address_is_explained(folder, table, address, message):
    with pytest.raises(UserError, match=message):
        trace_cell(load(folder), address, table)


def test_trace_computation_equals_cell(folder):
    edit_samples(folder / TASK, "aa", lambda samples_ms, build: [ms * 2**build for ms in samples_ms])
    latency, speedup = (trace_cell(load(folder), f"random:{column}") for column in ("latency", "speedup"))
    assert latency.sources[-1].result == "geometric mean of the median turns of 3 builds (4, 8, 16): 8 ms"
    assert latency.shown.startswith("8.000 [")
    assert speedup.sources[-1].result == "geometric mean of the median ratios of 3 builds (2, 1, 0.5): 1"
    assert speedup.shown.startswith("1.00 [")
    path = folder / TASK / "confirmation.jsonl"
    write_records(path, (line for line in read_records(path) if line.get("build", 0) == 0))
    single = trace_cell(load(folder), "random:latency")
    assert single.sources[-1].result == "geometric mean of the turns of the one build (4, 4): 4 ms"


def test_a_task_that_has_not_started_has_no_source(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("models:\n", "models:\n- use: new.onnx\n"))
    assert trace_lines(load(folder), "new-openvino-int8/tpe:latency") == ["the task has not started"]
