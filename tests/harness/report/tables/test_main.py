"""Main, precision and decision tables: figures, verdicts, decisions and notes of a small results folder."""

import json
import re
from dataclasses import asdict

import pandas as pd
import pytest
from small_results import (
    TASK,
    edit_json,
    read_note,
    read_table,
    write_confirmation,
    write_journal,
    write_one_table,
    write_task,
)
from stored import read_records, replace_text, write_records

from harness.accuracy.metrics.closeness import WORST_PREFIX
from harness.accuracy.metrics.intervals import encode_evidence
from harness.base.files import write_json
from harness.measure.records import Measured, Proposal, TrialResult
from harness.report.frames import main_frame
from harness.report.next_steps import describe_next_steps
from harness.report.page.index_page import render_index
from harness.report.render import write_tables
from harness.report.tables.catalog import SPECS
from harness.results.artifacts import recovered_row
from harness.results.folder import load
from harness.results.journal import Journal
from harness.results.search_log import Goal
from harness.results.task_files import read_graph

BOUND = {"metric": "top1", "reference": 0.8}
CONFIRMED_MS = {"A/A twin": 8.0, "float": 8.0, "all": 2.0, "aa": 4.0, "bb": 5.0}


def raw_main(folder, *, whole: bool = False) -> pd.DataFrame:
    """Write the tables, or only the main and the decision table; return the unrounded main table by method."""
    if whole:
        write_tables(load(folder), folder / "report")
    else:
        write_one_table(folder, "main", "decision")
    return pd.read_csv(folder / "report" / "main.csv").set_index("method")


def main_note(folder) -> str:
    write_one_table(folder, "main")
    return read_note(folder, "main")


def edit_scores(folder, change) -> None:
    def edit(body):
        for score in body.values():
            change(score)

    edit_json(folder / TASK / "accuracy.json", edit)


MIOU_RECORD = encode_evidence("miou", {"areas": [[0, 79, 100, 79]] * 20})


def rename_metric(folder, name: str, *replacements: tuple[str, str]) -> None:
    edit_json(folder / TASK / "task.json", metric=name, goal=asdict(Goal()))
    path = folder / TASK / "accuracy.json"
    for old, new in (('"top1"', f'"{name}"'), *replacements):
        replace_text(path, old, new)


def edit_picks(folder, change) -> None:
    def edit(body):
        body["picks"] = [new for pick in body["picks"] if (new := change(pick)) is not None]

    edit_json(folder / TASK / "rows.json", edit)


@pytest.mark.parametrize(
    ("record", "halves", "recovered", "expected"),
    [
        (MIOU_RECORD, False, False, "loses 0.0100 [0.0100, 0.0100] of miou"),
        ("damaged", False, False, None),
        (MIOU_RECORD, True, False, None),
        (MIOU_RECORD, False, True, None),
    ],
)
def test_note_has_cross_fitted_loss_of_metric_over_all_images(folder, record, halves, recovered, expected):
    rename_metric(folder, "miou")
    goal = Goal(metric="miou", reference=0.8, max_drop=0.02)
    edit_json(folder / TASK / "task.json", goal=asdict(goal), **({"halves": True} if halves else {}))
    own = encode_evidence("miou", {"areas": [[0, 80, 100, 80]] * 20})
    edit_json(folder / TASK / "accuracy.json", lambda body: body["sha of float main"].update(mixable=own))
    path = folder / TASK / "runs" / "random-0.jsonl"
    path.unlink()
    outcome = Measured(samples_ms=(4.0,) * 7, build_s=1.0, measure_s=1.0, metrics={"miou": 0.79}, mixable=record)
    with Journal(path, {}) as journal:
        journal.append(Proposal(number=0, choices=(1,), digest="aa", origin="searcher"))
        journal.append(TrialResult(number=0, outcome=outcome, elapsed_s=1.0))
    if recovered:
        edit_picks(folder, lambda pick: pick | ({"row": recovered_row("a" * 64)} if pick["method"] == "random" else {}))
    lines = [line for line in main_note(folder).splitlines() if line.startswith("Cross-fitted")]
    assert [expected in line for line in lines] == ([] if expected is None else [True])


def edit_every_pick(method="tpe", **facts):
    return lambda body: [pick.update(facts) for pick in body["picks"] if pick["method"] == method]


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("task.json", {"tool_methods": {"linear": "entropy"}}, f"Baselines of {TASK}: calibrated linear by entropy"),
        ("task.json", {"calibrated_on": "random data"}, "Calibrated on random data (no accuracy): net."),
        ("task.json", lambda facts: facts["backend"].pop("float_precision"), "the float model as it is"),
        ("task.json", {"halves": True}, f"scores and drops the other half: {TASK}."),
        ("rows.json", edit_every_pick(reason="accuracy only"), '"accuracy only":'),
        (
            "rows.json",
            edit_every_pick("random", scored=2, agreement=0.875),
            f"Full evaluations of {TASK}: random 4 of 6 (rank correlation of proxy and metric +0.88 and +0.88).",
        ),
        (
            "accuracy.json",
            lambda scores: scores["sha of float main"].update(metrics={"top1": 0.75}, per_item=[1, 1, 1, 0] * 25),
            f"{TASK} top-1 0.7500 [0.6500, 0.8300] (100 images)",
        ),
        (
            "accuracy.json",
            lambda scores: scores["sha of all main"].update(note=f"{WORST_PREFIX}boxes, 12.0 dB"),
            f"Worst output by fidelity, {TASK}: all: boxes, 12.0 dB.",
        ),
        (
            "noise_floor.json",
            {"noise_floor": 0.337},
            f"Noisy machine, {TASK}: the noise floor is 33.7%. Close other work and repeat.",
        ),
    ],
)
def test_a_condition_is_noted_if_it_holds(folder, name, change, expected):
    assert expected not in main_note(folder)
    edit_json(folder / TASK / name, change) if callable(change) else edit_json(folder / TASK / name, **change)
    assert expected in main_note(folder)


@pytest.mark.parametrize("higher", [False, None])
def test_a_drop_is_positive_if_worse_in_the_direction_of_the_metric(folder, higher):
    """Results without the direction take that of the goal."""
    goal = asdict(Goal() if higher is False else Goal(**BOUND, max_drop=0.02, higher_is_better=False))
    edit_json(folder / TASK / "task.json", higher_is_better=higher, goal=goal)
    raw = raw_main(folder)
    assert raw.loc["all", "drop"] == pytest.approx(-0.1)
    assert raw.index[raw["best"]].tolist() == ["all"]


@pytest.mark.parametrize(
    ("metric", "shown", "heading"),
    [
        ("map", "mAP 0.7000", "mAP"),
        ("sqnr_db", "SQNR 0.7 dB", "SQNR"),
        ("my_own", "my_own 0.7000", "metric"),
        ("precision", "precision 0.7000", "metric"),
    ],
)
def test_metric_columns_have_display_names_without_collision(folder, metric, shown, heading):
    rename_metric(folder, metric)
    raw_main(folder)
    rows = read_table(folder, "main")
    assert rows[2][heading] == shown
    assert rows[0]["precision"] == "f32"


def test_a_faster_row_beyond_the_bound_is_not_recommended(folder):
    raw = raw_main(folder)
    assert (raw.loc["all", "verdict"], raw.loc["all", "beyond"]) == ("faster", True)
    assert not raw.drop("all")["beyond"].any()
    assert '"faster, beyond the bound"' in read_note(folder, "main")
    edit_json(folder / TASK / "task.json", goal=asdict(Goal()))
    assert "beyond the bound" not in main_note(folder)


def test_a_faster_row_without_finite_outputs_is_not_recommended(folder):
    reason = "output 'y' has NaN or infinite values on image '7'"
    edit_json(folder / TASK / "accuracy.json", **{"sha of aa main": {"failed": "evaluate", "reason": reason}})
    for goal in (Goal(**BOUND, max_drop=0.02), Goal()):
        edit_json(folder / TASK / "task.json", goal=asdict(goal))
        raw = raw_main(folder, whole=True)
        assert not raw.loc["random", "best"]
        assert raw.loc["random", "decision"] == f"not shipped: not scored ({reason})"
        for name in ("main", "finalists"):
            row = next(row for row in read_table(folder, name) if row["method"] == "random")
            assert row["verdict"] == "faster, not scored"
    assert '"faster, not scored"' in read_note(folder, "main")
    assert "not finite" in read_note(folder, "decision")
    results = load(folder)
    assert "1 faster but not scored" in render_index(results, write_tables(results, folder / "report"), read_graph)


@pytest.mark.parametrize(
    ("model", "flags", "dialect", "words"),
    [
        ("A CPU", ["avx2"], "", "where INT8 products saturate"),
        ("A CPU", ["avx2"], "openvino_7bit", "where products of 8-bit weights saturate"),
        ("A CPU", ["avx2", "avx_vnni"], "", None),
        ("X", ["avx2"], "", None),
    ],
    ids=["no VNNI", "7-bit weights", "VNNI", "another device"],
)
def test_saturating_processor_is_noted(folder, model, flags, dialect, words):
    edit_json(folder / TASK / "env.json", cpu={"model": model, "flags": flags})
    edit_json(folder / TASK / "task.json", lambda body: body["backend"].update(dialect=dialect))
    raw_main(folder)
    for file in (folder / "report").glob("*.md"):
        assert ("without VNNI" in file.read_text()) == (words is not None), file.name
    assert words is None or f"Accuracy of {TASK}: measured on a processor without VNNI, {words}" in main_note(folder)


def test_a_noisy_machine_is_the_first_note_below_tables_of_latencies(folder):
    edit_json(folder / TASK / "noise_floor.json", noise_floor=0.337)
    raw_main(folder, whole=True)
    timed = [path.stem for path in (folder / "report").glob("*.md") if SPECS[path.stem].timed]
    assert {"main", "budget", "fixed", "decision", "finalists", "targets"} <= set(timed)
    for name in timed:
        first, _, rest = read_note(folder, name).partition("\n")
        assert first.startswith(f"Noisy machine, {TASK}: "), name
        assert "noise floor" in rest.lower(), name


def test_decision_of_row_with_disturbed_turns_has_remark(folder):
    path = folder / TASK / "confirmation.jsonl"
    head, *lines = read_records(path)
    turns = [{**turn, "disturbed": "drift"} if turn["row"] == "aa" else turn for turn in lines]
    write_records(path, map(json.dumps, (head, *turns)))
    rows = main_frame(load(folder)).set_index("row")
    assert ("the machine was busy" in rows.loc["aa", "decision"], rows.loc["aa", "busy"]) == (True, True)
    assert "the machine was busy" not in rows.loc["all", "decision"]
    assert f"All turns were disturbed, {TASK}: " in main_note(folder)


def test_an_uncertain_latency_of_the_float_model_is_noted(folder):
    write_confirmation(folder / TASK, CONFIRMED_MS, paces=(1.0, 1.5, 2.0))
    assert re.match(r"Noisy machine, .*: the float model took 11\.5\d\d \[.*\] ms", main_note(folder))
    assert "4.00 [4.00, 4.00]" in (folder / "report" / "main.md").read_text(), "paired figures are as certain as before"


def test_expected_rows_without_a_choice_are_missing(folder):
    edit_picks(folder, lambda pick: None if pick["method"] in ("tpe", "all") else pick)
    raw = raw_main(folder)
    assert raw.loc[["tpe", "all", "random"], "verdict"].tolist() == ["missing", "missing", "faster"]


def test_versions_of_the_code_that_differ_are_noted(folder):
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("models:\n", "models:\n- {use: other.onnx, label: other}\n"))
    other = write_task(folder, "other-openvino-int8", model="other")
    for commit, differ in (("a" * 40, False), ("b" * 40, True)):
        edit_json(folder / TASK / "env.json", git_commit="a" * 40)
        edit_json(other / "env.json", git_commit=commit)
        expected = f"different versions of this code: {'b' * 12} other-openvino-int8; {'a' * 12} {TASK}."
        assert (expected in main_note(folder)) == differ


def test_a_drop_has_an_interval_if_the_record_has_single_images(folder):
    images = {"sha of float main": 80, "sha of all main": 70}

    def add_images(body):
        for name, hits in images.items():
            body[name]["per_item"] = [1.0] * hits + [0.0] * (100 - hits)

    edit_json(folder / TASK / "accuracy.json", add_images)
    raw = raw_main(folder, whole=True)
    assert 0.02 < raw.loc["all", "drop_low"] < 0.1 < raw.loc["all", "drop_high"] < 0.2
    assert pd.isna(raw.loc["random", "drop_low"])
    shown = {row["method"]: row["drop [CI]"] for row in read_table(folder, "precision")}
    assert shown["all"].startswith("+0.1000 [+0.0")
    assert shown["random"] == "+0.0100"


@pytest.mark.parametrize(
    ("goal", "scores", "decisions"),
    [
        (Goal(), {}, ("fastest, accuracy unknown", "faster, accuracy unknown")),
        (Goal(), None, ("fastest, no bound on accuracy", "faster, no bound on accuracy")),
        (Goal(metric="top1", max_drop=None), None, ("fastest, no bound on accuracy", "faster, no bound on accuracy")),
        (Goal(**BOUND, max_drop=0.2), None, ("ship: fastest", "ship")),
    ],
)
def test_decision_depends_on_accuracy_bound_and_scores(folder, goal, scores, decisions):
    edit_json(folder / TASK / "task.json", goal=asdict(goal))
    if scores is not None:
        write_json(folder / TASK / "accuracy.json", scores)
    raw = raw_main(folder)["decision"]
    assert (raw["all"], raw["random"]) == decisions
    assert not list(describe_next_steps(load(folder), main_frame(load(folder))))
    assert read_table(folder, "decision")[-1]["decision"] == f"{decisions[1]} (random)"


def test_decision_table_shows_precisions_in_columns(folder):
    write_task(folder, "net-openvino-fp8", precision="fp8")
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("precision:\n- int8", "precision:\n- int8\n- fp8"))
    assert "UNFINISHED" not in main_note(folder)
    write_one_table(folder, "decision")
    rows = read_table(folder, "decision")
    rules = ["all operators", "linear operators"]
    assert [row["row"] for row in rows] == ["FP32", "BF16", "default PTQ, ort_static", *rules, "best found"]
    for precision in ("int8", "fp8"):
        decisions = [row[f"{precision} decision"] for row in rows]
        assert decisions[:2] == ["baseline", "not shipped: slower"]
        assert decisions[3:] == ["not shipped: accuracy", "not shipped: failed: build", "ship: fastest (random)"]
        assert rows[-1][f"{precision} speedup [CI]"] == "**2.00 [2.00, 2.00]**"


def add_tpe_choice(folder, change=lambda pick: pick, **facts) -> None:
    """Replace the choice of tpe by one that looked faster in its search than it is."""
    edit_picks(folder, lambda pick: None if pick["method"] == "tpe" else change(pick))
    lucky = {
        "method": "tpe",
        "kind": "search",
        "row": "bb",
        "seed": 0,
        "budget": 3,
        "search_ms": 2.0,
        "rank": 0,
        **facts,
    }
    edit_json(folder / TASK / "rows.json", lambda body: body["picks"].append(lucky))
    write_journal(folder / TASK / "runs" / "tpe-0.jsonl")
    raw_main(folder)


@pytest.mark.parametrize(
    ("random_selected", "tpe_selected", "decision"),
    [(None, None, "ship (tpe)"), (1.9, None, "ship (tpe)"), (1.9, 1.5, "ship: fastest (random)")],
    ids=["search samples", "not all in the final selection", "final selection"],
)
def test_best_found_row_is_chosen_by_final_selection(folder, random_selected, tpe_selected, decision):
    def select(pick):
        return {**pick, "final_selection": random_selected} if pick["kind"] == "search" else pick

    add_tpe_choice(folder, select, final_selection=tpe_selected)
    best = read_table(folder, "decision")[-1]
    assert best["decision"] == decision
    if random_selected is None:
        assert best["speedup [CI]"] == "1.60 [1.60, 1.60]", "the confirmed figure"


def test_the_smallest_loss_is_the_best_if_the_loss_was_minimised(folder):
    """The seed of random with the row bb, and random among the searchers; older records have no loss."""
    add_tpe_choice(folder, lambda pick: {k: v for k, v in pick.items() if k != "loss"}, row="aa")
    loss = {"aa": 0.01, "bb": 0.001}
    for lossy, speedup, best in ((False, "2.00 [2.00, 2.00]", "tpe"), (True, "1.60 [1.60, 1.60]", "random")):
        if lossy:
            edit_picks(folder, lambda pick: {**pick, "loss": loss[pick["row"]]} if pick["kind"] == "search" else pick)
        raw_main(folder, whole=True)
        rows = {row["method"]: row["speedup [CI]"].strip("*") for row in read_table(folder, "main")}
        assert rows["random"] == speedup
        assert read_table(folder, "decision")[-1]["decision"].endswith(f"({best})")
        for name in ("main", "decision", "finalists"):
            assert ("minimised the loss" in read_note(folder, name)) == lossy, name


@pytest.mark.parametrize(("by_file", "wrong"), [(70, False), (71, False), (85, True)])
def test_tool_row_with_other_file_score_is_a_wrong_result(folder, by_file, wrong):
    images = {"sha of float main": 80, "sha of all main": 70, "sha of all file": by_file}

    def add_images(body):
        body["sha of all file"] = {**body["sha of all main"], "metrics": {"top1": by_file / 100}}
        body["sha of all main"]["metrics"]["top1"] = 0.7
        for name, hits in images.items():
            body[name]["per_item"] = [1.0] * hits + [0.0] * (100 - hits)

    edit_json(folder / TASK / "accuracy.json", add_images)
    edit_json(folder / TASK / "task.json", goal=asdict(Goal(**BOUND, max_drop=0.2)))
    raw = raw_main(folder, whole=True)
    assert ("wrong result" in raw.loc["all", "verdict"]) == wrong
    rows = {row["method"]: row for row in read_table(folder, "tools")}
    assert rows["all"]["by the file"] == f"top-1 {by_file / 100:.4f}"
    assert rows["float"]["by the file"] == "-"
    assert rows["all"]["within the bound"].startswith("surely within (")


def test_the_note_lists_recovered_placements_with_their_steps(folder):
    step = {"step": "bias_correction", "before_db": 3.0, "after_db": 9.5, "kept": True}
    undone = {"step": "smoothing", "before_db": 3.0, "after_db": 2.0, "kept": False}
    facts = {
        "label": "depthwise channel, bias_correction",
        "steps": [undone, step],
        "loss_before": 0.2,
        "sha256": "ab" * 32,
    }
    placements = {
        "first": {**facts, "loss": 0.004, "within": True},
        "second": {
            **facts,
            "loss": 0.1,
            "within": False,
            "left_float": [{"node": "Conv_1", "gain_db": 2.5}, {"nodes": ["Conv_2", ""], "alone_db": 3.3}],
        },
        "third": {"label": "nothing to try", "within": False},
        "fourth": {"label": "not tried: surely within the bound as given", "within": False, "surely_within": True},
    }
    write_json(folder / TASK / "recovery.json", {"placements": placements})
    note = main_note(folder)
    assert (
        f"first with depthwise channel, bias_correction (bias_correction 3.0 to 9.5 dB) is recovered-{'ab' * 6}" in note
    )
    assert "0.2000 before, 0.0040 after" in note
    assert "second with" in note
    assert "still misses the bound" in note
    assert "Conv_1 left float +2.5 dB; Conv_2 and 1 after it left float, 3.3 dB if quantized" in note
    assert "third" not in note
    assert "fourth: not tried: surely within the bound as given" in note
