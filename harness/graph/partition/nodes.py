"""Nodes of a cleaned ONNX graph in the form that the region engine reads."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper, numpy_helper

from harness.graph.model import Node, find_captures
from harness.graph.passes.normalize import is_standard_op
from harness.graph.passes.subgraph_digest import digest_subgraphs

__all__ = ["read_nodes"]


def read_nodes(proto: onnx.ModelProto) -> tuple[Node, ...]:
    """Return the nodes of the main graph of a cleaned model."""
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    return tuple(_read_node(index, node, opsets) for index, node in enumerate(proto.graph.node))


def _read_node(index: int, node: onnx.NodeProto, opsets: dict[str, int]) -> Node:
    body = digest_subgraphs(node)
    unreached = find_captures(node).difference(body.captures)  # by what no output of the subgraph depends on
    return Node(
        index=index,
        name=node.name,
        op=node.op_type,
        domain=node.domain,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes={a.name: _attribute_value(a) for a in node.attribute if a.type not in _GRAPH_TYPES},
        opaque=bool(body.digest) or not is_standard_op(node, opsets),
        captures=(*body.captures, *sorted(unreached)),
        body=body.digest,
    )


_GRAPH_TYPES = frozenset({onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    """A Python value: numbers, text (bytes where it is none), numpy arrays, and tuples of them."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return _decode_text(value)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return tuple(_decode_text(item) for item in value)
    return tuple(value) if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS) else value


def _decode_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
