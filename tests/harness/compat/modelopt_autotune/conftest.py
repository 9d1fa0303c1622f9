"""A small model, and a runtime with known latencies, so that searches take no time and are repeatable."""

from dataclasses import dataclass, field

import pytest

from harness.cli.main import main
from harness.compat.modelopt_autotune.benchmark import Benchmark, _current_benchmarks, init_benchmark_instance
from harness.config.yaml_loader import read_cache_file
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured
from harness.runtimes.simulated import SimulatedBenchmarker


def small_model(blocks=2, name="net"):
    """Residual blocks of convolutions between a stem and a classifier."""
    builder = GraphBuilder(name, seed=1)
    x = builder.input("x", (1, 3, 16, 16))
    x = builder.op("Relu", builder.conv(x, 8, 3, pad=1, name="stem"))
    x = builder.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    for number in range(blocks):
        y = builder.op("Relu", builder.conv(x, 8, 3, pad=1, name=f"block{number}_first"))
        x = builder.op("Relu", builder.op("Add", builder.conv(y, 8, 3, pad=1, name=f"block{number}_second"), x))
    builder.output(builder.linear(builder.op("Flatten", builder.op("GlobalAveragePool", x)), 4))
    return builder


@pytest.fixture(scope="session")
def make_small():
    """See `small_model`."""
    return small_model


@pytest.fixture(scope="session")
def model():
    """The small model in memory."""
    return small_model().build()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with `model.onnx` in it."""
    small_model().save(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Runtime:
    """Latencies by formula; `stop_after` interrupts, `broken` fails, `generous` makes every Q/DQ pair faster."""

    measured: list = field(default_factory=list)
    stop_after: int | None = None
    broken: bool = False
    generous: bool = False
    seed: int = 5

    def measure(self, candidate, log_file=None):
        if self.stop_after is not None and len(self.measured) >= self.stop_after:
            raise KeyboardInterrupt
        self.measured.append(candidate)
        if log_file is not None:
            log_file.write_text("measured\n")
        if self.broken and candidate.edges:
            return Failed(stage="build", reason="the runtime refuses it")
        return Measured(samples_ms=(self.truth_ms(candidate),) * 5, build_s=0.0, measure_s=0.0)

    def truth_ms(self, candidate):
        if self.generous:
            return 10.0 / (1 + len(candidate.edges))
        return SimulatedBenchmarker(seed=self.seed).truth_ms(candidate.edges)


@pytest.fixture
def runtime(monkeypatch):
    """The benchmark of a test, without noise and without a process."""
    made = Runtime()
    monkeypatch.setattr(Benchmark, "measure", lambda self, *arguments: made.measure(*arguments))
    return made


@pytest.fixture
def benchmark_instance(runtime):
    init_benchmark_instance(backend="simulated", params={"noise": 0.0})
    yield runtime
    _current_benchmarks.get().close()
    _current_benchmarks.set(None)


@pytest.fixture
def tune(folder, runtime, capsys):
    """`qdq autotune --mode` of `model.onnx` on the simulated backend, in this process; its output on one line."""

    def run(*arguments, out="out", code=0, lines=False):
        given = {"--backend": "simulated", "-m": "model.onnx", "-o": out, "--mode": "default"}
        if "--use_trtexec" in arguments:
            del given["--backend"]
        rest = [text for flag, value in given.items() if flag not in arguments for text in (flag, value)]
        capsys.readouterr()
        try:
            main(["autotune", *rest, *map(str, arguments)])
            found = 0
        except SystemExit as end:
            found = int(end.code or 0)
        printed = capsys.readouterr().err
        assert found == code, printed
        return printed if lines else " ".join(printed.split())

    run.runtime = runtime
    return run


@pytest.fixture
def measured(folder):
    """What the state of a run has by digest."""
    return lambda out="out": read_cache_file(folder / out / "autotuner_state.yaml", "a state")["measured"]


@pytest.fixture
def confirmed(folder):
    """File of the confirmed model; fresh builds have other latencies than the runtime of a test."""

    def find(out="out"):
        kept = folder / out / "not_faster.onnx"
        return kept if kept.exists() else folder / out / "optimized_final.onnx"

    return find
