"""Models in memory as other libraries hand them over, so that nobody outside of this package needs to know ONNX."""

from __future__ import annotations

import hashlib

import onnx
import onnx_graphsurgeon as gs

from harness.errors import UserError
from harness.graph.diff import delivered
from harness.graph.encoding.wire import TAG
from harness.graph.load import write
from harness.graph.model import Model

__all__ = ["as_proto", "decode", "encode", "float_names", "proto_digest", "quantized_tensors", "write"]

_SUFFIXES = ("_QuantizeLinear_Output", "_QuantizeLinear_Input", "_DequantizeLinear_Output", "_quantized")
"""Of ONNX Runtime's quantization tools, which ModelOpt's `quantize` uses too."""


def as_proto(model: object) -> onnx.ModelProto:
    """A model of ONNX itself or of onnx-graphsurgeon as the former.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    if isinstance(model, gs.Graph):
        return gs.export_onnx(model)
    raise TypeError(f"a model is an onnx.ModelProto or an onnx_graphsurgeon.Graph, but got {type(model).__name__}")


def encode(proto: onnx.ModelProto) -> bytes:
    """The same model as bytes.

    Raises:
        UserError: It is above 2 GB, which protobuf cannot hold.
    """
    try:
        content: bytes = proto.SerializeToString(deterministic=True)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"a model above 2 GB does not fit into one piece of memory: give a file ({error})") from error
    return content


def decode(content: bytes) -> onnx.ModelProto:
    """The model in these bytes, which we wrote ourselves."""
    return onnx.ModelProto.FromString(content)


def proto_digest(proto: onnx.ModelProto) -> str:
    """SHA-256 of a model in memory.

    Raises:
        UserError: See `encode`.
    """
    return hashlib.sha256(encode(proto)).hexdigest()


def quantized_tensors(proto: onnx.ModelProto) -> set[str]:
    """Names of the tensors that carry a Q/DQ pair, as the float model calls them."""
    return {edge.tensor for edge in delivered(proto)}


def float_names(names: set[str], model: Model) -> set[str]:
    """Tensors of a float model that are meant by names out of a Q/DQ model: its own, or with a tool's suffix."""
    known = model.constants.keys() | model.producer.keys() | set(model.inputs)
    found: set[str] = set()
    for name in names:
        stem = name.rpartition(TAG)[0] or name
        candidates = [stem, *(stem.removesuffix(suffix) for suffix in _SUFFIXES)]
        found.update(candidate for candidate in candidates[:1] if candidate in known)
        if stem not in known:
            found.update(candidate for candidate in candidates[1:] if candidate in known)
    return found
