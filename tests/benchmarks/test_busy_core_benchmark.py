"""Whether work on another core changes what a run on its own core finds.

Run with `pytest tests/benchmarks/test_busy_core_benchmark.py --benchmark-enable -s` on a machine of two cores or more
that does nothing else, about ten minutes; it prints the figures of docs/explanation/measurement.md: ResNet-18 by ONNX
Runtime, one thread on one core, in turns next to an idle core and to one that runs the float model without a pause.
Latencies may grow with a busy neighbour (caches, memory, turbo); the speedup is what must not move by more than its
interval.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from harness.zoo import write_model

pytestmark = [pytest.mark.slow, pytest.mark.study]
EXPERIMENT = """
experiment: neighbour
models: [{use: zoo:resnet18, calibration: {samples: 4}}]
backends: [{use: onnxruntime, params: {threads: 1}}]
searchers: [random]
initial: [float]
baselines: [linear, ort_static]
budget: {evaluations: [2]}
"""
BUSY = """
import sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feed = {i.name: numpy.zeros(i.shape, numpy.float32) for i in session.get_inputs()}
while True:
    session.run(None, feed)
"""


def pinned(core: int, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command], preexec_fn=lambda: os.sched_setaffinity(0, {core}), stdout=subprocess.DEVNULL
    )


@contextmanager
def busy(core: int, model: Path) -> Iterator[None]:
    neighbour = pinned(core, "-c", BUSY, str(model))
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def rows(core: int, folder: Path) -> pd.DataFrame:
    (folder / "neighbour.yaml").write_text(EXPERIMENT)
    command = ("-m", "harness.cli.main", "run", str(folder / "neighbour.yaml"), "--out", str(folder / "out"))
    assert pinned(core, *command).wait() == 0
    return pd.read_csv(folder / "out" / "report" / "main.csv").set_index("method")


def test_speedup_next_to_busy_core(benchmark, tmp_path):
    if benchmark.disabled:
        pytest.skip("it says something about a machine; enable benchmarks to take the time")
    pytest.importorskip("onnxruntime")
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("needs two cores")
    model = write_model("resnet18", tmp_path / "resnet18.onnx")
    benchmark.pedantic(lambda: None)  # the runs are the measurement, and take their time themselves
    print()
    for turn in range(4):
        folder = tmp_path / str(turn)
        folder.mkdir()
        if turn % 2:
            with busy(others[0], model):
                found = rows(own, folder)
        else:
            found = rows(own, folder)
        shown = found.loc[["float", "linear", "ort_static"], ["latency_ms", "speedup", "speedup_low", "speedup_high"]]
        print("next to a busy core" if turn % 2 else "next to an idle core", shown.round(3).to_string(), sep="\n")
