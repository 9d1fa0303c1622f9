"""Arguments and libraries for trtexec reach its command line, or are refused by name."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fake_trtexec
import pytest
from fake_machine import Trtexec11

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.compat.modelopt_autotune.__main__ import autotune
from harness.compat.modelopt_autotune.benchmark import (
    TrtExecBenchmark,
    backend_spec,
    current_benchmark,
    init_benchmark_instance,
)
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.plugins import registry
from harness.plugins.api import Candidate

REMOTE = ["--remoteAutoTuningConfig=ssh://user@board", "--safe", "--skipInference"]


@pytest.fixture(params=[10, 11])
def log(request, monkeypatch, tmp_path):
    """The log of a stand-in for trtexec on PATH; it refuses unknown options, and one that is given twice."""
    return fake_trtexec.install(tmp_path, monkeypatch.setenv, request.param)


def net(folder: Path) -> Path:
    builder = GraphBuilder("net", seed=0)
    builder.output(builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1), name="y")
    return builder.save(folder / "net.onnx")


def commands(log: Path, model: Path, **params: Any) -> list[list[str]]:
    """The command lines of a build and of a run."""
    made = Trtexec11(precision="f32", **params)
    candidate = Candidate(digest="x", edges=(), source=lambda: model)
    with made.open(made.build(candidate, model.parent)) as probe:
        probe.sample(1)
    return [json.loads(line) for line in log.read_text().splitlines()][1:]


def test_libraries_and_arguments_reach_builds_and_runs(log, tmp_path):
    library = tmp_path / "my plugin.so"
    library.touch()
    extra = ["--verbose", "--noTF32", "--staticPlugins=other.so", *REMOTE]
    build, run = commands(log, net(tmp_path), plugins=[str(library)], extra=extra)
    for command in (build, run):
        assert {f"--staticPlugins={library}", "--staticPlugins=other.so", "--verbose", *REMOTE[:2]} <= {*command}
        assert len(command) == len(set(command))
    assert "--skipInference" in build
    assert "--skipInference" not in run


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"extra": ["--builderOptimizationLevel=5"], "optimization_level": 2}, "--builderOptimizationLevel=2"),
        ({"extra": ["--device=1"]}, "--device=0"),
        ({"plugins": ["none.so"]}, "plugins: none.so: no such file"),
    ],
)
def test_contradictory_arguments_are_refused(params, says, tmp_path):
    with pytest.raises(UserError, match=says):
        commands(tmp_path / "log", net(tmp_path), **params)


@pytest.mark.parametrize(
    ("backend", "options", "says"),
    [
        ("trtexec", {"trtexec_args": ["--iterations=5"]}, "--iterations is set"),
        ("trtexec", {"trtexec_args": ["--workspace=4096"]}, "memPoolSize"),
        ("trtexec", {"trtexec_args": REMOTE[:1]}, "needs --safe"),
        ("tensorrt", {"trtexec_args": ["--verbose"]}, "--use_trtexec"),
        ("openvino", {"plugin_libraries": ["my.so"]}, "tensorrt and trtexec"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(backend, options, says):
    def make() -> None:
        use = backend_spec(backend, **options)
        registry.create_plugin("benchmarker", use.use, use.params)

    with pytest.raises(UserError, match=says):
        make()


def test_python_interface_passes_arguments_to_trtexec(monkeypatch):
    monkeypatch.setattr("harness.compat.modelopt_autotune.benchmark.open_engines", lambda worker, limits: nullcontext())
    library = str(Path("my.so"))
    made = TrtExecBenchmark(trtexec_args=["--verbose", *REMOTE], plugin_libraries=[library])
    made.close()
    assert made.backend.use == "trtexec"
    assert made.backend.params == {"extra": ["--verbose", *REMOTE], "plugins": [library]}
    text = init_benchmark_instance(use_trtexec=True, trtexec_args="--verbose '--setTimingName=a b'")
    text.close()
    assert text.backend.params["extra"] == ["--verbose", "--setTimingName=a b"]
    assert current_benchmark() is None


@pytest.mark.parametrize("text", ["--verbose", "--verbose --skipInference"])
def test_autotune_command_passes_arguments_to_trtexec(text, tmp_path, monkeypatch):
    seen: list[PluginSpec] = []

    def stop(backend: PluginSpec, *_: Any) -> None:
        seen.append(backend)
        raise UserError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.compat.modelopt_autotune.__main__.read_runtime", stop)
    library = tmp_path / "my.so"
    library.touch()
    given = ["-m", str(net(tmp_path)), "-o", "out", "--use_trtexec", "--timing_cache", "cache"]
    given += ["--plugin_libraries", "my.so", "--trtexec_benchmark_args", text]
    with pytest.raises(UserError, match="enough"):
        autotune(given, "qdq", NullProgress())
    params = {"extra": text.split(), "plugins": [str(library)], "timing_cache_file": "cache"}
    assert seen == [PluginSpec(use="trtexec", params=params)]
