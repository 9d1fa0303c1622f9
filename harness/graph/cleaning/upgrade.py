"""Raise the opset of a model without a change of what it computes.

onnx's version converter (1.21) does most of it. It loses the meaning of a few operators: Upsample and Resize before
opset 11 become a Resize that samples at half pixels, Hardmax before opset 13 works along one axis and no longer along
all from there on, Scan of opset 8 loses its batch axis, and training becomes inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper, numpy_helper, version_converter

from harness.errors import UserError
from harness.graph.cleaning.clean import constant_value
from harness.graph.cleaning.guard import sturdy
from harness.graph.model import graphs

__all__ = ["EXPLICIT_RESIZE", "upgraded"]

EXPLICIT_RESIZE, _ALONG_ONE_AXIS, _UNBATCHED_SCAN = 11, 13, 9
"""Opsets in which Resize has coordinate modes, Hardmax works along one axis, and Scan has no batch axis."""
_NO_IS_TEST, _TRAINING_MODE = 7, 14
"""Opsets in which `is_test` is gone, and in which BatchNormalization tells training by an attribute, not by outputs."""


def upgraded(proto: onnx.ModelProto, version: int, wanted: int, source: str) -> onnx.ModelProto:
    """Return the model in a newer opset.

    Args:
        proto: A model with inferred types and unique node names; it is changed.
        version: Its opset.
        wanted: The opset of the result.
        source: What messages call the model.

    Raises:
        UserError: The model has no equivalent in the newer opset.
    """
    metadata, declared = list(proto.metadata_props), list(proto.graph.value_info)
    try:
        _refuse(proto.graph, version)
        if version < _ALONG_ONE_AXIS:
            _flatten_hardmax(proto.graph)
        resizes = _resizes(proto.graph) if version < EXPLICIT_RESIZE else []
        what = f"{source}: the upgrade from opset {version} to {wanted}"
        proto = sturdy(what, version_converter.convert_version, proto, wanted)
    except (version_converter.ConvertError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{source}: opset {version} cannot be upgraded to {wanted}, which Q/DQ needs here ({text}); "
            f"export the model with opset {wanted} or later"
        ) from error
    _settle(proto.graph, resizes)
    del proto.metadata_props[:]
    proto.metadata_props.extend(metadata)
    for graph in graphs(proto.graph):
        # The converter writes shapes of its own that are not always right (onnx 1.21: rank 0 behind Softmax).
        del graph.value_info[:]
    proto.graph.value_info.extend(declared)
    return proto


def _nodes(graph: onnx.GraphProto, *operators: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes of these ONNX operators, bodies included."""
    for inner in graphs(graph):
        yield from (node for node in inner.node if node.op_type in operators and not node.domain)


def _refuse(graph: onnx.GraphProto, version: int) -> None:
    """Check that no node does what newer opsets cannot, or do differently.

    Raises:
        RuntimeError: One does.
    """
    for node in _nodes(graph, "BatchNormalization", "Dropout", "Scan"):
        if node.op_type == "Scan" and version < _UNBATCHED_SCAN:
            raise RuntimeError(f"{_called(node)} has the batch axis of opset 8, which Scan lost in opset 9")
        is_test = any(attribute.name == "is_test" and attribute.i for attribute in node.attribute)
        old = version < _NO_IS_TEST and node.op_type != "Scan" and not is_test
        several = sum(map(bool, node.output)) > 1
        if old or (node.op_type == "BatchNormalization" and version < _TRAINING_MODE and several):
            raise RuntimeError(f"{_called(node)} is exported for training; export the model for inference")


def _resizes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return name, attributes and output of what each Upsample and Resize before opset 11 is in newer opsets.

    Raises:
        RuntimeError: A node picks neighbours in a way that newer opsets lack.
    """
    constants = _constants(graph)
    found = []
    for node in _nodes(graph, "Upsample", "Resize"):
        mode = next((a.s.decode() for a in node.attribute if a.name == "mode"), "nearest")
        mode = "linear" if mode == "bilinear" else mode  # as opset 1 calls it
        attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
        if mode == "nearest":
            attributes["nearest_mode"] = _rounding(node, constants)
        found.append(helper.make_node("Resize", [], list(node.output), name=node.name, **attributes))
    return found


def _rounding(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> str:
    """Return the `nearest_mode` of an Upsample or Resize before opset 11.

    Before there was that attribute, ONNX Runtime rounded coordinates up where it shrinks an axis, and down elsewhere
    (`GetNearestPixelFromOriginal`, mode SIMPLE); onnx's own test of Resize-10 wants the same.
    """
    if node.op_type == "Upsample":  # which only enlarges
        return "floor"
    if node.input[1] not in constants:
        raise RuntimeError(f"the scales of {_called(node)} are not constant, so how it rounds is not known")
    factors = numpy_helper.to_array(constants[node.input[1]]).ravel().tolist()
    if min(factors) < 1 < max(factors):
        raise RuntimeError(f"{_called(node)} enlarges one axis and shrinks another, which it rounds in two ways")
    return "ceil" if min(factors) < 1 else "floor"


def _settle(graph: onnx.GraphProto, resizes: Sequence[onnx.NodeProto]) -> None:
    """Give the Resize nodes of a converted graph, which are in the order that they had, their names and attributes."""
    renamed = {}
    for node, wanted in zip(list(_nodes(graph, "Resize")) if resizes else (), resizes, strict=True):
        node.name = wanted.name
        renamed[node.output[0]] = wanted.output[0]
        del node.attribute[:]
        node.attribute.extend(wanted.attribute)
    for inner in graphs(graph) if renamed else ():
        for value in inner.output:
            value.name = renamed.get(value.name, value.name)
        for node in inner.node:
            for names in (node.input, node.output):
                names[:] = [renamed.get(name, name) for name in names]


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return initializers and values of Constant nodes by name, bodies included."""
    found = {tensor.name: tensor for inner in graphs(graph) for tensor in inner.initializer}
    values = ((node.output[0], constant_value(node)) for node in _nodes(graph, "Constant"))
    return found | {name: value for name, value in values if value is not None}


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Let every Hardmax work on rows of a matrix, which means the same in all opsets, in place."""
    for inner in graphs(graph):
        made: list[onnx.NodeProto] = []
        for node in inner.node:
            made += _rows(node) if node.op_type == "Hardmax" and not node.domain else [node]
        if len(made) > len(inner.node):
            del inner.node[:]
            inner.node.extend(made)


def _rows(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    result, rows, largest, shape = (node.output[0] + end for end in ("", ".rows", ".largest", ".shape"))
    return [
        helper.make_node("Flatten", [node.input[0]], [rows], name=f"{node.name}.rows", axis=axis),
        helper.make_node("Hardmax", [rows], [largest], name=node.name, axis=1),
        helper.make_node("Shape", [node.input[0]], [shape], name=f"{node.name}.size"),
        helper.make_node("Reshape", [largest, shape], [result], name=f"{node.name}.shape"),
    ]


def _called(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or node.output[0]!r}"
