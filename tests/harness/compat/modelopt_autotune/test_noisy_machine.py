"""A machine whose speed changes while models are timed: readings are scaled to those of the float model."""

import re
import sys
from contextlib import closing

import pytest

from harness.cli.main import main
from harness.compat.modelopt_autotune.benchmark import init_benchmark_instance
from harness.compat.modelopt_autotune.workflows import region_pattern_autotuning_workflow
from harness.config.yaml_loader import read_cache_file

BACKEND = '''
"""Latencies by formula, on a machine whose pace jumps between 1 and 4: all that is timed at once shares it."""

from contextlib import contextmanager

import numpy as np

from harness.plugins.api import Artifact, Capabilities
from harness.runtimes.simulated import SimulatedBenchmarker


class Probe:
    def __init__(self, truth_ms):
        self.truth_ms = truth_ms

    def sample(self, n):
        pace = Restless.pace()
        return [self.truth_ms * pace * float(np.exp(0.2 * Restless.rng.standard_normal())) for _ in range(n)]


class Restless:
    capabilities = Capabilities(dialect="openvino")
    calls = 0

    @classmethod
    def pace(cls):
        cls.calls += 1
        return 4.0 if cls.calls // 40 % 2 else 1.0

    def build(self, candidate, workdir):
        Restless.calls, Restless.rng = 0, np.random.default_rng(7)  # as in a worker of its own
        truth_ms = SimulatedBenchmarker(seed=5).truth_ms(candidate.edges)
        return Artifact(engine=Probe(truth_ms), info={"truth_ms": truth_ms})

    @contextmanager
    def open(self, artifact):
        yield artifact.engine

    def describe(self):
        return {"name": "restless", "version": "1", "device": "simulated", "float_precision": "f32"}
'''


@pytest.fixture
def machine(folder, monkeypatch):
    """A working folder with a model and a runtime on such a machine."""
    (folder / "restless.py").write_text(BACKEND)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield folder
    sys.modules.pop("restless", None)


def run(*more: str) -> None:
    main(["autotune", "-m", "model.onnx", "--backend", "restless:Restless", "--mode", "quick", "-o", "out", *more])


def test_noisy_machine_interleaves_models_with_the_float_model(machine, capsys):
    run("--max_evals", "6")
    printed = capsys.readouterr().err
    kept = read_cache_file(machine / "out/autotuner_state.yaml", "a state")
    scale = kept["baseline_latency_ms"]
    assert kept["interleaved"] is True
    assert f"timed in turns with the float model, whose {scale:.3f} ms set the scale" in printed
    logs = [path.read_text() for path in sorted((machine / "out/logs").glob("[rs]*.log"))]
    assert len(logs) == 5
    for log in logs:
        found = float(log.split()[1])
        truth = float(log.split('"truth_ms": ')[1].split("}")[0])
        assert found / scale == pytest.approx(truth / 10.0, rel=0.25)
        assert "reference_ms: [" in log
    assert re.search(rf"^baseline {scale:.3f} ms; starts: linear \d+\.\d+ ms \(0\.\d+x\), ", printed, re.M)
    run("--max_evals", "8")
    assert f"whose {scale:.3f} ms set the scale" in capsys.readouterr().err


def test_interleaving_ends_with_the_workflow(machine):
    with closing(init_benchmark_instance(backend="restless:Restless")) as benchmark:
        region_pattern_autotuning_workflow("model.onnx", "out", num_schemes_per_region=1)
        assert read_cache_file(machine / "out/autotuner_state.yaml", "a state")["interleaved"] is True
        benchmark.run("model.onnx", machine / "after.log")
    assert "reference_ms: [" in next((machine / "out/logs").glob("start_*.log")).read_text()
    assert "reference_ms: [" not in (machine / "after.log").read_text()
