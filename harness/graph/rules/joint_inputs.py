"""Inputs of a node that are quantized together: data and weight, activations of a Concat, constants with the data."""

from __future__ import annotations

from dataclasses import dataclass

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import QUANTIZABLE_FLOAT_TYPES


@dataclass(frozen=True, slots=True)
class JointInputs:
    """Inputs of a node that are quantized together, found once for a node: it may have thousands of inputs.

    Attributes:
        slots: The inputs in order.
        members: The same as a set.
        constants: Names of the constants among them.
        first: The first activation among them, or the first of them.
    """

    slots: tuple[int, ...]
    members: frozenset[int]
    constants: tuple[str, ...]
    first: int


def jointly_quantized_inputs(model: Model, dialect: Dialect, node: Node, slot: int) -> tuple[int, ...]:
    """Return the inputs of a node that are quantized together with this one, itself included, in order.

    These are data and weight of a linear operator; all activations of a Concat, which share a scale; and, if the
    dialect asks for it, constants with the first activation, or with the first constant if there is no activation (a
    table of embeddings).
    """
    if node.op in dialect.linear_ops:
        return (0, 1)
    joint = find_joint_inputs(model, node, with_constants=node.op in dialect.constant_operands)
    return joint.slots if slot in joint.members else (slot,)


def find_joint_inputs(model: Model, node: Node, *, with_constants: bool) -> JointInputs:
    """Return the inputs of a node that are quantized together, with constants among them if asked; cached."""
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
    """Return whether a tensor has a type that may be quantized."""
    known = model.types.get(tensor)
    return known is not None and known.dtype in QUANTIZABLE_FLOAT_TYPES
