"""The call sequences of ModelOpt's guide, with its names and arguments, timed on OpenVINO, and a backend at FP16.

The models are small, so that the patterns run out of schemes before the counts of the guide are reached.
"""

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from harness.compat.modelopt_autotune import Config, QDQAutotuner
from harness.compat.modelopt_autotune.__main__ import apply_mode_presets
from harness.compat.modelopt_autotune.benchmark import current_benchmark, init_benchmark_instance
from harness.compat.modelopt_autotune.settings import MODE_PRESETS, parse_arguments
from harness.compat.modelopt_autotune.workflows import benchmark_onnx_model, region_pattern_autotuning_workflow
from harness.config.sections import Sampling
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.runtimes.tensorrt import benchmarker, options
from harness.workers.helper_process import call_in_helper_process
from harness.workers.sandbox import Sandbox

PAGE = Path(__file__).parents[4] / "docs/reference/autotune.md"
GUIDE = {"timing_cache_file": "timing.cache", "warmup_runs": 5, "timing_runs": 20}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A working folder with a model of two convolutions and a classifier; the benchmark is closed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.compat.modelopt_autotune.benchmark.Sampling", partial(Sampling, max_ms=20.0))
    builder = GraphBuilder("tiny", seed=2)
    x = builder.input("x", (1, 3, 32, 32))
    for _ in range(2):
        x = builder.op("Relu", builder.conv(x, 16, 3, pad=1))
    builder.output(builder.linear(builder.op("Flatten", builder.op("GlobalAveragePool", x)), 4))
    builder.save(Path("model.onnx"))
    yield tmp_path
    if current_benchmark() is not None:
        current_benchmark().close()


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="ModelOpt is not installed")
def test_import_accepts_names_of_modelopts_function(tiny, warm_python):
    code = (
        "import onnx, sys; from modelopt.onnx.quantization.qdq_utils import get_quantized_tensors\n"
        "print(get_quantized_tensors(onnx.load(sys.argv[1])))"
    )
    autotuner = QDQAutotuner(onnx.load("model.onnx"))
    autotuner.initialize(Config())
    session = autotuner.session
    onnx.save(session.proto(session.space.resolve(session.space.quantize_all())), "quantized.onnx")
    autotuner.import_insertion_points(warm_python.evaluate("modelopt", tiny, code, "quantized.onnx"))
    assert autotuner.placement() == session.space.quantize_all()


def test_quick_start_workflow_runs(tiny):
    init_benchmark_instance(use_trtexec=False, **GUIDE)
    autotuner = region_pattern_autotuning_workflow(
        model_path="model.onnx", output_dir=Path("./results"), num_schemes_per_region=3, quant_type="int8"
    )
    assert autotuner.baseline_latency_ms > 0
    assert autotuner.profiled_patterns
    written = QDQGraph(onnx.load("results/optimized_final.onnx")).edges
    assert {p.tensor_name for p in autotuner.get_resolved_insertion_points()} == {edge.tensor for edge in written}
    assert "latency" in Path("results/logs/baseline.log").read_text()


def test_config_accepts_all_settings_of_the_guide():
    config = Config(
        default_quant_type="int8", default_dq_dtype="float32", default_q_scale=0.1, default_q_zero_point=0,
        top_percent_to_mutate=0.1, minimum_schemes_to_mutate=10, maximum_mutations=3, maximum_generation_attempts=100,
        pattern_cache_minimum_distance=4, pattern_cache_max_entries_per_pattern=32, maximum_sequence_region_size=10,
        minimum_topdown_search_size=10, verbose=True,
    )  # fmt: skip
    assert Config(verbose=True) == config, "they are the defaults"


def test_failed_build_has_infinite_latency_and_a_log(tiny, monkeypatch):
    monkeypatch.setattr("harness.workers.sandbox.Sandbox", Sandbox)  # in a worker, as for a user
    init_benchmark_instance(warmup_runs=0, timing_runs=3)
    assert benchmark_onnx_model(b"no model", "logs/odd.log") == float("inf")
    assert "failed: build: OpenVINO refuses model.onnx" in Path("logs/odd.log").read_text()
    assert benchmark_onnx_model("model.onnx", "logs/good.log", flush_timing_cache=True) > 0
    assert "95 % interval" in Path("logs/good.log").read_text()


def test_program_and_commands_of_the_docs_page_run(tiny):
    page = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {})
    assert Path("optimized.onnx").exists()
    command_line = r"^\$ (?:qdq autotune|python -m harness.compat.modelopt_autotune) (.*?)(?:  +#.*)?$"
    commands = re.findall(command_line, page, flags=re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        assert parse_arguments(command.split(), "qdq autotune").onnx_path == "model.onnx"
    for module in re.search(r"autotune\.MODULE import \.\.\.`: (.*?) \|", page)[1].split(", "):
        assert importlib.import_module(f"harness.compat.modelopt_autotune.{module.strip('`')}")


@pytest.mark.parametrize("mode", MODE_PRESETS)
def test_apply_mode_presets_sets_the_counts_of_the_mode(mode):
    options = parse_arguments(["-m", "model.onnx", "--mode", mode, "--timing_runs", "7"], "qdq autotune")
    apply_mode_presets(options)
    preset = MODE_PRESETS[mode]
    given = (options.num_schemes, options.warmup_runs, options.timing_runs)
    assert given == (preset["schemes_per_region"], preset["warmup_runs"], 7)


@pytest.fixture
def half():
    """The stand-in for TensorRT 11, at FP16."""
    init_benchmark_instance(
        backend="fake_machine:TensorRT11", params={"precision": "f16"}, warmup_runs=0, timing_runs=3
    )
    yield
    benchmark = current_benchmark()
    benchmark.close()


@pytest.mark.usefixtures("half")
def test_fp16_model_is_cast_once_and_written_files_are_built(tmp_path, monkeypatch):
    casts, read = [], {}
    build = benchmarker.build_plan

    def counting(what: str, work: Any, path: Path, precision: str, **limits: float) -> onnx.ModelProto:
        casts.append(precision)
        return call_in_helper_process(what, work, path, precision, **limits)

    def noting(library: Any, source: Any, *args: Any) -> Any:
        read[source.path] = digest_file(source.path)
        return build(library, source, *args)

    monkeypatch.setattr(options, "call_in_helper_process", counting)
    monkeypatch.setattr(benchmarker, "build_plan", noting)
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    out = tmp_path / "out"
    kept = region_pattern_autotuning_workflow(builder.save(tmp_path / "net.onnx"), out, num_schemes_per_region=1)
    assert casts == ["f16"], "the float model, and no candidate"
    for name in ("baseline.onnx", "optimized_final.onnx"):
        path = out / name
        assert digest_file(path) in read.values(), "the delivered file is the confirmed one"
    assert kept.session.task.model_file in read
    for path in {out / "optimized_final.onnx", *read} - {out / "unproved.onnx"}:
        proto = onnx.load(path)
        floats = {t.data_type for t in proto.graph.initializer} - {onnx.TensorProto.INT8, onnx.TensorProto.INT64}
        assert floats == {onnx.TensorProto.FLOAT16}, path.name
        ends = {v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)}
        assert ends == {onnx.TensorProto.FLOAT}
