"""Reading of the placement of a Q/DQ file, as edges of its float model or of one with the same structure.

Where a space has no equal placement, the differences are listed with their reasons.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
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
from harness.graph.rules.agreements import jointly_quantized_inputs
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.movement import VALUE_PRESERVING_OPS
from harness.graph.rules.operator_sets import LINEAR_OPS, PARAMETER_SLOTS, SHAPE_SLOTS
from harness.graph.rules.placement_rules import first_violated_rule
from search.space import Edge, Resolved, Space

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
    """
    name = "the Q/DQ model" if isinstance(source, onnx.ModelProto) else str(source)
    with refuse_damage(name):
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
        if not any(NAME_PREFIX in node.output[0] for node in theirs.nodes.values() if node.op_type in QDQ_OPS):
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
        others = (f": {text}" for text in map(_other_format, nodes) if text)
        raise UserError(f"{name}: holds no Q/DQ pair, so there is no placement to read from it{next(others, '')}")


def _other_format(node: onnx.NodeProto) -> str:
    """Return what to do with an operator that quantizes in another form; "" for other operators."""
    name = f"{node.domain or 'ai.onnx'}.{node.op_type}"
    if node.op_type in QDQ_OPS or (node.op_type not in _OTHER_QUANTIZERS and "Quant" not in node.op_type):
        return ""
    return f"{name} is not read, only QuantizeLinear and DequantizeLinear are: quantize again in that form"


def _carry_to_products(model: Model, edges: dict[Edge, str], forms: dict[Edge, PairForm]) -> None:
    """Add the inputs of products that read quantized values behind operators which only move them, in place.

    NNCF writes a pair in front of the operators alone, and runtimes move the DequantizeLinear behind them. A pair on
    each of their outputs, with the same scale, changes no value.
    """
    for node in model.nodes if edges else ():
        paths = []  # from each operand backwards to the first quantized edge
        for slot in (0, 1) if node.op in LINEAR_OPS else ():
            path = [Edge(node.inputs[slot], node.name, slot)]
            while path[-1] not in edges:
                maker = model.producer_node(path[-1].tensor)
                if maker is None or maker.op not in VALUE_PRESERVING_OPS:
                    break
                path.append(Edge(maker.inputs[0], maker.name, 0))
            paths.append(path)
        if all(path[-1] in edges for path in paths) and len({edges[path[-1]] for path in paths}) == 1:
            for *moved, end in paths:
                for edge in moved if forms[end].scale is not None and forms[end].scale.size == 1 else ():
                    edges[edge], forms[edge] = edges[end], forms[end]


def _unread_pairs(theirs: QDQGraph) -> Iterator[ImportDifference]:
    """Yield the DequantizeLinear nodes that no edge has, and other operators that quantize, with the reasons."""
    used = {id(node) for edge in theirs.edges for node in theirs.edge_pair(edge)}
    read_inside = {name: node for node in theirs.nodes.values() for name in find_captures(node)}
    for label, node in theirs.nodes.items():
        bodies = (graph for body in iter_subgraphs(node) for graph in iter_graphs(body))
        reason, inner = _other_format(node), sum(each.op_type == DEQUANTIZE for graph in bodies for each in graph.node)
        if inner:
            reason = f"{inner} pairs are inside of its subgraphs, which stay float"
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
        numbers: dict[Hashable, int] = {}
        self._numbers = _number_computations(theirs, numbers)
        self._our_numbers = _number_computations(QDQGraph(model.proto), numbers)
        self._groups: dict[int, list[str]] = defaultdict(list)
        self._our_groups: dict[int, list[str]] = defaultdict(list)
        for groups, found in ((self._groups, self._numbers), (self._our_groups, self._our_numbers)):
            for label, (number, _) in found.items():
                groups[number].append(label)

    def match_edge(self, edge: Edge) -> Edge | str:
        """Return the edge of the float model for one of the file, or the reason why there is none."""
        model, theirs = self._model, self._theirs
        if not edge.consumer:
            name, _ = theirs.reads[edge]
            for tensor in (edge.tensor, name):
                if tensor in model.output_names:
                    return Edge(tensor, "", 0)
            if len(theirs.outputs) == len(model.outputs):
                return Edge(model.outputs[theirs.outputs.index(name)], "", 0)
            return f"{model.source} has no such output"
        op = theirs.nodes[edge.consumer].op_type
        ours = self._match_node(edge.consumer, op)
        if ours is None:  # the only operator of the type that reads a tensor of the same name at the same input
            readers = [model.nodes[index] for index, slot in model.consumers.get(edge.tensor, ()) if slot == edge.slot]
            readers = [node for node in readers if node.op == op]
            if len(readers) != 1:
                unknown = f"{model.source} has no such {op}: the tool added or fused operators, or it is folded"
                return _FOLDED_OPS.get(op, unknown)
            ours = readers[0]
        # The operands may be in another order: then the input with the same computation counts.
        read, reads, slot = self._numbers[edge.consumer][1][edge.slot], self._our_numbers[ours.name][1], edge.slot
        if read >= 0 and read not in reads[slot : slot + 1] and reads.count(read) == 1:
            slot = reads.index(read)
        if slot >= len(ours.inputs) or not ours.inputs[slot]:
            return f"{ours.op} {ours.name!r} has no input {slot} in {model.source}"
        return Edge(ours.inputs[slot], ours.name, slot)

    def _match_node(self, label: str, op: str) -> Node | None:
        named = self._model.nodes_by_name.get(label)
        if named is not None and _operator_kind(named.op) != _operator_kind(op):
            named = None
        number, read = self._numbers[label]
        theirs, ours = self._groups[number], self._our_groups.get(number, [])
        if named is not None and not ours:  # the same operator if its constants have as many elements
            pairs = zip(read, self._our_numbers[named.name][1], named.inputs, strict=False)
            same = all(found == wanted for found, wanted, name in pairs if name in self._model.constants)
            return named if same else None
        if named is not None and named.name in ours:
            return named
        return self._model.nodes_by_name[ours[theirs.index(label)]] if len(ours) == len(theirs) else None


def _operator_kind(op: str) -> str:
    return "MatMul" if op == "Gemm" else op


_Computation = tuple[int, tuple[int, ...]]
"""Numbers of an operator and of its inputs."""


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
    return {label: found[label] for label in graph.nodes}


def transfer_placement(source: Path, model: Model) -> dict[Edge, str]:
    """Return the quantized edges of an exported file, as edges of another float model with their precision.

    The models may differ only in names and values of weights, for instance after another training.

    Args:
        source: Q/DQ file that qdq-bench exported.
        model: Float model, prepared in the same way as the one of the file.
    """
    placed = read_qdq_graph(source)
    if not placed.edges:
        raise UserError(f"{source}: holds no Q/DQ pair, so there is no placement in it")
    difference = next(_structure_differences(placed, model), None)
    if difference is not None:
        raise UserError(
            f"{model.source}: has another structure than {source}, so its placement does not fit: {difference}"
        )
    kept = [label for label, node in placed.nodes.items() if node.op_type not in QDQ_OPS]
    counterparts = dict(zip(kept, model.nodes, strict=True))
    outputs = [placed.before_pairs(name) for name in placed.outputs]
    found = {}
    for edge, precision in placed.edges.items():
        if edge.consumer:
            node = counterparts[edge.consumer]
            found[Edge(node.inputs[edge.slot], node.name, edge.slot)] = precision
        else:
            names = outputs if edge.tensor in outputs else list(placed.outputs)
            found[Edge(model.outputs[names.index(edge.tensor)], "", 0)] = precision
    return found


def _structure_differences(placed: QDQGraph, model: Model) -> Iterator[str]:
    """Yield descriptions of the differences in inputs, outputs, and nodes in the order of the file."""
    graph, names = model.proto.graph, dict[str, str]()
    theirs, ours = input_values(placed.proto.graph), input_values(graph)
    if len(theirs) != len(ours) or len(placed.outputs) != len(graph.output):
        yield f"{len(ours)} inputs and {len(graph.output)} outputs, but {len(theirs)} and {len(placed.outputs)} there"
    for old, new in zip(theirs, ours, strict=False):
        names[old.name] = new.name
        if old.type != new.type:
            wanted, found = (format_axes(axes_of(value) or ()) for value in (new, old))
            yield f"input {new.name!r} has shape {wanted}, but {found} there"
    nodes = (node for node in placed.nodes.values() if node.op_type not in QDQ_OPS)
    for pair in zip_longest(nodes, graph.node):
        there, here = ("nothing" if node is None else f"{node.op_type} {node_name(node)!r}" for node in pair)
        before, after = pair
        if before is None or after is None:
            yield f"{here}, but {there} there"
            return
        attributes = [sorted(each.SerializeToString(deterministic=True) for each in node.attribute) for node in pair]
        if (before.op_type, before.domain) != (after.op_type, after.domain):
            yield f"{here}, but {there} there"
        elif attributes[0] != attributes[1]:
            yield f"{here} has other attributes than {node_name(before)!r} there"
        elif len(before.input) != len(after.input) or len(before.output) != len(after.output):
            yield f"{here} has {len(after.input)} inputs and {len(after.output)} outputs"
        for slot, (old, new) in enumerate(zip(before.input, after.input, strict=False)):
            origin = placed.before_pairs(old)
            stored, constant = placed.constants.get(origin), model.constants.get(new)
            if (stored is None) != (constant is None) or (stored is None and names.get(origin, origin) != new):
                yield f"input {slot} of {here} is {new!r}, not the counterpart of {origin!r}"
            elif stored is not None and constant is not None and list(stored.dims) != list(constant.dims):
                yield f"weight {new!r} of {here} has shape {list(constant.dims)}, but {list(stored.dims)} there"
        names.update(zip(before.output, after.output, strict=False))


def find_differences(
    theirs: ImportedPlacement, space: Space, dialect: Dialect, resolved: Resolved, written: QDQGraph, *, ranges: bool
) -> tuple[ImportDifference, ...]:
    """Return the differences between the placement of a file and the nearest one of a space.

    Args:
        theirs: Placement of the file.
        space: Space with the points that have a range.
        dialect: Dialect of the space.
        resolved: Quantized edges of the nearest placement.
        written: Model with these edges.
        ranges: Whether the pairs were written with the ranges of the file.
    """
    ours, found = dict(resolved), list(theirs.unmatched)
    offered = {edge for dimension in space.dimensions for edge in dimension.edges}
    searched = {choice for dimension in space.dimensions for choice in dimension.choices[1:]}
    for edge, precision in sorted(theirs.edges.items()):
        if ours.get(edge) == precision:
            forms = theirs.forms[edge], written.edge_form(edge)
            reasons = _compare_forms(*forms, is_weight=edge.tensor in theirs.model.constants, ranges=ranges)
            found += (ImportDifference("different", edge, precision, reason) for reason in reasons)
            continue
        if precision not in dialect.precisions:
            reason = f"dialect {dialect.name} has {', '.join(sorted(dialect.precisions))}"
        elif precision not in searched:
            reason = f"{', '.join(sorted(searched))} is asked for"
        else:
            reason = _float_reason(theirs, dialect, edge, precision, offered=edge in offered)
        found.append(ImportDifference("not expressed", edge, precision, reason))
    for edge, precision in resolved:
        if theirs.edges.get(edge) != precision:
            joint = [other for other in _joint_edges(theirs, dialect, edge) if other in theirs.edges]
            reason = f"it goes with input {joint[0].slot}" if joint else "most inputs of its pattern are quantized"
            found.append(ImportDifference("added", edge, precision, reason))
    return tuple(found)


def summarize_differences(theirs: ImportedPlacement, found: Sequence[ImportDifference], file: object) -> str:
    """Return the number of differences by kind as a sentence without a full stop; "" without any.

    Args:
        theirs: Placement of the file.
        found: Result of `find_differences`.
        file: Name of the file.
    """
    counts = Counter(each.kind for each in found)
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    total = len(theirs.edges) + len(theirs.unmatched)
    advice = f"'qdq import {file} {theirs.model.source} -o start.onnx' lists each with its reason"
    return f"differences from the {total} quantized inputs of {file}: {text}; {advice}" if counts else ""


def summarize_reasons(theirs: ImportedPlacement, space: Space, dialect: Dialect) -> str:
    """Return the first difference, and the number of the others, of a file of which nothing is expressed."""
    first, *others = find_differences(theirs, space, dialect, (), QDQGraph(theirs.model.proto), ranges=False)
    return f" ({first}; and {len(others)} others)"


def _float_reason(theirs: ImportedPlacement, dialect: Dialect, edge: Edge, precision: str, *, offered: bool) -> str:
    """Return the reason why an edge of a file has another precision here; `offered`: whether the space has the edge."""
    if not edge.consumer:
        return "most outputs of its pattern differ" if offered else f"dialect {dialect.name} has no point there"
    node, joint = theirs.model.nodes_by_name[edge.consumer], _joint_edges(theirs, dialect, edge)
    for each in (edge, *joint):
        rule = first_violated_rule(theirs.model, dialect, node, each.slot, precision)
        if rule is not None and rule.name not in ("one scale", "together"):
            return f"rule {rule.name!r}: {rule.text.removesuffix('.')}"
    alone = [each for each in joint if theirs.edges.get(each) != precision]
    if alone:
        return f"it goes with input {alone[0].slot} ({alone[0].tensor}), which is not {precision} in the file"
    return "most inputs of its pattern differ" if offered else "the tensor has no range that gives a scale"


def _joint_edges(theirs: ImportedPlacement, dialect: Dialect, edge: Edge) -> list[Edge]:
    """Return the other edges of the same operator that are quantized together with an edge."""
    if not edge.consumer:
        return []
    node = theirs.model.nodes_by_name[edge.consumer]
    slots = jointly_quantized_inputs(theirs.model, dialect, node, edge.slot)
    return [Edge(node.inputs[slot], node.name, slot) for slot in slots if slot != edge.slot]


def _compare_forms(theirs: PairForm, ours: PairForm, *, is_weight: bool, ranges: bool) -> Iterator[str]:
    """Yield the differences between the pairs of a file and ours."""
    if is_weight:  # several scales in place of one are no difference, because they are finer
        if theirs.block:
            yield f"one scale for each block of {theirs.block} becomes {_granularity(ours)}"
        elif np.size(theirs.scale) > 1 and ours.scale.size == 1:
            yield "one scale for each channel becomes one scale"
        if np.any(theirs.zero_point) and not ours.zero_point.any():
            yield "its zero point becomes 0"
    elif theirs.scale is None or theirs.zero_point is None:
        yield "its scale is computed when the model runs; here it is constant"
    elif theirs.bounds is None:
        yield "its scale is not positive and finite, so its range is calibrated"
    else:
        if theirs.scale.size != ours.scale.size:
            yield f"{_granularity(theirs)} becomes {_granularity(ours)}"
        (low, high), (our_low, our_high) = (
            (float(lows.min()), float(highs.max())) for lows, highs in filter(None, (theirs.bounds, ours.bounds))
        )
        step, our_step = float(theirs.scale.max()), float(ours.scale.max())
        if abs(low + high) > 1.5 * step and abs(our_low + our_high) <= 1.5 * our_step:
            yield "its asymmetric range becomes a symmetric one, with zero point 0"
        elif ranges and max(abs(low - our_low), abs(high - our_high)) > 1.5 * step:
            yield f"its range {low:.4g} to {high:.4g} becomes {our_low:.4g} to {our_high:.4g}"


def _granularity(form: PairForm) -> str:
    return "one scale" if form.scale.size == 1 else "one scale for each channel"
