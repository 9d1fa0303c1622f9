"""Upgrade of a model's opset that does not change its results.

onnx's version converter (1.21) changes the meaning of a few operators, which are handled here: Upsample and Resize
before opset 11 become a Resize that samples at half pixels, Hardmax works along one axis from opset 13 on and along all
following axes before, Scan of opset 8 loses its batch axis, and training becomes inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import helper, numpy_helper, version_converter

from harness.base.errors import UserError
from harness.graph.protos import attribute_value, constants_by_name, iter_graphs, replace_field
from harness.workers.helper_process import call_in_helper_process

EXPLICIT_RESIZE_OPSET = 11  # from this opset on, Resize has coordinate modes
_SINGLE_AXIS_SOFTMAX_OPSET = 13  # from this opset on, Hardmax works along one axis
_UNBATCHED_SCAN_OPSET = 9  # from this opset on, Scan has no batch axis
_NO_IS_TEST_OPSET = 7  # from this opset on, BatchNormalization for training is recognised by its number of outputs
_TRAINING_MODE_OPSET = 14  # from this opset on, it is recognised by an attribute


def upgrade_opset(proto: onnx.ModelProto, version: int, wanted: int, source: str) -> onnx.ModelProto:
    """Return a model upgraded from opset `version` to `wanted` of the default domain; `proto` is changed.

    The model must have inferred types and unique node names.

    Raises:
        UserError: The model has no equivalent in the newer opset; the message starts with `source`.
    """
    metadata, declared, outputs = (
        list(each) for each in (proto.metadata_props, proto.graph.value_info, proto.graph.output)
    )
    try:
        _refuse_unconvertible(proto.graph, version)
        if version < _SINGLE_AXIS_SOFTMAX_OPSET:
            _flatten_hardmax(proto.graph)
        resizes = _explicit_resizes(proto.graph) if version < EXPLICIT_RESIZE_OPSET else []
        what = f"{source}: the upgrade from opset {version} to {wanted}"
        proto = call_in_helper_process(what, version_converter.convert_version, proto, wanted)
    except (version_converter.ConvertError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{source}: opset {version} cannot be upgraded to {wanted}, which Q/DQ needs here ({text}); "
            f"export the model with opset {wanted} or later"
        ) from error
    _restore_resizes(proto.graph, resizes)
    replace_field(proto.metadata_props, metadata)
    for graph in iter_graphs(proto.graph):
        # The converter writes shapes that are not always right (onnx 1.21: rank 0 after Softmax).
        del graph.value_info[:]
    proto.graph.value_info.extend(declared)
    for value, before in zip(proto.graph.output, outputs, strict=True):
        value.type.CopyFrom(before.type)
    return proto


def _iter_nodes(graph: onnx.GraphProto, *operators: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes of these ONNX operators, including those in subgraphs."""
    for inner in iter_graphs(graph):
        yield from (node for node in inner.node if node.op_type in operators and not node.domain)


def _refuse_unconvertible(graph: onnx.GraphProto, version: int) -> None:
    """Raise `RuntimeError` for a node that newer opsets cannot express."""
    for node in _iter_nodes(graph, "BatchNormalization", "Dropout", "Scan"):
        if node.op_type == "Scan" and version < _UNBATCHED_SCAN_OPSET:
            raise RuntimeError(f"{_describe_node(node)} has the batch axis of opset 8, which Scan lost in opset 9")
        old = version < _NO_IS_TEST_OPSET and node.op_type != "Scan" and not attribute_value(node, "is_test")
        several = sum(map(bool, node.output)) > 1
        if old or (node.op_type == "BatchNormalization" and version < _TRAINING_MODE_OPSET and several):
            raise RuntimeError(f"{_describe_node(node)} is exported for training; export the model for inference")


def _explicit_resizes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nodes with the name, attributes and output of the Resize that replaces each Upsample or old Resize.

    Before the attribute `nearest_mode` existed, ONNX Runtime rounded coordinates up on axes that shrink and down on
    others (`GetNearestPixelFromOriginal`, mode SIMPLE); onnx's own test of Resize-10 expects the same.
    """
    constants = {name: value for inner in iter_graphs(graph) for name, value in constants_by_name(inner).items()}
    resizes = []
    for node in _iter_nodes(graph, "Upsample", "Resize"):
        mode = attribute_value(node, "mode", "nearest")
        mode = "linear" if mode == "bilinear" else mode  # the name in opset 1
        attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
        if mode == "nearest":
            attributes["nearest_mode"] = "floor"  # of an Upsample, which only enlarges
            if node.op_type == "Resize":
                what = _describe_node(node)
                if node.input[1] not in constants:
                    raise RuntimeError(f"the scales of {what} are not constant, so its rounding is not known")
                factors = numpy_helper.to_array(constants[node.input[1]]).ravel().tolist()
                if min(factors) < 1 < max(factors):
                    raise RuntimeError(f"{what} enlarges one axis and shrinks another, which it rounds differently")
                attributes["nearest_mode"] = "ceil" if min(factors) < 1 else "floor"
        resizes.append(helper.make_node("Resize", [], list(node.output), name=node.name, **attributes))
    return resizes


def _restore_resizes(graph: onnx.GraphProto, resizes: Sequence[onnx.NodeProto]) -> None:
    """Set names and attributes of the Resize nodes of a converted graph, which are in the order of `resizes`."""
    new_names = {}
    for node, resize in zip(list(_iter_nodes(graph, "Resize")) if resizes else (), resizes, strict=True):
        node.name = resize.name
        new_names[node.output[0]] = resize.output[0]
        replace_field(node.attribute, resize.attribute)
    for inner in iter_graphs(graph) if new_names else ():
        for value in inner.output:
            value.name = new_names.get(value.name, value.name)
        for node in inner.node:
            for names in (node.input, node.output):
                names[:] = [new_names.get(name, name) for name in names]


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Replace every Hardmax by one over the rows of a matrix, whose meaning is equal in all opsets, in place."""
    for inner in iter_graphs(graph):
        nodes: list[onnx.NodeProto] = []
        for node in inner.node:
            if node.op_type != "Hardmax" or node.domain:
                nodes.append(node)
                continue
            axis, data = attribute_value(node, "axis", 1), node.input[0]
            result, rows, largest, shape = (node.output[0] + end for end in ("", ".rows", ".largest", ".shape"))
            nodes += [
                helper.make_node("Flatten", [data], [rows], name=f"{node.name}.rows", axis=axis),
                helper.make_node("Hardmax", [rows], [largest], name=node.name, axis=1),
                helper.make_node("Shape", [data], [shape], name=f"{node.name}.size"),
                helper.make_node("Reshape", [largest, shape], [result], name=f"{node.name}.shape"),
            ]
        if len(nodes) > len(inner.node):
            replace_field(inner.node, nodes)


def _describe_node(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or node.output[0]!r}"
