"""Each row of the table of known faults has a small model whose file is right, and only because of the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from fidelity_of import run, run_openvino
from onnx_models import loaded

from harness.accuracy.calibration.ranges import calibrate
from harness.graph.builder import GraphBuilder
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import BUILTIN_DIALECTS, Dialect, load_dialect
from harness.graph.rules.placement_rules import first_violated_rule
from harness.graph.rules.runtime_faults import RUNTIME_FAULTS
from harness.random_inputs import random_feeds
from harness.timing.provenance import describe_installed
from search.space import Placement

MIN_SQNR_DB = 25
"""Of a runtime against the meaning of its file; the faults give 0 to 20 dB."""


ONE = np.float32(1)
REFUSALS = tuple(getattr(ort.capi.onnxruntime_pybind11_state, name) for name in ("Fail", "RuntimeException"))


def of(op: str, shape: tuple[int, ...], **attributes: object) -> Callable[[GraphBuilder], str]:
    """A model of one operator behind an activation."""
    return lambda g: g.op(op, g.op("Tanh", g.input("x", shape)), **attributes)


def resizing(g: GraphBuilder) -> str:
    """A Resize between two Clip, so that its result has the scale of its data."""
    scales, bounds = g.const(np.array([1, 1, 2, 2], np.float32)), (g.const(0 * ONE), g.const(ONE / 2))
    resized = g.op("Resize", g.op("Clip", g.input("x", (1, 3, 8, 8)), *bounds), "", scales, mode="cubic")
    return g.op("Clip", resized, *bounds)


MODELS: Mapping[str, tuple[Callable[[GraphBuilder], str], ...]] = {
    "batched reduction": (
        of("GlobalAveragePool", (4, 2, 8)),
        of("ReduceMean", (2, 16, 24), axes=[1]),
        lambda g: g.op("ReduceSum", g.input("x", (2, 16, 24)), g.const([1])),
    ),
    "padding value": (lambda g: g.op("Pad", g.input("x", (1, 8)), g.const([1, 0, 0, 0]), g.const(3 * ONE)),),
    "epsilon": (
        lambda g: g.op("LayerNormalization", g.input("x", (2, 5, 16)), g.const(np.ones(16, np.float32)), epsilon=10.0),
    ),
    "softmax of one": (of("Softmax", (4, 1), axis=1),),
    "cubic resize": (resizing,),
}
"""Models by id of the fault; each has one node of the operators of the fault."""

CASES = [
    pytest.param(fault, make, id=f"{fault.id} {number}")
    for fault in RUNTIME_FAULTS
    for number, make in enumerate(MODELS.get(fault.id, ()))
]


def made(make: Callable[[GraphBuilder], str]) -> Model:
    g = GraphBuilder("m")
    g.output(make(g))
    return loaded(g)


def decibels(model: Model, dialect: Dialect, folder: Path) -> float:
    """Lowest SQNR of a runtime against the meaning of the file, of all placements in a model; -inf if it is refused."""
    feeds = list(random_feeds({name: ("float", model.types[name].shape) for name in model.inputs}, 2))
    space, floating = build_space(model, dialect), save_to_folder(model, folder)
    tensors = {edge.tensor for dimension in space.dimensions for edge in dimension.edges} - model.constants.keys()
    inserter = Inserter(model, dialect, calibrate(floating, tensors, feeds))
    lowest = np.inf
    for choices in product((0, 1), repeat=len(space)):
        path = inserter.write(space.resolve(Placement(choices)), folder)
        exact = run(path, feeds[0])
        try:
            found = run_openvino(path, feeds[0]) if dialect.name == "openvino" else run(path, feeds[0], optimize=True)
        except REFUSALS:
            return -np.inf
        for values, other in zip(exact.values(), found.values() if isinstance(found, dict) else found, strict=True):
            noise = max(float(np.square(values - other).sum()), 1e-30)
            lowest = min(lowest, 10 * np.log10(float(np.square(values).sum()) / noise))
    return float(lowest)


def test_every_known_fault_has_a_model():
    assert {fault.id for fault in RUNTIME_FAULTS} == MODELS.keys()


@pytest.mark.parametrize(("fault", "make"), CASES)
def test_file_with_the_rule_is_right(fault, make, tmp_path):
    model, dialect = made(make), BUILTIN_DIALECTS[fault.runtime]
    node = next(node for node in model.nodes if node.op in fault.operators)
    assert first_violated_rule(model, dialect, node, 0).name == fault.id
    assert decibels(model, dialect, tmp_path) >= MIN_SQNR_DB


@pytest.mark.parametrize(("fault", "make"), CASES)
def test_file_without_the_rule_is_wrong_where_the_table_lists_the_runtime(fault, make, tmp_path):
    others = tuple(other for other in RUNTIME_FAULTS if other != fault)
    dialect = replace(BUILTIN_DIALECTS[fault.runtime], faults=others)
    wrong = decibels(made(make), dialect, tmp_path) < MIN_SQNR_DB
    assert wrong == fault.affects(describe_installed(fault.runtime))


@pytest.mark.parametrize(
    ("facts", "affected"),
    [
        ({}, True),
        ({"version": "1.24.4", "device": "Xeon (AMX)"}, True),
        ({"version": "1.24.4", "device": "Xeon (AVX512-VNNI)"}, False),
        ({"version": "1.31.2", "device": "Xeon (AMX)"}, True),
        ({"version": "1.32.0", "device": "Xeon (AMX)"}, False),
    ],
)
def test_fault_applies_to_version_and_instructions_or_where_both_are_unknown(facts, affected):
    fault = replace(RUNTIME_FAULTS[0], instructions="AMX", right_in="1.32.0")
    assert fault.affects(facts) == affected


def test_dialect_has_the_faults_of_the_given_runtime(monkeypatch):
    fault = replace(RUNTIME_FAULTS[-1], right_in="1.32.0")
    monkeypatch.setattr(
        "harness.registry.load_plugin", lambda kind, use: replace(BUILTIN_DIALECTS[use], faults=(fault,))
    )
    assert load_dialect("onnxruntime", {"version": "1.24.4", "device": "Xeon"}).faults == (fault,)
    assert load_dialect("onnxruntime", {"version": "1.33.0", "device": "Xeon"}).faults == ()
    assert load_dialect("onnxruntime", {}).faults == (fault,)
    assert fault.rule.endswith("(right in onnxruntime 1.32.0).")
