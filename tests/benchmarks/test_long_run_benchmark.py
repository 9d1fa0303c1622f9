"""What the harness itself takes of a trial in long runs: 10,000 simulated trials as `qdq run` makes them.

Run with `pytest tests/benchmarks/test_long_run_benchmark.py --benchmark-enable -s`; it prints rows for
docs/explanation/reliability.md and docs/how-to/cluster.md. Figures to reach: 2 ms of harness time a trial, 1 GiB.
QDQ_TRIALS sets how many, QDQ_DRIVERS how many processes do the same at once, each with a results folder of
its own, to see what one machine can drive. Harness time is all processor time but that of the made-up runtime, counted
around its methods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from harness.graph.builder import GraphBuilder

pytestmark = pytest.mark.slow
TRIALS = int(os.environ.get("QDQ_TRIALS", "10000"))
DRIVERS = int(os.environ.get("QDQ_DRIVERS", "1"))
EXPERIMENT = f"""
experiment: long
models: [{{use: net.onnx, calibration: {{samples: 2}}}}]
backends: [{{use: 'timed:Timed', label: timed, params: {{seed: 5, noise_seed: 1}}}}]
sharing: region
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {{evaluations: [{TRIALS}]}}
sampling: {{warmup_ms: 0, min_samples: 11, max_samples: 20}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""
TIMED = """
import time
from contextlib import contextmanager
from harness.runtimes.simulated import SimulatedBenchmarker

SPENT = [0.0]

def timed(work):
    def run(*args):
        started_s = time.process_time()
        try:
            return work(*args)
        finally:
            SPENT[0] += time.process_time() - started_s
    return run

class Timed(SimulatedBenchmarker):
    build = timed(SimulatedBenchmarker.build)

    @contextmanager
    def open(self, artifact):
        yield Probe(artifact.engine)

class Probe:
    def __init__(self, probe):
        self.sample = timed(probe.sample)
"""
RUN = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness.config.experiment import load_experiment
from harness.run.runner import run_experiment
from harness.base.progress import NullProgress
from timed import SPENT
folder, out = Path(sys.argv[1]), Path(sys.argv[2])

def run(name, out):
    run_experiment(load_experiment(folder / name), out=out, observer=NullProgress())

run("short.yaml", out.with_suffix(".short"))  # imports what it needs
SPENT[0] = 0.0
wall, cpu = time.perf_counter(), time.process_time()
run("long.yaml", out)
most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, SPENT[0], most_mib]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    for _ in range(30):  # some sixty points, for regions do not share theirs
        x = builder.op("Relu", builder.conv(x, 8, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(folder / "net.onnx")
    (folder / "long.yaml").write_text(EXPERIMENT)
    (folder / "short.yaml").write_text(EXPERIMENT.replace(f"evaluations: [{TRIALS}]", "evaluations: [4]"))
    (folder / "timed.py").write_text(TIMED)
    return folder


def test_harness_time_per_trial(benchmark, folder):
    if benchmark.disabled:
        pytest.skip("tests/harness/run runs shorter ones; enable benchmarks to take the time of a long one")
    outs = [folder / f"out-{number}" for number in range(DRIVERS)]

    def drive() -> tuple[float, list[list[float]]]:
        started_s = time.perf_counter()
        commands = [[sys.executable, "-c", RUN, str(folder), str(out)] for out in outs]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        said = [each.communicate()[0] for each in running]
        return time.perf_counter() - started_s, [json.loads(text.splitlines()[-1]) for text in said]

    wall_s, found = benchmark.pedantic(drive, rounds=1)
    own_ms = [1e3 * (cpu_s - made_up_s) / TRIALS for _, cpu_s, made_up_s, _ in found]
    made_up_ms = [1e3 * spent_s / TRIALS for _, _, spent_s, _ in found]
    (path,) = outs[0].glob("*/runs/*.jsonl*")
    size = path.stat().st_size
    benchmark.extra_info |= {"trials": TRIALS, "drivers": DRIVERS, "harness_ms": own_ms, "most_mib": found[0][3]}
    print(
        f"\n| {TRIALS:,} simulated trials, {DRIVERS} driver(s) | {max(own_ms):.2f} ms of processor time a trial "
        f"of which {max(made_up_ms):.2f} are of the runtime; {max(most for *_, most in found):.0f} MiB at most; "
        f"{DRIVERS * TRIALS / wall_s:.0f} trials a second in all; journal: {size / TRIALS:.0f} bytes a trial, "
        f"{DRIVERS * size / wall_s / 1e6:.2f} MB a second |"
    )
