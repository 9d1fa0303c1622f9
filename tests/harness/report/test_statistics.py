"""Ranks, tests, effects and scores: against figures that others computed, and properties that must hold."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.base.text import pluralize
from harness.report.report_table import format_interval
from harness.report.statistics import (
    compare_pairs,
    compute_ranks,
    effect_size,
    quartiles,
    score_against_random,
)

# Demšar 2006, table 6: AUC of C4.5 with its parameters m and cf tuned, on 14 data sets.
DEMSAR = pd.DataFrame(
    {
        "C4.5": [.763, .599, .954, .628, .882, .936, .661, .583, .775, 1., .94, .619, .972, .957],
        "C4.5+m": [.768, .591, .971, .661, .888, .931, .668, .583, .838, 1., .962, .666, .981, .978],
        "C4.5+cf": [.771, .590, .968, .654, .886, .916, .609, .563, .866, 1., .965, .614, .9751, .946],
        "C4.5+m+cf": [.798, .569, .967, .657, .898, .931, .685, .625, .875, 1., .962, .669, .975, .970],
    }
)  # fmt: skip


def test_ranks_match_published_example():
    found = compute_ranks(DEMSAR)
    assert found.mean == pytest.approx({"C4.5+m+cf": 1.964, "C4.5+m": 2.0, "C4.5+cf": 2.893, "C4.5": 3.143}, abs=0.001)
    assert found.critical_difference == pytest.approx(1.25, abs=0.01)
    # Chi-squared is 10.2 with the correction for ties, so 0.0167; four methods are too few for that to be close.
    assert found.p_value == pytest.approx(0.0135, abs=0.003)
    assert next(iter(found.mean)) == "C4.5+m+cf"
    assert found.cliques == (("C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5"),)


@pytest.mark.parametrize(("blocks", "p_value"), [(3, 6 / 6**3), (4, 6 / 6**4), (5, 6 / 6**5)])
def test_p_value_of_few_agreeing_blocks_is_exact(blocks, p_value):
    found = compute_ranks(pd.DataFrame([[3.0, 2.0, 1.0]] * blocks, columns=list("abc")))
    assert found.p_value == pytest.approx(p_value)
    assert found.cliques[0] == ("a", "b")
    assert found.critical_difference == pytest.approx(2.343 * math.sqrt(2 / blocks), abs=0.001)


def test_two_blocks_have_ranks_and_no_test():
    found = compute_ranks(DEMSAR.iloc[:2])
    assert found.p_value is None
    assert found.critical_difference is None
    assert found.cliques == ()
    with pytest.raises(ValueError, match="ranks need blocks and methods, but got 0 and 4"):
        compute_ranks(DEMSAR.iloc[:0])


def test_pairs_have_a_ratio_an_effect_and_a_corrected_test():
    blocks = {f"b{i}": 1.0 + 0.1 * i for i in range(8)}
    seeds = {
        "good": {b: [2 * v, 2.1 * v] for b, v in blocks.items()},
        "bad": {b: [v, 1.05 * v] for b, v in blocks.items()},
        "same": {b: [v, 1.05 * v] for b, v in blocks.items()},
    }
    found = compare_pairs(seeds).set_index(["first", "second"])
    row = found.loc["good", "bad"]
    assert row["ratio"] == pytest.approx(2.0)
    assert (row["low"], row["high"]) == pytest.approx((2.0, 2.0))
    assert row["chance"] == 1.0
    assert row["p_value"] == pytest.approx(2 / 2**8)
    assert row["p_holm"] == pytest.approx(3 * 2 / 2**8)
    assert found.loc[("bad", "same"), "p_holm"] == 1.0
    assert found.loc[("bad", "same"), "chance"] == 0.5


def test_comparison_with_control_corrects_only_its_pairs():
    blocks = {f"b{i}": 1.0 + 0.1 * i for i in range(8)}
    seeds = {name: {b: [gain * v] for b, v in blocks.items()} for name, gain in (("a", 1.0), ("b", 2.0), ("c", 0.5))}
    every, own = compare_pairs(seeds), compare_pairs(seeds, "b")
    assert own[["first", "second"]].to_numpy().tolist() == [["b", "a"], ["b", "c"]]
    assert own["ratio"].tolist() == pytest.approx([2.0, 4.0])
    assert own["p_holm"].tolist() == pytest.approx(2 * [2 * 2 / 2**8]), "two comparisons"
    assert every["p_holm"].tolist() == pytest.approx(3 * [3 * 2 / 2**8]), "three comparisons"
    with pytest.raises(KeyError):
        compare_pairs(seeds, "missing")


WORTH = {"a": (2.0, 3.0, 2.5), "b": (1.0, 1.0, 1.0)}


@settings(max_examples=50)
@given(*(st.lists(st.floats(0.1, 10), min_size=1, max_size=6) for _ in range(2)))
def test_effects_of_both_directions_add_up_to_one(first, second):
    assert effect_size(first, second) + effect_size(second, first) == pytest.approx(1.0)
    assert effect_size(first, first) == pytest.approx(0.5)


def test_scores_are_0_for_random_search_and_1_for_the_best_at_once():
    random_ms = np.array([10.0, 8.0, 6.0, 5.0, 4.2, 4.0])
    curves = np.array([random_ms, np.full(6, 4.0), random_ms + 1])
    scores = score_against_random(curves, random_ms, 4.0)
    assert scores[:2].tolist() == pytest.approx([0.0, 1.0])
    assert scores[2] < 0
    assert score_against_random(curves, random_ms, 4.0, first=3)[1] == pytest.approx(1.0)
    assert np.isnan(score_against_random(curves, random_ms, 4.0, first=5)).all(), "random search has all by then"


def test_score_starts_after_initial_placements():
    """All have 90 % of the float model's gain before they begin; a score is about the rest."""
    random_ms = np.array([20.0, 5.0, 5.0, 4.6, 4.3, 4.1, 4.02])
    best_at_once = np.array([[20.0, 5.0, 5.0, 4.0, 4.0, 4.0, 4.0]])
    assert score_against_random(random_ms[None, :], random_ms, 4.0, first=3).tolist() == [0.0]
    assert score_against_random(best_at_once, random_ms, 4.0, first=3).tolist() == [1.0]
    assert np.isnan(score_against_random(best_at_once, random_ms, 4.99, first=3)).all(), (
        "0.2 % is below the claimed gain"
    )


def test_quartiles_are_of_several_values():
    assert quartiles(np.array([4.0, 0.0, 1.0, 2.0, 3.0])) == (2.0, 1.0, 3.0)
    assert quartiles(np.array([7.0])) == (7.0, None, None)


def test_format_interval_omits_unknown_limits():
    assert format_interval(1.25, 0.0, math.inf, 3) == "1.250"
    assert format_interval(1.25, math.nan, 2.0) == "1.25"
    assert format_interval(1.25, 1.0, 2.0) == "1.25 [1.00, 2.00]"
    assert format_interval(math.nan, 1.0, 2.0) == "-"
    assert [pluralize(n, "table") for n in (0, 1, 2)] == ["0 tables", "1 table", "2 tables"]
