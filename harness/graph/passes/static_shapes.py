"""Static shapes: sizes of the inputs are fixed, and types of all other tensors are inferred from them."""

from __future__ import annotations

import logging

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from harness.errors import UserError
from harness.graph.io.helper_process import call_in_helper_process
from harness.graph.model import TensorType
from harness.graph.passes.dimension_errors import describe_default_sizes, describe_missing_sizes
from harness.graph.passes.dimension_sizes import InputSizes, axes_of, parse_shape, resolve_shapes, set_shape

__all__ = ["fix_inputs", "fold_shape_ops", "has_dynamic_inputs", "infer_types", "parse_shape", "static_types"]

logger = logging.getLogger(__name__)

_OPS_TYPED_LIKE_FIRST_INPUT = frozenset({"GroupNormalization"})  # onnx 1.21 infers no type for their result


def fix_inputs(proto: onnx.ModelProto, sizes: InputSizes, source: str) -> None:
    """Make the shapes of all tensor inputs static, in place, and remove declared shapes of outputs that depend on them.

    Batch dimensions without a given size get 1, which is logged as a warning.

    Raises:
        UserError: A dimension stays dynamic, or a given size does not fit.
    """
    graph = proto.graph
    inputs = {value.name: value for value in graph.input if value.type.HasField("tensor_type")}
    resolved = resolve_shapes({name: axes_of(value) for name, value in inputs.items()}, sizes, source)
    if resolved.missing:
        raise UserError(f"{source}: {describe_missing_sizes(proto, resolved, sizes)}")
    if resolved.default_sizes:
        logger.warning("%s: %s", source, describe_default_sizes(resolved))
    for name, value in inputs.items():
        set_shape(value, resolved.shapes[name])
    for value in graph.output:
        if _is_dynamic(value):
            _clear_shape(value)


def has_dynamic_inputs(graph: onnx.GraphProto) -> bool:
    """Return whether an input that is no initializer has a dimension without a fixed size."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = (value for value in graph.input if value.name not in constants and value.type.HasField("tensor_type"))
    return any(axes is None or not all(isinstance(axis, int) for axis in axes) for axes in map(axes_of, inputs))


def infer_types(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """Return the model with the types of all tensors that ONNX can infer, in `value_info` and in the outputs.

    Declared types of tensors that unknown operators compute are kept; all others are inferred. If an operator
    contradicts its inputs, this is logged, and tensors that depend on it stay untyped.
    """
    made_by_unknown = {
        name for node in proto.graph.node if not onnx.defs.has(node.op_type, node.domain) for name in node.output
    }
    kept = [value for value in proto.graph.value_info if value.name in made_by_unknown and not _is_dynamic(value)]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    shown, replaced = _replace_uninferable_ops(proto)
    inferred, problem = call_in_helper_process(f"{source}: shape inference", _infer_shapes, shown, source)
    if problem:
        logger.warning("%s: some shapes cannot be inferred: %s", source, problem)
    for index, node in replaced.items():
        inferred.graph.node[index].CopyFrom(node)
    return inferred


def _replace_uninferable_ops(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[int, onnx.NodeProto]]:
    """Return a copy with Identity for operators without type inference, and these operators by index."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    replaced = {}
    for index, node in enumerate(proto.graph.node):
        if node.op_type in _OPS_TYPED_LIKE_FIRST_INPUT and not node.domain:
            replaced[index] = node
            identity = onnx.NodeProto(op_type="Identity", name=node.name, input=node.input[:1], output=node.output)
            shown.graph.node[index].CopyFrom(identity)
    return shown, replaced


def _infer_shapes(proto: onnx.ModelProto, source: str) -> tuple[onnx.ModelProto, str]:
    """Return the model with all types and "", or with those that can be inferred and the reason for the others."""
    problem = ""
    for _ in range(2):
        try:
            return shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True), ""
        except shape_inference.InferenceError as error:
            problem = " ".join(str(error).split())
            # Runtimes only warn of wrongly declared outputs, so their declared sizes are ignored.
            for value in proto.graph.output:
                _clear_shape(value)
    try:
        return shape_inference.infer_shapes(proto, data_prop=True), problem
    except shape_inference.InferenceError as error:  # wrong element types are always an error
        text = " ".join(str(error).split())
        raise UserError(f"{source}: no valid ONNX model: {text}; export the model again") from error


def static_types(graph: onnx.GraphProto) -> dict[str, TensorType]:
    """Return the type of every tensor of the graph with a known element type and a static shape."""
    types = {}
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type and not _is_dynamic(value):
            tensor = value.type.tensor_type
            types[value.name] = TensorType(_dtype_name(tensor.elem_type), tuple(d.dim_value for d in tensor.shape.dim))
    for initializer in graph.initializer:
        types[initializer.name] = TensorType(_dtype_name(initializer.data_type), tuple(initializer.dims))
    return types


def fold_shape_ops(graph: onnx.GraphProto) -> bool:
    """Replace Shape and Size of tensors with static shape by initializers, in place; return whether there were any."""
    names = {node.name for node in graph.node if node.op_type in ("Shape", "Size") and not node.domain}
    types, outputs = static_types(graph) if names else {}, {value.name for value in graph.output}
    rest = []
    for node in graph.node:
        known = types.get(node.input[0]) if node.name in names else None
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


def _clear_shape(value: onnx.ValueInfoProto) -> None:
    if value.type.HasField("tensor_type"):
        value.type.tensor_type.ClearField("shape")


def _is_dynamic(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return not tensor.HasField("shape") or any(
        dim.dim_value < 0 or not (dim.dim_value or dim.HasField("dim_value")) for dim in tensor.shape.dim
    )


def _dtype_name(element: int) -> str:
    return str(onnx.TensorProto.DataType.Name(element)).lower()
