"""Cost of searches from their journals."""

import pytest
from small_results import TASK, edit_json, measured, write_search

from harness.base.statistics import Interval
from harness.measure.records import Failed, Proposal, TrialResult
from harness.report.frames import curve_frame, main_frame
from harness.report.tables.catalog import build_tables
from harness.report.tables.searchers import cost_frame
from harness.results.folder import load
from harness.results.journal import RETRY_ORIGIN, Journal


def once_more(path, outcome, elapsed_s):
    """Attempt the third proposal of a journal of `conftest` again."""
    with Journal(path, {}) as journal:
        journal.append(Proposal(number=3, choices=(2,), digest="2", origin=RETRY_ORIGIN))
        journal.append(TrialResult(number=3, outcome=outcome, elapsed_s=elapsed_s))


def test_a_retry_is_no_evaluation_but_its_time_and_result_count(folder):
    before = cost_frame(load(folder)).set_index(["searcher", "seed"]).loc[("random", 0)]
    once_more(folder / TASK / "runs" / "random-0.jsonl", measured(2.0, top1=0.8), 90.0)
    results = load(folder)
    line = main_frame(results).set_index("method").loc["random"]
    assert (line["builds_ok"], line["builds"]) == (2, 3)
    cost = cost_frame(results).set_index(["searcher", "seed"]).loc[("random", 0)]
    assert (cost["evaluations"], cost["total_s"]) == (3, 90.0)
    assert cost["build_s"] == before["build_s"] + 1.0
    curve = curve_frame(results.tasks)
    own = curve[(curve["searcher"] == "random") & (curve["seed"] == 0)]
    assert own["evaluations"].tolist() == [1, 2, 3]
    assert own["minutes"].tolist() == pytest.approx([10 / 60, 20 / 60, 1.5])
    assert own["speedup"].tolist() == [1.0, 2.0, 4.0]


def interval(value, low, high):
    return Interval(value=value, low=low, high=high)


def test_a_search_without_an_incumbent_has_no_curve_and_its_cost(folder):
    runs = folder / TASK / "runs"
    write_search(runs / "tpe-0.jsonl", ("1", Failed(stage="build", reason="no", wall_s=3.0)), step_s=4.0)
    results = load(folder)
    assert set(curve_frame(results.tasks)["searcher"]) == {"random"}
    cost = cost_frame(results).set_index("searcher").loc["tpe"]
    assert (cost["evaluations"], cost["failures_s"], cost["readings"], cost["harness_s"]) == (1, 3.0, 0, 1.0)


def test_replayed_builds_have_no_share_of_the_time(folder):
    plain = cost_frame(load(folder))
    recorded = {"name": "onnxruntime"}
    edit_json(folder / TASK / "task.json", lambda body: body["backend"]["options"].update(recorded_on=recorded))
    cost = cost_frame(load(folder))
    assert cost["build_s"].isna().all()
    assert cost["harness_s"].tolist() == pytest.approx((plain["harness_s"] + plain["build_s"]).tolist())
    (table,) = (table for table in build_tables(load(folder)) if table.name == "cost")
    assert table.cells["build"].tolist() == ["-"]
    assert table.cells["sampling"].item() != "-"
    assert table.note.splitlines()[0].endswith("A dash: replayed builds, whose time is that of the recording.")
