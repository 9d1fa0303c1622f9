"""Q/DQ files of other tools, in all forms of scales, zero points and weights; and the number of pairs of a file."""

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import by_name, everywhere, loaded, new_node, normal

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.model import Model
from harness.graph.protos import copy_message, replace_field
from harness.graph.qdq.file_checks import find_qdq_problems
from harness.graph.qdq.import_placement import (
    ImportDifference,
    ImportedPlacement,
    find_differences,
    import_placement,
    read_placement,
)
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import QDQ_OPS, QDQGraph, count_pairs, diff_edges
from harness.graph.qdq.space import build_space
from harness.graph.quantize.numeric_choices import NumericChoices, channel_name
from harness.graph.rules.dialects import ONNXRUNTIME, OPENVINO, TENSORRT, Dialect
from search.space import Edge

RANGE = (-1.0, 1.55)
DIALECTS = [OPENVINO, ONNXRUNTIME, TENSORRT]


@cache
def net() -> Model:
    """Convolutions, one of them depthwise, a residual connection, projections of one tensor and a classifier."""
    g = GraphBuilder("net", opset=21, seed=3)
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 8, 3, name="stem"), name="relu")
    y = g.conv(x, 8, 3, groups=-1, name="depthwise")
    y = g.op("Add", g.op("HardSigmoid", y, name="gate"), x, name="residual")
    rows = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 3, 1], name="nhwc"), g.const([1, 64, 8]), name="rows")
    rng = np.random.default_rng(5)
    query, key, value = (
        g.op("Add", g.op("MatMul", rows, g.const(rng.normal(size=(8, 8)).astype("f4")), name=name),
             g.const(rng.normal(size=8).astype("f4")), name=f"{name}_bias")
        for name in ("query", "key", "value")
    )  # fmt: skip
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 2, 1], name="turn"), name="scores")
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1, name="softmax"), value, name="mix")
    flat = g.op("ReduceMean", mixed, g.const([1]), keepdims=0, name="mean")
    g.output(g.gemm(g.gemm(flat, 16, name="head"), 4, name="logits"), name="y")
    return loaded(g, "net")


class Foreign:
    """Q/DQ model in a form that can be changed: nodes, and constants by name."""

    def __init__(self, proto: onnx.ModelProto, rng: np.random.Generator) -> None:
        self.proto, self.rng = proto, rng
        self.nodes = list(proto.graph.node)
        self.constants: dict[str, np.ndarray] = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer
        }
        self.functions: list[onnx.FunctionProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.count = 0

    def new(self) -> str:
        self.count += 1
        return f"new_{self.count}"

    def add(self, op: str, *inputs: str, before: onnx.NodeProto, **attributes: Any) -> str:
        made = helper.make_node(op, inputs, [self.new()], name=self.new(), **attributes)
        self.nodes.insert(next(place for place, node in enumerate(self.nodes) if node is before), made)
        return made.output[0]

    def pairs(self, op: str) -> list[onnx.NodeProto]:
        return [node for node in self.nodes if node.op_type == op]

    def reader(self, name: str, slot: int) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        """A node by name, and the DequantizeLinear in front of its input."""
        node = next(node for node in self.nodes if node.name == name)
        return node, next(pair for pair in self.pairs("DequantizeLinear") if node.input[slot] in pair.output)

    def build(self, *, rename: bool = True) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "theirs", [*self.proto.graph.input, *self.inputs], list(self.proto.graph.output),
            [numpy_helper.from_array(np.asarray(value), name) for name, value in self.constants.items()],
        )  # fmt: skip
        domains = {node.domain for node in self.nodes} | {function.domain for function in self.functions} | {""}
        made = helper.make_model(
            graph, functions=self.functions, ir_version=10,
            opset_imports=[helper.make_opsetid(each, 1 if each else 21) for each in sorted(domains)],
        )  # fmt: skip
        return renamed(made) if rename else made


def renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """With other names of nodes and tensors, so that nothing shows who wrote the file; inputs and outputs keep them."""
    kept = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if not name or name in kept else names.setdefault(name, f"t{len(names)}")

    for node in proto.graph.node:
        node.name = f"n {new(node.name)}"
        for field in (node.input, node.output):
            field[:] = [new(name) for name in field]
    for tensor in proto.graph.initializer:
        tensor.name = new(tensor.name)
    onnx.checker.check_model(proto)
    return proto


def through_cast(f: Foreign, node: onnx.NodeProto, slot: int) -> None:
    values = f.constants[node.input[slot]]
    wide = {"f": (np.float16, ml_dtypes.bfloat16, np.float64), "i": (np.int32, np.int16), "u": (np.int32, np.uint16)}
    kinds = wide.get(values.dtype.kind, (np.float32,))
    name = f.new()
    f.constants[name] = values.astype(kinds[f.rng.integers(len(kinds))])
    node.input[slot] = f.add("Cast", name, before=node, to=helper.np_dtype_to_tensor_dtype(values.dtype))


def through_identity(f: Foreign, node: onnx.NodeProto, slot: int) -> None:
    node.input[slot] = f.add("Identity", f.add("Identity", node.input[slot], before=node), before=node)


def through_constant(f: Foreign, node: onnx.NodeProto, slot: int) -> None:
    value = numpy_helper.from_array(f.constants[node.input[slot]])
    node.input[slot] = f.add("Constant", before=node, value=value)


def through_shape(f: Foreign, node: onnx.NodeProto, slot: int) -> None:
    values, names = f.constants[node.input[slot]], (f.new(), f.new())
    f.constants |= {names[0]: values.reshape(1, -1), names[1]: np.array(values.shape, np.int64)}
    node.input[slot] = f.add("Reshape", *names, before=node)


def through_product(f: Foreign, node: onnx.NodeProto, slot: int) -> None:
    values, names = f.constants[node.input[slot]], (f.new(), f.new())
    if values.dtype.kind == "f":
        f.constants |= {names[0]: values * values.dtype.type(4), names[1]: values.dtype.type(4)}
        node.input[slot] = f.add("Div", *names, before=node)


CONSTANT_FORMS = [through_cast, through_identity, through_constant, through_shape, through_product]


def computed_constants(f: Foreign) -> None:
    for node in [node for node in f.nodes if node.op_type in QDQ_OPS]:
        for slot, name in enumerate(node.input):
            if name in f.constants and f.rng.random() < 0.4:
                CONSTANT_FORMS[f.rng.integers(len(CONSTANT_FORMS))](f, node, slot)


def float_weights(f: Foreign) -> None:
    """ModelOpt and PyTorch: float weights with a QuantizeLinear of their own."""
    for node in f.pairs("DequantizeLinear"):
        stored = f.constants.get(node.input[0])
        if stored is not None and stored.dtype != np.int32:
            scale, axis = f.constants[node.input[1]], helper.get_node_attr_value(node, "axis") if node.attribute else 1
            shape = [-1 if place == axis else 1 for place in range(stored.ndim)] if scale.ndim else []
            name = f.new()
            f.constants[name] = (stored.astype("f4") * scale.reshape(shape)).astype("f4")
            node.input[0] = f.add("QuantizeLinear", name, *node.input[1:], before=node, axis=axis)


def transposed_weights(f: Foreign) -> None:
    """PT2E and exports of Gemm as MatMul: matrices stored as [N, K]."""
    for node in f.pairs("DequantizeLinear"):
        stored = f.constants.get(node.input[0])
        readers = [each for each in f.nodes if node.output[0] in each.input]
        if stored is not None and stored.ndim == 2 and {each.op_type for each in readers} <= {"MatMul", "Gemm"}:
            name, turned = f.new(), f.new()
            if f.rng.random() < 0.5:  # in front of the DequantizeLinear
                f.constants[name] = np.ascontiguousarray(stored.T)
                node.input[0] = f.add("Transpose", name, before=node, perm=[1, 0])
                continue
            f.constants[name], node.input[0] = np.ascontiguousarray(stored.T), name
            if f.constants[node.input[1]].ndim:
                axis = 1 - helper.get_node_attr_value(node, "axis")
                del node.attribute[:]
                node.attribute.append(helper.make_attribute("axis", axis))
            place = next(place for place, each in enumerate(f.nodes) if each is node)
            f.nodes.insert(
                place + 1, helper.make_node("Transpose", [node.output[0]], [turned], name=turned, perm=[1, 0])
            )
            for each in readers:
                each.input[:] = [turned if old == node.output[0] else old for old in each.input]


def gemm_as_matmul(f: Foreign) -> None:
    for node in f.pairs("Gemm"):
        product = f.add("MatMul", *node.input[:2], before=node)
        node.op_type, node.input[:] = "Add", [product, node.input[2]]
        del node.attribute[:]


def absorbed_relu(f: Foreign) -> None:
    """quantize_static: a pair with zero point 0 computes the Relu in front of it."""
    for node in f.pairs("Relu"):
        if node.input[0] not in {pair.output[0] for pair in f.pairs("DequantizeLinear")}:
            f.nodes.remove(node)
            for reader in f.nodes:
                reader.input[:] = [node.input[0] if name == node.output[0] else name for name in reader.input]


def casts_behind(f: Foreign) -> None:
    for node in f.pairs("DequantizeLinear"):
        inner, half = f.new(), f.new()
        place = next(place for place, each in enumerate(f.nodes) if each is node) + 1
        f.nodes[place:place] = [
            new_node("Identity", [inner], half),
            helper.make_node("Cast", [half], [node.output[0]], name=f.new(), to=TensorProto.FLOAT),
        ]
        node.output[0] = inner


def microsoft_domain(f: Foreign) -> None:
    for node in f.nodes:
        if node.op_type in QDQ_OPS:
            node.domain = "com.microsoft"


def local_functions(f: Foreign) -> None:
    """Each pair on an activation is a call of a function."""
    body = [
        new_node("QuantizeLinear", ["x", "s", "z"], "q"),
        new_node("DequantizeLinear", ["q", "s", "z"], "y"),
    ]
    opsets = [helper.make_opsetid("", 21)]
    f.functions.append(helper.make_function("tool", "FakeQuantize", ["x", "s", "z"], ["y"], body, opsets))
    for quantize in f.pairs("QuantizeLinear"):
        (dequantize,) = (node for node in f.nodes if quantize.output[0] in node.input)
        if not quantize.attribute:
            quantize.op_type, quantize.domain, quantize.output[0] = "FakeQuantize", "tool", dequantize.output[0]
            f.nodes = [node for node in f.nodes if node is not dequantize]


def moved_transposes(f: Foreign) -> None:
    """The DequantizeLinear behind an operator that only moves values, as optimizers write it."""
    for move in [node for node in f.nodes if node.op_type in ("Transpose", "Reshape")]:
        pair = next((node for node in f.pairs("DequantizeLinear") if move.input[0] in node.output), None)
        readers = [node for node in f.nodes if pair is not None and pair.output[0] in node.input]
        if pair is not None and readers == [move] and pair.input[0] not in f.constants and not pair.attribute:
            move.input[0], after = pair.input[0], move.output[0]
            move.output[0] = pair.input[0] = f.new()
            pair.output[0] = after
            f.nodes.remove(pair)
            f.nodes.insert(f.nodes.index(move) + 1, pair)


def listed_initializers(f: Foreign) -> None:
    f.inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in f.constants.items()
    ]


def sixteen_bits(f: Foreign, share: float = 0.3) -> None:
    for quantize in f.pairs("QuantizeLinear"):
        (dequantize,) = (node for node in f.nodes if quantize.output[0] in node.input)
        zero = f.constants[quantize.input[2]]
        if not zero.ndim and f.rng.random() < share:
            names = f.new(), f.new()
            f.constants[names[0]] = f.constants[quantize.input[1]] / np.float32(257)
            f.constants[names[1]] = (zero.astype(int) * 257).astype({"i": np.int16, "u": np.uint16}[zero.dtype.kind])
            for node in (quantize, dequantize):
                node.input[1:] = names


FORMS: list[Callable[[Foreign], None]] = [
    gemm_as_matmul, absorbed_relu, transposed_weights, float_weights, computed_constants, casts_behind,
]  # fmt: skip
LAST_FORMS: list[Callable[[Foreign], None]] = [microsoft_domain, local_functions, listed_initializers]


def foreign(dialect: Dialect, seed: int, share: float = 0.5) -> tuple[Foreign, dict[Edge, str]]:
    """A random placement of a dialect with this share of quantized points, and its edges."""
    model, rng = net(), np.random.default_rng(seed)
    space = build_space(model, dialect)
    asked = space.resolve(space.quantize_dimensions(np.flatnonzero(rng.random(len(space)) < share).tolist()))
    made = Inserter(model, dialect, dict.fromkeys(model.types, RANGE)).insert(asked)
    return Foreign(made, rng), dict(asked)


def compared(proto: onnx.ModelProto, dialect: Dialect) -> tuple[ImportedPlacement, dict[Edge, ImportDifference]]:
    """A file as it is read, and the differences of its nearest placement by edge."""
    theirs, space = read_placement(proto, net()), build_space(net(), dialect)
    ranges = dict.fromkeys(net().types, RANGE) | theirs.ranges
    resolved = space.resolve(space.nearest(theirs.edges))
    written = QDQGraph(Inserter(net(), dialect, ranges).insert(resolved))
    found = find_differences(theirs, space, dialect, resolved, written, ranges=True)
    assert {edge for edge, _ in theirs.edges.items() - dict(resolved).items()} <= {d.edge for d in found}
    assert all(difference.reason for difference in found)
    return theirs, {difference.edge: difference for difference in found}


@pytest.mark.parametrize("seed", range(8))
@by_name("dialect", DIALECTS)
def test_placement_is_read_in_any_form(dialect, seed):
    f, asked = foreign(dialect, seed)
    for form in FORMS:
        if f.rng.random() < 0.6:
            form(f)
    LAST_FORMS[seed % len(LAST_FORMS)](f)
    theirs, differences = compared(f.build(), dialect)
    assert theirs.edges.items() >= asked.items()
    assert not theirs.unmatched
    assert {name: pytest.approx(pair, rel=0.01) for name, pair in theirs.ranges.items()} == theirs.ranges
    assert not {d.kind for d in differences.values()} & {"different", "not expressed"}


@pytest.mark.parametrize("seed", range(6))
def test_edges_behind_moved_operators_are_read_or_listed(seed):
    f, asked = foreign(OPENVINO, seed)
    sixteen_bits(f)
    moved_transposes(f)
    computed_constants(f)
    theirs, _ = compared(f.build(), OPENVINO)
    assert not theirs.unmatched
    assert theirs.edges.keys() >= asked.keys()


def test_nodes_in_any_order_are_read():
    f, asked = foreign(ONNXRUNTIME, 0)
    proto = f.build(rename=False)
    nodes = [proto.graph.node[place] for place in f.rng.permutation(len(proto.graph.node))]
    replace_field(proto.graph.node, [copy_message(node) for node in nodes])
    assert import_placement(proto, net()) == asked


def test_counted_names_of_other_nodes_do_not_mislead():
    """Exporters count operators, and those of a Q/DQ model otherwise: "MatMul_7" is another node there."""
    f, asked = foreign(OPENVINO, 1, share=1.0)
    named = {node.name: node for node in f.nodes}
    for first, second in (("stem", "depthwise"), ("scores", "mix"), ("head", "logits")):
        named[first].name, named[second].name = second, first
    assert import_placement(f.build(rename=False), net()) == asked


def test_pairs_in_front_of_moving_operators_quantize_the_product_behind():
    """NNCF: the pair in front of Transpose and Reshape belongs to the MatMul behind them."""
    f, asked = foreign(OPENVINO, 2, share=1.0)
    moved = {"nhwc_out", "rows_out", "turn_out"}
    sources = {name: name.partition("@qdq")[0] for node in f.nodes for name in node.output if node.op_type in QDQ_OPS}
    f.nodes = [node for node in f.nodes if sources.get(node.output[0]) not in moved]
    for node in f.nodes:
        node.input[:] = [sources[name] if sources.get(name) in moved else name for name in node.input]
    theirs, differences = compared(f.build(), OPENVINO)
    assert theirs.edges == asked
    assert not differences


def test_16_bits_are_listed():
    f, _ = foreign(OPENVINO, 3, share=1.0)
    sixteen_bits(f, share=1.0)
    theirs, differences = compared(f.build(), OPENVINO)
    wide = {edge for edge, precision in theirs.edges.items() if precision == "int16"}
    assert wide
    assert {(differences[edge].kind, "openvino" in differences[edge].reason) for edge in wide} == {
        ("not expressed", True)
    }
    assert all(pair == pytest.approx((pair[0], 1.55), abs=0.02) for pair in theirs.ranges.values())


def test_scales_of_weights_by_block_are_listed():
    f, _ = foreign(OPENVINO, 3, share=1.0)
    _, pair = f.reader("head", 1)
    rows, columns = f.constants[pair.input[0]].shape
    f.constants |= {"blocks": np.full((rows // 4, columns), 0.01, "f4"), "zeros": np.zeros((rows // 4, columns), "i1")}
    pair.input[1:] = ["blocks", "zeros"]
    replace_field(pair.attribute, [helper.make_attribute("axis", 0), helper.make_attribute("block_size", 4)])
    theirs, differences = compared(f.build(), OPENVINO)
    (edge,) = (edge for edge, form in theirs.forms.items() if form.block)
    assert differences[edge].reason == "one scale for each block of 4 becomes one scale for each channel"


@by_name("dialect", [OPENVINO, TENSORRT])
def test_scales_by_channel_are_listed_and_can_be_kept(dialect):
    f, _ = foreign(dialect, 4, share=1.0)
    node, _ = f.reader("depthwise", 0)
    scales = np.linspace(0.01, 0.05, 8, dtype=np.float32)
    f.constants |= {"steps": scales, "middles": np.full(8, 128, np.uint8)}
    stored = f.add("QuantizeLinear", "relu_out", "steps", "middles", before=node, axis=-3)
    node.input[0] = f.add("DequantizeLinear", stored, "steps", "middles", before=node, axis=-3)
    theirs, differences = compared(f.build(), dialect)
    edge = Edge("relu_out", "depthwise", 0)
    assert differences[edge].reason == "one scale for each channel becomes one scale"
    assert theirs.ranges["relu_out"] == pytest.approx((-128 * 0.05, 127 * 0.05))
    assert theirs.ranges[channel_name("relu_out", 2)] == pytest.approx((-128 * scales[2], 127 * scales[2]))
    if dialect.channel_activations:
        choices, ranges = NumericChoices(depthwise="channel"), dict.fromkeys(net().types, RANGE) | theirs.ranges
        made = Inserter(net(), dialect, ranges, choices).insert(tuple(sorted(theirs.edges.items())))
        assert QDQGraph(made).edge_form(edge).scale == pytest.approx(scales, rel=0.01)


def test_pairs_without_a_counterpart_are_listed():
    f, asked = foreign(OPENVINO, 5, share=1.0)
    pair = [
        new_node("QuantizeLinear", ["spare", "step"], "inner_q"),
        new_node("DequantizeLinear", ["inner_q", "step"], "inner"),
    ]
    body = helper.make_graph(pair, "body", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [4])])
    f.constants |= {"yes": np.array(True), "step": np.array(0.1, "f4"), "spare": np.ones(4, "f4")}
    f.nodes += [
        new_node("If", ["yes"], "branch_out", name="branch", then_branch=body, else_branch=body),
        new_node("QuantizeLinear", ["x", "step"], "lost_q"),
        new_node("DequantizeLinear", ["lost_q", "step"], "lost_out", name="lost"),
        new_node("ExtendedQuantizeLinear", ["x", "step"], "odd_out", name="odd", domain="com.amd.quark"),
        new_node("QuantizeLinear", ["x", "step"], "new_q"),
        new_node("DequantizeLinear", ["new_q", "step"], "new_out", name="new"),
        new_node("Celu", ["new_out"], "celu_out", name="celu"),
    ]
    theirs, _ = compared(f.build(rename=False), OPENVINO)
    assert theirs.edges == asked
    reasons = {difference.edge.consumer: difference.reason for difference in theirs.unmatched}
    words = {"branch": "subgraphs", "lost": "no operator", "odd": "com.amd.quark.Extended", "celu": "no such Celu"}
    assert {name: words[name] in reason for name, reason in reasons.items()} == dict.fromkeys(words, True)


def test_only_formats_with_pairs_are_read():
    f, _ = foreign(OPENVINO, 6, share=0.0)
    f.nodes.append(new_node("MatMulNBits", ["x"], "packed", domain="com.microsoft", K=8, N=8))
    with pytest.raises(UserError, match=r"com\.microsoft\.MatMulNBits"):
        read_placement(f.build(rename=False), net())
    f.nodes.append(new_node("QGemm", ["x"], "product", domain="com.microsoft"))
    with pytest.raises(UserError, match=r"QGemm 'product'.*QuantFormat\.QDQ"):
        read_placement(f.build(rename=False), net())


def test_checks_know_a_scale_behind_a_cast():
    f, _ = foreign(TENSORRT, 7, share=1.0)
    for name in {name for node in f.nodes if node.op_type in QDQ_OPS for name in node.input[1:]}:
        values, wide = f.constants.pop(name), f.new()
        f.constants[wide] = values.astype(np.float64 if values.dtype.kind == "f" else np.int32)
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        f.nodes.insert(0, new_node("Cast", [wide], name, name=wide, to=kind))
    graph = QDQGraph(f.build(rename=False))
    assert graph.edges
    assert not graph.unfusable_reasons
    assert not list(find_qdq_problems(graph, (8, 9)))


def two_convolutions() -> tuple[Model, int]:
    """Two convolutions share a weight; each widens its first channel, which is all but dead, for its own bias."""
    weight = normal(4, 4, 1, 1)
    weight[0] *= 1e-7
    g = GraphBuilder("convolutions")
    inputs = [g.input(name, (1, 4, 4, 4)) for name in ("a", "c")]
    constants = g.const(weight), g.const(np.full(4, 10, np.float32))
    g.output(g.op("Add", *(g.op("Conv", x, *constants) for x in inputs)))
    return loaded(g), 6


def one_table_of_words() -> tuple[Model, int]:
    """An embedding and a product read one constant at scales of their own."""
    g = GraphBuilder("words")
    table = g.const(normal(8, 8))
    x = g.op("Add", g.op("Gather", table, g.input("ids", (1, 4), "int64")), g.input("x", (1, 4, 8)))
    g.output(g.op("MatMul", x, table))
    return loaded(g), 5


def names_of_other_tools() -> tuple[Model, int]:
    """A float model has tensors named like those that ONNX Runtime's quantization tools insert."""
    g = GraphBuilder("names")
    x = g.input("x", (2, 4, 4))
    y = g.op("Tanh", x, outputs="x_quantized")
    z = g.op("Tanh", y, outputs="x_QuantizeLinear_Input")
    g.output(g.op("Concat", g.op("MatMul", x, y), z, axis=0))
    return loaded(g), 5


@pytest.mark.parametrize("make", [two_convolutions, one_table_of_words, names_of_other_tools])
def test_count_pairs_of_placement_equals_count_in_file(make, tmp_path):
    model, expected = make()
    asked = everywhere(model, ONNXRUNTIME)
    inserter = Inserter(model, ONNXRUNTIME, {name: (-3.0, 2.0) for name in model.types})
    assert diff_edges(asked, inserter.insert(asked)) == ((), ())
    assert inserter.count_pairs(asked) == count_pairs(inserter.write(asked, tmp_path)) == expected
