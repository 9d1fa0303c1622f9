"""An input of a node that asks for a precision, and what is quantized together with it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import QUANTIZABLE_FLOAT_TYPES

__all__ = ["InputSite", "is_activation", "is_float", "jointly_quantized_inputs"]


@dataclass(frozen=True, slots=True)
class InputSite:
    """An input of a node that asks for a precision."""

    model: Model
    dialect: Dialect
    node: Node
    slot: int
    precision: str

    @property
    def tensor(self) -> str:
        """Name of the tensor at this input; "" where it is omitted."""
        return self.node.inputs[self.slot] if self.slot < len(self.node.inputs) else ""

    @property
    def is_linear(self) -> bool:
        """Whether the node takes data and weight together."""
        return self.node.op in self.dialect.linear_ops

    @property
    def producer(self) -> Node | None:
        """The node that makes the tensor."""
        index = self.model.producer.get(self.tensor)
        return None if index is None else self.model.nodes[index]


def is_activation(model: Model, tensor: str) -> bool:
    """Whether a tensor is neither constant nor omitted."""
    return bool(tensor) and tensor not in model.constants


def jointly_quantized_inputs(model: Model, dialect: Dialect, node: Node, slot: int) -> tuple[int, ...]:
    """The inputs of a node that are quantized together with this one, itself included, in order.

    Data and weight of a linear operator; all activations of a Concat, which share a scale; where the dialect asks for
    it, constants with the first activation, or with the first of them where there is none (a table of embeddings).
    """
    if node.op in dialect.linear_ops:
        return (0, 1)
    floats = [other for other, name in enumerate(node.inputs) if is_float(model, name)]
    constants = [other for other in floats if not is_activation(model, node.inputs[other])]
    activations = [other for other in floats if other not in constants]
    joint = set(activations if node.op == "Concat" else activations[:1])
    if node.op in dialect.constant_operands:
        joint.update(constants)
    return tuple(sorted(joint)) if slot in joint else (slot,)


def is_float(model: Model, tensor: str) -> bool:
    """Whether a tensor is known to hold elements that may be quantized."""
    known = model.types.get(tensor)
    return known is not None and known.dtype in QUANTIZABLE_FLOAT_TYPES
