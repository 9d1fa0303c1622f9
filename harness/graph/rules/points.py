"""Insertion points at node inputs: legal places of Q/DQ pairs, the edges that they quantize, and their cost."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from harness.base.text import format_names
from harness.graph.model import Model, Node
from harness.graph.protos import iter_graphs, iter_subgraphs
from harness.graph.rules.agreements import jointly_quantized_inputs
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.movement import find_repeated_input
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    CONVOLUTION_OPS,
    LINEAR_OPS,
    MOVEMENT_OPS,
    NORMALIZATION_OPS,
    POOLING_OPS,
    QUANTIZABLE_FLOAT_TYPES,
    SOFTMAX_OPS,
)
from harness.graph.rules.placement_rules import PlacementRule, first_violated_rule
from harness.graph.rules.runtime_faults import find_affected_nodes
from search.space import Edge

_OPS_BY_ROLE: Mapping[str, frozenset[str]] = {
    "mul": frozenset({"Mul", "Div"}),
    "pool": POOLING_OPS,
    "concat": frozenset({"Concat"}),
    "activation": ACTIVATION_OPS | SOFTMAX_OPS,
    "normalization": NORMALIZATION_OPS,
    "movement": MOVEMENT_OPS,
}
_OTHER_FLOAT_TYPES = frozenset({"bfloat16", "double"})
_PRODUCT_NAME = re.compile("conv|matmul|gemm|attention|einsum", re.IGNORECASE)
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
    operators, found = dialect.operators, []
    for node in model.nodes:
        points = []
        inputs = node.inputs if node.op in operators and not node.opaque else ()
        for slot in (slot for slot, tensor in enumerate(inputs) if tensor):
            refused = {p for p in precisions if first_violated_rule(model, dialect, node, slot, p)}
            legal = tuple(precision for precision in precisions if precision not in refused)
            if legal:
                slots = jointly_quantized_inputs(model, dialect, node, slot)
                points.append(
                    QuantizationPoint(
                        node=node.index,
                        slot=slot,
                        edges=tuple(Edge(node.inputs[other], node.name, other) for other in slots),
                        precisions=legal,
                        role=_input_role(model, dialect, node),
                        macs=_count_macs(model, dialect, node),
                    )
                )
        found.append(tuple(points))
    return tuple(found)


def add_required_edges(
    model: Model, dialect: Dialect, points: Sequence[Sequence[QuantizationPoint]], edges: Iterable[Edge]
) -> set[Edge]:
    """Return edges, and those that must be quantized with them because of faults of the runtime (`both_sides`).

    Args:
        points: Result of `find_points`; an input without a point stays float.
    """
    found, affected = set(edges), model.cached_analysis(find_affected_nodes)
    queue, faults = [edge.tensor for edge in found], [affected[f.id] for f in dialect.faults if f.both_sides]
    while queue and faults:
        maker = model.producer_node(queue.pop())
        if maker is not None and any(maker.index in nodes for nodes in faults):
            repeated = find_repeated_input(model, maker)
            if maker.op in dialect.absorbed and not points[maker.index]:
                repeated = 0
            added = {edge for point in points[maker.index] for edge in point.edges} - found
            found |= added
            queue += [edge.tensor for edge in added] if repeated is None else [maker.inputs[repeated]]
    return found


def float_inputs_with_rule(
    model: Model, dialect: Dialect, precision: str = "int8"
) -> tuple[tuple[Edge, PlacementRule], ...]:
    """Return every input without an insertion point, with the first rule that keeps it float, in graph order."""
    found = []
    for node, points in zip(model.nodes, find_points(model, dialect, (precision,)), strict=True):
        taken = {edge.slot for point in points for edge in point.edges}
        for slot, tensor in enumerate(node.inputs):
            left = tensor and slot not in taken
            rule = first_violated_rule(model, dialect, node, slot, precision) if left else None
            if rule is not None:
                found.append((Edge(tensor, node.name, slot), rule))
    return tuple(found)


def explain_no_points(model: Model, dialect: Dialect, precision: str = "int8") -> str:
    """Return an error message for a model without insertion points, with the causes and their remedies.

    For a model without convolutions and products this is the rule that applies to most inputs.
    """
    head = f"{model.source}: no insertion point that dialect {dialect.name!r} allows at {precision}"
    if causes := explain_float_products(model, dialect, precision):
        return f"{head}: {causes}"
    refused = float_inputs_with_rule(model, dialect, precision)
    if not refused:
        return f"{head}: it has no operator that reads a tensor"
    ((rule, _),) = Counter(rule for _, rule in refused).most_common(1)
    return (
        f"{head}: rule {rule.name!r} keeps them float ({rule.text.removesuffix('.')}), and it has no convolution or "
        f"product; rules of all inputs: 'qdq inspect regions {model.source} --dialect {dialect.name} --verbose'"
    )


def explain_float_products(model: Model, dialect: Dialect, precision: str = "int8") -> str:
    """Return a sentence for each cause that keeps convolutions and products float, with their number and a remedy.

    Those in subgraphs count too. Other operators with weights, such as LSTM, have a sentence of their own. The text is
    empty if all may be quantized.
    """
    causes, total = Counter[str](), 0
    holders = defaultdict[tuple[str, tuple[str, ...]], list[str]](list)
    points = find_points(model, dialect, (precision,))
    for node in model.nodes:
        subgraphs = iter_subgraphs(model.proto.graph.node[node.index])
        inner = [each for graph in subgraphs for part in iter_graphs(graph) for each in part.node]
        if count := sum(_is_product(each.op_type, each.domain, len(each.input)) for each in inner):
            total += count
            deciding = _find_source_inputs(model, node.inputs[0]) if node.op == "If" else ()
            holders[node.op, deciding] += [node.name] * count
        elif _is_product(node.op, node.domain, len(node.inputs)):
            total += 1
            if not points[node.index]:
                rule = first_violated_rule(model, dialect, node, 0, precision)
                causes[_product_cause(model, node, rule)] += 1
    for (op, deciding), names in holders.items():
        remedy = "export the model with the steps unrolled, or the body as a model of its own"
        if op == "If":
            constant = f"the branch depends on input {format_names(deciding)}: make it a constant, or "
            remedy = f"{constant if deciding else ''}export one branch"
        causes[f"are in subgraphs of {op} {format_names(dict.fromkeys(names))}, which stay float: {remedy}"] = len(
            names
        )
    found = [f"{count} of {total} convolutions and products {cause}" for cause, count in causes.most_common()]
    if others := [op for op in weighted_ops_without_points(model, dialect) if not _is_product(op, "", 2)]:
        remedy = "quantize them by a tool of the runtime (quantize_dynamic of ONNX Runtime)"
        found.append(f"the weights of {', '.join(others)} stay float, as no runtime runs it from Q/DQ pairs: {remedy}")
    return ". ".join(found)


def _is_product(op: str, domain: str, inputs: int) -> bool:
    """Return whether an operator is a convolution or product, by its name if it is of another domain or opset."""
    if domain or not onnx.defs.has(op):
        return _PRODUCT_NAME.search(op) is not None
    return op in LINEAR_OPS or op == "Attention" or (op == "Einsum" and inputs > 1)


def _product_cause(model: Model, node: Node, rule: PlacementRule | None) -> str:
    """Return why a convolution or product of the main graph stays float, and a remedy."""
    names, other = node.inputs[:2], "or take a backend of another dialect"
    types = {model.types[name].dtype if name in model.types else "" for name in names}
    if node.opaque:
        which = f"of domain {node.domain}" if node.domain else "that its opset does not define"
        newer = "with the operators of ONNX, or take the file from before a tool or runtime optimized it"
        return f"are an operator {which} ({node.op}): export the model {newer if node.domain else 'with a newer opset'}"
    if "" in types:
        return (
            "read tensors of unknown type or size, which depend on data or on an operator that ONNX does not define: "
            "export the model with fixed sizes, or declare the types in the file (value_info)"
        )
    if unfit := types - QUANTIZABLE_FLOAT_TYPES:
        remedy = "export the model in float32" if unfit & _OTHER_FLOAT_TYPES else "integers stay as they are"
        return f"are in {' and '.join(sorted(unfit))}, and only float32 and float16 can be quantized: {remedy}"
    name, text = ("", "") if rule is None else (rule.name, rule.text.removesuffix("."))
    if name == "operands" and node.op in CONVOLUTION_OPS:
        return f"have a weight that is no constant ({names[1]!r}): export the model with its weights in the file"
    remedies = {
        "finite": "export the model with finite weights",
        "float16": f"export the model in float32, {other}",
        "operands": "split it into products of two operands",
        "operator": f"export the model without {node.op}, {other}",
        "vector": "give the data a batch, so that they have two dimensions or more",
        "product sequence": f"give the products biases, {other}",
    }
    return f"stay float by rule {name!r} ({text}): {remedies.get(name, f'take another precision, {other}')}"


def _find_source_inputs(model: Model, tensor: str) -> tuple[str, ...]:
    """Return the inputs of the model that a tensor is computed from, in the order of the model."""
    seen, waiting = set[str](), [tensor]
    while waiting:
        name = waiting.pop()
        producer = None if name in seen else model.producer_node(name)
        seen.add(name)
        if producer is not None:
            waiting += [*producer.inputs, *producer.captures]
    return tuple(name for name in model.inputs if name in seen)


def _input_role(model: Model, dialect: Dialect, node: Node) -> str:
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


def _count_macs(model: Model, dialect: Dialect, node: Node) -> int:
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
