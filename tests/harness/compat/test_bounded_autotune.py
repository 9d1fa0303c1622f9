"""The autotuner's command line under a bound on accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small import save_chain

from harness.compat.bounded_autotune import bounded_experiment, ignored_flags
from harness.compat.modelopt_autotune.settings import AutotunerError, parse_arguments
from harness.task_setup.preflight import check_experiment


def test_points_are_hundredths_and_the_flags_have_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_chain(tmp_path / "net.onnx", (8, 4))
    np.savez("calib.npz", x=np.zeros((8, 3, 16, 16), np.float32))
    np.savez("test.npz", x=np.zeros((8, 3, 16, 16), np.float32), y=np.zeros(8, np.int64))
    given = (
        "--onnx_path net.onnx --max-drop 0.5 --test_data test.npz --test_labels y --calibration_data calib.npz "
        "--max_evals 7 --seed 3 --backend onnxruntime --calibration_method mse"
    )
    experiment = bounded_experiment(parse_arguments(given.split(), "qdq autotune"))
    assert experiment.objective.max_drop == pytest.approx(0.005)
    assert experiment.objective.halves
    assert experiment.objective.recover
    (model,) = experiment.models
    assert (model.use, model.calibration.method) == ("net.onnx", "mse")
    assert model.evaluator is not None
    assert model.evaluator.params["data"] == {"use": "npz", "path": "test.npz", "labels": "y"}
    assert experiment.budget.evaluations == (7,)
    assert experiment.seeds == (3,)
    list(check_experiment(experiment))


def test_a_bound_needs_labelled_data() -> None:
    with pytest.raises(AutotunerError, match="--test_data"):
        bounded_experiment(parse_arguments(["--onnx_path", "zoo:mlp", "--max_drop", "1"], "qdq autotune"))


def test_flags_without_effect_under_a_bound_are_named() -> None:
    given = "--onnx_path zoo:mlp --max_drop 1 --test_data test.npz --mode quick --timing_runs 40 --seed 3"
    found = [remark.partition(": ")[2] for remark in ignored_flags(parse_arguments(given.split(), "qdq autotune"))]
    assert [remark.split(";")[0] for remark in found] == ["--mode quick", "--timing_runs 40"]
