"""Clean-up of a model before anything is placed in it.

Meanwhile large weights are kept outside of the model and stand in it as inputs (`detach`, `attach`): ONNX's
passes serialize the model, which ends at 2 GiB, and protobuf copies a tensor whenever it changes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx_graphsurgeon.logger import G_LOGGER
from onnx_graphsurgeon.util.exception import OnnxGraphSurgeonException

from harness.errors import UserError
from harness.graph.cleaning.constants import BOX, FOLD_BYTES, LARGE_BYTES, Weights, folded, surgeon
from harness.graph.model import captures, graphs, subgraphs

__all__ = [
    "Weights", "attach", "constant_value", "densify", "detach", "is_known", "lower_constants", "mask_unknown",
    "name_nodes", "tidy", "unmask",
]  # fmt: skip

MASK = "qdq.unknown."


def detach(graph: onnx.GraphProto) -> Weights:
    """Take the large initializers out of the main graph, in place, and make them its inputs."""
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.ByteSize() > LARGE_BYTES}
    if weights:
        _replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in weights])
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights.values())
    return weights


def attach(graph: onnx.GraphProto, weights: Weights) -> None:
    """Undo `detach` for all weights that are still used, and forget the others, in place."""
    used = {name for node in graph.node for name in (*node.input, *captures(node))}
    used.update(value.name for value in graph.output)
    _replace(graph.input, [value for value in graph.input if value.name not in weights])
    graph.initializer.extend(tensor for name, tensor in weights.items() if name in used)


def is_known(node: onnx.NodeProto, opsets: dict[str, int]) -> bool:
    """Whether ONNX defines this operator at the imported version."""
    return bool(onnx.defs.has(node.op_type, opsets.get(node.domain, 1), node.domain))


def mask_unknown(proto: onnx.ModelProto) -> list[str]:
    """Move operators that ONNX's own domains do not have into a domain of their own, in place.

    Plug-in operators of runtimes are often exported so (EfficientNMS_TRT); the checker and the
    version converter refuse them there.

    Returns:
        All operators unknown to ONNX, of whatever domain, as "domain.op", sorted.
    """
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    unknown = [n for graph in graphs(proto.graph) for n in graph.node if not is_known(n, opsets)]
    names = sorted({f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in unknown})
    for node in unknown:
        if node.domain in ("", "ai.onnx.ml", "ai.onnx.preview.training"):
            node.domain = MASK + node.domain
    for domain in sorted({node.domain for node in unknown} - opsets.keys()):
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return names


def unmask(proto: onnx.ModelProto) -> None:
    """Undo `mask_unknown`, in place."""
    for graph in graphs(proto.graph):
        for node in graph.node:
            if node.domain.startswith(MASK):
                node.domain = node.domain.removeprefix(MASK)
    _replace(proto.opset_import, [opset for opset in proto.opset_import if not opset.domain.startswith(MASK)])


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node of the main graph a unique name, in place; names that are unique already stay."""
    taken = {node.name for node in graph.node}
    seen: set[str] = set()
    for index, node in enumerate(graph.node):
        if not node.name or node.name in seen:
            stem = node.name or f"{node.op_type}_{index}"
            name, number = stem, 0
            while name in taken or name in seen:
                number += 1
                name = f"{stem}_{number}"
            node.name = name
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
        _replace(graph.node, rest)


def densify(graph: onnx.GraphProto) -> None:
    """Turn sparse initializers of the main graph into dense ones, in place: hardly any tool reads the former."""
    kept = []
    for sparse in graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        if math.prod(sparse.dims) * values.itemsize > FOLD_BYTES:
            kept.append(sparse)
            continue
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        places = np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)
        dense[places] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    _replace(graph.sparse_initializer, kept)


def tidy(graph: onnx.GraphProto, opsets: dict[str, int], weights: Weights, source: str) -> None:
    """Sort, fold constants and drop what no output needs, in place.

    onnx-graphsurgeon sorts and folds, and is shown no more than that takes: it copies what it is shown, several times.
    Attributes, types and weights stay exactly those of the file. Nodes with subgraphs and unknown operators are black
    boxes with their captured tensors as further inputs. Node names must be unique.

    Raises:
        UserError: The graph has a cycle.
    """
    boxed = {node.name for node in graph.node if any(subgraphs(node)) or not is_known(node, opsets)}
    shown = [_box(node) if node.name in boxed else node for node in graph.node]
    outputs = [value.name for value in graph.output]
    try:
        with G_LOGGER.suppress(G_LOGGER.CRITICAL + 1):
            if not _is_sorted(shown):  # an order that is right is kept, as the file's author meant it
                shown = _sorted(shown, opsets, outputs)
            constants = {tensor.name: tensor for tensor in graph.initializer} | weights
            computed, values = folded(shown, constants, outputs, opsets, source)
    except OnnxGraphSurgeonException as error:
        raise UserError(f"{source}: its nodes cannot be put in order: {error}; export the model again") from error
    used, kept = set(outputs), []
    by_name = {node.name: node for node in graph.node}
    for node in reversed(shown):
        if node.name not in computed and not used.isdisjoint(node.output):
            used.update(filter(None, node.input))
            kept.append(by_name[node.name])
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    initializers += [numpy_helper.from_array(value, name) for name, value in values.items() if name in used]
    _replace(graph.node, kept[::-1])
    _replace(graph.initializer, initializers)


def _sorted(nodes: list[onnx.NodeProto], opsets: dict[str, int], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    shown = surgeon(nodes, opsets, outputs)
    shown.toposort()
    by_name = {node.name: node for node in nodes}
    return [by_name[node.name] for node in shown.nodes]


def _is_sorted(nodes: Iterable[onnx.NodeProto]) -> bool:
    later = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if not later.isdisjoint(node.input):
            return False
        later.difference_update(node.output)
    return True


def _box(node: onnx.NodeProto) -> onnx.NodeProto:
    inputs = [*node.input, *sorted(captures(node))]
    return onnx.NodeProto(name=node.name, op_type=node.op_type, domain=BOX, input=inputs, output=node.output)


def _replace(field: Any, values: list[Any]) -> None:
    """Give a repeated field of protobuf new contents; `values` may be some of the old."""
    del field[:]
    field.extend(values)


def constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the value of a Constant node as a new tensor; None for a sparse one."""
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    tensor = onnx.TensorProto()
    if attribute.name == "value":
        tensor.CopyFrom(value)
    elif attribute.name in ("value_float", "value_floats"):
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, dtype=np.float32)))
    elif attribute.name in ("value_int", "value_ints"):
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, dtype=np.int64)))
    elif attribute.name in ("value_string", "value_strings"):
        strings = [value] if attribute.name == "value_string" else list(value)
        tensor.data_type = onnx.TensorProto.STRING
        tensor.dims.extend([] if attribute.name == "value_string" else [len(strings)])
        tensor.string_data.extend(strings)
    else:
        return None
    return tensor
