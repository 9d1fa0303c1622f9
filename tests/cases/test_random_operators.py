"""A random model is compared with equal random values, and results that vary accuse no runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from checks_of import checks
from onnx import helper, numpy_helper, parser
from onnx_models import loaded

from harness.accuracy.metrics.closeness import MAX_SQNR_DB
from harness.accuracy.metrics.fidelity import Fidelity
from harness.base.errors import EvaluationFailed
from harness.base.random_inputs import random_feeds
from harness.base.statistics import Interval
from harness.graph.load import load, save_to_folder
from harness.graph.protos import find_random_nodes, find_random_outputs
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.reduce_model import find_index_outputs
from harness.graph.qdq.space import build_space
from harness.graph.rules.agreements import passed_slot
from harness.graph.rules.dialects import ONNXRUNTIME
from harness.graph.rules.movement import find_repeated_input
from harness.measure.records import MAIN_BENCHMARKER
from harness.run.verify.dynamic_check import write_dynamic_model
from harness.runtimes.host_clock import run_session
from harness.ship.runtime_comparison import RuntimeComparison, _least_agreement
from harness.workers.engines import BuiltEngine
from search.space import edges_digest

DROPOUT = "c = Dropout(b, half, yes)"
RANDOM = {
    "RandomNormalLike": "n = RandomNormalLike(b)  c = Add(b, n)",
    "RandomUniformLike": "n = RandomUniformLike<seed=1.0>(b)  c = Add(b, n)",
    "RandomNormal": "n = RandomNormal<shape=[1,8,8,8]>()  c = Add(b, n)",
    "RandomUniform": "n = RandomUniform<shape=[1,8,8,8]>()  c = Add(b, n)",
    "Bernoulli": "p = Sigmoid(b)  n = Bernoulli(p)  c = Mul(b, n)",
    "Multinomial": "p = Reshape(b, flat)  n = Multinomial<sample_size=1>(p)  f = Cast<to=1>(n)  c = Add(b, f)",
    "Dropout": DROPOUT,
    "If": """c = If(q) <then_branch = g1 () => (float[1,8,8,8] t) { n = RandomNormalLike(b)  t = Add(b, n) },
    else_branch = g2 () => (float[1,8,8,8] e) { e = Neg(b) }>""",
    "function": "c = local.noisy(b)",
    "mode of Dropout from an input": "c = Dropout(b, half, q)",
}
SURE = {
    "inference": "c = Dropout(b)",
    "mode": "c = Dropout(b, half, no)",
    "nothing dropped": "c = Dropout(b, nil, yes)",
    "other domain": "c = other.Dropout(b, half, yes)",
}


def network(middle: str, outputs: str = "float[1,4,8,8] y") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "local": 1, "other": 1]> g (float[1,3,8,8] x, bool q) => ({outputs})
        <float half = {{0.5}}, float nil = {{0}}, bool yes = {{1}}, bool no = {{0}}, int64[2] flat = {{1, 512}}> {{
        [first] a = Conv<pads=[1,1,1,1]>(x, w0)  b = Relu(a)  {middle}  [second] y = Conv<pads=[1,1,1,1]>(c, w1) }}
        <domain: "local", opset_import: ["": 17]> noisy (v) => (w) {{ n = RandomNormalLike(v)  w = Add(v, n) }}"""
    )
    for name, shape in (("w0", (8, 3, 3, 3)), ("w1", (4, 8, 3, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32) / 4, name))
    return proto


@pytest.mark.parametrize("kind", RANDOM)
def test_random_operators_are_found(kind, tmp_path):
    proto = network(RANDOM[kind], "float[1,4,8,8] y, float[1,8,8,8] a")
    (found,) = find_random_nodes(proto).values()
    assert found.partition(" ")[0] in RANDOM[kind] + "RandomNormalLike"
    assert find_random_outputs(proto) == ("y",)
    onnx.save(proto, tmp_path / "m.onnx")
    assert find_index_outputs(tmp_path / "m.onnx")[0] == {"y"}


@pytest.mark.parametrize("kind", SURE)
def test_dropout_that_drops_nothing_is_not_random(kind):
    assert not find_random_outputs(network(SURE[kind]))


def test_dropout_in_training_mode_is_no_movement(caplog):
    sure, random = (loaded(network(text)) for text in (SURE["mode"], DROPOUT))
    assert "a random model" in caplog.text
    assert "model.eval()" in caplog.text
    slots = []
    for model in (sure, random):
        node = next(node for node in model.nodes if node.op == "Dropout")
        slots.append((find_repeated_input(model, node), passed_slot(model, node)))
    assert slots == [(0, 0), (None, None)]


def test_random_results_of_constants_are_not_computed_ahead():
    proto = network("d = Dropout(w8, half, yes)  c = Mul(b, d)")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 8, 1, 1), np.float32), "w8"))
    assert "Dropout" in {node.op for node in loaded(proto).nodes}


class Engine:
    """ONNX Runtime in this process, which may change the sign of the quantized convolution behind the random node."""

    def __init__(self, *, is_wrong: bool = False) -> None:
        self.is_wrong = is_wrong

    def build(self, candidate, benchmarker=MAIN_BENCHMARKER):
        proto = onnx.load(candidate.source())
        made_by = {name: node.op_type for node in proto.graph.node for name in node.output}
        for index, node in enumerate(proto.graph.node):
            if self.is_wrong and node.name == "second" and made_by.get(node.input[0]) == "DequantizeLinear":
                output, node.output[0] = node.output[0], "right"
                proto.graph.node.insert(index + 1, helper.make_node("Neg", ["right"], [output]))
                break
        self.session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return BuiltEngine(handle=0, build_s=0.0)

    def infer(self, handle, feeds):
        return run_session(self.session, feeds)

    def release(self, handle):
        pass

    def describe(self, benchmarker=MAIN_BENCHMARKER):
        return {"name": "onnxruntime", "version": "1", "float_precision": "f32"}


def check(middle: str, folder, engine: Engine):
    """Return the checks of the float model and of its quantized form."""
    model = loaded(network(middle))
    space, floating = build_space(model, ONNXRUNTIME), save_to_folder(model, folder)
    ranges = {edge.tensor: (-3.0, 3.0) for dimension in space.dimensions for edge in dimension.edges}
    resolved = space.resolve(space.quantize_roles({"linear"}))
    path = Inserter(model, ONNXRUNTIME, ranges).export(resolved, folder / "q.onnx")
    inputs = {"x": ("float", (1, 3, 8, 8)), "q": ("bool", ())}
    return checks(engine, floating, list(random_feeds(inputs, 2)), folder, {edges_digest(()): floating, "q": path})


@pytest.mark.parametrize("kind", ["Dropout", "RandomNormal", "If"])
def test_random_models_are_compared_with_equal_random_values(kind, tmp_path):
    own, found = check(RANDOM[kind], tmp_path, Engine())
    assert (own.verdict, found.verdict) == ("right", "right")
    assert own.engine_db > 60
    assert "equal random values of" in found.reason


def test_fault_behind_a_random_operator_is_found(tmp_path):
    found = check(DROPOUT, tmp_path, Engine(is_wrong=True))[1]
    assert (found.verdict, found.output) == ("wrong result", "y")
    assert "'second'" in found.operator


def test_model_with_nothing_but_random_results_is_not_checked(tmp_path):
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = RandomNormalLike(x) }"""
    )
    onnx.save(proto, tmp_path / "m.onnx")
    file = tmp_path / "m.onnx"
    (found,) = checks(Engine(), file, [{"x": np.ones(2)}], tmp_path, {"q": file})
    assert found.verdict == "not checked"
    assert "random operator (RandomNormalLike" in found.reason


def test_fidelity_leaves_out_random_outputs(tmp_path):
    rng = np.random.default_rng(0)

    def engine(feeds):
        return {"sure": feeds["x"], "noise": rng.normal(size=8)}

    def fidelity(*names):
        return Fidelity(tmp_path / "r.npz", {"x": ("float", (8,))}, samples=2, random_outputs=names)

    made = fidelity("noise")
    made.prepare(engine)
    accuracy = made.score(engine)
    assert accuracy.metrics["sqnr_db"] == MAX_SQNR_DB
    assert "'noise'" in accuracy.note
    with pytest.raises(EvaluationFailed, match="random operators"):
        fidelity("noise", "sure").prepare(engine)


def test_dynamic_file_is_compared_without_random_outputs(tmp_path):
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,4] noise, float[N,4] y)
        { noise = RandomNormalLike(x)  y = Relu(x) }"""
    )
    onnx.save(proto, tmp_path / "m.onnx")
    model = load(tmp_path / "m.onnx")
    made = write_dynamic_model(model, save_to_folder(model, tmp_path / "fixed"), "onnxruntime")
    assert made.file is not None
    assert "checked at N" in made.remark


def test_runtimes_are_compared_without_random_outputs():
    one, two = ({"noise": np.full(3, value), "y": np.arange(3.0), "text": np.array(["a"])} for value in (1.0, -1.0))
    assert _least_agreement(one, two, frozenset({"noise"})) == MAX_SQNR_DB
    assert _least_agreement({"text": one["text"]}, {"text": two["text"]}, frozenset()) == MAX_SQNR_DB
    assert _least_agreement(one, two, frozenset(one)) is None
    tie, facts = (
        Interval(value=1.0, low=0.99, high=1.01),
        {"latencies_ms": (1.0, 1.0), "versions": ("1", "2"), "gains": None},
    )
    found = RuntimeComparison(
        speedup=tie, noise_floor=0.0, verdict="tie", sqnr_db=None, recorded_version="1", recorded_gain=tie, **facts
    )
    assert found.holds
    assert "not compared" in list(found.lines())[-1]
