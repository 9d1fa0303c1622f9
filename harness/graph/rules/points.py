"""Insertion points at node inputs: legal places of Q/DQ pairs, the edges that they quantize, and their cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.graph.model import Model, Node
from harness.graph.rules.agreements import jointly_quantized_inputs
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    MOVEMENT_OPS,
    NORMALIZATION_OPS,
    POOLING_OPS,
    QUANTIZABLE_FLOAT_TYPES,
    SOFTMAX_OPS,
)
from harness.graph.rules.placement_rules import PlacementRule, applicable_rules, first_violated_rule
from search.space import Edge

_OPS_BY_ROLE: Mapping[str, frozenset[str]] = {
    "mul": frozenset({"Mul", "Div"}),
    "pool": POOLING_OPS,
    "concat": frozenset({"Concat"}),
    "activation": ACTIVATION_OPS | SOFTMAX_OPS,
    "normalization": NORMALIZATION_OPS,
    "movement": MOVEMENT_OPS,
}
_OTHER_FLOAT_TYPES = frozenset({"bfloat16", "double", "float16"})
_ROLE_BY_OP = {op: role for role, ops in _OPS_BY_ROLE.items() for op in ops}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPoint:
    """Place for a Q/DQ pair at one node.

    Attributes:
        node: Index of the node.
        slot: Number of the input, or of the first of several inputs that are quantized together.
        edges: Edges that are quantized together.
        precisions: Legal precisions among the requested ones, in that order.
        role: Role of the node, see `search.space.Dimension`.
        macs: Number of multiply-accumulates of a linear operator; 0 for others.
    """

    node: int
    slot: int
    edges: tuple[Edge, ...]
    precisions: tuple[str, ...]
    role: str
    macs: int


def find_points(
    model: Model, dialect: Dialect, precisions: Sequence[str] = ("int8",)
) -> tuple[tuple[QuantizationPoint, ...], ...]:
    """Return the insertion points of each node of the model, in the order of the node's inputs; () without any.

    Args:
        precisions: Precisions of interest; each point allows at least one of them.
    """
    operators, rules = dialect.operators, {p: applicable_rules(dialect, p) for p in precisions}
    return tuple(
        tuple(_node_points(model, dialect, node, rules)) if node.op in operators and not node.opaque else ()
        for node in model.nodes
    )


def float_inputs_with_rule(
    model: Model, dialect: Dialect, precision: str = "int8"
) -> tuple[tuple[Edge, PlacementRule], ...]:
    """Return every input without an insertion point, with the first rule that keeps it float, in graph order."""
    found, rules = [], applicable_rules(dialect, precision)
    for node, points in zip(model.nodes, find_points(model, dialect, (precision,)), strict=True):
        taken = {edge.slot for point in points for edge in point.edges}
        for slot, tensor in enumerate(node.inputs):
            left = tensor and slot not in taken
            rule = first_violated_rule(model, dialect, node, slot, precision, rules) if left else None
            if rule is not None:
                found.append((Edge(tensor, node.name, slot), rule))
    return tuple(found)


def explain_no_points(model: Model, dialect: Dialect, precision: str = "int8") -> str:
    """Return an error message for a model without insertion points: the rule that applies to most inputs, and a remedy.

    If inputs have a float type that another export of the model would avoid, the message is about these.
    """
    head = f"{model.source}: no insertion point that dialect {dialect.name!r} allows at {precision}"
    refused = float_inputs_with_rule(model, dialect, precision)
    if not refused:
        return f"{head}: it has no operator that reads a tensor"
    types = {edge.tensor: model.types[edge.tensor].dtype for edge, _ in refused if edge.tensor in model.types}
    curable = [(edge, rule) for edge, rule in refused if types.get(edge.tensor) in _OTHER_FLOAT_TYPES]
    ((rule, _),) = Counter(rule for _, rule in curable or refused).most_common(1)
    remedy = f"see 'qdq regions {model.source} --dialect {dialect.name} --verbose' for the rule of each input"
    if curable:
        found = " and ".join(sorted({types[edge.tensor] for edge, _ in curable}))
        remedy = f"its tensors are in {found}: export the model in float32, or take a backend of another dialect"
    return f"{head}: rule {rule.name!r} keeps them float ({rule.text.removesuffix('.')}); {remedy}"


def input_role(model: Model, dialect: Dialect, node: Node) -> str:
    """Return the role of a node for the tensors that it reads, see `search.space.Dimension`.

    An Add of two activations, as in a residual connection, is "add"; an Add of a constant is "other", like all
    operators without a role. A mean over images is "pool", one over features is part of a normalization.
    """
    if node.op in dialect.linear_ops:
        return "linear"
    if node.op in ("Add", "Sum"):
        return "add" if sum(map(model.is_activation, node.inputs)) > 1 else "other"
    if node.op in ("ReduceMax", "ReduceMean"):
        known = model.types.get(node.inputs[0])
        return "pool" if known and len(known.shape) == 4 else "other"
    return _ROLE_BY_OP.get(node.op, "other")


def weighted_ops_without_points(model: Model, dialect: Dialect) -> tuple[str, ...]:
    """Return the sorted types of operators that have weights of rank 2 or more but no point, such as LSTM."""
    found = set()
    for node in model.nodes:
        if not node.opaque and node.op not in dialect.operators:
            weights = (model.types[name] for name in node.inputs if name in model.constants)
            if any(kind.dtype in QUANTIZABLE_FLOAT_TYPES and len(kind.shape) > 1 for kind in weights):
                found.add(node.op)
    return tuple(sorted(found))


def count_macs(model: Model, dialect: Dialect, node: Node) -> int:
    """Return the number of multiply-accumulates of a linear operator; 0 for others and if a shape is unknown."""
    if node.op not in dialect.linear_ops or node.opaque:
        return 0
    shapes = [model.types[name].shape for name in (*node.inputs[:2], node.outputs[0]) if name in model.types]
    if len(shapes) != 3:
        return 0
    data, weight, result = shapes
    if node.op == "Conv":
        return math.prod(result) * math.prod(weight[1:])
    if node.op == "Einsum":
        terms = str(node.attributes["equation"]).replace(" ", "").partition("->")[0].split(",")
        sizes = dict(zip("".join(terms), (*data, *weight), strict=False))  # wrong if an ellipsis replaces several axes
        return math.prod(sizes.values())
    if node.op == "ConvTranspose":
        return math.prod(data) * math.prod(weight[1:])
    depth = data[0] if node.attributes.get("transA") else data[-1] if data else 0
    return math.prod(result) * depth


def _node_points(
    model: Model, dialect: Dialect, node: Node, rules: Mapping[str, Sequence[PlacementRule]]
) -> Iterator[QuantizationPoint]:
    role, macs = input_role(model, dialect, node), count_macs(model, dialect, node)
    for slot, tensor in enumerate(node.inputs):
        legal = tuple(
            precision
            for precision, known in rules.items()
            if tensor and first_violated_rule(model, dialect, node, slot, precision, known) is None
        )
        if legal:
            yield QuantizationPoint(
                node=node.index,
                slot=slot,
                edges=_joint_edges(model, dialect, node, slot),
                precisions=legal,
                role=role,
                macs=macs,
            )


def _joint_edges(model: Model, dialect: Dialect, node: Node, slot: int) -> tuple[Edge, ...]:
    slots = jointly_quantized_inputs(model, dialect, node, slot)
    return tuple(Edge(node.inputs[other], node.name, other) for other in slots)
