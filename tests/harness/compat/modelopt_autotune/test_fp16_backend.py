"""A backend whose float type is FP16: the model is cast once, and the files that the backend reads are written."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from harness.compat.modelopt_autotune.benchmark import current_benchmark, init_benchmark_instance
from harness.compat.modelopt_autotune.workflows import region_pattern_autotuning_workflow
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.runtimes.tensorrt import benchmarker, options
from harness.workers.helper_process import call_in_helper_process


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
        assert digest_file(path) in read.values(), "what is delivered is what was confirmed"
    assert kept.session.task.model_file in read
    for path in {out / "optimized_final.onnx", *read} - {out / "unproved.onnx"}:
        proto = onnx.load(path)
        floats = {t.data_type for t in proto.graph.initializer} - {onnx.TensorProto.INT8, onnx.TensorProto.INT64}
        assert floats == {onnx.TensorProto.FLOAT16}, path.name
        ends = {v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)}
        assert ends == {onnx.TensorProto.FLOAT}
