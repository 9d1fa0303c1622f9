"""Encoding of ONNX files from pieces: a protobuf message is the concatenation of its encoded fields, in any order.

A candidate differs from its model in a few per cent of the nodes, so every node and tensor is encoded once, and the
file of a candidate is joined from the pieces. Field numbers are those of onnx.proto3; the encoding is that of
protobuf.dev/programming-guides/encoding (length-delimited records, wire type 2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from harness.base.paths import replacing
from harness.graph.protos import copy_message

NAME_PREFIX = "@qdq."
"""What follows the name of a tensor of the float model in the names that belong to its Q/DQ pairs."""
FLOAT_BIAS_PREFIX = f"{NAME_PREFIX}float"
"""What follows the name of a model output in front of its Q/DQ pair, which takes over the name itself."""

_NODE, _INITIALIZER = 1, 5  # GraphProto
_GRAPH = 7  # ModelProto
_MAX_FIELD = 1 << 29  # of protobuf
GRAPH_HEADER_FIELDS = frozenset(range(100)) - {_NODE, _INITIALIZER}
"""Fields of a graph other than its nodes and initializers."""
_INPUT, _OUTPUT, _NAME, _OP, _ATTRIBUTE = 1, 2, 3, 4, 5  # NodeProto
_ALIGNMENT_BYTES = 64  # bytes; a cache line, so that runtimes can use mapped weights in place


def encode_record(number: int, payload: bytes) -> bytes:
    """Encode a length-delimited protobuf field with a field number below 16."""
    return _encode_field_header(number, len(payload)) + payload


def _encode_field_header(number: int, size: int) -> bytes:
    head = bytearray((number << 3 | 2,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


class NodePieces:
    """Encoded node whose inputs and outputs can be renamed."""

    __slots__ = ("_outputs", "_parts")

    def __init__(self, proto: NodeProto) -> None:
        self._parts = [_encode_text(_INPUT, name) for name in proto.input] + [
            _encode_text(_OUTPUT, name) for name in proto.output
        ]
        self._outputs = len(proto.input)
        rest = copy_message(proto)
        rest.ClearField("input")
        rest.ClearField("output")
        self._parts.append(rest.SerializeToString(deterministic=True))

    def rename_tensors(self, inputs: Mapping[int, str], outputs: Mapping[int, str]) -> bytes:
        """Return the node as an encoded field of its graph, with new names of some inputs and outputs by position."""
        parts = self._parts.copy()
        for slot, name in inputs.items():
            parts[slot] = _encode_text(_INPUT, name)
        for number, name in outputs.items():
            parts[self._outputs + number] = _encode_text(_OUTPUT, name)
        return encode_record(_NODE, b"".join(parts))


def encode_node(op: str, inputs: Iterable[str], output: str, *, attributes: bytes = b"", name: str = "") -> bytes:
    """Encode a node of the default domain with one output as a field of its graph.

    Args:
        attributes: Encoded attributes, see `encode_axis`.
        name: Name of the node; "": that of the output.
    """
    names = b"".join(_encode_text(_INPUT, name) for name in inputs)
    return encode_record(
        _NODE,
        names
        + _encode_text(_OUTPUT, output)
        + _encode_text(_NAME, name or output)
        + _encode_text(_OP, op)
        + attributes,
    )


def encode_axis(axis: int) -> bytes:
    """Encode the attribute `axis` as a record of its node."""
    proto = AttributeProto(name="axis", i=axis, type=AttributeProto.INT)
    return encode_record(_ATTRIBUTE, proto.SerializeToString(deterministic=True))


def encode_initializer(tensor: TensorProto) -> bytes:
    """Encode a tensor as a record of its graph."""
    return encode_record(_INITIALIZER, tensor.SerializeToString(deterministic=True))


def encode_fields(message: GraphProto | ModelProto, numbers: Container[int]) -> bytes:
    """Encode the fields of a message with some numbers; others, such as those with the weights, are not copied."""
    kept = type(message)()
    for descriptor, value in message.ListFields():
        if descriptor.number not in numbers:
            continue
        if descriptor.is_repeated:
            getattr(kept, descriptor.name).extend(value)
        elif descriptor.message_type is not None:
            getattr(kept, descriptor.name).CopyFrom(value)
        elif isinstance(value, bytes):  # text that is not UTF-8, which protobuf can read but not write
            setattr(kept, descriptor.name, value.decode(errors="replace"))
        else:
            setattr(kept, descriptor.name, value)
    encoded: bytes = kept.SerializeToString(deterministic=True)
    return encoded


def encode_model(message: ModelProto, pieces: Iterable[bytes]) -> bytes:
    """Return the bytes of a model with another graph.

    Fields are in the order of their numbers, because OpenVINO does not recognise an ONNX file with a repeated field,
    such as the operator sets, among the first ones (onnx_model_validator.cpp).

    Args:
        message: Model.
        pieces: Encoded fields of the graph.
    """
    graph = b"".join(pieces)
    ahead, behind = encode_fields(message, range(_GRAPH)), encode_fields(message, range(_GRAPH + 1, _MAX_FIELD))
    return b"".join((ahead, _encode_field_header(_GRAPH, len(graph)), graph, behind))


class DataFile:
    """Large tensors in one external data file (ONNX external data format), named by its content.

    Args:
        tensors: Tensors by name, with values in `raw_data`; they must not be changed afterwards.
    """

    def __init__(self, tensors: Mapping[str, TensorProto]) -> None:
        self._tensors = tensors

    @cached_property
    def name(self) -> str:
        """Name of the file, which is a digest of its content, so that an existing file is not written again."""
        digest = hashlib.blake2b(digest_size=8)
        for chunk in self._chunks():
            digest.update(chunk)
        return f"{digest.hexdigest()}.weights"

    @cached_property
    def references(self) -> Mapping[str, bytes]:
        """Initializers that refer to the file, as encoded fields of a graph, by tensor name."""
        found, offset = {}, 0
        for name, tensor in self._tensors.items():
            size = len(tensor.raw_data)
            outside = TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
            outside.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self.name), ("offset", str(offset)), ("length", str(size))):
                outside.external_data.add(key=key, value=value)
            found[name] = encode_initializer(outside)
            offset += size + -size % _ALIGNMENT_BYTES
        return found

    def write(self, folder: Path) -> None:
        """Write the file to a folder if it does not exist there; several processes may do this at the same time."""
        path = folder / self.name
        if path.exists():
            return
        with replacing(path) as part, part.open("wb") as file:
            file.writelines(self._chunks())

    def _chunks(self) -> Iterable[bytes]:
        for tensor in self._tensors.values():
            yield tensor.raw_data
            yield bytes(-len(tensor.raw_data) % _ALIGNMENT_BYTES)


def _encode_text(number: int, text: str) -> bytes:
    return encode_record(number, text.encode())
