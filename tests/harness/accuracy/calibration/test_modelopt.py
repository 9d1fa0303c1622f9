"""Our ranges beside those of ModelOpt, for the same model and the same data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization.calibrate import HistogramCollector

from harness.accuracy.calibration.histogram_calibrators import ActivationObserver
from harness.accuracy.calibration.ptq import modelopt_ptq
from harness.accuracy.calibration.ranges import Ranges, calibrate
from harness.graph.builder import GraphBuilder
from harness.random_inputs import random_feeds

QUIET_FIRST, LOUD_FIRST = (1, 2, 4), (4, 2, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = GraphBuilder("net")
    x = builder.op("Relu", builder.conv(builder.input("images", (1, 3, 16, 16)), 32, 3))
    x = builder.op("Add", x, builder.conv(builder.op("Relu", builder.conv(x, 32, 3)), 32, 3))
    x = builder.op("Flatten", builder.op("GlobalAveragePool", builder.op("Relu", x)))
    builder.output(builder.gemm(x, 10), name="logits")
    return builder.save(tmp_path_factory.mktemp("float") / "net.onnx")


def batches(gains: tuple[int, ...]) -> list[dict[str, Any]]:
    feeds = random_feeds({"images": ("float", (1, 3, 16, 16))}, len(gains), 0)
    return [{"images": feed["images"] * np.float32(gain)} for feed, gain in zip(feeds, gains, strict=True)]


def their_scales(model: Path, folder: Path, gains: tuple[int, ...], method: str) -> dict[str, float]:
    """ModelOpt's scale of each activation."""
    path = modelopt_ptq(model, folder / "q.onnx", batches(gains), dialect_name="tensorrt", method=method)
    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] not in constants]
    found = {node.input[0]: float(constants[node.input[1]]) for node in pairs}
    assert len(found) >= 4
    return found


def our_scales(ranges: Ranges) -> Mapping[str, float]:
    """INT8, symmetric."""
    return {name: max(-low, high) / 127 for name, (low, high) in ranges.items()}


@pytest.mark.parametrize("method", ["minmax", "max"])
def test_minmax_and_max_are_what_modelopt_finds(model: Path, tmp_path: Path, method: str) -> None:
    theirs = their_scales(model, tmp_path, QUIET_FIRST, method)
    ours = our_scales(calibrate(model, list(theirs), batches(QUIET_FIRST), method=method))
    assert ours == pytest.approx(theirs, rel=1e-6)


class Plain(HistogramCollector):  # type: ignore[misc]
    """ONNX Runtime's own histograms: 128 bins, counted in float32."""

    def collect(self, arrays: Mapping[str, Any]) -> None:
        for name, parts in arrays.items():
            for values in parts:
                self.collect_value({name: values})

    def ranges(self) -> dict[str, tuple[float, float]]:
        return {name: (float(low), float(high)) for name, (low, high, *_) in self.compute_entropy().items()}


@pytest.mark.slow
def test_entropy_is_what_modelopt_finds_with_the_histograms_that_it_has(model: Path, tmp_path: Path) -> None:
    """128 bins in float32 are the whole difference; ours are 511 in float64."""
    theirs = their_scales(model, tmp_path, QUIET_FIRST, "entropy")
    plain = Plain("entropy", symmetric=False, num_bins=128, num_quantized_bins=128, percentile=0, scenario="same")
    observer = ActivationObserver(model, tmp_path, list(theirs), plain)
    for batch in batches(QUIET_FIRST):
        observer.observe(batch)
    assert our_scales(plain.ranges()) == pytest.approx(theirs, rel=1e-6)
    ours = our_scales(calibrate(model, list(theirs), batches(QUIET_FIRST), method="entropy"))
    assert ours != pytest.approx(theirs, rel=0.01)


@pytest.mark.slow
def test_modelopts_entropy_is_minmax_where_the_first_batch_is_the_loudest(model: Path, tmp_path: Path) -> None:
    """128 bins for 128 levels leave one candidate, the whole range; so its entropy depends on the order of the data."""
    theirs = their_scales(model, tmp_path, LOUD_FIRST, "entropy")
    whole = our_scales(calibrate(model, list(theirs), batches(LOUD_FIRST)))
    assert whole == pytest.approx(theirs, rel=1e-6)
    ours = our_scales(calibrate(model, list(theirs), batches(LOUD_FIRST), method="entropy"))
    assert all(ours[name] < 0.9 * scale for name, scale in theirs.items())
