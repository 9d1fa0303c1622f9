"""Folders side by side, and cells of tables traced to their readings."""

import json
import shutil

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from harness.cli.common import short_path
from harness.cli.main import app
from harness.errors import UserError
from harness.report.frames.folder_comparison import compare_frame, describe_differences
from harness.report.load.results import load
from harness.report.tables.table_layouts import build_tables
from harness.report.trace import trace_cell

CELL = "net-openvino-int8"


@pytest.fixture
def other(folder, tmp_path_factory, confirmation_maker):
    """The same run on a machine that is twice as fast but for one row, with another library."""
    copy = tmp_path_factory.mktemp("other") / "out"
    shutil.copytree(folder, copy)
    confirmation_maker(copy / CELL, {"A/A twin": 4.0, "float": 4.0, "float-bf16": 5.0, "all": 2.0, "bb": 2.5})
    for path, version in ((folder, "2026.3"), (copy, "2026.4")):
        facts = {"packages": {"openvino": version}, "cpu": {"model": "A CPU"}, "load_average": [len(version) * 0.1]}
        (path / CELL / "env.json").write_text(json.dumps(facts))
    return copy


def test_rows_are_matched_with_a_ratio_and_missing_ones_said(folder, other):
    found = compare_frame(load(folder), load(other)).set_index("method")
    assert found.loc["float f32", "ratio"] == pytest.approx(2.0)
    assert found.loc["float f32", ["ratio_low", "ratio_high"]].tolist() == pytest.approx([2.0, 2.0])
    assert found["verdict"].to_dict() == {
        "float f32": "faster",
        "float bf16": "faster",
        "all": "tie",
        "linear": "missing in 1 and 2",
        "ort_static": "missing in 1 and 2",
        "random": "missing in 2",
        "tpe": "missing in 1 and 2",
    }
    assert found.loc["all", "speedup_2"] == pytest.approx(2.0)
    assert found.loc["random", "same_file"]


def test_the_interval_covers_the_scatter_of_builds(folder, other):
    path = other / CELL / "confirm.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        if line["kind"] == "block":
            line["samples_ms"] = [ms * (1 + 0.2 * line["build"]) for ms in line["samples_ms"]]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    row = compare_frame(load(folder), load(other)).set_index("method").loc["all"]
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    assert row["ratio_low"] < 1 / 1.2 < row["ratio_high"]


def test_what_differs_is_named(folder, other):
    assert list(describe_differences(load(folder), load(other))) == [
        "environment.packages.openvino: '2026.3' -> '2026.4'"
    ]
    text = CliRunner().invoke(app, ["compare", str(folder), str(other)]).stdout
    assert "environment.packages.openvino: '2026.3' -> '2026.4'" in text
    assert "| 2.00 [2.00, 2.00]" in text
    same = CliRunner().invoke(app, ["compare", str(folder), str(folder)]).stdout
    assert "Environment, model and settings are the same." in same


def test_keys_of_the_experiment_that_differ_are_named_entry_by_entry(folder, other):
    path = other / "experiment.yaml"
    document = yaml.safe_load(path.read_text())
    document["searchers"] = [s for s in document["searchers"] if s["use"] != "tpe"]
    document["confirmation"]["builds"] = 9
    document["description"] = "other words"
    path.write_text(yaml.safe_dump(document))
    lines = list(describe_differences(load(folder), load(other)))[1:]
    assert lines[0] == "experiment.confirmation.builds: 3 -> 9"
    assert lines[1].startswith("experiment.searchers.tpe: {")
    assert lines[1].endswith(" -> None")
    assert len(lines) == 2


@pytest.mark.parametrize(("one", "two", "said"), [(8.1, 1.06, "first"), (0.2, 2.4, "second"), (1.0, 1.9, None)])
def test_a_busier_machine_is_a_likely_cause(folder, other, one, two, said):
    for path, load_average in ((folder, one), (other, two)):
        facts = {"load_average": [load_average, 0.5, 0.5]}
        (path / CELL / "env.json").write_text(json.dumps(facts))
    lines = list(describe_differences(load(folder), load(other)))
    expected = (
        f"environment.load_average: {one:g} -> {two:g}: {abs(two - one):.1f} more busy cores when the {said} began"
    )
    cause = ", a likely cause of what differs in latency" if said == "first" else ""  # which is slower, too
    assert lines == ([] if said is None else [f"{expected}{cause}"])


def test_a_noisy_side_is_said_with_the_table(folder, other):
    (folder / CELL / "floor.json").write_text('{"floor": 0.337}')
    text = CliRunner().invoke(app, ["compare", str(folder), str(other)]).stdout
    assert f"the A/A floor of {CELL} is 33.7% in the first and 0.0% in the second" in text


def test_a_side_on_which_something_else_worked_is_said_with_the_table(folder, other, confirmation_maker):
    latency_ms = {"A/A twin": 8.0, "float": 8.0, "all": 2.0, "aa": 4.0, "bb": 5.0}
    confirmation_maker(other / CELL, latency_ms, disturbed="waited for a core 50% of the time")
    text = CliRunner().invoke(app, ["compare", str(folder), str(other)]).stdout
    assert f"Noisy machine, {CELL} in the second: 100% of the turns were disturbed" in text
    assert "in the first: something" not in text


def test_cells_of_one_folder_alone_are_named_and_none_in_common_is_an_error(folder, other, cell_maker):
    cell_maker(folder, "net-openvino-fp8", precision="fp8")
    assert f"only in {folder}: net-openvino-fp8" in list(describe_differences(load(folder), load(other)))
    (other / CELL).rename(other / "mine-openvino-int8")
    with pytest.raises(UserError, match=r"no cell in common \(cells: net-openvino-int8, net.*; mine-openvino-int8\)"):
        compare_frame(load(folder), load(other))


def test_a_latency_is_traced_to_lines_of_the_confirmation(folder):
    found = trace_cell(load(folder), "random:lat")
    assert (found.column, found.shown) == ("latency ms [CI]", "4.000 [4.000, 4.000]")
    path = folder / CELL / "confirm.jsonl"
    assert found.lines[0].startswith(str(path))
    assert len(found.lines) == 1 + 3 * 2 + 1
    assert found.lines[-1] == "geometric mean of the median turns of 3 builds (4, 4, 4): 4 ms"
    number = int(found.lines[1].removeprefix("line ").partition(":")[0])
    stored = json.loads(path.read_text().splitlines()[number - 1])
    assert (stored["row"], stored["samples_ms"]) == ("aa", [4.0, 4.0, 4.0])
    assert found.lines[1].endswith("build 0, turn 0: median 4 of 4 4 4")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("random:speedup", "ratio 2.0000"),
        ("1:speedup", "median 8 of 8 8 8"),
        (f"{CELL}/linear:verdict", "build 2 failed: build: unsupported operator"),
        ("all:drop", "sha of float main (float)"),
        ("all:top-1", "top1: 0.7"),
        ("random:builds", "2: 2 at 30.0 s: failed: build: no"),
        ("random:minutes", "1: 1 at 20.0 s: median 4 ms of 7 samples"),
        ("all:builds", "median 2 of 2 2 2"),
        ("random:Q/DQ", "rows.json: row aa, 5 Q/DQ pairs"),
        ("tpe:latency", "nothing was measured: nothing measured"),
    ],
)
def test_every_column_has_a_source(folder, address, expected):
    assert any(expected in line for line in trace_cell(load(folder), address).lines)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("random", "ROW:COLUMN, for instance"),
        ("randm:latency", "no row 'randm' in the main table of 7 rows; did you mean 'random'"),
        ("9:latency", "no row '9'"),
        ("float:latency", r"several rows of the main table; take a row's number: 1 \(net-openvino-int8, f32\), 2"),
        ("random:speed of light", "no single column of the main table begins with 'speed of light': model, device"),
        ("random:", "no single column"),
    ],
)
def test_an_address_that_names_nothing_is_explained(folder, address, message):
    with pytest.raises(UserError, match=message):
        trace_cell(load(folder), address)


@pytest.mark.parametrize(
    ("table", "address", "expected"),
    [
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
def test_other_tables_are_traced_too(folder, table, address, expected):
    assert any(expected in line for line in trace_cell(load(folder), address, table).lines)


def test_every_column_of_every_table_has_a_source(folder):
    results = load(folder)
    for table in build_tables(results):
        for head in table.cells.columns:
            found = trace_cell(results, f"1:{head}", table.name)
            assert found.lines, f"{table.name}: {head}"
            assert found.shown == str(table.cells[head].iloc[0])


def test_the_readings_add_up_to_the_cell(folder):
    path = folder / CELL / "confirm.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        if line["kind"] == "block" and line["row"] == "aa":
            line["samples_ms"] = [ms * 2 ** line["build"] for ms in line["samples_ms"]]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    latency, speedup = (trace_cell(load(folder), f"random:{column}") for column in ("latency", "speedup"))
    assert latency.lines[-1] == "geometric mean of the median turns of 3 builds (4, 8, 16): 8 ms"
    assert latency.shown.startswith("8.000 [")
    assert speedup.lines[-1] == "geometric mean of the median ratios of 3 builds (2, 1, 0.5): 1"
    assert speedup.shown.startswith("1.00 [")
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line.get("build", 0) == 0))
    single = trace_cell(load(folder), "random:latency")
    assert single.lines[-1] == "geometric mean of the turns of the one build (4, 4): 4 ms"


def test_a_table_that_is_not_there_is_named(folder):
    with pytest.raises(UserError, match="no table 'budgets'; did you mean 'budget'"):
        trace_cell(load(folder), "1:latency", "budgets")


def test_the_command_prints_the_cell_and_its_source(folder):
    text = CliRunner().invoke(app, ["trace", str(folder), "random:speedup"]).stdout
    place = short_path(folder / CELL / "confirm.jsonl")
    assert text.startswith(f"row 6: {CELL}, random, speedup [CI]: 2.00 [2.00, 2.00]\n{place}")


def test_what_has_not_begun_has_no_source(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("models:\n", "models:\n- use: new.onnx\n"))
    assert trace_cell(load(folder), "new-openvino-int8/tpe:latency").lines == ("the cell has not begun",)
    assert pd.isna(compare_frame(load(folder), load(folder)).set_index("method").loc["tpe", "ratio"])
