"""Operators whose outputs have unchanged values of an input: those that move values, and those without effect."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from harness.graph.model import Model, Node

VALUE_PRESERVING_OPS = frozenset({
    "MaxPool", "Reshape", "Transpose", "Flatten", "Slice", "Split", "Squeeze", "Unsqueeze", "Expand", "Tile",
    "DepthToSpace", "SpaceToDepth", "Gather",
})  # fmt: skip
_IDENTITY_WITH_ONE_INPUT_OPS = frozenset({"Concat", "Max", "Mean", "Min", "Sum"})
_NEUTRAL_OPERANDS: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "Add": (0.0, (0, 1)), "Sub": (0.0, (1,)), "Mul": (1.0, (0, 1)), "Div": (1.0, (1,)), "Pow": (1.0, (1,))
}  # fmt: skip
"""By operator: the constant that changes nothing, and the inputs where it does so."""
_FLOATS_BY_WIDTH = ("float16", "float", "double")
_REDUCTION_OPS = frozenset(
    {"GlobalAveragePool", "GlobalMaxPool", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"}
)


def is_value_preserving(node: Node, *, interpolated: bool) -> bool:
    """Return whether an operator only moves or selects values of its first input.

    Args:
        interpolated: Whether interpolated values count, because the runtime has integer kernels for Resize.
    """
    if node.op == "Resize":
        modes = ("nearest", "linear") if interpolated else ("nearest",)
        return node.attributes.get("mode", "nearest") in modes
    return node.op in VALUE_PRESERVING_OPS


def find_repeated_input(model: Model, node: Node) -> int | None:
    """Return the number of the input that equals a node's first output for any data, or None if there is none.

    Runtimes remove such nodes (Identity, Dropout, a Cast to the same type or to a wider one and back, Mul by 1), so
    nodes after one are treated as if they were after the node before it.
    """
    if node.opaque or not node.inputs or not node.inputs[0]:
        return None
    if node.op not in _NEUTRAL_OPERANDS:
        return 0 if _is_identity(model, node) else None
    neutral, slots = _NEUTRAL_OPERANDS[node.op]
    for slot in slots:  # of a constant that changes neither values nor shape
        other = node.inputs[1 - slot]
        alike = other in model.types and model.types[other] == model.types.get(node.outputs[0])
        if alike and _all_equal(model, node.inputs[slot], neutral):
            return 1 - slot
    return None


def _is_identity(model: Model, node: Node) -> bool:
    given = [name for name in node.inputs if name]
    before, after = (model.types.get(name) for name in (node.inputs[0], node.outputs[0]))
    alike = before is not None and before == after
    match node.op:
        case "Identity" | "Dropout":  # a random one is opaque
            return True
        case "Cast" | "CastLike":
            return _keeps_values(model, node)
        case "Clip":
            return len(given) == 1
        case "Pad":
            return alike and len(given) > 1 and _all_equal(model, node.inputs[1], 0)
        case "Resize" | "Upsample":
            return alike and node.attributes.get("coordinate_transformation_mode") != "tf_crop_and_resize"
        case "AveragePool":
            return alike and set(node.attributes.get("kernel_shape", ())) == {1}
    if node.op in _REDUCTION_OPS:
        return before is not None and after is not None and math.prod(before.shape) == math.prod(after.shape)
    return node.op in _IDENTITY_WITH_ONE_INPUT_OPS and len(given) == 1


def _keeps_values(model: Model, node: Node) -> bool:
    """Return whether a Cast does not change values: to the same type, to a wider one, or back from a wider one."""
    target = model.types.get(node.outputs[0])
    while target is not None and (known := model.types.get(node.inputs[0])) is not None:
        if known.dtype == target.dtype:
            return True
        if known.dtype not in _FLOATS_BY_WIDTH or target.dtype not in _FLOATS_BY_WIDTH:
            return False
        if _FLOATS_BY_WIDTH.index(known.dtype) < _FLOATS_BY_WIDTH.index(target.dtype):
            return True
        maker = model.producer_node(node.inputs[0])
        if maker is None or maker.op != "Cast":
            return False
        node = maker
    return False


def _all_equal(model: Model, tensor: str, value: float) -> bool:
    constant = model.constant_array(tensor)
    return constant is not None and bool(np.all(constant.astype(np.float64) == value))
