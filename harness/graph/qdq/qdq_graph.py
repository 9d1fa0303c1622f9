"""Structure of Q/DQ models from any tool: edges with a pair, their precisions, and the operators around each pair."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from harness.base.errors import UserError
from harness.base.files import open_regular
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.io.model_reader import check_functions, refuse_damage
from harness.graph.passes.normalize import inline_functions
from harness.graph.protos import attribute_value, constants_by_name, dtype_name, iter_subgraphs, opset_versions
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.rules.operator_sets import LINEAR_OPS
from search.space import Edge, Resolved

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
QDQ_OPS = frozenset({QUANTIZE, DEQUANTIZE})
CAST_OPS = frozenset({"Cast", "Dropout", "Identity"})
RESHAPING_OPS = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_TRANSPARENT_OPS = CAST_OPS | RESHAPING_OPS
_BROADCASTING_OPS = frozenset({"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub", "Where"})
_COMPUTED_OPS = _TRANSPARENT_OPS | _BROADCASTING_OPS | {
    "Abs", "Concat", "ConstantOfShape", "Exp", "Expand", "Log", "Neg", "Reciprocal", "Slice", "Split", "Sqrt",
}  # fmt: skip
_MAX_COMPUTED_ELEMENTS = 1 << 26
# Runtimes fold these into the linear operator before them, and some name the result after the folded operator.
_FOLDABLE_OPS = frozenset({"Add", "BatchNormalization", "Div", "Identity", "Mul", "Sub"})
_PRECISIONS = {
    "uint8": "int8", "uint16": "int16", "uint4": "int4", "float8e4m3fn": "fp8", "float8e5m2": "fp8e5m2",
    "float4e2m1": "fp4",
}  # fmt: skip
"""Precision by the name of the stored type, where these differ."""
_LIMITS_BY_STORAGE = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.FLOAT8E4M3FN: (-448, 448),
    TensorProto.FLOAT8E5M2: (-57344, 57344), TensorProto.INT16: (-32768, 32767), TensorProto.UINT16: (0, 65535),
}  # fmt: skip
_EXTERNAL_TOOL_SUFFIXES = ("_quantized", "_QuantizeLinear_Input")  # of ONNX Runtime's quantization tools


def read_qdq_graph(path: Path) -> QDQGraph:
    """Read the structure of a model file; raise `UserError` if it cannot be read or is no ONNX file."""
    try:
        with open_regular(path, "an ONNX model") as file:
            proto = onnx.load_from_string(file.read())
    except (OSError, DecodeError) as error:
        raise UserError(f"{path}: no ONNX model ({error})") from error
    with refuse_damage(path):
        return QDQGraph(proto, path.parent)


def diff_edges(expected: Resolved, source: Path | onnx.ModelProto) -> tuple[Resolved, Resolved]:
    """Return the expected edges that a model or file lacks, and its edges that are not expected; both sorted."""
    graph = read_qdq_graph(source) if isinstance(source, Path) else QDQGraph(source)
    wanted, found = set(expected), set(graph.edges.items())
    return tuple(sorted(wanted - found)), tuple(sorted(found - wanted))


def count_pairs(path: Path) -> int:
    """Return the number of Q/DQ pairs of a model, which is the number of quantized tensors.

    For an OpenVINO IR it is the number of FakeQuantize operators, for an ONNX file without pairs that of its integer
    operators.
    """
    if path.suffix == IR_SUFFIX:
        return path.read_bytes().count(b'type="FakeQuantize"')
    graph = read_qdq_graph(path)
    pairs = len({(edge.tensor, precision) for edge, precision in graph.edges.items()})
    return pairs or sum(node.op_type.endswith("Integer") for node in graph.proto.graph.node)


def read_precisions(path: Path) -> frozenset[str]:
    """Return the precisions of a model file's quantized edges; none for a float model, "int8" for an OpenVINO IR."""
    if path.suffix == IR_SUFFIX:
        return frozenset({"int8"})
    return frozenset(read_qdq_graph(path).edges.values())


def node_name(node: onnx.NodeProto) -> str:
    """Return the name of a node, or its first output if it has none; "" if it has neither."""
    return node.name or next(filter(None, node.output), "")


def unique_node_names(graph: onnx.GraphProto) -> list[str]:
    """Return a unique name for each node in order: duplicates get a number, as in `harness.graph.load.load`."""
    taken = {node.name for node in graph.node}
    found: dict[str, None] = {}
    for node in graph.node:
        name, number = node_name(node), 0
        while name in found or (name in taken and name != node.name):
            number += 1
            name = f"{node_name(node)}_{number}"
        found[name] = None
    return list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairForm:
    """Form of the Q/DQ pair of an edge.

    Attributes:
        storage: Stored element type, as in `onnx.TensorProto`.
        scale: Scales; None if they are computed when the model runs.
        zero_point: Zero points; None if they are computed when the model runs.
        axis: Axis of the scales if there are several.
        block: Number of elements along the axis that share a scale; 0 without blocks.
    """

    storage: int
    scale: Any
    zero_point: Any
    axis: int
    block: int

    @property
    def bounds(self) -> tuple[Any, Any] | None:
        """Smallest and largest real values that the pair represents, one for each scale.

        None if a scale is computed or not positive and finite, and for other types than FP8 and those of 8 and 16 bits.
        """
        limits = _LIMITS_BY_STORAGE.get(self.storage)
        if limits is None or self.scale is None or self.zero_point is None:
            return None
        if not (np.isfinite(self.scale) & (self.scale > 0)).all():
            return None
        low, high = limits
        # Symmetric without a zero point, as in the ranges of a calibration.
        lows = np.where(self.zero_point == 0, -high if low < 0 else low, low)
        return (lows - self.zero_point) * self.scale, (high - self.zero_point) * self.scale


class _ConstantTable(dict[str, Any]):
    """Constants of a graph by name; those that nodes compute from others are computed when they are asked for.

    Args:
        stored: Initializers and values of Constant nodes.
        makers: Node that computes each of the others.
        opsets: Version of each domain.
        folder: Folder of the external data.
    """

    def __init__(
        self,
        stored: Mapping[str, TensorProto],
        makers: Mapping[str, onnx.NodeProto],
        opsets: dict[str, int],
        folder: str,
    ) -> None:
        super().__init__({**makers, **stored})
        self._opsets, self._folder = opsets, folder

    def __getitem__(self, name: str) -> Any:
        node = super().__getitem__(name)
        if not isinstance(node, onnx.NodeProto):
            return node
        feeds = {each: numpy_helper.to_array(self[each], self._folder) for each in node.input if each}
        arrays = [feeds[each] for each in node.input if each]
        if node.op_type == "ConstantOfShape":
            elements = math.prod(arrays[0].ravel().tolist())
        elif node.op_type == "Expand":
            elements = math.prod(np.broadcast_shapes(arrays[0].shape, tuple(arrays[1].ravel().tolist())))
        elif node.op_type in _BROADCASTING_OPS:
            elements = math.prod(np.broadcast_shapes(*(array.shape for array in arrays)))
        else:
            elements = sum(array.size for array in arrays)
        if elements > max(_MAX_COMPUTED_ELEMENTS, *(array.size for array in arrays)):
            raise ValueError(f"constant {node.output[0]!r} has {elements} elements")
        results = ReferenceEvaluator(node, opsets=self._opsets).run(None, feeds)
        for each, value in zip(node.output, results, strict=False):
            self[each] = numpy_helper.from_array(np.asarray(value), each)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default


class QDQGraph:
    """Index of a model with or without Q/DQ pairs.

    Local functions are inlined. What nodes compute from constants alone, such as a scale behind a Cast, is a constant,
    and a stored weight stays one behind operators that only reshape it.

    Args:
        proto: Model, whose external data need not be loaded.
        folder: Folder of the external data; None: the working folder.

    Attributes:
        nodes: Nodes in the order of the graph, by the unique names with which edges refer to them
            (`unique_node_names`).
        producer: Node that computes each tensor, by tensor name.
        readers: Nodes that read each tensor, in order, by tensor name.
        constants: Initializers, values of Constant nodes and what nodes compute from these, by name.
        dequantized: Constants, by name, behind a Q or DQ node.
        outputs: Names of the outputs.
        order: Nodes with their labels in topological order, which tools do not always write.
    """

    def __init__(self, proto: onnx.ModelProto, folder: Path | None = None) -> None:
        check_functions(proto, "the Q/DQ model")
        self.proto, self._folder = inline_functions(proto), str(folder or "")
        graph = self.proto.graph
        self.nodes: dict[str, Any] = dict(zip(unique_node_names(graph), graph.node, strict=True))
        self.order = _sort_nodes(list(self.nodes.items()))
        self.outputs = tuple(value.name for value in graph.output)
        self.producer = {name: node for node in graph.node for name in node.output if name}
        self.readers: Mapping[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self.readers[name].append(node)
        stored, makers, dequantized = constants_by_name(graph), dict[str, onnx.NodeProto](), set[str]()
        for _, node in self.order:
            read = [name for name in node.input if name]
            if not read or any(iter_subgraphs(node)):
                continue
            if all(name in stored or name in makers for name in read):
                if node.op_type in _COMPUTED_OPS and node.domain in ("", "ai.onnx"):
                    makers.update((name, node) for name in node.output if name)
                elif node.op_type in QDQ_OPS:
                    dequantized.update(node.output)
            elif node.op_type in QDQ_OPS | _TRANSPARENT_OPS and all(
                name in stored or name in makers or name in dequantized for name in read
            ):
                dequantized.update(node.output)
        opsets = {"": 1, **opset_versions(self.proto)}
        self.constants, self.dequantized = _ConstantTable(stored, makers, opsets, self._folder), frozenset(dequantized)

    def _walk_back(self, tensor: str, passed: frozenset[str]) -> tuple[str, Any]:
        """Return the tensor in front of operators of some types, and the node that computes it or None."""
        node = self.producer.get(tensor)
        for _ in self.nodes:  # limited, because a damaged file may have a cycle
            if node is None or node.op_type not in passed:
                break
            tensor = node.input[0]
            node = self.producer.get(tensor)
        return tensor, node

    def before_pairs(self, tensor: str) -> str:
        """Return the input of the Q/DQ pairs that compute a tensor, or the tensor itself without pairs."""
        return self._walk_back(tensor, QDQ_OPS)[0]

    def producer_through(self, tensor: str, transparent: frozenset[str]) -> Any:
        """Return the node that computes a tensor, skipping transparent operators; None for an input or constant."""
        return self._walk_back(tensor, transparent)[1]

    def values(self, name: str) -> Any:
        """Return the values of a constant as float64, or None if the name is no constant."""
        tensor = self.constants.get(name)
        if tensor is None:
            return None
        return numpy_helper.to_array(tensor, self._folder).astype(np.float64)

    @property
    def has_quantized_biases(self) -> bool:
        """Return whether any constant is stored as INT32, as biases are, and dequantized."""
        sources = (node.input[0] for node in self._nodes_of(frozenset({DEQUANTIZE})))
        return any(name in self.constants and self.constants[name].data_type == TensorProto.INT32 for name in sources)

    @property
    def _quantized_activations(self) -> list[Any]:
        return [node for node in self._nodes_of(frozenset({QUANTIZE})) if node.input[0] not in self.constants]

    @property
    def has_channel_activations(self) -> bool:
        """Return whether an activation is quantized with one scale for each channel."""
        scales = (self.values(node.input[1]) for node in self._quantized_activations)
        return any(scale is not None and scale.size > 1 for scale in scales)

    @property
    def unsigned_tensors(self) -> frozenset[str]:
        """Return the tensors with a pair of UINT8 and zero point 0, which clips negative values."""
        unsigned = [node for node in self._quantized_activations if self.stored_type(node) == TensorProto.UINT8]
        zeros = {node.input[0]: self.values(node.input[2]) if len(node.input) > 2 else np.zeros(1) for node in unsigned}
        return frozenset(name for name, zero in zeros.items() if zero is not None and not zero.any())

    @cached_property
    def edges(self) -> dict[Edge, str]:
        """Quantized edges with their precision.

        An edge is quantized if its tensor comes from a DequantizeLinear after a QuantizeLinear or a constant, with or
        without Casts; between them, and behind a constant, operators may reshape the values. Its tensor is the one
        before the first QuantizeLinear; for a constant that is stored quantized it is the float constant, whose name is
        derived from that of the stored one. INT32, the type of biases, is no precision of an edge, nor is an
        unknown type. UINT8 counts as "int8".
        """
        return {edge: precision for edge, (_, precision) in self.reads.items()}

    @cached_property
    def reads(self) -> Mapping[Edge, tuple[str, str]]:
        """Dequantized tensor, or output, and precision of each quantized edge."""
        uses = [
            (label, slot, name)
            for label, node in self.nodes.items()
            if node.op_type not in CAST_OPS | QDQ_OPS and self.dequantized.isdisjoint(node.output)
            for slot, name in enumerate(node.input)
        ]
        found = {}
        for consumer, slot, name in (*uses, *(("", 0, name) for name in self.outputs)):
            if (source := self._resolve_dequantized(name)) is not None:
                found[Edge(source[0], consumer, slot)] = name, source[1]
        return found

    def edge_pair(self, edge: Edge) -> tuple[Any, Any]:
        """Return the QuantizeLinear (None for a constant that is stored quantized) and DequantizeLinear of an edge.

        If the operator reads stored integers and only reshapes them, both are the QuantizeLinear.
        """
        return self._pair_before(self.nodes[edge.consumer].input[edge.slot] if edge.consumer else self.reads[edge][0])

    def _pair_before(self, name: str) -> tuple[Any, Any]:
        """Return QuantizeLinear and DequantizeLinear before a tensor as in `edge_pair`; (None, None) without them."""
        passed = _TRANSPARENT_OPS if name in self.dequantized else CAST_OPS
        dequantize = self.producer_through(name, passed)
        if dequantize is None or dequantize.op_type != DEQUANTIZE:
            quantize = self.producer_through(name, RESHAPING_OPS)
            return (quantize, quantize) if quantize is not None and quantize.op_type == QUANTIZE else (None, None)
        quantize = self.producer_through(dequantize.input[0], _TRANSPARENT_OPS)
        return (quantize if quantize is not None and quantize.op_type == QUANTIZE else None), dequantize

    def edge_form(self, edge: Edge) -> PairForm:
        """Return the scales and zero points of an edge's pair."""
        _, node = self.edge_pair(edge)
        zero = self.values(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
        return PairForm(
            storage=self.stored_type(node),
            scale=self.values(node.input[1]),
            zero_point=zero,
            axis=int(attribute_value(node, "axis", 1)),
            block=int(attribute_value(node, "block_size", 0)),
        )

    def _resolve_dequantized(self, name: str) -> tuple[str, str] | None:
        """Return the original name and the precision of a dequantized tensor; None for any other tensor."""
        quantize, dequantize = self._pair_before(name)
        if dequantize is None:
            return None
        kind = self.stored_type(dequantize)
        if kind in (TensorProto.INT32, TensorProto.UNDEFINED):
            return None
        precision = _PRECISIONS.get(dtype_name(kind), dtype_name(kind))
        if quantize is None:
            return _original_tensor_name(dequantize.input[0]), precision
        if (earlier := self._resolve_dequantized(quantize.input[0])) is not None:
            return earlier[0], precision
        output = next((o for o in dequantize.output if o in self.outputs), None)
        return output or _original_tensor_name(quantize.input[0], own=NAME_PREFIX in quantize.output[0]), precision

    def stored_type(self, node: onnx.NodeProto) -> int:
        """Return the stored element type of a Q or DQ node; `TensorProto.UNDEFINED` if it is unknown."""
        if len(node.input) > 2 and node.input[2]:
            zero = self.constants.get(node.input[2])
            return TensorProto.UNDEFINED if zero is None else int(zero.data_type)
        if node.op_type == QUANTIZE:
            return int(attribute_value(node, "output_dtype", 0) or TensorProto.UINT8)
        source = self.producer_through(node.input[0], _TRANSPARENT_OPS)
        if source is not None and source.op_type == QUANTIZE:
            return self.stored_type(source)
        stored = self.constants.get(node.input[0])
        return TensorProto.UNDEFINED if stored is None else int(stored.data_type)

    @cached_property
    def operators(self) -> Mapping[str, str]:
        """Operator type of each node by name."""
        return {node_name(node): node.op_type for node in self.nodes.values()}

    @cached_property
    def linear(self) -> Mapping[str, tuple[str | None, str | None]]:
        """Precisions of data and weight of each linear operator (`LINEAR_OPS`) by node name; None for a float input."""
        precisions = {(edge.consumer, edge.slot): precision for edge, precision in self.edges.items()}
        names = map(node_name, self._nodes_of(LINEAR_OPS))
        return {name: (precisions.get((name, 0)), precisions.get((name, 1))) for name in names}

    @cached_property
    def linear_readers(self) -> Mapping[str, tuple[str, ...]]:
        """Types of the operators that read each linear operator's output, by its node name; QuantizeLinear included."""
        linear = self._nodes_of(LINEAR_OPS)
        return {node_name(node): tuple(n.op_type for n in self.readers.get(node.output[0], ())) for node in linear}

    @cached_property
    def pairs(self) -> frozenset[str]:
        """Names of the QuantizeLinear and DequantizeLinear nodes."""
        return frozenset(map(node_name, self._nodes_of(QDQ_OPS)))

    @cached_property
    def pair_neighbours(self) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """Node before the pair (or "a constant", "input NAME") and nodes after it, by the name of each Q or DQ node."""
        found = {}
        for node in self._nodes_of(QDQ_OPS):
            source, maker = self._walk_back(node.input[0], QDQ_OPS)
            before = "a constant" if source in self.constants else f"input {source}"
            found[node_name(node)] = before if maker is None else node_name(maker), tuple(self._reader_names(node))
        return found

    @cached_property
    def unfusable_reasons(self) -> Mapping[str, str]:
        """Reason, without subject, why no runtime can fuse a Q or DQ node, by its name; other nodes are absent."""
        found = {}
        for node in self._nodes_of(QDQ_OPS):
            before = self.producer_through(node.input[0], _TRANSPARENT_OPS) if node.op_type == DEQUANTIZE else None
            if node.input[1] not in self.constants:
                found[node_name(node)] = "its scale is computed, not constant"
            elif before is not None and before.op_type == QUANTIZE and before.input[1] in self.constants:
                for slot, what in ((2, "zero point"), (1, "scale")):
                    pair = [self.values(each.input[slot]) for each in (before, node) if len(each.input) > slot]
                    if len(pair) == 2 and not np.array_equal(*pair):
                        found[node_name(node)] = f"its {what} differs from that of the QuantizeLinear in front of it"
        return found

    @cached_property
    def folded_into(self) -> Mapping[str, tuple[str, ...]]:
        """Names of linear operators by the name of a node that runtimes may fold into them, and by outputs of both."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self._nodes_of(LINEAR_OPS):
            names, readers = [node.output[0]], self.readers[node.output[0]]
            while len(readers) == 1 and readers[0].op_type in _FOLDABLE_OPS:
                names += [node_name(readers[0]), readers[0].output[0]]
                readers = self.readers[names[-1]]
            if len(readers) == 1 and readers[0].op_type == QUANTIZE:
                names.append(node_name(readers[0]))
            for name in dict.fromkeys(names):
                found[name] = (*found.get(name, ()), node_name(node))
        return found

    def _nodes_of(self, ops: frozenset[str]) -> list[onnx.NodeProto]:
        return [node for node in self.nodes.values() if node.op_type in ops]

    def _reader_names(self, node: onnx.NodeProto) -> Iterator[str]:
        for reader in self.readers.get(node.output[0], ()):
            if reader.op_type in QDQ_OPS and node.op_type == QUANTIZE:
                yield from self._reader_names(reader)
            else:
                yield node_name(reader)


def _sort_nodes(nodes: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return labelled nodes in topological order; in their own if it is one, or if they have a cycle."""
    maker = {name: place for place, (_, node) in enumerate(nodes) for name in node.output if name}
    needed = {place: [maker[name] for name in node.input if name in maker] for place, (_, node) in enumerate(nodes)}
    if all(before < place for place, sources in needed.items() for before in sources):
        return nodes
    try:
        return [nodes[place] for place in TopologicalSorter(needed).static_order()]
    except CycleError:
        return nodes


def _original_tensor_name(name: str, *, own: bool = False) -> str:
    """Return the name of the float tensor, without the suffix of a tool unless this project quantized it (`own`)."""
    stem = name.rpartition(NAME_PREFIX)[0]
    if stem or own:
        return stem or name
    for suffix in _EXTERNAL_TOOL_SUFFIXES:
        name = name.removesuffix(suffix)
    return name
