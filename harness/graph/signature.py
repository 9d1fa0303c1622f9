"""Signature of an ONNX file before any preparation: inputs, outputs and nodes; and copies with static inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import helper

from harness.graph.io.reader import read_model
from harness.graph.io.writer import write_model
from harness.graph.passes.dimension_sizes import Axes, InputSizes, axes_of
from harness.graph.passes.static_shapes import fix_inputs, has_dynamic_inputs
from harness.graph.qdq.read_edges import read_qdq_edges, unique_node_names

__all__ = [
    "Dims", "ModelSignature", "NodeSignature", "read_signature", "with_static_inputs",
    "write_without_output_transpose",
]  # fmt: skip

Dims = tuple[int | None, ...]
"""A shape; None for a dynamic dimension."""
_QDQ_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSignature:
    """Node of the main graph.

    Attributes:
        name: "" for a node without a name.
        precisions: Storage types of its quantized inputs; empty if all are float.
    """

    name: str
    op: str
    precisions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """ONNX file as its author wrote it.

    Attributes:
        inputs: Element type by its ONNX name in lower case, and shape of each input that is a tensor.
        outputs: Shape of each output.
        nodes: Nodes of the main graph in order, without Q/DQ.
        axes: Declared dimensions of each input, with symbols; None: unknown rank.
    """

    inputs: Mapping[str, tuple[str, Dims]]
    outputs: Mapping[str, Dims]
    nodes: tuple[NodeSignature, ...]
    axes: Mapping[str, Axes | None] = field(default_factory=dict)

    @property
    def operators(self) -> frozenset[str]:
        """Operators of the main graph."""
        return frozenset(node.op for node in self.nodes)

    @property
    def precisions(self) -> frozenset[str]:
        """Storage types of its Q/DQ pairs ("int8", "fp8", "fp8e5m2", ...); empty for a float model."""
        return frozenset(precision for node in self.nodes for precision in node.precisions)


def read_signature(path: Path, source: str | None = None) -> ModelSignature:
    """Read the inputs, outputs and nodes of a file, which messages call `source`, or by its path."""
    proto, _ = read_model(path, source or str(path))
    graph = proto.graph
    stored: dict[str, set[str]] = {}
    for edge, precision in read_qdq_edges(proto).items():
        stored.setdefault(edge.consumer, set()).add(precision)
    constants = {tensor.name for tensor in graph.initializer}
    tensors = [v for v in graph.input if v.name not in constants and v.type.HasField("tensor_type")]
    return ModelSignature(
        inputs={v.name: (_element_type(v), _static_dims(v)) for v in tensors},
        outputs={v.name: _static_dims(v) for v in graph.output},
        axes={v.name: axes_of(v) for v in tensors},
        nodes=tuple(
            NodeSignature(name=node.name, op=node.op_type, precisions=frozenset(stored.get(name, ())))
            for node, name in zip(graph.node, unique_node_names(graph), strict=True)
            if node.op_type not in _QDQ_OPS
        ),
    )


def with_static_inputs(path: Path, sizes: InputSizes, target: Path) -> Path:
    """Write a copy with static inputs and no other change; Q/DQ models keep their pairs.

    Returns:
        The copy, or `path` itself if its inputs are static and no size is given, or if it is no ONNX model.
    """
    if not (sizes.shapes or sizes.dims):
        try:
            if not has_dynamic_inputs(onnx.load(path, load_external_data=False).graph):
                return path
        except DecodeError:  # reported when the model is built
            return path
    proto, _ = read_model(path, str(path))
    fix_inputs(proto, sizes, str(path))
    return write_model(proto, target)


def write_without_output_transpose(source: Path, path: Path, name: str) -> Path:
    """Write a model without the Transpose that computes its only output; its input becomes the output `name`.

    Raises:
        ValueError: The output is not computed by a Transpose.
    """
    model = read_model(source, str(source))[0]
    (output,) = model.graph.output
    last = next((node for node in model.graph.node if output.name in node.output), None)
    if last is None or last.op_type != "Transpose":
        raise ValueError(f"{source.name}: its output is not made by a Transpose")
    order = next(tuple(attribute.ints) for attribute in last.attribute if attribute.name == "perm")
    sizes = [dim.dim_value for dim in output.type.tensor_type.shape.dim]
    inner, shape = last.input[0], [sizes[order.index(axis)] for axis in range(len(order))]
    model.graph.node.remove(last)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name if each == inner else each for each in names]
    output.CopyFrom(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _element_type(value: onnx.ValueInfoProto) -> str:
    return str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)).lower()


def _static_dims(value: onnx.ValueInfoProto) -> Dims:
    sizes = value.type.tensor_type.shape.dim
    return tuple(int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else None for d in sizes)
