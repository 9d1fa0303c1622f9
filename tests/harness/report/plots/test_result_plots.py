"""What the pictures for papers are drawn from, and LaTeX that compiles."""

import re
import shutil
import subprocess
from dataclasses import asdict

import pandas as pd
import pytest
from small_results import TASK, edit_json, edit_samples, write_confirmation

from harness.report.frames import main_frame, pareto_front
from harness.report.page.interactive_charts import build_charts
from harness.report.plots import result_plots
from harness.report.plots.plot_files import draw_plots
from harness.report.plots.result_plots import draw_curves, draw_latencies, median_band, series_style
from harness.report.plots.study_plots import draw_critical_difference
from harness.report.render import write_tables
from harness.report.report_table import ReportTable, render_markdown, write_table
from harness.report.statistics import compute_ranks
from harness.report.tables.searchers import budget_frame
from harness.results.folder import load, row_labels
from harness.results.search_log import Goal

ALL_FORMATS = LATEX = True

CURVES = pd.DataFrame(
    {
        "searcher": "a $x$ _y_",
        "seed": [0, 0, 0, 1, 1],
        "evaluations": [1, 2, 3, 1, 3],
        "minutes": [0.1, 0.2, 0.3, 0.15, 0.4],
        "speedup": [1.0, 1.5, 2.0, 1.0, 3.0],
    }
)


def test_median_band_is_over_seeds_with_last_value_carried_forward(tmp_path):
    found = median_band(CURVES, "evaluations")
    assert found["value"].tolist() == [1.0, 1.25, 2.5]
    assert found["low"].tolist() == [1.0, 1.0, 2.0]
    assert found["high"].tolist() == [1.0, 1.5, 3.0]


def test_a_notebook_shows_long_curves(monkeypatch):
    monkeypatch.setattr(result_plots, "MAX_CURVE_STEPS", 2)
    assert median_band(CURVES, "evaluations")["value"].tolist() == [1.0, 2.5], "the first and the last step"
    assert draw_curves(CURVES, "title")._repr_png_().startswith(b"\x89PNG")


def test_critical_differences_show_groups_that_no_test_distinguishes(tmp_path):
    ranks = compute_ranks(pd.DataFrame([[3.0, 2.0, 1.0]] * 5, columns=["first", "second", "third"]))
    draw_critical_difference(ranks, "title", tmp_path / "ranks")
    text = (tmp_path / "ranks.svg").read_text()
    assert f"critical difference {ranks.critical_difference:.2f} at 5 %, 5 tasks" in text


def test_plots_are_byte_identical_for_equal_results(tmp_path):
    for name in ("one", "two"):
        draw_curves(CURVES, "<t> $\\frac", tmp_path / name)
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        written = (tmp_path / f"one.{kind}").read_bytes()
        assert written.startswith(start)
        assert written == (tmp_path / f"two.{kind}").read_bytes()
    assert "<t>" not in (tmp_path / "one.svg").read_text()


@pytest.mark.parametrize(("higher", "expected"), [(True, ["b", "c"]), (False, ["b", "a"])])
def test_pareto_front_has_nondominated_points(higher, expected):
    points = pd.DataFrame({"latency_ms": [3.0, 1.0, 2.0, 2.0], "score": [0.1, 0.5, 0.9, 0.9]}, index=[*"abcd"])
    assert list(pareto_front(points, higher).index) == expected


def test_series_styles_are_distinct():
    looks = [series_style(index) for index in range(24)]
    assert (
        len({(colour, line) for colour, line, _ in looks}) == len({(colour, mark) for colour, _, mark in looks}) == 24
    )


def test_latency_plot_works_without_noise_floor(tmp_path):
    part = pd.DataFrame({"build": [0, 0, 1], "latency_ms": [1.0, 1.1, 1.2]})
    long = "a very long name of many methods at once, and more"
    draw_latencies({"float": part, long: part}, {"float": 1.1, long: 1.12}, None, "t", tmp_path / "l")
    assert (tmp_path / "l.png").exists()


def test_latex_marks_best_rows_and_has_shared_values_in_caption(folder):
    write_confirmation(folder / TASK, {"A/A twin": 8.0, "float": 8.0, "all": 4.01, "aa": 4.0, "bb": 5.0})
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    write_tables(load(folder), folder / "report")
    text = (folder / "report" / "main.tex").read_text()
    assert r"\textbf{2.00 [2.00, 2.00]}" in text
    assert r"\underline{2.00 [2.00, 2.00]}" in text
    assert r"ort\_static" in text
    assert "A CPU" not in text.partition(r"\toprule")[2]
    captions = {
        name: re.search(r"\\caption\{(.*)\}", (folder / "report" / f"{name}.tex").read_text())[1]
        for name in ("main", "budget", "finalists")
    }
    assert captions["main"].startswith("Main results. model: net; device: A CPU, 2 threads. Latency: geometric mean")
    assert captions["budget"].startswith("Budgets. Confirmed speedup of the incumbent")
    assert captions["finalists"].startswith("Finalists. task: ")


def test_hostile_name_is_escaped_in_markdown_and_latex(tmp_path):
    name = "a_b%<script>|x\n*y* [z](u) \\input{p} `c` \x1b[31m"
    cells = pd.DataFrame([{"model": name, "n": "1"}, {"model": "[q]", "n": "2"}])
    table = ReportTable(name="t", cells=cells, raw=cells, note=f"of {name}")
    assert r"a_b%\<script>\|x \*y\* [z\](u) \\input{p} \`c\` \\x1b[31m" in render_markdown(table)
    write_table(table, tmp_path)
    tex = (tmp_path / "t.tex").read_text()
    assert r"a\_b\%\textless{}script\textgreater{}\textbar{}x" in tex
    assert r"\textbackslash{}input\{p\}" in tex
    assert "{}[q] & 2" in tex
    assert all(line.startswith(("%", "\\", "a", "{}")) for line in tex.splitlines() if " & " not in line)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_latex_compiles_hostile_names_included(folder, tmp_path):
    write_tables(load(folder), tmp_path)
    name = "a_b%<script>|x*y* [z](u) \\input{p} `c` ~^#$&é"
    cells = pd.DataFrame([{"model": name, "[n]": "1"}, {"model": "[q]", "[n]": "*"}])
    write_table(
        ReportTable(name="hostile", cells=cells, raw=cells, note=name, underlined=frozenset({(0, "model")})), tmp_path
    )
    inputs = "".join(f"\\input{{{path.stem}}}\n\n" for path in sorted(tmp_path.glob("*.tex")))
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,graphicx}\\begin{document}\\tiny\n"
        + inputs
        + "\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stdout[-800:]


def test_latency_plot_agrees_with_table(folder, monkeypatch):
    edit_samples(folder / TASK, "aa", lambda samples_ms, build: [16.0] * 3 if build == 2 else samples_ms)
    results = load(folder)
    task, main = results.tasks[0], main_frame(results)
    table_ms = main.set_index("method").loc["random", "latency_ms"]
    assert table_ms == pytest.approx(4 ** (2 / 3) * 16 ** (1 / 3)), "the median of all samples is 4"
    drawn = {}
    monkeypatch.setattr(result_plots, "draw_latencies", lambda samples, table_ms, *_: drawn.update(table_ms))
    draw_plots(results, folder / "report")
    assert drawn["random"] == pytest.approx(table_ms)
    charts = build_charts(
        task, main, budget_frame(results).to_dict("records"), row_labels(task, main.to_dict("records"))
    )
    chart = next(chart for chart in charts if chart["title"].startswith("Latency of the confirmation"))
    marks = next(trace for trace in chart["data"] if trace["name"] == "latency as in the tables")
    assert marks["x"][marks["text"].index("random")] == pytest.approx(table_ms, rel=1e-5)


def test_overlapping_chart_points_are_translucent(folder):
    results = load(folder)
    task, main = results.tasks[0], main_frame(results)
    charts = build_charts(
        task, main, budget_frame(results).to_dict("records"), row_labels(task, main.to_dict("records"))
    )
    chart = next(chart for chart in charts if chart["title"].startswith("Latency against"))
    rows = [trace for trace in chart["data"] if "error_x" in trace]
    assert len(rows) == 4
    assert all(trace["marker"]["color"].startswith("rgba") and trace["marker"]["size"] < 10 for trace in rows)
    assert all(trace["name"] and "text" not in trace for trace in rows), "names stand in the key, where none overlap"
