"""Inputs and weights that must not be rounded, or that a runtime computes wrongly, stay float."""

import warnings

import numpy as np
import onnx
import pytest
from fidelity_of import write_quantized
from onnx_models import by_name, everywhere, loaded, normal, run_onnxruntime

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT, Dialect
from harness.graph.rules.points import float_inputs_with_rule

DIALECTS = [TENSORRT, OPENVINO, ONNXRUNTIME]


def finish(g: GraphBuilder, output: str) -> Model:
    g.output(output)
    return loaded(g)


def quantized(model: Model, dialect: Dialect) -> set[tuple[str, int]]:
    """Operator and input of every edge that may be quantized."""
    ops = {node.name: node.op for node in model.nodes} | {"": "output"}
    return {(ops[edge.consumer], edge.slot) for d in build_space(model, dialect).dimensions for edge in d.edges}


@by_name("dialect", DIALECTS)
def test_resize_scales_and_their_sources_stay_float(dialect):
    g = GraphBuilder("m")
    x, scales = g.op("Tanh", g.input("x", (1, 2, 4, 4))), g.input("s", (2,))
    scales = g.op("Concat", g.const(np.ones(2, np.float32)), g.op("Mul", scales, scales), axis=0)
    model = finish(g, g.op("Resize", x, "", scales, mode="nearest"))
    assert quantized(model, dialect) - {("output", 0)} == {("Tanh", 0), ("Resize", 0)}


@by_name("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("Clip", [(), ()]), ("PRelu", [(3, 1, 1)]), ("Pow", [(4, 4)]), ("LayerNormalization", [(4,), (4,)]),
        ("InstanceNormalization", [(3,), (3,)]),
    ],
)  # fmt: skip
def test_computed_operator_parameters_stay_float(op, shapes, dialect):
    g = GraphBuilder("m")
    x = g.op("Exp", g.input("x", (1, 3, 4, 4)))
    model = finish(g, g.op(op, x, *(g.input(f"p{n}", shape) for n, shape in enumerate(shapes))))
    assert {slot for reader, slot in quantized(model, dialect) if reader == op} <= {0}


def square(g):
    return g.op("Mul", "x", "x")


def clipped(g, low=1e-6):
    return g.op("Clip", square(g), g.const(low))


def scattered(g):
    last = g.const(np.zeros((4, 1), int)), g.const(np.ones((4, 1), np.float32))
    return g.op("Log", g.op("ScatterElements", clipped(g), *last, axis=1))


def normalized(g):
    mean = g.op("ReduceMean", square(g), axes=[1])
    return g.op("Div", "x", g.op("Sqrt", g.op("Add", mean, g.const(1e-12))))


POLES = {
    "Div": lambda g: g.op("Div", "x", clipped(g)),
    "Log": lambda g: g.op("Log", clipped(g)),
    "Reciprocal": lambda g: g.op("Reciprocal", clipped(g)),
    "Pow": lambda g: g.op("Pow", clipped(g), g.const(-0.5)),
    "ScatterElements": scattered,
    "TopK": lambda g: g.op("Log", g.op("TopK", g.op("Dropout", clipped(g)), g.const([64]), outputs=2)[0]),
    "large bound": lambda g: g.op("Log", clipped(g, 1e-2)),
    "movers": lambda g: g.op("Log", g.op("Reshape", g.op("Transpose", clipped(g)), g.const([256]))),
    "normalization": normalized,
    "one minus": lambda g: g.op("Log", g.op("Sub", g.const(1.0), g.op("Sigmoid", "x"))),
}


@by_name("dialect", [OPENVINO, ONNXRUNTIME])
@pytest.mark.parametrize("kind", POLES)
def test_quantization_causes_no_nan_near_poles(kind, dialect, tmp_path):
    g = GraphBuilder("m")
    g.input("x", (4, 64))
    model = finish(g, POLES[kind](g))
    feed = {"x": normal(4, 64)}
    (found,) = run_onnxruntime(write_quantized(model, dialect, [feed], tmp_path), feed)
    assert np.isfinite(found).all()
    assert not {("Log", 0), ("Reciprocal", 0), ("Div", 1), ("Sqrt", 0), ("Clip", 0)} & quantized(model, dialect)


@pytest.mark.parametrize("guard", [1e-12, 1e-5, 1e-3, 0.1])
def test_inputs_before_a_guarded_root_have_points(guard):
    """A value added to a variance guards the denominator if its root is large: that of 0.1, but not that of 1e-3."""
    g = GraphBuilder("m")
    x = g.input("x", (4, 64))
    centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[1]))
    variance = g.op("ReduceMean", g.op("Mul", centred, centred), axes=[1])
    model = finish(g, g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, g.const(np.float32(guard))))))
    before_the_root = {("Mul", 0), ("Mul", 1), ("Add", 0)} if guard == 0.1 else set()
    assert quantized(model, OPENVINO) == {("ReduceMean", 0), ("Sub", 0), ("Sub", 1), ("Div", 0), *before_the_root}


RANGES = {name: (-1.0, 1.0) for name in ("x", "y", "z")}


def two_products(first: np.ndarray, bias: np.ndarray) -> Model:
    """Two layers, the first of which has the weight and bias given."""
    g = GraphBuilder("m")
    x = g.input("x", (4, 8))
    y = g.op("Gemm", x, g.const(first, "first"), g.const(bias, "bias"), outputs="y")
    g.output(
        g.op("Gemm", y, g.const(np.eye(8, dtype=np.float32), "second"), g.const(np.ones(8, np.float32)), outputs=["z"])[
            0
        ]
    )
    return loaded(g)


def weight(value: float, shape: tuple[int, ...] = (8, 8)) -> np.ndarray:
    values = np.ones(shape, np.float32)
    values[0] = value
    return values


def quantized_weights(model: Model, dialect: Dialect) -> set[str]:
    return {edge.tensor for dimension in build_space(model, dialect).dimensions for edge in dimension.edges}


@by_name("dialect", DIALECTS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nonfinite_weight_keeps_its_operator_float(value, dialect, caplog, tmp_path):
    model = two_products(weight(value), np.ones(8, np.float32))
    assert quantized_weights(model, dialect) - {"z"} == {"y", "second"}
    assert "first" in caplog.text
    assert "second" not in caplog.text
    assert {(edge.tensor, rule.name) for edge, rule in float_inputs_with_rule(model, dialect)} >= {
        ("x", "finite"),
        ("first", "finite"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Inserter(model, dialect, RANGES).write(everywhere(model, dialect), tmp_path)
    onnx.checker.check_model(path)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_nonfinite_bias_keeps_operator_float_if_stored_as_int32(value):
    model = two_products(weight(1.0), weight(value, (8,)))
    assert "first" not in quantized_weights(model, ONNXRUNTIME)
    assert quantized_weights(model, OPENVINO) == {"x", "first", "y", "second"}


@pytest.mark.parametrize("value", [np.inf, np.nan])
@by_name("dialect", DIALECTS)
def test_nonfinite_conv_and_left_matmul_weights_stay_float(value, dialect):
    g = GraphBuilder("m")
    x = g.input("x", (1, 8, 8, 8))
    y = g.op("Conv", x, g.const(weight(value, (8, 8, 1, 1)), "filter"))
    g.output(g.op("MatMul", g.const(weight(value), "left"), g.op("Tanh", y)))
    model = loaded(g)
    assert quantized_weights(model, dialect).isdisjoint({"x", "filter", "left"})


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_nonfinite_float16_weight_stays_float(value):
    g = GraphBuilder("m")
    damaged = weight(value).astype(np.float16)
    g.output(g.op("MatMul", g.input("x", (2, 4, 8), "float16"), g.const(damaged)))
    assert quantized_weights(loaded(g), OPENVINO) == set()


def test_placement_with_a_nonfinite_weight_is_refused():
    model = two_products(weight(np.nan), np.ones(8, np.float32))
    with pytest.raises(UserError, match="first"):
        Inserter(model, OPENVINO, RANGES).count_pairs(
            everywhere(two_products(weight(1.0), np.ones(8, np.float32)), OPENVINO)
        )
