"""Scales and zero points in the written type: 0 is exact, nothing becomes infinite, and the range is covered."""

import ml_dtypes
import numpy as np
import pytest
from onnx_models import loaded

from harness.graph.builder import GraphBuilder
from harness.graph.quantize.scales import ActivationScales
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES, quantize_weight
from harness.graph.rules.dialects import BUILTIN_DIALECTS

MAX_STEPS = {"int8": 127, "uint8": 255, "float8_e4m3fn": 448, "float8_e5m2": 57344}


@pytest.fixture(scope="module", params=["float", "float16"])
def model(request):
    g = GraphBuilder("m", opset=19)
    x = g.op("Relu", g.input("x", (1, 2, 4, 4), request.param), outputs=["r"])[0]
    g.output(g.op("Conv", x, g.const(np.ones((2, 2, 1, 1), QUANTIZABLE_DTYPES[request.param]))), name="y")
    return loaded(g)


def bounds(kind: type) -> list[tuple[float, float]]:
    """Tiny, subnormal, huge, one-sided, constant and nearly one-sided ranges."""
    largest = float(ml_dtypes.finfo(kind).max)
    sizes = [0.0, 1e-45, 1e-10, 3e-7, 2e-6, 4.3e-5, 1e-3, 1.0, 6.0, 255.0, 6e4, largest]
    return [
        (float(kind(low)), float(kind(high)))
        for size in sizes
        for low, high in [
            (-size, size), (0, size), (-size, 0), (size, size), (-size, size / 3), (-size / 300, size), (-size, 1e-9)
        ]
    ]  # fmt: skip


@pytest.mark.parametrize("dialect", BUILTIN_DIALECTS.values(), ids=lambda d: d.name)
def test_zero_is_exact_and_the_range_is_covered(dialect, model):
    kind = QUANTIZABLE_DTYPES[model.types["x"].dtype]
    largest = float(ml_dtypes.finfo(kind).max)
    for low, high in bounds(kind):
        ranges = dict.fromkeys(("x", "r", "y"), (low, high))
        for tensor in ("x", "r"):
            for precision in sorted(dialect.precisions):
                found, zero = ActivationScales(model, dialect, ranges).scale_and_zero_point(tensor, precision)
                scale, steps = float(found), MAX_STEPS[zero.dtype.name]
                assert found.dtype == kind
                assert 0 < scale < np.inf
                if precision != "int8":
                    assert max(-low, high) * 0.989 <= scale * steps < largest * 1.0002, (low, high)
                    continue
                limits = np.iinfo(zero.dtype)
                lowest, highest = ((limit - int(zero)) * scale for limit in (limits.min, limits.max))
                slack = scale + 0.011 * largest * (max(-low, high) > 0.98 * largest)
                assert lowest <= min(low, 0) + slack, (low, high)
                assert highest >= max(high, 0) - slack, (low, high)
                stored = [np.clip(np.rint(each / scale) + int(zero), limits.min, limits.max) for each in (low, high)]
                assert np.isfinite([kind((each - int(zero)) * scale) for each in stored]).all(), (low, high)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_of_any_size_are_restored(kind, precision):
    for size in (3e-7, 2e-6, 4.3e-5, 1.0, 6e4, float(ml_dtypes.finfo(kind).max)):
        values = (np.linspace(-1, 1, 9) * size).astype(kind).reshape(1, 9)
        made = quantize_weight(values, 0, precision)
        restored = (made.values.astype(np.float32) * made.scale.astype(np.float32)).astype(kind).astype(np.float64)
        assert np.abs(restored - values.astype(np.float64)).max() <= max(float(made.scale[0]), 0.07 * size), size
