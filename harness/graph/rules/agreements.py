"""Inputs of a node that are quantized together, and operands of one product that must have one precision.

Data and weight, the activations of a Concat, and constants with their data are quantized together. Operands must have
one precision even if their pairs are further away: NVIDIA's compiler moves a DequantizeLinear after operators that only
move values, and after a product with a constant scalar. If a MatMul or Gemm then has INT8 and FP8 operands, it refuses
the model (version 1.7: "Input and filter have to be the same type"); see `tests/recorded/compiler_verdicts.csv`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import CONVOLUTION_OPS, MOVEMENT_OPS, QUANTIZABLE_FLOAT_TYPES
from search.space import Agreement, Edge

PASSING_OPS = MOVEMENT_OPS - {"Resize", "Upsample"} | {"Concat", "Dropout", "Identity", "MaxPool"}
"""The DequantizeLinear in front of them is moved behind them, but for a Pad by a constant and a MaxPool of FP8."""
SCALING_OPS = frozenset({"Div", "Mul"})
"""The same, if the other operand is a constant scalar."""


def find_agreements(model: Model, dialect: Dialect) -> tuple[Agreement, ...]:
    """Return the products whose operands must have one precision, each with the edges that decide the precisions."""
    products = (node for node in model.nodes if node.op in dialect.linear_ops - CONVOLUTION_OPS and not node.opaque)
    paths = ([tuple(_iter_path(model, node, slot)) for slot in (0, 1)] for node in products)
    return tuple((first, second) for first, second in paths if len(first) > 1 or len(second) > 1)


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
    """Return the number of the input from which the compiler moves a DequantizeLinear behind a node, or None."""
    if node.opaque:
        return None
    if node.op in PASSING_OPS:
        return None if node.op == "Pad" and node.attributes.get("mode", "constant") == "constant" else 0
    if node.op not in SCALING_OPS:
        return None
    scalars = [name in model.constants and math.prod(model.types[name].shape) == 1 for name in node.inputs]
    return scalars.index(False) if sum(scalars) == 1 and (node.op == "Mul" or scalars[1]) else None


@dataclass(frozen=True, slots=True)
class JointInputs:
    """Inputs of a node that are quantized together; computed once, because a node may have thousands of inputs.

    Attributes:
        slots: Numbers of the inputs in order.
        members: Numbers of the inputs as a set.
        constants: Names of the constants among the inputs.
        first: Number of the first activation, or of the first input without activations.
    """

    slots: tuple[int, ...]
    members: frozenset[int]
    constants: tuple[str, ...]
    first: int


def jointly_quantized_inputs(model: Model, dialect: Dialect, node: Node, slot: int) -> tuple[int, ...]:
    """Return the numbers of all inputs of a node that are quantized together with input `slot`, in order.

    These are data and weight of a linear operator; all activations of a Concat, which share a scale; and, for some
    operators of a dialect (`constant_operands`), constants with the first activation, or with the first constant if
    there is no activation (a table of embeddings).
    """
    if node.op in dialect.linear_ops:
        return (0, 1)
    joint = find_joint_inputs(model, node, with_constants=node.op in dialect.constant_operands)
    return joint.slots if slot in joint.members else (slot,)


def find_joint_inputs(model: Model, node: Node, *, with_constants: bool) -> JointInputs:
    """Return the inputs of a node that are quantized together, with constants if `with_constants`; cached."""
    known = model.cached_analysis(_make_joint_inputs_cache)
    key = (node.index, with_constants)
    if key not in known:
        activations: list[int] = []
        constants: list[int] = []
        for slot, name in enumerate(node.inputs):
            if is_float(model, name):
                (activations if model.is_activation(name) else constants).append(slot)
        joint = activations if node.op == "Concat" else activations[:1]
        slots = tuple(sorted([*joint, *constants])) if with_constants else tuple(joint)
        names = tuple(node.inputs[slot] for slot in constants) if with_constants else ()
        known[key] = JointInputs(slots, frozenset(slots), names, next(iter([*joint, *slots]), 0))
    return known[key]


def _make_joint_inputs_cache(_: Model) -> dict[tuple[int, bool], JointInputs]:
    return {}


def is_float(model: Model, tensor: str) -> bool:
    """Return whether a tensor is of type float32 or float16; False if its type is unknown."""
    known = model.types.get(tensor)
    return known is not None and known.dtype in QUANTIZABLE_FLOAT_TYPES
