"""Calibration streams: its peak is that of one batch, however many there are."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, sys
from pathlib import Path
from harness.accuracy.calibration.ranges import calibrate
from harness.base.random_inputs import random_feeds
from harness.graph.load import load, save_to_folder
import tempfile

method, counts = sys.argv[1], map(int, sys.argv[2:])
with tempfile.TemporaryDirectory() as folder:
    model = load(Path(os.environ["QDQ_ASSETS"]) / "models" / "yolox_nano.onnx")
    path = save_to_folder(model, Path(folder))
    types = {name: (model.types[name].dtype, model.types[name].shape) for name in model.inputs}
    outputs = {name for node in model.nodes for name in node.outputs}
    tensors = [n for n in (*model.inputs, *outputs) if n in model.types and model.types[n].dtype == "float"]
    tensors = [n for n in tensors if n not in model.constants]
    for count in counts:
        calibrate(path, tensors, random_feeds(types, count), method=method)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def peaks_gib(method: str, *counts: int) -> list[float]:
    """Return the peaks of a process that calibrates YOLOX-Nano on each number of images."""
    command = [sys.executable, "-c", PROGRAM, method, *map(str, counts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(peak) for peak in done.stdout.split()]


@pytest.mark.assets
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("QDQ_ASSETS"), reason="QDQ_ASSETS is not set")
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_peak_memory_is_independent_of_the_image_count(method):
    few, many = peaks_gib(method, 2, 10)
    assert many < few + 0.1
    # Activations grow with the area; the rest of the process, libraries and weights, does not.
    assert many * (640 / 416) ** 2 < 4.0
