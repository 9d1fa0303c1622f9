"""Models for the region engine: drawn at random as plain data, and blocks of well-known networks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from onnx import TensorProto, helper

from harness.graph.model import Model, Node, TensorType

Spec = Sequence[tuple[str, Sequence[int], bool]]
"""For each node its operator, references to what it reads, and whether its first result is a model output.

References count modulo what there is: the inputs a and b, the constant w, then the results so far.
"""

RESULTS = {"Split": 2}


def spec_model(spec: Spec, seed: int | None = None) -> Model:
    """A model of a spec; with a seed, nodes in another topological order and every tensor and node renamed."""
    available = ["a", "b", "w"]
    rows: list[tuple[str, list[str], list[str]]] = []
    ends = []
    for number, (op, references, is_output) in enumerate(spec):
        inputs = [available[reference % len(available)] for reference in references]
        outputs = [f"t{number}_{place}" for place in range(RESULTS.get(op, 1))]
        rows.append((op, inputs, outputs))
        available += outputs
        if is_output:
            ends.append(outputs[0])
    read = {name for _, inputs, _ in rows for name in inputs}
    ends = [name for name in available[3:] if name in ends or name not in read]
    names = {name: name for name in available}
    if seed is not None:
        rng = random.Random(seed)
        rows = _shuffled(rows, rng)
        numbers = rng.sample(range(10**6), len(available))
        names = {name: f"n{number}" for name, number in zip(available, numbers, strict=True)}
    return _model(rows, names, ends)


def _shuffled(
    rows: list[tuple[str, list[str], list[str]]], rng: random.Random
) -> list[tuple[str, list[str], list[str]]]:
    known, left, found = {"a", "b", "w"}, list(rows), []
    while left:
        ready = [row for row in left if known.issuperset(row[1])]
        pick = rng.choice(ready)
        left.remove(pick)
        found.append(pick)
        known.update(pick[2])
    return found


def _model(rows: list[tuple[str, list[str], list[str]]], names: dict[str, str], ends: list[str]) -> Model:
    def value(name: str) -> object:
        return helper.make_tensor_value_info(names[name], TensorProto.FLOAT, [2, 2])

    nodes = [
        helper.make_node(op, [names[n] for n in inputs], [names[n] for n in outputs], name=names[outputs[0]])
        for op, inputs, outputs in rows
    ]
    constant = helper.make_tensor(names["w"], TensorProto.FLOAT, [2, 2], [1.0] * 4)
    inputs = [value("a"), value("b")]
    proto = helper.make_model(helper.make_graph(nodes, "g", inputs, [value(n) for n in ends], [constant]))
    return Model(
        proto=proto,
        source="drawn",
        sha256="0",
        nodes=tuple(
            Node(
                index=index,
                name=node.name,
                op=node.op_type,
                domain="",
                inputs=tuple(node.input),
                outputs=tuple(node.output),
                attributes={},
            )
            for index, node in enumerate(nodes)
        ),
        types={name: TensorType("float", (2, 2)) for name in names.values()},
    )


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Model]:
    """See `spec_model`."""
    return spec_model
