"""Remove nodes that move data and leave all of it where it is.

Exporters write them: GhostNet (timm) slices 0:160 of 160 channels. Q/DQ pairs around such a node cost time, and
OpenVINO 2026.4 crashes on some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import numpy_helper

from harness.graph.cleaning.shapes import types_of
from harness.graph.model import captures

__all__ = ["drop_noops"]

_KEEP_ORDER = frozenset(
    {"DepthToSpace", "Expand", "Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Tile", "Unsqueeze"}
)
"""A result of these that has the shape of their first input is that input."""


def drop_noops(graph: onnx.GraphProto) -> bool:
    """Let readers of each no-op read what it reads, in place.

    A node that makes an output of the model, or that a body reads, stays.

    Returns:
        Whether there were any.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    types = types_of(graph)
    pinned = {value.name for value in graph.output}.union(*map(captures, graph.node))
    instead: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = instead.get(name, name)
        known = types.get(node.input[0]) if node.input else None
        same = known is not None and known == types.get(node.output[0]) and node.output[0] not in pinned
        if same and not node.domain and _moves_nothing(node, constants):
            instead[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    if instead:
        del graph.node[:]
        graph.node.extend(kept)
    return bool(instead)


def _moves_nothing(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node whose result has the shape of its first input gives that input."""
    if node.op_type in ("Concat", "Split"):
        return len(node.input if node.op_type == "Concat" else node.output) == 1
    if node.op_type == "Gather":  # of every index in order: the result has as many
        indices = _values(node, 1, constants)
        return indices is not None and indices == list(range(len(indices))) and len(constants[node.input[1]].dims) == 1
    if node.op_type in _KEEP_ORDER:
        return True
    if node.op_type == "Slice":
        steps = _values(node, 4, constants)
        return len(node.input) < 5 or not node.input[4] or (steps is not None and min(steps, default=1) > 0)
    if node.op_type == "Pad":
        pads = _values(node, 1, constants)
        return pads is not None and not any(pads)
    if node.op_type == "Transpose":
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
        return order is not None and order == sorted(order)
    return False


def _values(node: onnx.NodeProto, slot: int, constants: Mapping[str, onnx.TensorProto]) -> list[Any] | None:
    tensor = constants.get(node.input[slot]) if len(node.input) > slot else None
    return None if tensor is None else numpy_helper.to_array(tensor).ravel().tolist()
