"""Static shapes: fix the inputs, infer everything behind them."""

from __future__ import annotations

import logging

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from harness.errors import UserError
from harness.graph.cleaning.asking import asked, defaulted
from harness.graph.cleaning.guard import sturdy
from harness.graph.cleaning.sizes import Sizes, axes_of, parse_shape, resolve, set_shape
from harness.graph.model import TensorType

__all__ = ["fix_inputs", "has_dynamic_inputs", "infer", "parse_shape", "shapes_to_constants", "types_of"]

logger = logging.getLogger(__name__)

_TYPE_OF_FIRST_INPUT = frozenset({"GroupNormalization"})
"""Operators that onnx 1.21 infers nothing of, though their result has the type of their first input."""


def fix_inputs(proto: onnx.ModelProto, sizes: Sizes, source: str) -> None:
    """Make the shapes of all tensor inputs static, in place; forget shapes written elsewhere in the graph.

    Batch dimensions that nobody gives a size for get 1, and a warning says so.

    Raises:
        UserError: A dimension stays dynamic, or a given size does not fit.
    """
    graph = proto.graph
    inputs = {value.name: value for value in graph.input if value.type.HasField("tensor_type")}
    found = resolve({name: axes_of(value) for name, value in inputs.items()}, sizes, source)
    if found.missing:
        raise UserError(f"{source}: {asked(proto, found, sizes)}")
    if found.defaulted:
        logger.warning("%s: %s", source, defaulted(found))
    for name, value in inputs.items():
        set_shape(value, found.shapes[name])
    for value in graph.output:
        if _is_dynamic(value):
            _forget(value)


def has_dynamic_inputs(graph: onnx.GraphProto) -> bool:
    """Tell whether an input, initializers left aside, has a dimension without a fixed size."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = (value for value in graph.input if value.name not in constants and value.type.HasField("tensor_type"))
    return any(axes is None or not all(isinstance(axis, int) for axis in axes) for axes in map(axes_of, inputs))


def infer(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """Type every tensor that ONNX can type, in `value_info` and in the outputs.

    What the file says of tensors made by operators that ONNX does not know is kept; all else is inferred anew.
    Where an operator contradicts its inputs, this is logged, and what lies behind it stays untyped.
    """
    made_by_unknown = {
        name for node in proto.graph.node if not onnx.defs.has(node.op_type, node.domain) for name in node.output
    }
    kept = [value for value in proto.graph.value_info if value.name in made_by_unknown and not _is_dynamic(value)]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    shown, hidden = _shown_to_inference(proto)
    inferred, doubt = sturdy(f"{source}: shape inference", _inferred, shown, source)
    if doubt:
        logger.warning("%s: some shapes cannot be inferred: %s", source, doubt)
    for index, node in hidden.items():
        inferred.graph.node[index].CopyFrom(node)
    return inferred


def _shown_to_inference(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[int, onnx.NodeProto]]:
    """A copy in which an Identity stands for operators that ONNX infers nothing of, and these by their index."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    hidden = {}
    for index, node in enumerate(proto.graph.node):
        if node.op_type in _TYPE_OF_FIRST_INPUT and not node.domain:
            hidden[index] = node
            stand_in = onnx.NodeProto(op_type="Identity", name=node.name, input=node.input[:1], output=node.output)
            shown.graph.node[index].CopyFrom(stand_in)
    return shown, hidden


def _inferred(proto: onnx.ModelProto, source: str) -> tuple[onnx.ModelProto, str]:
    """The model with all types, or with those that can be told and why the others cannot."""
    doubt = ""
    for _ in range(2):
        try:
            return shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True), ""
        except shape_inference.InferenceError as error:
            doubt = " ".join(str(error).split())
            # Runtimes only warn of outputs that are declared wrongly, so the declared sizes get no vote.
            for value in proto.graph.output:
                _forget(value)
    try:
        return shape_inference.infer_shapes(proto, data_prop=True), doubt
    except shape_inference.InferenceError as error:  # element types, which it insists on
        text = " ".join(str(error).split())
        raise UserError(f"{source}: no valid ONNX model: {text}; export the model again") from error


def types_of(graph: onnx.GraphProto) -> dict[str, TensorType]:
    """Type of every tensor of the graph whose element type and static shape are known."""
    found = {}
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type and not _is_dynamic(value):
            tensor = value.type.tensor_type
            found[value.name] = TensorType(_dtype(tensor.elem_type), tuple(d.dim_value for d in tensor.shape.dim))
    for initializer in graph.initializer:
        found[initializer.name] = TensorType(_dtype(initializer.data_type), tuple(initializer.dims))
    return found


def shapes_to_constants(graph: onnx.GraphProto) -> bool:
    """Replace Shape and Size of tensors with static shape by initializers, in place; True if there were any.

    Done here because onnx-graphsurgeon 0.6 overlooks the attributes `start` and `end` of Shape (opset 15).
    """
    asking = {node.name for node in graph.node if node.op_type in ("Shape", "Size") and not node.domain}
    types, outputs = types_of(graph) if asking else {}, {value.name for value in graph.output}
    rest = []
    for node in graph.node:
        known = types.get(node.input[0]) if node.name in asking else None
        if known is None or node.output[0] in outputs:
            rest.append(node)
            continue
        bounds = {a.name: a.i for a in node.attribute}
        sizes = np.array(known.shape[bounds.get("start", 0) : bounds.get("end")], dtype=np.int64)
        value = sizes if node.op_type == "Shape" else np.prod(sizes, dtype=np.int64)
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), node.output[0]))
    changed = len(rest) < len(graph.node)
    if changed:
        del graph.node[:]
        graph.node.extend(rest)
    return changed


def _forget(value: onnx.ValueInfoProto) -> None:
    """Leave no size of a value; inference fills in what it finds."""
    if value.type.HasField("tensor_type"):
        value.type.tensor_type.ClearField("shape")


def _is_dynamic(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return not tensor.HasField("shape") or any(d.dim_value <= 0 and not _is_empty(d) for d in tensor.shape.dim)


def _is_empty(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return bool(dim.HasField("dim_value") and dim.dim_value == 0)


def _dtype(element: int) -> str:
    return str(onnx.TensorProto.DataType.Name(element)).lower()
