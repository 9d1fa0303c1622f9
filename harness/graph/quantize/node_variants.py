"""Encoded variants of a node and of the Q/DQ pairs after it, which are stored by a number.

A placement affects a node by few choices: which inputs are quantized, and how. They are the bits of a number, so a
candidate is assembled by one look-up for each node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from harness.base.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.quantize import protobuf_wire
from harness.graph.quantize.constants import ConstantQuantizer, QuantizedConstant
from harness.graph.quantize.protobuf_wire import FLOAT_BIAS_PREFIX
from harness.graph.quantize.scales import ActivationScales, SharedScale
from harness.graph.quantize.weights import bias_place
from harness.graph.rules.dialects import Dialect

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
    stored: tuple[QuantizedConstant, ...] = ()
    replaced: tuple[str, ...] = ()
    quantized: frozenset[tuple[str, str]] = frozenset()
    bias: tuple[int, RequestBit] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVariant:
    """Encoded Q/DQ pairs after a node, or after the inputs of the model.

    Attributes:
        nodes: Nodes of the pairs as encoded fields of the graph.
        grid: Scales and zero points, each as an encoded field of the graph.
        pairs: Number of pairs.
    """

    nodes: bytes
    grid: tuple[bytes, ...]
    pairs: int


class VariantEncoder:
    """Encoder of the nodes of a model, in a dialect's form, with float or quantized inputs as placements request."""

    def __init__(self, model: Model, dialect: Dialect, scales: ActivationScales, constants: ConstantQuantizer) -> None:
        self._model = model
        self._dialect = dialect
        self._scales = scales
        self._constants = constants
        self._pieces = [protobuf_wire.NodePieces(proto) for proto in model.proto.graph.node]

    def encode_node(self, index: int, marks: frozenset[RequestBit]) -> NodeVariant:
        """Encode the node with an index so that it reads the pairs and constants that its requests need.

        Raises:
            UserError: Two precisions are requested at one input, or the range of a tensor is unknown or not finite.
        """
        node = self._model.nodes[index]
        asked, final = self.precisions_by_place(marks, "quantized"), self.precisions_by_place(marks, "final")
        ties = _ties_by_place(marks)
        renamed = {mark.place for mark in marks if mark.kind == "renamed"}
        inputs = {int(slot): node.inputs[int(slot)] + FLOAT_BIAS_PREFIX for slot in final}
        constants: dict[int, QuantizedConstant] = {}
        for slot in sorted(map(int, asked)):
            tensor, precision = node.inputs[slot], asked[slot]
            if tensor in self._model.constants:
                constants |= self._quantized_constant(node, slot, asked, ties)
            elif self._scales.has_channel_scales(node, slot, precision):
                inputs[slot] = self._scales.encode_channel_pair(tensor, final=slot in final).output
            else:
                pair = self._scales.encode_pair(tensor, precision, ties.get((slot, precision)), final=final.get(slot))
                inputs[slot] = pair.output
        if not asked:
            constants |= self._bias_of_product(node, marks)
        inputs |= {slot: stored.output for slot, stored in constants.items()}
        outputs = {number: name + FLOAT_BIAS_PREFIX for number, name in enumerate(node.outputs) if name in renamed}
        return NodeVariant(
            node=self._pieces[index].rename_tensors(inputs, outputs),
            stored=tuple(constants.values()),
            replaced=tuple(node.inputs[slot] for slot in constants),
            quantized=frozenset((node.inputs[slot], asked[slot]) for slot in constants.keys() & asked.keys()),
            bias=self._bias_request(node, asked, ties),
        )

    def encode_pairs(self, marks: frozenset[RequestBit]) -> PairVariant:
        """Encode the pairs of all outputs of one node, or of the inputs of the model.

        Raises:
            UserError: The range of a tensor is unknown or not finite.
        """
        final = self.precisions_by_place(marks, "final")
        ties = _ties_by_place(marks)
        asked = sorted((str(mark.place), mark.precision) for mark in marks if mark.kind == "quantized")
        pairs = [self._scales.encode_pair(t, p, ties.get((t, p)), final=final.get(t)) for t, p in asked]
        channels = sorted(str(mark.place) for mark in marks if mark.kind == "channels")
        pairs += [self._scales.encode_channel_pair(tensor, final=tensor in final) for tensor in channels]
        grid = tuple(record for pair in pairs for record in pair.grid)
        return PairVariant(nodes=b"".join(pair.nodes for pair in pairs), grid=grid, pairs=len(pairs))

    def precisions_by_place(self, marks: Iterable[RequestBit], kind: str) -> dict[int | str, str]:
        """Return the precision of each request of one kind by its place; see `RequestBit` for kinds and places.

        Raises:
            UserError: Two requests have the same place.
        """
        places = [(mark.place, mark.precision) for mark in marks if mark.kind == kind]
        found = dict(places)
        if len(found) < len(places):
            raise UserError(f"{self._model.source}: the placement contains one edge twice")
        return found

    def _quantized_constant(
        self, node: Node, slot: int, asked: Mapping[int | str, str], ties: Mapping[tuple[int | str, str], SharedScale]
    ) -> dict[int, QuantizedConstant]:
        """Quantize a constant, and return results by input, because some dialects quantize the bias with the weight."""
        precision = asked[slot]
        if node.op not in self._dialect.linear_ops:
            tensor = node.inputs[slot]
            grid = self._scales.scale_and_zero_point(tensor, precision, ties.get((slot, precision)))
            return {slot: self._constants.quantize_operand(tensor, precision, *grid)}
        if slot == 1 and self._stores_bias(asked):
            stored = self._weight_and_bias(node, ties.get((0, "int8")))
            return {1: stored[1]} if node.op == "MatMul" else stored
        return {slot: self._constants.quantize_weight_input(node, slot, precision)}

    def _stores_bias(self, asked: Mapping[int | str, str]) -> bool:
        return self._dialect.bias == "int32" and asked.get(0) == asked.get(1) == "int8"

    def _weight_and_bias(self, node: Node, tie: SharedScale | None) -> dict[int, QuantizedConstant]:
        if self._scales.has_channel_scales(node, 0, "int8"):
            scale, _ = self._scales.channel_scales(node.inputs[0])
        else:
            scale, _ = self._scales.scale_and_zero_point(node.inputs[0], "int8", tie)
        return self._constants.quantize_weight_and_bias(node, scale)

    def _bias_request(
        self, node: Node, asked: Mapping[int | str, str], ties: Mapping[tuple[int | str, str], SharedScale]
    ) -> tuple[int, RequestBit] | None:
        """Return the request for the bias of a quantized MatMul at the Add after it, or None.

        ONNX Runtime fuses MatMul and Add to a Gemm before it looks for pairs. With an INT32 bias the Gemm runs on
        integers, with a float or quantized result; with a float bias both operands are dequantized.
        """
        if node.op != "MatMul" or node.inputs[1] not in self._model.constants or not self._stores_bias(asked):
            return None
        place = bias_place(self._model, node)
        return None if place is None else (place[0].index, RequestBit("bias", place[1], "int8", ties.get((0, "int8"))))

    def _bias_of_product(self, node: Node, marks: frozenset[RequestBit]) -> dict[int, QuantizedConstant]:
        """Return the INT32 bias of an Add after a quantized MatMul by its input, or an empty mapping."""
        found = {}
        for mark in marks:
            if mark.kind == "bias":
                slot = int(mark.place)
                product = self._model.nodes[self._model.producer[node.inputs[1 - slot]]]
                bias = self._weight_and_bias(product, mark.tie).get(2)
                found.update({} if bias is None else {slot: bias})
        return found


def _ties_by_place(marks: Iterable[RequestBit]) -> dict[tuple[int | str, str], SharedScale]:
    return {(mark.place, mark.precision): mark.tie for mark in marks if mark.kind == "tied" and mark.tie is not None}
