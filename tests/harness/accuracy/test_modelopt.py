"""Our ranges compared with those of ModelOpt, for the same model and data."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization.calibrate import HistogramCollector

from harness.accuracy.calibration.histogram_calibrators import ActivationObserver
from harness.accuracy.calibration.range_estimators import Ranges
from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.tools.ptq import quantize
from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder

QUIET_FIRST, LOUD_FIRST = (1, 2, 4), (4, 2, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    builder = GraphBuilder("net")
    x = builder.op("Relu", builder.conv(builder.input("images", (1, 3, 16, 16)), 32, 3))
    x = builder.op("Add", x, builder.conv(builder.op("Relu", builder.conv(x, 32, 3)), 32, 3))
    x = builder.op("Flatten", builder.op("GlobalAveragePool", builder.op("Relu", x)))
    builder.output(builder.gemm(x, 10), name="logits")
    return builder.save(tmp_path_factory.mktemp("float") / "net.onnx")


def batches(gains: tuple[int, ...]) -> list[dict[str, Any]]:
    feeds = random_feeds({"images": ("float", (1, 3, 16, 16))}, len(gains), 0)
    return [{"images": feed["images"] * np.float32(gain)} for feed, gain in zip(feeds, gains, strict=True)]


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    """ModelOpt's scale of each activation, by method and order of the data."""
    folder = tmp_path_factory.mktemp("theirs")
    cases = [*product(("minmax", "max", "entropy"), (QUIET_FIRST,)), ("entropy", LOUD_FIRST)]
    found = {}
    for method, gains in cases:
        path = folder / "q.onnx"
        quantize("modelopt_ptq", model, path, batches(gains), dialect_name="tensorrt", method=method)
        found[method, gains] = scales(path)
    return found


def scales(path: Path) -> dict[str, float]:
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
def test_minmax_and_max_equal_modelopts_ranges(model, theirs, method):
    found = theirs[method, QUIET_FIRST]
    ours = our_scales(calibrate(model, list(found), batches(QUIET_FIRST), method=method))
    assert ours == pytest.approx(found, rel=1e-6)


class Plain(HistogramCollector):  # type: ignore[misc]
    """ONNX Runtime's own histograms: 128 bins, counted in float32."""

    def collect(self, arrays: Mapping[str, Any]) -> None:
        for name, parts in arrays.items():
            for values in parts:
                self.collect_value({name: values})

    def ranges(self) -> dict[str, tuple[float, float]]:
        return {name: (float(low), float(high)) for name, (low, high, *_) in self.compute_entropy().items()}


@pytest.mark.slow
def test_entropy_equals_modelopts_with_its_histogram_bins(model, theirs, tmp_path):
    """128 bins in float32 are the whole difference; ours are 511 in float64."""
    found = theirs["entropy", QUIET_FIRST]
    plain = Plain("entropy", symmetric=False, num_bins=128, num_quantized_bins=128, percentile=0, scenario="same")
    observer = ActivationObserver(model, tmp_path, list(found), plain)
    for batch in batches(QUIET_FIRST):
        observer.observe(batch)
    assert our_scales(plain.ranges()) == pytest.approx(found, rel=1e-6)
    ours = our_scales(calibrate(model, list(found), batches(QUIET_FIRST), method="entropy"))
    assert ours != pytest.approx(found, rel=0.01)


@pytest.mark.slow
def test_modelopts_entropy_is_minmax_if_first_batch_is_largest(model, theirs):
    """128 bins for 128 levels leave one candidate, the whole range; so its entropy depends on the order of the data."""
    found = theirs["entropy", LOUD_FIRST]
    whole = our_scales(calibrate(model, list(found), batches(LOUD_FIRST)))
    assert whole == pytest.approx(found, rel=1e-6)
    ours = our_scales(calibrate(model, list(found), batches(LOUD_FIRST), method="entropy"))
    assert all(ours[name] < 0.9 * scale for name, scale in found.items())
