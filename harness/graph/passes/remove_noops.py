"""Removal of nodes that return their input unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import numpy_helper

from harness.graph.model import find_captures
from harness.graph.passes.static_shapes import static_types

__all__ = ["remove_noops"]

# If the result has the shape of the first input, it equals that input.
_ORDER_PRESERVING_OPS = frozenset(
    {"DepthToSpace", "Expand", "Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Tile", "Unsqueeze"}
)


def remove_noops(graph: onnx.GraphProto) -> bool:
    """Remove nodes that return their input, in place, except those that compute an output or are read by a subgraph.

    Returns:
        Whether there were any.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    types = static_types(graph)
    pinned = {value.name for value in graph.output}.union(*map(find_captures, graph.node))
    replacements: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = replacements.get(name, name)
        known = types.get(node.input[0]) if node.input else None
        same = known is not None and known == types.get(node.output[0]) and node.output[0] not in pinned
        if same and not node.domain and _is_noop(node, constants):
            replacements[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    if replacements:
        del graph.node[:]
        graph.node.extend(kept)
    return bool(replacements)


def _is_noop(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node whose result has the shape of its first input returns that input."""
    if node.op_type in ("Concat", "Split"):
        return len(node.input if node.op_type == "Concat" else node.output) == 1
    if node.op_type == "Gather":  # of all indices in order: their number is that of the axis
        indices = _constant_input_values(node, 1, constants)
        return indices is not None and indices == list(range(len(indices))) and len(constants[node.input[1]].dims) == 1
    if node.op_type in _ORDER_PRESERVING_OPS:
        return True
    if node.op_type == "Slice":
        steps = _constant_input_values(node, 4, constants)
        return len(node.input) < 5 or not node.input[4] or (steps is not None and min(steps, default=1) > 0)
    if node.op_type == "Pad":
        pads = _constant_input_values(node, 1, constants)
        return pads is not None and not any(pads)
    if node.op_type == "Transpose":
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
        return order is not None and order == sorted(order)
    return False


def _constant_input_values(
    node: onnx.NodeProto, slot: int, constants: Mapping[str, onnx.TensorProto]
) -> list[Any] | None:
    tensor = constants.get(node.input[slot]) if len(node.input) > slot else None
    return None if tensor is None else numpy_helper.to_array(tensor).ravel().tolist()
