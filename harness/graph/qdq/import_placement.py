"""Reading of the placement of a Q/DQ file, as edges of its float model or of one with the same structure."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto

from harness.base.errors import UserError
from harness.graph.io.model_reader import read_model, refuse_damage
from harness.graph.model import Model, Node
from harness.graph.passes.dimension_sizes import axes_of, format_axes
from harness.graph.protos import find_captures, input_values, iter_graphs, iter_subgraphs
from harness.graph.qdq.qdq_graph import (
    CAST_OPS,
    DEQUANTIZE,
    QDQ_OPS,
    RESHAPING_OPS,
    PairForm,
    QDQGraph,
    node_name,
    read_qdq_graph,
)
from harness.graph.quantize.numeric_choices import channel_name, depthwise_inputs
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.rules.movement import VALUE_PRESERVING_OPS
from harness.graph.rules.operator_sets import LINEAR_OPS, PARAMETER_SLOTS, SHAPE_SLOTS
from search.space import Edge

logger = logging.getLogger(__name__)

_QOPERATOR_OPS = frozenset({
    "ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger",
    "MatMulIntegerToFloat", "QAttention", "QEmbedLayerNormalization", "QGemm", "QMoE",
})  # fmt: skip
_OTHER_QUANTIZERS = frozenset({"GatherBlockQuantized", "MatMulBnb4", "MatMulFpQ4", "MatMulNBits"})
# quantize_static removes a Relu or Clip in front of a pair with the same effect.
_IGNORED_OPS = QDQ_OPS | CAST_OPS | RESHAPING_OPS | {"BatchNormalization", "CastLike", "Clip", "Relu"}
_FOLDED_OPS = {
    "BatchNormalization": "it is folded into the operator in front of it",
    "Shape": "it reads a size, no values",
    "Size": "it reads a size, no values",
}
_COMMUTATIVE_OPS = frozenset({"Add", "Max", "Mean", "Min", "Mul", "Sum"})
# Suffixes of ONNX Runtime's quantization tools, which ModelOpt's `quantize` uses too.
_TENSOR_SUFFIXES = ("_QuantizeLinear_Output", "_QuantizeLinear_Input", "_DequantizeLinear_Output", "_quantized")
_INTEGER_TYPES = frozenset({TensorProto.INT64, TensorProto.BOOL})  # types of shapes and axes, ignored in comparisons


def import_placement(source: Path | onnx.ModelProto, model: Model) -> dict[Edge, str]:
    """Return the quantized edges of a Q/DQ model, as edges of `model` with their precision; see `read_placement`."""
    return dict(read_placement(source, model).edges)


@dataclass(frozen=True, slots=True)
class ImportDifference:
    """Difference between the Q/DQ file of another tool and its placement here.

    Attributes:
        kind: "not expressed": only the file quantizes the edge; "different": the placement quantizes it in another
            form; "added": only the placement quantizes it.
        edge: Edge of the float model, or of the file if the model has no counterpart.
        reason: Reason, without subject.
    """

    kind: Literal["not expressed", "different", "added"]
    edge: Edge
    precision: str
    reason: str

    def __str__(self) -> str:
        place = f"input {self.edge.slot} of {self.edge.consumer or 'the model'} ({self.edge.tensor})"
        return f"{self.kind}: {self.precision} at {place}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPlacement:
    """Placement of the Q/DQ file of another tool.

    Attributes:
        model: Float model.
        edges: Quantized edges of the float model with their precision.
        forms: Scales and zero points of these edges in the file.
        unmatched: Quantized edges of the file that the float model lacks, with the reasons.
    """

    model: Model
    edges: Mapping[Edge, str]
    forms: Mapping[Edge, PairForm]
    unmatched: tuple[ImportDifference, ...]

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value that the pairs of each activation represent, by tensor.

        Scales by channel give the range of all channels and, for the data of a depthwise convolution, that of each
        (`channel_name`). A scale that is computed, not positive or not finite gives none, and one of 16 bits only if
        the tensor has no other.
        """
        found: dict[str, tuple[float, float]] = {}
        depthwise = depthwise_inputs(self.model)
        narrow = {edge.tensor for edge, kind in self.edges.items() if kind != "int16"}
        for edge, form in sorted(self.forms.items(), key=itemgetter(0)):
            bounds = None if edge.tensor in self.model.constants or form.block else form.bounds
            if bounds is None or (self.edges[edge] == "int16" and edge.tensor in narrow):
                continue
            lows, highs = (np.ravel(each) for each in np.broadcast_arrays(*bounds))
            pairs = {edge.tensor: (float(lows.min()), float(highs.max()))}
            kind = self.model.types.get(edge.tensor)
            axis = form.axis % max(1, len(kind.shape) if kind else 1)
            if lows.size > 1 and axis == 1 and lows.size == depthwise.get(edge.tensor):
                names = (channel_name(edge.tensor, channel) for channel in range(lows.size))
                pairs |= zip(names, zip(lows.tolist(), highs.tolist(), strict=True), strict=True)
            for name, (low, high) in pairs.items():  # readers of one tensor may have several pairs
                known = found.get(name, (low, high))
                found[name] = min(low, known[0]), max(high, known[1])
        return found


def read_placement(source: Path | onnx.ModelProto, model: Model) -> ImportedPlacement:
    """Return the placement of a Q/DQ model in terms of its float model.

    An operator of the file is matched by the computation that leads to it and by its name, else by its name or by the
    tensor that it reads, because a tool may change names, and add or fuse operators.

    Args:
        source: File or model that another tool (ModelOpt, ONNX Runtime) made from `model`.
        model: Float model.

    Raises:
        UserError: The file cannot be read, is in QOperator format, or has no Q/DQ pair that fits the model.
    """
    name = "the Q/DQ model" if isinstance(source, onnx.ModelProto) else str(source)
    with refuse_damage(name):
        return _read_placement(source, model, name)


def _read_placement(source: Path | onnx.ModelProto, model: Model, name: str) -> ImportedPlacement:
    proto = source if isinstance(source, onnx.ModelProto) else read_model(source, name)[0]
    theirs = QDQGraph(proto)
    require_pairs(theirs, name)
    matcher = _NodeMatcher(theirs, model)
    edges, forms, unmatched = dict[Edge, str](), dict[Edge, PairForm](), list[ImportDifference]()
    for edge, precision in sorted(theirs.edges.items()):
        ours = matcher.match_edge(edge)
        if isinstance(ours, str):
            unmatched.append(ImportDifference("not expressed", edge, precision, ours))
        else:
            edges[ours], forms[ours] = precision, theirs.edge_form(edge)
    unmatched += _unread_pairs(theirs)
    if not any(NAME_PREFIX in node.output[0] for node in theirs.proto.graph.node if node.op_type in QDQ_OPS):
        _carry_to_products(model, edges, forms)
    if not edges:
        raise UserError(
            f"{name}: none of its {len(unmatched)} quantized edges belongs to {model.source}; "
            f"it must be made from this model ({unmatched[0]})"
        )
    logger.info("%s: %d of %d quantized edges found in %s", name, len(edges), len(theirs.edges), model.source)
    return ImportedPlacement(model=model, edges=edges, forms=forms, unmatched=tuple(unmatched))


def require_pairs(theirs: QDQGraph, name: str) -> None:
    """Raise `UserError` if a model has no Q/DQ pair, or operators in QOperator format; `name` is that of the model."""
    nodes = [node for body in iter_graphs(theirs.proto.graph) for node in body.node]
    for node in nodes:
        if _is_qoperator(node.op_type):
            raise UserError(
                f"{name}: {node.op_type} {node.name!r} is of the QOperator format, which has no Q/DQ pairs and "
                "which TensorRT and OpenVINO do not take; quantize again with quant_format=QuantFormat.QDQ"
            )
    if not any(node.op_type in QDQ_OPS for node in nodes):
        others = (f": {_other_format(node)}" for node in nodes if _quantizes_otherwise(node))
        raise UserError(f"{name}: holds no Q/DQ pair, so there is no placement to read from it{next(others, '')}")


def _quantizes_otherwise(node: onnx.NodeProto) -> bool:
    return node.op_type in _OTHER_QUANTIZERS or ("Quant" in node.op_type and node.op_type not in QDQ_OPS)


def _other_format(node: onnx.NodeProto) -> str:
    name = f"{node.domain or 'ai.onnx'}.{node.op_type}"
    return f"{name} is not read, only QuantizeLinear and DequantizeLinear are: quantize again in that form"


def _carry_to_products(model: Model, edges: dict[Edge, str], forms: dict[Edge, PairForm]) -> None:
    """Add the inputs of products that read quantized values behind operators which only move them, in place.

    NNCF writes a pair in front of the operators alone, and runtimes move the DequantizeLinear behind them. A pair on
    each of their outputs, with the same scale, changes no value.
    """
    for node in model.nodes if edges else ():
        paths = [_moved_path(model, edges, node, slot) for slot in (0, 1)] if node.op in LINEAR_OPS else []
        if all(paths) and len({edges[path[-1]] for path in paths}) == 1:
            for path in paths:
                for edge in path[:-1] if forms[path[-1]].scale is not None and forms[path[-1]].scale.size == 1 else ():
                    edges[edge], forms[edge] = edges[path[-1]], forms[path[-1]]


def _moved_path(model: Model, edges: Mapping[Edge, str], node: Node, slot: int) -> list[Edge]:
    """Return the edges from an operand backwards to the first quantized one; empty if other operators lie between."""
    path = []
    while True:
        path.append(Edge(node.inputs[slot], node.name, slot))
        maker = model.producer_node(node.inputs[slot])
        if path[-1] in edges:
            return path
        if maker is None or maker.op not in VALUE_PRESERVING_OPS:
            return []
        node, slot = maker, 0


def _unread_pairs(theirs: QDQGraph) -> Iterator[ImportDifference]:
    """Yield the DequantizeLinear nodes that no edge has, and other operators that quantize, with the reasons."""
    used = {id(node) for edge in theirs.edges for node in theirs.edge_pair(edge)}
    read_inside = {name: node for node in theirs.proto.graph.node for name in find_captures(node)}
    for node, label in zip(theirs.proto.graph.node, theirs.labels, strict=True):
        reason, inner = "", sum(each.op_type == DEQUANTIZE for each in _inner_nodes(node))
        if inner:
            reason = f"{inner} pairs are inside of its subgraphs, which stay float"
        elif _quantizes_otherwise(node):
            reason = _other_format(node)
        elif node.op_type == DEQUANTIZE and id(node) not in used and theirs.stored_type(node) != TensorProto.INT32:
            readers = theirs.readers.get(node.output[0], ())
            if node.output[0] in read_inside:
                reason = f"only the subgraphs of {node_name(read_inside[node.output[0]])!r} read it, which stay float"
            elif theirs.stored_type(node) == TensorProto.UNDEFINED:
                reason = "its type is unknown, or its zero point is computed when the model runs"
            elif not any(reader.op_type in QDQ_OPS | CAST_OPS for reader in readers):
                reason = "no operator reads it"
        if reason:
            edge = Edge(next(filter(None, node.input), ""), label, 0)
            yield ImportDifference("not expressed", edge, "unknown", reason)


def _inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    return (inner for body in iter_subgraphs(node) for graph in iter_graphs(body) for inner in graph.node)


def require_float_model(model: Model) -> None:
    """Raise `UserError` if a model is quantized; the message says how to use such a model."""
    for node in model.nodes:
        if node.op in QDQ_OPS or _is_qoperator(node.op):
            raise UserError(
                f"{model.source}: {node.op} {node.name!r} shows that this model is already quantized; give the float "
                "model that it was made from. A Q/DQ model can be where a search starts: --start FILE of 'qdq "
                "autotune', or 'initial: [{use: import, params: {path: FILE}, label: mine}]' in an experiment"
            )


def _is_qoperator(op: str) -> bool:
    return op in _QOPERATOR_OPS or op.startswith("QLinear")


def map_to_float_tensors(names: set[str], model: Model) -> set[str]:
    """Return the float model's tensors for names of a Q/DQ model, with or without a tool's suffix.

    Names without a counterpart are left out.
    """
    known = model.constants.keys() | model.producer.keys() | set(model.inputs)
    found: set[str] = set()
    for name in names:
        stem = name.rpartition(NAME_PREFIX)[0] or name
        found.update(known & ({stem} if stem in known else {stem.removesuffix(suffix) for suffix in _TENSOR_SUFFIXES}))
    return found


class _NodeMatcher:
    """Counterparts of the operators of a Q/DQ model in its float model.

    An operator gets a number for its type and the numbers of its inputs, so equal numbers mean equal computations from
    the inputs of the model on. Several operators with one number (the projections of query and key) are matched by
    name, or in order if both models have as many.
    """

    def __init__(self, theirs: QDQGraph, model: Model) -> None:
        self._theirs, self._model = theirs, model
        self._ours_by_name = {node.name: node for node in model.nodes}
        self._nodes = dict(zip(theirs.labels, theirs.proto.graph.node, strict=True))
        numbers: dict[Hashable, int] = {}
        self._numbers, self._our_numbers = (
            _number_computations(graph, numbers) for graph in (theirs, QDQGraph(model.proto))
        )
        self._groups, self._our_groups = (_group_labels(found) for found in (self._numbers, self._our_numbers))

    def match_edge(self, edge: Edge) -> Edge | str:
        """Return the edge of the float model for one of the file, or the reason why there is none."""
        if not edge.consumer:
            return self._match_output_edge(edge)
        node = self._nodes[edge.consumer]
        ours = self._match_node(edge.consumer, node.op_type) or self._match_reader(edge, node.op_type)
        if ours is None and node.op_type in _FOLDED_OPS:
            return _FOLDED_OPS[node.op_type]
        if ours is None:
            return (
                f"{self._model.source} has no such {node.op_type}: the tool added or fused operators, or it is folded"
            )
        slot = self._match_slot(edge, ours)
        if slot >= len(ours.inputs) or not ours.inputs[slot]:
            return f"{ours.op} {ours.name!r} has no input {slot} in {self._model.source}"
        return Edge(ours.inputs[slot], ours.name, slot)

    def _match_node(self, label: str, op: str) -> Node | None:
        named = self._ours_by_name.get(label)
        if named is not None and _operator_kind(named.op) != _operator_kind(op):
            named = None
        number = self._numbers[label][0]
        theirs, ours = self._groups[number], self._our_groups.get(number, [])
        if not ours:
            return named if named is not None and self._has_same_constants(label, named) else None
        if named is not None and named.name in ours:
            return named
        return self._ours_by_name[ours[theirs.index(label)]] if len(ours) == len(theirs) else None

    def _has_same_constants(self, label: str, ours: Node) -> bool:
        """Return whether the constants of an operator have as many elements as those of another of that name."""
        pairs = zip(self._numbers[label][1], self._our_numbers[ours.name][1], ours.inputs, strict=False)
        return all(found == wanted for found, wanted, name in pairs if name in self._model.constants)

    def _match_reader(self, edge: Edge, op: str) -> Node | None:
        """Return the only operator of a type that reads a tensor of the same name at the same input."""
        readers = [
            self._model.nodes[index]
            for index, slot in self._model.consumers.get(edge.tensor, ())
            if slot == edge.slot and self._model.nodes[index].op == op
        ]
        return readers[0] if len(readers) == 1 else None

    def _match_slot(self, edge: Edge, ours: Node) -> int:
        """Return the number of the input with the same computation if the operands are in another order."""
        read, reads = self._numbers[edge.consumer][1][edge.slot], self._our_numbers[ours.name][1]
        known = read >= 0 and read not in reads[edge.slot : edge.slot + 1] and reads.count(read) == 1
        return reads.index(read) if known else edge.slot

    def _match_output_edge(self, edge: Edge) -> Edge | str:
        if edge.tensor in self._model.output_names:
            return edge
        names, (name, _) = self._theirs.outputs, self._theirs.reads[edge]
        if name in self._model.output_names:
            return Edge(name, "", 0)
        if len(names) == len(self._model.outputs):
            return Edge(self._model.outputs[names.index(name)], "", 0)
        return f"{self._model.source} has no such output"


def _operator_kind(op: str) -> str:
    return "MatMul" if op == "Gemm" else op


_Computation = tuple[int, tuple[int, ...]]
"""Numbers of an operator and of its inputs."""


def _group_labels(numbers: Mapping[str, _Computation]) -> Mapping[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for label, (number, _) in numbers.items():
        found[number].append(label)
    return found


def _number_computations(graph: QDQGraph, numbers: dict[Hashable, int]) -> Mapping[str, _Computation]:
    """Return the numbers of the operators of a graph by label; `numbers`, which two graphs share, is extended.

    Left out is what tools and the preparation of a model change: Q/DQ pairs, operators that only reshape values, that a
    pair computes (Relu) or that are folded (BatchNormalization, the bias of a linear operator), parameters, shapes, and
    the values and shapes of constants, because a quantized weight has other values than the float one, and may be
    stored transposed.
    """

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    known = {value.name: number("input", place) for place, value in enumerate(input_values(graph.proto.graph))}
    linear: set[int] = set()
    found: dict[str, _Computation] = {}

    def read(name: str) -> int:
        if name not in known and (tensor := graph.constants.get(name)) is not None:
            integers = tensor.data_type in _INTEGER_TYPES
            known[name] = -1 if integers else number("constant", math.prod(tensor.dims))
        return known.get(name, -1)

    for label, node in graph.order:
        reads = tuple(read(name) if name else -1 for name in node.input)
        kind = _operator_kind(node.op_type)
        ignored = PARAMETER_SLOTS.get(kind, frozenset()) | SHAPE_SLOTS.get(kind, frozenset())
        kept = [each for slot, each in enumerate(reads) if each >= 0 and slot not in ignored]
        if kind in LINEAR_OPS:
            kept = kept[:2]
        own = number(node.domain, kind, *(sorted(kept) if kind in _COMMUTATIVE_OPS else kept))
        found[label] = own, reads
        if node.output[0] in graph.constants:
            continue
        biased = [each for each in reads if each in linear] if kind == "Add" and len(reads) == 2 else []
        if biased and any(name in graph.constants or name in graph.dequantized for name in node.input):
            known[node.output[0]] = biased[0]
        elif kind in _IGNORED_OPS and reads:
            known[node.output[0]] = reads[0]
        else:
            known.update((name, own if not place else number(own, place)) for place, name in enumerate(node.output))
        if kind in LINEAR_OPS:
            linear.add(own)
    return {label: found[label] for label in graph.labels}


def transfer_placement(source: Path, model: Model) -> dict[Edge, str]:
    """Return the quantized edges of an exported file, as edges of another float model with their precision.

    The models may differ only in names and values of weights, for instance after another training.

    Args:
        source: Q/DQ file that qdq-bench exported.
        model: Float model, prepared in the same way as the one of the file.

    Raises:
        UserError: The file cannot be read or has no Q/DQ pair, or the structures differ; the message has the first
            difference.
    """
    placed = read_qdq_graph(source)
    if not placed.edges:
        raise UserError(f"{source}: holds no Q/DQ pair, so there is no placement in it")
    graph = model.proto.graph
    difference = next(_differences(placed, graph, model), None)
    if difference is not None:
        raise UserError(
            f"{model.source}: has another structure than {source}, so its placement does not fit: {difference}"
        )
    kept = [index for index, node in enumerate(placed.proto.graph.node) if node.op_type not in QDQ_OPS]
    counterparts = {placed.labels[index]: node for index, node in zip(kept, model.nodes, strict=True)}
    found = {}
    for edge, precision in placed.edges.items():
        if edge.consumer:
            node = counterparts[edge.consumer]
            found[Edge(node.inputs[edge.slot], node.name, edge.slot)] = precision
        else:
            found[Edge(model.outputs[_output_index(placed, edge)], "", 0)] = precision
    return found


def _output_index(placed: QDQGraph, edge: Edge) -> int:
    names = [placed.before_pairs(name) for name in placed.outputs]
    return names.index(edge.tensor) if edge.tensor in names else placed.outputs.index(edge.tensor)


def _differences(placed: QDQGraph, graph: onnx.GraphProto, model: Model) -> Iterator[str]:
    """Yield descriptions of the differences in inputs, outputs, and nodes in the order of the file."""
    names: dict[str, str] = {}
    theirs, ours = input_values(placed.proto.graph), input_values(graph)
    if len(theirs) != len(ours) or len(placed.outputs) != len(graph.output):
        yield f"{len(ours)} inputs and {len(graph.output)} outputs, but {len(theirs)} and {len(placed.outputs)} there"
    for old, new in zip(theirs, ours, strict=False):
        names[old.name] = new.name
        if old.type != new.type:
            wanted, found = (format_axes(axes_of(value) or ()) for value in (new, old))
            yield f"input {new.name!r} has shape {wanted}, but {found} there"
    nodes = (node for node in placed.proto.graph.node if node.op_type not in QDQ_OPS)
    for before, after in zip_longest(nodes, graph.node):
        if before is None or after is None:
            there, here = ("nothing" if node is None else _describe(node) for node in (before, after))
            yield f"{here}, but {there} there"
            return
        yield from _node_differences(placed, before, after, names, model)
        names.update(zip(before.output, after.output, strict=False))


def _node_differences(
    placed: QDQGraph, before: onnx.NodeProto, after: onnx.NodeProto, names: Mapping[str, str], model: Model
) -> Iterator[str]:
    where = _describe(after)
    if (before.op_type, before.domain) != (after.op_type, after.domain):
        yield f"{where}, but {_describe(before)} there"
        return
    if _sorted_attributes(before) != _sorted_attributes(after):
        yield f"{where} has other attributes than {node_name(before)!r} there"
    if len(before.input) != len(after.input) or len(before.output) != len(after.output):
        yield f"{where} has {len(after.input)} inputs and {len(after.output)} outputs"
        return
    for slot, (old, new) in enumerate(zip(before.input, after.input, strict=True)):
        source = placed.before_pairs(old)
        stored, constant = placed.constants.get(source), model.constants.get(new)
        if (stored is None) != (constant is None) or (stored is None and names.get(source, source) != new):
            yield f"input {slot} of {where} is {new!r}, not the counterpart of {source!r}"
        elif stored is not None and constant is not None and list(stored.dims) != list(constant.dims):
            yield f"weight {new!r} of {where} has shape {list(constant.dims)}, but {list(stored.dims)} there"


def _sorted_attributes(node: onnx.NodeProto) -> Sequence[bytes]:
    return sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)


def _describe(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node_name(node)!r}"
