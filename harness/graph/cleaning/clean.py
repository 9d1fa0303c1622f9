"""Clean-up of a model before anything is placed in it.

Meanwhile large weights are kept outside of the model and stand in it as inputs (`detach`, `attach`): ONNX's
passes serialize the model, which ends at 2 GiB, and protobuf copies a tensor whenever it changes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper
from onnx_graphsurgeon.logger import G_LOGGER
from onnx_graphsurgeon.util.exception import OnnxGraphSurgeonException

from harness.errors import UserError
from harness.graph.model import captures, graphs, subgraphs

__all__ = [
    "Weights", "attach", "detach", "is_known", "lower_constants", "mask_unknown", "name_nodes", "tidy", "unmask",
]  # fmt: skip

Weights = dict[str, onnx.TensorProto]
"""Detached initializers by name."""

LARGE_BYTES = 4096
"""Initializers above this size are weights; smaller ones may be shapes, which inference wants to see."""

FOLD_BYTES = 1 << 28
"""Constants larger than this are not computed ahead."""

MASK = "qdq.unknown."
_BOX = "qdq.box"
_NOT_FOLDED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "RandomNormal", "RandomUniform",
     "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)  # fmt: skip


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
        value = _constant(node) if node.op_type == "Constant" and not node.domain else None
        if value is None:
            rest.append(node)
        else:
            value.name = node.output[0]
            graph.initializer.append(value)
    if len(rest) < len(graph.node):
        _replace(graph.node, rest)


def tidy(graph: onnx.GraphProto, opsets: dict[str, int], weights: Weights, source: str) -> None:
    """Sort, fold constants and drop what no output needs, in place, through onnx-graphsurgeon.

    It decides on a copy; its decisions are carried back, so that attributes, types and weights are
    exactly those of the file. Nodes with subgraphs and unknown operators are shown to it as black
    boxes with their captured tensors as further inputs. Node names must be unique.

    Raises:
        UserError: The graph has a cycle.
    """
    shown = onnx.ModelProto(graph=onnx.GraphProto(name=graph.name or "main"), ir_version=10)
    shown.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
    shown.graph.output.extend(graph.output)
    shown.graph.initializer.extend(graph.initializer)
    shown.graph.sparse_initializer.extend(graph.sparse_initializer)
    boxed = {node.name for node in graph.node if any(subgraphs(node)) or not is_known(node, opsets)}
    shown.graph.node.extend(_box(node) if node.name in boxed else node for node in graph.node)
    foldable = _foldable(shown.graph, weights)
    needed = {name: weights[name] for node in foldable for name in node.input if name in weights}
    shown.graph.initializer.extend(needed.values())
    # Inputs need not be shown, and must not be: it compares each of them with every tensor (onnx-graphsurgeon 0.6).
    names = {node.name for node in foldable}
    try:
        with G_LOGGER.suppress(G_LOGGER.CRITICAL + 1):
            surgeon = gs.import_onnx(shown)
            if not _is_sorted(shown.graph):  # an order that is right is kept, as the file's author meant it
                surgeon.toposort()
            if foldable:
                with _quiet_runtime():
                    surgeon.fold_constants(
                        fold_shapes=False,
                        recurse_subgraphs=False,
                        flatten_subgraphs=False,
                        size_threshold=FOLD_BYTES,
                        should_exclude_node=lambda node: node.name not in names,
                    )
            surgeon.cleanup()
    except OnnxGraphSurgeonException as error:
        raise UserError(f"{source}: its nodes cannot be put in order: {error}; export the model again") from error
    _carry_back(graph, surgeon, boxed, weights)


@contextmanager
def _quiet_runtime() -> Iterator[None]:
    """ONNX Runtime, which computes the constants, remarks on each of them that it might have written otherwise."""
    import onnxruntime  # seconds to load, and most models have nothing to compute

    error, warning = 3, 2
    onnxruntime.set_default_logger_severity(error)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(warning)


def _is_sorted(graph: onnx.GraphProto) -> bool:
    later = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        if not later.isdisjoint(node.input):
            return False
        later.difference_update(node.output)
    return True


def _foldable(graph: onnx.GraphProto, weights: Weights) -> list[onnx.NodeProto]:
    """Nodes that depend on constants alone (in a graph out of order perhaps not all of them)."""
    constants = {tensor.name for tensor in graph.initializer} | weights.keys() | {""}
    found = []
    for node in graph.node:
        if constants.issuperset(node.input) and node.domain != _BOX and node.op_type not in _NOT_FOLDED:
            constants.update(node.output)
            found.append(node)
    return found


def _box(node: onnx.NodeProto) -> onnx.NodeProto:
    inputs = [*node.input, *sorted(captures(node))]
    return onnx.NodeProto(name=node.name, op_type=node.op_type, domain=_BOX, input=inputs, output=node.output)


def _carry_back(graph: onnx.GraphProto, surgeon: gs.Graph, boxed: set[str], weights: Weights) -> None:
    by_name = {node.name: node for node in graph.node}
    nodes = []
    for decided in surgeon.nodes:
        node = by_name[decided.name]
        if node.name not in boxed:
            _replace(node.input, [tensor.name for tensor in decided.inputs])
        nodes.append(node)
    known = {tensor.name: tensor for tensor in graph.initializer}
    constants = [t for t in surgeon.tensors().values() if isinstance(t, gs.Constant)]
    elsewhere = {tensor.values.name for tensor in graph.sparse_initializer} | weights.keys()
    initializers = [
        known[t.name] if t.name in known else numpy_helper.from_array(np.asarray(t.values), t.name)
        for t in constants
        if t.name not in elsewhere
    ]
    _replace(graph.node, nodes)
    _replace(graph.initializer, initializers)


def _replace(field: Any, values: list[Any]) -> None:
    """Give a repeated field of protobuf new contents; `values` may be some of the old."""
    del field[:]
    field.extend(values)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node as a tensor of its own; None for a sparse one."""
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
