"""The benchmarker of trtexec against a stand-in that knows the options of each major and writes its files."""

import json
from pathlib import Path

import fake_trtexec
import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda

from harness.base.errors import BuildFailed, MeasureFailed, UserError
from harness.graph.builder import GraphBuilder
from harness.plugins import registry
from harness.runtimes.testing import file_candidate
from harness.runtimes.trtexec import (
    TrtexecBenchmarker,
    parse_version,
    read_outputs,
    read_profile,
    read_times,
)


@pytest.fixture(params=[10, 11])
def major(request, monkeypatch, tmp_path):
    """A machine with a GPU and this trtexec."""
    fake_trtexec.install(tmp_path, monkeypatch.setenv, request.param)
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", FakeCuda)
    return int(request.param)


def runs(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def model(path: Path, batch: int | str = 1) -> Path:
    builder = GraphBuilder("net")
    builder.output(builder.op("Relu", builder.input("x", (batch, 2, 2))), name="y")
    return builder.save(path)


def test_readings_are_gpu_compute_times_without_warm_up(major, tmp_path):
    made = TrtexecBenchmarker(precision="f32", workspace_gb=1, optimization_level=2)
    artifact = made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)
    with made.open(artifact) as probe:
        readings = [*probe.sample(3), *probe.sample(2)]
        answer = probe.infer({"x": np.ones((1, 2, 2), np.float32)})["y"]
    assert readings == pytest.approx([0.755, 0.756, 0.757, 0.758, 0.759])
    np.testing.assert_array_equal(answer, np.array([[[0.5, -1.25], [3, 4.75]]], np.float32))
    assert np.fromfile(tmp_path / "input0.bin", np.float32).tolist() == [1, 1, 1, 1]
    _, build, times, _ = runs(tmp_path)
    assert {"--skipInference", "--noTF32", "--memPoolSize=workspace:953M", "--builderOptimizationLevel=2"} <= {*build}
    assert ("--stronglyTyped" in build) == (major == 10)
    wanted = {"--noDataTransfers", "--useSpinWait", "--useCudaGraph"}
    assert wanted <= {*times} if major == 10 else not wanted & {*times}


def test_cuda_graph_can_be_disabled(major, tmp_path):
    made = TrtexecBenchmarker(precision="f32", cuda_graph=False, timing_cache="cold")
    with made.open(made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)) as probe:
        probe.sample(1)
    assert not any(argument.startswith("--timingCacheFile") for argument in runs(tmp_path)[1])
    flags = runs(tmp_path)[-1]
    assert ("--noCudaGraph" in flags) == (major == 11)
    assert "--useCudaGraph" not in flags


def test_stale_readings_are_discarded(major, tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("harness.runtimes.trtexec.time.monotonic", lambda: now_s[0])
    made = TrtexecBenchmarker(precision="f32")
    with made.open(made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)) as probe:
        first = probe.sample(2)
        assert probe.sample(1)[0] > first[0]
        now_s[0] = 5.0
        assert probe.sample(2) == first  # from a new run
    assert len(runs(tmp_path)) == 4


def test_precision_flags_are_passed_to_10_only(major, tmp_path):
    made = TrtexecBenchmarker(precision="f16", typing="weak")
    if major == 11:
        with pytest.raises(UserError, match=r"typing: weak: trtexec 11.1.0 has no weakly typed networks any more"):
            made.describe()
        with pytest.raises(UserError, match=r"extra: --fp16 is unknown to trtexec 11"):
            TrtexecBenchmarker(extra=["--fp16"]).describe()
        return
    made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)
    assert "--fp16" in runs(tmp_path)[-1]
    assert "--int8" not in runs(tmp_path)[-1]


def test_an_fp16_engine_comes_from_an_fp16_file(major, tmp_path):
    builder = GraphBuilder("net", seed=0)
    builder.output(builder.conv(builder.input("x", (1, 2, 4, 4)), 2, 1), name="y")
    made = TrtexecBenchmarker(precision="f16")
    made.build(file_candidate(builder.save(tmp_path / "m.onnx")), tmp_path)
    parsed = next(a.partition("=")[2] for a in runs(tmp_path)[-1] if a.startswith("--onnx"))
    kinds = {tensor.data_type for tensor in onnx.load(parsed).graph.initializer}
    assert kinds == {onnx.TensorProto.FLOAT16}


@pytest.mark.usefixtures("major")
def test_profiles_and_extra_arguments_are_passed(tmp_path):
    shapes = {"x": {"min": "1x2x2", "opt": "2x2x2", "max": "4x2x2"}}
    remote = ["--safe", "--remoteAutoTuningConfig=ssh://user@board"]
    made = TrtexecBenchmarker(precision="f32", profiles=shapes, extra=[*remote, "--maxAuxStreams=0"])
    with made.open(made.build(file_candidate(model(tmp_path / "m.onnx", "batch")), tmp_path)) as probe:
        probe.sample(1)
    _, build, times = runs(tmp_path)
    assert {"--minShapes='x':1x2x2", "--optShapes='x':2x2x2", "--maxShapes='x':4x2x2", *remote} <= {*build}
    assert {"--shapes='x':2x2x2", *remote, "--maxAuxStreams=0"} <= {*times}


@pytest.mark.usefixtures("major")
def test_a_static_model_gets_no_shapes_which_trtexec_would_refuse(tmp_path):
    shapes = {"x": {"min": "1x2x2", "opt": "2x2x2", "max": "4x2x2"}}
    made = TrtexecBenchmarker(precision="f32", profiles=shapes)
    with made.open(made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)) as probe:
        probe.sample(1)
    assert not any("hapes=" in argument for run in runs(tmp_path) for argument in run)
    with pytest.raises(BuildFailed, match=r"profile of 'x': 1x2x2 to 4x2x2 does not cover 8x2x2"):
        made.build(file_candidate(model(tmp_path / "m8.onnx", 8)), tmp_path)
    with pytest.raises(BuildFailed, match=r"input 'x' has the dynamic shape -1x2x2"):
        TrtexecBenchmarker(precision="f32").build(file_candidate(model(tmp_path / "d.onnx", "batch")), tmp_path)


@pytest.mark.usefixtures("major")
def test_timing_caches_by_policy(tmp_path):
    path = model(tmp_path / "m.onnx")
    with pytest.raises(UserError, match=r"a frozen cache is never made"):
        TrtexecBenchmarker(precision="f32", timing_cache="frozen").build(file_candidate(path), tmp_path)
    TrtexecBenchmarker(precision="f32").build(file_candidate(path), tmp_path)
    (file,) = (tmp_path / "cache" / "qdq-bench" / "tensorrt").iterdir()
    assert file.read_bytes() == b"+"
    TrtexecBenchmarker(precision="f32", timing_cache="frozen").build(file_candidate(path), tmp_path)
    assert file.read_bytes() == b"+"


@pytest.mark.usefixtures("major")
def test_failures_quote_trtexec(tmp_path, monkeypatch):
    path = model(tmp_path / "m.onnx")
    odd = onnx.load(path)
    odd.graph.node[0].op_type = "Frobnicate"
    onnx.save(odd, tmp_path / "odd.onnx")
    made = TrtexecBenchmarker(precision="f32")
    with pytest.raises(BuildFailed, match=r"trtexec failed with status 1: .*Plugin not found: Frobnicate"):
        made.build(file_candidate(tmp_path / "odd.onnx"), tmp_path)
    artifact = made.build(file_candidate(path), tmp_path)
    with made.open(artifact) as probe, pytest.raises(MeasureFailed, match=r"inputs are x, but got missing"):
        probe.infer({"missing": np.ones(1)})
    with pytest.raises(BuildFailed, match=r"Unknown option: --frobnicate"):
        TrtexecBenchmarker(precision="f32", extra=["--frobnicate"]).build(file_candidate(path), tmp_path)
    slow = TrtexecBenchmarker(precision="f32", timeout_s=0.5)
    slow.describe()
    monkeypatch.setenv("FAKE_TRTEXEC_HANGS", "1")
    with pytest.raises(BuildFailed, match=r"trtexec took longer than 0.5 s \(timeout_s\)"):
        slow.build(file_candidate(path), tmp_path)


FEED = {"x": np.ones((1, 2, 2), np.float32)}


@pytest.mark.usefixtures("major")
def test_files_that_trtexec_did_not_write_fail_the_candidate(tmp_path):
    made, path, program = TrtexecBenchmarker(precision="f32"), model(tmp_path / "m.onnx"), tmp_path / "bin" / "trtexec"
    artifact = made.build(file_candidate(path), tmp_path)
    program.write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(BuildFailed, match="trtexec wrote no engine: nothing"):
        made.build(file_candidate(path), tmp_path / "bin")
    with pytest.raises(MeasureFailed, match="trtexec's profile cannot be read"):
        made.layers(artifact)
    with made.open(artifact) as probe, pytest.raises(MeasureFailed, match="trtexec's outputs cannot be read"):
        probe.infer(FEED)
    other = json.dumps([{"name": "z", "dimensions": "1", "values": [1]}])
    program.write_text(f"#!/bin/sh\necho '{other}' > {tmp_path / 'outputs.json'}\n")
    with made.open(artifact) as probe, pytest.raises(MeasureFailed, match="trtexec wrote no output 'y', but z"):
        probe.infer(FEED)
    program.write_text("no program")
    with pytest.raises(BuildFailed, match="trtexec cannot be started"):
        made.build(file_candidate(path), tmp_path)
    with pytest.raises(UserError, match="trtexec cannot be started"):
        TrtexecBenchmarker(precision="f32").describe()


def test_profile_reports_layers_with_times(major, tmp_path):
    made = TrtexecBenchmarker(precision="f32", profile=True)
    artifact = made.build(file_candidate(model(tmp_path / "m.onnx")), tmp_path)
    (layer,) = made.layers(artifact)
    assert (layer.name, layer.time_ms) == ("conv", 0.1)
    assert "--profilingVerbosity=detailed" in runs(tmp_path)[1]
    assert ("--separateProfileRun" in runs(tmp_path)[-1]) == (major == 10)


def test_description_lists_version_device_and_precisions(major):
    facts = TrtexecBenchmarker().describe()
    assert facts["version"] == {10: "10.16.1", 11: "11.1.0"}[major]
    assert facts["options"]["compute_capability"] == "8.9"
    assert facts["float_open"]
    assert list(facts["float_params"]) == ["f32", "tf32", "f16", "bf16"]
    json.dumps(facts)


def test_missing_trtexec_is_a_user_error(monkeypatch):
    monkeypatch.setattr("harness.runtimes.cuda.import_runtime", FakeCuda)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"no program trtexec on PATH; it comes with TensorRT's archive.*not with pip"):
        TrtexecBenchmarker().describe()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"extra": ["fast"]}, "extra: arguments such as --maxAuxStreams=0, but got 'fast'"),
        ({"extra": ["--exportTimes=x"]}, "extra: --exportTimes is set by the benchmarker"),
        ({"extra": ["--remoteAutoTuningConfig=x"]}, "extra: --remoteAutoTuningConfig also needs --safe"),
    ],
)
def test_invalid_options_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        registry.create_plugin("benchmarker", "trtexec", params)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec", "10.16.1"),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v110100] [b106] # trtexec", "11.1.0"),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec", "8.6.1"),
    ],
)
def test_parse_version_of_known_outputs(text, version):
    assert parse_version(text) == version


def test_read_times_returns_compute_time_not_latency(tmp_path):
    """As samples/common/sampleReporting.cpp writes them; 10 has transfers by default, older ones export the warm-up."""
    file = tmp_path / "times.json"
    file.write_text(
        """[
  { "startEnqMs" : 120.1, "endEnqMs" : 120.2, "startH2dMs" : 120.0, "endH2dMs" : 120.6, "startComputeMs" : 120.6,
    "endComputeMs" : 124.6, "startD2hMs" : 124.6, "endD2hMs" : 124.9, "h2dMs" : 0.6, "computeMs" : 4, "d2hMs" : 0.3,
    "latencyMs" : 4.9 },
  { "startEnqMs" : 205.1, "endEnqMs" : 205.2, "startH2dMs" : 205.0, "endH2dMs" : 205.6, "startComputeMs" : 205.6,
    "endComputeMs" : 207.1, "startD2hMs" : 207.1, "endD2hMs" : 207.4, "h2dMs" : 0.6, "computeMs" : 1.5, "d2hMs" : 0.3,
    "latencyMs" : 2.4 }
]
"""
    )
    assert read_times(file, 200) == [1.5]
    assert len(read_times(file, 0)) == 2


def test_damaged_files_are_a_failed_measurement(tmp_path):
    file = tmp_path / "times.json"
    file.write_text("[{}, 3]")
    for read, what in ((read_profile, "profile"), (read_outputs, "outputs")):
        with pytest.raises(MeasureFailed, match=f"trtexec's {what} cannot be read"):
            read(file)
    for content, message in (
        ("nonsense", "times cannot be read"),
        ("[{}]", "times cannot be read: KeyError"),
        ("[]", "wrote 0 times, none of them after its warm-up of 200 ms"),
    ):
        file.write_text(content)
        with pytest.raises(MeasureFailed, match=message):
            read_times(file, 200)
    with pytest.raises(BuildFailed, match=r"does not report its version: 'hello'"):
        parse_version("hello")
