"""Tables of a small results folder (see conftest), finished and cut short."""

import io
import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest
from rich.console import Console

import harness.report
from harness.accuracy.metrics.intervals import encode_evidence
from harness.cli.report import show_report
from harness.errors import UserError
from harness.report import render
from harness.report.frames.main_frame import main_frame
from harness.report.load.results import load as load_results
from harness.report.page.index_page import render_index
from harness.report.render import report_renderable, report_text, write_tables
from harness.report.report_table import ReportTable, render_markdown, write_table
from harness.report.tables.next_steps import describe_next_steps
from harness.report.tables.table_layouts import TIMED_TABLES
from harness.results_dir.io import write_json
from harness.results_dir.termination import clear_task_error, write_task_error
from harness.search_loop.loop import Goal
from harness.timing.turn_log import Turn, encode_turn_event

CELL = "net-openvino-int8"


def tables(folder: Path) -> str:
    """Write the tables alone and give the text for the terminal."""
    results = load_results(folder)
    return report_text(results, write_tables(results, folder / "report"))


def change(folder: Path, **facts) -> None:
    """Change facts of the cell; None takes one away."""
    path = folder / CELL / "cell.json"
    body = {**json.loads(path.read_text()), **facts}
    write_json(path, {key: value for key, value in body.items() if value is not None})


def cells_of(path: Path) -> list[list[str]]:
    """Cells of a Markdown table without its padding."""
    table = path.read_text().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (table[0], *table[2:])]


MAIN = """
model | device | precision | method | latency ms [CI] | speedup [CI] | top-1 | drop [CI] | Q/DQ pairs | builds ok | minutes | verdict
net | A CPU, 2 threads | f32 | float | 8.000 [8.000, 8.000] | 1.00 [1.00, 1.00] | top-1 0.8000 | +0.0000 | 0 | 3/3 | - | baseline
net | A CPU, 2 threads | bf16 | float | 10.000 [10.000, 10.000] | 0.80 [0.80, 0.80] | top-1 0.8000 | +0.0000 | 0 | 3/3 | - | slower
net | A CPU, 2 threads | int8+f32 | all | 2.000 [2.000, 2.000] | 4.00 [4.00, 4.00] | top-1 0.7000 | +0.1000 | 9 | 3/3 | - | faster, beyond the bound
net | A CPU, 2 threads | int8+f32 | linear | - | - | - | - | 4 | 0/3 | - | failed: build
net | A CPU, 2 threads | int8+f32 | ort_static | - | - | - | - | - | 0/0 | - | it said that this will never work this will never work ...
net | A CPU, 2 threads | int8+f32 | random | 4.000 [4.000, 4.000] | **2.00 [2.00, 2.00]** | top-1 0.7900 | +0.0100 | 5 | 2/3 | 0.5 | faster
net | A CPU, 2 threads | int8+f32 | tpe | - | - | - | - | - | 0/0 | - | nothing measured
"""  # noqa: E501
FINALISTS = """
cell | method | latency ms [CI] | speedup [CI] | top-1 | drop [CI] | Q/DQ pairs | verdict | shrinkage | seed | placement
net-openvino-int8 | random | 4.000 [4.000, 4.000] | 2.00 [2.00, 2.00] | top-1 0.7900 | +0.0100 | 5 | faster | +0.00 | 0 | aa
net-openvino-int8 | random #2 | 5.000 [5.000, 5.000] | 1.60 [1.60, 1.60] | top-1 0.8000 | +0.0000 | 3 | faster | +0.00 | 0 | bb
net-openvino-int8 | random | 5.000 [5.000, 5.000] | 1.60 [1.60, 1.60] | top-1 0.8000 | +0.0000 | 3 | faster | +0.00 | 1 | bb
net-openvino-int8 | tpe | - | - | - | - | - | nothing measured | - | 0 | -
"""  # noqa: E501
BUDGET = """
cell | searcher | 2 evaluations | 3 evaluations | seeds
net-openvino-int8 | random | **1.60 [1.60, 1.60]** | **1.80 [1.60, 2.00]** | 2
"""
COST = """
cell | searcher | seeds | evaluations | minutes | build | sampling | evaluation | failures | harness | readings saved | built again | taken again | unsteady
net-openvino-int8 | random | 2 | 6 | 1.0 | 26.7% | 26.7% | 10.0% | 31.7% | 5.0% | 0.0% | 0 | 0 | 0
"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "golden"), [("main", MAIN), ("finalists", FINALISTS), ("budget", BUDGET), ("cost", COST)]
)
def test_table_is_exactly_this(folder, name, golden):
    tables(folder)
    assert cells_of(folder / "report" / f"{name}.md") == [line.split(" | ") for line in golden.strip().splitlines()]


def test_the_text_shows_main_budget_and_cost_and_the_files_hold_all(folder):
    text = render(folder)
    assert "| verdict" in text
    assert "3 evaluations" in text
    assert "harness" in text
    assert "random #2" not in text
    assert "UNFINISHED" not in text
    names = {path.name for path in (folder / "report").iterdir()}
    shown = ("main", "precision", "decision", "finalists", "budget", "fixed", "targets", "volume", "cost", "variance")
    drawn = ("anytime", "anytime-minutes", "budget", "latency", "pareto", "volume")
    assert names == {
        "index.html",
        "inputs.sha256",
        *(f"{name}.{kind}" for name in shown for kind in ("md", "csv", "tex")),
        *(f"{name}-{CELL}.{kind}" for name in drawn for kind in ("png", "svg")),
    }
    for path in (folder / "report").glob("*.png"):
        picture = matplotlib.image.imread(path)[..., :3]
        border = [picture[:3], picture[-3:], picture[:, :3], picture[:, -3:]]
        assert all((edge == 1.0).all() for edge in border), f"{path.name}: text runs over the edge"


def test_a_search_that_went_on_after_its_picks_leaves_the_cell_unfinished(folder):
    path = folder / CELL / "runs" / "random-0.jsonl"
    told = json.loads(path.read_text().splitlines()[-1])
    asked = json.loads(path.read_text().splitlines()[-2])
    more = ({**asked, "number": 3, "choices": [3], "digest": "3"}, {**told, "number": 3, "elapsed_s": 40.0})
    with path.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in more)
    assert "UNFINISHED" in render(folder), "a larger budget was asked for, and the run was cut off"
    assert not harness.report.load(folder).complete


def test_csv_holds_raw_figures_and_whole_reasons(folder):
    tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["method"] == "linear", "reason"].item() == "unsupported operator"
    assert raw.loc[raw["method"] == "ort_static", "reason"].item().count("never") == 9
    assert raw["speedup"].dropna().tolist() == pytest.approx([1.0, 0.8, 4.0, 2.0])
    assert raw.loc[raw["best"], "method"].tolist() == ["random"]
    assert "*" not in (folder / "report" / "main.csv").read_text()


def test_latex_has_the_best_in_bold_and_no_raw_special_letters(folder):
    tables(folder)
    text = (folder / "report" / "main.tex").read_text()
    assert r"\textbf{2.00 [2.00, 2.00]}" in text
    assert r"ort\_static" in text
    assert r"\caption{" in text
    assert "model: net; device: A CPU, 2 threads." in text, "what all rows share is said once"
    assert "A CPU" not in text.partition(r"\toprule")[2]


@pytest.mark.parametrize(
    ("measured", "precisions", "expected"),
    [
        (False, {"f32": {}, "bf16": {}}, "over the float model at f32 (pinned), paired"),
        (False, {"f32": {}}, "over the float model at f32, paired"),
        (True, {"f32": {}, "bf16": {}}, "at f32, the fastest float precision by measurement, paired"),
    ],
)  # fmt: skip
def test_note_says_what_the_speedup_is_over(folder, measured, precisions, expected):
    backend = json.loads((folder / CELL / "cell.json").read_text())["backend"]
    change(folder, backend={**backend, "float_params": precisions})
    if measured:
        write_json(folder / CELL / "float.json", {"strongest": "f32"})
    text = tables(folder)
    assert expected in text
    assert "3 fresh builds" in text
    assert "Student's over builds" in text
    assert "whose drop is at most 0.02" in text


def test_drop_is_positive_where_a_lower_figure_is_better_and_rises(folder):
    change(folder, higher_is_better=False, goal=asdict(Goal()))
    tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["method"] == "all", "drop"].item() == pytest.approx(-0.1)
    assert raw.loc[raw["best"], "method"].tolist() == ["all"], "no bound: the fastest of all"


def test_results_without_the_field_take_the_direction_of_the_goal(folder):
    goal = asdict(Goal(metric="top1", reference=0.8, max_drop=0.02, higher_is_better=False))
    change(folder, higher_is_better=None, goal=goal)
    tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["method"] == "all", "drop"].item() == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("metric", "shown"), [("map", "mAP 0.7000"), ("sqnr_db", "SQNR 0.7 dB"), ("my_own", "my_own 0.7000")]
)
def test_metrics_are_shown_by_their_usual_name(folder, metric, shown):
    change(folder, metric=metric, goal=asdict(Goal()))
    path = folder / CELL / "accuracy.json"
    path.write_text(path.read_text().replace('"top1"', f'"{metric}"'))
    assert shown in tables(folder)


def test_fidelity_has_a_heading_of_its_own_and_no_drop_against_the_cap(folder):
    change(folder, metric="sqnr_db", goal=asdict(Goal()))
    path = folder / CELL / "accuracy.json"
    path.write_text(path.read_text().replace('"top1"', '"sqnr_db"').replace("0.8", "120.0").replace("0.7", "40.0"))
    text = tables(folder)
    head, *lines = cells_of(folder / "report" / "main.md")
    assert head[6:8] == ["SQNR", "drop [CI]"]
    assert (lines[0][6], lines[2][6]) == ("SQNR 120.0 dB", "SQNR 40.0 dB")
    assert {line[7] for line in lines} == {"-"}
    assert "No drop of SQNR: it compares with the float model, whose own value is a cap." in text


def test_a_metric_with_the_name_of_another_column_takes_nothing_from_it(folder):
    change(folder, metric="precision", goal=asdict(Goal()))
    path = folder / CELL / "accuracy.json"
    path.write_text(path.read_text().replace('"top1"', '"precision"'))
    tables(folder)
    head, *lines = cells_of(folder / "report" / "main.md")
    assert (head[2], head[6]) == ("precision", "metric")
    assert (lines[0][2], lines[0][6]) == ("f32", "precision 0.8000")


def test_faster_with_too_large_a_drop_does_not_read_as_a_recommendation(folder):
    text = tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv").set_index("method")
    assert (raw.loc["all", "verdict"], raw.loc["all", "beyond"]) == ("faster", True)
    assert not raw.drop("all")["beyond"].any()
    assert '"faster, beyond the bound": the drop breaks the bound of the experiment' in text
    change(folder, goal=asdict(Goal()))
    assert "beyond the bound" not in tables(folder), "no bound, so nothing is beyond it"


def test_faster_with_outputs_that_are_not_finite_does_not_read_as_a_recommendation(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    body["sha of aa main"] = {"failed": "evaluate", "reason": "output 'y' has NaN or infinite values on image 'a.png'"}
    write_json(path, body)
    text = tables(folder)
    for name in ("main", "finalists"):
        head, *lines = cells_of(folder / "report" / f"{name}.md")
        method, verdict = head.index("method"), head.index("verdict")
        assert next(line for line in lines if line[method] == "random")[verdict] == "faster, not scored"
    assert '"faster, not scored": its outputs could not be scored (not finite, as a rule)' in text
    raw = pd.read_csv(folder / "report" / "main.csv").set_index("method")
    assert not raw.loc["random", "best"]
    assert raw.loc["random", "decision"].startswith("not shipped: not scored (output 'y' has NaN")
    results = load_results(folder)
    assert "1 faster but not scored" in render_index(results, write_tables(results, folder / "report"), {})


def test_a_tool_that_calibrated_by_another_method_says_so_in_its_row(folder):
    change(folder, tool_methods={"linear": "entropy"}, calibration={"method": "mse"})
    text = tables(folder)
    head, *lines = cells_of(folder / "report" / "main.md")
    assert "linear (entropy)" in [line[head.index("method")] for line in lines]
    assert f"Baselines of {CELL}: calibrated linear by entropy, the nearest that the tool has to mse." in text


def test_random_data_and_few_images_are_said_below_every_table(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    assert "only" not in tables(folder)
    change(folder, calibrated_on="random data")
    for score in body.values():
        score.update(metrics={"top1": 1.0}, per_item=[1.0] * 19)
    write_json(path, body)
    tables(folder)
    for file in (folder / "report").glob("*.md"):
        note = file.read_text().partition("\n\n")[2]
        assert "Calibrated on random data (no accuracy): net." in note, file.name
        few = "only 19 images: the interval is too wide to say much; score more of them."
        assert f"Accuracy of {CELL}: {few}" in note, file.name


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [("A CPU", ["avx2"], True), ("A CPU", ["avx2", "avx_vnni"], False), ("X", ["avx2"], False)],
)
def test_scores_of_a_processor_that_saturates_are_named(folder, model, flags, said):
    # The device is "A CPU"; where another one runs the model, a GPU for one, the processor does not matter.
    write_json(folder / CELL / "env.json", {"cpu": {"model": model, "flags": flags}})
    tables(folder)
    note = f"Accuracy of {CELL}: of a processor without VNNI, where INT8 products saturate"
    for file in (folder / "report").glob("*.md"):
        assert (note in file.read_text()) == said, file.name


def test_where_weights_have_seven_bits_only_other_tools_saturate(folder):
    write_json(folder / CELL / "env.json", {"cpu": {"model": "A CPU", "flags": ["avx2"]}})
    path = folder / CELL / "cell.json"
    body = json.loads(path.read_text())
    body["backend"]["dialect"] = "openvino_7bit"
    write_json(path, body)
    tables(folder)
    text = (folder / "report" / "main.md").read_text()
    assert (
        f"Accuracy of {CELL}: of a processor without VNNI, where products with weights of 8 bits saturate: those of "
        in text
    )
    assert "where INT8 products saturate" not in text


def test_where_the_float_model_scores_nothing_no_row_is_shipped_and_every_table_says_why(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    for score in body.values():
        score["metrics"] = dict.fromkeys(score["metrics"], 0.0)
        score["per_item"] = [0.0] * 100
    write_json(path, body)
    tables(folder)
    for file in (folder / "report").glob("*.md"):
        assert f"Accuracy of {CELL}: the float model itself scores 0.0000, so drops say nothing" in file.read_text(), (
            file.name
        )
    decisions = pd.read_csv(folder / "report" / "main.csv")["decision"]
    assert not decisions.str.startswith("ship").any()
    assert decisions.str.startswith("not shipped: the float model scores nothing").any()


def test_the_float_models_own_score_has_an_interval_over_images(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    for score in body.values():
        score["per_item"] = [1.0, 1.0, 1.0, 0.0] * 25
        score["metrics"] = {name: 0.75 for name in score["metrics"]}
    write_json(path, body)
    (line,) = re.findall(r"Scores of the float models, with 95 % over images: .*", tables(folder))
    found = re.search(rf"{CELL} .* 0\.7500 \[(0\.\d+), (0\.\d+)\] \(100 images\)", line)
    assert found, line
    low, high = map(float, found.groups())
    assert 0.6 < low < 0.75 < high < 0.9


def test_full_evaluations_are_added_up_over_seeds(folder):
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    body["picks"] = [{**p, "scored": 2 + p["seed"]} if p["method"] == "random" else p for p in body["picks"]]
    write_json(path, body)
    assert f"Full evaluations of {CELL}: random 5 of 6." in tables(folder)


def test_full_evaluations_are_of_those_that_were_spent(folder):
    """A small space is told whole before the budget is spent."""
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    body["picks"] = [{**p, "scored": 2} if p["method"] == "random" else p for p in body["picks"]]
    write_json(path, body)
    journal = folder / CELL / "runs" / "random-1.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-2]))
    assert f"Full evaluations of {CELL}: random 4 of 5." in tables(folder)


def test_the_rank_correlation_of_proxy_and_metric_stands_below_the_main_table(folder):
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    told = {0: 0.875, 1: None}
    body["picks"] = [
        {**p, "scored": 2, "agreement": told[p["seed"]]} if p["method"] == "random" else p for p in body["picks"]
    ]
    write_json(path, body)
    said = f"Full evaluations of {CELL}: random 4 of 6 (rank correlation of proxy and metric +0.88)."
    assert said in tables(folder)


def test_a_noisy_machine_is_said_first_below_every_table_of_latencies(folder):
    assert "Noisy" not in tables(folder)
    write_json(folder / CELL / "floor.json", {"floor": 0.337})
    said = f"Noisy machine, {CELL}: the A/A floor is 33.7%. Close other work and repeat."
    tables(folder)
    written = {path.stem: path.read_text() for path in (folder / "report").glob("*.md") if path.stem in TIMED_TABLES}
    assert {"main", "budget", "fixed", "decision", "finalists", "targets"} <= set(written)
    for name, text in written.items():
        assert text.partition("\n\n")[2].startswith(said), name
        assert "A/A floor" in text.partition(said)[2], name


LATENCY_MS = {"A/A twin": 8.0, "float": 8.0, "all": 2.0, "aa": 4.0, "bb": 5.0}


def test_what_else_worked_on_the_machine_is_said_first_below_the_table(folder, confirmation_maker):
    confirmation_maker(folder / CELL, LATENCY_MS, disturbed="waited for a core 50% of the time")
    said = (
        f"Noisy machine, {CELL}: 100% of the turns were disturbed, which distorts speedups, "
        "usually upwards. Close other work and repeat."
    )
    assert said in tables(folder)
    decisions = {line[-1] for line in cells_of(folder / "report" / "precision.md")}
    shipped = {text for text in decisions if text.startswith("ship")}
    assert shipped
    assert all(text.endswith(", once confirmed on a quiet machine") for text in shipped)


def test_searches_that_were_disturbed_are_said_first_below_the_table(folder):
    paths = sorted((folder / CELL / "runs").glob("random-*.jsonl"))
    undisturbed = tables(folder)
    assert "stayed disturbed" not in undisturbed
    for path in paths:
        path.write_text(path.read_text().replace('"stable":true', '"stable":false'))
    count = sum(path.read_text().count('"stable":false') for path in paths)
    assert count
    said = rf"Noisy machine, {CELL}: {count} of \d+ evaluations of its searches stayed disturbed, so they may"
    assert re.search(said, tables(folder))


def test_a_float_model_whose_latency_is_hardly_known_is_said_first_below_the_table(folder, confirmation_maker):
    confirmation_maker(folder / CELL, LATENCY_MS, paces=(1.0, 1.5, 2.0))
    said = (
        r"Noisy machine, .*: the float model took 11\.5\d\d \[.*\] ms, so go by speedups, which are paired, and not by"
    )
    assert re.search(said, tables(folder))
    assert "4.00 [4.00, 4.00]" in tables(folder), "what is paired is known as well as before"


def test_a_terminal_sees_marks_instead_of_markup_and_what_all_rows_share_once(folder, confirmation_maker):
    confirmation_maker(folder / CELL, {"A/A twin": 8.0, "float": 8.0, "all": 4.01, "aa": 4.0, "bb": 5.0})
    write_json(folder / CELL / "floor.json", {"floor": 0.337})
    change(folder, goal=asdict(Goal()))
    results = load_results(folder)
    written = write_tables(results, folder / "report")
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=160, record=True)
    console.print(report_renderable(results, written))
    styled = console.export_text(styles=True, clear=False)
    assert re.search(r"\x1b\[1m2\.00 \[2\.00, 2\.00\]", styled)
    assert re.search(r"\x1b\[4m2\.00 \[2\.00, 2\.00\]", styled)
    assert re.search(r"\x1b\[33mNoisy machine, ", styled)
    plain = console.export_text()
    assert "**" not in plain
    assert "<u>" not in plain
    assert plain.count("A CPU, 2 threads") == 1
    assert all(len(line) <= 160 for line in plain.splitlines())


def test_columns_that_do_not_fit_go_to_a_second_table_and_no_name_is_cut(folder):
    results = load_results(folder)
    drawing = report_renderable(results, write_tables(results, folder / "report"))
    for width in (190, 100, 80):
        console = Console(file=io.StringIO(), width=width, record=True)
        console.print(drawing)
        lines = console.export_text().splitlines()
        first = next(n for n, line in enumerate(lines) if " random " in line)
        again = [n for n, line in enumerate(lines) if "random " in line and n > first and "faster" in line]
        assert bool(again) == (width < 190), "the verdict is in another table"
        assert any("[4.000, 4.000]" in line for line in lines)
        assert not [line for line in lines if "…" in line], "wrapped, never cut"
        assert max(map(len, lines)) <= width


def test_a_pipe_gets_tables_of_100_columns_and_each_note_once(folder):
    text = tables(folder)
    assert "<u>" not in text
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 100
    notes = [line for line in text.splitlines() if line and not line.startswith("|")]
    assert len(notes) == len(set(notes))


def test_a_pipe_gets_markdown_and_a_terminal_a_drawing(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.modules["harness.report.render"], "draw_plots", lambda *_: [])

    class Screen(io.StringIO):
        def isatty(self):
            return True

    for stream, marked in ((io.StringIO(), True), (Screen(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        show_report(folder)
        assert ("**2.00 [2.00, 2.00]**" in stream.getvalue()) == marked
        assert "faster, beyond" in stream.getvalue()


def test_a_cell_that_stopped_before_its_searches_says_why(folder):
    for name in ("cell.json", "rows.json", "confirm.jsonl", "accuracy.json"):
        (folder / CELL / name).unlink()
    write_json(folder / CELL / "env.json", {"python": "3.11"})
    write_task_error(folder / CELL, "net.onnx: all 3 builds failed; the first: no kernel")
    text = tables(folder)
    assert text.startswith(f"{CELL} began, and has come to no search yet.")
    assert f"{CELL} stopped: net.onnx: all 3 builds failed; the first: no kernel" in text
    clear_task_error(folder / CELL)
    assert "stopped:" not in tables(folder)
    assert "Speedup: over the float model, paired by turns, so" in text


def test_cells_that_have_not_begun_are_unfinished(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("models:\n", "models:\n- use: other.onnx\n  label: other\n"))
    text = tables(folder)
    assert "UNFINISHED, so this is partial: other-openvino-int8; repeat qdq run to go on." in text
    waiting = [line for line in cells_of(folder / "report" / "main.md") if line[0] == "other"]
    assert [line[3] for line in waiting] == ["float", "all", "linear", "random", "tpe"]
    assert all(line[-1] == "missing" and line[4] == "-" for line in waiting)


@pytest.mark.parametrize("gone", [("rows.json", "confirm.jsonl"), ("confirm.jsonl",), ("accuracy.json",), ("runs",)])
def test_a_run_cut_short_renders(folder, gone):
    for name in gone:
        path = folder / CELL / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = tables(folder)
    assert ("UNFINISHED" in text) == ("confirm.jsonl" in gone)
    assert ("No search has ended yet." in text) == ("rows.json" in gone)
    if "confirm.jsonl" in gone:
        assert "**" not in text, "nothing is best before it is confirmed"


@pytest.mark.parametrize("keep", [0, 3, 40, 250, 700])
def test_torn_lines_render(folder, keep):
    for path in (folder / CELL / "confirm.jsonl", folder / CELL / "runs" / "random-0.jsonl"):
        path.write_bytes(path.read_bytes()[:keep])
    assert f"UNFINISHED, so this is partial: {CELL}" in tables(folder)


def test_an_experiment_that_has_not_begun_says_so(folder):
    shutil.rmtree(folder / CELL)
    text = tables(folder)
    assert text.startswith("No cell has begun yet.")
    assert "UNFINISHED, so this is partial: net-openvino-int8" in text
    assert "device: missing" in text


@pytest.mark.parametrize("name", ["cell.json", "rows.json", "accuracy.json"])
def test_a_damaged_file_is_named(folder, name):
    (folder / CELL / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name}: (damaged|cannot be read) \(.*\); move"):
        tables(folder)


def test_a_folder_of_something_else_names_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"no results here .*qdq run"):
        render(tmp_path / "nowhere")
    (tmp_path / "experiment.yaml").write_text("- a\n- list\n")
    with pytest.raises(UserError, match="an experiment is a mapping of keys, but got list"):
        render(tmp_path)


@pytest.mark.parametrize(("schema", "said"), [(0, "0"), (7, "7"), (None, "unknown")])
def test_another_schema_is_refused(folder, schema, said):
    change(folder, schema=schema)
    with pytest.raises(UserError, match=f"written with schema {said}, this version reads schema 1; render it with"):
        tables(folder)


def test_another_schema_of_a_journal_is_refused(folder):
    path = folder / CELL / "runs" / "random-0.jsonl"
    path.write_text(path.read_text().replace('"schema":1', '"schema":0', 1))
    with pytest.raises(UserError, match=r"random-0\.jsonl.*schema 0"):
        tables(folder)


def test_a_hostile_name_is_only_text(tmp_path):
    name = "a_b%<script>|x\n*y* [z](u) \\input{p} `c` \x1b[31m"
    cells = pd.DataFrame([{"model": name, "n": "1"}, {"model": "[q]", "n": "2"}])
    table = ReportTable(name="t", cells=cells, raw=cells, note=f"of {name}")
    assert r"a_b%\<script>\|x \*y\* [z\](u) \\input{p} \`c\`  [31m" in render_markdown(table)
    write_table(table, tmp_path)
    tex = (tmp_path / "t.tex").read_text()
    assert r"a\_b\%\textless{}script\textgreater{}\textbar{}x" in tex
    assert r"\textbackslash{}input\{p\}" in tex
    assert "{}[q] & 2" in tex
    assert all(line.startswith(("%", "\\", "a", "{}")) for line in tex.splitlines() if " & " not in line)


def test_results_stay_readable_when_keys_of_the_experiment_are_no_longer_known(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("sharing: pattern", "sharing: pattern\nno_longer: {there: 1}"))
    change(folder, goal={**asdict(Goal(metric="top1", reference=0.8, max_drop=0.02)), "gone": 3})
    assert "| random" in tables(folder)


def test_a_row_that_was_asked_for_and_is_gone_is_missing(folder):
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    body["picks"] = [pick for pick in body["picks"] if pick["method"] not in ("tpe", "all")]
    write_json(path, body)
    tables(folder)
    lines = {line[3]: line[-1] for line in cells_of(folder / "report" / "main.md")}
    assert lines["tpe"] == lines["all"] == "missing"
    assert lines["random"] == "faster"


def test_what_cannot_be_told_from_the_best_is_underlined(folder, confirmation_maker):
    latency_ms = {"A/A twin": 8.0, "float": 8.0, "all": 4.01, "aa": 4.0, "bb": 5.0}
    confirmation_maker(folder / CELL, latency_ms)
    change(folder, goal=asdict(Goal()))
    tables(folder)
    lines = {line[3]: (line[4], line[5]) for line in cells_of(folder / "report" / "main.md")}
    assert lines["random"] == ("4.000 [4.000, 4.000]", "**2.00 [2.00, 2.00]**"), "latencies are not paired"
    assert lines["all"] == ("4.010 [4.010, 4.010]", "<u>2.00 [2.00, 2.00]</u>")
    assert r"\underline{2.00 [2.00, 2.00]}" in (folder / "report" / "main.tex").read_text()
    raw = pd.read_csv(folder / "report" / "main.csv")
    assert raw.loc[raw["tied"], "method"].tolist() == ["all", "random"]


def test_a_tie_with_float_is_not_the_fastest_and_a_slower_row_is_not_tied(folder, confirmation_maker):
    confirmation_maker(folder / CELL, {"A/A twin": 8.0, "float": 8.0, "all": 8.2, "aa": 7.99, "bb": 5.0})
    write_json(folder / CELL / "floor.json", {"floor": 0.01})
    change(folder, goal=asdict(Goal()))
    tables(folder)
    lines = {(line[2], line[3]): (line[5], line[-1]) for line in cells_of(folder / "report" / "main.md")}
    assert lines["f32", "float"] == ("**1.00 [1.00, 1.00]**", "baseline")
    assert lines["int8+f32", "random"] == ("<u>1.00 [1.00, 1.00]</u>", "tie: use float")
    assert lines["int8+f32", "all"] == ("0.98 [0.98, 0.98]", "slower")


def test_decisions_say_what_is_shipped_and_why_not(folder):
    tables(folder)
    lines = {(line[2], line[3]): line[-1] for line in cells_of(folder / "report" / "precision.md")}
    assert lines["f32", "float"] == "baseline"
    assert lines["bf16", "float"] == "not shipped: slower"
    assert lines["int8+f32", "all"] == "not shipped: accuracy"
    assert lines["int8+f32", "random"] == "ship: fastest"


@pytest.mark.parametrize(
    ("goal", "scores", "said"),
    [
        (Goal(), {}, ("fastest, accuracy unknown", "faster, accuracy unknown")),
        (Goal(), None, ("fastest, no bound on accuracy", "faster, no bound on accuracy")),
        (Goal(metric="top1", max_drop=None), None, ("fastest, no bound on accuracy", "faster, no bound on accuracy")),
        (Goal(metric="top1", reference=0.8, max_drop=0.2), None, ("ship: fastest", "ship")),
    ],
)
def test_nothing_ships_whose_accuracy_was_held_to_no_bound(folder, goal, scores, said):
    change(folder, goal=asdict(goal))
    if scores is not None:
        write_json(folder / CELL / "accuracy.json", scores)
    tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv").set_index("method")["decision"]
    assert (raw["all"], raw["random"]) == said
    assert not list(describe_next_steps(load_results(folder), main_frame(load_results(folder)))), (
        "nothing has to be done"
    )
    best = cells_of(folder / "report" / "decision.md")[-1]
    assert best[-1] == f"{said[1]} (random)"


def test_every_baseline_is_looked_at_before_a_decision(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("- linear\n", "- linear\n- movers\n"))
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    brought = next(pick for pick in body["picks"] if pick["method"] == "all")
    body["picks"] += [{**brought, "method": "movers", "row": "bb"}, {**brought, "method": "from_other", "row": "aa"}]
    write_json(path, body)
    tables(folder)
    rows = [line[2] for line in cells_of(folder / "report" / "decision.md")[1:]]
    assert rows == [
        "FP32", "BF16", "default PTQ, ort_static", "all operators", "linear operators", "movers", "best found",
    ]  # fmt: skip


def test_cells_of_different_versions_of_the_code_are_named(folder, cell_maker):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("models:\n", "models:\n- {use: other.onnx, label: other}\n"))
    other = cell_maker(folder, "other-openvino-int8", model="other")
    write_json(folder / CELL / "env.json", {"git_commit": "a" * 40})
    write_json(other / "env.json", {"git_commit": "a" * 40})
    assert "different versions" not in tables(folder)
    write_json(other / "env.json", {"git_commit": "b" * 40})
    said = f"Begun with different versions of this code: {'b' * 12} other-openvino-int8; {'a' * 12} {CELL}."
    assert said in tables(folder)


def test_a_caption_says_what_the_figures_are(folder):
    tables(folder)
    for name, words in {
        "budget": "Budgets. Confirmed speedup over the float baseline of the incumbent after so many evaluations:",
        "finalists": "Every placement that a search sent to the confirmation at its largest budget. The main table",
        "main": "Main results. model: net; device: A CPU, 2 threads. Latency: geometric mean over 3 fresh builds",
    }.items():
        caption = re.search(r"\\caption\{(.*)\}", (folder / "report" / f"{name}.tex").read_text())
        assert caption is not None
        assert words in caption[1], name


def test_the_second_best_is_explained_where_there_is_one(folder):
    tables(folder)
    said = "METHOD #2: the second best of a search"
    assert said in (folder / "report" / "finalists.md").read_text()
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    write_json(path, {**body, "picks": [pick for pick in body["picks"] if pick["rank"] == 0]})
    tables(folder)
    assert said not in (folder / "report" / "finalists.md").read_text()


def test_the_drop_has_an_interval_where_single_images_were_kept(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    body["sha of float main"]["per_item"] = [1.0] * 80 + [0.0] * 20
    body["sha of all main"]["per_item"] = [1.0] * 70 + [0.0] * 30
    write_json(path, body)
    tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv").set_index("method")
    assert 0.02 < raw.loc["all", "drop_low"] < 0.1 < raw.loc["all", "drop_high"] < 0.2
    assert pd.isna(raw.loc["random", "drop_low"])
    shown = {line[3]: line[7] for line in cells_of(folder / "report" / "precision.md")}
    assert shown["all"].startswith("+0.1000 [+0.0")
    assert shown["random"] == "+0.0100"


def test_images_that_do_not_match_cost_the_interval_not_the_table(folder, caplog):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    body["sha of float main"]["per_item"] = [1.0] * 64 + [0.0] * 16
    body["sha of all main"]["per_item"] = [1.0] * 49 + [0.0] * 21
    write_json(path, body)
    assert "+0.1000" in tables(folder)
    assert "no interval of the drop of all: a paired interval needs the same images" in caplog.text


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"metrics": {"top1": 0.79}}, r"aa: top1 is 0.79, but by its own per_item it is 0.7"),
        ({"per_item": [1.0] * 80 + [0.0] * 20}, r"aa: top1 is 0.7, but by its own per_item it is 0.8"),
        ({"evidence": "damaged"}, "aa: the evidence of a score is damaged"),
    ],
)
def test_a_score_that_its_own_images_deny_is_not_believed(folder, forged, said):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    hits = [1.0] * 70 + [0.0] * 30
    body["sha of aa main"] = {
        "metrics": {"top1": 0.7},
        "per_item": hits,
        "evidence": encode_evidence("mean", {"top1": hits}),
    }
    write_json(path, body)
    assert "top-1 0.7000" in tables(folder)
    forged = {**body["sha of aa main"], "evidence": "", **forged}
    write_json(path, {**body, "sha of aa main": forged})
    remedy = "move it away and repeat qdq run, which makes it anew, or restore it"
    with pytest.raises(UserError, match=rf"accuracy\.json: damaged \(.*{said}.*\); {remedy}"):
        tables(folder)


def test_a_score_that_its_evidence_denies_is_not_believed_either(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    body["sha of aa main"] = {
        "metrics": {"top1": 0.79, "top5": 0.9},
        "evidence": encode_evidence("mean", {"top1": [1, 0]}),
    }
    write_json(path, body)
    with pytest.raises(UserError, match=r"aa: top1 is 0\.79, but by its own evidence it is 0\.5"):
        tables(folder)


def test_the_larger_of_the_two_floors_counts(folder):
    write_json(folder / CELL / "floor.json", {"floor": 1.5})
    assert "up to 20 builds in all of them): net-openvino-int8 150.0%." in tables(folder)
    lines = {line[3]: line[-1] for line in cells_of(folder / "report" / "main.md")}
    assert (lines["random"], lines["all"]) == ("tie: use float", "faster, beyond the bound")


def test_precisions_stand_side_by_side(folder, cell_maker):
    cell_maker(folder, "net-openvino-fp8", precision="fp8")
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("precision:\n- int8", "precision:\n- int8\n- fp8"))
    assert "UNFINISHED" not in tables(folder)
    head, *lines = cells_of(folder / "report" / "decision.md")
    rules = ["all operators", "linear operators"]
    assert [line[2] for line in lines] == ["FP32", "BF16", "default PTQ, ort_static", *rules, "best found"]
    for precision in ("int8", "fp8"):
        decisions = [line[head.index(f"{precision} decision")] for line in lines]
        assert decisions[:2] == ["baseline", "not shipped: slower"]
        assert decisions[3:] == ["not shipped: accuracy", "not shipped: failed: build", "ship: fastest (random)"]
        assert lines[-1][head.index(f"{precision} speedup [CI]")] == "**2.00 [2.00, 2.00]**"


DECISION = """
model | device | row | precision | latency ms [CI] | speedup [CI] | top-1 | drop [CI] | Q/DQ pairs | decision
net | A CPU, 2 threads | FP32 | f32 | 8.000 [8.000, 8.000] | 1.00 [1.00, 1.00] | top-1 0.8000 | +0.0000 | 0 | baseline
net | A CPU, 2 threads | BF16 | bf16 | 10.000 [10.000, 10.000] | 0.80 [0.80, 0.80] | top-1 0.8000 | +0.0000 | 0 | not shipped: slower
net | A CPU, 2 threads | default PTQ, ort_static | int8+f32 | - | - | - | - | - | not shipped: it said that this will never work this will never work ...
net | A CPU, 2 threads | all operators | int8+f32 | 2.000 [2.000, 2.000] | 4.00 [4.00, 4.00] | top-1 0.7000 | +0.1000 | 9 | not shipped: accuracy
net | A CPU, 2 threads | linear operators | int8+f32 | - | - | - | - | 4 | not shipped: failed: build
net | A CPU, 2 threads | best found | int8+f32 | 4.000 [4.000, 4.000] | **2.00 [2.00, 2.00]** | top-1 0.7900 | +0.0100 | 5 | ship: fastest (random)
"""  # noqa: E501


def test_the_decision_table_has_float_ptq_simple_rules_and_the_best(folder):
    tables(folder)
    golden = [line.split(" | ") for line in DECISION.strip().splitlines()]
    assert cells_of(folder / "report" / "decision.md") == golden


def test_batch_and_size_stand_where_they_are_known(with_models):
    change(with_models, inputs={"x": [1, 3, 8, 8]})
    render(with_models)
    head, *lines = cells_of(with_models / "report" / "decision.md")
    assert [line[head.index("batch")] for line in lines] == ["1"] * len(lines)
    sizes = [
        float(line[head.index("file MB")]) for line in lines if line[head.index("row")] in ("FP32", "all operators")
    ]
    assert len(sizes) == 2
    before = (with_models / "report" / "decision.md").read_bytes()
    shutil.rmtree(with_models / CELL / "models")
    render(with_models)
    assert (with_models / "report" / "decision.md").read_bytes() == before, "a clone without models says the same"


def test_outputs_that_are_not_finite_are_a_reason_not_to_ship(folder):
    path = folder / CELL / "accuracy.json"
    body = json.loads(path.read_text())
    reason = "output 'y' has NaN or infinite values on image '7'"
    body["sha of aa main"] = {"failed": "evaluate", "reason": reason}
    write_json(path, body)
    for goal in (Goal(metric="top1", reference=0.8, max_drop=0.02), Goal()):
        change(folder, goal=asdict(goal))
        tables(folder)
        line = next(line for line in cells_of(folder / "report" / "precision.md") if line[3] == "random")
        assert line[-1] == f"not shipped: not scored ({reason})"
        assert "**" not in line[5], "what nobody could score is never the best"


def test_the_best_found_is_chosen_by_the_searches_own_samples(folder):
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    lucky = {"method": "tpe", "kind": "search", "row": "bb", "seed": 0, "budget": 3, "search_ms": 2.0}
    body["picks"] = [pick for pick in body["picks"] if pick["method"] != "tpe"] + [lucky]
    write_json(path, body)
    shutil.copy(folder / CELL / "runs" / "random-0.jsonl", folder / CELL / "runs" / "tpe-0.jsonl")
    tables(folder)
    best = cells_of(folder / "report" / "decision.md")[-1]
    assert best[-1] == "ship (tpe)", (
        "random is faster when both are confirmed, but that is to be reported, not chosen by"
    )
    assert best[5] == "1.60 [1.60, 1.60]"


def test_the_best_found_is_chosen_by_the_runoff_where_all_met_in_one(folder):
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    lucky = {"method": "tpe", "kind": "search", "row": "bb", "seed": 0, "budget": 3, "search_ms": 2.0}
    picks = [pick for pick in body["picks"] if pick["method"] != "tpe"]
    for pick in picks:
        if pick["kind"] == "search":
            pick["runoff"] = 1.9
    shutil.copy(folder / CELL / "runs" / "random-0.jsonl", folder / CELL / "runs" / "tpe-0.jsonl")
    for met, chosen in ((None, "ship (tpe)"), (1.5, "ship: fastest (random)")):
        body["picks"] = [*picks, {**lucky, "runoff": met}]
        write_json(path, body)
        tables(folder)
        assert cells_of(folder / "report" / "decision.md")[-1][-1] == chosen


def test_where_accuracy_was_minimised_what_lost_least_is_the_best_and_not_what_is_fastest(folder):
    """Of random's seeds the one that chose bb, and of the searchers random; records of before know no loss."""
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    other = {"method": "tpe", "kind": "search", "row": "aa", "seed": 0, "budget": 3, "search_ms": 2.0}
    picks = [{k: v for k, v in p.items() if k != "loss"} for p in body["picks"] if p["method"] != "tpe"] + [other]
    shutil.copy(folder / CELL / "runs" / "random-0.jsonl", folder / CELL / "runs" / "tpe-0.jsonl")
    said = "is so by the loss that they saw"
    loss = {"aa": 0.01, "bb": 0.001}
    lossy = [{**p, "loss": loss[p["row"]]} if p["kind"] == "search" else p for p in picks]
    for found, speedup, best in ((picks, "2.00 [2.00, 2.00]", "tpe"), (lossy, "1.60 [1.60, 1.60]", "random")):
        write_json(path, {**body, "picks": found})
        tables(folder)
        lines = {line[3]: line[5].strip("*") for line in cells_of(folder / "report" / "main.md")}
        assert lines["random"] == speedup
        assert cells_of(folder / "report" / "decision.md")[-1][-1].endswith(f"({best})")
        for name in ("main", "decision", "finalists"):
            assert (said in (folder / "report" / f"{name}.md").read_text()) == (found is lossy), name


def test_below_the_decisions_it_stands_how_the_best_found_was_chosen(folder):
    tables(folder)
    note = (folder / "report" / "decision.md").read_text().partition("\n\n")[2]
    assert "of the searchers whose choice keeps the bound on accuracy" in note
    assert "the drop itself counts, not its interval" in note
    assert "Where no searcher's choice keeps it" not in note
    assert "not finite" not in note
    goal = Goal(metric="top1", reference=0.8, max_drop=0.001)
    change(folder, goal=asdict(goal))
    tables(folder)
    assert cells_of(folder / "report" / "decision.md")[-1][-1] == "not shipped: accuracy (random)"
    note = (folder / "report" / "decision.md").read_text().partition("\n\n")[2]
    assert (
        f"Where no searcher's choice keeps it ({CELL}), the fastest of all stands there; it is not to be shipped."
        in note
    )


def test_an_experiment_without_accuracy_says_nothing_of_drops(folder):
    assert "Drop: loss against the float baseline, positive is worse; its interval: 95 % of the bootstrap" in tables(
        folder
    )
    (folder / CELL / "accuracy.json").unlink()
    change(folder, metric=None, goal=asdict(Goal()))
    assert "Drop:" not in tables(folder)


def test_what_accuracy_only_means_is_said_where_a_row_is_so(folder):
    assert '"accuracy only"' not in tables(folder)
    path = folder / CELL / "rows.json"
    body = json.loads(path.read_text())
    body["picks"] = [{**p, "reason": "accuracy only"} if p["method"] == "tpe" else p for p in body["picks"]]
    write_json(path, body)
    assert '"accuracy only": the device has no speed at that precision, so such a row is scored' in tables(folder)


def test_frames_hold_what_the_tables_are_made_of(folder):
    frames = harness.report.load(folder)
    assert frames.complete
    assert frames.main.set_index("method").loc["random", "speedup"] == pytest.approx(2.0)
    assert frames.samples.query("row == 'aa'")["latency_ms"].tolist() == [4.0] * 18
    assert frames.targets["reached"].tolist() == [2, 2]
    assert frames.targets["evaluations"].tolist() == [2.0, 2.0]
    assert frames.variance["build"].tolist() == [0.0]
    assert set(frames.curves["seed"]) == {0, 1}


def test_turns_of_a_worker_that_was_replaced_are_in_no_frame(folder):
    """The next worker of a build replaces all of its turns, those that it has not come to yet as well."""
    again = [
        Turn(build=2, group=0, round=0, row=row, samples_ms=(LATENCY_MS[row],) * 3, worker=1) for row in ("float", "aa")
    ]
    with (folder / CELL / "confirm.jsonl").open("a") as file:
        file.writelines(f"{encode_turn_event(block)}\n" for block in again)
    samples = harness.report.load(folder).samples
    assert set(samples.query("row == 'aa' and build == 2")["round"]) == {0}
    assert set(samples.query("row == 'aa' and build == 1")["round"]) == {0, 1}
    assert set(samples.query("row == 'bb'")["build"]) == {0, 1}
