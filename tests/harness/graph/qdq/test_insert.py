"""Insertion: exactly the asked edges, valid models, close numbers, small files; also into a cast model."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import openvino as ov
import pytest
from checks_of import running
from fidelity_of import run_openvino
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import SATURATES, exact_int8
from onnx import TensorProto
from onnx_models import activation_ranges, by_name, loaded, normal, run_onnxruntime

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import CastInserter, Inserter
from harness.graph.qdq.qdq_graph import QDQGraph, diff_edges
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import ONNXRUNTIME, ONNXRUNTIME_7BIT, OPENVINO, OPENVINO_7BIT, TENSORRT, Dialect
from harness.runtimes.tensorrt.options import cast_model, dominant_float_type, read_structure
from search.space import Edge, Resolved, edges_digest

DIALECTS = (OPENVINO, OPENVINO_7BIT, ONNXRUNTIME, ONNXRUNTIME_7BIT, TENSORRT)
each_net = pytest.mark.parametrize("net", ["conv", "attention"])
each_dialect = by_name("dialect", DIALECTS)


def conv_net(opset: int = 19) -> GraphBuilder:
    g = GraphBuilder("conv_net", opset=opset, seed=3)
    x = g.input("x", (1, 3, 16, 16))
    x = g.op("Relu", g.conv(x, 16, 3, name="stem"), name="stem_relu")
    y = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], name="pool")
    y = g.op("Relu", g.conv(y, 16, 3, groups=-1, name="depthwise"))
    y = g.op("Add", g.conv(y, 16, 1, name="pointwise"), g.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]))
    up = g.op("Resize", y, "", g.const(np.array([1, 1, 2, 2], np.float32)), mode="nearest", name="up")
    y = g.op("Concat", up, x, axis=1, name="concat")
    y = g.op("Sigmoid", g.conv(y, 8, 3, stride=2, bias=False, name="tail"))
    y = g.op("ConvTranspose", y, g.const(normal(8, 6, 2, 2, seed=1) / 4))
    y = g.op("Flatten", g.op("GlobalAveragePool", y), name="flatten")
    g.output(g.gemm(y, 5, name="head"), name="logits")
    return g


def attention_net() -> GraphBuilder:
    g = GraphBuilder("attention_net", opset=19, seed=4)
    x = g.input("x", (1, 8, 32))
    h = g.layer_norm(x)
    k = g.op("Transpose", g.linear(h, 32, name="k"), perm=[0, 2, 1])
    a = g.op("Softmax", g.op("MatMul", g.linear(h, 32, name="q"), k, name="qk"), axis=-1)
    h = g.op("MatMul", a, g.linear(h, 32, name="v"), name="av")
    x = g.op("Add", x, g.linear(h, 32, name="proj"), name="residual")
    x = g.output(x, name="features")
    g.output(g.op("Mul", x, x, name="square"), name="energy")
    return g


@cache
def ready(net: str) -> tuple[Model, dict[str, tuple[float, float]]]:
    """A small model and the range of each of its tensors on four random inputs."""
    model = loaded({"conv": conv_net, "attention": attention_net}[net]().build(), net)
    return model, activation_ranges(model, [inputs(model, seed) for seed in range(4)])


def inputs(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=model.types[name].shape).astype(np.float32) for name in model.inputs}


def run_ort(proto: onnx.ModelProto | Path, model: Model, optimize: bool = True) -> list[np.ndarray]:
    return run_onnxruntime(proto, inputs(model), list(model.outputs), optimize=optimize)


def legal(model: Model, dialect: Dialect) -> list[Edge]:
    """Float inputs of the dialect's operators, and the outputs of the model."""
    edges = [
        Edge(tensor, node.name, slot)
        for node in model.nodes
        if node.op in dialect.operators
        for slot, tensor in enumerate(node.inputs[:2] if node.op in dialect.linear_ops else node.inputs)
        if tensor and model.types[tensor].dtype == "float" and not (node.op == "Resize" and slot)
    ]
    return edges + [Edge(name, "", 0) for name in model.outputs if model.types[name].dtype == "float"]


def everything(model: Model, dialect: Dialect, precision: str = "int8") -> Resolved:
    return tuple(sorted((edge, precision) for edge in legal(model, dialect)))


def edge(model: Model, consumer: str, slot: int = 0) -> tuple[Edge, str]:
    node = next(n for n in model.nodes if n.name == consumer)
    return Edge(node.inputs[slot], consumer, slot), "int8"


def both(model: Model, consumer: str) -> Resolved:
    """The two operands of a node."""
    return tuple(sorted([edge(model, consumer), edge(model, consumer, 1)]))


def constants(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}


def operand(proto: onnx.ModelProto, consumer: str, slot: int = 0) -> onnx.NodeProto:
    """The node in front of an input."""
    node = next(n for n in proto.graph.node if n.name == consumer)
    return next(n for n in proto.graph.node if node.input[slot] in n.output)


def grid_of(proto: onnx.ModelProto, consumer: str, slot: int = 0) -> tuple[float, int]:
    """Scale and zero point in front of an input."""
    _, scale, zero = operand(proto, consumer, slot).input
    return float(constants(proto)[scale]), int(constants(proto)[zero])


@by_name("dialect", [OPENVINO, ONNXRUNTIME, TENSORRT])
@each_net
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_subset_of_edges_is_inserted_and_runs(net, dialect, data):
    model, ranges = ready(net)
    choice = st.sampled_from(["", *sorted(dialect.precisions)])
    choices = {edge: data.draw(choice) for edge in legal(model, dialect)}
    asked = tuple(sorted((edge, precision) for edge, precision in choices.items() if precision))
    proto = Inserter(model, dialect, ranges).insert(asked)
    onnx.checker.check_model(proto, full_check=True)
    assert QDQGraph(proto).edges == dict(asked)
    assert [v.name for v in proto.graph.input] == list(model.inputs)
    assert [v.name for v in proto.graph.output] == list(model.outputs)
    # ONNX Runtime runs FP8 only without its optimizers.
    results = run_ort(proto, model, optimize=not any(precision.startswith("fp8") for _, precision in asked))
    assert all(np.isfinite(result).all() for result in results)


@each_dialect
@each_net
def test_full_int8_stays_close_to_float_on_both_runtimes(net, dialect, tmp_path):
    """Where integer kernels saturate with weights of 8 bits, as the file says it: in float arithmetic."""
    model, ranges = ready(net)
    path = Inserter(model, dialect, ranges).write(everything(model, dialect), tmp_path)
    expected = run_ort(model.proto, model)
    plain = run_ort(path, model, optimize=False)
    exact = not SATURATES or dialect.weight_limit < 127
    for results in (plain, run_ort(path, model), run_openvino(path, inputs(model))) if exact else (plain,):
        for got, want in zip(results, expected, strict=True):
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert 0 < error < 0.06


def test_no_edges_give_the_float_model():
    model, ranges = ready("conv")
    proto = Inserter(model, OPENVINO, ranges).insert(())
    assert proto.graph.node == model.proto.graph.node
    assert proto.graph.initializer == model.proto.graph.initializer
    assert proto.opset_import == model.proto.opset_import


def test_quantized_output_keeps_name_and_float_consumers():
    model, ranges = ready("attention")
    only_output = ((Edge("features", "", 0), "int8"),)
    proto = Inserter(model, OPENVINO, ranges).insert(only_output)
    assert [node.op_type for node in proto.graph.node if "features" in node.output] == ["DequantizeLinear"]
    assert operand(proto, "square").op_type == "Add"
    features, energy = run_ort(proto, model)
    exact_features, exact_energy = run_ort(model.proto, model)
    assert 0 < np.abs(features - exact_features).max() < 0.05
    np.testing.assert_allclose(energy, exact_energy, rtol=1e-5)


def test_scales_are_symmetric_or_affine_by_dialect():
    model, ranges = ready("conv")
    low, high = ranges["x"]
    top = ranges[edge(model, "pool")[0].tensor][1]
    affine = (pytest.approx((high - low) / 255), round(-low * 255 / (high - low)))

    def grids(dialect: Dialect) -> list[tuple[float, int]]:
        inserter = Inserter(model, dialect, ranges)
        return [grid_of(inserter.insert((edge(model, name),)), name) for name in ("stem", "pool")]

    assert grids(TENSORRT) == [(pytest.approx(max(-low, high) / 127), 0), (pytest.approx(top / 127), 0)]
    assert grids(ONNXRUNTIME) == grids(OPENVINO) == [affine, (pytest.approx(top / 255), 0)]


def test_openvino_matmul_scales_are_symmetric_for_signed_data():
    model, ranges = ready("attention")
    signed = edge(model, "q")
    proto = Inserter(model, OPENVINO, ranges).insert((signed, edge(model, "av")))
    amax = max(abs(bound) for bound in ranges[signed[0].tensor])
    assert grid_of(proto, "q") == (pytest.approx(amax / 127), 0)
    assert grid_of(proto, "av") == (pytest.approx(ranges["Softmax_out"][1] / 255), 0)  # never negative


def test_pools_with_omitted_outputs_have_separate_scales():
    g = GraphBuilder("pools", opset=19)
    small, large = (g.input(name, (1, 4, 8, 8)) for name in ("small", "large"))
    near, far = (g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]) for x in (small, large))
    g.output(g.op("Concat", near, g.input("second", (1, 4, 4, 4)), axis=1, name="concat"), name="joined")
    g.output(far, name="pooled")
    proto = g.build()
    for pool in (node for node in proto.graph.node if node.op_type == "MaxPool"):
        pool.output.append("")
    model = loaded(proto, "pools")
    ranges = {name: (-1.0, 1.0) for name in model.types} | {name: (-100.0, 100.0) for name in ("large", "pooled")}
    asked = both(model, "concat")
    proto = Inserter(model, TENSORRT, ranges).insert(asked)
    assert grid_of(proto, "concat", 0) == grid_of(proto, "concat", 1) == (pytest.approx(1 / 127), 0)


@pytest.mark.parametrize("none", [-np.inf, np.finfo(np.float32).min])
def test_unquantizable_constant_does_not_change_other_scales(none):
    """A Concat of it stays float; what it has in common with another Concat does not."""
    g = GraphBuilder("masked", opset=19)
    x, y = (g.input(name, (1, 4, 8)) for name in "xy")
    g.output(g.op("Concat", x, g.const(np.full((1, 4, 8), none, np.float32)), axis=1), name="hidden")
    g.output(g.op("Concat", x, y, axis=1, name="concat"), name="joined")
    model = loaded(g, "masked")
    asked = both(model, "concat")
    proto = Inserter(model, TENSORRT, {"x": (-1.0, 1.0), "y": (-2.0, 2.0), "joined": (-2.0, 2.0)}).insert(asked)
    assert grid_of(proto, "concat", 0) == grid_of(proto, "concat", 1) == (pytest.approx(2 / 127), 0)


@each_dialect
def test_biases_are_int32_by_dialect(dialect):
    model, ranges = ready("conv")
    asked = both(model, "stem")
    proto = Inserter(model, dialect, ranges).insert(asked)
    stem = next(n for n in proto.graph.node if n.name == "stem")
    bias = next((node for node in proto.graph.node if stem.input[2] in node.output), None)
    assert (bias is not None) == (dialect.bias == "int32")
    if bias is not None:
        values = constants(proto)
        stored, scale, _ = (values[name] for name in bias.input)
        assert stored.dtype == np.int32
        weight_scale = values[operand(proto, "stem", 1).input[1]]
        np.testing.assert_allclose(scale, grid_of(proto, "stem")[0] * weight_scale, rtol=1e-6)


def test_int32_bias_of_a_dead_channel_keeps_its_value():
    g = GraphBuilder("dead", opset=19)
    x = g.input("x", (1, 2, 4, 4))
    weight = np.array([1e-12, 1.0], np.float32).reshape(2, 1, 1, 1) * np.ones((2, 2, 1, 1), np.float32)
    bias = np.array([0.75, -0.5], np.float32)
    g.output(g.op("Conv", x, g.const(weight), g.const(bias), name="conv"), name="y")
    model = loaded(g, "dead")
    asked = both(model, "conv")
    proto = Inserter(model, ONNXRUNTIME, {"x": (-3.0, 3.0)}).insert(asked)
    got, want = run_ort(proto, model, optimize=False)[0], run_ort(model.proto, model)[0]
    np.testing.assert_allclose(got, want, atol=0.05)


@pytest.mark.parametrize("alpha", [0.5, -0.5])
@by_name("dialect", [pytest.param(ONNXRUNTIME, marks=exact_int8), ONNXRUNTIME_7BIT])
def test_onnx_runtime_gemm_with_alpha_adds_the_whole_bias(dialect, alpha):
    """Its QGemm multiplies the sum of product and bias by alpha, where a Gemm multiplies the product alone."""
    g = GraphBuilder("scaled", opset=19)
    weight, bias = np.random.default_rng(0).normal(size=(32, 16)), np.full(16, 8.0)
    parameters = [g.const(values.astype(np.float32)) for values in (weight, bias)]
    g.output(g.op("Gemm", g.input("x", (4, 32)), *parameters, alpha=alpha, name="gemm"), name="y")
    model = loaded(g, "scaled")
    proto = Inserter(model, dialect, {"x": (-4.0, 4.0), "y": (-8.0, 24.0)}).insert(everything(model, dialect))
    exact = run_ort(model.proto, model)[0]
    for optimize in (False, True):
        np.testing.assert_allclose(run_ort(proto, model, optimize)[0], exact, atol=0.5)


def product_net(rank: int = 2, bias: float = 0.5) -> Model:
    """MatMul by weights and Add, and a second MatMul that reads the sum."""
    rng = np.random.default_rng(0)
    g = GraphBuilder("product", opset=19)
    weight = g.const(rng.normal(size=(4,) * (rank - 2) + (32, 16)).astype(np.float32))
    product = g.op("MatMul", g.input("x", (4, 8, 32)), weight, name="product")
    shifted = g.op("Add", product, g.const(np.full(16, bias, np.float32)), name="shift")
    g.output(g.op("MatMul", shifted, g.const(rng.normal(size=(16, 4)).astype(np.float32)), name="tail"), name="y")
    return loaded(g, "product")


@by_name("dialect", [pytest.param(ONNXRUNTIME, marks=exact_int8), ONNXRUNTIME_7BIT])
def test_onnx_runtime_multiplies_and_adds_on_integers(dialect, tmp_path):
    """It makes a Gemm of MatMul and Add first, and runs that in float behind DequantizeLinear if its bias is float."""
    model = product_net()
    ranges = {name: (-12.0, 12.0) for name in model.types}
    asked = both(model, "product")
    proto = Inserter(model, dialect, ranges).insert(asked)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert "QGemm" in operators
    assert not {"Gemm", "DequantizeLinear"}.intersection(operators)
    as_written, exact = run_ort(proto, model, optimize=False)[0], run_ort(model.proto, model)[0]
    np.testing.assert_allclose(run_ort(proto, model)[0], as_written, atol=0.02)
    assert np.abs(as_written - exact).max() < 0.05 * np.abs(exact).max()


def test_matmul_bias_stays_float_without_integer_kernel():
    def stored(model: Model, edges: Resolved, dialect: Dialect = ONNXRUNTIME) -> list[str]:
        proto = Inserter(model, dialect, {name: (-4.0, 4.0) for name in model.types}).insert(edges)
        return [name for name, values in constants(proto).items() if values.dtype == np.int32 and name[-5:] != ".zero"]

    model = product_net()
    product = both(model, "product")
    assert stored(model, product)
    assert not stored(model, product, OPENVINO)
    assert not stored(model, tuple(sorted([*product, *both(model, "shift")]))), "the Add is quantized"
    for other in (product_net(rank=3), product_net(bias=np.inf)):
        assert not stored(other, both(other, "product"))


def test_candidates_are_small_and_share_their_weights(tmp_path):
    g = GraphBuilder("wide", opset=19)
    x = g.op("Relu", g.linear(g.input("x", (4, 256)), 512, name="up"))
    g.output(g.linear(x, 256, name="down"), name="y")
    g.output(g.op("MatMul", g.op("Cast", x, to=onnx.TensorProto.INT64), g.const(np.ones((512, 2), int))))  # no weights
    model = loaded(g, "wide")
    inserter = Inserter(model, OPENVINO, {name: (-4.0, 4.0) for name in model.types})
    half = both(model, "up")
    full = everything(model, OPENVINO)
    first = inserter.write(half, tmp_path)
    written = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.weights")}
    second = inserter.write(full, tmp_path, name="second")
    assert first.name == f"{edges_digest(half)}.onnx"
    assert second.name == "second.onnx"
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.weights")} == written
    assert len(written) == 2
    assert max(first.stat().st_size, second.stat().st_size) < 40_000
    for path, asked in ((first, half), (second, full)):
        proto = onnx.load(path)
        onnx.checker.check_model(str(path))
        assert QDQGraph(proto).edges == dict(asked)
        np.testing.assert_array_equal(run_ort(path, model)[0], run_ort(inserter.insert(asked), model)[0])
        assert np.isfinite(run_openvino(path, inputs(model))[0]).all()


@each_dialect
@each_net
def test_reused_inserter_equals_a_fresh_one(net, dialect):
    model, ranges = ready(net)
    warm, rng = Inserter(model, dialect, ranges), np.random.default_rng(0)
    offered = ["", *sorted(dialect.precisions)]
    for _ in range(12):
        choices = [(edge, offered[int(rng.integers(len(offered)))]) for edge in legal(model, dialect)]
        asked = tuple(sorted((edge, precision) for edge, precision in choices if precision))
        assert warm.insert(asked) == Inserter(model, dialect, ranges).insert(asked)


@pytest.mark.parametrize("other", ["int8", "fp8"])
def test_duplicate_edge_is_refused(other):
    model, ranges = ready("attention")
    for wanted, _ in (edge(model, "q"), edge(model, "q", 1), (Edge("features", "", 0), "int8")):
        with pytest.raises(UserError, match="attention: the placement contains one edge twice"):
            Inserter(model, OPENVINO, ranges).insert(((wanted, "int8"), (wanted, other)))


@pytest.mark.parametrize(
    ("bad", "precision", "message"),
    [
        (Edge("x", "missing", 0), "int8", "edge 'x' -> input 0 of 'missing' is not in this model"),
        (Edge("x", "pool", 0), "int8", "edge 'x' -> input 0 of 'pool' is not in this model"),
        (Edge("x", "stem", 7), "int8", "edge 'x' -> input 7 of 'stem' is not in this model"),
        (Edge("x", "", 0), "int8", "output 'x': no node of this model makes an output of that name"),
        (Edge("stem_bias", "stem", 2), "int8", "input 2 of 'stem' stays float: Conv takes its bias there"),
        (Edge("x", "stem", 0), "int4", "'int4' is not among those that openvino takes at opset 17: int8"),
        (Edge("x", "stem", 0), "fp8", "'fp8' is not among those that openvino takes at opset 17: int8"),
        (Edge("ids", "embed", 1), "int8", "'ids' -> input 1 of 'embed' cannot be quantized: its type is int64"),
    ],
)
def test_impossible_edges_and_precisions_are_refused(bad, precision, message):
    g = conv_net(opset=17)
    g.output(g.op("Gather", g.const(np.ones((10, 8), np.float32)), g.input("ids", (1, 4), "int64"), name="embed"))
    with pytest.raises(UserError, match=message):
        Inserter(loaded(g), OPENVINO, {}).insert(((bad, precision),))


def test_pairs_are_shared_and_counted_once_and_other_readers_stay_float():
    model, ranges = ready("attention")
    asked, inserter = tuple(sorted([edge(model, "q"), edge(model, "k")])), Inserter(model, OPENVINO, ranges)
    proto = inserter.insert(asked)
    reads = {node.name: node.input[0] for node in proto.graph.node}
    assert reads["q"] == reads["k"] != reads["v"] == asked[0][0].tensor
    assert [node.op_type for node in proto.graph.node].count("QuantizeLinear") == 1
    more = (edge(model, "q", 1), edge(model, "k", 1), (Edge("features", "", 0), "int8"))
    assert [inserter.count_pairs(each) for each in (asked, tuple(sorted([*asked, *more])))] == [1, 4]
    conv, ranges = ready("conv")
    assert Inserter(conv, ONNXRUNTIME, ranges).count_pairs(both(conv, "stem")) == 2


def test_exported_model_is_a_single_file(tmp_path):
    model, ranges = ready("conv")
    asked = everything(model, OPENVINO)
    path = Inserter(model, OPENVINO, ranges).export(asked, tmp_path / "out" / "model.onnx")
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]
    assert diff_edges(asked, onnx.load(path)) == ((), ())
    assert load(path).outputs == model.outputs


@pytest.mark.parametrize(("data", "weight"), [(1e-3, 1.0), (1.0, 1e-3)])
def test_half_precision_scales_may_be_subnormal(data, weight, tmp_path):
    """Below 6e-5 float16 has fewer digits, but more than 8 bits need; runtimes do not take such a scale for 0."""
    rng = np.random.default_rng(0)
    g = GraphBuilder("small", opset=19)
    x = g.input("x", (1, 4, 32), dtype="float16")
    values = rng.uniform(-weight, weight, (32, 8)).astype(np.float16)
    g.output(g.op("MatMul", x, g.const(values), name="mm"), name="y")
    model = loaded(g, "small")
    asked = both(model, "mm")
    path = Inserter(model, OPENVINO_7BIT, {"x": (-data, data)}).export(asked, tmp_path / "small.onnx")
    scales = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if t.name.endswith(".scale")]
    assert 0 < min(float(scale.min()) for scale in scales) < float(np.finfo(np.float16).smallest_normal)
    feeds = {"x": rng.uniform(-data, data, (1, 4, 32)).astype(np.float16)}
    wanted = feeds["x"].astype(np.float32) @ values.astype(np.float32)
    engine = ov.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
    plain = run_onnxruntime(path, feeds, ["y"], optimize=False)[0]
    for got in (plain, engine(feeds)["y"]):
        np.testing.assert_allclose(got, wanted, atol=0.02 * float(np.abs(wanted).max()))


def test_a_missing_or_infinite_range_names_its_tensor():
    model, ranges = ready("conv")
    missing = {name: bounds for name, bounds in ranges.items() if name != "x"}
    with pytest.raises(UserError, match="conv: no range is known for tensor 'x'; calibrate the model again"):
        Inserter(model, OPENVINO, missing).insert((edge(model, "stem"),))
    with pytest.raises(UserError, match=r"the range of tensor 'x' is \(-inf, 1.0\), not finite"):
        Inserter(model, OPENVINO, ranges | {"x": (-np.inf, 1.0)}).insert((edge(model, "stem"),))


def test_a_model_with_inserted_pairs_is_refused():
    model, ranges = ready("conv")
    quantized = loaded(Inserter(model, OPENVINO, ranges).insert((edge(model, "stem"),)), "q")
    with pytest.raises(UserError, match=r"q: tensor 'x@qdq\.int8\.q' shows that Q/DQ pairs are already inserted"):
        Inserter(quantized, OPENVINO, ranges)


FEEDS = {"x": normal(1, 3, 8, 8)}


def net(path: Path) -> Model:
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    one = builder.op("Relu", builder.conv(x, 4, 3, pad=1))
    two = builder.conv(x, 4, 1)
    builder.output(builder.conv(builder.op("Add", one, two), 2, 1), name="y")
    return load(builder.save(path), min_opset=19)


def answer(path: Path) -> np.ndarray:
    with running(path, path.parent) as infer:
        return infer(FEEDS)["y"]


@pytest.mark.parametrize(("precision", "kind"), [("f16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_placement_maps_to_the_cast_model(precision, kind, tmp_path):
    model = net(tmp_path / "net.onnx")
    space = build_space(model, TENSORRT)
    resolved = space.resolve(space.quantize_all())
    ranges = {edge.tensor: (-4.0, 4.0) for d in space.dimensions for edge in d.edges}
    cast = load(cast_model(tmp_path / "net.onnx", precision, tmp_path), min_opset=19)
    plain, inserter = Inserter(model, TENSORRT, ranges), CastInserter(cast, TENSORRT, ranges, model)
    path = inserter.export(resolved, tmp_path / "cast.onnx")
    proto = onnx.load(path)
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    pairs = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {kinds[node.input[1]] for node in pairs} == {kind}
    assert import_placement(path, model) == dict(resolved)
    assert inserter.count_pairs(resolved) == plain.count_pairs(resolved)
    assert inserter.write(resolved, tmp_path / "out").name == f"{edges_digest(resolved)}.onnx"
    # All its weights are INT8, and it is not cast again.
    assert dominant_float_type(read_structure(path)) == precision
    assert cast_model(path, precision, tmp_path / "again") == path
    if precision == "f16":  # ONNX Runtime's CPU runs no BF16
        expected = answer(plain.export(resolved, tmp_path / "plain.onnx"))
        np.testing.assert_allclose(answer(path), expected, atol=0.1 * np.abs(expected).max())


def test_a_node_that_casting_took_away_is_named(tmp_path):
    model = net(tmp_path / "net.onnx")
    kept = loaded(model.proto, "net")
    with pytest.raises(UserError, match=r"net: the cast removed node 'gone'; use precision: f32"):
        CastInserter(kept, TENSORRT, {}, model).map_edges(((Edge("x", "gone", 0), "int8"),))


def test_cast_model_is_cached(tmp_path, monkeypatch):
    net(tmp_path / "net.onnx")
    first = cast_model(tmp_path / "net.onnx", "f16", tmp_path / "cast")
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setattr("harness.runtimes.tensorrt.options.call_in_helper_process", None)
    assert cast_model(tmp_path / "net.onnx", "f16", tmp_path / "cast") == first
