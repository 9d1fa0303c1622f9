"""Variants of a node and of the Q/DQ pairs behind it: encoded once, then found by a number.

A placement affects a node by few choices: which of its inputs are quantized and how. They are the bits of a number, so
a candidate is assembled by one look-up for each node, however many edges it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from harness.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.quantize import protobuf_wire
from harness.graph.quantize.constants import ConstantQuantizer, QuantizedConstant
from harness.graph.quantize.protobuf_wire import FLOAT_BIAS_PREFIX
from harness.graph.quantize.scales import ActivationScales, SharedScale
from harness.graph.quantize.weights import bias_place
from harness.graph.rules.dialects import Dialect

Form = TypeVar("Form")


class RequestBit(NamedTuple):
    """A request of a placement at a place.

    Attributes:
        kind: "quantized"; "channels": quantized with one scale for each channel, at a producer; "tied": the scale is
            made from other tensors; "final": the tensor leaves the model quantized, and its pair takes over its name;
            "renamed": the node gave that name away; "bias": the constant is the bias of a quantized MatMul.
        place: Input slot of a consumer; tensor name at a producer.
        precision: Precision of a request that is not "renamed".
        tie: Tensors that a tied scale is made from.
    """

    kind: Literal["quantized", "channels", "tied", "final", "renamed", "bias"]
    place: int | str
    precision: str = ""
    tie: SharedScale | None = None


class VariantTable(dict[int, Form]):
    """Variants of one node by its requests, which are the bits of the key; `make` is called on first use of a key."""

    __slots__ = ("_bits", "_make")

    def __init__(self, make: Callable[[frozenset[RequestBit]], Form]) -> None:
        super().__init__()
        self._make = make
        self._bits: dict[RequestBit, int] = {}

    def bit(self, mark: RequestBit) -> int:
        """Return the bit of a request, the same at each call."""
        return self._bits.setdefault(mark, 1 << len(self._bits))

    def __missing__(self, key: int) -> Form:
        form = self[key] = self._make(frozenset(mark for mark, bit in self._bits.items() if key & bit))
        return form


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVariant:
    """A node with the quantized constants that it reads.

    Attributes:
        node: A record of the graph.
        stored: Each of these constants.
        replaced: Constants of the float model that it does not read any more.
        quantized: Name and precision of each constant that the placement asks for; a bias stored with its weight is not
            among them.
        bias: Index of the Add that adds the bias of a MatMul, and the request for that bias as INT32.
    """

    node: bytes
    stored: tuple[QuantizedConstant, ...] = ()
    replaced: tuple[str, ...] = ()
    quantized: frozenset[tuple[str, str]] = frozenset()
    bias: tuple[int, RequestBit] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVariant:
    """The Q/DQ pairs behind a node, or in front of the first one.

    Attributes:
        nodes: Records of the graph.
        grid: Record of each scale and zero point.
    """

    nodes: bytes
    grid: tuple[bytes, ...]
    pairs: int


class VariantEncoder:
    """Encoder of the variants of a model's nodes in a dialect."""

    def __init__(self, model: Model, dialect: Dialect, scales: ActivationScales, constants: ConstantQuantizer) -> None:
        self._model = model
        self._dialect = dialect
        self._scales = scales
        self._constants = constants
        self._pieces = [protobuf_wire.NodePieces(proto) for proto in model.proto.graph.node]

    def encode_node(self, index: int, marks: frozenset[RequestBit]) -> NodeVariant:
        """Encode a node of the model that reads and writes what is requested.

        Raises:
            UserError: Two precisions are asked for at one input, or see `ActivationScales.of`.
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
        """Encode the pairs of all tensors that one node makes, or of the inputs of the model.

        Raises:
            UserError: See `ActivationScales.of`.
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
        """Return the precision by place of the requests of one kind.

        Raises:
            UserError: Two for one place.
        """
        places = [(mark.place, mark.precision) for mark in marks if mark.kind == kind]
        found = dict(places)
        if len(found) < len(places):
            raise UserError(f"{self._model.source}: the placement contains one edge twice")
        return found

    def _quantized_constant(
        self, node: Node, slot: int, asked: Mapping[int | str, str], ties: Mapping[tuple[int | str, str], SharedScale]
    ) -> dict[int, QuantizedConstant]:
        """Quantize a constant; return results by input, as some dialects quantize the bias with the weight."""
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
        """Return the request for the bias of a MatMul by weights, both quantized, at the Add behind it.

        ONNX Runtime makes a Gemm of MatMul and Add before it looks for pairs. With a bias as INT32 the Gemm runs on
        integers, with its result in float or quantized; with a float bias it dequantizes both operands.
        """
        if node.op != "MatMul" or node.inputs[1] not in self._model.constants or not self._stores_bias(asked):
            return None
        place = bias_place(self._model, node)
        return None if place is None else (place[0].index, RequestBit("bias", place[1], "int8", ties.get((0, "int8"))))

    def _bias_of_product(self, node: Node, marks: frozenset[RequestBit]) -> dict[int, QuantizedConstant]:
        """Return the bias as INT32 of an Add behind a quantized MatMul, by its input; empty if there is none."""
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
