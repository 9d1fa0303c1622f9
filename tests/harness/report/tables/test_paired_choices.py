"""Gain over the best fixed row, and ablation of a searcher, from paired choices."""

from dataclasses import asdict

import numpy as np
import pytest
from small_results import (
    TASK,
    edit_json,
    read_note,
    read_table,
    trace_lines,
    write_choices,
    write_confirmation,
    write_one_table,
)
from stored import read_records, write_records

from harness.base.statistics import Interval, block_ci
from harness.report.statistics import geometric_mean
from harness.report.tables.paired_choices import ablation_frame, fixed_frame
from harness.results.folder import load
from harness.results.search_log import Goal

OTHER = "other-openvino-int8"
YAML = """
experiment: small
models: [{use: net.onnx, label: net}, {use: other.onnx, label: other}]
backends: [{use: openvino}]
searchers: [auto, tpe]
baselines: [all, movers]
budget: {evaluations: [10, 25, 50]}
seeds: [0]
"""
FIXED = {"all": "all", "movers": "bb"}
FREE = asdict(Goal())
LATENCY_MS = {"all": 5.0, "bb": 4.0, "aa": 2.0}


@pytest.fixture
def fixed(tmp_path):
    """Writes a task without a bound on accuracy, with choices of `auto` by budget or of searchers and budgets."""
    (tmp_path / "experiment.yaml").write_text(YAML)

    def write(choices, task=TASK, baselines=FIXED, latency_ms=LATENCY_MS, goal=FREE):
        keyed = {key if isinstance(key, tuple) else ("auto", key): rows for key, rows in choices.items()}
        facts = {"model": task.partition("-")[0], **({} if goal is None else {"goal": goal})}
        return write_choices(tmp_path, task, baselines, keyed, latency_ms, **facts)

    return write


def shown(folder) -> dict[tuple[str, str], dict[str, str]]:
    """Write the table; return the rows of the fixed table by task and searcher."""
    write_one_table(folder, "fixed")
    return {(row["task"], row["searcher"]): row for row in read_table(folder, "fixed")}


def test_choices_are_compared_with_the_fastest_fixed_row(tmp_path, fixed):
    latency_ms = {"all": 5.0, "bb": 4.0, "aa": 2.0, "cc": 4.02}
    task = fixed({10: ["all"], 25: ["bb"], 50: ["aa"], ("tpe", 50): ["cc"]}, latency_ms=latency_ms)
    frame = fixed_frame(load(tmp_path))
    assert set(frame["fixed"]) == {"movers"}
    assert frame["ratio"].tolist() == pytest.approx([0.8, 1.0, 2.0, 4 / 4.02])
    assert frame["verdict"].tolist() == ["slower", "the same placement", "faster", "tie"]
    rows = shown(tmp_path)
    assert rows[TASK, "auto"] == {
        "task": TASK, "best fixed row": "movers", "noise floor": "0.0%", "searcher": "auto",
        "10 evaluations": "0.80 [0.80, 0.80] slower", "25 evaluations": "the same placement",
        "50 evaluations": "2.00 [2.00, 2.00] faster", "seeds": "1",
    }  # fmt: skip
    assert rows[TASK, "tpe"]["10 evaluations"] == "-"
    edit_json(task / "noise_floor.json", noise_floor=0.3)
    assert fixed_frame(load(tmp_path))["verdict"].tolist() == ["tie", "the same placement", "faster", "tie"]


def test_ratio_is_median_of_seeds_with_widest_limits(tmp_path, fixed):
    fixed({10: ["aa", "bb"]})
    (row,) = fixed_frame(load(tmp_path)).to_dict("records")
    assert (row["ratio"], row["low"], row["high"]) == pytest.approx((1.5, 1.0, 2.0))
    assert (row["verdict"], row["seeds"], row["same"]) == ("tie", 2, 1)


def test_ratio_is_paired_and_single_turn_gives_tie(tmp_path, fixed):
    task = fixed({10: ["aa"]})
    write_confirmation(task, {"A/A twin": 8.0, "float": 8.0, **LATENCY_MS}, paces=(1.0, 2.0, 3.0))
    assert shown(tmp_path)[TASK, "auto"]["10 evaluations"] == "2.00 [2.00, 2.00] faster"
    path = task / "confirmation.jsonl"
    header, *events = read_records(path)
    write_records(path, [header, *(event for event in events if event.get("round") == 0 == event["build"])])
    assert shown(tmp_path)[TASK, "auto"]["10 evaluations"] == "2.00 tie"


def test_rows_beyond_bound_are_excluded_as_fixed_row_and_counted(tmp_path, fixed):
    choices, latency_ms = {10: ["aa", "all"]}, {"all": 2.0, "bb": 4.0, "aa": 4.0}
    fixed(choices, latency_ms=latency_ms, goal=None)
    row = shown(tmp_path)[TASK, "auto"]
    assert row["best fixed row"] == "movers"
    assert row["10 evaluations"].endswith(", 1/2 not to ship")
    fixed(choices, OTHER, {"all": "all"}, latency_ms, goal=None)
    assert fixed_frame(load(tmp_path)).set_index("task").loc[OTHER, "row"] == ""
    row = shown(tmp_path)[OTHER, "auto"]
    assert (row["best fixed row"], row["10 evaluations"]) == ("none to ship", "-")


@pytest.mark.parametrize(
    ("choices", "others", "latency_ms", "noise_floor", "tally"),
    [
        (
            {25: ["aa"], 50: ["aa"]}, {25: ["all"], 50: ["bb"]}, LATENCY_MS, 0.0,
            "auto: after 25 evaluations 1 faster, 1 slower, least 0.80; after 50 evaluations 1 faster, 1 the same "
            "placement, least 1.00.",
        ),
        (
            {25: ["all", "all", "bb"]}, {25: ["all", "bb", "all"]}, LATENCY_MS, 0.26,
            f"auto: after 25 evaluations 2 tie, least 0.80 (ties by their intervals alone: {TASK} 0.80).",
        ),
        (
            {25: ["aa"]}, {25: ["aa"]}, {**LATENCY_MS, "aa": 3.9}, 0.05,
            f"auto: after 25 evaluations 1 faster, 1 tie, least 1.03 (ties by the noise floor alone: {OTHER} 1.03).",
        ),
    ],
)  # fmt: skip
def test_note_counts_tasks_by_verdict(fixed, choices, others, latency_ms, noise_floor, tally):
    folder = fixed(choices, latency_ms=latency_ms).parent
    shown(folder)
    assert "favours the fixed row" in read_note(folder, "fixed")
    assert "auto: after" not in read_note(folder, "fixed")
    edit_json(fixed(others, OTHER, latency_ms=latency_ms) / "noise_floor.json", noise_floor=noise_floor)
    shown(folder)
    assert tally in read_note(folder, "fixed")


def test_geometric_mean_has_interval_from_three_tasks(tmp_path, fixed):
    third = "third-openvino-int8"
    (tmp_path / "experiment.yaml").write_text(
        YAML.replace("label: other}", "label: other}, {use: t.onnx, label: third}")
    )
    fixed({10: ["aa"]})
    fixed({10: ["bb"]}, OTHER)
    assert shown(tmp_path)["geometric mean", "auto"]["10 evaluations"] == "1.41 of 2"
    fixed({10: ["all"]}, third)
    mean = shown(tmp_path)["geometric mean", "auto"]
    assert (mean["best fixed row"], mean["noise floor"]) == ("-", "-")
    assert mean["10 evaluations"].startswith("1.17 [0.3")
    assert mean["10 evaluations"].endswith("] of 3"), "no verdict without a floor"
    frame = fixed_frame(load(tmp_path))
    assert frame[frame["task"].isna()]["ratio"].tolist() == pytest.approx([(2.0 * 1.0 * 0.8) ** (1 / 3)])
    sources = trace_lines(load(tmp_path), "geometric mean/auto:10", "fixed")
    assert f"{third}, auto, seed 0 at 10 evaluations: all" in sources


SEARCHERS = "auto, {use: auto, label: bare, params: {rules: 0}}, {use: surrogate, label: model_alone}"
ABLATION_YAML = f"""
experiment: small
models: [net.onnx]
backends: [openvino]
searchers: [{SEARCHERS}]
baselines: [all]
seeds: [0, 1, 2]
"""
CHOICES = {
    ("auto", 10): ["aa", "aa", "aa"], ("bare", 10): ["bb", "aa", "bb"], ("model_alone", 10): ["bb", "bb", "bb"],
    ("auto", 25): ["aa", "aa", "aa"], ("bare", 25): ["aa", "aa", "aa"], ("model_alone", 25): ["aa", "bb", "aa"],
}  # fmt: skip


@pytest.fixture
def ablation(tmp_path):
    """Writes tasks; the row bb takes 5 ms in the first and 8 ms in the others, aa takes 4 ms."""

    def write(count: int, searchers: str = SEARCHERS):
        (tmp_path / "experiment.yaml").write_text(ABLATION_YAML.replace(SEARCHERS, searchers))
        for number in range(count):
            latency_ms = {"all": 2.0, "aa": 4.0, "bb": 8.0 if number else 5.0}
            write_choices(tmp_path, f"net-{number}-int8", {"all": "all"}, CHOICES, latency_ms)
        return load(tmp_path)

    return write


def test_ablation_has_rows_for_mean_and_task_by_budget(ablation):
    frame = ablation_frame(ablation(2))
    bare = frame[frame["variant"] == "bare"].fillna({"task": "mean"}).set_index(["budget", "task"])
    assert bare["ratio"].to_dict() == pytest.approx(
        {
            (10, "mean"): np.sqrt(4 / 5 * 4 / 8), (10, "net-0-int8"): 4 / 5, (10, "net-1-int8"): 4 / 8,
            (25, "mean"): 1.0, (25, "net-0-int8"): 1.0, (25, "net-1-int8"): 1.0,
        }
    )  # fmt: skip
    one, mean = bare.loc[(10, "net-0-int8")], bare.loc[(10, "mean")]
    assert (one["low"], one["high"], one["seeds"]) == (pytest.approx(4 / 5), 1.0, 3), "the limits of all seeds"
    assert one["chance"] == pytest.approx(1 / 6)
    above = np.exp(np.hypot(np.log(5 / 4), np.log(8 / 4)) / 2)
    assert (mean["low"], mean["high"], mean["tasks"]) == pytest.approx((mean["ratio"], mean["ratio"] * above, 2))


def test_ablation_of_many_tasks_has_only_mean_with_interval(ablation):
    frame = ablation_frame(ablation(6))
    assert frame["task"].isna().all()
    mean = frame[(frame["variant"] == "bare") & (frame["budget"] == 10)].iloc[0]
    expected = block_ci([[4 / 5], *[[4 / 8]] * 5])
    assert (mean["ratio"], mean["low"], mean["high"]) == pytest.approx((expected.value, expected.low, expected.high))


@pytest.mark.parametrize(
    "others",
    [
        f"{SEARCHERS}, tpe",
        "{use: auto, params: {rules: 1}}, {use: auto, label: bare}, {use: surrogate, label: model_alone}",
        "tpe, {use: auto, label: bare}, {use: auto, label: again}, {use: surrogate, label: model_alone}",
    ],
    ids=["a searcher without a label", "the first has parameters", "the first has no variants"],
)
def test_searchers_of_other_plugins_are_no_variants(ablation, others):
    assert "model_alone" not in set(ablation_frame(ablation(1, others))["variant"])


def test_an_ablation_is_traced_to_its_tasks_and_budget(ablation):
    results = ablation(2)
    one = "\n".join(trace_lines(results, "2:ratio", "ablation"))
    assert "net-0-int8, bare, seed 0 at 10 evaluations: bb" in one
    assert not any(words in one for words in ("net-1-int8", "at 25"))
    mean = "\n".join(trace_lines(results, "1:ratio", "ablation"))
    assert "net-0-int8, bare, seed 0 at 10" in mean
    assert "net-1-int8, bare, seed 0 at 10" in mean


def test_geometric_mean_has_no_limits_if_one_estimate_lacks_them():
    mean = geometric_mean([Interval(value=2.0, low=1.0, high=4.0), Interval(value=8.0, low=0.0, high=np.inf)])
    assert mean.value == pytest.approx(4.0)
    assert np.isnan([mean.low, mean.high]).all()
