"""Overview table and plot: speedups by model and method, with geometric means."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import pandas as pd
import pytest
from small_results import (
    TASK,
    edit_json,
    read_note,
    read_table,
    trace_lines,
    write_confirmation,
    write_one_table,
    write_task,
)

import harness.report.render
from harness.measure.turn_log import TWIN
from harness.report.plots.plot_files import draw_plots
from harness.report.plots.study_plots import draw_speedups
from harness.report.render import write_tables
from harness.report.tables.main import MEAN_LABEL
from harness.report.trace import trace_cell
from harness.results.folder import load
from harness.results.search_log import Goal

OTHER = "other-openvino-int8"
TWO_BACKENDS = """
experiment: small
models: [{use: net.onnx, label: net}, {use: other.onnx, label: other}]
backends: [{use: openvino, label: one}, {use: openvino, label: two}]
searchers: [random]
baselines: [all]
budget: {evaluations: [3]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture
def models(folder):
    """Two models: random's seeds are 2.0 and 1.6, 4.5 and 1.8 times as fast as float, "linear" builds nowhere."""
    yaml = folder / "experiment.yaml"
    yaml.write_text(yaml.read_text().replace("models:\n", "models:\n- {use: other.onnx, label: other}\n"))
    task = write_task(folder, OTHER, model="other")
    write_confirmation(task, {TWIN: 9.0, "float": 9.0, "float-bf16": 10.0, "all": 4.5, "aa": 2.0, "bb": 5.0})
    return folder


def shown(folder) -> dict[str, dict[str, str]]:
    """Write the table; return the rows of the overview by model."""
    write_one_table(folder, "overview")
    return {row["model"]: row for row in read_table(folder, "overview")}


def test_rows_are_models_columns_are_methods_with_geometric_means(models):
    found = shown(models)
    assert set(found) == {"net", "other", "geometric mean"}
    assert found["net"]["random"] == "**1.80 [1.60, 2.00]**", "the median of two seeds, from the lower to the higher"
    assert found["other"]["random"] == "**3.15 [1.80, 4.50]**"
    assert found["geometric mean"]["random"].startswith("2.38 [")
    assert found["net"]["all"] == "4.00 [4.00, 4.00] beyond", "its drop breaks the bound of the experiment"
    assert found["net"]["linear"] == "failed: build"
    assert found["geometric mean"]["all"] == "2.83 [2.83, 2.83] beyond"
    assert found["geometric mean"]["linear"] == "-", "no mean over the models that it happens to work on"
    assert found["geometric mean"]["float bf16"] == "0.85 [0.85, 0.85]", "a float precision that is not the baseline"
    assert "float" not in found["net"], "the baseline is 1 everywhere"
    assert "Beyond: the drop" in read_note(models, "overview")


def test_fastest_table_uses_float_if_method_misses_bound(models):
    write_tables(load(models), models / "report")
    rows = {row["method"]: row for row in read_table(models, "fastest")}
    assert rows["random"]["other"] == "4.50 [4.50, 4.50]"
    assert rows["all"]["net"] == "1.00 (float)", "its drop breaks the bound of the experiment"
    assert rows["linear"]["geometric mean"] == "1.00 [1.00, 1.00]", "it builds nowhere"
    assert rows["random"]["the search against it"] == "1.00 [1.00, 1.00]"
    for cell, path in (("random:other", OTHER), ("random:net", TASK), ("random:geometric mean", TASK)):
        assert any(f"{path}/confirmation.jsonl" in line for line in trace_lines(load(models), cell, "fastest")), cell
    assert rows["all"]["the search against it"] == rows["random"]["geometric mean"] == "3.00 [3.00, 3.00]"


def test_the_picture_shows_every_model_and_method(models):
    draw_plots(load(models), models / "report", all_plots=False)
    text = (models / "report" / "overview.svg").read_text()
    shown = {"net", "other", MEAN_LABEL, "random", "all", "linear", "float bf16"}
    assert shown <= set(re.findall("<!-- (.*) -->", text))
    assert "hollow: breaks the bound on accuracy" in text


def test_means_and_plots_are_by_backend(tmp_path):
    (tmp_path / "experiment.yaml").write_text(TWO_BACKENDS)
    for model in ("net", "other"):
        for label, latency_ms in (("one", 2.0), ("two", 4.0)):
            task = write_task(tmp_path, f"{model}-{label}-int8", model=model)
            write_confirmation(task, {TWIN: 8.0, "float": 8.0, "all": latency_ms, "aa": 5.0, "bb": 6.0})
    frame = harness.report.render.load(tmp_path).overview
    means = frame[(frame["model"] == MEAN_LABEL) & (frame["column"] == "all")].set_index("device")["speedup"]
    devices = ["one on A CPU, 2 threads", "two on A CPU, 2 threads"]
    assert means.to_dict() == pytest.approx(dict(zip(devices, (4.0, 2.0), strict=True)))
    titles = [
        picture.title
        for picture in draw_plots(load(tmp_path), tmp_path / "report", all_plots=False)
        if not picture.task
    ]
    assert [title for title in titles if "glance" in title] == [
        f"Speedups at a glance, int8, {device}" for device in devices
    ]


def test_speedup_plot_accepts_missing_intervals(tmp_path):
    limits = [(1.4, 1.6), (0.0, math.inf), (None, None)]
    lines = [
        {"task": str(n), "model": "m", "column": "all", "speedup": 1.5, "speedup_low": low, "speedup_high": high}
        for n, (low, high) in enumerate(limits)
    ]
    draw_speedups(pd.DataFrame(lines).assign(beyond=False), "t", tmp_path / "picture")
    assert (tmp_path / "picture.svg").exists()


def test_overview_cells_are_traceable(models):
    results = load(models)
    one = trace_cell(results, "other:all", "overview")
    assert one.shown == "2.00 [2.00, 2.00] beyond"
    assert len(one.sources) == 1
    seeds = trace_lines(results, "other:random", "overview")
    assert f"{OTHER}, random, seed 0 at 3 evaluations: aa" in seeds
    assert f"{OTHER}, random, seed 1 at 3 evaluations: bb" in seeds
    both = trace_cell(results, "geometric mean:all", "overview")
    assert "nothing was measured: nothing measured" in trace_lines(results, "other:tpe", "overview")
    assert [TASK in source.head[0] or OTHER in source.head[0] for source in both.sources] == [True, True]


def test_overview_compares_median_of_seeds(models):
    write_confirmation(models / TASK, {TWIN: 8.0, "float": 8.0, "all": 4.4, "aa": 4.0, "bb": 8.0})
    edit_json(models / TASK / "task.json", goal=asdict(Goal()))
    found = shown(models)["net"]
    assert found["random"] == "<u>1.50 [1.00, 2.00]</u>", "its best seed alone would be 2.0, and bold"
    assert found["all"] == "**1.82 [1.82, 1.82]**"
    note = read_note(models, "overview")
    assert "the median over 2 seeds after 3 evaluations" in note
    assert "The main table has the best seed of each searcher" in note
