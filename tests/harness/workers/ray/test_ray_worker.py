"""What a node of a cluster does, without a cluster: models are kept as long as there is room, and nothing is left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.sections import ExecutorSpec, Limits, PluginSpec
from harness.graph.io.files import model_files
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins.api import Candidate, Capabilities
from harness.workers.engines import BuiltEngine, WorkerSpec
from harness.workers.ray import open_execution_target
from harness.workers.ray.ray_worker import LRUByteCache, RayWorker
from search.space import Edge

EDGES = ((Edge("x", "conv", 0), "int8"),)


class Maker:
    """Writes the digest of a placement in the place of its model."""

    def write(self, resolved: Any, folder: Path, *, name: str | None = None) -> Path:
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.onnx"
        path.write_text(f"placement {name}")
        return path


class Reads:
    """A runtime that reads its file, and refuses one that is not there."""

    capabilities = Capabilities(in_process=True)
    read: list[str] = []  # noqa: RUF012

    def build(self, candidate: Candidate, workdir: Path) -> Any:
        from harness.plugins.api import Artifact

        path = candidate.source()
        self.read.append(path.read_text())
        adjacent = sorted(each.name for each in path.parent.iterdir())
        return Artifact(engine=None, info={"adjacent": adjacent})

    def describe(self) -> dict[str, Any]:
        return {"name": "reads", "version": "1", "device": "none", "options": {}}


@pytest.fixture
def host(monkeypatch, tmp_path):
    from harness.workers import sandbox as local

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local.registry, "create_plugin", lambda *_: Reads())
    monkeypatch.setattr(local.registry, "load_plugin", lambda *_: Reads)
    Reads.read.clear()
    made = RayWorker(sys.path)
    spec = WorkerSpec(benchmarkers={MAIN_BENCHMARKER: PluginSpec(use="reads")}, workdir=tmp_path / "driver")
    made.open(0, spec, Limits(), Maker())  # type: ignore[arg-type]
    yield made
    made.end()
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_model_files_are_stored_once_with_their_weights(host):
    order = ("float", (), MAIN_BENCHMARKER, "key")
    assert isinstance(host.build(0, *order), KeyError), "they were never sent"
    host.store_files("key", {"model.onnx": b"a model", "model.bin": b"its weights"})
    for _ in range(2):
        built = host.build(0, *order)
        assert isinstance(built, BuiltEngine)
        assert built.info["adjacent"] == ["model.bin", "model.onnx"]
    assert Reads.read == ["a model"] * 2


def test_least_recently_used_models_are_evicted(host, monkeypatch):
    monkeypatch.setattr(host, "_files", LRUByteCache(25, host._files._drop))
    for name in "abc":
        host.store_files(name, {f"{name}.onnx": b"0123456789"})
    orders = {name: (name, (), MAIN_BENCHMARKER, name) for name in "abc"}
    assert isinstance(host.build(0, *orders["a"]), KeyError)
    assert isinstance(host.build(0, *orders["b"]), BuiltEngine)
    host.store_files("d", {"d.onnx": b"x" * 10})
    assert isinstance(host.build(0, *orders["c"]), KeyError), "b was used after it"
    assert isinstance(host.build(0, *orders["b"]), BuiltEngine)
    host.store_files("large", {"large.onnx": b"x" * 1000})
    newest = host.build(0, "l", (), MAIN_BENCHMARKER, "large")
    assert isinstance(newest, BuiltEngine), "the newest always stays"


def test_candidate_file_is_written_on_the_worker_and_removed(host):
    for digest in ("aa", "bb"):
        built = host.build(0, digest, EDGES, MAIN_BENCHMARKER)
        assert isinstance(built, BuiltEngine)
        assert built.info["adjacent"] == [f"{digest}.onnx"]
    assert Reads.read == ["placement aa", "placement bb"]


def test_build_without_candidate_writer_fails(host, tmp_path):
    host.open(
        1,
        WorkerSpec(benchmarkers={MAIN_BENCHMARKER: PluginSpec(use="reads")}, workdir=tmp_path / "driver"),
        Limits(),
        None,
    )
    failed = host.build(1, "aa", EDGES, MAIN_BENCHMARKER)
    assert isinstance(failed, Failed)
    assert failed.reason == "neither a file nor a candidate writer was sent"


def test_missing_ray_names_the_extra_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "harness.workers.ray.ray_pool", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match=r"executor: 'ray' needs Ray .*install it: pip install 'qdq-bench\[ray\]'"),
        open_execution_target(ExecutorSpec(use="ray"), Limits(), None, NullProgress(), model_files),
    ):
        pass
