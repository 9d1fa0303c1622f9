"""Reading of the placement of a Q/DQ file, as edges of its float model or of one with the same structure."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import onnx
from onnx import TensorProto

from harness.errors import UserError
from harness.graph.io.model_reader import read_model, refuse_damage
from harness.graph.model import Model, Node
from harness.graph.protos import input_values
from harness.graph.qdq.qdq_graph import QDQ_OPS, QDQGraph, node_name, read_qdq_graph
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from search.space import Edge, Resolved

logger = logging.getLogger(__name__)

_QOPERATOR_OPS = frozenset({"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm", "QAttention"})
_IGNORED_OPS = QDQ_OPS | {"Cast", "Identity"}
# Suffixes of ONNX Runtime's quantization tools, which ModelOpt's `quantize` uses too.
_TENSOR_SUFFIXES = ("_QuantizeLinear_Output", "_QuantizeLinear_Input", "_DequantizeLinear_Output", "_quantized")
_INTEGER_TYPES = frozenset({TensorProto.INT64, TensorProto.BOOL})  # types of shapes and axes, ignored in comparisons


def import_placement(source: Path | onnx.ModelProto, model: Model) -> dict[Edge, str]:
    """Return the quantized edges of a Q/DQ model, as edges of `model` with their precision.

    A quantized input is matched by the name of its node, else by its tensor and operator, else by the computation that
    leads to it, because a tool may change all names. Nodes that the tool fused or added have no match and are left out.
    Scales are not imported, see `import_ranges`.

    Args:
        source: File or model that another tool (ModelOpt, ONNX Runtime) made from `model`.
        model: Float model.

    Raises:
        UserError: The file cannot be read, is in QOperator format, or has no Q/DQ pair that fits the model.
    """
    name = "the Q/DQ model" if isinstance(source, onnx.ModelProto) else str(source)
    with refuse_damage(name):
        return _import_placement(source, model, name)


def _import_placement(source: Path | onnx.ModelProto, model: Model, name: str) -> dict[Edge, str]:
    proto = source if isinstance(source, onnx.ModelProto) else read_model(source, name)[0]
    for node in proto.graph.node:
        if _is_qoperator(node.op_type):
            raise UserError(
                f"{name}: {node.op_type} {node.name!r} is of the QOperator format, which has no Q/DQ pairs and "
                "which TensorRT and OpenVINO do not take; quantize again with quant_format=QuantFormat.QDQ"
            )
    theirs = QDQGraph(proto)
    matcher = _EdgeMatcher(theirs, model)
    found, edges = theirs.edges, {}
    for edge, precision in sorted(found.items()):
        ours = matcher.match_edge(edge)
        if ours is None:
            logger.debug("%s: %s has no counterpart in %s", name, edge, model.source)
        else:
            edges[ours] = precision
    if not found:
        raise UserError(f"{name}: holds no Q/DQ pair, so there is no placement to read from it")
    if not edges:
        raise UserError(
            f"{name}: none of its {len(found)} quantized edges belongs to {model.source}; "
            "it must be made from this model"
        )
    logger.info("%s: %d of %d quantized edges found in %s", name, len(edges), len(found), model.source)
    return edges


def compare_import(source: Path, model: Model, placed: Resolved) -> tuple[Resolved, Resolved]:
    """Return the quantized edges, with precision, of a Q/DQ model alone and of a placement alone, both sorted.

    An edge without a counterpart in `model` has the names of the file.

    Args:
        source: File that another tool made from `model`.
        model: Float model.
        placed: Quantized edges of the placement.

    Raises:
        UserError: The file cannot be read.
    """
    with refuse_damage(source):
        theirs = QDQGraph(read_model(source, str(source))[0])
        matcher = _EdgeMatcher(theirs, model)
        wanted = {(matcher.match_edge(edge) or edge, precision) for edge, precision in theirs.edges.items()}
    return tuple(sorted(wanted.difference(placed))), tuple(sorted(set(placed) - wanted))


def import_ranges(source: Path, model: Model) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value that the Q/DQ pair of each activation represents, by tensor.

    Pairs with scales by channel, and tensors without a counterpart in `model`, are left out.

    Args:
        source: File that another tool made from `model`.
        model: Float model.

    Raises:
        UserError: The file cannot be read.
    """
    with refuse_damage(source):
        theirs = QDQGraph(read_model(source, str(source))[0])
        matcher, found = _EdgeMatcher(theirs, model), {}
        for edge in sorted(theirs.edges):
            ours, pair = matcher.match_edge(edge), theirs.edge_range(edge)
            if ours is not None and pair is not None and ours.tensor not in model.constants:
                found[ours.tensor] = pair
        return found


def require_float_model(model: Model) -> None:
    """Raise `UserError` if a model is quantized; the message says how to use such a model."""
    for node in model.nodes:
        if node.op in QDQ_OPS or _is_qoperator(node.op):
            raise UserError(
                f"{model.source}: {node.op} {node.name!r} shows that this model is already quantized; give the float "
                "model that it was made from. A Q/DQ model can be where a search starts: --qdq_baseline FILE of 'qdq "
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


class _EdgeMatcher:
    def __init__(self, theirs: QDQGraph, model: Model) -> None:
        self._theirs = theirs
        self._model = model
        self._by_name = {node.name: node for node in model.nodes}
        self._nodes = dict(zip(theirs.labels, theirs.proto.graph.node, strict=True))

    def match_edge(self, edge: Edge) -> Edge | None:
        if not edge.consumer:
            return self._match_output_edge(edge)
        op = self._nodes[edge.consumer].op_type
        node = self._by_name.get(edge.consumer)
        if node is not None and node.op == op:
            return self._edge_at_input(node, edge.slot)
        readers = [
            self._model.nodes[index]
            for index, slot in self._model.consumers.get(edge.tensor, ())
            if slot == edge.slot and self._model.nodes[index].op == op
        ]
        if len(readers) == 1:
            return self._edge_at_input(readers[0], edge.slot)
        twin = self._equivalent_tensors.get(next(name for name in self._nodes[edge.consumer].output if name), "")
        match = self._model.producer_node(twin)
        return None if match is None else self._edge_at_input(match, edge.slot)

    @cached_property
    def _equivalent_tensors(self) -> Mapping[str, str]:
        return _match_equivalent_nodes(self._theirs.proto.graph, self._model.proto.graph)

    def _match_output_edge(self, edge: Edge) -> Edge | None:
        if edge.tensor in self._model.output_names:
            return edge
        names = self._theirs.outputs
        same = edge.tensor in names and len(names) == len(self._model.outputs)
        return Edge(self._model.outputs[names.index(edge.tensor)], "", 0) if same else None

    def _edge_at_input(self, node: Node, slot: int) -> Edge | None:
        if slot >= len(node.inputs) or not node.inputs[slot]:
            return None
        return Edge(node.inputs[slot], node.name, slot)


def _match_equivalent_nodes(theirs: onnx.GraphProto, ours: onnx.GraphProto) -> dict[str, str]:
    """Match nodes of two graphs by their computations, and return our first outputs by their first outputs.

    A node gets a number for its operator and the numbers of its inputs, so equal numbers mean equal computations from
    the inputs of the model on. Q/DQ pairs and Casts are ignored; constants are compared by shape, because a quantized
    weight has other values than the float one. Nodes with the same number (for instance the projections of query and
    key) are matched in the order of the file if both graphs have the same number of them.
    """
    numbers: dict[Hashable, int] = {}
    found, wanted = (_number_computations(graph, numbers) for graph in (theirs, ours))
    twins: dict[str, str] = {}
    for number, names in found.items():
        counterparts = wanted.get(number, [])
        if len(counterparts) == len(names):
            twins.update(zip(names, counterparts, strict=True))
    return twins


def _number_computations(graph: onnx.GraphProto, numbers: dict[Hashable, int]) -> Mapping[int, list[str]]:
    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    known = {tensor.name: number(("constant", *tensor.dims)) for tensor in graph.initializer}
    known.update((value.name, number(("input", place))) for place, value in enumerate(input_values(graph)))
    skipped = {tensor.name for tensor in graph.initializer if tensor.data_type in _INTEGER_TYPES}
    found: dict[int, list[str]] = defaultdict(list)
    for node in graph.node:
        if node.op_type == "Constant":
            skipped.update(node.output)
        elif node.op_type in _IGNORED_OPS and node.input[0] in known:
            known[node.output[0]] = known[node.input[0]]
        else:
            reads = tuple(known.get(name, -1) for name in node.input if name and name not in skipped)
            own = number((node.domain, node.op_type, reads))
            found[own].append(next(name for name in node.output if name))
            known.update((name, number((own, place))) for place, name in enumerate(node.output))
    return found


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
            yield f"input {new.name!r} has shape {_shape_text(new)}, but {_shape_text(old)} there"
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


def _shape_text(value: onnx.ValueInfoProto) -> str:
    return "x".join(str(size.dim_value or size.dim_param or "?") for size in value.type.tensor_type.shape.dim)
