"""Conversion of Q/DQ models in 16-bit floats to float32, with the same pairs and scales.

ONNX Runtime's CPU kernel of QuantizeLinear truncates float16 where ONNX specifies rounding (onnxruntime issue 22741;
half of the values are one step off with 1.24), and has no kernel for bfloat16. FP8 is not affected.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from harness.graph.io.files import write_model
from harness.graph.io.model_reader import read_model
from harness.graph.protos import attribute_value, copy_message, input_values, iter_graphs, iter_nodes, replace_field

UPCAST_NOTE = (
    "its QuantizeLinear take 16-bit floats, which ONNX Runtime's CPU kernel truncates or lacks: it is run in float32 "
    "between the same pairs, with the same scales"
)
HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FP8_TYPES = tuple(kind for name, kind in TensorProto.DataType.items() if name.startswith("FLOAT8"))
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision"})
"""Attributes that hold an element type."""


def write_float32_copy(path: Path, folder: Path) -> Path | None:
    """Write a float32 copy of a model with QuantizeLinear nodes that take 16-bit floats to integers; return its path.

    The file is `<stem>.float32.onnx` in `folder`. The result is None, without a file, for other models and unreadable
    files.

    Raises:
        UserError: The model's external data are missing or damaged.
    """
    try:
        if b"QuantizeLinear" not in path.read_bytes():
            return None
        concerned = _quantizes_16bit_floats(onnx.load_model(path, load_external_data=False))
    except (OSError, DecodeError):  # the runtime has words for it
        return None
    if not concerned:
        return None
    proto, _ = read_model(path, str(path))
    folder.mkdir(parents=True, exist_ok=True)
    return write_model(upcast_to_float32(proto), folder / f"{path.stem}.float32.onnx")


def upcast_to_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with float32 for 16-bit floats, and Casts that keep types of inputs and outputs."""
    copy = copy_message(proto)
    before, after = _cast_borders(copy.graph)
    for graph in iter_graphs(copy.graph):
        for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
            _widen(tensor)
        del graph.value_info[:]
        if graph is not copy.graph:
            for value in (*graph.input, *graph.output):
                _declared_type(value.type)
    for node in iter_nodes(copy):
        _widen_attributes(node)
    constants = {tensor.name for tensor in copy.graph.initializer}
    for value in copy.graph.input:
        if value.name in constants:
            _declared_type(value.type)
    replace_field(copy.graph.node, [*before, *copy.graph.node, *after])
    return copy


def _quantizes_16bit_floats(proto: onnx.ModelProto) -> bool:
    """Return whether a QuantizeLinear takes 16-bit floats to integers."""
    types: dict[str, int] = {}
    for graph in iter_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in iter_nodes(proto):
        if node.op_type == "Cast":
            types[node.output[0]] = attribute_value(node, "to")
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            types[node.output[0]] = node.attribute[0].t.data_type
    some = any(kind in HALF_TYPES for kind in types.values())
    for node in iter_nodes(proto):
        if node.op_type != "QuantizeLinear":
            continue
        stored = types.get(node.input[2], 0) if len(node.input) > 2 else 0
        stored = attribute_value(node, "output_dtype") or stored
        known = [kind for kind in map(types.get, node.input[:2]) if kind]
        half = any(kind in HALF_TYPES for kind in known) if known else some
        if half and (stored not in FP8_TYPES or TensorProto.BFLOAT16 in known):
            return True
    return False


def _cast_borders(graph: onnx.GraphProto) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Return Casts after inputs and before outputs, and rename these tensors inside the graph."""
    inputs = {v.name: v for v in input_values(graph) if v.type.tensor_type.elem_type in HALF_TYPES}
    outputs = {v.name: v for v in graph.output if v.type.tensor_type.elem_type in HALF_TYPES and v.name not in inputs}
    names = {name for each in iter_graphs(graph) for node in each.node for name in (*node.input, *node.output)}
    free = next(end for n in count() if not names.intersection(name + (end := f"__float32{n or ''}") for name in names))
    inner = {name: name + free for name in (*inputs, *outputs)}
    for each in iter_graphs(graph):
        for node in each.node:
            node.input[:] = [inner.get(name, name) for name in node.input]
            node.output[:] = [inner.get(name, name) for name in node.output]
        if each is not graph:
            for value in each.output:
                value.name = inner.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = inner.get(tensor.name, tensor.name)
    before = [helper.make_node("Cast", [name], [inner[name]], to=TensorProto.FLOAT) for name in inputs]
    after = [
        helper.make_node("Cast", [inner[name]], [name], to=value.type.tensor_type.elem_type)
        for name, value in outputs.items()
    ]
    return before, after


def _widen_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES and attribute.i in HALF_TYPES:
            attribute.i = TensorProto.FLOAT
        tensors: Iterable[onnx.TensorProto] = attribute.tensors
        if attribute.type == AttributeProto.TENSOR:
            tensors = (attribute.t,)
        for tensor in tensors:
            _widen(tensor)


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in HALF_TYPES:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _declared_type(kind: onnx.TypeProto) -> None:
    if kind.HasField("sequence_type"):
        _declared_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _declared_type(kind.optional_type.elem_type)
    elif kind.tensor_type.elem_type in HALF_TYPES:
        kind.tensor_type.elem_type = TensorProto.FLOAT
