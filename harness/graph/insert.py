"""A placement's Q/DQ pairs inserted into a model, as a proto or straight to a file.

Activations get one pair per tensor and precision, right behind the tensor's producer and shared by every selected
consumer; constants get their quantized form behind a DequantizeLinear; float consumers keep the float tensor. The
graph is never sorted or imported again: see `harness.graph.encoding.wire`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import checker

from harness.errors import UserError
from harness.graph.cleaning.valid import check_valid
from harness.graph.dialects import Dialect
from harness.graph.diff import diff
from harness.graph.encoding import wire
from harness.graph.encoding.constants import Constants, Stored
from harness.graph.encoding.requests import Requests, Site
from harness.graph.encoding.scales import Scales
from harness.graph.encoding.wire import TAG, UNROUNDED
from harness.graph.load import write as write_model
from harness.graph.model import Model, Node
from search.space import Resolved, digest_of

__all__ = ["Inserter"]

_AHEAD = -1
"""Position of what stands before the first node."""


@dataclass(slots=True)
class _Draft:
    """What a placement changes.

    Attributes:
        sites: Precision by input (node index and slot).
        shared: Groups of tensors that share one scale, see `Scales.group`.
        added: Encoded nodes by the index of the node that they follow.
        inputs: New input names by node index and slot.
        outputs: New output names by node index and number.
        small: Encoded scales and zero points of activations by name.
        stored: Quantized constants by their dequantized tensor.
        replaced: How often a constant of the float model gave way to a quantized one.
        pairs: See `Inserter.pairs`.
    """

    sites: dict[Site, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    added: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    inputs: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    outputs: dict[int, dict[int, str]] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    replaced: Counter[str] = field(default_factory=Counter)
    pairs: int = 0


class Inserter:
    """Turns placements into ONNX models of one dialect. Not for use by several threads at once.

    Args:
        model: The float model.
        dialect: How the runtime wants its Q/DQ.
        ranges: Smallest and largest value of each activation that may be quantized.

    Raises:
        UserError: The model has tensors named like those that are inserted.
    """

    def __init__(self, model: Model, dialect: Dialect, ranges: Mapping[str, tuple[float, float]]) -> None:
        marked = [name for node in model.nodes for name in node.outputs if TAG in name]
        if marked:
            raise UserError(f"{model.source}: tensor {marked[0]!r} says that Q/DQ pairs are inserted already")
        self._model = model
        self._dialect = dialect
        self._asked = Requests(model, dialect)
        self._scales = Scales(model, dialect, ranges)
        self._constants = Constants(model, dialect)
        self._concats = {
            node.index: frozenset(slot for slot, name in enumerate(node.inputs) if name not in model.constants)
            for node in model.nodes
            if node.op == "Concat"
        }
        self._uses = Counter(name for node in model.nodes for name in (*node.inputs, *node.captures))
        self._uses.update(model.outputs)
        self._pieces = [wire.NodePieces(proto) for proto in model.proto.graph.node]
        self._unchanged = [piece.unchanged for piece in self._pieces]
        self._headers = wire.header(model.proto), wire.header(model.proto.graph)

    def insert(self, resolved: Resolved) -> onnx.ModelProto:
        """The model with exactly these Q/DQ pairs, all weights inside.

        Raises:
            UserError: An edge is not one of this model's or cannot be quantized, or a range is missing.
        """
        draft = self._draft(resolved)
        proto = onnx.ModelProto.FromString(wire.model(self._headers[0], self._graph(draft)))
        dropped = self._dropped(draft)
        constants = [tensor for name, tensor in self._model.constants.items() if name not in dropped]
        constants += [tensor for stored in draft.stored.values() for tensor in stored.tensors]
        self._check_graph(proto, constants)
        proto.graph.initializer.extend(constants)
        missing, extra = diff(resolved, proto)
        if missing or extra:
            raise AssertionError(f"{self._model.source}: insertion lost {missing[:3]} and added {extra[:3]}")
        return proto

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path:
        """Write a candidate for building, and its weights in files that all candidates in the folder share.

        Args:
            resolved: The quantized edges.
            folder: Made where missing.
            name: Of the file, without suffix; by default the placement's digest.

        Raises:
            UserError: As `insert`.
        """
        draft = self._draft(resolved)
        dropped = self._dropped(draft)
        records = [record for name, record in self._constants.floats.items() if name not in dropped]
        records += [self._constants.encoded(stored) for stored in draft.stored.values()]
        folder.mkdir(parents=True, exist_ok=True)
        self._constants.write_files(draft.stored.values(), folder)
        path = folder / f"{name or digest_of(resolved)}.onnx"
        path.write_bytes(wire.model(self._headers[0], [*self._graph(draft), *records]))
        return path

    def export(self, resolved: Resolved, path: Path) -> Path:
        """Write the model to one file; above 1.9 GB, to it and the file `<name>.data` beside it.

        Raises:
            UserError: As `insert`.
        """
        return write_model(self.insert(resolved), path)

    def pairs(self, resolved: Resolved) -> int:
        """How many Q/DQ pairs a placement has.

        A pair on an activation counts once, however many consumers share it; a quantized constant counts once (its
        Quantize half has been computed ahead). A bias in INT32 belongs to its operator and does not count.
        """
        return self._draft(resolved).pairs

    def _check_graph(self, proto: onnx.ModelProto, constants: Iterable[onnx.TensorProto]) -> None:
        """What is promised of any result: the model's own inputs and outputs, and valid ONNX."""
        inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
        if inputs != [value.name for value in self._model.proto.graph.input] or tuple(outputs) != self._model.outputs:
            raise AssertionError(f"{self._model.source}: insertion changed inputs or outputs: {inputs}, {outputs}")
        try:
            check_valid(proto, constants)
        except checker.ValidationError as error:
            raise AssertionError(f"{self._model.source}: insertion gave no valid ONNX: {error}") from error

    def _draft(self, resolved: Resolved) -> _Draft:
        draft, asked = _Draft(), self._asked.sort(resolved)
        draft.sites = asked.sites
        draft.shared = self._shared(draft)
        for tensor in asked.finals:
            self._free_name(draft, tensor)
        for (tensor, precision), sites in asked.activations.items():
            self._add_pair(draft, tensor, precision, asked.finals.get(tensor), sites)
        nodes = self._model.nodes
        for index, slot in asked.constants:
            self._add_constant(draft, nodes[index], slot)
        biases = len(draft.replaced) - len({nodes[index].inputs[slot] for index, slot in asked.constants})
        draft.pairs = len(asked.activations) + len(draft.stored) - biases
        return draft

    def _shared(self, draft: _Draft) -> frozenset[str]:
        """Groups of tensors around a Concat whose inputs are all quantized."""
        return frozenset(
            self._scales.group(self._model.nodes[index].outputs[0])
            for index, slots in self._concats.items()
            if slots and all((index, slot) in draft.sites for slot in slots)
        )

    def _free_name(self, draft: _Draft, tensor: str) -> None:
        """Free the name of a model output for its DequantizeLinear; float consumers follow the float tensor."""
        producer = self._model.producer[tensor]
        number = self._model.nodes[producer].outputs.index(tensor)
        draft.outputs.setdefault(producer, {})[number] = tensor + UNROUNDED
        for index, slot in self._model.consumers.get(tensor, ()):
            draft.inputs[index][slot] = tensor + UNROUNDED

    def _add_pair(self, draft: _Draft, tensor: str, precision: str, final: str | None, sites: Iterable[Site]) -> None:
        """Put a pair behind a tensor's producer; `final` is the precision at which the tensor leaves the model."""
        shared = bool(draft.shared) and self._is_shared(draft, tensor)
        pair = self._scales.pair(tensor, precision, shared=shared, final=final)
        draft.added[self._model.producer.get(tensor, _AHEAD)].append(pair.nodes)
        draft.small.update(pair.grid)
        for index, slot in sites:
            draft.inputs[index][slot] = pair.output

    def _add_constant(self, draft: _Draft, node: Node, slot: int) -> None:
        """Put the quantized form of a constant in its place; some dialects quantize the bias with the weight."""
        precision = draft.sites[node.index, slot]
        data = draft.sites.get((node.index, 0))
        if node.op not in self._dialect.linear_ops:
            tensor = node.inputs[slot]
            scale = self._scales.of(tensor, precision, shared=self._is_shared(draft, tensor))
            found = {slot: self._constants.operand(tensor, precision, *scale)}
        elif slot == 1 and self._dialect.bias == "int32" and precision == data == "int8":
            shared = self._is_shared(draft, node.inputs[0])
            found = self._constants.weight_and_bias(node, self._scales.of(node.inputs[0], "int8", shared=shared)[0])
        else:
            found = {slot: self._constants.weight(node, slot, precision)}
        for place, stored in found.items():
            draft.stored[stored.output] = stored
            draft.inputs[node.index][place] = stored.output
            draft.replaced[node.inputs[place]] += 1

    def _is_shared(self, draft: _Draft, tensor: str) -> bool:
        return bool(draft.shared) and self._scales.group(tensor) in draft.shared

    def _dropped(self, draft: _Draft) -> frozenset[str]:
        """Constants of the float model that nothing reads any more."""
        return frozenset(name for name, count in draft.replaced.items() if count >= self._uses[name])

    def _graph(self, draft: _Draft) -> list[bytes]:
        """The pieces of the graph, but for its constants."""
        nodes = self._unchanged.copy()
        for index in {**draft.inputs, **draft.outputs}:
            nodes[index] = self._pieces[index].rewired(draft.inputs.get(index, {}), draft.outputs.get(index, {}))
        for index, pairs in draft.added.items():
            if index != _AHEAD:
                nodes[index] += b"".join(pairs)
        ahead = [*draft.added.get(_AHEAD, ()), *(stored.node for stored in draft.stored.values())]
        return [self._headers[1], *ahead, *nodes, *draft.small.values()]
