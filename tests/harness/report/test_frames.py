"""Curves, targets and hypervolume of searches: one latency per placement, until the end of the search."""

from __future__ import annotations

import shutil

import pandas as pd
import pytest
from small_results import TASK, edit_json, measured, trace_lines, write_search
from stored import write_records

from harness.measure.records import Failed, Measured
from harness.measure.turn_log import TWIN, Turn, encode_turn_event
from harness.report.frames import curve_frame, hypervolume_frame, main_frame
from harness.report.plots.charts import task_charts
from harness.report.render import write_tables
from harness.report.tables.catalog import build_tables
from harness.report.tables.searchers import budget_frame, target_frame
from harness.results.folder import load

FAILED = Failed(stage="build", reason="no", wall_s=1.0)


def read(latency_ms: float, top1: float | None = 0.8) -> Measured:
    return measured(latency_ms, **({} if top1 is None else {"top1": top1}))


@pytest.fixture
def runs(folder):
    """The folder of the journals, empty."""
    shutil.rmtree(folder / TASK / "runs")
    (folder / TASK / "runs").mkdir()
    return folder / TASK / "runs"


def test_an_initial_placement_has_one_latency_in_all_searches(folder, runs):
    write_search(runs / "random-0.jsonl", ("float", read(8.0)), ("start", read(4.0)), ("own", read(3.0)))
    write_search(runs / "random-1.jsonl", ("float", read(9.0)), ("start", read(5.0)), ("none", FAILED))
    write_search(runs / "tpe-0.jsonl", ("float", read(8.5)), ("start", read(4.6)), ("none", FAILED))
    results = load(folder)
    curves = curve_frame(results.tasks).set_index(["searcher", "seed", "evaluations"])["speedup"]
    starts = curves.xs(2, level="evaluations")
    assert starts.tolist() == pytest.approx([8.5 / 4.6] * 3), "the median of three readings, over the float model's"
    assert curves["random", 0, 3] == pytest.approx(8.5 / 3.0)
    found = target_frame(results).set_index(["searcher", "share"])["reached"]
    assert found.to_dict() == {("random", 0.95): 1, ("random", 0.99): 1, ("tpe", 0.95): 0, ("tpe", 0.99): 0}


def test_target_counts_best_placement_despite_noisy_readings(folder, runs):
    write_search(runs / "random-0.jsonl", ("float", read(8.0)), ("best", read(3.6)))
    write_search(runs / "tpe-0.jsonl", ("float", read(8.0)), ("best", read(4.4)))
    found = target_frame(load(folder))
    assert found["reached"].tolist() == [1, 1, 1, 1]
    assert found["evaluations"].tolist() == [2.0, 2.0, 2.0, 2.0]


def test_confirmed_placements_have_their_confirmed_speedup(folder, runs):
    # Confirmed are aa 2.0 and bb 1.6 times as fast; the search read 4.0 of bb.
    write_search(runs / "random-0.jsonl", ("float", read(8.0)), ("aa", read(4.0)), ("bb", read(2.0)))
    write_search(runs / "tpe-0.jsonl", ("float", read(8.0)), ("aa", read(4.1)), ("none", FAILED))
    found = target_frame(load(folder)).set_index(["searcher", "share"])
    assert found["reached"].to_dict() == {(name, share): 1 for name in ("random", "tpe") for share in (0.95, 0.99)}
    assert set(found["evaluations"]) == {2.0}, "a placement that cannot be confirmed is no target"


def test_unconfirmed_placements_use_final_selection_speedup(folder, runs):
    write_search(runs / "random-0.jsonl", ("float", read(8.0)), ("aa", read(4.0)))
    write_search(runs / "tpe-0.jsonl", ("float", read(8.0)), ("lucky", read(3.9)))
    reached = target_frame(load(folder)).set_index(["searcher", "share"])["reached"]
    assert reached["tpe", 0.95] == 1, "nothing else is known of it"
    turns = [
        Turn(build=0, group=0, round=number, row=row, samples_ms=(latency_ms,))
        for number in range(3)
        for row, latency_ms in (("float", 8.0), ("lucky", 7.0), (TWIN, 8.1))
    ]
    write_records(folder / TASK / "final_selection.jsonl", ("{}", *map(encode_turn_event, turns)))
    results = load(folder)
    assert results.tasks[0].selection_speedups == {"lucky": pytest.approx(8 / 7)}
    reached = target_frame(results).set_index(["searcher", "share"])["reached"]
    assert (reached["tpe", 0.95], reached["random", 0.95]) == (0, 1)
    traced = "\n".join(trace_lines(results, "tpe:reached 95%", "targets"))
    assert "final_selection.jsonl: lucky has a speedup of 1.1429 over float" in traced


def test_a_task_without_a_gain_beyond_the_noise_has_no_target(folder, runs):
    write_search(runs / "random-0.jsonl", ("float", read(8.0)), ("aa", read(4.0)))
    assert len(target_frame(load(folder)))
    edit_json(folder / TASK / "noise_floor.json", noise_floor=1.5)
    assert target_frame(load(folder)).empty
    assert "targets" not in {table.name for table in build_tables(load(folder))}


def test_hypervolume_is_constant_to_the_end_of_the_search(folder, runs):
    more = [(f"unscored {number}", read(5.0, None)) for number in range(3)]
    write_search(runs / "random-0.jsonl", ("float", read(8.0)), ("good", read(4.0, 0.79)), *more, ("none", FAILED))
    write_search(runs / "tpe-0.jsonl", ("float", read(8.0)), ("bad", read(3.0, 0.7)))
    results = load(folder)
    found = hypervolume_frame(results.tasks)
    own = found[found["searcher"] == "random"]
    assert own["evaluations"].tolist() == [1, 2, 6]
    assert own["minutes"].tolist() == [1.0, 2.0, 6.0]
    assert own["volume"].tolist() == pytest.approx([0.0, 0.5 * 0.9, 0.5 * 0.9])
    write_tables(results, folder / "report")
    scored = pd.read_csv(folder / "report" / "volume.csv").groupby("searcher")["scored"].max()
    assert scored.to_dict() == {"random": 2, "tpe": 2}, "what was not scored is not counted"
    assert (folder / "report" / "volume.md").read_text().count("| 2 ") == 2
    charts = task_charts(results.tasks[0], main_frame(results), budget_frame(results))
    assert max(marks.x[-1] for marks in charts["volume"].marks) == 6.0
