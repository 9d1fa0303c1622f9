"""Clean-up of a model's structure before anything is placed in it.

During preparation, large weights are kept outside of the model and replaced by inputs (`detach`,
`attach`): ONNX's passes serialize the model, which is limited to 2 GiB, and protobuf copies a tensor whenever
it moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import checker, helper, numpy_helper

from harness.graph.protos import (
    constant_value,
    copy_message,
    is_standard_op,
    iter_graphs,
    opset_versions,
    replace_field,
    tensors_read,
)

Weights = dict[str, onnx.TensorProto]
"""Initializers by name that are kept outside of the model."""

MAX_SHOWN_BYTES = 4096  # larger initializers are weights; smaller ones may be shapes, which inference needs
MAX_FOLDED_BYTES = 1 << 28  # larger results are not computed in advance
MASK_PREFIX = "qdq.unknown."


def externalize_weights(graph: onnx.GraphProto) -> Weights:
    """Move the large initializers of the main graph out of it, in place, and make them its inputs."""
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.ByteSize() > MAX_SHOWN_BYTES}
    if weights:
        replace_field(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in weights])
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights.values())
    return weights


def restore_weights(graph: onnx.GraphProto, weights: Weights) -> None:
    """Undo `detach` for the weights that are still used, in place."""
    used = {name for node in graph.node for name in tensors_read(node)}
    used.update(value.name for value in graph.output)
    replace_field(graph.input, [value for value in graph.input if value.name not in weights])
    graph.initializer.extend(tensor for name, tensor in weights.items() if name in used)


def isolate_custom_ops(proto: onnx.ModelProto) -> list[str]:
    """Move operators that ONNX's own domains do not define into a separate domain, in place.

    Plug-in operators of runtimes are often exported in ONNX's domain (EfficientNMS_TRT), where the checker and the
    version converter refuse them.

    Returns:
        All operators that ONNX does not define, in any domain, as "domain.op", sorted.
    """
    opsets = opset_versions(proto)
    custom = [n for graph in iter_graphs(proto.graph) for n in graph.node if not is_standard_op(n, opsets)]
    names = sorted({f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in custom})
    for node in custom:
        if node.domain in ("", "ai.onnx.ml", "ai.onnx.preview.training"):
            node.domain = MASK_PREFIX + node.domain
    for domain in sorted({node.domain for node in custom} - opsets.keys()):
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return names


def restore_custom_ops(proto: onnx.ModelProto) -> None:
    """Undo `isolate_custom_ops`, in place."""
    for graph in iter_graphs(proto.graph):
        for node in graph.node:
            if node.domain.startswith(MASK_PREFIX):
                node.domain = node.domain.removeprefix(MASK_PREFIX)
    replace_field(
        proto.opset_import, [opset for opset in proto.opset_import if not opset.domain.startswith(MASK_PREFIX)]
    )


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node of the main graph a unique name, in place; names that are unique already stay.

    The names are part of recorded results, so that a pass with other names (onnx_ir's NameFixPass) cannot replace this.
    """
    taken = {node.name for node in graph.node}
    seen: set[str] = set()
    last_numbers: dict[str, int] = {}  # by stem, so that thousands of equal names take no quadratic time
    for index, node in enumerate(graph.node):
        if not node.name or node.name in seen:
            stem = node.name or f"{node.op_type}_{index}"
            name, number = stem, last_numbers.get(stem, 0)
            while name in taken or name in seen:
                number += 1
                name = f"{stem}_{number}"
            node.name, last_numbers[stem] = name, number
        seen.add(node.name)


def lower_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes of the main graph into initializers, in place."""
    rest = []
    for node in graph.node:
        value = constant_value(node) if node.op_type == "Constant" and not node.domain else None
        if value is None:
            rest.append(node)
        else:
            value.name = node.output[0]
            graph.initializer.append(value)
    if len(rest) < len(graph.node):
        replace_field(graph.node, rest)


def densify_sparse_initializers(graph: onnx.GraphProto) -> None:
    """Turn sparse initializers of the main graph into dense ones, in place: most tools cannot read sparse ones."""
    kept = []
    for sparse in graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        if math.prod(sparse.dims) * values.itemsize > MAX_FOLDED_BYTES:
            kept.append(sparse)
            continue
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        positions = np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)
        dense[positions] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    replace_field(graph.sparse_initializer, kept)


def check_valid(proto: onnx.ModelProto, constants: Iterable[onnx.TensorProto] = ()) -> None:
    """Raise `onnx.checker.ValidationError` if a model is not valid ONNX; custom operators are allowed.

    Args:
        constants: Initializers that are not part of it: the checker serializes the model, which is limited to 2 GiB.
    """
    checked = copy_message(proto)
    checked.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in constants)
    for value in checked.graph.output:
        if not value.type.WhichOneof("value") or value.type.HasField("tensor_type"):
            # The checker insists on a declared type of outputs, which runtimes and `load` infer.
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
    isolate_custom_ops(checked)
    checker.check_model(checked)
