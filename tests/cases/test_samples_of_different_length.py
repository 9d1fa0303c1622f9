"""Samples of different length run at their own length on a dynamic axis, and are refused by name on a fixed one."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import qdq
from onnx import numpy_helper

from harness.accuracy.calibration.ranges import CalibrationBatches
from harness.accuracy.data.batching import make_batches
from harness.accuracy.data.datasets import open_data
from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.compat.autotune_experiment import command_experiment
from harness.compat.modelopt_autotune.settings import parse_arguments
from harness.compat.tao_specs.ptq import run_ptq
from harness.config.experiment import Experiment, TaskSpec, parse_experiment, plan_tasks
from harness.config.sections import ModelSpec, PluginSpec
from harness.config.yaml_loader import dump_yaml
from harness.graph.builder import GraphBuilder
from harness.graph.load import save_to_folder
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins.api import Candidate
from harness.plugins.registry import create_plugin, register_object
from harness.run.prepare.initial_design import QuantizationRequest, run_external_tool
from harness.run.prepare.model_loader import evaluator_spec, input_types, need_own_sizes, open_model, require_own_sizes
from harness.run.prepare.program_objects import data_mapping
from harness.run.prepare.task import Task, compose_task
from harness.run.select.recovery import list_choices, open_placer
from harness.runtimes.shape_set import make_sample_sizes
from harness.ship.placements import calibration_config
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import InProcess

RUNTIMES = ("openvino", "onnxruntime")
LENGTHS = (5, 12, 8, 5)
F32 = {"openvino": {"precision": "f32"}, "onnxruntime": {}}


def write_model(folder: Path, length: int | str = "length", batch: int | str = "batch") -> Path:
    """Write a model of one attention with a position embedding that is cut to the length of the input."""
    g, rng = GraphBuilder("g"), np.random.default_rng(0)
    weights = {name: rng.standard_normal((16, 16)).astype(np.float32) / 4 for name in "qkvo"}
    x, start = g.input("x", (batch, length, 16)), g.const([0])
    size = g.op("Slice", g.op("Shape", x), g.const([1]), g.const([2]))
    cut = g.op("Slice", g.const(rng.standard_normal((64, 16)).astype(np.float32)), start, size, start)
    placed = g.op("Add", x, cut, outputs="placed")
    q, k, v = (g.op("MatMul", placed, g.const(weights[name]), name=f"to_{name}") for name in "qkv")
    shares = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])))
    g.output(g.op("MatMul", g.op("MatMul", shares, v), g.const(weights["o"])), (batch, length, 16), name="y")
    return g.save(folder / "m.onnx")


def draw(lengths=LENGTHS, scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": (rng.standard_normal((1, n, 16)) * scale).astype(np.float32)} for n in lengths]


@pytest.fixture
def path(tmp_path) -> Path:
    return write_model(tmp_path)


def spec(path: Path, samples, **keys) -> ModelSpec:
    data = data_mapping(samples, path.parent / "calibration")
    return ModelSpec.model_validate({"use": str(path), "calibration": {"data": data}, **keys})


@pytest.fixture
def ready(path, tmp_path):
    """The model for samples of several lengths, with its section and what runs it at their sizes."""
    given = spec(path, draw())
    model = open_model(given, tmp_path)
    return given, model, make_sample_sizes(model, save_to_folder(model, tmp_path / "work"))


def engines(use, sizes, folder, **evaluators):
    benchmarkers = {MAIN_BENCHMARKER: PluginSpec.model_validate(use)}
    return InProcess(WorkerSpec(benchmarkers=benchmarkers, workdir=folder / "engines", sizes=sizes, **evaluators))


@pytest.mark.parametrize("backend", RUNTIMES)
def test_a_written_file_is_calibrated_and_compared_at_the_length_of_each_sample(backend, path, tmp_path):
    """The ranges come from all values of the samples alone: none of padding, none left out."""
    use = {"use": backend, "params": F32[backend]}
    samples = draw()
    samples[2]["x"][0, 7, 3] = 40.0  # the last value of a short sample
    made = qdq.insert(path, tmp_path / "q.onnx", placement="all", calibration=samples, backend=use, dims={"length": 12})
    assert made.check.verdict == "right"
    assert made.check.file_db > 15
    proto = onnx.load(made.path)
    assert [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim] == [1, 12, 16]
    scales = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    first = next(n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "placed")
    assert float(scales[first.input[1]]) * 255 > 39


@pytest.mark.parametrize("backend", RUNTIMES)
def test_an_engine_scores_each_sample_at_its_length(backend, path, ready, tmp_path):
    """Outputs have the length of the sample, and are close to those of the original file."""
    made = qdq.insert(path, tmp_path / "q.onnx", calibration=draw(), backend=backend, run=False)
    _, _, sizes = ready
    session = onnxruntime.InferenceSession(path)
    with engines({"use": backend, "params": F32[backend]}, sizes, tmp_path) as made_by:
        for file, tolerance in ((sizes.fixed, 1e-3), (made.path, 0.2)):
            built = made_by.build(Candidate(digest=file.stem, edges=(), source=lambda file=file: file))
            for sample in draw():
                outputs = made_by.infer(built.handle, sample)
                assert not isinstance(outputs, Failed), outputs
                (expected,) = session.run(None, sample)
                assert outputs["y"].shape == expected.shape
                error = np.abs(outputs["y"] - expected).max() / np.abs(expected).max()
                assert (error > 1e-3) == (file != sizes.fixed), (
                    "the engine runs the quantized file, not the float model"
                )
                assert error <= tolerance


def test_evaluators_score_each_sample_at_its_length(path, ready, tmp_path):
    """A function gets a list of outputs and of labels if their shapes differ, arrays otherwise."""
    seen = {}

    def near(outputs, labels):
        seen["shapes"] = [each.shape for each in outputs], [each.shape for each in labels]
        return np.array([np.abs(y[0] - label).max() < 1e-3 for y, label in zip(outputs, labels, strict=True)])

    session = onnxruntime.InferenceSession(path)
    labelled = [{**sample, "label": session.run(None, sample)[0]} for sample in draw()]
    data = {**data_mapping(labelled, tmp_path / "test"), "labels": "label"}
    evaluators = {
        "metric": {"data": data, "function": register_object(near)},
        "fidelity": {"data": data_mapping(draw(), tmp_path / "plain")},
    }
    model_spec, model, sizes = ready
    for name, params in evaluators.items():
        described = model_spec.model_copy(update={"evaluator": PluginSpec(use=name, params=params)})
        evaluator = evaluator_spec(described, model, tmp_path)
        with engines({"use": "onnxruntime"}, sizes, tmp_path, evaluators={MAIN_BENCHMARKER: evaluator}) as made_by:
            built = made_by.build(Candidate(digest="", edges=(), source=lambda: sizes.fixed))
            assert made_by.prepare(built.handle) is None
            score = made_by.evaluate(built.handle)
            assert not isinstance(score, Failed), score
            assert len(score.per_item) == len(LENGTHS)
            assert score.metrics[{"metric": "metric", "fidelity": "sqnr_db"}[name]] in (1.0, 120.0)
    assert seen["shapes"] == ([(1, n, 16) for n in LENGTHS], [(n, 16) for n in LENGTHS])


def test_the_timed_sizes_are_those_of_the_experiment_else_the_largest_of_the_samples(path, tmp_path):
    for keys, length in (({}, 12), ({"dims": {"length": 8}}, 8), ({"shapes": {"x": "1x6x16"}}, 6)):
        given = spec(path, draw(), **keys)
        model = open_model(given, tmp_path)
        assert model.types["x"].shape == (1, length, 16)
        batches = CalibrationBatches(given, model, input_types(model))
        assert [batch["x"].shape for batch in batches] == [(1, n, 16) for n in LENGTHS]
        assert batches.own_sizes
        assert need_own_sizes(given, model)


def test_samples_of_one_length_other_than_the_timed_one_run_at_theirs(path, tmp_path):
    given = spec(path, np.zeros((3, 7, 16), np.float32), dims={"length": 8})
    model = open_model(given, tmp_path)
    assert [batch["x"].shape for batch in CalibrationBatches(given, model, input_types(model))] == [(1, 7, 16)] * 3
    assert need_own_sizes(given, model)


def test_samples_of_the_timed_length_need_no_dynamic_axes(path, tmp_path):
    given = spec(path, draw((8, 8)), dims={"batch": 2})
    model = open_model(given, tmp_path)
    assert [batch["x"].shape for batch in CalibrationBatches(given, model, input_types(model))] == [(2, 8, 16)]
    assert not need_own_sizes(given, model)


@pytest.mark.parametrize(
    ("length", "batch", "facts"),
    [
        (12, "batch", ("row 0 of 000000.npz", "'x'", "axis 1", "has 5", "to 12", "pad or cut")),
        ("length", 2, ("row 0 of 000000.npz", "'x'", "axis 0", "has 1", "to 2", "one at a time")),
    ],
)
def test_a_fixed_axis_refuses_samples_by_name(length, batch, facts, tmp_path):
    path = write_model(tmp_path, length, batch)
    with pytest.raises(UserError) as refused:
        qdq.insert(path, tmp_path / "q.onnx", calibration=draw(), run=False)
    assert all(fact in str(refused.value) for fact in (str(Path("calibration: row")), *facts))


def test_a_sample_has_one_size_of_each_symbol(tmp_path):
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "a.npz", ids=np.zeros((1, 4)), mask=np.zeros((1, 5)))
    inputs = {"ids": ("float", (1, 6)), "mask": ("float", (1, 6))}
    axes = dict.fromkeys(inputs, ("batch", "length"))
    with pytest.raises(UserError) as refused:
        make_batches(open_data({"use": "npz", "path": "data"}, tmp_path), None, inputs, axes=axes)
    assert all(fact in str(refused.value) for fact in ("row 0 of a.npz", "'mask' has 5", "'ids' has 4", "'length'"))


def test_a_folder_of_files_is_data_with_samples_selected_over_all_files(tmp_path):
    (tmp_path / "data").mkdir()
    for number, (rows, n) in enumerate(((2, 4), (1, 6), (3, 5))):
        np.save(tmp_path / "data" / f"{number}.npy", np.full((rows, n), number, np.float32))
    data = open_data({"use": "npy", "path": "data", "start": 1, "count": 3}, tmp_path)
    assert [sample.tolist() for sample in data.arrays[""]] == [[0] * 4, [1] * 6, [2] * 5]
    assert [data.sample_name(i) for i in range(3)] == ["row 1 of 0.npy", "row 0 of 1.npy", "row 0 of 2.npy"]
    assert calibration_config(tmp_path / "data", None, None, None, tmp_path)["calibration"]["data"] == {
        "use": "npy",
        "path": "data",
    }
    before = data.fingerprint
    np.save(tmp_path / "data" / "1.npy", np.full((1, 6), 9, np.float32))
    assert open_data({"use": "npy", "path": "data", "start": 1, "count": 3}, tmp_path).fingerprint != before
    np.save(tmp_path / "data" / "2.npy", np.full((1, 6, 1), 9, np.float32))
    with pytest.raises(UserError, match=r"2\.npy.*3 axes.*0\.npy.*2 axes"):
        open_data({"use": "npy", "path": "data"}, tmp_path)


def test_a_backend_that_runs_one_size_refuses_samples_by_name(ready):
    given, model, _ = ready
    with pytest.raises(UserError, match=r"x 1x12x16.*'tensorrt'.*pad or cut"):
        require_own_sizes(given, model, PluginSpec(use="tensorrt"))
    with pytest.raises(UserError, match=r"'ray'.*pad or cut.*local"):
        require_own_sizes(given, model, PluginSpec(use="onnxruntime"), "ray")
    for backend in (*RUNTIMES, "simulated"):
        require_own_sizes(given, model, PluginSpec(use=backend))


def test_ptq_tools_refuse_samples_of_different_length(path, tmp_path):
    request = QuantizationRequest(
        model_file=path, source="m", data=(), data_key="", options={"dialect_name": "onnxruntime"}, own_sizes=True
    )
    made = run_external_tool("ort_static", request, NullProgress())
    assert made.path is None
    assert "one size" in made.reason


def test_recovery_refuses_samples_of_different_length(ready, tmp_path):
    given, model, sizes = ready
    dialect = load_dialect("onnxruntime")
    task = Task(
        spec=TaskSpec(model=given, backend=PluginSpec(use="onnxruntime"), precision="int8", runs=()),
        model=model,
        float_file=sizes.fixed,
        model_file=sizes.fixed,
        space=build_space(model, dialect),
        dialect=dialect,
        ranges={},
        inserter=Inserter(model, dialect, {}),
        calibrated_on="",
        remarks=(),
        work=tmp_path,
        sizes=sizes,
    )
    with pytest.raises(UserError, match="timed size; pad or cut"):
        open_placer(task, list_choices(task), draw(), len(LENGTHS), NullProgress())


def test_modelopt_refuses_a_folder_of_samples_by_name(path, tmp_path):
    data = data_mapping(draw(), tmp_path / "samples")
    with pytest.raises(UserError, match="samples of one size: pad or cut"):
        run_ptq(["--onnx_path", str(path), "--calibration_data", data["path"]])


def test_autotune_takes_folders_of_samples(path, tmp_path):
    labelled = [{**sample, "labels": np.zeros(1, np.int64)} for sample in draw()]
    folder = data_mapping(labelled, tmp_path / "samples")["path"]
    given = ["-m", str(path), "--max_drop", "1", "--test_data", folder, "--calibration_data", folder]
    (model,) = command_experiment(parse_arguments(given, "qdq autotune")).models
    assert (model.calibration.data["use"], model.calibration.data["labels"]) == ("npz", "labels")
    loaded = open_model(model, tmp_path)
    assert loaded.types["x"].shape == (1, max(LENGTHS), 16)
    use = evaluator_spec(model, loaded, tmp_path)
    assert create_plugin("evaluator", use.use, use.params).inferences == len(LENGTHS)


def described(path: Path, **model) -> Experiment:
    return parse_experiment(
        dump_yaml(
            {
                "experiment": "e",
                "models": [{"use": str(path), "dims": {"length": 8}, **model}],
                "backends": [{"use": "onnxruntime"}],
                "precision": ["int8"],
                "initial": [],
                "baselines": ["ort_static"],
                "searchers": [],
            }
        ),
        "e.yaml",
        path.parent,
    )


def test_a_task_has_the_dynamic_model_for_data_of_a_metric_or_of_the_calibration(path, tmp_path):
    """A function `(run)` has data of its own, of whatever length."""
    own_metric = register_object(lambda: SimpleNamespace(metric="m", higher_is_better=True, score=None))
    fixed = {"data": data_mapping(np.zeros((4, 8, 16), np.float32) + 1, tmp_path / "fixed")}
    own = {"data": data_mapping(draw(), tmp_path / "own")}
    for number, (calibration, evaluator, needed) in enumerate(
        ((fixed, None, False), (fixed, own_metric, True), (own, None, True))
    ):
        experiment = described(path, calibration=calibration, **({"evaluator": evaluator} if evaluator else {}))
        task = compose_task(experiment, plan_tasks(experiment)[0], tmp_path / str(number), NullProgress())
        assert (task.sizes is not None) is needed
        assert task.model.types["x"].shape == (1, 8, 16)
        assert ("one size" in task.external_models["ort_static"].reason) is (calibration is own)
