"""Rendering of a small results folder: files, markups, unfinished and damaged results."""

import io
import re
import shutil
import sys
from dataclasses import asdict

import matplotlib.image
import pandas as pd
import pytest
from rich.console import Console
from small_results import LATENCY_MS, TASK, edit_json, read_table, write_confirmation
from stored import read_records, write_records

import harness.report.render
from harness.accuracy.metrics.intervals import encode_evidence
from harness.base.errors import UserError
from harness.cli.report import show_report
from harness.measure.turn_log import Turn, encode_turn_event
from harness.report.render import report_renderable, report_text, write_report, write_tables
from harness.results.folder import load as load_results
from harness.results.search_log import Goal
from harness.results.termination import clear_task_error, write_task_error

DRAWN = ALL_FORMATS = LATEX = True

DISTINCT_MS = {"A/A twin": 8.0, "float": 8.0, "all": 4.01, "aa": 4.0, "bb": 5.0}


def tables(folder) -> str:
    """Write the tables and return the text for a pipe."""
    results = load_results(folder)
    return report_text(results, write_tables(results, folder / "report"))


def screen(folder, width: int) -> Console:
    """Write the tables and print them on a recorded terminal."""
    results = load_results(folder)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=width, record=True)
    console.print(report_renderable(results, write_tables(results, folder / "report")))
    return console


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
task | method | latency ms [CI] | speedup [CI] | top-1 | drop [CI] | Q/DQ pairs | verdict | shrinkage | seed | placement
net-openvino-int8 | random | 4.000 [4.000, 4.000] | 2.00 [2.00, 2.00] | top-1 0.7900 | +0.0100 | 5 | faster | +0.00 | 0 | aa
net-openvino-int8 | random #2 | 5.000 [5.000, 5.000] | 1.60 [1.60, 1.60] | top-1 0.8000 | +0.0000 | 3 | faster | +0.00 | 0 | bb
net-openvino-int8 | random | 5.000 [5.000, 5.000] | 1.60 [1.60, 1.60] | top-1 0.8000 | +0.0000 | 3 | faster | +0.00 | 1 | bb
net-openvino-int8 | tpe | - | - | - | - | - | nothing measured | - | 0 | -
"""  # noqa: E501
BUDGET = """
task | searcher | 2 evaluations | 3 evaluations | seeds
net-openvino-int8 | random | **1.60 [1.60, 1.60]** | **1.80 [1.60, 2.00]** | 2
"""
COST = """
task | searcher | seeds | evaluations | minutes | build | sampling | evaluation | failures | harness | readings saved | built again | taken again | unstable
net-openvino-int8 | random | 2 | 6 | 1.0 | 26.7% | 26.7% | 10.0% | 31.7% | 5.0% | 0.0% | 0 | 0 | 0
"""  # noqa: E501
DECISION = """
model | device | row | precision | latency ms [CI] | speedup [CI] | top-1 | drop [CI] | Q/DQ pairs | decision
net | A CPU, 2 threads | FP32 | f32 | 8.000 [8.000, 8.000] | 1.00 [1.00, 1.00] | top-1 0.8000 | +0.0000 | 0 | baseline
net | A CPU, 2 threads | BF16 | bf16 | 10.000 [10.000, 10.000] | 0.80 [0.80, 0.80] | top-1 0.8000 | +0.0000 | 0 | not shipped: slower
net | A CPU, 2 threads | default PTQ, ort_static | int8+f32 | - | - | - | - | - | not shipped: it said that this will never work this will never work ...
net | A CPU, 2 threads | all operators | int8+f32 | 2.000 [2.000, 2.000] | 4.00 [4.00, 4.00] | top-1 0.7000 | +0.1000 | 9 | not shipped: accuracy
net | A CPU, 2 threads | linear operators | int8+f32 | - | - | - | - | 4 | not shipped: failed: build
net | A CPU, 2 threads | best found | int8+f32 | 4.000 [4.000, 4.000] | **2.00 [2.00, 2.00]** | top-1 0.7900 | +0.0100 | 5 | ship: fastest (random)
"""  # noqa: E501


def test_tables_match_golden_values(folder):
    tables(folder)
    expected = {"main": MAIN, "finalists": FINALISTS, "budget": BUDGET, "cost": COST, "decision": DECISION}
    for name, golden in expected.items():
        head, *lines = (line.split(" | ") for line in golden.strip().splitlines())
        assert read_table(folder, name) == [dict(zip(head, line, strict=True)) for line in lines], name


def test_text_has_main_tables_and_folder_has_all_files(folder):
    text = report_text(*write_report(folder))
    assert all(words in text for words in ("| verdict", "3 evaluations", "harness"))
    assert "random #2" not in text
    assert "UNFINISHED" not in text
    shown = ("main", "precision", "decision", "finalists", "budget", "fixed", "targets", "volume", "cost", "variance")
    drawn = ("anytime", "anytime-minutes", "budget", "latency", "pareto", "volume")
    assert {path.name for path in (folder / "report").iterdir()} == {
        "index.html",
        "manifest.json",
        *(f"{name}.{kind}" for name in shown for kind in ("md", "csv", "tex")),
        *(f"{name}-{TASK}.{kind}" for name in drawn for kind in ("png", "svg", "pdf")),
    }
    for path in (folder / "report").glob("*.png"):
        picture = matplotlib.image.imread(path)[..., :3]
        border = [picture[:3], picture[-3:], picture[:, :3], picture[:, -3:]]
        assert all((edge == 1.0).all() for edge in border), f"{path.name}: text runs over the edge"


def test_latex_marks_best_rows_and_has_shared_values_in_caption(folder):
    write_confirmation(folder / TASK, DISTINCT_MS)
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    tables(folder)
    text = (folder / "report" / "main.tex").read_text()
    for words in (r"\textbf{2.00 [2.00, 2.00]}", r"\underline{2.00 [2.00, 2.00]}", r"ort\_static"):
        assert words in text
    assert "A CPU" not in text.partition(r"\toprule")[2]
    assert r"\caption{Main results. model: net; device: A CPU, 2 threads. Latency: geometric mean" in text


def test_csv_has_unrounded_figures_and_whole_reasons(folder):
    tables(folder)
    raw = pd.read_csv(folder / "report" / "main.csv").set_index("method")
    assert raw.loc["linear", "reason"] == "unsupported operator"
    assert raw.loc["ort_static", "reason"].count("never") == 9
    assert raw["speedup"].dropna().tolist() == pytest.approx([1.0, 0.8, 4.0, 2.0])
    assert raw.index[raw["best"]].tolist() == ["random"]
    assert "*" not in (folder / "report" / "main.csv").read_text()


def test_a_terminal_shows_styles_and_shared_values_once(folder):
    write_confirmation(folder / TASK, DISTINCT_MS)
    edit_json(folder / TASK / "noise_floor.json", noise_floor=0.337)
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    console = screen(folder, 160)
    styled = console.export_text(styles=True, clear=False)
    for pattern in (r"\x1b\[1m2\.00 \[2\.00, 2\.00\]", r"\x1b\[4m2\.00 \[2\.00, 2\.00\]", r"\x1b\[33mNoisy machine, "):
        assert re.search(pattern, styled)
    plain = console.export_text()
    assert "**" not in plain
    assert "<u>" not in plain
    assert plain.count("A CPU, 2 threads") == 1


@pytest.mark.parametrize("width", [190, 100, 80])
def test_wide_tables_are_split_without_truncated_names(folder, width):
    lines = screen(folder, width).export_text().splitlines()
    first = next(n for n, line in enumerate(lines) if " random " in line)
    again = [n for n, line in enumerate(lines) if "random " in line and n > first and "faster" in line]
    assert bool(again) == (width < 190), "the verdict is in the second table"
    assert any("[4.000, 4.000]" in line for line in lines)
    assert not [line for line in lines if "…" in line]
    assert max(map(len, lines)) <= width


def test_pipe_gets_markdown_and_terminal_gets_styled_table(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.modules["harness.report.render"], "draw_plots", lambda *_, **__: [])

    class Screen(io.StringIO):
        def isatty(self):
            return True

    for stream, marked in ((io.StringIO(), True), (Screen(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        show_report(folder)
        assert ("**2.00 [2.00, 2.00]**" in stream.getvalue()) == marked
        assert "faster, beyond" in stream.getvalue()


def test_a_task_that_stopped_before_its_searches_has_a_reason(folder):
    for name in ("task.json", "rows.json", "confirmation.jsonl", "accuracy.json"):
        (folder / TASK / name).unlink()
    edit_json(folder / TASK / "env.json", python="3.11")
    write_task_error(folder / TASK, "net.onnx: all 3 builds failed; the first: no kernel")
    text = tables(folder)
    assert text.startswith(f"{TASK} started")
    assert f"{TASK} stopped: net.onnx: all 3 builds failed; the first: no kernel" in text
    clear_task_error(folder / TASK)
    assert "stopped:" not in tables(folder)
    assert "Speedup: over the float model, paired" in text


def test_tasks_that_have_not_started_are_missing(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("models:\n", "models:\n- use: other.onnx\n  label: other\n"))
    assert "UNFINISHED, so these results are partial: other-openvino-int8;" in tables(folder)
    waiting = [row for row in read_table(folder, "main") if row["model"] == "other"]
    assert [row["method"] for row in waiting] == ["float", "all", "linear", "random", "tpe"]
    assert {(row["verdict"], row["latency ms [CI]"]) for row in waiting} == {("missing", "-")}
    shutil.rmtree(folder / TASK)
    text = tables(folder)
    assert text.startswith("No task has started yet.")
    assert "device: missing" in text


@pytest.mark.parametrize(
    "gone", [("rows.json", "confirmation.jsonl"), ("confirmation.jsonl",), ("accuracy.json",), ("runs",)]
)
def test_an_interrupted_run_renders(folder, gone):
    for name in gone:
        path = folder / TASK / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = tables(folder)
    assert ("UNFINISHED" in text) == ("confirmation.jsonl" in gone)
    assert ("No search has ended yet." in text) == ("rows.json" in gone)
    if "confirmation.jsonl" in gone:
        assert "**" not in text, "nothing is best before it is confirmed"


@pytest.mark.parametrize("keep", [0, 3, 40, 250, 700])
def test_partial_lines_render(folder, keep):
    for path in (folder / TASK / "confirmation.jsonl", folder / TASK / "runs" / "random-0.jsonl"):
        path.write_bytes(path.read_bytes()[:keep])
    assert "UNFINISHED" in tables(folder)


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no results here .*qdq run"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "experiment.yaml").write_text("- a\n- list\n")
    with pytest.raises(UserError, match="mapping"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ({"metrics": {"top1": 0.79}}, r"aa: top1 is 0.79, but by its own per_item it is 0.7"),
        ({"per_item": [1.0] * 80 + [0.0] * 20}, r"aa: top1 is 0.7, but by its own per_item it is 0.8"),
        ({"evidence": "damaged"}, "aa: the evidence of a score is damaged"),
        (
            {"per_item": [], "mixable": encode_evidence("mean", {"top1": [1, 0]})},
            "aa: top1 is 0.7, but by its own evidence it is 0.5",
        ),
        (
            {"metrics": {"top1": 0.79}, "per_item": [], "evidence": encode_evidence("mean", {"top1": [1, 0]})},
            "aa: top1 is 0.79, but by its own evidence it is 0.5",
        ),
    ],
)
def test_a_score_that_contradicts_its_record_of_images_is_refused(folder, forged, message):
    path, hits = folder / TASK / "accuracy.json", [1.0] * 70 + [0.0] * 30
    score = {"metrics": {"top1": 0.7}, "per_item": hits, "evidence": encode_evidence("mean", {"top1": hits})}
    edit_json(path, **{"sha of aa main": score})
    assert "top-1 0.7000" in tables(folder)
    edit_json(path, **{"sha of aa main": {**score, "evidence": "", **forged}})
    with pytest.raises(UserError, match=rf"accuracy\.json: damaged \(.*{message}.*\); move it away and repeat the run"):
        tables(folder)


def test_tie_with_float_is_underlined_and_slower_row_is_not(folder):
    write_confirmation(folder / TASK, {"A/A twin": 8.0, "float": 8.0, "all": 8.2, "aa": 7.99, "bb": 5.0})
    edit_json(folder / TASK / "noise_floor.json", noise_floor=0.01)
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    tables(folder)
    rows = {
        (row["precision"], row["method"]): (row["speedup [CI]"], row["verdict"]) for row in read_table(folder, "main")
    }
    assert rows["f32", "float"] == ("**1.00 [1.00, 1.00]**", "baseline")
    assert rows["int8+f32", "random"] == ("<u>1.00 [1.00, 1.00]</u>", "tie: use float")
    assert rows["int8+f32", "all"] == ("0.98 [0.98, 0.98]", "slower")


def test_turns_of_a_replaced_worker_are_in_no_frame(folder):
    """The next worker of a build replaces all of its turns, with those that it has not repeated yet."""
    again = [
        Turn(build=2, group=0, round=0, row=row, samples_ms=(LATENCY_MS[row],) * 3, worker=1) for row in ("float", "aa")
    ]
    path = folder / TASK / "confirmation.jsonl"
    write_records(path, (*read_records(path), *map(encode_turn_event, again)))
    samples = harness.report.render.load(folder).samples
    assert set(samples.query("row == 'aa' and build == 2")["round"]) == {0}
    assert set(samples.query("row == 'aa' and build == 1")["round"]) == {0, 1}
    assert set(samples.query("row == 'bb'")["build"]) == {0, 1}
