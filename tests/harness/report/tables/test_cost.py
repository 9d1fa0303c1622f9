"""Cost of searches from their journals."""

import tracemalloc
from collections import defaultdict
from dataclasses import replace

import pytest
from small_results import TASK, edit_json, measured, write_search
from stored import JOURNAL_HEADER, write_lines

from harness.base.statistics import Interval
from harness.measure.records import Failed, Measured, Proposal, TrialResult, encode_line
from harness.report.frames import curve_frame, main_frame
from harness.report.tables.catalog import build_tables
from harness.report.tables.searchers import cost_frame
from harness.results.folder import load
from harness.results.journal import RETRY_ORIGIN, Journal
from harness.results.search_log import Goal, read_search


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


def test_release_of_engines_counts_with_their_builds(folder):
    outcome = replace(measured(2.0, top1=0.8), build_s=2.0, measure_s=3.0, release_s=0.5)
    write_search(folder / TASK / "runs" / "tpe-0.jsonl", ("1", outcome), step_s=6.0 + outcome.evaluate_s)
    cost = cost_frame(load(folder)).set_index("searcher").loc["tpe"]
    assert (cost["build_s"], cost["sampling_s"], cost["harness_s"]) == (2.5, 3.0, 0.5)


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


def test_raw_samples_are_not_kept_in_memory(tmp_path):
    path, count = tmp_path / "random-0.jsonl", 400
    lines = [JOURNAL_HEADER]
    for number in range(count):
        asked = Proposal(number=number, choices=(number % 2,) * 60, digest=str(number), origin="searcher")
        samples_ms = tuple(5.0 + (number * sample) % 997 / 1000 for sample in range(500))
        outcome = Measured(samples_ms=samples_ms, build_s=0.1, measure_s=0.1)
        lines += map(encode_line, (asked, TrialResult(number=number, outcome=outcome, elapsed_s=float(number))))
    write_lines(path, lines)
    tracemalloc.start()
    search = read_search(path, "random", 0, Goal(), None, defaultdict(list))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (search.evaluations, search.successes, search.cost["readings"]) == (count, count, 500 * count)
    assert kept < 200 * count
    assert peak < path.stat().st_size / 4
