"""Conversions of models in memory from and to other libraries."""

from __future__ import annotations

import hashlib
import sys

import onnx

from harness.errors import UserError
from harness.graph.io.writer import write_model
from harness.graph.model import Model
from harness.graph.qdq.read_edges import read_qdq_edges
from harness.graph.quantize.protobuf_wire import NAME_PREFIX

__all__ = [
    "digest_model", "find_quantized_tensors", "map_to_float_tensors", "parse_model", "serialize_model", "to_proto",
    "write_model",
]  # fmt: skip

# Suffixes of ONNX Runtime's quantization tools, which ModelOpt's `quantize` uses too.
_QDQ_SUFFIXES = ("_QuantizeLinear_Output", "_QuantizeLinear_Input", "_DequantizeLinear_Output", "_quantized")


def to_proto(model: object) -> onnx.ModelProto:
    """Return a model of ONNX or of onnx-graphsurgeon as one of ONNX; raise `TypeError` if it is neither."""
    if isinstance(model, onnx.ModelProto):
        return model
    graphsurgeon = sys.modules.get("onnx_graphsurgeon")  # imported if the model is a graph of it
    if graphsurgeon is not None and isinstance(model, graphsurgeon.Graph):
        return graphsurgeon.export_onnx(model)
    raise TypeError(f"a model is an onnx.ModelProto or an onnx_graphsurgeon.Graph, but got {type(model).__name__}")


def serialize_model(proto: onnx.ModelProto) -> bytes:
    """Return a model as bytes; raise `UserError` above 2 GB, the limit of protobuf."""
    try:
        content: bytes = proto.SerializeToString(deterministic=True)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"a model above 2 GB does not fit into one piece of memory: give a file ({error})") from error
    return content


def parse_model(content: bytes) -> onnx.ModelProto:
    """Return the model that `encode` wrote."""
    return onnx.ModelProto.FromString(content)


def digest_model(proto: onnx.ModelProto) -> str:
    """Return the SHA-256 of a model."""
    return hashlib.sha256(serialize_model(proto)).hexdigest()


def find_quantized_tensors(proto: onnx.ModelProto) -> set[str]:
    """Return the float model's names of the tensors that have a Q/DQ pair."""
    return {edge.tensor for edge in read_qdq_edges(proto)}


def map_to_float_tensors(names: set[str], model: Model) -> set[str]:
    """Return the tensors of a float model that names from a Q/DQ model refer to, with or without a tool's suffix."""
    known = model.constants.keys() | model.producer.keys() | set(model.inputs)
    found: set[str] = set()
    for name in names:
        stem = name.rpartition(NAME_PREFIX)[0] or name
        found.update(known & ({stem} if stem in known else {stem.removesuffix(suffix) for suffix in _QDQ_SUFFIXES}))
    return found
