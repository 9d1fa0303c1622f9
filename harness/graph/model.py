"""Loaded model: checked, prepared, with static shapes, and with indices of its nodes and tensors.

Subgraphs of a node are represented by a digest of their computation. Outputs of a graph and inputs of a node are
ordered, so a walk from the outputs against the data flow numbers all nodes that they depend on in a unique way,
independent of names and of the order of nodes in the file.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from harness.graph.protos import copy_message, find_captures, find_random_nodes, is_standard_op, opset_versions

_Fact = TypeVar("_Fact")
_GRAPH_TYPES = frozenset({onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type by its ONNX name in lower case ("float", "int64", "bool"), and static shape; () for a scalar."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Node of the main graph.

    Attributes:
        index: Position in topological order.
        name: Name, unique in the model and never empty.
        inputs: Tensor names; "" for an omitted optional input.
        attributes: Plain Python values or NumPy arrays by attribute; graph-valued attributes are absent.
        opaque: Whether the node has a subgraph, is no operator of ONNX or is random
            (`harness.graph.protos.find_random_nodes`); such nodes stay float.
        captures: Tensors that the node's subgraphs read from outside, not among `inputs`, in an order independent of
            names.
        body: Digest of the subgraphs; "" without subgraphs.
        op: Type of the operator, for instance "Conv".
        domain: Domain of the operator; "" for the default one.
        outputs: Tensor names; "" for an omitted optional output.
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
    """Original of a model whose dynamic inputs were fixed to one size.

    Attributes:
        model: File of the original, or the original itself if it has no file.
        min_opset: Version of the default operator set to which an older original is upgraded.
        axes: Declared dimensions of each tensor input by name; None: all dimensions of the input are dynamic.
    """

    model: Path | onnx.ModelProto = field(hash=False)
    min_opset: int
    axes: Mapping[str, tuple[int | str | None, ...] | None] = field(hash=False)


@dataclass(frozen=True)
class Model:
    """Prepared float model, which is not changed after loading.

    Attributes:
        proto: Cleaned model: unique node names, topological order, constants as initializers, BatchNormalization
            folded, static shapes inferred.
        source: Name of the model in messages and tables.
        sha256: SHA-256 of the original file in hexadecimal, external data included.
        nodes: Nodes in topological order; `nodes[i].index == i`.
        types: Type by name of every tensor of the main graph, as far as shape inference finds it.
        origin: Original of a model with dynamic inputs, see `harness.graph.dynamic_axes`; None for static inputs.
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
    def output_names(self) -> frozenset[str]:
        """Names of the model's outputs as a set."""
        return frozenset(self.outputs)

    @cached_property
    def constants(self) -> Mapping[str, onnx.TensorProto]:
        """Initializers by name."""
        return {t.name: t for t in self.proto.graph.initializer}

    @cached_property
    def nodes_by_name(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that computes each tensor, by name; without inputs and constants."""
        return {out: node.index for node in self.nodes for out in node.outputs if out}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Readers of each tensor by name, as (node index, input slot) pairs in graph order; absent without readers."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for node in self.nodes:
            for slot, name in enumerate(node.inputs):
                if name:
                    found[name].append((node.index, slot))
        return {name: tuple(pairs) for name, pairs in found.items()}

    def is_activation(self, tensor: str) -> bool:
        """Return whether a name is that of a tensor other than a constant; False for "" (an omitted input)."""
        return bool(tensor) and tensor not in self.constants

    def producer_node(self, tensor: str) -> Node | None:
        """Return the node that computes a tensor; None for inputs and constants."""
        index = self.producer.get(tensor)
        return None if index is None else self.nodes[index]

    def constant_array(self, tensor: str) -> npt.NDArray[Any] | None:
        """Return the values of a constant as a NumPy array; None for any other tensor."""
        constant = self.constants.get(tensor)
        return None if constant is None else numpy_helper.to_array(constant)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Names of the tensors that a subgraph reads from outside; `consumers` does not list such readers."""
        return frozenset(name for node in self.nodes for name in node.captures)

    @cached_property
    def _analyses(self) -> dict[Callable[[Model], Any], Any]:
        return {}

    def cached_analysis(self, find: Callable[[Model], _Fact]) -> _Fact:
        """Return `find(self)`; the result is cached by the function `find`, which is called once for this model."""
        if find not in self._analyses:
            self._analyses[find] = find(self)
        known: _Fact = self._analyses[find]
        return known


def read_nodes(proto: onnx.ModelProto) -> tuple[Node, ...]:
    """Return the nodes of the main graph of a cleaned model, in the order of the graph."""
    opsets, random = opset_versions(proto), find_random_nodes(proto)
    found = []
    for index, node in enumerate(proto.graph.node):
        digest, captures = _digest_subgraphs(node)
        unreached = find_captures(node).difference(captures)  # by what no output of the subgraph depends on
        found.append(
            Node(
                index=index,
                name=node.name,
                op=node.op_type,
                domain=node.domain,
                inputs=tuple(node.input),
                outputs=tuple(node.output),
                attributes={a.name: _attribute_value(a) for a in node.attribute if a.type not in _GRAPH_TYPES},
                opaque=index in random or bool(digest) or not is_standard_op(node, opsets),
                captures=(*captures, *sorted(unreached)),
                body=digest,
            )
        )
    return tuple(found)


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return the value of an attribute: a number, text (bytes if not UTF-8), a NumPy array, or a tuple of them."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    is_tuple = attribute.type in (onnx.AttributeProto.STRINGS, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)
    items = list(value) if is_tuple else [value]
    for place, item in enumerate(items):
        with suppress(UnicodeDecodeError):
            items[place] = item.decode() if isinstance(item, bytes) else item
    return tuple(items) if is_tuple else items[0]


def _digest_subgraphs(node: onnx.NodeProto) -> tuple[str, tuple[str, ...]]:
    """Return the SHA-256 of a node's subgraphs ("" without any), and the tensors that they read from outside.

    Their nodes must be in topological order, as the checker requires; tensors are in the order of the walk.
    """
    captured: dict[str, int] = {}
    lines = []
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        for graph in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            lines += [attribute.name, *_SubgraphWalk(graph, captured).serialize_nodes()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""
    return digest, tuple(captured)


class _SubgraphWalk:
    """Numbering of the tensors of one subgraph by a walk from its outputs.

    Args:
        captured: Numbers of outside tensors, which all subgraphs of a node share; new ones are added.
    """

    def __init__(self, graph: onnx.GraphProto, captured: dict[str, int]) -> None:
        self._captured = captured
        self._outputs = [value.name for value in graph.output]
        self._nodes = list(graph.node)
        self._producers = {name: index for index, node in enumerate(self._nodes) for name in node.output if name}
        self._digests = [_digest_subgraphs(node) for node in self._nodes]
        self._labels = {"": "_", **{value.name: f"input {index}" for index, value in enumerate(graph.input)}}
        constants = (*graph.initializer, *(tensor.values for tensor in graph.sparse_initializer))
        self._labels.update({tensor.name: _serialize_constant(tensor) for tensor in constants})
        self._lines: list[str] = []

    def serialize_nodes(self) -> list[str]:
        """Return a text for each node that an output depends on, and one for the outputs."""
        stack = self._outputs[::-1]
        while stack:
            name = stack[-1]
            producer = self._producers.get(name)
            if name in self._labels or producer is None:
                stack.pop()
                self._resolve(name)
                continue
            inputs = (*self._nodes[producer].input, *self._digests[producer][1])
            pending = [read for read in inputs if read in self._producers and read not in self._labels]
            stack.extend(reversed(pending))
            if not pending:
                node, (digest, _) = self._nodes[producer], self._digests[producer]
                places = " ".join(map(self._resolve, inputs))
                attributes = " ".join(sorted(filter(None, map(_serialize_attribute, node.attribute))))
                number = len(self._lines)
                self._labels.update({name: f"{number}.{slot}" for slot, name in enumerate(node.output) if name})
                self._lines.append(f"{node.domain}:{node.op_type} {attributes} ({places}) {digest}")
        return [*self._lines, " ".join(map(self._resolve, self._outputs))]

    def _resolve(self, name: str) -> str:
        if name not in self._labels:
            self._labels[name] = f"outside {self._captured.setdefault(name, len(self._captured))}"
        return self._labels[name]


def _serialize_constant(tensor: onnx.TensorProto) -> str:
    """Return type and shape of a constant as text, without its values, which patterns ignore."""
    return f"constant {tensor.data_type} {list(tensor.dims)}"


def _serialize_attribute(attribute: onnx.AttributeProto) -> str:
    """Return an attribute as text: "" for subgraphs, type and shape for tensors."""
    if attribute.type in _GRAPH_TYPES:
        return ""
    if attribute.type == onnx.AttributeProto.TENSOR:
        return f"{attribute.name} {_serialize_constant(attribute.t)}"
    plain = copy_message(attribute)
    plain.ClearField("doc_string")
    return str(plain.SerializeToString(deterministic=True).hex())
