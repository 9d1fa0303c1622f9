"""Searchers over all tasks, transfer of placements, hypervolume, stored graphs and the layer waterfall."""

import json
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from small_results import (
    TASK,
    edit_json,
    measured,
    read_page_data,
    trace_lines,
    write_confirmation,
    write_models,
    write_task,
)

from harness.base.files import read_json, write_json
from harness.measure.records import Proposal, TrialResult
from harness.plugins.api import Layer
from harness.report.page import graph_layout
from harness.report.page.graph_layout import load_task_graph
from harness.report.plots import plot_files
from harness.report.plots.layer_plots import waterfall_frame
from harness.report.plots.plot_files import draw_plots
from harness.report.render import write_report, write_tables
from harness.report.tables.catalog import build_tables
from harness.report.tables.notes import early_end_notes
from harness.report.tables.paired_choices import ablation_frame
from harness.report.tables.searchers import pair_frame, rank_searchers, score_frame
from harness.report.tables.transfer import similarity_frame, transfer_frame
from harness.results.artifacts import Choice
from harness.results.folder import load
from harness.results.journal import Journal

YAML = """
experiment: small
models: [{use: net.onnx, label: net}]
backends: [{use: openvino, label: one}, {use: openvino, label: two}]
searchers: [random, tpe, {use: tpe, label: bare, params: {n_startup_trials: 3}, without: [racing, rebuilds]}]
baselines: [all]
budget: {evaluations: [3]}
seeds: [0, 1]
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
CHOSEN = {"random": ("bb", "bb"), "tpe": ("aa", "aa"), "bare": ("aa", "bb")}


def write_curve(path, latencies_ms):
    with Journal(path, {}) as journal:
        for number, ms in enumerate(latencies_ms):
            origin = "initial:float" if not number else "searcher"
            outcome = measured(ms, top1=0.8 - 0.01 * number)
            digest = f"{number} at {ms:g}"  # another placement in each curve, except for the float model
            journal.append(Proposal(number=number, choices=(number,), digest=digest, origin=origin))
            journal.append(TrialResult(number=number, outcome=outcome, elapsed_s=10.0 * (number + 1)))


@pytest.fixture
def study(tmp_path):
    """Two tasks of one model: tpe is best everywhere; what is best on one is second on two."""
    (tmp_path / "experiment.yaml").write_text(YAML)
    latency_ms = {
        "one": {"A/A twin": 8.0, "float": 8.0, "all": 5.0, "aa": 4.0, "bb": 6.0, "cc": 7.0},
        "two": {"A/A twin": 8.0, "float": 8.0, "all": 4.0, "aa": 2.0, "bb": 4.5, "cc": 7.5},
    }
    for label, confirmed in latency_ms.items():
        task = write_task(tmp_path, f"net-{label}-int8", precision="int8")
        shutil.rmtree(task / "runs")
        (task / "runs").mkdir()
        picks = [Choice(method="float", kind="float", row="float"), Choice(method="all", kind="baseline", row="all")]
        for method, rows in CHOSEN.items():
            for seed, row in enumerate(rows):
                curve = [8.0, 7.0, 6.0, 5.0] if method == "random" else [8.0, 4.0, 4.0, 4.0]
                write_curve(task / "runs" / f"{method}-{seed}.jsonl", curve)
                search_ms = 5.0 if method == "random" else 4.0
                picks.append(
                    Choice(method=method, kind="search", row=row, seed=seed, budget=3, search_ms=search_ms, minutes=1.0)
                )
        body = read_json(task / "rows.json")
        extra = {**body["rows"][-1], "id": "cc", "file": "cc.onnx", "sha256": "sha of cc"}
        write_json(task / "rows.json", {"rows": [*body["rows"], extra], "picks": [asdict(pick) for pick in picks]})
        write_confirmation(task, confirmed)
    return tmp_path


def minimize(study, one: str, two: str) -> None:
    for label, objective in (("one", one), ("two", two)):
        edit_json(
            study / f"net-{label}-int8" / "task.json", lambda body, to=objective: body["goal"].update(minimize=to)
        )


def test_scores_are_relative_to_random_search(study):
    found = score_frame(load(study)).set_index(["task", "searcher"])["score"]
    assert found["net-one-int8", "tpe"] == pytest.approx(1.0)
    assert "random" not in found.index.get_level_values("searcher")


@pytest.mark.parametrize("origins", [[], ["searcher"], ["initial:float", "initial:all", "searcher"]])
def test_searcher_with_other_initial_placements_has_no_score(study, origins):
    """An external searcher gets no placements; the journal of one that failed at construction is empty."""
    before = score_frame(load(study)).set_index(["task", "searcher"])["score"]
    for task in ("net-one-int8", "net-two-int8"):
        with Journal(study / task / "runs" / "peer-0.jsonl", {}) as journal:
            for number, origin in enumerate(origins):
                outcome = measured(6.0 - number)
                journal.append(Proposal(number=number, choices=(number,), digest=f"peer's {number}", origin=origin))
                journal.append(TrialResult(number=number, outcome=outcome, elapsed_s=10.0))
    assert score_frame(load(study)).set_index(["task", "searcher"])["score"].to_dict() == before.to_dict()


def test_tasks_with_another_objective_are_not_compared_by_speed(study):
    minimize(study, "accuracy", "pareto")
    assert score_frame(load(study)).empty
    assert pair_frame(load(study)).empty


def test_files_of_a_table_without_rows_are_removed(study):
    out = study / "report"
    write_tables(load(study), out)
    assert (out / "pairs.md").exists()
    (out / "notes.md").write_text("mine")
    minimize(study, "pareto", "pareto")
    write_tables(load(study), out)
    assert not list(out.glob("pairs.*"))
    assert (out / "main.md").exists()
    assert (out / "notes.md").read_text() == "mine"


def test_a_search_that_ended_early_without_a_reason_is_named(study):
    """Those of before ends were noted."""
    assert list(early_end_notes(load(study))) == []
    path = study / "net-one-int8" / "runs" / "tpe-1.jsonl"
    path.unlink()
    write_curve(path, [8.0, 4.0])
    assert list(early_end_notes(load(study))) == ["net-one-int8: tpe-1 ended at 2 of 3."]
    (study / "net-one-int8" / "rows.json").unlink()
    assert list(early_end_notes(load(study))) == [], "it continues, or was interrupted"


@pytest.mark.parametrize("name", ["main", "overview", "budget", "fixed", "targets", "pairs", "ablation"])
def test_searches_that_ended_early_are_named_below_tables_of_budgets(study, name):
    path = study / "net-one-int8" / "runs" / "tpe-1.jsonl"
    path.unlink()
    write_curve(path, [8.0, 4.0])
    write_tables(load(study), study / "report")
    assert "net-one-int8: tpe-1 ended at 2 of 3." in (study / "report" / f"{name}.md").read_text()


def test_pairs_and_ranks_are_over_tasks(study):
    pairs = pair_frame(load(study)).set_index(["first", "second"])
    assert pairs.loc[("random", "tpe"), "blocks"] == 2
    assert pairs.loc[("random", "tpe"), "ratio"] == pytest.approx(np.sqrt(4 / 6 * 2 / 4.5))
    assert pairs.loc[("random", "tpe"), "chance"] == 0.0
    found = rank_searchers(load(study))
    assert list(found.mean) == ["tpe", "bare", "random"]
    assert found.blocks == 2


def test_a_backend_with_a_note_is_not_pooled_with_others(study):
    note = "experimental; never pooled with TensorRT's"
    facts = {"name": "tensorrt_rtx", "note": note}
    edit_json(study / "net-two-int8" / "task.json", lambda body: body["backend"].update(facts))
    results = load(study)
    pairs = pair_frame(results).set_index(["first", "second"])
    assert pairs.loc[("random", "tpe"), "blocks"] == 1
    assert pairs.loc[("random", "tpe"), "ratio"] == pytest.approx(4 / 6)
    assert ablation_frame(results)["tasks"].tolist() == [1]
    for table in build_tables(results):
        assert table.note.splitlines().count(f"tensorrt_rtx: {note}.") == 1, table.name


def test_transfer_compares_placements_on_other_backend(study):
    found = transfer_frame(load(study)).set_index(["source", "target"])
    assert found.loc[("one", "one"), "share"] == pytest.approx(1.0)
    assert found.loc[("one", "two"), "speedup"] == pytest.approx(4.0)
    assert found.loc[("two", "one"), "speedup"] == pytest.approx(2.0)
    assert set(found["row"]) == {"aa"}
    alike = similarity_frame(load(study))
    assert alike["rows"].item() == 4
    assert alike["spearman"].item() == pytest.approx(1.0)
    traced = trace_lines(load(study), "one:run on two", "transfer")
    assert any("net-two-int8/confirmation.jsonl" in line for line in traced)
    path = study / "net-two-int8" / "rows.json"
    body = read_json(path)
    brought = asdict(Choice(method="from_one", kind="baseline", row="cc"))
    rows = [row for row in body["rows"] if row["id"] != "aa"]
    write_json(path, {"rows": rows, "picks": [brought, *(pick for pick in body["picks"] if pick["row"] != "aa")]})
    found = transfer_frame(load(study)).set_index(["source", "target"])
    assert found.loc[("one", "two"), "row"] == "cc", "the row of the method that transferred"


def test_notes_state_each_scenario_and_placement_differences(study):
    options = {"threads": 2, "streams": 2}
    task = study / "net-two-int8"
    edit_json(task / "task.json", backend={**read_json(task / "task.json")["backend"], "options": options})
    notes = {table.name: table.note for table in build_tables(load(study))}
    assert notes["transfer"].count("choices in which the best placements differ: one and two ") == 1
    assert all("Scenario of net-two-int8: throughput of 2 streams" in note for note in notes.values())
    assert all("Scenario of net-one-int8: latency" in note for note in notes.values())


def test_transfer_share_is_missing_for_gain_within_noise(study):
    """A floor of 1 % and a best gain of 0.5 % once made -1660 % of a placement that is slower than float."""
    twin = {"A/A twin": 8.08, "float": 8.0, "all": 8.5, "aa": 7.96, "bb": 9.0, "cc": 7.5}
    write_confirmation(study / "net-two-int8", twin)
    found = transfer_frame(load(study)).set_index(["source", "target"])
    assert found.loc[("two", "two"), "verdict"] == "tie"
    assert found["share"].isna().to_dict() == {
        ("one", "one"): False, ("one", "two"): True, ("two", "one"): False, ("two", "two"): True,
    }  # fmt: skip
    write_tables(load(study), study / "report")
    text = (study / "report" / "transfer.md").read_text()
    assert "(100%)" in text
    assert "no share if that gain is within the noise" in text


def test_every_table_and_picture_of_a_study_is_written(study, monkeypatch):
    names = {table.name for table in write_tables(load(study), study / "report")}
    assert {"score", "pairs", "ablation", "transfer", "volume"} <= names
    text = (study / "report" / "pairs.md").read_text()
    assert "No test: 2 tasks are too few" in text
    assert "Mean ranks over the 2 tasks" in text
    transfer = (study / "report" / "transfer.md").read_text()
    assert "run on two" in transfer
    assert "rank correlation of latencies on one and two: +1.00 over 4 placements" in transfer
    pictures = draw_plots(load(study), study / "report")
    names = [picture.path.name for picture in pictures]
    assert names == ["overview.svg", "overview-2.svg", "ranks.svg", "transfer-net-int8.svg"]
    assert pictures[2].title == ("Searchers by mean rank; no test: 2 tasks are too few (3 are needed)")
    assert all(picture.path.with_suffix(".png").exists() for picture in pictures)
    monkeypatch.setattr(plot_files, "MAX_TRANSFER_MAPS", 0)
    few = draw_plots(load(study), study / "report", all_plots=False)
    assert [picture.path.name for picture in few] == names[:-1]


def test_a_fresh_clone_renders_the_same_graph_without_the_models(with_models, monkeypatch):
    read = []
    monkeypatch.setattr(graph_layout, "load_task_graph", lambda task: read.append(task.name) or load_task_graph(task))
    write_report(with_models)
    page = (with_models / "report" / "index.html").read_text()
    shutil.rmtree(with_models / "report")
    write_report(with_models)
    assert read == [TASK], "the stored graph is that of the models"
    kept = (with_models / TASK / "graph.json").read_bytes()
    shutil.rmtree(with_models / TASK / "models")
    write_report(with_models)
    answer = re.compile(r'<p class="answer">.*\n')  # the file to take, which is gone
    assert answer.sub("", (with_models / "report" / "index.html").read_text()) == answer.sub("", page)
    assert (with_models / TASK / "graph.json").read_bytes() == kept
    body = json.loads(kept)
    body["rows"]["all"] = "of another file"
    write_json(with_models / TASK / "graph.json", body)
    write_report(with_models)
    (data,) = read_page_data((with_models / "report" / "index.html").read_text())
    assert "all" not in data["graph"]["marks"]
    write_models(with_models / TASK / "models")
    write_report(with_models)
    assert read == [TASK, TASK]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 7}', '{"schema": 1, "rows": 3}'])
def test_a_damaged_graph_is_left_out(folder, text):
    (folder / TASK / "graph.json").write_text(text)
    assert load_task_graph(load(folder).tasks[0]) is None


def layer(name, time_ms, *origin, kind="Convolution"):
    return Layer(name=name, kind=kind, precision="f32", time_ms=time_ms, origin=origin)


def test_layers_that_share_a_node_are_one_part_of_the_waterfall():
    before = [layer("c1", 3.0, "conv1", "relu1"), layer("c2", 2.0, "conv2")]
    after = [
        layer("q1", 1.0, "conv1", "x@qdq.s8"), layer("r1", 0.5, "relu1"), layer("c2", 0.8, "conv2"),
        layer("re", 0.2, kind="Reorder"),
    ]  # fmt: skip
    found = waterfall_frame(before, after).set_index("part")
    assert found.loc["Convolution relu1", ["before_ms", "after_ms"]].tolist() == pytest.approx([3.0, 1.5])
    assert found.loc["added: Reorder", "change_ms"] == pytest.approx(0.2)
    assert found["before_ms"].sum() == pytest.approx(5.0)
    assert found["after_ms"].sum() == pytest.approx(2.5)
    short = waterfall_frame(before, after, most=1)
    assert short["part"].tolist()[1] == "all others (2)"
    assert short["change_ms"].sum() == pytest.approx(-2.5)
    assert waterfall_frame([layer("c1", None, "conv1")], after).empty


def test_waterfall_matches_layers_with_other_counter():
    gru = {"kind": "RNNSeq"}
    before = [layer("g1", 0.3, "GRUSequence_756", **gru), layer("c1", 3.0, "Conv_1"), layer("c2", 2.0, "Conv_2")]
    after = [layer("g2", 0.8, "GRUSequence_11762", **gru), layer("c1", 1.0, "Conv_1"), layer("c3", 0.4, "Conv_3")]
    found = waterfall_frame(before, after).set_index("part")
    assert found.loc["RNNSeq GRUSequence_756", ["before_ms", "after_ms"]].tolist() == pytest.approx([0.3, 0.8])
    assert "RNNSeq GRUSequence_11762" not in found.index
    assert found.loc["Convolution Conv_2", "after_ms"] == 0.0, "which of several it would be is unknown"


def test_schemes_of_a_model_are_compared_in_another_model(study):
    path = study / "experiment.yaml"
    path.write_text(path.read_text().replace("label: net}]", "label: net}, {use: big.onnx, label: big}]"))
    task = write_task(study, "big-one-int8", model="big")
    body = read_json(task / "rows.json")
    brought = asdict(Choice(method="from_net", kind="baseline", row="bb"))
    write_json(task / "rows.json", {**body, "picks": [*body["picks"], brought]})
    found = transfer_frame(load(study))
    found = found[found["across"] == "models"].set_index(["source", "target"])
    assert found.loc[("net", "big"), "speedup"] == pytest.approx(8 / 5)
    assert found.loc[("net", "big"), "share"] == pytest.approx((1 - 5 / 8) / (1 - 4 / 8))
    assert ("big", "net") not in found.index
    write_tables(load(study), study / "report")
    text = (study / "report" / "transfer_models.md").read_text()
    assert "run in big" in text
