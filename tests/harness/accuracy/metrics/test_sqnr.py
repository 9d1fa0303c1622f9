"""One figure for an output: quiet slices count as much as loud ones, and nothing else is cut apart."""

import numpy as np
import pytest

from harness.accuracy.metrics.closeness import MAX_SQNR_DB, output_sqnr, part_sqnr, split_output


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def boxes_and_scores(axis: int, cells: int = 600) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.uniform(0, 640, (2, 4, cells)), rng.uniform(0, 1, (2, 10, cells)) ** 4], axis=1)
    return values if axis == 1 else values.transpose(0, 2, 1)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("cells", [8, 600])
def test_scores_that_are_all_0_are_not_hidden_by_boxes(axis, cells):
    whole = boxes_and_scores(axis, cells)
    broken = whole.copy()
    np.moveaxis(broken, axis, 0)[4:] = 0
    found = output_sqnr(whole, broken)
    assert part_sqnr(whole, broken) > 40
    assert found.sqnr_db == pytest.approx(0)
    assert str(found) == f"axis {axis} slices 4..13: 0.0 dB"


def test_equal_outputs_have_maximum_sqnr():
    whole = boxes_and_scores(1)
    assert output_sqnr(whole, whole).sqnr_db == MAX_SQNR_DB


@pytest.mark.parametrize("ratio", [29, 31])
def test_slices_are_split_from_a_ratio_of_thirty(ratio):
    whole = np.ones((1, 2, 8, 8))
    whole[:, 1] *= ratio
    assert len(split_output([whole])) == (2 if ratio > 30 else 0)


def test_channels_of_rising_scale_are_split(rng):
    whole = rng.normal(size=(1, 4, 8, 8)) * np.array([1, 10, 100, 1000]).reshape(1, 4, 1, 1)
    assert [part.slices for part in split_output([whole])] == [(2, 3), (0, 1)]


def test_samples_of_a_batch_are_compared_separately(rng):
    whole = rng.normal(size=(2, 3, 8, 8)) * np.array([1, 1000]).reshape(2, 1, 1, 1)
    broken = whole.copy()
    broken[0] = 0
    assert output_sqnr(whole, broken).sqnr_db == pytest.approx(0)


def test_columns_of_different_units_are_split(rng):
    samples = [np.array([[rng.uniform(0, 640), rng.uniform(0, 1)]]) for _ in range(16)]
    assert [part.slices for part in split_output(samples)] == [(0,), (1,)]


def test_fading_heatmap_positions_are_not_split(rng):
    fading = np.exp(-((np.arange(64) - 32.0) ** 2) / 60)
    heatmaps = rng.uniform(0.5, 1, (1, 17, 64, 64)) * fading * fading[:, None]
    assert split_output([heatmaps]) == ()


def test_logits_near_zero_by_chance_are_not_split(rng):
    bias = rng.normal(size=10)
    bias[3] = 1e-4
    logits = [(bias + 0.01 * rng.normal(size=10))[None] for _ in range(16)]
    assert split_output(logits) == ()
    assert split_output([rng.normal(size=(1, 1000)) for _ in range(16)]) == ()


def test_absent_classes_are_not_split_off(rng):
    scores = np.concatenate([rng.beta(0.2, 2, (1, 4, 900)), rng.uniform(0, 1e-4, (1, 76, 900))], axis=1)
    assert split_output([scores]) == ()
    assert [len(part.slices) for part in split_output([np.concatenate([scores, scores[:, :4] * 640], 1)])] == [4, 80]


def test_confident_probabilities_are_not_split(rng):
    logits = rng.normal(size=(16, 1, 10)) * 0.1
    logits[:, :, 2] += 12
    odds = np.exp(logits)
    assert split_output(list(odds / odds.sum(axis=2, keepdims=True))) == ()


def test_zero_slice_neither_causes_nor_hides_an_error(rng):
    whole = np.concatenate([100 * np.ones((1, 1, 64)), rng.normal(size=(1, 2, 64)), np.zeros((1, 1, 64))], axis=1)
    noisy = whole + 1e-7
    assert output_sqnr(whole, noisy).sqnr_db > 100
    noisy[:, 3] = 5
    assert output_sqnr(whole, noisy).sqnr_db < 0


def test_part_absent_from_a_batch_uses_its_usual_power(rng):
    loud, quiet = rng.normal(size=(1, 2, 64)) * 1000, rng.normal(size=(1, 2, 64))
    absent = np.concatenate([loud, np.zeros((1, 2, 64))], axis=1)
    parts = split_output([np.concatenate([loud, quiet], axis=1), absent])
    assert output_sqnr(absent, absent + 0.01, parts).sqnr_db == pytest.approx(37, abs=1)


def test_fading_class_probabilities_are_not_split(rng):
    scores = rng.uniform(0, 1, (1, 20, 900)) * np.geomspace(1, 5e-3, 20)[:, None]
    assert split_output([scores]) == ()
    assert [part.slices[0] for part in split_output([np.concatenate([scores, 99 * scores[:, :2]], axis=1)])] == [20, 0]


def test_small_constants_neither_cause_nor_hide_a_split(rng):
    whole = rng.normal(size=(2, 4, 64))
    whole[:, 1] = 1e-4
    assert split_output([whole]) == ()
    whole[:, 2:] *= 1e-3
    assert [part.slices for part in split_output([whole])] == [(0,), (1, 2, 3)]


def test_positions_quiet_by_chance_are_not_split(rng):
    scores = rng.uniform(0, 1e-4, (16, 3, 900))
    for i in range(900):
        scores[i % 16, i % 3, i] = rng.uniform(0.3, 0.9)
    scores[:, :, 5], scores[0, 0, 5] = 1e-4, 0.005
    assert split_output([scores]) == ()
