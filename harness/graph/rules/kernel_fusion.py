"""Operators that a runtime computes in one kernel, so that pairs between them only reduce accuracy.

A convolution is fused with BatchNormalization, activation and residual Add. The compiler of TensorRT-RTX generates one
kernel for all operators between two products; for operators that only move values, those after them decide. Measured on
1.7 with all points of nine models quantized: of 702 edges by this rule 10 had an effect, of 2145 others 2069.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from harness.graph.model import Model, Node
from harness.graph.rules.agreements import passed_slot
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    ARITHMETIC_OPS,
    CONVOLUTION_OPS,
    MOVEMENT_OPS,
    NORMALIZATION_OPS,
    SOFTMAX_OPS,
)


def follows_convolution(model: Model, dialect: Dialect, node: Node, tensor: str) -> bool:
    """Return whether a node's input is between Conv, BatchNormalization and activation, also in x * sigmoid(x)."""
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
    """Return whether input `slot` of an Add is fused with it: the result of a convolution that only the Add reads.

    Of two such inputs it is the first. The result of a MatMul does not count, because an Add of two tensors is not
    fused with it, and ModelOpt quantizes both.
    """
    if node.op != "Add":
        return False
    fusible = [_is_fused_convolution(model, dialect, name) for name in node.inputs]
    return slot < len(fusible) and fusible[slot] and not any(fusible[:slot])


def _is_fused_convolution(model: Model, dialect: Dialect, tensor: str) -> bool:
    """Return whether a convolution, or the Add of its bias, computes a tensor with only one reader."""
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


_GENERATED_OPS = (
    ACTIVATION_OPS
    | ARITHMETIC_OPS
    | NORMALIZATION_OPS
    | SOFTMAX_OPS
    | {"Exp", "GlobalAveragePool", "ReduceMax", "ReduceMean", "ReduceSum"}
)
_EPILOGUE_SOURCES = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""Products whose result is written in float, for a generated kernel behind them."""
_MOVING_OPS = MOVEMENT_OPS | {"Concat", "Dropout", "Identity"}


def find_inner_tensors(model: Model) -> frozenset[str]:
    """Return the names of tensors that are computed and read inside one kernel that TensorRT-RTX generates."""
    sources = _find_sources(model)
    return frozenset(
        tensor
        for tensor, ends in _find_ends(model).items()
        if tensor not in model.constants
        and ends <= _GENERATED_OPS | {""}
        and (
            (source := sources.get(tensor, "")) in _GENERATED_OPS | _EPILOGUE_SOURCES | {""}
            or (source == "MatMul" and ends == {"Add"})
        )
    )


def _find_sources(model: Model) -> Mapping[str, str]:
    """Return the operator that computes each tensor, skipping operators that only move values; none for inputs."""
    found: dict[str, str] = {}
    for node in model.nodes:
        slot = 0 if node.op in _MOVING_OPS and not node.opaque else passed_slot(model, node)
        moved = slot is not None and node.op != "MaxPool" and node.inputs[slot] not in model.constants
        for name in node.outputs:
            found[name] = found.get(node.inputs[slot], "") if moved and slot is not None else node.op
    return found


def _find_ends(model: Model) -> Mapping[str, frozenset[str]]:
    """Return the operators that use each tensor, skipping operators that only move values; "" for a model output."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in model.outputs:
        found[name].add("")
    for node in reversed(model.nodes):
        moves = not node.opaque and node.op != "MaxPool"
        moves &= node.op in _MOVING_OPS or passed_slot(model, node) is not None
        ends = set().union(*(found[name] for name in node.outputs)) if moves else {node.op}
        for name in {*node.inputs, *node.captures} - {""}:
            found[name] |= ends
    return {name: frozenset(ends) for name, ends in found.items()}
