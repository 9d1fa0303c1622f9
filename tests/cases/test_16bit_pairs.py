"""Q/DQ pairs in 16-bit floats: ONNX Runtime on a CPU gives what the file says, by rounding."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from checks_of import running
from onnx import TensorProto, helper, parser
from onnx_models import net

from harness.base.progress import NullProgress
from harness.compat.tao_specs.evaluate import rank_layers
from harness.graph.qdq.reduce_model import write_float32_copy
from harness.plugins import registry
from harness.plugins.api import Candidate

COUNT = 4096
VALUES = np.random.default_rng(0).normal(size=COUNT).astype(ml_dtypes.bfloat16).astype(np.float32)
SCALE = 2.0**-6 * 1.5


def model(kind, stored=TensorProto.INT8, inner="initializer", borders=False):
    """x -> Q -> DQ -> y in `kind`; inputs and outputs in float32, or in `kind` where `borders`.

    Args:
        inner: Where the scale comes from: an initializer, a Constant, a Cast, or from outside of a branch of an If.
    """
    node, scale = helper.make_node, helper.make_tensor("s", kind, [], [SCALE])
    nodes = [node("Cast", ["x"], ["h"], to=kind)]
    constants = [helper.make_tensor("z", stored, [], [0]), helper.make_tensor("yes", TensorProto.BOOL, [], [1])]
    if inner == "constant":
        nodes.append(node("Constant", [], ["s"], value=scale))
    elif inner == "cast":
        constants.append(helper.make_tensor("s32", TensorProto.FLOAT, [], [SCALE]))
        nodes.append(node("Cast", ["s32"], ["s"], to=kind))
    else:
        constants.append(scale)
    pair = [
        node("QuantizeLinear", ["h", "s", "z"], ["q"], name="q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dq"),
        node("Relu", ["d"], ["r"], name="relu"),
    ]
    if inner == "branch":
        body = helper.make_graph(pair, "body", [], [helper.make_tensor_value_info("r", kind, [COUNT])])
        pair = [node("If", ["yes"], ["r_out"], then_branch=body, else_branch=body)]
    edge = kind if borders else TensorProto.FLOAT
    nodes += [*pair, node("Cast", [pair[-1].output[0]], ["y"], to=edge)]
    proto = net(nodes, {"x": [COUNT]}, {"y": [COUNT]}, kinds={"x": edge, "y": edge}, opset=21)
    proto.graph.initializer.extend(constants)
    return proto


@pytest.fixture
def half(tmp_path):
    onnx.save(model(TensorProto.FLOAT16), tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


def assert_rounded(found):
    assert np.abs(found - np.maximum(np.clip(np.rint(VALUES / SCALE), -128, 127) * SCALE, 0)).max() < SCALE / 100


def outputs(path: Path, folder: Path, feed: np.ndarray, optimization: str = "disabled") -> np.ndarray:
    with running(path, folder, optimization=optimization) as infer:
        return np.asarray(infer({"x": feed})["y"], np.float32)


@pytest.mark.parametrize("inner", ["initializer", "constant", "cast", "branch"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("optimization", ["disabled", "all"])
def test_16bit_pairs_round_on_onnx_runtime(kind, inner, optimization, tmp_path, caplog):
    path = tmp_path / "half.onnx"
    onnx.save(model(kind, inner=inner), path)
    assert_rounded(outputs(path, tmp_path, VALUES, optimization))
    assert "float32" in caplog.text


def test_float32_copy_keeps_input_and_output_types(tmp_path):
    path = tmp_path / "half.onnx"
    onnx.save(model(TensorProto.FLOAT16, borders=True), path)
    found = outputs(path, tmp_path, VALUES.astype(np.float16))
    assert_rounded(found)
    wide = write_float32_copy(path, tmp_path / "wide")
    assert wide is not None
    graph = onnx.load(wide).graph
    assert {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)} == {TensorProto.FLOAT16}
    onnx.checker.check_model(onnx.load(wide), full_check=True)


@pytest.mark.parametrize(
    "graph",
    [
        "=> (float16[4096] y) { x__float32 = Identity(x) q = QuantizeLinear(x__float32, s, z) "
        "d = DequantizeLinear(q, s, z) y = Relu(d) }",
        "=> (float16[4096] y) { o = SequenceConstruct(x) t = Loop(n, , o) <body = b (int64 i, bool c, "
        "seq(float16[4096]) u) => (bool k, seq(float16[4096]) v) { k = Identity(c) e = SequenceAt(u, i) "
        "q = QuantizeLinear(e, s, z) d = DequantizeLinear(q, s, z) r = Relu(d) v = SequenceInsert(u, r) }> "
        "y = SequenceAt(t, n) }",
    ],
)
def test_float32_copy_handles_sequences_and_name_collisions(graph, tmp_path):
    proto = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]> g (float16[4096] x) {graph}""")
    scale = helper.make_tensor("s", TensorProto.FLOAT16, [], [SCALE])
    integers = [helper.make_tensor("z", TensorProto.INT8, [], [0]), helper.make_tensor("n", TensorProto.INT64, [], [1])]
    proto.graph.initializer.extend([scale, *integers])
    onnx.save(proto, tmp_path / "half.onnx")
    found = outputs(tmp_path / "half.onnx", tmp_path, VALUES.astype(np.float16))
    assert_rounded(found)


@pytest.mark.parametrize(
    ("kind", "stored"), [(TensorProto.FLOAT, TensorProto.INT8), (TensorProto.FLOAT16, TensorProto.FLOAT8E4M3FN)]
)
def test_correctly_computed_files_need_no_float32_copy(kind, stored, tmp_path):
    path = tmp_path / "right.onnx"
    onnx.save(model(kind, stored), path)
    assert write_float32_copy(path, tmp_path) is None


@pytest.mark.parametrize("by_runtime", [False, True])
def test_saved_engines_round(half, by_runtime, tmp_path):
    engine, runtime = tmp_path / "engine.onnx", registry.create_plugin("benchmarker", "onnxruntime", {})
    if by_runtime:  # with its 16-bit pairs
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(engine)
        onnxruntime.InferenceSession(half, options, providers=["CPUExecutionProvider"])
    else:
        runtime.save(Candidate(digest="q", edges=(), source=lambda: half), engine)
    with runtime.open(runtime.load(engine)) as probe:
        assert_rounded(probe.infer({"x": VALUES})["y"])


def test_rank_layers_is_equal_for_16bit_and_float_pairs(tmp_path):
    sqnr_db = []
    for kind in (TensorProto.FLOAT16, TensorProto.FLOAT):
        path = tmp_path / f"{kind}.onnx"
        onnx.save(model(kind), path)
        sqnr_db.append(rank_layers(path, [{"x": VALUES}], NullProgress())[0][1])
    assert sqnr_db[0] == pytest.approx(sqnr_db[1], abs=0.1)
