"""Helpers for ONNX messages: subgraphs, tensors that a node reads, attributes, constants, copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import helper, numpy_helper

AnyMessage = TypeVar("AnyMessage", bound=Message)
AnyBody = TypeVar("AnyBody", onnx.GraphProto, onnx.FunctionProto)
_DTYPE_NAMES_BY_BITS = {
    2: "INT2 UINT2",
    4: "INT4 UINT4 FLOAT4E2M1",
    8: "INT8 UINT8 BOOL FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0",
    16: "INT16 UINT16 FLOAT16 BFLOAT16",
    32: "INT32 UINT32 FLOAT",
    64: "INT64 UINT64 DOUBLE COMPLEX64",
    128: "COMPLEX128",
}
_DTYPE_CODES = dict(onnx.TensorProto.DataType.items())  # an older onnx does not know all of them
_BITS_BY_DTYPE = {
    _DTYPE_CODES[name]: bits
    for bits, names in _DTYPE_NAMES_BY_BITS.items()
    for name in names.split()
    if name in _DTYPE_CODES
}
_MAX_SMALL_BYTES = 1 << 20  # larger tensors are not encoded to find their size
RANDOM_OPS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators that always draw random numbers."""
_DTYPE_BY_CONSTANT_ATTRIBUTE = {"float": np.float32, "int": np.int64, "string": object}


def iter_subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in the attributes of a node, without graphs inside these."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def iter_graphs(graph: AnyBody) -> Iterator[AnyBody | onnx.GraphProto]:
    """Yield a graph or function and all graphs inside it."""
    yield graph
    for node in graph.node:
        for inner in iter_subgraphs(node):
            yield from iter_graphs(inner)


def iter_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of all graphs, subgraphs and functions of a model."""
    for body in (proto.graph, *proto.functions):
        for part in iter_graphs(body):
            yield from part.node


def iter_with_inner(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield a node and all nodes of its subgraphs."""
    yield node
    for graph in iter_subgraphs(node):
        for each in graph.node:
            yield from iter_with_inner(each)


def find_captures(node: onnx.NodeProto) -> frozenset[str]:
    """Return the names of the outside tensors that the subgraphs of a node read, at any depth."""
    found: set[str] = set()
    for graph in iter_subgraphs(node):
        used, defined = {value.name for value in graph.output}, {value.name for value in graph.input}
        defined.update(tensor.name for tensor in graph.initializer)
        defined.update(tensor.values.name for tensor in graph.sparse_initializer)
        for inner in graph.node:
            used.update(inner.input)
            used.update(find_captures(inner))
            defined.update(inner.output)
        found |= used - defined
    return frozenset(found - {""})


def tensors_read(node: onnx.NodeProto) -> list[str]:
    """Return the names of a node's inputs without omitted ones, then those that its subgraphs read from outside."""
    return [*filter(None, node.input), *sorted(find_captures(node))]


def input_values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a graph, without initializers that are listed among them."""
    constants = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def constants_by_name(graph: onnx.GraphProto | onnx.FunctionProto) -> dict[str, onnx.TensorProto]:
    """Return initializers and values of Constant nodes by tensor name, without sparse ones."""
    found = {tensor.name: tensor for tensor in graph.initializer} if isinstance(graph, onnx.GraphProto) else {}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute:
            given = node.attribute[0]
            value = given.t if given.name == "value" else constant_value(node)  # no copy: it may be a large weight
            if value is not None:
                found[node.output[0]] = value
    return found


def constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the value of a Constant node as a new tensor; None for a sparse one."""
    attribute = node.attribute[0]
    if attribute.name == "value":
        return copy_message(attribute.t)
    dtype = _DTYPE_BY_CONSTANT_ATTRIBUTE.get(attribute.name.removeprefix("value_").removesuffix("s"))
    if dtype is None:
        return None
    return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), dtype=dtype))


def raw_size_bytes(tensor: onnx.TensorProto) -> int | None:
    """Return the size of a tensor's values in `raw_data` by shape and type; None for a type without a fixed size."""
    bits = _BITS_BY_DTYPE.get(tensor.data_type)
    return None if bits is None else -(-math.prod(tensor.dims) * bits // 8)


def encoded_size_bytes(tensor: onnx.TensorProto) -> int:
    """Return the number of bytes of a tensor in a file; above 1 MiB that of its values.

    Protobuf encodes a message to find its size, which takes long, and fails from 2 GiB on.
    """
    values = raw_size_bytes(tensor) if tensor.HasField("raw_data") else None
    return values if values is not None and values > _MAX_SMALL_BYTES else tensor.ByteSize()


def find_random_nodes(proto: onnx.ModelProto) -> dict[int, str]:
    """Return the nodes of the main graph whose results change from run to run, each with its random operator.

    That is one of `RANDOM_OPS`, or a Dropout in training mode (Monte-Carlo dropout, or a model exported for training),
    and it may be in a subgraph or a function. The result has the text "Dropout 'drop'" by index of the node.
    """
    functions = {(each.domain, each.name): each.node for each in proto.functions}
    graphs = [graph for body in (proto.graph, *proto.functions) for graph in iter_graphs(body)]
    constants = {name: tensor for graph in graphs for name, tensor in constants_by_name(graph).items()}
    found: dict[int, str] = {}
    for index, node in enumerate(proto.graph.node):
        stack = [*iter_with_inner(node)]
        while stack and index not in found:
            each = stack.pop()
            if is_random(each, constants):
                found[index] = f"{each.op_type} {each.name or node.name or each.output[0]!r}"
            called = functions.get((each.domain, each.op_type), ())
            stack += [inner for part in called for inner in iter_with_inner(part)]
    return found


def is_random(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether an operator draws random numbers; a Dropout may if no constant says that it drops nothing.

    Args:
        node: Node, whose subgraphs are not considered.
        constants: Constants by name.
    """
    if node.op_type != "Dropout" or node.domain:
        return node.op_type in RANDOM_OPS
    ratio, training = [*node.input, "", ""][1:3]
    known = [constants[name] for name in (ratio, training) if name in constants]
    stored = [tensor for tensor in known if tensor.data_location != onnx.TensorProto.EXTERNAL]
    return bool(training) and all(numpy_helper.to_array(tensor).any() for tensor in stored)


def dependent_tensors(graph: onnx.GraphProto, tensors: Iterable[str]) -> set[str]:
    """Return some tensors and all tensors that nodes compute from them; nodes must be in topological order."""
    found = set(tensors)
    for node in graph.node:
        if not found.isdisjoint(tensors_read(node)):
            found.update(filter(None, node.output))
    return found


def find_random_outputs(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Return the outputs of a model that change from run to run; see `find_random_nodes`."""
    made = [name for index in find_random_nodes(proto) for name in proto.graph.node[index].output]
    behind = dependent_tensors(proto.graph, made) if made else set()
    return tuple(value.name for value in proto.graph.output if value.name in behind)


def attribute_value(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Return the value of an attribute, text as `str`, or the default if the node does not have it."""
    value = next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)
    return value.decode() if isinstance(value, bytes) else value


def opset_versions(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the imported version of each domain; the default domain is "" or "ai.onnx", as in the file."""
    return {opset.domain: opset.version for opset in proto.opset_import}


def is_standard_op(node: onnx.NodeProto, opsets: Mapping[str, int]) -> bool:
    """Return whether ONNX defines this operator at the version of its domain in `opsets`, version 1 by default."""
    return bool(onnx.defs.has(node.op_type, opsets.get(node.domain, 1), node.domain))


def dtype_name(element: int) -> str:
    """Return the ONNX name of an element type (`onnx.TensorProto.DataType`) in lower case: "float", "int64".

    Raises:
        ValueError: There is no such type.
    """
    return str(onnx.TensorProto.DataType.Name(element)).lower()


def element_type(kind: onnx.TypeProto) -> onnx.TypeProto:
    """Return the type of the elements of a sequence or of an optional, at any depth, or another type itself."""
    while (container := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, container).elem_type
    return kind


def copy_message(message: AnyMessage) -> AnyMessage:
    """Return a copy of a protobuf message."""
    copy: AnyMessage = type(message)()
    copy.CopyFrom(message)
    return copy


def extend_field(field: Any, messages: Iterable[Message]) -> None:
    """Append copies of messages to a repeated protobuf field, also of tensors above 2 GiB, at which `extend` fails."""
    for message in messages:
        field.add().CopyFrom(message)


def replace_field(field: Any, values: Iterable[Any]) -> None:
    """Replace the contents of a repeated protobuf field, in place; `values` may be taken from the field itself."""
    kept = list(values)
    del field[:]
    (extend_field if hasattr(field, "add") else type(field).extend)(field, kept)
