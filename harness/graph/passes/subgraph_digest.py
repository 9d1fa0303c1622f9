"""Digest of what a node's subgraphs compute, independent of names: equal digests compute the same, node by node.

Outputs of a graph and inputs of a node are ordered, so a walk from the outputs against the data flow numbers everything
that they depend on in one way only, independent of names and of the order of nodes in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

__all__ = ["SubgraphDigest", "digest_subgraphs"]


@dataclass(frozen=True, slots=True)
class SubgraphDigest:
    """The subgraphs of one node.

    Attributes:
        digest: SHA-256 in hexadecimal; "" for a node without subgraphs.
        captures: Tensors that they read from outside, in the order of the walk.
    """

    digest: str
    captures: tuple[str, ...]


def digest_subgraphs(node: onnx.NodeProto) -> SubgraphDigest:
    """Return the digest of a node's subgraphs, whose nodes must be in topological order, as the checker requires."""
    captured: dict[str, int] = {}
    lines = []
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        for graph in _attribute_graphs(attribute):
            lines += [attribute.name, *_SubgraphWalk(graph, captured).serialize_nodes()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""
    return SubgraphDigest(digest, tuple(captured))


class _SubgraphWalk:
    """Numbering of one graph.

    Args:
        captured: Numbers of the tensors from outside, which all graphs of a node share; new ones are added.
    """

    def __init__(self, graph: onnx.GraphProto, captured: dict[str, int]) -> None:
        self._captured = captured
        self._outputs = [value.name for value in graph.output]
        self._nodes = list(graph.node)
        self._producers = {name: index for index, node in enumerate(self._nodes) for name in node.output if name}
        self._digests = [digest_subgraphs(node) for node in self._nodes]
        self._labels = {"": "_", **{value.name: f"input {index}" for index, value in enumerate(graph.input)}}
        self._labels.update({tensor.name: _serialize_constant(tensor) for tensor in graph.initializer})
        sparse = (tensor.values for tensor in graph.sparse_initializer)
        self._labels.update({values.name: _serialize_constant(values) for values in sparse})
        self._lines: list[str] = []

    def serialize_nodes(self) -> list[str]:
        """Return a line for each node that an output depends on, and one for the outputs."""
        stack = self._outputs[::-1]
        while stack:
            name = stack[-1]
            producer = self._producers.get(name)
            if name in self._labels or producer is None:
                stack.pop()
                self._resolve(name)
                continue
            inputs = self._inputs_of(producer)
            pending = [read for read in inputs if read in self._producers and read not in self._labels]
            stack.extend(reversed(pending))
            if not pending:
                self._number_node(producer)
        return [*self._lines, " ".join(map(self._resolve, self._outputs))]

    def _inputs_of(self, index: int) -> tuple[str, ...]:
        return (*self._nodes[index].input, *self._digests[index].captures)

    def _resolve(self, name: str) -> str:
        if name not in self._labels:
            self._labels[name] = f"outside {self._captured.setdefault(name, len(self._captured))}"
        return self._labels[name]

    def _number_node(self, index: int) -> None:
        node, digest = self._nodes[index], self._digests[index].digest
        inputs = " ".join(map(self._resolve, self._inputs_of(index)))
        attributes = " ".join(sorted(filter(None, map(_serialize_attribute, node.attribute))))
        self._labels.update({name: f"{len(self._lines)}.{slot}" for slot, name in enumerate(node.output) if name})
        self._lines.append(f"{node.domain}:{node.op_type} {attributes} ({inputs}) {digest}")


def _attribute_graphs(attribute: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    return [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs


def _serialize_constant(tensor: onnx.TensorProto) -> str:
    """Return type and shape of a constant: its values do not count, as outside of subgraphs."""
    return f"constant {tensor.data_type} {list(tensor.dims)}"


def _serialize_attribute(attribute: onnx.AttributeProto) -> str:
    """Return an attribute without its doc string: "" for subgraphs, type and shape for tensors."""
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        return ""
    if attribute.type == onnx.AttributeProto.TENSOR:
        return f"{attribute.name} {_serialize_constant(attribute.t)}"
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("doc_string")
    return str(plain.SerializeToString(deterministic=True).hex())
