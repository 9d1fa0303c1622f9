"""Loading of an ONNX file as a prepared `Model`, or of its inputs, outputs and nodes without preparation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import helper

from harness.graph.equivalence.check import OriginalModel, check_equivalent, check_interface
from harness.graph.io.files import write_model
from harness.graph.io.model_reader import check_functions, read_model, refuse_damage, require_encodable
from harness.graph.model import DynamicOriginal, Model, read_nodes
from harness.graph.passes.dimension_sizes import Axes, InputSizes, axes_of
from harness.graph.passes.normalize import densify_sparse_initializers
from harness.graph.passes.pipeline import ModelDraft, with_batch_size
from harness.graph.passes.static_shapes import fix_inputs, has_dynamic_inputs, static_types
from harness.graph.protos import attribute_value, copy_message, dtype_name, input_values, replace_field
from harness.graph.qdq.qdq_graph import QDQ_OPS, QDQGraph

Shapes = Mapping[str, str | tuple[int, ...]]
_NO_DIMENSION_SIZES = InputSizes()
Dims = tuple[int | None, ...]
"""A shape; None for a dynamic dimension."""


class NodeSignature(NamedTuple):
    """Node of the main graph of a file.

    Attributes:
        name: Name of the node; "" without one.
        op: Type of the operator.
        precisions: Precisions of the quantized inputs, for instance "int8"; empty if all are float.
    """

    name: str
    op: str
    precisions: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """Inputs, outputs and nodes of an ONNX file.

    Attributes:
        inputs: Element type (ONNX name in lower case) and shape of each input that is a tensor, by name. A dynamic
            dimension is None; the shape is () if the rank is unknown.
        outputs: Shape of each output by name, in the same form.
        nodes: Nodes of the main graph in order, without Q/DQ pairs.
        axes: The same inputs with the declared dimensions: a size, a symbol, or None; None for an unknown rank.
    """

    inputs: Mapping[str, tuple[str, Dims]]
    outputs: Mapping[str, Dims]
    nodes: tuple[NodeSignature, ...]
    axes: Mapping[str, Axes | None] = field(default_factory=dict)

    @property
    def operators(self) -> frozenset[str]:
        """Types of the operators of the main graph, without Q/DQ pairs."""
        return frozenset(node.op for node in self.nodes)

    @property
    def precisions(self) -> frozenset[str]:
        """Precisions of the Q/DQ pairs ("int8", "fp8", "fp8e5m2", ...); empty for a float model."""
        return frozenset(precision for node in self.nodes for precision in node.precisions)


def load(
    path: Path,
    *,
    source: str | None = None,
    shapes: Shapes = _NO_DIMENSION_SIZES.shapes,
    dims: Mapping[str, int] = _NO_DIMENSION_SIZES.dims,
    samples: Mapping[str, tuple[int, ...]] = _NO_DIMENSION_SIZES.samples,
    min_opset: int = 17,
) -> Model:
    """Read an ONNX file and prepare it for placement.

    The result and the file are run on random inputs, and their outputs must agree; see `harness.graph.equivalence`.

    Args:
        path: The file; external data must be in its folder or below.
        source: Name of the model in messages and tables; the path by default.
        shapes: Static shapes by input name, "1x3x224x224" or numbers, for inputs that are dynamic or fixed to 1 sample.
        dims: Sizes of dynamic dimensions by symbol, such as {"time": 128}; the batch is 1 by default.
        samples: Shape of one sample of data by input, for symbols without a size.
        min_opset: Models of an older default operator set are upgraded to this one.
    """
    source = source or str(path)
    proto, sha256 = read_model(path, source)
    origin = _dynamic_original(path, proto, min_opset)
    sizes = InputSizes(shapes=shapes, dims=dims, samples=samples)
    model = prepare_model(proto, path.absolute(), source, sha256, sizes, min_opset)
    return replace(model, origin=origin)


def load_proto(
    proto: onnx.ModelProto,
    *,
    source: str,
    sha256: str,
    shapes: Shapes = _NO_DIMENSION_SIZES.shapes,
    dims: Mapping[str, int] = _NO_DIMENSION_SIZES.dims,
    min_opset: int = 17,
) -> Model:
    """Prepare a model in memory for placement; see `load`.

    Args:
        proto: Float model with all weights inside; it is not changed.
        sha256: Digest of its file, which results record.
        shapes: Static shape of dynamic inputs, by input name.
        dims: Size of dynamic dimensions, by symbol.
        min_opset: Opset that an older model is upgraded to.
        source: Name of the model in messages and tables.
    """
    check_functions(proto, source)
    origin = _dynamic_original(proto, proto, min_opset)
    model = prepare_model(copy_message(proto), proto, source, sha256, InputSizes(shapes=shapes, dims=dims), min_opset)
    return replace(model, origin=origin)


def _dynamic_original(model: Path | onnx.ModelProto, proto: onnx.ModelProto, min_opset: int) -> DynamicOriginal | None:
    if not has_dynamic_inputs(proto.graph):
        return None
    tensors = (value for value in input_values(proto.graph) if value.type.HasField("tensor_type"))
    return DynamicOriginal(model=model, min_opset=min_opset, axes={value.name: axes_of(value) for value in tensors})


def save_to_folder(model: Model, folder: Path) -> Path:
    """Write the model to `model.onnx` in a folder, which is created if necessary; return the path."""
    return write_model(model.proto, folder / "model.onnx")


def prepare_model(
    proto: onnx.ModelProto, file: Path | onnx.ModelProto, source: str, sha256: str, sizes: InputSizes, min_opset: int
) -> Model:
    """Prepare a model for placement; report any exception that a damaged file causes as a `UserError`.

    Args:
        proto: Model with all weights; it may be changed.
        file: The same model as a file, or unchanged in memory, for a comparison of results.
        source: See `load_proto`, like the other arguments.
        sizes: Sizes of dynamic inputs, in place of `shapes` and `dims`.
    """
    with refuse_damage(source):
        require_encodable(proto, source)
        given = [sorted(each.items()) for each in (sizes.shapes, sizes.dims, sizes.samples)]
        key = f"{sha256} {given} {min_opset}"
        original = OriginalModel.of(proto, file, key if isinstance(file, Path) else "")
        densify_sparse_initializers(proto.graph)
        replace_field(proto.graph.input, input_values(proto.graph))  # before IR version 4 it lists initializers
        proto = with_batch_size(proto, sizes.shapes, source)
        declared = {value.name: copy_message(value.type) for value in proto.graph.output}
        if not sizes.keep_dynamic:
            fix_inputs(proto, sizes, source)
        interface = onnx.GraphProto(input=proto.graph.input, output=proto.graph.output)
        draft = ModelDraft(proto=proto, source=source)
        draft.prepare(min_opset)
        proto = draft.proto
        types = static_types(proto.graph)
        for value in proto.graph.output:
            kind, wanted = value.type, declared.get(value.name)
            if wanted is not None and (sizes.keep_dynamic or not kind.tensor_type.HasField("shape")):
                kind.CopyFrom(wanted)
            elif wanted is not None and len(kind.tensor_type.shape.dim) == len(wanted.tensor_type.shape.dim):
                for size, named in zip(kind.tensor_type.shape.dim, wanted.tensor_type.shape.dim, strict=True):
                    if not size.HasField("dim_value") and named.dim_param:
                        size.dim_param = named.dim_param
        check_interface(interface, proto.graph, {}, source)
        model = Model(proto=proto, source=source, sha256=sha256, nodes=read_nodes(proto), types=types)
        # The comparison looks at shapes of results, not at declared ones; dynamic models are compared elsewhere.
        if not sizes.keep_dynamic and not check_equivalent(original, model):
            check_interface(interface, proto.graph, draft.types_before_upgrade, source)
        return model


def read_signature(path: Path, source: str | None = None) -> ModelSignature:
    """Read the inputs, outputs and nodes of a file; `source` is its name in messages, by default the path."""
    proto, _ = read_model(path, source or str(path))
    with refuse_damage(source or path):
        stored: dict[str, set[str]] = {}
        graph = QDQGraph(proto)
        for edge, precision in graph.edges.items():
            stored.setdefault(edge.consumer, set()).add(precision)
        tensors = [value for value in input_values(proto.graph) if value.type.HasField("tensor_type")]
        return ModelSignature(
            inputs={v.name: (dtype_name(v.type.tensor_type.elem_type), _static_dims(v)) for v in tensors},
            outputs={v.name: _static_dims(v) for v in proto.graph.output},
            axes={v.name: axes_of(v) for v in tensors},
            nodes=tuple(
                NodeSignature(node.name, node.op_type, frozenset(stored.get(label, ())))
                for label, node in graph.nodes.items()
                if node.op_type not in QDQ_OPS
            ),
        )


def write_without_output_transpose(source: Path, path: Path) -> Path:
    """Write a model without the Transpose before its only output; the input of the Transpose becomes output "output0".

    Returns the path of the written file.

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
    name, inner, shape = "output0", last.input[0], [sizes[order.index(axis)] for axis in range(len(order))]
    model.graph.node.remove(last)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name if each == inner else each for each in names]
    output.CopyFrom(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return write_model(model, path)


def _static_dims(value: onnx.ValueInfoProto) -> Dims:
    return tuple(axis if isinstance(axis, int) else None for axis in axes_of(value) or ())
