"""A loaded model: checked, cleaned, with static shapes, and indexed for the rest of the graph room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx

__all__ = ["Model", "Node", "TensorType"]


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
        opaque: The node has a subgraph or is of a domain that ONNX does not define: it stays float.
    """

    index: int
    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(hash=False)
    opaque: bool = False


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
    """

    proto: onnx.ModelProto
    source: str
    sha256: str
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]

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
