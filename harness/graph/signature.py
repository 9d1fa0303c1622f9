"""Signature of an ONNX file before any preparation: inputs, outputs and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import helper

from harness.graph.io.files import read_model
from harness.graph.passes.dimension_sizes import Axes, axes_of
from harness.graph.protos import attribute_value, dtype_name, input_values
from harness.graph.qdq.qdq_graph import QDQ_OPS, QDQGraph

__all__ = ["Dims", "ModelSignature", "NodeSignature", "read_signature", "write_without_output_transpose"]

Dims = tuple[int | None, ...]
"""A shape; None for a dynamic dimension."""


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
    index = QDQGraph(proto)
    for edge, precision in index.edges.items():
        stored.setdefault(edge.consumer, set()).add(precision)
    tensors = [value for value in input_values(graph) if value.type.HasField("tensor_type")]
    return ModelSignature(
        inputs={v.name: (dtype_name(v.type.tensor_type.elem_type), _static_dims(v)) for v in tensors},
        outputs={v.name: _static_dims(v) for v in graph.output},
        axes={v.name: axes_of(v) for v in tensors},
        nodes=tuple(
            NodeSignature(name=node.name, op=node.op_type, precisions=frozenset(stored.get(name, ())))
            for node, name in zip(graph.node, index.labels, strict=True)
            if node.op_type not in QDQ_OPS
        ),
    )


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
    order = tuple(attribute_value(last, "perm"))
    sizes = [dim.dim_value for dim in output.type.tensor_type.shape.dim]
    inner, shape = last.input[0], [sizes[order.index(axis)] for axis in range(len(order))]
    model.graph.node.remove(last)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name if each == inner else each for each in names]
    output.CopyFrom(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _static_dims(value: onnx.ValueInfoProto) -> Dims:
    sizes = value.type.tensor_type.shape.dim
    return tuple(int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else None for d in sizes)
