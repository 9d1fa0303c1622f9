"""The Python interface: the same results folder as `qdq run`, from objects of the calling program."""

import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import qdq
from here import OpenVINO
from matplotlib.figure import Figure
from small import save_chain

from harness.base.errors import EvaluationFailed, UserError
from harness.graph.builder import GraphBuilder
from harness.plugins.registry import create_plugin
from harness.results.folder import load
from harness.run import runner
from harness.run.prepare.program_objects import data_mapping, evaluator_mapping, save_program_model
from harness.runtimes.simulated import SimulatedBenchmarker

QUICK: dict[str, Any] = {
    "initial": ["float", "linear"],
    "baselines": ["linear"],
    "sampling": {"warmup_ms": 1, "min_samples": 3, "max_ms": 5, "interleave": "never"},
    "confirmation": {"builds": 3, "rounds": 2, "candidates": 1},
    "progress": False,
}
SIMULATED: dict[str, Any] = {"use": "simulated", "params": {"seed": 1, "noise": 0.0}}


def test_exception_of_a_user_metric_names_the_function():
    def last_box(run: Any) -> float:
        boxes: list[float] = []
        return boxes[3]

    (use,) = evaluator_mapping(last_box, None, Path()).values()
    with pytest.raises(EvaluationFailed, match=r"last_box: IndexError"):
        create_plugin("evaluator", use, {}).score(None)


def test_mistakes_of_the_caller_are_one_error_of_the_public_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    model = Path(save_chain(tmp_path / "net.onnx", (8, 4)))
    file = qdq.TunedFile(path=model, method="random", speedup=(2.0, 2.0, 2.0), drop=None)
    for call in (
        lambda: qdq.autotune("missing.onnx", progress=False),
        lambda: qdq.autotune("zoo:resnet18", unknown=1, progress=False),
        lambda: qdq.autotune(3, progress=False),
        lambda: qdq.load_result("missing").answers,
        lambda: qdq.autotune("zoo:resnet18", backend={"params": {}}, progress=False),
        lambda: qdq.autotune("zoo:resnet18", backend=None, progress=False),
        lambda: qdq.autotune("zoo:resnet18", searcher=3, progress=False),
        lambda: qdq.autotune("zoo:resnet18", shapes=3, progress=False),
        lambda: qdq.autotune("zoo:resnet18", calibration=3, progress=False),
        lambda: qdq.autotune("zoo:resnet18", metric="top1", test=3, progress=False),
        lambda: qdq.insert("zoo:resnet18", "out.onnx", backend={"params": {}}),
        lambda: qdq.autotune("zoo:resnet18", calibration=np.zeros((2, 3)), out="taken", progress=False),
        lambda: qdq.autotune("zoo:resnet18", calibration=np.zeros((2, 3)), out="/proc/out", progress=False),
        lambda: file.save("taken/model.onnx"),
        lambda: replace(file, path=Path("gone.onnx")).save("model.onnx"),
    ):
        with pytest.raises(qdq.UserError) as caught:
            call()
        assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
        assert type(caught.value) is qdq.UserError, "no private class"


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"evaluations": 3}, ("evaluations: at least 6",)),
        ({"evaluations": 0}, ("evaluations: ", "got 0")),
        ({"max_drop": -1}, ("max_drop: ", "got -1")),
        ({"max_drop": "0.5"}, ("max_drop: ", "'1%'", "got '0.5'")),
        ({"max_drop": 1}, ("max_drop: needs a metric", "test=(inputs, labels)")),
        ({"test": (np.zeros((4, 8)), np.zeros(4))}, ("test: needs a metric",)),
        ({"metric": "top1", "test": (np.zeros((4, 8)), np.zeros(3))}, ("test: 4 inputs, but 3 labels",)),
        ({"metric": "top1", "test": ([np.zeros((1, 8)), np.zeros((1, 9))], [1])}, ("test: 2 inputs, but 1 labels",)),
        ({"evals": 5}, ("evals: ", "did you mean 'evaluations'?")),
        ({"metric": lambda outputs, labels: 1.0}, ("metric: ", "test=")),
        ({"metric": lambda run: 1.0, "test": (np.zeros((4, 8)), np.zeros(4))}, ("metric: ", "(run)")),
    ],
)
def test_a_wrong_argument_is_named_with_the_value_that_works(given, facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(qdq.UserError) as caught:
        qdq.autotune("zoo:mlp", progress=False, **given)
    assert str(caught.value).startswith(facts[0])
    assert all(fact in str(caught.value) for fact in facts)


def test_traceback_of_the_code_of_the_caller_is_kept(tmp_path, monkeypatch):
    class Broken(Redraw):
        def __init__(self, space: Any, *, seed: int) -> None:
            raise ValueError(seed)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "Broken", Broken, raising=False)
    Broken.__qualname__ = "Broken"
    with pytest.raises(qdq.UserError) as caught:
        qdq.autotune("zoo:resnet18", searcher=Broken, progress=False)
    assert isinstance(caught.value.__cause__, ValueError)


class Redraw:
    """Random search of the calling program."""

    def __init__(self, space: Any, *, seed: int) -> None:
        self.space, self.rng = space, np.random.default_rng(seed)

    def ask(self, n: int) -> list[Any]:
        return [self.space.random(self.rng) for _ in range(n)]

    def tell(self, observation: Any) -> None:
        pass


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return onnx.load(save_chain(tmp_path / "net.onnx", (8, 4)))


def test_missing_sizes_are_asked_for_as_arguments(tmp_path, monkeypatch):
    """The message of a command names options and keys of a file, which a call does not have."""
    monkeypatch.chdir(tmp_path)
    builder = GraphBuilder("g", opset=17)
    weight = builder.const(np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32))
    builder.output(builder.op("MatMul", builder.input("x", ("batch", "seq len", 16)), weight))
    builder.output(builder.op("Relu", builder.input("y", (None, None))))
    builder.save(Path("m.onnx"))
    calls = {
        "insert": lambda **sizes: qdq.insert("m.onnx", "q.onnx", **sizes),
        "autotune": lambda **sizes: qdq.autotune("m.onnx", out="out", backend=SIMULATED, **QUICK, **sizes),
    }
    for name, call in calls.items():
        with pytest.raises(UserError) as refused:
            call()
        text = str(refused.value)
        assert "--" not in text, name
        assert "experiment" not in text, name
        assert "dims={'seq len': 128}, shapes={'y': '1x128'}" in text, name
    assert qdq.insert("m.onnx", "q.onnx", dims={"seq len": 8}, shapes={"y": "1x8"}).pairs
    result = qdq.autotune(
        "m.onnx", out="done", backend=SIMULATED, evaluations=3, dims={"seq len": 8}, shapes={"y": "1x8"}, **QUICK
    )
    assert "seq len: 8" in (result.folder / "experiment.yaml").read_text()


def test_autotune_accepts_function_metric_and_searcher_class(net, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((24, 3, 16, 16)).astype(np.float32)
    session = ort.InferenceSession(net.SerializeToString())
    labels = np.concatenate([session.run(None, {"x": image[None]})[0].reshape(1, -1).argmax(1) for image in images])
    counted = []  # a function that a worker cannot load

    def agreement(outputs: Any, labels: Any) -> Any:
        counted.append(len(labels))
        return outputs.reshape(len(labels), -1).argmax(1) == labels

    def tune(**changes: Any) -> qdq.RunResult:
        return qdq.autotune(
            net, calibration=[image[None] for image in images[:8]], metric=agreement, test=(images, labels),
            max_drop=20.0, backend=OpenVINO, searcher=[Redraw, "random"], evaluations=4, **QUICK, **changes,
        )  # fmt: skip

    result = tune()
    assert result.complete
    assert load(result.folder).stored.from_program, "no command can load the metric"
    assert result.folder == Path("results/autotune")
    table = result.table().set_index("method")
    assert {"float", "linear", "Redraw", "random"} == set(table.index)
    assert 1.0 in set(table.loc[["float"], "score"])  # one row for each float precision of the processor
    assert 0 < sum(counted) < 24 * len(counted)  # searches see one half of the images
    best = result.best
    assert best.method in table.index
    assert best.save(tmp_path / "deep" / "best.onnx").read_bytes() == best.path.read_bytes()
    assert isinstance(result.plot(), Figure)
    assert str(tmp_path) not in (result.folder / "experiment.yaml").read_text()
    before = len(counted)
    assert repr(tune()) == repr(result)
    assert len(counted) == before  # nothing was left to do
    with pytest.raises(qdq.UserError, match=r"another experiment.*\bout=.*accept_changes=True"):
        tune(sharing="region")


def test_interrupted_autotune_returns_and_resumes(net, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "confirm_rows", interrupted)
        result = qdq.autotune(net, backend=SIMULATED, evaluations=4, out="out", **QUICK)
    assert not result.complete
    assert repr(result) == "out: not finished; the same call continues it"
    with pytest.raises(qdq.UserError, match="continues"):
        _ = result.best
    builds = []
    build = SimulatedBenchmarker.build

    def counting(self: Any, *args: Any) -> Any:
        builds.append(args)
        return build(self, *args)

    monkeypatch.setattr(SimulatedBenchmarker, "build", counting)
    again = qdq.autotune(net, backend=SIMULATED, evaluations=4, out="out", **QUICK)
    assert again.complete
    assert not load(again.folder).stored.from_program
    vars(again)["answers"] = []  # as of a float model that scores nothing
    assert "not finished" not in repr(again)
    assert again.best.path.exists()
    assert len(builds) < 20


def test_run_function_and_evaluator_need_no_test_data(tmp_path):
    class Halved:
        metric, higher_is_better, fingerprint = "error", False, "v1"

        def score(self, infer: Any) -> Any:
            raise NotImplementedError

    assert evaluator_mapping(lambda run: 1.0, None, tmp_path)["use"].endswith(":<lambda>")
    assert evaluator_mapping(Halved(), None, tmp_path)["use"].endswith(":Halved")
    assert evaluator_mapping("fidelity", None, tmp_path) == {"use": "fidelity"}
    with pytest.raises(UserError, match="metric"):
        evaluator_mapping(3, None, tmp_path)


@pytest.mark.parametrize(
    ("samples", "shapes"),
    [
        (np.zeros((4, 3)), {"": (4, 3)}),
        ([np.zeros((1, 3)), np.ones((2, 3))], {"": (3, 3)}),
        ({"a": np.zeros((2, 3)), "b": np.zeros((2, 5))}, {"a": (2, 3), "b": (2, 5)}),
        (({"a": np.zeros((1, 3))} for _ in range(4)), {"a": (4, 3)}),
    ],
)
def test_arrays_and_batches_become_files(samples, shapes, tmp_path):
    data = data_mapping(samples, tmp_path / "data")
    found = np.load(data["path"])
    arrays = {"": found} if data["use"] == "npy" else found
    assert {name: array.shape for name, array in arrays.items()} == shapes


@pytest.mark.parametrize(
    ("samples", "facts"),
    [
        ([{"x": np.zeros((2, 6, 4))}, {"x": np.zeros((5, 4))}], ("batch 2", "'x'", "5 x 4", "6 x 4", "pad or cut")),
        ([[np.zeros(6), np.zeros(5)]], ("sample 2", "is 5", "is 6", "pad or cut")),
        ({"x": [np.zeros((6, 4)), np.zeros(5)]}, ("batch 2", "'x'", "is 1 x 5", "1 x 6 x 4", "pad or cut")),
        ({"x": [np.zeros(6), np.zeros(5)], "y": np.zeros((3, 2))}, ("'x': 2", "'y': 3")),
        ([{"x": np.zeros((1, 6))}, {"y": np.zeros((1, 6))}], ("batch 2", "'y'", "'x'")),
        ([np.float32(1), np.float32(2)], ("single number",)),
        ({"x": [None, None]}, ("'x'", "objects")),
    ],
)
def test_samples_that_do_not_fit_together_are_refused_by_name(samples, facts, tmp_path):
    """Texts have different lengths; NumPy's own error names neither sample nor input."""
    with pytest.raises(UserError) as refused:
        data_mapping(samples, tmp_path / "calibration")
    assert all(fact in str(refused.value) for fact in ("calibration: ", *facts))


@pytest.mark.parametrize(
    ("samples", "use", "shapes"),
    [
        ([{"x": np.zeros((2, 6, 4))}, {"x": np.zeros((1, 5, 4))}], "npz", [(2, 6, 4), (1, 5, 4)]),
        ([np.zeros((1, 6)), np.zeros((1, 5))], "npy", [(1, 6), (1, 5)]),
        ({"x": [[1, 2, 3], [4, 5]]}, "npz", [(1, 3), (1, 2)]),
    ],
)
def test_batches_of_different_shapes_become_a_folder_of_files(samples, use, shapes, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "older.npz").touch()
    data = data_mapping(samples, tmp_path / "data")
    assert data == {"use": use, "path": str(tmp_path / "data")}
    found = [np.load(path) for path in sorted((tmp_path / "data").iterdir())]
    assert [(array if use == "npy" else array["x"]).shape for array in found] == shapes
    assert data_mapping(tmp_path / "data", tmp_path / "other") == data


def test_data_mappings_and_file_paths_are_kept(tmp_path):
    images = {"use": "images", "images": "train"}
    assert data_mapping(images, tmp_path / "data") == images
    assert data_mapping("calib.npz", tmp_path / "data") == {"use": "npz", "path": "calib.npz"}
    with pytest.raises(UserError, match="no samples"):
        data_mapping([], tmp_path / "data")


def test_models_in_memory_are_saved_as_files(net, tmp_path):
    for model in (net, net.SerializeToString()):
        assert onnx.load(save_program_model(model, tmp_path / "inputs")) == net
    assert save_program_model("zoo:resnet18", tmp_path) == "zoo:resnet18"
    with pytest.raises(UserError, match="ModelProto"):
        save_program_model(3, tmp_path)


def test_a_placement_is_inserted_without_a_search(net, tmp_path):
    made = qdq.insert(net, tmp_path / "linear.onnx", calibration=np.zeros((2, 3, 16, 16), np.float32) + 1)
    assert made.pairs > 0
    assert {"QuantizeLinear", "DequantizeLinear"} < {node.op_type for node in onnx.load(made.path).graph.node}


@pytest.mark.slow
def test_a_pytorch_module_is_exported(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout())
    path = Path(save_program_model(module, tmp_path, torch.zeros(1, 4)))
    assert path.name == "Sequential.onnx"
    assert module.training
    assert "Dropout" not in {node.op_type for node in onnx.load(path).graph.node}
    with pytest.raises(UserError, match="example_inputs"):
        save_program_model(module, tmp_path)


def test_import_loads_no_heavy_packages():
    program = "import sys, harness.qdq; print(*{'onnx', 'numpy', 'pandas', 'matplotlib', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
