"""Models for the region engine: drawn at random as plain data, and stacks of what networks are made of."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from onnx import TensorProto, helper

from harness.graph.model import Model, Node, TensorType

Spec = Sequence[tuple[str, Sequence[int], bool]]
"""For each node its operator, references to what it reads, and whether its first result is a model output.

An operator may have a variant behind a point ("Softmax.1"). References count modulo what there is: the inputs a and b,
the constant w, then the results so far; those below zero are OMITTED, VECTOR and INDICES.
"""

OMITTED, VECTOR, INDICES = -1, -2, -3
SPECIAL = {OMITTED: "", VECTOR: "v", INDICES: "i"}
RESULTS = {"Split": 2}
SUBGRAPHS = {"If"}
"""They read their first reference; the others are captured."""
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Concat.0": {"axis": 0}, "Concat.1": {"axis": 1}, "Softmax.0": {"axis": 0}, "Softmax.1": {"axis": 1},
    "Split.0": {"axis": 0}, "Split.1": {"axis": 1}, "Transpose.1": {"perm": [1, 0]},
}  # fmt: skip


@dataclass(frozen=True)
class _Row:
    op: str
    inputs: list[str]
    captures: list[str]
    outputs: list[str]


def spec_model(spec: Spec, seed: int | None = None) -> Model:
    """A model of a spec; with a seed, nodes in another topological order and every tensor and node renamed."""
    available = ["a", "b", "w"]
    rows: list[_Row] = []
    ends = []
    for number, (op, references, is_output) in enumerate(spec):
        reads = [SPECIAL[r] if r < 0 else available[r % len(available)] for r in references]
        own = 1 if op.partition(".")[0] in SUBGRAPHS else len(reads)
        outputs = [f"t{number}_{place}" for place in range(RESULTS.get(op.partition(".")[0], 1))]
        rows.append(_Row(op, reads[:own], reads[own:], outputs))
        available += outputs
        if is_output:
            ends.append(outputs[0])
    read = {name for row in rows for name in (*row.inputs, *row.captures)}
    ends = [name for name in available[3:] if name in ends or name not in read]
    known = [*available, "v", "i"]
    names = {name: name for name in known}
    if seed is not None:
        rng = random.Random(seed)
        rows = _shuffled(rows, rng)
        numbers = rng.sample(range(10**6), len(known))
        names = {name: f"n{number}" for name, number in zip(known, numbers, strict=True)}
    return _model(rows, {**names, "": ""}, ends)


def _shuffled(rows: Sequence[_Row], rng: random.Random) -> list[_Row]:
    known, left, found = {"a", "b", "w", *SPECIAL.values()}, list(rows), []
    while left:
        ready = [row for row in left if known.issuperset([*row.inputs, *row.captures])]
        pick = rng.choice(ready)
        left.remove(pick)
        found.append(pick)
        known.update(pick.outputs)
    return found


def _model(rows: Iterable[_Row], names: dict[str, str], ends: list[str]) -> Model:
    def value(name: str, kind: int = TensorProto.FLOAT) -> object:
        return helper.make_tensor_value_info(names[name], kind, [2, 2])

    nodes = [
        Node(
            index=index,
            name=names[row.outputs[0]],
            op=row.op.partition(".")[0],
            domain="",
            inputs=tuple(names[n] for n in row.inputs),
            outputs=tuple(names[n] for n in row.outputs),
            attributes=ATTRIBUTES.get(row.op, {}),
            opaque=row.op.partition(".")[0] in SUBGRAPHS,
            captures=tuple(names[n] for n in row.captures),
            body=row.op.partition(".")[2] if row.op.partition(".")[0] in SUBGRAPHS else "",
        )
        for index, row in enumerate(rows)
    ]
    protos = [helper.make_node(n.op, list(n.inputs), list(n.outputs), name=n.name, **n.attributes) for n in nodes]
    constants = [
        helper.make_tensor(names["w"], TensorProto.FLOAT, [2, 2], [1.0] * 4),
        helper.make_tensor(names["v"], TensorProto.FLOAT, [2], [1.0] * 2),
    ]
    inputs = [value("a"), value("b"), value("i", TensorProto.INT64)]
    proto = helper.make_model(helper.make_graph(protos, "g", inputs, [value(n) for n in ends], constants))
    types = {name: TensorType("float", (2, 2)) for name in names.values() if name}
    types |= {names["v"]: TensorType("float", (2,)), names["i"]: TensorType("int64", (2, 2))}
    return Model(proto=proto, source="drawn", sha256="0", nodes=tuple(nodes), types=types)


@dataclass
class _Stack:
    """Builds a spec; results are known by their reference."""

    spec: list[tuple[str, list[int], bool]] = field(default_factory=list)
    results: int = 3

    def add(self, op: str, *references: int, end: bool = False) -> int:
        self.spec.append((op, list(references), end))
        first = self.results
        self.results += RESULTS.get(op.partition(".")[0], 1)
        return first


W = 2
"""Reference of the constant w."""


def _attention(s: _Stack, x: int) -> int:
    key = s.add("Transpose.1", s.add("MatMul", x, W))
    weights = s.add("Softmax.1", s.add("MatMul", s.add("MatMul", x, W), key))
    return s.add("MatMul", weights, s.add("MatMul", x, W))


def _inception(s: _Stack, x: int) -> int:
    longer = s.add("Relu", s.add("MatMul", s.add("Relu", x), W))
    return s.add("Concat.1", s.add("Relu", x), longer, s.add("MaxPool", x))


def _norm(s: _Stack, x: int) -> int:
    centred = s.add("Sub", x, s.add("ReduceMean", x))
    deviation = s.add("Sqrt", s.add("Add", s.add("ReduceMean", s.add("Mul", centred, centred)), VECTOR))
    return s.add("Mul", s.add("Div", centred, deviation), VECTOR)


def _split(s: _Stack, x: int) -> int:
    half = s.add("Split.1", x)
    return s.add("Sub", half, s.add("Sigmoid", half + 1))


def _condition(s: _Stack, x: int) -> int:
    return s.add("If.tanh", s.add("ReduceMax", x), x, s.add("Relu", x))


MOTIFS: dict[str, Callable[[_Stack, int], int]] = {
    "attention": _attention,
    "clip": lambda s, x: s.add("Clip", x, OMITTED, VECTOR),
    "condition": _condition,
    "constant": lambda s, x: s.add("Add", x, VECTOR),
    "exit": lambda s, x: s.add("Relu", x, end=True),
    "gather": lambda s, x: s.add("Gather", x, INDICES),
    "inception": _inception,
    "norm": _norm,
    "residual": lambda s, x: s.add("Add", s.add("MatMul", s.add("Relu", s.add("MatMul", x, W)), W), x),
    "second input": lambda s, x: s.add("Sub", x, 1),
    "silu": lambda s, x: s.add("Mul", x, s.add("Sigmoid", x)),
    "split": _split,
}
"""What networks are made of, each behind a tensor."""


def stacked(names: Iterable[str]) -> list[tuple[str, list[int], bool]]:
    """The spec of some of `MOTIFS` one behind the other."""
    stack, x = _Stack(), 0
    for name in names:
        x = MOTIFS[name](stack, x)
    return stack.spec


@pytest.fixture(scope="session")
def make_model():
    """See `spec_model`."""
    return spec_model


@pytest.fixture(scope="session")
def make_stack():
    """See `make_batch`."""
    return stacked


@pytest.fixture(scope="session")
def motifs():
    """Names of `MOTIFS`."""
    return sorted(MOTIFS)
