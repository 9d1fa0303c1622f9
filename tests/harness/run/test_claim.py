"""Whose results a folder holds: the same experiment is recognised whatever its numbers, and after an update."""

import math

import pytest

from harness.errors import UserError
from harness.run.claim import claimed
from harness.run.compare import changes, same
from harness.run.config import parse_experiment

TEXT = """
experiment: small
models: [net.onnx]
backends: [{use: simulated, params: {noise: .nan, drift: .inf, wanted: [1, .nan]}}]
"""


def test_an_experiment_with_nan_is_the_same_experiment_again(tmp_path):
    for _ in range(2):
        with claimed(tmp_path / "out", parse_experiment(TEXT, "small.yaml")):
            pass
    with (
        pytest.raises(UserError, match=r"results of another experiment \(different: backends\)"),
        claimed(tmp_path / "out", parse_experiment(TEXT.replace("[1, .nan]", "[2, .nan]"), "small.yaml")),
    ):
        pass


def test_results_from_before_a_key_had_its_default_then(tmp_path):
    experiment = parse_experiment(TEXT, "small.yaml")
    with claimed(tmp_path / "out", experiment):
        file = tmp_path / "out" / "experiment.yaml"
    old = file.read_text()
    file.write_text("".join(line for line in old.splitlines(keepends=True) if "memory_gb" not in line))
    assert file.read_text() != old
    with claimed(tmp_path / "out", experiment):
        pass
    changed = experiment.model_copy(update={"limits": experiment.limits.model_copy(update={"memory_gb": 2.0})})
    with pytest.raises(UserError, match=r"\(different: limits\)"), claimed(tmp_path / "out", changed):
        pass


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (math.nan, math.nan, True),
        ([1, math.nan], [1, math.nan], True),
        ({"a": math.nan}, {"a": math.nan}, True),
        (1, 1.0, True),
        (math.nan, 1.0, False),
        ([math.nan], [math.inf], False),
    ],
)
def test_a_nan_equals_itself(one, other, equal):
    assert same(one, other) is equal
    assert bool(list(changes({"x": one}, {"x": other}))) is not equal
