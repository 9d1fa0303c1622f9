"""Each row of the table of known faults has a small model whose files are right, and only because of the rule."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fidelity_of import run, run_openvino
from onnx import helper
from onnx_models import applied, everywhere, loaded, normal, run_onnxruntime

from harness.accuracy.calibration.ranges import calibrate
from harness.base.random_inputs import random_feeds
from harness.graph.builder import GraphBuilder
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.reduce_model import find_exact_outputs
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import BUILTIN_DIALECTS, ONNXRUNTIME, Dialect, load_dialect
from harness.graph.rules.placement_rules import first_violated_rule
from harness.graph.rules.points import find_points
from harness.graph.rules.runtime_faults import RUNTIME_FAULTS, RuntimeFault
from harness.measure.provenance import describe_installed
from search.space import Edge, Placement

MIN_SQNR_DB = 25
"""Of a runtime against the meaning of its file; the faults give 0 to 20 dB."""
STATE = ort.capi.onnxruntime_pybind11_state
REFUSALS = (STATE.Fail, STATE.InvalidArgument, STATE.InvalidGraph, STATE.RuntimeException, RuntimeError)
FAULTS = {fault.id: fault for fault in RUNTIME_FAULTS}

Maker = Callable[[GraphBuilder], str]


def of(op: str, shape: tuple[int, ...], **attributes: object) -> Maker:
    """A model of one operator behind an activation."""
    return lambda g: g.op(op, g.op("Tanh", g.input("x", shape)), **attributes)


def on_input(op: str, shape: tuple[int, ...], *constants: object, **attributes: object) -> Maker:
    return lambda g: applied(op, *constants, **attributes)(g, g.input("x", shape))


BOUNDS = -0.1257302, 0.1321048


def clip(g, x, low, high):
    return g.op("Clip", x, g.const(low), g.const(high))


def bounded(g):
    """The root of values of which many are at the lower bound of a Clip."""
    return g.op("Sqrt", clip(g, g.op("Mul", g.op("Relu", g.input("x", (4, 64))), g.const(2.0)), 1e-2, 6.0))


def resized(g, x, scale, mode="nearest"):
    return g.op("Resize", x, "", g.const([1.0, 1.0, scale, scale]), mode=mode)


def smaller(g):
    """A Resize between convolutions."""
    return g.conv(resized(g, g.conv(g.input("x", (1, 4, 8, 8)), 4, 3), 0.5, "cubic"), 4, 3)


def not_smaller(g):
    """A Resize whose attribute `axes` cannot be replaced: the ratio of its sizes, 11 to 8, is not its scale, 4 to 3."""
    x = g.conv(g.input("x", (1, 4, 6, 8)), 4, 3)
    x = g.op("Resize", x, "", "", g.const([8, 8]), axes=[2, 3], keep_aspect_ratio_policy="not_smaller")
    return g.conv(x, 4, 3)


def scaled_bias(g):
    return g.op("Gemm", g.input("x", (4, 2)), g.input("w", (2, 4)), g.const(normal(4)), alpha=-2.0)


def scaled_bias_of_slice(g):
    """A Gemm whose weights are float in the file while its data, behind a Slice, are quantized."""
    part = g.op("Slice", g.op("Tanh", g.input("x", (12, 16))), g.const([5]), g.const([12]), g.const([0]))
    return g.op("Gemm", part, g.const(normal(16, 16)), g.const(normal(1)), alpha=-2.0)


def cached(g):
    keys = g.op("Tanh", g.input("x", (1, 2, 8, 4)))
    g.output(keys)
    return g.op("MatMul", g.input("a", (1, 2, 3, 4)), g.op("Transpose", keys, perm=[0, 1, 3, 2]))


def cached_further(g):
    keys = g.op("Tanh", g.input("x", (4, 8)))
    g.output(keys)
    return g.op("Sigmoid", g.op("Unsqueeze", g.op("Transpose", keys), g.const([0])))


def cached_rectified(g):
    """A pair behind the Relu computes it, and is repeated in front of the Transpose."""
    keys = g.op("Tanh", g.input("x", (4, 8)))
    g.output(keys)
    return g.op("Sigmoid", g.op("Relu", g.op("Transpose", keys)))


def captured(g, x):
    """An If whose branches read a tensor; the input `x` of the model decides."""
    branches = []
    for op in ("Tanh", "Relu"):
        branch = GraphBuilder(op)
        branch._types = dict(g._types)
        branch.op(op, x, outputs=[f"{op}_branch"])
        branch._outputs.append(helper.make_tensor_value_info(f"{op}_branch", 1, g.shape(x)))
        branches.append(branch.graph())
    condition = g.op("Less", g.op("ReduceSum", "x", keepdims=0), g.const(0.0))
    result = g.op("If", condition, then_branch=branches[0], else_branch=branches[1], outputs="branched")
    return result


def captured_transpose(g):
    keys = g.op("Tanh", g.input("x", (4, 8)))
    g.output(captured(g, keys), name="y1")
    return g.op("Sigmoid", g.op("Transpose", keys))


def captured_result(g):
    moved = g.op("Reshape", g.op("Tanh", g.input("x", (4, 8))), g.const([8, 4]))
    g.output(captured(g, moved), name="y1")
    return g.op("Sigmoid", moved)


def unused_result(g):
    _, part = g.op("Split", g.op("Relu", g.input("x", (4, 8))), axis=0, outputs=2)
    return g.op("MatMul", g.op("Relu", part), g.op("Transpose", part))


def pooled_border(g):
    shifted = g.op("Add", g.input("x", (1, 4, 12, 12)), g.const(0.7))
    pooled = g.op("AveragePool", shifted, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1)
    return g.conv(pooled, 4, 3)


def strided_border(g):
    return g.op("Conv", g.input("x", (1, 4, 12, 12)), g.const(normal(6, 4, 1, 1)), pads=[1] * 4, strides=[2, 2])


def border_of_quotient(g):
    x = g.op("Unsqueeze", g.op("Div", g.input("x", (2, 8, 8, 8)), g.const(3.0)), g.const([1]))
    x = g.op("Squeeze", x, g.const([1]))
    return g.op("Conv", x, g.const(normal(4, 8, 1, 1)), pads=[1] * 4, strides=[2, 2])


def later_strides(g):
    x = g.op("Conv", g.input("x", (1, 4, 12, 12)), g.const(normal(6, 4, 1, 1)), pads=[1] * 4)
    return g.op("Conv", g.op("Relu", x), g.const(normal(5, 6, 1, 1)), strides=[2, 2])


def factor(g, op):
    """A Conv without a bias, an activation, and a negative factor."""
    x = g.op("Conv", g.input("x", (1, 4, 8, 8)), g.const(normal(6, 4, 3, 3)))
    x = g.op("LeakyRelu" if op == "Div" else "Relu", x)
    if op == "Sub":
        return g.op("Sub", g.op("Conv", "x", g.const(normal(6, 4, 3, 3))), x)
    return g.op(op, x) if op == "Neg" else g.op(op, x, g.const(normal(6, 1, 1)))


def rows(g, op, reduction):
    """A reduction of the rows of two matrices whose channels were scaled."""
    x = g.op(op, g.input("x", (2, 8, 12)), g.const(normal(4, 8, 1) if op == "Conv" else normal(1, 8, 1)))
    if reduction == "ReduceSum":
        return g.op("Sigmoid", g.op(reduction, x, g.const([2])))
    return g.op(reduction, x) if reduction.startswith("Global") else g.op(reduction, g.op("Relu", x), axes=[2])


def divided_concat(g):
    x = g.op("Conv", g.input("x", (1, 4, 8, 8)), g.const(normal(8, 4, 3, 3)), g.const(normal(8)))
    x = g.op("Concat", x, g.op("Tanh", x), axis=1)
    g.output(g.op("Conv", x, g.const(normal(16, 1, 3, 3)), group=16))
    return g.op("DepthToSpace", x, blocksize=2)


def negated_product(g):
    x = g.op("Relu", g.op("MatMul", g.input("x", (1, 8, 12)), g.const(normal(12, 4))))
    return g.op("MatMul", g.op("Neg", x), g.const(normal(4, 8)))


def difference(g):
    x = g.op("Relu", g.op("Conv", g.input("x", (1, 4, 8, 8)), g.const(normal(6, 4, 1, 1))))
    return g.conv(g.op("Sub", g.const(1.0), x), 8, 3)


def columns(g):
    weights = normal(8, 8) * np.logspace(-1, 1, 8, dtype=np.float32)
    return g.op("MatMul", g.input("x", (1, 4, 8, 8)), g.const(weights))


def swish_of_maximum(g):
    x = g.input("x", (4, 16))
    most = g.op("ReduceMax", x, axes=[1])
    return g.op("Add", x, g.op("Mul", most, g.op("Sigmoid", most)))


def two_products(g, bias=32, alpha=1.0):
    """Two products that OpenVINO computes in one kernel, the first scaled or with a bias of another length."""
    x = g.op("Gemm", g.input("x", (4, 16)), g.const(normal(16, 32)), g.const(normal(bias)), alpha=alpha)
    return g.op("Gemm", g.op("Relu", x), g.const(normal(32, 8)), g.const(normal(8)))


def rounded_products(g):
    x = g.op("Round", g.op("MatMul", g.input("x", (1, 16)), g.const(normal(16, 16))))
    return g.op("Div", g.op("MatMul", g.op("Neg", x), g.const(normal(16, 8))), g.const(3.0))


MODELS: Mapping[str, tuple[Maker, ...]] = {
    "batched reduction": (
        of("GlobalAveragePool", (4, 2, 8)),
        of("ReduceMean", (2, 16, 24), axes=[1]),
        on_input("ReduceSum", (2, 16, 24), [1]),
    ),
    "reduced extremum": (
        lambda g: g.conv(g.op("ReduceMax", g.input("x", (1, 4, 12, 12)), axes=[1]), 6, 3, pad=1),
        lambda g: g.conv(g.op("Neg", g.op("ReduceMin", g.input("x", (1, 4, 12, 12)), axes=[1])), 6, 3, pad=1),
        swish_of_maximum,
    ),
    "scaled rows": tuple(
        partial(rows, op=op, reduction=reduction)
        for op, reduction in (("Mul", "ReduceSum"), ("Conv", "ReduceMax"), ("Conv", "GlobalAveragePool"))
    ),
    "pooled border": (pooled_border,),
    "strided border": (strided_border, border_of_quotient, later_strides),
    "divided concat": (divided_concat,),
    "negated activation": (
        negated_product,
        difference,
        *(partial(factor, op=op) for op in ("Neg", "Mul", "Div", "Sub")),
    ),
    "pooled columns": (
        lambda g: g.op("MaxPool", columns(g), kernel_shape=[2, 2], strides=[2, 2]),
        lambda g: g.op("AveragePool", g.op("Neg", columns(g)), kernel_shape=[3, 3], pads=[1] * 4),
        lambda g: g.op("Tanh", resized(g, columns(g), 2)),
        lambda g: g.op("Conv", g.op("Sigmoid", columns(g)), g.const(normal(4, 4, 1, 1)), strides=[2, 2]),
    ),
    "product sequence": (
        lambda g: two_products(g, alpha=2.0),
        lambda g: two_products(g, bias=1),
        rounded_products,
    ),
    "padding value": (on_input("Pad", (1, 8), [1, 0, 0, 0], 3.0),),
    "epsilon": (on_input("LayerNormalization", (2, 5, 16), np.ones(16, np.float32), epsilon=10.0),),
    "clip bound": (bounded, lambda g: clip(g, g.op("Mul", g.input("x", (4, 64)), g.const(40.0)), -0.5, 0.5)),
    "softmax of one": (of("Softmax", (4, 1), axis=1),),
    "cubic resize": (smaller, not_smaller),
    "linear resize": (lambda g: g.op("GlobalAveragePool", resized(g, g.input("x", (1, 3, 6, 8)), 1.5, "linear")),),
    "half tile": (
        lambda g: g.conv(g.input("x", (1, 3, 8, 8)), 24, 3),
        on_input("MatMul", (40, 8), normal(8, 56)),
    ),
    "dilated pool": (
        on_input("AveragePool", (1, 2, 8), kernel_shape=[2], dilations=[2]),
        on_input("AveragePool", (1, 2, 8), kernel_shape=[2], dilations=[1]),
    ),
    "scaled bias": (scaled_bias, scaled_bias_of_slice),
    "transposed output": (cached, cached_further, cached_rectified),
    "redundant clip": (
        lambda g: clip(g, g.op("Add", g.input("x", (4, 8)), g.input("y", (4, 8))), *BOUNDS),
        lambda g: g.op("Relu", g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 8, 3))),
        lambda g: g.op("Reshape", clip(g, g.conv(g.input("x", (1, 3, 8, 8)), 8, 3), *BOUNDS), g.const([-1])),
    ),
    "captured tensor": (captured_result,),
    "unused result": (unused_result,),
}
"""Models by id of the fault."""

CASES = [
    pytest.param(fault, make, id=f"{fault.id} {number}")
    for fault in RUNTIME_FAULTS
    for number, make in enumerate(MODELS.get(fault.id, ()))
]


def made(make: Maker, fault: RuntimeFault | None = None) -> Model:
    g = GraphBuilder("m", opset=19 if fault in (FAULTS["dilated pool"], FAULTS["cubic resize"]) else 17)
    g.output(make(g))
    return loaded(g)


def calibrated(model: Model, tensors: set[str], folder: Path) -> tuple[list, dict]:
    feeds = list(random_feeds({name: ("float", model.types[name].shape) for name in model.inputs}, 2))
    return feeds, calibrate(save_to_folder(model, folder), tensors - model.constants.keys(), feeds)


def decibels(model: Model, dialect: Dialect, folder: Path) -> float:
    """Lowest SQNR of a runtime against the meaning of the file, of all placements in a model.

    It is -inf if a file is refused, or an output that no pair changes is not exact.
    """
    space = build_space(model, dialect)
    feeds, ranges = calibrated(model, {edge.tensor for d in space.dimensions for edge in d.edges}, folder)
    inserter = Inserter(model, dialect, ranges)
    lowest = np.inf
    for choices in product((0, 1), repeat=len(space)):
        path = inserter.write(space.resolve(Placement(choices)), folder)
        exact = run(path, feeds[0])
        try:
            results = run_openvino(path, feeds[0]) if dialect.name == "openvino" else run(path, feeds[0], optimize=True)
        except REFUSALS:
            return -np.inf
        found = dict(zip(exact, results, strict=True)) if isinstance(results, list) else results
        for name, values in exact.items():
            if values.shape != found[name].shape:
                return -np.inf
            if name in find_exact_outputs(path) and not np.allclose(values, found[name], atol=1e-5):
                return -np.inf
            noise = max(float(np.square(values - found[name]).sum()), 1e-30)
            lowest = min(lowest, 10 * np.log10(float(np.square(values).sum()) / noise))
    return float(lowest)


def crashes(call: Callable[[], object]) -> bool:
    """Whether a call ends the process by a signal; it runs in a copy."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        call()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_every_known_fault_has_a_model_and_a_row_in_the_documentation():
    assert FAULTS.keys() == MODELS.keys()
    page = (Path(__file__).resolve().parents[2] / "docs/explanation/measurement.md").read_text(encoding="utf-8")
    rows = [
        f"| `{f.id}` | {f.runtime} | {f.text} | {f.instructions or 'all'} | {f.right_in or 'none known'} |\n"
        for f in RUNTIME_FAULTS
    ]
    assert "".join(rows) in page


@pytest.mark.parametrize(("fault", "make"), CASES)
def test_file_with_the_rule_is_right(fault, make, tmp_path):
    model, dialect = made(make, fault), BUILTIN_DIALECTS[fault.runtime]
    node = next(node for node in model.nodes if node.op in fault.operators and fault.matches(model, node))
    broken = first_violated_rule(model, dialect, node, 0)
    assert fault.both_sides or (broken is not None and broken.name == fault.id)
    assert decibels(model, dialect, tmp_path) >= MIN_SQNR_DB


@pytest.mark.parametrize(("fault", "make"), CASES)
def test_file_without_the_rule_is_wrong_where_the_table_lists_the_runtime(fault, make, tmp_path):
    others = tuple(other for other in BUILTIN_DIALECTS[fault.runtime].faults if other != fault)
    dialect, model = replace(BUILTIN_DIALECTS[fault.runtime], faults=others), made(make, fault)
    if fault.id == "captured tensor":
        wrong = crashes(lambda: decibels(model, dialect, tmp_path))
    else:
        wrong = decibels(model, dialect, tmp_path) < MIN_SQNR_DB
    assert wrong == fault.affects(describe_installed(fault.runtime))


@pytest.mark.parametrize("make", [cached, cached_further, cached_rectified, captured_transpose])
def test_pair_behind_a_transpose_of_what_others_read_comes_with_one_in_front(make):
    dimensions = build_space(made(make), ONNXRUNTIME).dimensions
    (moved,) = (
        d for d in dimensions if {edge.consumer for edge in d.edges} & {"MatMul", "Sigmoid"} and d.kind == "node_input"
    )
    assert "Transpose" in {edge.consumer for edge in moved.edges}


@pytest.mark.parametrize(
    ("facts", "affected"),
    [
        ({}, True),
        ({"version": "1.24.4", "device": "Xeon (AMX)"}, True),
        ({"version": "1.24.4", "device": "Xeon (AVX512-VNNI)"}, False),
        ({"version": "1.31.2", "device": "Xeon (AMX)"}, True),
        ({"version": "1.32.0", "device": "Xeon (AMX)"}, False),
        ({"version": "2.0", "device": "Xeon (AMX)"}, False),
    ],
)
def test_fault_applies_to_version_and_instructions_or_where_both_are_unknown(facts, affected):
    assert FAULTS["half tile"].affects(facts) == affected
    assert (FAULTS["half tile"] in load_dialect("onnxruntime", facts).faults) == affected
    assert FAULTS["unused result"] in load_dialect("onnxruntime", facts).faults, "right in no version"


def test_rule_and_remedy_name_the_version_that_is_right():
    assert FAULTS["half tile"].rule.endswith("(right in onnxruntime 1.32.0).")
    assert FAULTS["unused result"].rule == FAULTS["unused result"].text


CHANNELS = {1, 16, 17, 20, 30, 31, 32, 48, 49, 58, 60, 63, 64, 70, 80}
PARTIAL = {17, 20, 30, 31, 49, 58, 60, 63}
"""Numbers of columns that are wrong in ONNX Runtime 1.24.4 with AMX, by emulation of the instructions."""


WIDE = {49, 58, 60, 63, 70}
"""Numbers above 40 that are wrong with some number of threads, if there are 40 rows."""


def conv_of(shape, data, **attributes):
    return lambda g, n: g.op("Conv", g.input("x", data), g.const(normal(n, *shape)), **attributes)


def product_of(*rows, weights=True):
    def make(g, n):
        other = g.const(normal(8, n)) if weights else g.input("w", (*rows[:-1], 8, n))
        return g.op("MatMul", g.input("x", (*rows, 8)), other)

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (conv_of((3, 3, 3), (1, 3, 8, 8), pads=[1, 1, 1, 1]), PARTIAL),
        (conv_of((58, 1, 1), (1, 58, 8, 8)), PARTIAL),
        (conv_of((4, 1, 1), (1, 4, 8, 8)), {17, 30, 31, 49, 58, 63}),
        (conv_of((3, 3, 3), (4, 3, 7, 7)), set()),
        (product_of(100), PARTIAL),
        (product_of(40), {17, 20, 30, 31} | WIDE),
        (product_of(31), set()),
        (product_of(4, 10), {17, 20, 30, 31} | WIDE),
        (product_of(4, 10, weights=False), set()),
        (product_of(2, 100, weights=False), PARTIAL),
    ],
)
def test_convolutions_and_products_that_amx_computes_wrongly(make, expected):
    models = {channels: made(lambda g, channels=channels: make(g, channels)) for channels in CHANNELS}
    assert {n for n, model in models.items() if FAULTS["half tile"].matches(model, model.nodes[0])} == expected


def test_placement_stored_where_a_fault_is_absent_keeps_its_edges_where_it_is_present(tmp_path):
    model = made(MODELS["half tile"][0])
    here, there = (load_dialect("onnxruntime", {"version": v, "device": "(AMX)"}) for v in ("1.32.0", "1.24.4"))
    resolved = everywhere(model, here)
    _, ranges = calibrated(model, {edge.tensor for edge, _ in resolved}, tmp_path)
    path = Inserter(model, here, ranges).write(resolved, tmp_path, name="stored")
    assert import_placement(path, model) == dict(resolved)
    again = Inserter(model, there, ranges).write(resolved, tmp_path, name="again")
    assert import_placement(again, model) == dict(resolved)
    (conv,) = model.nodes
    assert first_violated_rule(model, there, conv, 0).name == "half tile"


def kv_cache(op: str) -> GraphBuilder:
    """Attention with a cache, which the model extends, reads and returns."""
    g = GraphBuilder("m")
    past, new = g.input("past", (1, 2, 8, 4)), g.linear(g.input("x", (1, 2, 1, 4)), 4)
    others = [new] if op == "Concat" else [g.const(np.zeros((1, 2, 1, 4), np.int64)), new]
    present = g.op(op, past, *others, axis=2, outputs="present")
    g.output(present)
    g.output(g.op("MatMul", g.linear(g.input("a", (1, 2, 1, 4)), 4), g.op("Transpose", present, perm=[0, 1, 3, 2])))
    return g


@pytest.mark.parametrize("op", ["Concat", "ScatterElements"])
@pytest.mark.parametrize("dialect", ["onnxruntime", "openvino", "tensorrt"])
def test_cache_stays_exact_and_the_attention_that_reads_it_is_quantized(op, dialect, tmp_path):
    model = loaded(kv_cache(op))
    resolved = everywhere(model, BUILTIN_DIALECTS[dialect])
    edges = {edge for edge, _ in resolved}
    assert {edge.consumer for edge in edges} >= {"MatMul", "MatMul_1", "MatMul_2"}
    assert not [edge for edge in edges if edge.consumer == op or edge == Edge("present", "", 0)]
    feeds, ranges = calibrated(model, {edge.tensor for edge in edges}, tmp_path)
    path = Inserter(model, BUILTIN_DIALECTS[dialect], ranges).write(resolved, tmp_path)
    for optimize in (False, True):
        present = run(path, feeds[0], optimize=optimize)["present"]
        assert np.array_equal(present[:, :, 1:8], feeds[0]["past"][:, :, 1:])


def test_concat_that_only_ends_a_model_is_no_cache():
    g = GraphBuilder("m")
    g.output(g.op("Concat", g.input("x", (1, 2, 4)), g.op("Tanh", g.input("y", (1, 2, 4))), axis=2))
    points = find_points(loaded(g), ONNXRUNTIME)
    assert any(points), "the points of the Concat and the Tanh"


def resizes() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Models with a Resize between convolutions, in the forms that ONNX Runtime refuses after its optimizations."""
    for name, axes, given, attributes in [
        ("sizes", [2, 3], np.array([12, 16]), {}),
        ("scales", [3, 2], np.array([1.5, 2], np.float32), {"mode": "linear"}),
        ("negative", [-1], np.array([16]), {}),
        ("not larger", [2, 3], np.array([12, 30]), {"keep_aspect_ratio_policy": "not_larger"}),
        ("not smaller", [2, 3], np.array([6, 24]), {"keep_aspect_ratio_policy": "not_smaller"}),
        ("region", [2, 3], np.array([12, 16]), {"coordinate_transformation_mode": "tf_crop_and_resize"}),
        ("inexact", None, np.array([1, 1, 5 / 6, 1.25], np.float32), {"mode": "linear"}),
    ]:
        g = GraphBuilder("m", opset=19)
        x, named = g.conv(g.input("x", (1, 3, 6, 8)), 8, 3), {} if axes is None else {"axes": axes}
        roi = g.const(np.array([0.1, 0, 0.9, 1], np.float32)) if name == "region" else ""
        scaled = given.dtype == np.float32
        resized = g.op("Resize", x, roi, *[""] * (not scaled), g.const(given), **named, **attributes)
        g.output(g.op("Relu", g.conv(g.op("Add", resized, g.const(1.0)), 8, 3)))
        yield name, g.build()


@pytest.mark.parametrize(("name", "proto"), resizes(), ids=lambda value: value if isinstance(value, str) else "")
def test_resize_of_some_axes_is_quantized_between_convolutions(name, proto, tmp_path):
    model = loaded(proto)
    (resize,) = (node for node in model.nodes if node.op == "Resize")
    assert "axes" not in resize.attributes
    (feed,) = random_feeds({"x": ("float", (1, 3, 6, 8))}, 1)
    if name != "negative":  # which ONNX Runtime 1.24.4 refuses in float
        (before,), (after,) = (run_onnxruntime(p, feed, optimize=False) for p in (proto, model.proto))
        assert np.array_equal(before, after)
    assert decibels(model, ONNXRUNTIME, tmp_path) >= MIN_SQNR_DB
