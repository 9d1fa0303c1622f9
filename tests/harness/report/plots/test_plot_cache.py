"""Plots of tasks: which are written, and that those of unchanged tasks are not drawn again."""

import importlib

import pytest
from small_results import TASK, write_task
from stored import replace_text

from harness.base.files import read_json, write_json
from harness.report.plots import plot_files
from harness.report.render import current_report, write_report

DRAWN = True

OTHER = "other-openvino-int8"
CURVES = f"anytime-{TASK}.svg"


@pytest.fixture
def draws(folder, monkeypatch):
    """Record the title of each plot that is drawn, in a folder of two tasks."""
    write_task(folder, OTHER, model="other")
    monkeypatch.setattr(importlib.import_module("harness.report.render"), "CODE_SUFFIXES", frozenset())
    found = []

    def draw(part, title, path, **_):
        if title != "overview":
            found.append(title)
        for suffix in (".png", ".svg", ".pdf"):
            path.with_name(f"{path.name}{suffix}").write_text(title)

    monkeypatch.setattr(plot_files.result_plots, "draw_budget_bars", draw)
    monkeypatch.setattr(plot_files.study_plots, "draw_speedups", lambda _, *named: draw(None, "overview", named[1]))
    monkeypatch.setattr(plot_files.result_plots, "draw_curves", lambda *args, **_: draw(*args[:3]))
    monkeypatch.setattr(plot_files.result_plots, "draw_latencies", lambda *args: draw(None, *args[3:]))
    monkeypatch.setattr(plot_files.result_plots, "draw_pareto", lambda *args, **_: draw(None, "pareto", args[3]))
    return found


def test_only_changed_tasks_and_damaged_plots_are_drawn_again(folder, draws):
    write_report(folder)
    assert set(draws) == {TASK, OTHER, "pareto"}
    draws.clear()
    replace_text(folder / OTHER / "rows.json", '"minutes":0.5', '"minutes":0.75')
    write_report(folder)
    assert set(draws) == {OTHER, "pareto"}
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
    assert draws == []
    assert not (folder / "report" / CURVES).exists()
    assert (folder / "report" / "overview.svg").exists()
    assert current_report(folder) is not None
    assert current_report(folder, task_plots=True) is None
    write_report(folder, task_plots=True)
    assert (folder / "report" / CURVES).exists()
    assert current_report(folder, task_plots=True) is not None


def test_stale_plots_are_removed(folder, draws):
    write_report(folder)
    replace_text(folder / TASK / "rows.json", '"minutes":0.5', '"minutes":0.75')
    write_report(folder, task_plots=False)
    assert not (folder / "report" / CURVES).exists()
    assert (folder / "report" / CURVES.replace(TASK, OTHER)).exists()
