"""The experiment that `qdq autotune` runs without flags of ModelOpt's procedure."""

from pathlib import Path

import numpy as np
import pytest
from small import qdq, save_chain

from harness.base.errors import UserError
from harness.compat.autotune_experiment import command_experiment, drop_objective, region_flags
from harness.compat.modelopt_autotune.settings import AutotunerError, parse_arguments
from harness.graph.builder import GraphBuilder
from harness.run.prepare.model_loader import open_model
from harness.run.prepare.preflight import check_experiment


def test_flags_set_keys_and_max_drop_is_in_percentage_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_chain(tmp_path / "net.onnx", (8, 4))
    np.savez("calib.npz", x=np.zeros((8, 3, 16, 16), np.float32))
    np.savez("test.npz", x=np.zeros((8, 3, 16, 16), np.float32), y=np.zeros(8, np.int64))
    given = (
        "--onnx_path net.onnx --max-drop 0.5 --test_data test.npz --test_labels y --calibration_data calib.npz "
        "--max_evals 7 --seed 3 --backend onnxruntime --param threads=2 --calibration_method mse"
    )
    experiment = command_experiment(parse_arguments(given.split(), "qdq autotune"))
    assert experiment.objective.max_drop == pytest.approx(0.005)
    assert experiment.objective.halves
    assert experiment.objective.recover
    (model,) = experiment.models
    assert (model.use, model.calibration.method) == ("net.onnx", "mse")
    assert model.evaluator.params["data"] == {"use": "npz", "path": "test.npz", "labels": "y"}
    assert experiment.budget.evaluations == (7,)
    assert experiment.seeds == (3,)
    assert experiment.backends[0].params == {"threads": 2}
    assert model.calibration.samples > 8
    list(check_experiment(experiment))
    assert drop_objective("0.5%")["max_drop"] == "0.5%"


def test_labelled_test_data_is_usable_for_calibration(tmp_path):
    file = tmp_path / "test.npz"
    np.savez(file, x=np.zeros((8, 3, 16, 16), np.float32), labels=np.zeros(8, np.int64))
    (model,) = command_experiment(
        parse_arguments(["--onnx_path", "zoo:mlp", "--calibration_data", str(file)], "qdq autotune")
    ).models
    assert model.calibration.data["labels"] == "labels"


@pytest.mark.parametrize(("given", "missing"), [("--max_drop 1", "--test_data"), ("--test_data t.npz", "--max_drop")])
def test_a_bound_and_test_data_need_each_other(given, missing):
    with pytest.raises(AutotunerError, match=missing):
        command_experiment(parse_arguments(["--onnx_path", "zoo:mlp", *given.split()], "qdq autotune"))


def test_agreement_needs_no_labels(tmp_path):
    bare, labelled = tmp_path / "bare.npz", tmp_path / "labelled.npz"
    np.savez(bare, x=np.zeros((8, 3, 16, 16), np.float32))
    np.savez(labelled, x=np.zeros((8, 3, 16, 16), np.float32), labels=np.zeros(8, np.int64))
    for file, named in ((bare, False), (labelled, True)):
        given = ["-m", "zoo:mlp", "--max_drop", "1", "--metric", "agreement", "--test_data", str(file)]
        (model,) = command_experiment(parse_arguments(given, "qdq autotune")).models
        assert ("labels" in model.evaluator.params["data"]) is named, "an array of the file has to have a meaning"


def test_at_options_define_a_shape_set():
    given = "--onnx_path zoo:mlp --at batch=1:0.7 --at batch=8,time=128:0.3"
    (model,) = command_experiment(parse_arguments(given.split(), "qdq autotune")).models
    assert [(each.label, each.weight) for each in model.shape_set.shapes] == [
        ("batch=1", 0.7),
        ("batch=8, time=128", 0.3),
    ]
    for wrong in ("--at batch", "--at batch=1:x", "--at_objective worst", "--at batch=1"):
        with pytest.raises(UserError):
            command_experiment(parse_arguments(["-m", "zoo:mlp", *wrong.split()], "qdq autotune"))


def test_dimension_sizes_default_to_calibration_arrays(tmp_path):
    builder = GraphBuilder("net", seed=1)
    builder.output(builder.op("Relu", builder.input("x", ("batch", 4, "time"))))
    model = str(builder.save(tmp_path / "net.onnx"))
    np.savez(tmp_path / "calib.npz", x=np.zeros((8, 4, 16), np.float32))
    np.save(tmp_path / "calib.npy", np.zeros((8, 4, 16), np.float32))
    for file in ("calib.npz", "calib.npy"):
        given = ["-m", model, "--calibration_data", str(tmp_path / file)]
        found = command_experiment(parse_arguments([*given, "--at", "time=8", "--at", "time=32"], "qdq autotune"))
        list(check_experiment(found))
        opened = open_model(found.models[0], tmp_path)
        assert opened.types["x"].shape == (1, 4, 16)
        for flags, expected in ((["--dim", "time=8"], 8), (["--shape", "x:1x4x9"], 9)):
            (spec,) = command_experiment(parse_arguments([*given, *flags], "qdq autotune")).models
            assert open_model(spec, tmp_path).types["x"].shape == (1, 4, expected)


def test_start_files_are_initial_placements_and_baselines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_chain(tmp_path / "net.onnx", (8, 4))
    assert qdq("insert", "net.onnx", "-o", "ours.onnx") == 0
    Path("linear.onnx").write_bytes(Path("ours.onnx").read_bytes())
    given = "-m net.onnx --start ours.onnx --start linear.onnx --baseline nncf_ptq"
    experiment = command_experiment(parse_arguments(given.split(), "qdq autotune"))
    starts = [entry for entry in experiment.initial if entry.use == "placement"]
    assert [entry.name for entry in starts] == ["ours", "start2-linear"]
    assert [entry.params for entry in starts] == [
        {"path": f"{name}.onnx", "ranges": True} for name in ("ours", "linear")
    ]
    assert experiment.baselines == ("ours", "start2-linear", "nncf_ptq")
    np.save("calib.npy", np.zeros((8, 3, 16, 16), np.float32))
    calibrated = command_experiment(parse_arguments([*given.split(), "--calibration", "calib.npy"], "qdq autotune"))
    assert all("ranges" not in entry.params for entry in calibrated.initial)
    for wrong, fact in (
        ("--start net.onnx", "no Q/DQ pair"),
        ("--start gone.onnx", "--start"),
        ("--max_evals 2", "--max_"),
    ):
        with pytest.raises(UserError, match=fact):
            command_experiment(parse_arguments(["-m", "net.onnx", *wrong.split()], "qdq autotune"))
    assert qdq("autotune", *given.split(), "--mode", "quick") == 2, "not of ModelOpt's procedure"


def test_search_without_max_drop_minimizes_latency_only():
    experiment = command_experiment(parse_arguments(["--onnx_path", "zoo:mlp"], "qdq autotune"))
    assert experiment.objective.max_drop is None
    assert [searcher.use for searcher in experiment.searchers] == ["auto"]
    assert experiment.budget.stop_at is not None
    assert experiment.budget.task_minutes is None
    limited = command_experiment(parse_arguments(["--onnx_path", "zoo:mlp", "--max_minutes", "5"], "qdq autotune"))
    assert limited.budget.task_minutes == 5


def test_region_flags_exclude_max_drop():
    given = ["--onnx_path", "zoo:mlp", "-s", "3", "--timing_runs=40", "--seed", "3"]
    assert region_flags(given) == ["-s", "--timing_runs"]
    assert not region_flags(["--onnx_path", "zoo:mlp", "--seed", "3"])
    with pytest.raises(AutotunerError, match="--timing_runs"):
        region_flags([*given, "--max_drop", "1"])


def test_output_folder_of_a_region_run_is_refused(tmp_path, capsys):
    (tmp_path / "autotuner_state.yaml").write_text("{}")
    assert qdq("autotune", "-m", "zoo:mlp", "-o", str(tmp_path)) == 2
    assert "--mode" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["autotuner_state.yaml"]
