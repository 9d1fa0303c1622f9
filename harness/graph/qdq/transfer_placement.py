"""Transfer of a placement from its exported Q/DQ file to another float model of the same structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import onnx

from harness.errors import UserError
from harness.graph.model import Model
from harness.graph.protos import input_values
from harness.graph.qdq.qdq_graph import QDQ_OPS, QDQGraph, node_name, read_qdq_graph
from search.space import Edge


def transfer_placement(source: Path, model: Model) -> dict[Edge, str]:
    """Return the quantized edges of an exported file with their precision, in terms of another float model.

    The models may differ in names and in the values of weights, as after another training, and in nothing else.

    Args:
        source: Q/DQ file that qdq-bench exported.
        model: Float model, prepared as the one that the file was made from.

    Raises:
        UserError: The file cannot be read or has no Q/DQ pair, or the structures differ; the message has the first
            difference.
    """
    placed = read_qdq_graph(source)
    if not placed.edges:
        raise UserError(f"{source}: holds no Q/DQ pair, so there is no placement in it")
    graph = model.proto.graph
    difference = next(_differences(placed, graph, model), None)
    if difference is not None:
        raise UserError(
            f"{model.source}: has another structure than {source}, so its placement does not fit: {difference}"
        )
    kept = [index for index, node in enumerate(placed.proto.graph.node) if node.op_type not in QDQ_OPS]
    counterparts = {placed.labels[index]: node for index, node in zip(kept, model.nodes, strict=True)}
    found = {}
    for edge, precision in placed.edges.items():
        if edge.consumer:
            node = counterparts[edge.consumer]
            found[Edge(node.inputs[edge.slot], node.name, edge.slot)] = precision
        else:
            found[Edge(model.outputs[_output_index(placed, edge)], "", 0)] = precision
    return found


def _output_index(placed: QDQGraph, edge: Edge) -> int:
    names = [placed.before_pairs(name) for name in placed.outputs]
    return names.index(edge.tensor) if edge.tensor in names else placed.outputs.index(edge.tensor)


def _differences(placed: QDQGraph, graph: onnx.GraphProto, model: Model) -> Iterator[str]:
    """Yield differences of structure: inputs, outputs, then node by node in the order of the file."""
    names: dict[str, str] = {}
    theirs, ours = input_values(placed.proto.graph), input_values(graph)
    if len(theirs) != len(ours) or len(placed.outputs) != len(graph.output):
        yield f"{len(ours)} inputs and {len(graph.output)} outputs, but {len(theirs)} and {len(placed.outputs)} there"
    for old, new in zip(theirs, ours, strict=False):
        names[old.name] = new.name
        if old.type != new.type:
            yield f"input {new.name!r} has shape {_shape_text(new)}, but {_shape_text(old)} there"
    nodes = (node for node in placed.proto.graph.node if node.op_type not in QDQ_OPS)
    for before, after in zip_longest(nodes, graph.node):
        if before is None or after is None:
            there, here = ("nothing" if node is None else _describe(node) for node in (before, after))
            yield f"{here}, but {there} there"
            return
        yield from _node_differences(placed, before, after, names, model)
        names.update(zip(before.output, after.output, strict=False))


def _node_differences(
    placed: QDQGraph, before: onnx.NodeProto, after: onnx.NodeProto, names: Mapping[str, str], model: Model
) -> Iterator[str]:
    where = _describe(after)
    if (before.op_type, before.domain) != (after.op_type, after.domain):
        yield f"{where}, but {_describe(before)} there"
        return
    if _sorted_attributes(before) != _sorted_attributes(after):
        yield f"{where} has other attributes than {node_name(before)!r} there"
    if len(before.input) != len(after.input) or len(before.output) != len(after.output):
        yield f"{where} has {len(after.input)} inputs and {len(after.output)} outputs"
        return
    for slot, (old, new) in enumerate(zip(before.input, after.input, strict=True)):
        source = placed.before_pairs(old)
        stored, constant = placed.constants.get(source), model.constants.get(new)
        if (stored is None) != (constant is None) or (stored is None and names.get(source, source) != new):
            yield f"input {slot} of {where} is {new!r}, not the counterpart of {source!r}"
        elif stored is not None and constant is not None and list(stored.dims) != list(constant.dims):
            yield f"weight {new!r} of {where} has shape {list(constant.dims)}, but {list(stored.dims)} there"


def _sorted_attributes(node: onnx.NodeProto) -> Sequence[bytes]:
    return sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)


def _describe(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node_name(node)!r}"


def _shape_text(value: onnx.ValueInfoProto) -> str:
    return "x".join(str(size.dim_value or size.dim_param or "?") for size in value.type.tensor_type.shape.dim)
