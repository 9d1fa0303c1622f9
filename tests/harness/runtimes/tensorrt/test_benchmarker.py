"""The TensorRT benchmarker on both majors: strict fakes with the names of the real modules, and the real thing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_cuda import FakeCuda, Status
from fake_trt import KERNEL_MS, FakeTensorRT

from harness import zoo
from harness.accuracy.metrics.fidelity import Fidelity
from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.file_checks import FP8_CAPABILITY
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import TENSORRT
from harness.plugins import registry
from harness.plugins.api import Array
from harness.runtimes.cuda import open_device
from harness.runtimes.tensorrt.benchmarker import TensorRTBenchmarker
from harness.runtimes.tensorrt.library import TimingCache, open_library
from harness.runtimes.testing import file_candidate
from search.space import Edge


@pytest.fixture(params=[10, 11])
def trt(request, monkeypatch, tmp_path):
    """A machine with a GPU and this TensorRT."""
    cuda = FakeCuda()
    fake = FakeTensorRT(request.param, cuda)
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", lambda: cuda)
    monkeypatch.setattr("harness.runtimes.tensorrt.library._import_tensorrt", lambda: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def small(path: Path, batch: int | str = 1) -> Path:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (batch, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    return builder.save(path)


def quantized(path: Path, folder: Path, precision: str = "int8", *, wide: bool = False) -> Path:
    """Every point of the model; `wide`: none at convolutions of few channels, which may have no FP8 kernel."""
    model = load(path, min_opset=19)
    space = build_space(model, TENSORRT, precisions=(precision,))
    ranges = {edge.tensor: (-4.0, 4.0) for d in space.dimensions for edge in d.edges}
    nodes = {node.name: node for node in model.nodes}

    def narrow(edge: Edge) -> bool:
        node = nodes.get(edge.consumer)
        return node is not None and node.op == "Conv" and min(model.types[node.inputs[1]].shape[:2]) <= 16

    resolved = tuple(pair for pair in space.resolve(space.quantize_all()) if not (wide and narrow(pair[0])))
    folder.mkdir(exist_ok=True)
    return Inserter(model, TENSORRT, ranges).export(resolved, folder / "q.onnx")


def on_cpu(path: Path) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """ONNX Runtime as the file says, operator by operator."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return lambda values: dict(zip(names, session.run(names, values), strict=True))


def feeds(batch: int = 1) -> dict[str, Array]:
    return {"x": np.random.default_rng(0).standard_normal((batch, 3, 8, 8)).astype(np.float32)}


def built_with(trt: FakeTensorRT) -> tuple[Any, Any]:
    """Network and configuration of the last build."""
    return next(args for name, args in reversed(trt.calls) if name == "build")  # type: ignore[return-value]


def test_engine_is_built_timed_and_computes_the_model(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32", workspace_gb=2, optimization_level=4)
    path = small(tmp_path / "m.onnx")
    artifact = made.build(file_candidate(path), tmp_path)
    plain: Any = registry.create_plugin("benchmarker", "onnxruntime", {})
    with plain.open(plain.build(file_candidate(path), tmp_path)) as probe:
        expected = probe.infer(feeds())["y"]
    with made.open(artifact) as probe:
        assert probe.sample(5) == pytest.approx([KERNEL_MS] * 5)
        np.testing.assert_allclose(probe.infer(feeds())["y"], expected, atol=1e-5)
        assert probe.sample(2) == pytest.approx([KERNEL_MS] * 2)
        facts = probe.conditions()
    assert (facts["cuda_graph"], facts["host_bound"]) == (1.0, 0.0)
    assert facts["end_to_end_ms"] > 0
    assert not trt.cuda.memory
    network, config = built_with(trt)
    assert network._strong
    assert not network._flags_on & {"PREFER_JIT_PYTHON_PLUGINS", "PREFER_AOT_PYTHON_PLUGINS"}
    assert config._limits == {"WORKSPACE": 2 * 10**9}
    assert config.builder_optimization_level == 4
    assert config.profiling_verbosity.name == "LAYER_NAMES_ONLY"
    assert "TF32" not in config._flags
    TensorRTBenchmarker(precision="tf32").build(file_candidate(path), tmp_path)
    assert "TF32" in built_with(trt)[1]._flags
    assert artifact.info["plan_bytes"] > 0
    assert len(artifact.info["plan_sha256"]) == 64


def test_an_fp16_engine_comes_from_an_fp16_file(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f16")
    path = quantized(small(tmp_path / "m.onnx"), tmp_path / "q")
    made.build(file_candidate(path), tmp_path)
    network, config = built_with(trt)
    model = network._model
    scales = {t.name: t.data_type for t in model.graph.initializer}
    kinds = {scales.get(n.input[1]) for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")}
    assert kinds == {onnx.TensorProto.FLOAT16}
    assert {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)} == {onnx.TensorProto.FLOAT}
    assert not config._flags & {"FP16", "INT8"}


def test_weak_typing_has_flags_on_10_and_is_refused_on_11(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f16", typing="weak")
    path = quantized(small(tmp_path / "m.onnx"), tmp_path / "q")
    if trt._major == 11:
        with pytest.raises(UserError, match=r"typing: weak: TensorRT 11.* removed them .* use typing: strong"):
            made.build(file_candidate(path), tmp_path)
        return
    made.build(file_candidate(path), tmp_path)
    network, config = built_with(trt)
    assert not network._strong
    assert config._flags == {"FP16", "INT8"}
    path = quantized(small(tmp_path / "n.onnx"), tmp_path / "q8", "fp8")
    with pytest.raises(BuildFailed, match=r"q\.onnx: FP8 needs a strongly typed network; use typing: strong"):
        made.build(file_candidate(path), tmp_path)


def test_engine_with_profile_accepts_covered_batches(trt, tmp_path):
    path = small(tmp_path / "m.onnx", "batch")
    shapes = {"x": {"min": "1x3x8x8", "opt": "4x3x8x8", "max": "8x3x8x8"}}
    made = TensorRTBenchmarker(precision="f32", profiles=shapes)
    with made.open(made.build(file_candidate(path), tmp_path)) as probe:
        assert min(probe.sample(2)) > 0
        assert probe.infer(feeds(2))["y"].shape == (2, 2, 8, 8)
        first = set(trt.cuda.memory)
        assert probe.infer(feeds(1))["y"].shape == (1, 2, 8, 8)
        assert set(trt.cuda.memory) == first  # buffers are used again
        with pytest.raises(MeasureFailed, match=r"input 'x' is 9x3x8x8, the profile takes 1x3x8x8 to 8x3x8x8"):
            probe.infer(feeds(9))
    with pytest.raises(BuildFailed, match=r"dynamic shape -1x3x8x8; make it static, or give a profile"):
        TensorRTBenchmarker(precision="f32").build(file_candidate(path), tmp_path)
    wrong = {"x": {key: "1x3x9x9" for key in ("min", "opt", "max")}}
    with pytest.raises(BuildFailed, match=r"profile of 'x': .* does not fit the model's shape -1x3x8x8"):
        TensorRTBenchmarker(precision="f32", profiles=wrong).build(file_candidate(path), tmp_path)
    unknown = {"images": shapes["x"]}
    with pytest.raises(BuildFailed, match=r"profile of 'images': the model's inputs are x"):
        TensorRTBenchmarker(precision="f32", profiles=unknown).build(file_candidate(path), tmp_path)


def test_loaded_engine_keeps_its_profile(trt, tmp_path):
    path, file = small(tmp_path / "m.onnx", "batch"), tmp_path / "m.engine"
    shapes = {"x": {"min": "1x3x8x8", "opt": "4x3x8x8", "max": "8x3x8x8"}}
    TensorRTBenchmarker(precision="f32", profiles=shapes).save(file_candidate(path), file)
    made = TensorRTBenchmarker()
    with made.open(made.load(file)) as probe:
        assert min(probe.sample(2)) > 0
        assert probe.infer(feeds(8))["y"].shape == (8, 2, 8, 8)
        with pytest.raises(MeasureFailed, match=r"input 'x' is 9x3x8x8, the profile takes 1x3x8x8 to 8x3x8x8"):
            probe.infer(feeds(9))


def test_profile_must_cover_the_fixed_shape(trt, tmp_path):
    """A run fixes the shapes of its models: then nothing is tuned for, and a profile that covers them is left aside."""
    path = small(tmp_path / "m.onnx", 4)
    shapes = {"x": {"min": "1x3x8x8", "opt": "2x3x8x8", "max": "8x3x8x8"}}
    made = TensorRTBenchmarker(precision="f32", profiles=shapes)
    with made.open(made.build(file_candidate(path), tmp_path)) as probe:
        assert probe.infer(feeds(4))["y"].shape == (4, 2, 8, 8)
    assert not built_with(trt)[1]._profiles
    made = TensorRTBenchmarker(precision="f32", profiles={"x": {**shapes["x"], "max": "2x3x8x8"}})
    with pytest.raises(BuildFailed, match=r"profile of 'x': 1x3x8x8 to 2x3x8x8 does not cover 4x3x8x8, the shape that"):
        made.build(file_candidate(path), tmp_path)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("on_host", {"x"}, r"tensor 'x' holds a shape and not data"),
        ("formats", {"y": "CHW32"}, r"tensor 'y' has the layout .*CHW32.* without --inputIOFormats"),
        ("gpu_memory_full", True, r"no execution context .*OutOfMemory"),
    ],
)
def test_engines_that_cannot_be_fed_fail_the_measurement(trt, tmp_path, monkeypatch, attribute, value, message):
    made = TensorRTBenchmarker(precision="f32")
    artifact = made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)
    monkeypatch.setattr(trt, attribute, value)
    with pytest.raises(MeasureFailed, match=message), made.open(artifact):
        pass


def test_builder_creation_failure_is_a_failed_build(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32")
    trt.no_builder = True
    with pytest.raises(BuildFailed, match="TensorRT cannot start on this GPU: CUDA initialization failure"):
        made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)


def test_build_failure_quotes_tensorrt_and_the_node(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32")
    path = small(tmp_path / "odd.onnx")
    model = onnx.load(path)
    model.graph.node[1].domain, model.graph.node[1].op_type = "my.domain", "Frobnicate"
    onnx.save(model, path)
    with pytest.raises(BuildFailed, match=r"cannot parse the model: node '.*' \(Frobnicate\): Plugin not found"):
        made.build(file_candidate(path), tmp_path)
    trt.refuse = "Error Code 10: Internal Error (Could not find any implementation for node Conv_0.)"
    with pytest.raises(BuildFailed, match=r"builds no engine: .*Could not find any implementation for node Conv_0"):
        made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)
    trt.cuda.failing["cudaDeviceSynchronize"] = Status.cudaErrorIllegalAddress
    with pytest.raises(SystemExit, match=r"cudaErrorIllegalAddress .* this process cannot use the GPU any more"):
        made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"nonsense")
    with pytest.raises(BuildFailed, match=r"broken\.onnx: no ONNX model"):
        made.build(file_candidate(tmp_path / "broken.onnx"), tmp_path)
    with pytest.raises(BuildFailed, match=r"gone\.onnx: cannot be read"):
        made.build(file_candidate(tmp_path / "gone.onnx"), tmp_path)


def test_saved_engine_of_another_version_is_refused(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32")
    path = tmp_path / "m.engine"
    made.save(file_candidate(small(tmp_path / "m.onnx")), path)
    with made.open(made.build(file_candidate(path), tmp_path)) as probe:
        assert probe.infer(feeds())["y"].shape == (1, 2, 8, 8)
    path.write_text(path.read_text().replace(trt.__version__, "9.0.0"))
    with pytest.raises(BuildFailed, match=r"m\.engine: TensorRT .* cannot load this engine .*not compatible.*build it"):
        made.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(BuildFailed, match=r"Magic tag does not match"):
        made.load(path)


def test_timing_caches_by_policy(trt, tmp_path):
    model, file = small(tmp_path / "m.onnx"), tmp_path / "t" / "cache"

    def build(policy: Any) -> bytes:
        made = TensorRTBenchmarker(precision="f32", timing_cache=policy, timing_cache_file=str(file))
        made.build(file_candidate(model), tmp_path)
        found = next(args for name, args in reversed(trt.calls) if name == "set_timing_cache")
        assert found[1] is False  # a mismatch is never ignored
        return found[0]  # type: ignore[no-any-return]

    with pytest.raises(UserError, match=r"no such file, and a frozen cache is never made"):
        build("frozen")
    assert build("cold") == b""
    assert not file.exists()
    assert build("shared") == b""
    kept = file.read_bytes()
    assert build("frozen") == kept
    assert file.read_bytes() == kept
    assert build("shared") == kept
    assert len(file.read_bytes()) > len(kept)
    assert [p.name for p in file.parent.iterdir()] == ["cache"]
    file.write_bytes(b"foreign")
    with pytest.raises(UserError, match=r"timing cache .*damaged, or made by another TensorRT.*Verification failed"):
        build("shared")
    assert file.read_bytes() == b"foreign"
    file.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"timing cache .*damaged, or made by.*magic tag"):
        build("shared")
    file.write_bytes(b"")
    with file.open("r+b") as sparse:
        sparse.truncate(2**30 + 1)
    with pytest.raises(UserError, match=r"more than 1 GiB; that is no timing cache"):
        build("shared")


def test_concurrent_builds_merge_the_timing_cache(trt, tmp_path):
    file = tmp_path / "cache"
    ours = TimingCache("shared", file)
    library = open_library()
    config = trt.Builder(library.log).create_builder_config()
    ours.enter(library, config)
    other = f"{trt.__version__} of another build".encode()
    file.write_bytes(other)
    ours.leave(config)
    assert other in file.read_bytes()
    file.write_bytes(b"damaged")  # it is made anew
    ours.leave(config)
    assert b"damaged" not in file.read_bytes()


def test_the_default_cache_belongs_to_one_version_and_gpu(trt, tmp_path):
    TensorRTBenchmarker(precision="f32").build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)
    kept = list((tmp_path / "cache" / "qdq-bench" / "tensorrt").iterdir())
    assert [path.name for path in kept] == [f"{trt.__version__}-Fake-GPU.timing"]


def test_insufficient_gpu_memory_fails_the_measurement(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32")
    artifact = made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)
    trt.cuda.memory_bytes = 16
    with pytest.raises(MeasureFailed, match=r"out of memory"), made.open(artifact):
        pass
    assert not trt.cuda.memory


def test_wrong_feeds_fail_the_measurement(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32")
    with made.open(made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)) as probe:
        with pytest.raises(MeasureFailed, match=r"the engine's inputs are x, but got missing"):
            probe.infer({"missing": feeds()["x"]})
        with pytest.raises(MeasureFailed, match=r"input 'x' is 2x3x8x8, the engine takes 1x3x8x8"):
            probe.infer(feeds(2))


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("set_input_shape", False, "input 'x': 1x3x8x8 is refused"),
        ("set_tensor_address", False, "its memory is refused"),
        ("get_tensor_shape", (1, -1), "its size depends on the data, so it cannot be bound beforehand"),
        ("execute_async_v3", False, "TensorRT cannot run the engine"),
    ],
)
def test_refusals_of_the_execution_context_fail_the_measurement(trt, tmp_path, monkeypatch, method, answer, message):
    made = TensorRTBenchmarker(precision="f32")
    artifact = made.build(file_candidate(small(tmp_path / "m.onnx")), tmp_path)
    monkeypatch.setattr(trt.IExecutionContext, method, lambda *_: answer)
    with pytest.raises(MeasureFailed, match=message), made.open(artifact) as probe:
        probe.infer(feeds())


def test_a_timing_cache_in_a_file_instead_of_a_folder_is_refused(trt, tmp_path):
    cache, library = TimingCache("shared", tmp_path / "file" / "cache"), open_library()
    config = trt.Builder(library.log).create_builder_config()
    cache.enter(library, config)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/cache: cannot be written"):
        cache.leave(config)
    with pytest.raises(UserError, match=r"file/cache: cannot be read \(Not a directory"):
        cache.enter(library, config)


def test_layers_use_detailed_build_and_separate_timing_runs(trt, tmp_path):
    made = TensorRTBenchmarker(precision="f32", profile=True)
    path = small(tmp_path / "m.onnx")
    names = [node.name for node in onnx.load(path).graph.node]
    entry = {"Name": names[0], "LayerType": "CaskConvolution", "Inputs": [{"Format/Datatype": "Row major Int8 format"}]}
    trt.layers = json.dumps({"Layers": [entry], "Bindings": ["x", "y"]})
    artifact = made.build(file_candidate(path), tmp_path)
    assert built_with(trt)[1].profiling_verbosity.name == "DETAILED"
    (layer,) = made.layers(artifact)
    assert (layer.kind, layer.precision, layer.time_ms) == ("CaskConvolution", "int8", pytest.approx(0.125))
    assert made.describe()["options"]["profile"] is True


def test_description_lists_version_device_and_precisions(trt):
    facts = TensorRTBenchmarker().describe()
    assert facts["version"] == trt.__version__
    assert facts["device"] == "Fake GPU"
    assert facts["float_open"]
    assert list(facts["float_params"]) == ["f32", "tf32", "f16", "bf16"]
    json.dumps(facts)
    trt.cuda.capability = (7, 5)
    old = TensorRTBenchmarker(precision="half").describe()
    assert old["float_precision"] == "f16"
    assert list(old["float_params"]) == ["f32", "f16"]
    assert not old["float_open"]
    with pytest.raises(UserError, match=r"precision: bf16 needs compute capability 8.0, Fake GPU has 7.5"):
        TensorRTBenchmarker(precision="bf16").describe()


def test_plugin_libraries_are_loaded_once_or_refused(trt, tmp_path):
    with pytest.raises(UserError, match=r"plugins: nowhere\.so: no such file"):
        TensorRTBenchmarker(plugins=["nowhere.so"]).describe()
    library = tmp_path / "mine.so"
    library.touch()
    with pytest.raises(UserError, match=r"mine.so does not load .undefined symbol: missing.*ldd"):
        TensorRTBenchmarker(plugins=[str(library)]).describe()
    trt.plugins["mine.so"] = True
    for _ in range(2):  # every float precision of a backend is a benchmarker of its own, all in one process
        assert TensorRTBenchmarker(plugins=[str(library)]).describe()["options"]["plugins"] == ["mine.so"]


def test_invalid_options_are_refused():
    for params, message in (
        ({"precision": "int8"}, "precision: 'auto', .*, but got 'int8'"),
        ({"typing": "none"}, "typing: 'strong' or 'weak'"),
        ({"timing_cache": "hot"}, "timing_cache: 'cold', 'shared' or 'frozen'"),
        ({"optimization_level": 9}, "optimization_level: less than or equal to 5"),
        ({"workspace_gb": 0}, "workspace_gb: greater than 0"),
        ({"profiles": {"x": {"min": "1x3"}}}, "profiles.x: the keys min, opt and max"),
        ({"profiles": {"x": {"min": "2x3", "opt": "1x3", "max": "4x3"}}}, "min <= opt <= max in every dimension"),
        ({"profiles": {"x": {"min": "axb", "opt": "1x3", "max": "4x3"}}}, "a shape such as 1x3x224x224, but got 'axb'"),
        ({"precison": "f16"}, "did you mean 'precision'"),
    ):
        with pytest.raises(UserError, match=message):
            registry.create_plugin("benchmarker", "tensorrt", params)


def test_benchmarker_without_gpu_fails_only_in_describe():
    """So an experiment for a GPU can be checked anywhere."""
    made: Any = registry.create_plugin("benchmarker", "tensorrt", {})
    if why_no_gpu() is None:
        pytest.skip("this machine has a GPU and TensorRT")
    with pytest.raises(UserError, match=r"no NVIDIA|TensorRT|cuda-python|driver"):
        made.describe()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'tensorrt'"), "TensorRT is not installed .*pip install"),
        (ImportError("libnvinfer.so.10: cannot open shared object file"), "libraries are missing .*LD_LIBRARY_PATH"),
    ],
)
def test_missing_tensorrt_is_a_user_error(error, message, monkeypatch, tmp_path):
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "tensorrt.py").write_text(f"raise {type(error).__name__}({str(error)!r})\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(UserError, match=message):
        open_library()


def test_an_old_tensorrt_is_refused():
    fake = FakeTensorRT(10, FakeCuda())
    fake.__version__ = "10.8.0"
    with pytest.raises(UserError, match=r"TensorRT 10\.8\.0 is too old: 10\.9 or later"):
        open_library(lambda: fake)
    fake.__version__ = "unknown"
    with pytest.raises(UserError, match="TensorRT names its version 'unknown'"):
        open_library(lambda: fake)


def why_no_gpu() -> str | None:
    try:
        TensorRTBenchmarker().describe()
    except UserError as error:
        return str(error)
    return None


@pytest.fixture
def gpu():
    """A real GPU with TensorRT, or a reason to skip."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)


LEAST_DB = {"f32": 60.0, "f16": 12.0, "int8": 6.0, "fp8": 10.0}
"""SQNR against ONNX Runtime's CPU on the same file. Casting alone costs YOLOX-Nano all but 18, 10 and 18 dB on random
inputs: where pairs round, a step up or down goes through all that follows. A wrong engine is at 0.
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["resnet18", "yolox_nano"])
@pytest.mark.parametrize("kind", ["f32", "f16", "int8", "fp8"])
def test_real_engines_build_run_and_evaluate(name, kind, tmp_path):
    """Builds, times, evaluates and inspects; FP8 if the GPU computes it."""
    assets = os.environ.get("QDQ_ASSETS", "")
    if name == "yolox_nano" and not assets:
        pytest.skip("QDQ_ASSETS is not set")
    path = (
        zoo.write_model(name, tmp_path / "m.onnx")
        if name == "resnet18"
        else Path(assets) / "models" / "yolox_nano.onnx"
    )
    _, device = open_device()
    if kind == "fp8" and device.capability < FP8_CAPABILITY:
        pytest.skip(f"FP8 needs compute capability 8.9, {device.name} has less")
    precision: Any = "f32" if kind == "f32" else "f16"
    made = TensorRTBenchmarker(precision=precision, timing_cache="cold")
    model = load(path, min_opset=19)
    onnx.save(model.proto, tmp_path / "float.onnx")
    tested = tmp_path / "float.onnx"
    if kind in ("int8", "fp8"):
        tested = quantized(path, tmp_path / "q", kind, wide=kind == "fp8")
    shape = model.types[model.inputs[0]].shape
    judge = Fidelity(inputs={model.inputs[0]: ("float", shape)}, reference=tmp_path / "r.npz", samples=2)
    judge.prepare(on_cpu(tested))
    with made.open(made.build(file_candidate(tested), tmp_path)) as probe:
        readings = probe.sample(50)
        facts = probe.conditions()
        assert judge.score(probe.infer).metrics["sqnr_db"] > LEAST_DB[kind]
        again = probe.sample(50)
    assert 0.01 < float(np.median(readings)) < 100
    assert float(np.median(again)) == pytest.approx(float(np.median(readings)), rel=0.2)
    assert facts["cuda_graph"] == 1.0
    assert facts["end_to_end_ms"] > 0
    inspected = TensorRTBenchmarker(precision=precision, timing_cache="cold", profile=True)
    layers = inspected.layers(inspected.build(file_candidate(tested), tmp_path))
    assert sum(layer.time_ms or 0 for layer in layers) > 0
    assert kind in {layer.precision for layer in layers}
