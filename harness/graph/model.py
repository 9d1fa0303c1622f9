"""Loaded model: checked, prepared, with static shapes, and indexed for the rest of the package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import onnx

__all__ = ["DynamicOriginal", "Model", "Node", "TensorType", "find_captures", "iter_graphs", "iter_subgraphs"]

_Fact = TypeVar("_Fact")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type by its ONNX name in lower case ("float", "int64", "bool") and static shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, as the region engine sees it.

    Attributes:
        index: Position in topological order.
        name: Unique in the model, never empty.
        inputs: Tensor names; "" for an omitted optional input.
        attributes: Plain Python values; graph-valued attributes are absent.
        opaque: The node has a subgraph or is no operator that ONNX defines: it stays float.
        captures: Tensors that the node's subgraphs read from outside, in an order that no name decides; not among
            `inputs`.
        body: Digest of what the subgraphs compute; "" without any.
    """

    index: int
    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(hash=False)
    opaque: bool = False
    captures: tuple[str, ...] = ()
    body: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicOriginal:
    """A model with dynamic inputs, before it was fixed to one size of each.

    Attributes:
        model: Its file, or the model itself where it came from memory.
        min_opset: The operator set that it was upgraded to where it is older.
    """

    model: Path | onnx.ModelProto = field(hash=False)
    min_opset: int


@dataclass(frozen=True)
class Model:
    """A float ONNX model, ready for placement. Never changed after loading.

    Attributes:
        proto: Cleaned model: unique node names, topological order, constants as initializers,
            BatchNormalization folded, static shapes inferred.
        source: What the user called it.
        sha256: Of the file as it was given, external data included.
        nodes: In topological order; `nodes[i].index == i`.
        types: Type of every tensor of the main graph that shape inference could type.
        origin: The model as it was given, if its inputs are dynamic there; see `harness.graph.dynamic_axes`.
    """

    proto: onnx.ModelProto
    source: str
    sha256: str
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    origin: DynamicOriginal | None = None

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs, initializers excluded."""
        return tuple(i.name for i in self.proto.graph.input if i.name not in self.constants)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs."""
        return tuple(o.name for o in self.proto.graph.output)

    @cached_property
    def constants(self) -> Mapping[str, onnx.TensorProto]:
        """Initializers by name."""
        return {t.name: t for t in self.proto.graph.initializer}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that makes a tensor; absent for inputs and constants."""
        return {out: node.index for node in self.nodes for out in node.outputs if out}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Who reads a tensor: (node index, input slot) pairs in graph order; absent where nobody does."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for node in self.nodes:
            for slot, name in enumerate(node.inputs):
                if name:
                    found[name].append((node.index, slot))
        return {name: tuple(pairs) for name, pairs in found.items()}

    @cached_property
    def captured(self) -> frozenset[str]:
        """Tensors that some subgraph reads; they have a reader that `consumers` does not list."""
        return frozenset(name for node in self.nodes for name in node.captures)

    @cached_property
    def _analyses(self) -> dict[Callable[[Model], Any], Any]:
        return {}

    def cached_analysis(self, find: Callable[[Model], _Fact]) -> _Fact:
        """Return what a function finds out about this model; it is called once."""
        if find not in self._analyses:
            self._analyses[find] = find(self)
        known: _Fact = self._analyses[find]
        return known


def iter_subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graph-valued attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def iter_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs inside it."""
    yield graph
    for node in graph.node:
        for inner in iter_subgraphs(node):
            yield from iter_graphs(inner)


def find_captures(node: onnx.NodeProto) -> frozenset[str]:
    """Names that the node's subgraphs use and do not define themselves."""
    found: set[str] = set()
    for graph in iter_subgraphs(node):
        used, defined = {value.name for value in graph.output}, {value.name for value in graph.input}
        defined.update(tensor.name for tensor in graph.initializer)
        defined.update(tensor.values.name for tensor in graph.sparse_initializer)
        for inner in graph.node:
            used.update(inner.input)
            used.update(find_captures(inner))
            defined.update(inner.output)
        found |= used - defined
    return frozenset(found - {""})
