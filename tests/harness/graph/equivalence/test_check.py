"""Comparison after loading: valid models pass, changed ones are refused, and others are reported."""

import logging
import sys
import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import harness.graph.equivalence.check as check
import harness.graph.io.files as files
import harness.graph.passes.normalize as fold_batch_norm
from harness.base.errors import UserError
from harness.graph.equivalence.compare import (
    ComparisonTask,
    EquivalenceVerdict,
    compare_runs,
    deviation_db,
    threshold_db,
)
from harness.graph.load import load, load_proto
from harness.workers.helper_process import call_in_helper_process

# Nodes after r, and outputs, which show rounding noise and changes of earlier nodes to different degrees.
ENDS: dict[str, tuple[str, str]] = {
    "float": ("y = Neg(r)", "float y"),
    "index": ("y = ArgMax<axis=1>(r)", "int64 y"),
    "tie": ("t = Concat<axis=1>(r, r)  y = ArgMax<axis=1>(t)", "int64 y"),
    "integer": ("m = Mul(r, large)  f = Floor(m)  y = Cast<to=6>(f)", "int32 y"),
    "cancelled": ("a = Add(r, large)  s = Sub(a, large)  y = ArgMax<axis=1>(s)", "int64 y"),
    "silent": ("y = Greater(r, large)", "bool y"),
    "sorted": ("f = Reshape(r, flat)  v, y = TopK(f, five)", "float v, int64 y"),
    "quantized": ("q = QuantizeLinear(r, step, zero)  y = DequantizeLinear(q, step, zero)", "float y"),
}


def network(end: str = "float", *, depth: int = 4, half: bool = False, constant_nodes: bool = False) -> onnx.ModelProto:
    """Return a stack of Conv, BatchNormalization and Relu, which loading folds, with one of `ENDS`.

    With `constant_nodes` the weights are nodes, as Paddle2ONNX exports them.
    """
    rng, dtype, kind = np.random.default_rng(0), np.float16 if half else np.float32, "float16" if half else "float"
    tail, outputs = ENDS[end]
    lines, weights, last = [], [], "x"
    for i in range(depth):
        lines.append(f"[conv{i}] c{i} = Conv<pads=[1,1,1,1]>({last}, w{i})")
        lines.append(f"[norm{i}] n{i} = BatchNormalization(c{i}, s{i}, m{i}, m{i}, s{i})  r{i} = Relu(n{i})")
        last = f"r{i}"
        values = {"w": rng.standard_normal((4, 4, 3, 3)) / 6, "s": rng.uniform(0.5, 1.5, 4), "m": rng.normal(0, 0.1, 4)}
        weights += [numpy_helper.from_array(value.astype(dtype), f"{name}{i}") for name, value in values.items()]
    proto = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 19]> g ({kind}[1,4,8,8] x) => ({outputs.replace("float", kind)})
        <int64[1] flat = {{-1}}, int64[1] five = {{5}}, int8 zero = {{0}}> {{
        {" ".join(lines)} r = Identity({last}) {tail} }}"""
    )
    weights += [numpy_helper.from_array(np.array(value, dtype), n) for n, value in (("large", 5e4), ("step", 1e-3))]
    if constant_nodes:
        nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in weights]
        nodes += proto.graph.node
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    else:
        proto.graph.initializer.extend(weights)
    return proto


def ready(proto: onnx.ModelProto, **options: Any) -> list[str]:
    return [node.op for node in load_proto(proto, source="m.onnx", sha256="0", **options).nodes]


@pytest.fixture
def compared(monkeypatch):
    """Verdicts of all comparisons, with an empty cache at first."""
    verdicts: list[EquivalenceVerdict] = []
    compare = check._compare_versions

    def recorded(*args: Any) -> EquivalenceVerdict:
        verdicts.append(compare(*args))
        return verdicts[-1]

    check._verdict_cache.cache_clear()
    monkeypatch.setattr(check, "_compare_versions", recorded)
    yield verdicts
    check._verdict_cache.cache_clear()


@pytest.fixture
def faulty_fold(monkeypatch):
    """Folding of BatchNormalization with an error of two percent."""
    scaled = fold_batch_norm._scale_weight
    monkeypatch.setattr(
        fold_batch_norm, "_scale_weight", lambda weight, factor, linear: scaled(weight, factor * 1.02, linear)
    )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_rounding_differences_pass(end, half, compared):
    assert "BatchNormalization" not in ready(network(end, depth=12, half=half))
    assert compared == [EquivalenceVerdict()]


@pytest.mark.parametrize("end", ["float", "index", "silent"])
def test_weights_from_constant_nodes_are_folded(end, compared):
    assert "BatchNormalization" not in ready(network(end, constant_nodes=True))
    assert compared == [EquivalenceVerdict()]


def far_from_zero(*, half: bool) -> onnx.ModelProto:
    """Return a network whose normalized values spread little around a large mean."""
    proto = network(half=half, depth=1)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    bias = numpy_helper.from_array(np.full(4, 200.0 if half else 2e4, np.float16 if half else np.float32), "bias")
    weights["m0"].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias), "m0"))
    proto.graph.initializer.extend([bias, numpy_helper.from_array(numpy_helper.to_array(bias) * 0, "shift")])
    proto.graph.node[0].input.append("bias")
    proto.graph.node[1].input[2] = "shift"
    return proto


@pytest.mark.parametrize("half", [False, True])
def test_cancellation_by_a_large_mean_passes(half, compared):
    assert "BatchNormalization" not in ready(far_from_zero(half=half))
    assert compared == [EquivalenceVerdict()]


@pytest.mark.usefixtures("faulty_fold")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_changed_results_are_refused_naming_the_first_node(end, half):
    with pytest.raises(UserError, match=r"'norm0' \(BatchNormalization, output 'n0'\).* 3[34]\.\d dB"):
        ready(network(end, half=half))


@pytest.mark.usefixtures("faulty_fold")
@pytest.mark.parametrize("end", ["float", "index", "silent"])
def test_changes_of_constant_nodes_and_larger_batches_are_refused(end, tmp_path, compared):
    with pytest.raises(UserError, match=r"'norm0'"):
        ready(network(end, constant_nodes=True))
    with pytest.raises(UserError, match="'norm0'"):
        ready(network(end), shapes={"x": "3x4x8x8"})
    onnx.save(network(end), tmp_path / "m.onnx")
    for _ in range(2):
        with pytest.raises(UserError, match="'norm0'"):
            load(tmp_path / "m.onnx")
    assert len(compared) == 3, "a refusal is cached"


@pytest.mark.parametrize("end", ["float", "index"])
def test_a_model_with_a_larger_batch_is_compared_sample_by_sample(end, compared):
    ready(network(end), shapes={"x": "3x4x8x8"})
    assert compared == [EquivalenceVerdict()]


def test_files_are_compared_once_and_unchanged_models_never(tmp_path, compared):
    onnx.save(network(), tmp_path / "m.onnx")
    for _ in range(3):
        load(tmp_path / "m.onnx")
        load_proto(network(), source="m.onnx", sha256="0")
    assert len(compared) == 2, "one of the file, one of the model in memory"
    load(tmp_path / "m.onnx", shapes={"x": "2x4x8x8"})
    load(tmp_path / "m.onnx", min_opset=21)
    assert len(compared) == 4
    plain = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
    ready(plain)
    assert len(compared) == 4


@pytest.mark.parametrize("limit", [1000, 10**9])
@pytest.mark.parametrize("external", [False, True])
def test_external_data_and_large_models_are_compared(limit, external, tmp_path, compared, monkeypatch):
    monkeypatch.setattr(files, "MAX_SINGLE_FILE_BYTES", limit)
    onnx.save_model(
        network("index"), tmp_path / "m.onnx", save_as_external_data=external, location="w", size_threshold=0
    )
    load(tmp_path / "m.onnx")
    ready(network("index"))
    assert compared == [EquivalenceVerdict(), EquivalenceVerdict()]


@pytest.mark.parametrize(
    ("graph", "word"),
    [
        ("(float[2] x) => (float[2] y) { y = acme.Whirl(x) }", "Whirl"),
        ("(bfloat16[2] x) => (bfloat16[2] y) { y = Relu(x) }", "Relu"),
        ("(seq(float[2]) x) => (float[2] y) { i = Constant<value_int=0>()  y = SequenceAt(x, i) }", "'x'"),
        ("(float[9,9] x) => (float[9,9] y) <float r = {0.5}, bool t = {1}> { y = Dropout(x, r, t) }", "run to run: y"),
        ("(string[2] x) => (float[2] y) { y = Cast<to=1>(x) }", "Cast"),
        ("(float[9] x) => (float[9] y) <float[1] k = {2}> { a = Add(k, k)  b = Mul(x, a)  r = RandomNormalLike(x) "
         " y = Add(b, r) }", "run to run: y"),
    ],
)  # fmt: skip
def test_comparisons_that_are_not_possible_are_logged(graph, word, caplog):
    with caplog.at_level(logging.WARNING):
        ready(parser.parse_model(f'<ir_version: 8, opset_import: ["": 13, "acme": 1]> g {graph}'))
    (message,) = [r.getMessage() for r in caplog.records if "not compared" in r.getMessage()]
    assert message.startswith("m.onnx: ")
    assert word in message


@pytest.mark.parametrize(
    "graph",
    [
        "(int64[4] i) => (float[4] y) <float[1] t = {3}> { y = Gather(t, i) }",
        "(int32[4] a, int32[4] b) => (int32[4] y) { y = Div(a, b) }",
        "(float[4] x) => (float[4] y) { a = Log(x)  y = Softmax<axis=0>(a) }",
        "(float[4] x) => (float[4] y) { a = Sub(x, x)  y = Softmax<axis=0>(a) }",
        "(float[4] x, int64[1] s) => (float[4] y) { y = Expand(x, s) }",
        "(float[4] x) => (seq(float[4]) y) { n = Neg(x)  y = SequenceConstruct(x, n) }",
        "(float[4] x, string[2] s) => (float[4] y, string[2] t) { y = Softmax<axis=0>(x)  t = Identity(s) }",
    ],
)
def test_random_inputs_respect_operator_constraints(graph, compared):
    ready(parser.parse_model(f'<ir_version: 8, opset_import: ["": 12]> g {graph}'))
    assert compared == [EquivalenceVerdict()]


def test_a_crash_of_onnx_runtime_is_no_refusal(caplog, monkeypatch):
    monkeypatch.setattr(check, "compare_runs", sys.exit)  # SystemExit is no Exception, so the process ends
    with caplog.at_level(logging.WARNING):
        ready(network())
    assert "ONNX Runtime exited" in caplog.text


def test_comparison_beyond_memory_limit_is_logged(caplog, monkeypatch):
    def sleep(what: str, *_: object) -> object:
        monkeypatch.setenv("QDQ_MODEL_MEMORY_GB", "0.001")
        try:
            return call_in_helper_process(what, time.sleep, 2)
        finally:
            monkeypatch.delenv("QDQ_MODEL_MEMORY_GB")

    monkeypatch.setattr(check, "call_in_helper_process", sleep)
    with caplog.at_level(logging.WARNING):
        ready(network(depth=3))
    assert "of memory" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], (np.inf, np.inf)),
        ([1.0, np.nan], [np.nan, 1.0], (-np.inf, -np.inf)),
        ([1.0, np.inf], [1.0, -np.inf], (-np.inf, -np.inf)),
        ([0.0, 0.0], [0.0, 1e-9], (-np.inf, -np.inf)),
        ([1.0, -3.4e38], [1.1, -3.4e38], (19.9, 20.1)),
        ([1e300, 1.0], [1.001e300, 1.0], (59.9, 60.1)),
    ],
)
def test_deviation_db_of_nan_inf_and_finite_values(before, after, wanted):
    assert wanted[0] <= deviation_db(np.array(before), np.array(after)) <= wanted[1]


def test_deviation_db_is_infinite_for_other_types_and_shapes():
    x = np.ones((2, 3), np.float32)
    for other in (x.T, x.astype(np.float64), [x], None, x.astype(np.int32)):
        assert deviation_db(x, other) == -np.inf
    assert deviation_db([x, x], [x, x]) == np.inf
    assert deviation_db([x], [x, x]) == -np.inf
    assert deviation_db([{0: 1.0}], [{0: 1.0}]) == np.inf


def test_the_coarsest_float_type_sets_the_threshold():
    half = network(half=True)
    cast = helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16)
    assert (threshold_db(network()), threshold_db(half)) == (80.0, 40.0)
    half.graph.node.append(cast)
    assert threshold_db(half) == 25.0


def graph_bytes(nodes: str) -> bytes:
    head = '<ir_version: 8, opset_import: ["": 17, "acme": 1]> g (float[1,4] x) => (float[1,4] y)'
    return parser.parse_model(f"{head} <float[4] one = {{1,1,1,1}}> {{ {nodes} }}").SerializeToString()


NEG = "[a] t = Neg(x)  [last] y = Sin(t)"
NORM = "[norm] t = BatchNormalization(x, one, one, one, one)  [last] y = Sin(t)"


@pytest.mark.parametrize(
    ("original", "prepared", "verdict", "word"),
    [
        (NEG, NEG, "", ""),
        (NEG, "[a] t = Abs(x)  [last] y = Sin(t)", "change", "node 'a' (Neg, output 't')"),
        (NEG, "[a] t = acme.Odd(x)  [last] y = Sin(t)", "change", "does not run"),
        ("[a] t = acme.Odd(x)  [last] y = Sin(t)", "[last] y = Sin(x)", "unchecked", "cannot run the original"),
        (NORM, "[m] m = Sub(x, one)  [norm] t = Add(m, one)  [last] y = Sin(t)", "", ""),
        (NORM, "[m] m = Sub(x, one)  [norm] t = Sub(m, one)  [last] y = Sin(t)", "change", "node 'norm'"),
    ],
)
def test_verdicts_on_pairs_of_models(original, prepared, verdict, word):
    task = ComparisonTask(
        original=graph_bytes(original), prepared=graph_bytes(prepared), inputs={"x": ("float", (1, 4))},
        widened=frozenset(), samples=1,
    )  # fmt: skip
    found = compare_runs(task)
    assert [key for key in ("change", "unchecked") if getattr(found, key)] == [verdict] * bool(verdict)
    assert word in found.change + found.unchecked
