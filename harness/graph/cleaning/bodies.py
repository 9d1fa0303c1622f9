"""What the subgraphs of a node compute, said without names: two bodies of one text do the same, node by node.

The outputs of a graph are ordered and so are the inputs of a node, so a walk from the outputs against the data numbers
all that they depend on in one way only, whatever things are called and in which order they stand in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

__all__ = ["Body", "body_of"]


@dataclass(frozen=True, slots=True)
class Body:
    """The subgraphs of one node.

    Attributes:
        digest: SHA-256 of what they compute, in hexadecimal; "" for a node without any.
        captures: Tensors that they read from outside, in the order of the walk.
    """

    digest: str
    captures: tuple[str, ...]


def body_of(node: onnx.NodeProto) -> Body:
    """What the subgraphs of a node compute, and what they read from outside.

    Args:
        node: A node of a model that was checked: inside of each subgraph the nodes stand in order.
    """
    captured: dict[str, int] = {}
    lines = []
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        for graph in _graphs(attribute):
            lines += [attribute.name, *_Walk(graph, captured).lines()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""
    return Body(digest, tuple(captured))


class _Walk:
    """A numbering of one graph.

    Args:
        captured: Numbers of the tensors from outside, which all graphs of a node share; grows.
    """

    def __init__(self, graph: onnx.GraphProto, captured: dict[str, int]) -> None:
        self._captured = captured
        self._outputs = [value.name for value in graph.output]
        self._nodes = list(graph.node)
        self._makers = {name: index for index, node in enumerate(self._nodes) for name in node.output if name}
        self._bodies = [body_of(node) for node in self._nodes]
        self._place = {"": "_", **{value.name: f"input {place}" for place, value in enumerate(graph.input)}}
        self._place.update({tensor.name: _constant(tensor) for tensor in graph.initializer})
        self._place.update({tensor.values.name: _constant(tensor.values) for tensor in graph.sparse_initializer})
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """One for each node that an output depends on, and one for the outputs."""
        todo = self._outputs[::-1]
        while todo:
            name = todo[-1]
            maker = self._makers.get(name)
            if name in self._place or maker is None:
                todo.pop()
                self._resolve(name)
                continue
            pending = [read for read in self._reads(maker) if read in self._makers and read not in self._place]
            todo.extend(reversed(pending))
            if not pending:
                self._number(maker)
        return [*self._lines, " ".join(map(self._resolve, self._outputs))]

    def _reads(self, index: int) -> tuple[str, ...]:
        return (*self._nodes[index].input, *self._bodies[index].captures)

    def _resolve(self, name: str) -> str:
        if name not in self._place:
            self._place[name] = f"outside {self._captured.setdefault(name, len(self._captured))}"
        return self._place[name]

    def _number(self, index: int) -> None:
        node, body = self._nodes[index], self._bodies[index]
        reads = " ".join(map(self._resolve, self._reads(index)))
        attributes = " ".join(sorted(filter(None, map(_attribute, node.attribute))))
        self._place.update({name: f"{len(self._lines)}.{place}" for place, name in enumerate(node.output) if name})
        self._lines.append(f"{node.domain}:{node.op_type} {attributes} ({reads}) {body.digest}")


def _graphs(attribute: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    return [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs


def _constant(tensor: onnx.TensorProto) -> str:
    """A constant by its type and shape: what is in it does not count, as outside of subgraphs."""
    return f"constant {tensor.data_type} {list(tensor.dims)}"


def _attribute(attribute: onnx.AttributeProto) -> str:
    """An attribute without what is said of it; "" for a graph, and a tensor as a constant."""
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        return ""
    if attribute.type == onnx.AttributeProto.TENSOR:
        return f"{attribute.name} {_constant(attribute.t)}"
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("doc_string")
    return str(plain.SerializeToString(deterministic=True).hex())
