"""Searchers beside themselves without a part: by budget, over cells and cell by cell."""

from __future__ import annotations

import numpy as np
import pytest

from harness.report.frames.component_ablation import ablation_frame
from harness.report.frames.searcher_statistics import pair_frame
from harness.report.load.results import load
from harness.report.render import write_tables
from harness.report.statistics import geometric_mean
from harness.report.trace import trace_cell
from harness.statistics import Interval, block_ci

SEARCHERS = "auto, {use: auto, label: bare, params: {rules: 0}}, {use: surrogate, label: model_alone}"
YAML = f"""
experiment: small
models: [net.onnx]
backends: [openvino]
searchers: [{SEARCHERS}]
baselines: [all]
seeds: [0, 1, 2]
"""
LATENCY_MS = {"all": 2.0, "aa": 4.0, "bb": 5.0}
CHOICES = {
    ("auto", 10): ["aa", "aa", "aa"], ("bare", 10): ["bb", "aa", "bb"], ("model_alone", 10): ["bb", "bb", "bb"],
    ("auto", 25): ["aa", "aa", "aa"], ("bare", 25): ["aa", "aa", "aa"], ("model_alone", 25): ["aa", "bb", "aa"],
}  # fmt: skip


@pytest.fixture
def cells(tmp_path, choices_maker):
    """Writes cells; in the first the row bb takes 5 ms, in the others 8, and aa takes 4 in all."""

    def written(count: int, yaml: str = YAML):
        (tmp_path / "experiment.yaml").write_text(yaml)
        for number in range(count):
            latency_ms = {**LATENCY_MS, "bb": 8.0 if number else 5.0}
            choices_maker(f"net-{number}-int8", {"all": "all"}, CHOICES, latency_ms)
        return load(tmp_path)

    return written


def test_there_is_a_line_for_each_budget_of_the_mean_and_of_each_cell(cells):
    found = ablation_frame(cells(2))
    bare = found[found["variant"] == "bare"].fillna({"cell": "mean"}).set_index(["budget", "cell"])
    assert bare["ratio"].to_dict() == pytest.approx(
        {
            (10, "mean"): np.sqrt(4 / 5 * 4 / 8), (10, "net-0-int8"): 4 / 5, (10, "net-1-int8"): 4 / 8,
            (25, "mean"): 1.0, (25, "net-0-int8"): 1.0, (25, "net-1-int8"): 1.0,
        }
    )  # fmt: skip
    one = bare.loc[(10, "net-0-int8")]
    assert (one["low"], one["high"], one["seeds"]) == (pytest.approx(4 / 5), 1.0, 3), "from the worst seed to the best"
    assert one["chance"] == pytest.approx(1 / 6)
    mean = bare.loc[(10, "mean")]
    above = np.exp(np.hypot(np.log(5 / 4), np.log(8 / 4)) / 2)
    assert (mean["low"], mean["high"]) == pytest.approx((mean["ratio"], mean["ratio"] * above))
    assert mean["cells"] == 2


def test_with_enough_cells_the_mean_alone_stands_there_with_its_interval_over_them(cells):
    found = ablation_frame(cells(6))
    assert found["cell"].isna().all()
    mean = found[(found["variant"] == "bare") & (found["budget"] == 10)].iloc[0]
    expected = block_ci([[4 / 5], *[[4 / 8]] * 5])
    assert (mean["ratio"], mean["low"], mean["high"]) == pytest.approx((expected.value, expected.low, expected.high))


def test_one_cell_is_its_own_mean(cells):
    found = ablation_frame(cells(1))
    assert set(found["cell"]) == {"net-0-int8"}
    assert len(found) == 2 * 2


def test_pairs_stay_at_the_largest_budget(cells):
    pairs = pair_frame(cells(2)).set_index(["first", "second"])
    assert pairs.loc[("auto", "bare"), "ratio"] == pytest.approx(1.0), "at 10 evaluations it is not"


def test_what_is_the_only_one_of_another_plug_in_is_a_part_where_all_others_are(cells):
    found = ablation_frame(cells(1)).set_index(["variant", "budget"])
    assert found.loc[("model_alone", 10), "ratio"] == pytest.approx(4 / 5)
    assert found.loc[("model_alone", 10), "reference"] == "auto"
    assert found.loc[("model_alone", 10), "params"] == "use=surrogate"
    assert found.loc[("bare", 10), "params"] == "rules=0"


@pytest.mark.parametrize(
    "others",
    [
        f"{SEARCHERS}, tpe",
        "{use: auto, params: {rules: 1}}, {use: auto, label: bare}, {use: surrogate, label: model_alone}",
        "tpe, {use: auto, label: bare}, {use: auto, label: again}, {use: surrogate, label: model_alone}",
    ],
    ids=["a searcher without a label", "the first is not plain", "the first has no variants"],
)
def test_elsewhere_searchers_of_other_plug_ins_are_rivals_and_no_parts(cells, others):
    found = ablation_frame(cells(1, YAML.replace(SEARCHERS, others)))
    assert "model_alone" not in set(found["variant"])


def test_the_table_names_budget_and_cell_and_says_what_few_seeds_can_tell(cells, tmp_path):
    results = cells(2)
    write_tables(results, tmp_path / "report")
    text = (tmp_path / "report" / "ablation.md").read_text()
    head, _, mean, one, *_ = ([c.strip() for c in line.strip("|").split("|")] for line in text.splitlines())
    assert head == ["reference", "variant", "parameters", "budget", "cell", "ratio [limits]", "chance", "seeds"]
    assert mean[:5] == ["auto", "bare", "rules=0", "10 evaluations", "geometric mean of 2"]
    assert one[4:] == ["net-0-int8", "0.800 [0.800, 1.000]", "17%", "3"]
    assert "75 % with three" in text
    assert "up to 20 builds in all of them): net-0-int8 0.0%, net-1-int8 0.0%." in text


def test_a_line_is_traced_to_its_cell_and_budget_and_a_mean_to_all_cells(cells):
    results = cells(2)
    one = trace_cell(results, "2:ratio", "ablation")
    assert "net-0-int8, bare, seed 0 at 10 evaluations: bb" in "\n".join(one.lines)
    assert not any("net-1-int8" in line or "at 25" in line for line in one.lines)
    mean = "\n".join(trace_cell(results, "1:ratio", "ablation").lines)
    assert "net-0-int8, bare, seed 0 at 10" in mean
    assert "net-1-int8, bare, seed 0 at 10" in mean


def test_means_of_estimates_without_limits_have_none():
    found = geometric_mean([Interval(value=2.0, low=1.0, high=4.0), Interval(value=8.0, low=0.0, high=np.inf)])
    assert found.value == pytest.approx(4.0)
    assert np.isnan([found.low, found.high]).all()
