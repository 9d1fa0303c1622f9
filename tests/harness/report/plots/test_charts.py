"""Charts of a task, as files and for the page; which plots are written, and that unchanged ones are kept."""

import importlib

import pandas as pd
import pytest
from small_results import TASK, edit_samples, write_task
from stored import replace_text

from harness.base.files import read_json, write_json
from harness.report.frames import main_frame, pareto_front
from harness.report.plots import charts, plot_files
from harness.report.plots.charts import draw_chart, median_steps, plotly_figure, speedup_chart, task_charts
from harness.report.plots.figures import series_style
from harness.report.plots.study_plots import draw_critical_difference
from harness.report.render import current_report, write_report
from harness.report.statistics import compute_ranks
from harness.report.tables.searchers import budget_frame
from harness.results.folder import load

DRAWN = ALL_FORMATS = True
OTHER = "other-openvino-int8"
CURVES = f"anytime-{TASK}.svg"
FRAME = pd.DataFrame(
    {
        "searcher": "a $x$ _y_",
        "seed": [0, 0, 0, 1, 1],
        "evaluations": [1, 2, 3, 1, 3],
        "minutes": [0.1, 0.2, 0.3, 0.15, 0.4],
        "speedup": [1.0, 1.5, 2.0, 1.0, 3.0],
    }
)


def charts_of(folder):
    results = load(folder)
    return task_charts(results.tasks[0], main_frame(results), budget_frame(results))


def test_steps_are_medians_over_seeds_with_last_value_carried_forward(monkeypatch):
    def steps():
        seeds = FRAME.groupby("seed")
        return median_steps((s["evaluations"].to_numpy(), s["speedup"].to_numpy()) for _, s in seeds)[1].tolist()

    assert steps() == [[1.0, 1.25, 2.5], [1.0, 1.0, 2.0], [1.0, 1.5, 3.0]], "values, low and high"
    monkeypatch.setattr(charts, "MAX_CURVE_STEPS", 2)
    assert steps()[0] == [1.0, 2.5], "the first and the last step"


def test_files_are_byte_identical_for_equal_results_and_a_notebook_shows_them(tmp_path):
    chart = speedup_chart(FRAME, "evaluations")
    for name in ("one", "two"):
        assert draw_chart(chart, "<t> $\\frac", tmp_path / name)._repr_png_().startswith(b"\x89PNG")
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        written = (tmp_path / f"one.{kind}").read_bytes()
        assert written.startswith(start)
        assert written == (tmp_path / f"two.{kind}").read_bytes()
    assert "<t>" not in (tmp_path / "one.svg").read_text()


def test_critical_differences_show_groups_that_no_test_distinguishes(tmp_path):
    ranks = compute_ranks(pd.DataFrame([[3.0, 2.0, 1.0]] * 5, columns=["first", "second", "third"]))
    draw_critical_difference(ranks, "title", tmp_path / "ranks")
    text = (tmp_path / "ranks.svg").read_text()
    assert f"critical difference {ranks.critical_difference:.2f} at 5 %, 5 tasks" in text


@pytest.mark.parametrize(("higher", "expected"), [(True, ["b", "c"]), (False, ["b", "a"])])
def test_pareto_front_has_nondominated_points(higher, expected):
    points = pd.DataFrame({"latency_ms": [3.0, 1.0, 2.0, 2.0], "score": [0.1, 0.5, 0.9, 0.9]}, index=[*"abcd"])
    assert list(pareto_front(points, higher).index) == expected


def test_series_styles_are_distinct():
    looks = [series_style(index) for index in range(24)]
    assert len({look[:2] for look in looks}) == len({look[::2] for look in looks}) == 24


def test_latency_chart_agrees_with_table_without_a_noise_floor_too(folder, tmp_path):
    edit_samples(folder / TASK, "aa", lambda samples_ms, build: [16.0] * 3 if build == 2 else samples_ms)
    (folder / TASK / "noise_floor.json").unlink(missing_ok=True)
    table_ms = main_frame(load(folder)).set_index("method").loc["random", "latency_ms"]
    assert table_ms == pytest.approx(4 ** (2 / 3) * 16 ** (1 / 3)), "the median of all samples is 4"
    chart = charts_of(folder)["latency"]
    marks = next(trace for trace in plotly_figure(chart)["data"] if trace["name"] == "latency as in the tables")
    assert marks["x"][marks["text"].index("random")] == pytest.approx(table_ms, rel=1e-5)
    draw_chart(chart, "t", tmp_path / "l")
    assert (tmp_path / "l.png").exists()


def test_overlapping_chart_points_are_translucent(folder):
    figure = plotly_figure(charts_of(folder)["pareto"])
    rows = [trace for trace in figure["data"] if "error_x" in trace]
    assert len(rows) == 4
    assert all(trace["marker"]["color"].endswith("0.35)") and trace["marker"]["size"] < 10 for trace in rows)
    assert all(trace["name"] and "text" not in trace for trace in rows), "names stand in the key, where none overlap"


@pytest.fixture
def draws(folder, monkeypatch):
    """Record the title of each chart that is drawn, in a folder of two tasks."""
    write_task(folder, OTHER, model="other")
    monkeypatch.setattr(importlib.import_module("harness.report.render"), "CODE_SUFFIXES", frozenset())
    found = []

    def draw(_, title, path):
        found.append(title if title in (TASK, OTHER) else "overview")
        for suffix in (".png", ".svg", ".pdf"):
            path.with_name(f"{path.name}{suffix}").write_text(title)

    monkeypatch.setattr(plot_files, "draw_chart", draw)
    for name in ("draw_budget_bars", "draw_speedups"):
        monkeypatch.setattr(plot_files.study_plots, name, draw)
    return found


def test_only_changed_tasks_and_damaged_plots_are_drawn_again(folder, draws):
    write_report(folder)
    assert set(draws) == {TASK, OTHER, "overview"}
    draws.clear()
    replace_text(folder / OTHER / "rows.json", '"minutes":0.5', '"minutes":0.75')
    write_report(folder)
    assert set(draws) == {OTHER, "overview"}
    report = folder / "report"
    assert (report / CURVES).exists()
    assert current_report(folder) is not None

    def damage_manifest():
        body = read_json(report / "manifest.json")
        write_json(report / "manifest.json", body | {"plots": {TASK: {"plots": 3}}})

    for damage in ((report / CURVES).unlink, lambda: (report / CURVES).write_text("another"), damage_manifest):
        draws.clear()
        damage()
        write_report(folder)
        assert TASK in draws
        assert (OTHER in draws) == (damage is damage_manifest)
        assert (report / CURVES).read_text() == TASK


def test_plots_of_many_tasks_are_written_only_if_asked_for(folder, draws, monkeypatch):
    monkeypatch.setattr(importlib.import_module("harness.report.render"), "MAX_TASKS_WITH_PLOTS", 1)
    write_report(folder)
    assert set(draws) == {"overview"}
    assert not (folder / "report" / CURVES).exists()
    assert (folder / "report" / "overview.svg").exists()
    assert current_report(folder) is not None
    assert current_report(folder, task_plots=True) is None
    write_report(folder, task_plots=True)
    assert (folder / "report" / CURVES).exists()
    replace_text(folder / TASK / "rows.json", '"minutes":0.5', '"minutes":0.75')
    write_report(folder, task_plots=False)
    assert not (folder / "report" / CURVES).exists(), "stale plots are removed"
    assert (folder / "report" / CURVES.replace(TASK, OTHER)).exists()
