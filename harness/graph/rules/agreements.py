"""Operands of one product that must have one precision, although no pair is at the product itself.

NVIDIA's compiler moves a DequantizeLinear behind operators that only move values, and behind a product with a constant
scalar. Where a MatMul or Gemm then gets INT8 from one side and FP8 from the other, it refuses the model (version 1.7:
"Input and filter have to be the same type"); `tests/recorded/compiler_verdicts.csv` has the cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import CONVOLUTION_OPS, MOVEMENT_OPS
from search.space import Agreement, Edge

PASSING_OPS = MOVEMENT_OPS - {"Resize", "Upsample"} | {"Concat", "Dropout", "Identity", "MaxPool"}
"""The DequantizeLinear in front of them is moved behind them, but for a Pad by a constant and a MaxPool of FP8."""
SCALING_OPS = frozenset({"Div", "Mul"})
"""The same, if the other operand is a constant scalar."""


def find_agreements(model: Model, dialect: Dialect) -> tuple[Agreement, ...]:
    """Return the products whose operands must have one precision, with the edges that may give it."""
    products = (node for node in model.nodes if node.op in dialect.linear_ops - CONVOLUTION_OPS and not node.opaque)
    paths = ([tuple(_iter_path(model, node, slot)) for slot in (0, 1)] for node in products)
    return tuple(Agreement(first, second) for first, second in paths if len(first) > 1 or len(second) > 1)


def _iter_path(model: Model, node: Node, slot: int) -> Iterator[Edge]:
    """Yield the edges that lead to an operand, from the product backwards."""
    while True:
        tensor = node.inputs[slot]
        yield Edge(tensor, node.name, slot)
        maker = model.producer_node(tensor)
        found = None if maker is None else passed_slot(model, maker)
        if maker is None or found is None:
            return
        node, slot = maker, found


def passed_slot(model: Model, node: Node) -> int | None:
    """Return the input whose DequantizeLinear the compiler moves behind a node, or None."""
    if node.opaque:
        return None
    if node.op in PASSING_OPS:
        return None if node.op == "Pad" and node.attributes.get("mode", "constant") == "constant" else 0
    if node.op not in SCALING_OPS:
        return None
    scalars = [name in model.constants and math.prod(model.types[name].shape) == 1 for name in node.inputs]
    return scalars.index(False) if sum(scalars) == 1 and (node.op == "Mul" or scalars[1]) else None
