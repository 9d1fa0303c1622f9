"""Encoded variants of the nodes of a model and of the Q/DQ pairs after them, and their choice for a placement.

A placement affects a node by few choices: which inputs are quantized, and how. They are the bits of a number, so a
candidate is assembled by one look-up for each node.

An operator that only moves values (MaxPool, Split) runs on stored integers if its inputs and outputs have one scale. So
its outputs get the scale of its input if that input is quantized; after a float input they have the scale of their own
range. The inputs and the output of a Concat share a scale if all inputs are quantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, Literal, NamedTuple, TypeVar

from harness.base.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.protos import opset_versions
from harness.graph.quantize import protobuf_wire
from harness.graph.quantize.constants import ConstantQuantizer, QuantizedConstant
from harness.graph.quantize.protobuf_wire import FLOAT_BIAS_PREFIX
from harness.graph.quantize.scales import ActivationScales, EncodedPairs, SharedScale, find_root
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES, bias_place
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.precision_sensitive import find_unquantizable_constants
from search.space import Edge, Resolved

GRAPH_INPUT_INDEX = -1
"""Index, after those of the nodes, of the producer of the model's inputs and the consumer of its outputs."""
Form = TypeVar("Form")


class RequestBit(NamedTuple):
    """Request of a placement at an input or output of a node.

    Attributes:
        kind: "quantized"; "channels": quantized with one scale for each channel, at a producer; "tied": the scale
            depends on other tensors; "final": the tensor is a quantized output of the model, whose pair gets its name;
            "renamed": the output of the node has another name for that reason; "bias": the constant is the bias of a
            quantized MatMul.
        place: Input slot of a consumer, or tensor name at a producer.
        precision: Precision of the request; "" for "renamed".
        tie: Tensors on which a tied scale depends.
    """

    kind: Literal["quantized", "channels", "tied", "final", "renamed", "bias"]
    place: int | str
    precision: str = ""
    tie: SharedScale | None = None


class VariantTable(dict[int, Form]):
    """Mapping from a node's request bits to its variant: the node with Q/DQ pairs at the requested inputs or outputs.

    Args:
        make: Function that creates the variant for a set of requests; it is called at the first use of a key.
    """

    __slots__ = ("_bits", "_make")

    def __init__(self, make: Callable[[frozenset[RequestBit]], Form]) -> None:
        super().__init__()
        self._make = make
        self._bits: dict[RequestBit, int] = {}

    def bit(self, mark: RequestBit) -> int:
        """Return the integer with one bit set for a request, the same at each call; keys are sums of such bits."""
        return self._bits.setdefault(mark, 1 << len(self._bits))

    def __missing__(self, key: int) -> Form:
        form = self[key] = self._make(frozenset(mark for mark, bit in self._bits.items() if key & bit))
        return form


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVariant:
    """Encoded node with the quantized constants that it reads.

    Attributes:
        node: NodeProto in protobuf's wire format, as a field of the GraphProto (`protobuf_wire`).
        stored: Quantized constants.
        replaced: Constants of the float model that the quantized ones replace.
        quantized: Name and precision of each constant that the placement quantizes, without biases that are stored with
            their weight.
        bias: For a quantized MatMul with a bias, the index in `Model.nodes` of the Add that adds it, and the request by
            which this Add reads it as INT32; else None.
    """

    node: bytes
    stored: tuple[QuantizedConstant, ...]
    replaced: tuple[str, ...]
    quantized: frozenset[tuple[str, str]]
    bias: tuple[int, RequestBit] | None


_TiedBit = tuple[bool, int, int, int]
"""Whether it is of a producer, index of the node, bit of the quantized input or output, and bit of its shared scale."""


class NodeVariants:
    """Variants of the nodes of a model, in a dialect's form; each edge of placements is checked once."""

    def __init__(self, model: Model, dialect: Dialect, scales: ActivationScales, constants: ConstantQuantizer) -> None:
        self._model = model
        self._dialect = dialect
        self._scales = scales
        self._constants = constants
        self._pieces = [protobuf_wire.NodePieces(proto) for proto in model.proto.graph.node]
        self._readers: list[VariantTable[Any]] = [
            VariantTable(partial(self._encode_node, node.index)) for node in model.nodes
        ]
        self._readers.append(VariantTable(partial(self._precisions_by_place, kind="quantized")))
        self._makers = [VariantTable(self._encode_pairs) for _ in self._readers]
        self._products = [n.index for n in model.nodes if n.op == "MatMul"] if dialect.bias == "int32" else []
        self._output_slots = {name: slot for slot, name in reversed(list(enumerate(model.outputs)))}
        self._opset = opset_versions(model.proto).get("", 0)
        self._precisions = sorted(dialect.precisions)
        self._known: dict[tuple[str, str, int, str], tuple[int, int, int, int]] = {}
        joined: dict[str, list[tuple[Node, int]]] = defaultdict(list)
        for node in scales.links.joins:
            decisive = sum(self._bits_to_share(node, precision) for precision in self._precisions)
            joined[scales.links.group_name(node.inputs[0])].append((node, decisive))
        # A search asks for many placements; the bits of a cluster are found once for each state of its operators.
        self._clusters: list[tuple[list[tuple[Node, int]], dict[tuple[int, ...], list[_TiedBit]]]] = [
            (nodes, {}) for nodes in joined.values()
        ]

    def choose(self, resolved: Resolved) -> tuple[list[NodeVariant], list[EncodedPairs]]:
        """Return the variants of the nodes for a placement, and the pairs after each node, last after the inputs."""
        model, readers, makers = self._model, self._readers, self._makers
        read, made = [0] * len(readers), [0] * len(makers)
        for edge, precision in resolved:
            key = (edge.tensor, edge.consumer, edge.slot, precision)
            try:
                reader, slot, maker, tensor = self._known[key]
            except KeyError:
                reader, slot, maker, tensor = self._known[key] = self._request_edge(edge, precision)
            read[reader] |= slot
            made[maker] |= tensor
        if sum(map(int.bit_count, read)) < len(resolved):
            raise UserError(f"{model.source}: the placement contains one edge twice")
        for place, precision in sorted(readers[GRAPH_INPUT_INDEX][read[GRAPH_INPUT_INDEX]].items()):
            name = model.outputs[place]
            for index, number in model.consumers.get(name, ()):
                read[index] |= readers[index].bit(RequestBit("final", number, precision))
            maker = model.producer[name]
            made[maker] |= makers[maker].bit(RequestBit("final", name, precision))
            read[maker] |= readers[maker].bit(RequestBit("renamed", name))
        for cluster, known in self._clusters:
            state = tuple([read[node.index] & decisive for node, decisive in cluster])
            if state not in known:
                known[state] = self._find_tied_bits([node for node, _ in cluster], state)
            for at_producer, index, needed, bit in known[state]:
                row = made if at_producer else read
                if row[index] & needed:
                    row[index] |= bit
        for index in self._products:  # nodes are in order: the Add of a bias comes later
            bias = readers[index][read[index]].bias
            if bias is not None:
                read[bias[0]] |= readers[bias[0]].bit(bias[1])
        return list(map(getitem, readers[:GRAPH_INPUT_INDEX], read)), list(map(getitem, makers, made))

    def _request_edge(self, edge: Edge, precision: str) -> tuple[int, int, int, int]:
        """Return consumer, its bit, producer and its bit for an edge; the bit of a constant's producer is 0."""
        model, linear = self._model, self._dialect.linear_ops
        node, kind, problem = model.nodes_by_name.get(edge.consumer), model.types.get(edge.tensor), ""
        allowed = [p for p in self._precisions if self._dialect.opset([p]) <= self._opset]
        if not edge.consumer:
            if edge.tensor not in model.output_names or edge.tensor not in model.producer:
                problem = ": no node of this model makes an output of that name"
        elif node is None or not 0 <= edge.slot < len(node.inputs) or node.inputs[edge.slot] != edge.tensor:
            problem = " is not in this model; the placement was made for another model, or for other static shapes"
        elif node.opaque:
            problem = f" stays float: {node.op} has a subgraph, is random or is unknown to ONNX"
        elif edge.slot > 1 and node.op in linear:
            problem = f" stays float: {node.op} takes its bias there"
        elif node.op in linear and edge.tensor in model.cached_analysis(find_unquantizable_constants):
            problem = " stays float: it has NaN, infinite or huge values"
        if not problem and kind is not None and kind.dtype not in QUANTIZABLE_DTYPES:
            problem = f" cannot be quantized: its type is {kind.dtype}"
        elif not problem and precision not in allowed:
            problem = (
                f": precision {precision!r} is not among those that {self._dialect.name} takes at opset {self._opset}: "
                f"{', '.join(allowed) or 'none'}"
            )
        if problem:
            place = f"edge {edge.tensor!r} -> input {edge.slot} of {edge.consumer!r}"
            raise UserError(f"{model.source}: {place if edge.consumer else f'output {edge.tensor!r}'}{problem}")
        reader, slot = (GRAPH_INPUT_INDEX, self._output_slots[edge.tensor]) if node is None else (node.index, edge.slot)
        read = self._readers[reader].bit(RequestBit("quantized", slot, precision))
        if edge.tensor in model.constants:
            return reader, read, GRAPH_INPUT_INDEX, 0
        maker = model.producer.get(edge.tensor, GRAPH_INPUT_INDEX)
        by_channel = node is not None and self._scales.has_channel_scales(node, edge.slot, precision)
        request = RequestBit("channels" if by_channel else "quantized", edge.tensor, precision)
        return reader, read, maker, self._makers[maker].bit(request)

    def _bits_to_share(self, node: Node, precision: str) -> int:
        """Return the bits of the inputs that must be quantized so that the tensors of a node share a scale."""
        if node.index in self._scales.links.fixed:
            return 0
        slots = [0]
        if node.op == "Concat":
            slots = [slot for slot, name in enumerate(node.inputs) if name not in self._model.constants]
        return sum(self._readers[node.index].bit(RequestBit("quantized", slot, precision)) for slot in slots)

    def _find_tied_bits(self, nodes: Sequence[Node], state: tuple[int, ...]) -> list[_TiedBit]:
        """Return the bits of inputs and outputs with a scale that depends on other tensors; see `_shared_scales`."""
        found: list[_TiedBit] = []
        for precision in self._precisions:
            for name, tie in self._shared_scales(nodes, state, precision).items():
                maker = self._model.producer.get(name, GRAPH_INPUT_INDEX)
                places: list[tuple[bool, VariantTable[Any], int, int | str]] = [
                    (False, self._readers[index], index, slot) for index, slot in self._model.consumers.get(name, ())
                ]
                for at_producer, table, index, place in (*places, (True, self._makers[maker], maker, name)):
                    needed = table.bit(RequestBit("quantized", place, precision))
                    tied = table.bit(RequestBit("tied", place, precision, tie))
                    found.append((at_producer, index, needed, tied))
        return found

    def _shared_scales(self, nodes: Sequence[Node], state: Sequence[int], precision: str) -> Mapping[str, SharedScale]:
        """Return the shared scale of each tensor at one precision, without tensors that have their own.

        Args:
            nodes: Operators whose tensors may share scales, in topological order.
            state: Bits of the inputs of each node that decide whether its tensors share a scale.
        """
        parents: dict[str, str] = {}
        origin: dict[str, str] = {}
        concats: list[str] = []
        for node, bits in zip(nodes, state, strict=True):
            needed = self._bits_to_share(node, precision)
            if bits & needed != needed or not (needed or node.index in self._scales.links.fixed):
                continue
            first = node.inputs[0]
            if node.op == "Concat":
                concats.append(first)
            for name in filter(None, (*node.outputs, *(node.inputs if node.op == "Concat" else ()))):
                parents[find_root(parents, name)] = find_root(parents, first)
                if node.op != "Concat":
                    origin[name] = origin.get(first, first)
        members: dict[str, list[str]] = defaultdict(list)
        for name in list(parents):
            members[find_root(parents, name)].append(name)
        shared = {find_root(parents, name) for name in concats}
        found: dict[str, SharedScale] = {}
        for root, names in members.items():
            together = tuple(sorted(names)) if root in shared else ()
            found |= {n: SharedScale(origin.get(n, n), together) for n in names if together or n in origin}
        return found

    def _encode_node(self, index: int, marks: frozenset[RequestBit]) -> NodeVariant:
        """Encode the node with an index so that it reads the pairs and constants that its requests need."""
        node, model = self._model.nodes[index], self._model
        asked, final = self._precisions_by_place(marks, "quantized"), self._precisions_by_place(marks, "final")
        ties = _ties_by_place(marks)
        renamed = {mark.place for mark in marks if mark.kind == "renamed"}
        inputs = {int(slot): node.inputs[int(slot)] + FLOAT_BIAS_PREFIX for slot in final}
        constants: dict[int, QuantizedConstant] = {}
        has_integer_bias = self._dialect.bias == "int32" and asked.get(0) == asked.get(1) == "int8"
        for slot in sorted(map(int, asked)):
            tensor, precision = node.inputs[slot], asked[slot]
            tie = ties.get((slot, precision))
            if tensor not in model.constants and self._scales.has_channel_scales(node, slot, precision):
                inputs[slot] = self._scales.encode_channel_pair(tensor, final=slot in final).output
            elif tensor not in model.constants:
                inputs[slot] = self._scales.encode_pair(tensor, precision, tie, final=final.get(slot)).output
            elif node.op not in self._dialect.linear_ops:
                grid = self._scales.scale_and_zero_point(tensor, precision, tie)
                constants[slot] = self._constants.quantize_operand(tensor, precision, *grid)
            elif slot == 1 and has_integer_bias:
                stored = self._weight_and_bias(node, ties.get((0, "int8")))
                constants |= {1: stored[1]} if node.op == "MatMul" else stored
            else:
                constants[slot] = self._constants.quantize_weight_input(node, slot, precision)
        for mark in marks if not asked else ():
            if mark.kind == "bias":  # this node is the Add after a quantized MatMul
                slot = int(mark.place)
                product = model.nodes[model.producer[node.inputs[1 - slot]]]
                stored = self._weight_and_bias(product, mark.tie)
                constants |= {slot: stored[2]} if 2 in stored else {}
        # ONNX Runtime fuses MatMul and Add to a Gemm before it looks for pairs. With an INT32 bias the Gemm runs on
        # integers, with a float or quantized result; with a float bias both operands are dequantized.
        bias = None
        if node.op == "MatMul" and node.inputs[1] in model.constants and has_integer_bias:
            place = bias_place(model, node)
            if place is not None:
                bias = place[0].index, RequestBit("bias", place[1], "int8", ties.get((0, "int8")))
        inputs |= {slot: stored.output for slot, stored in constants.items()}
        outputs = {number: name + FLOAT_BIAS_PREFIX for number, name in enumerate(node.outputs) if name in renamed}
        return NodeVariant(
            node=self._pieces[index].rename_tensors(inputs, outputs),
            stored=tuple(constants.values()),
            replaced=tuple(node.inputs[slot] for slot in constants),
            quantized=frozenset((node.inputs[slot], asked[slot]) for slot in constants.keys() & asked.keys()),
            bias=bias,
        )

    def _encode_pairs(self, marks: frozenset[RequestBit]) -> EncodedPairs:
        """Encode the pairs of all outputs of one node, or of the inputs of the model."""
        final, ties = self._precisions_by_place(marks, "final"), _ties_by_place(marks)
        asked = sorted((str(mark.place), mark.precision) for mark in marks if mark.kind == "quantized")
        pairs = [self._scales.encode_pair(t, p, ties.get((t, p)), final=final.get(t)) for t, p in asked]
        channels = sorted(str(mark.place) for mark in marks if mark.kind == "channels")
        pairs += [self._scales.encode_channel_pair(tensor, final=tensor in final) for tensor in channels]
        grid = tuple(record for pair in pairs for record in pair.grid)
        return EncodedPairs("", b"".join(pair.nodes for pair in pairs), grid, len(pairs))

    def _precisions_by_place(self, marks: Iterable[RequestBit], kind: str) -> dict[int | str, str]:
        """Return the precision of each request of one kind by its place; see `RequestBit` for kinds and places."""
        places = [(mark.place, mark.precision) for mark in marks if mark.kind == kind]
        found = dict(places)
        if len(found) < len(places):
            raise UserError(f"{self._model.source}: the placement contains one edge twice")
        return found

    def _weight_and_bias(self, node: Node, tie: SharedScale | None) -> dict[int, QuantizedConstant]:
        if self._scales.has_channel_scales(node, 0, "int8"):
            scale, _ = self._scales.channel_scales(node.inputs[0])
        else:
            scale, _ = self._scales.scale_and_zero_point(node.inputs[0], "int8", tie)
        return self._constants.quantize_weight_and_bias(node, scale)


def _ties_by_place(marks: Iterable[RequestBit]) -> dict[tuple[int | str, str], SharedScale]:
    return {(mark.place, mark.precision): mark.tie for mark in marks if mark.kind == "tied" and mark.tie is not None}
