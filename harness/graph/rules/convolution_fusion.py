"""Operators that a runtime computes in the kernel of a convolution: BatchNormalization, activation, residual Add."""

from __future__ import annotations

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import ACTIVATION_OPS, CONVOLUTION_OPS


def follows_convolution(model: Model, dialect: Dialect, node: Node, tensor: str) -> bool:
    """Return whether an input is between Conv, BatchNormalization and activation; x * sigmoid(x) is an activation."""
    source = model.producer_node(tensor)
    if source is None:
        return False
    is_gate = _is_gate(model, node)
    residual = source.op == "Add" and any(_is_fused_convolution(model, dialect, name) for name in source.inputs)
    if source.op in CONVOLUTION_OPS or source.op == "BatchNormalization" or residual:
        return node.op in ACTIVATION_OPS or node.op == "BatchNormalization" or is_gate
    if not (is_gate and source.op in ACTIVATION_OPS):
        return False
    others = (model.producer_node(name) for name in node.inputs if name != tensor)
    return any(other is not None and other.op in CONVOLUTION_OPS for other in others)


def _is_gate(model: Model, node: Node) -> bool:
    """Return whether a node multiplies x by an activation of x."""
    if node.op != "Mul" or len(node.inputs) != 2:
        return False
    makers = zip(map(model.producer_node, node.inputs), reversed(node.inputs), strict=True)
    return any(maker and maker.op in ACTIVATION_OPS and maker.inputs[0] == other for maker, other in makers)


def is_fusible_operand(model: Model, dialect: Dialect, node: Node, slot: int) -> bool:
    """Return whether a convolution computes this operand of an Add for it alone; of two operands, the first.

    Behind a MatMul both are legal: an Add of two tensors is no part of its kernel, and ModelOpt quantizes both.
    """
    if node.op != "Add":
        return False
    fusible = [_is_fused_convolution(model, dialect, name) for name in node.inputs]
    return slot < len(fusible) and fusible[slot] and not any(fusible[:slot])


def _is_fused_convolution(model: Model, dialect: Dialect, tensor: str) -> bool:
    """Return whether a convolution, with its bias Add if it has one, computes a tensor for one reader alone."""
    for _ in range(2):
        node = model.producer_node(tensor)
        if node is None or len(model.consumers.get(tensor, ())) != 1 or tensor in model.output_names:
            return False
        if node.op in dialect.linear_ops:
            return node.op in CONVOLUTION_OPS
        activations = [name for name in node.inputs if model.is_activation(name)]
        if node.op != "Add" or len(activations) != 1:
            return False
        tensor = activations[0]
    return False
