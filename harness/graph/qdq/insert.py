"""Insertion of a placement's Q/DQ pairs into a model, with a protobuf message or a file as result.

An activation gets one pair per precision, directly after its producer, which all quantized consumers share; a constant
is stored quantized with a DequantizeLinear; float consumers read the float tensor. Files are joined from encoded pieces
without sorting or parsing the graph, see `harness.graph.quantize.node_variants` and `protobuf_wire`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

import onnx
from onnx import checker

from harness.base.errors import UserError
from harness.graph.io.files import write_model
from harness.graph.model import Model
from harness.graph.passes.normalize import check_valid
from harness.graph.protos import extend_field
from harness.graph.qdq.qdq_graph import diff_edges
from harness.graph.quantize import protobuf_wire
from harness.graph.quantize.constants import ConstantQuantizer
from harness.graph.quantize.edge_requests import GRAPH_INPUT_INDEX, EdgeRequests, NodeRequests, SharedScaleFinder
from harness.graph.quantize.node_variants import NodeVariant, PairVariant, RequestBit, VariantEncoder, VariantTable
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES, NumericChoices
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.quantize.scales import ActivationScales
from harness.graph.quantize.weight_estimators import load_weight_estimator
from harness.graph.rules.dialects import Dialect
from search.space import Resolved, edges_digest


def _join(parts: Iterable[Iterable[Any]]) -> Iterable[Any]:
    """Return the items of all parts, of which most are empty."""
    return chain.from_iterable(filter(None, parts))


class InsertionPlan:
    """Plan of a placement's file.

    Args:
        nodes: Encoded variant of each node of the model.
        behind: Pairs after each node; the last are those after the model's inputs.
    """

    def __init__(self, nodes: list[NodeVariant], behind: list[PairVariant]) -> None:
        self.nodes = nodes
        self.behind = behind
        self.stored = dict.fromkeys(_join(map(attrgetter("stored"), nodes)))

    @property
    def count_pairs(self) -> int:
        """Number of Q/DQ pairs, counted as `Inserter.count_pairs` does."""
        constants = {constant for form in self.nodes for constant in form.quantized}
        return sum(form.pairs for form in self.behind) + len(constants)


class Inserter:
    """Writer of placements of a float model as ONNX models in one dialect. Not thread-safe.

    Args:
        model: Float model.
        dialect: Dialect of the runtime.
        ranges: Smallest and largest value of each activation that may be quantized, by tensor name.
        choices: Estimators and scales of the pairs.

    Raises:
        UserError: The model has names of inserted tensors, or the dialect does not offer a choice.
    """

    def __init__(
        self,
        model: Model,
        dialect: Dialect,
        ranges: Mapping[str, tuple[float, float]],
        choices: NumericChoices = DEFAULT_CHOICES,
    ) -> None:
        marked = [name for node in model.nodes for name in node.outputs if NAME_PREFIX in name]
        if marked:
            raise UserError(f"{model.source}: tensor {marked[0]!r} shows that Q/DQ pairs are already inserted")
        dialect = choices.adapt_dialect(dialect)
        self._model = model
        self._dialect = dialect
        self._scales = ActivationScales(model, dialect, ranges, choices)
        self._constants = ConstantQuantizer(model, dialect, load_weight_estimator(choices.weights))
        encoder = VariantEncoder(model, dialect, self._scales, self._constants)
        outside = VariantTable(partial(encoder.precisions_by_place, kind="quantized"))
        self._readers: list[VariantTable[Any]] = [
            *(VariantTable(partial(encoder.encode_node, n.index)) for n in model.nodes),
            outside,
        ]
        self._makers = [VariantTable(encoder.encode_pairs) for _ in self._readers]
        self._products = [n.index for n in model.nodes if n.op == "MatMul"] if dialect.bias == "int32" else []
        self._requests = EdgeRequests(model, dialect, self._scales, self._readers, self._makers)
        self._shared_scales = SharedScaleFinder(model, dialect, self._scales.links, self._readers, self._makers)
        self._uses = Counter(name for node in model.nodes for name in (*node.inputs, *node.captures))
        self._uses.update(model.outputs)
        self._frame = protobuf_wire.split_model_frame(model.proto)
        self._header = protobuf_wire.encode_graph_header(model.proto.graph)

    def insert(self, resolved: Resolved) -> onnx.ModelProto:
        """Return a copy of the model with the Q/DQ pairs of quantized edges, and with all weights inside.

        Raises:
            UserError: An edge does not exist in the model or cannot be quantized, or a range is missing.
        """
        resolved = self.map_edges(resolved)
        draft = self._plan_insertion(resolved)
        proto = onnx.ModelProto.FromString(protobuf_wire.encode_model(self._frame, self._graph_pieces(draft)))
        dropped = self._unused_constants(draft)
        constants = [tensor for name, tensor in self._model.constants.items() if name not in dropped]
        constants += [tensor for stored in draft.stored for tensor in stored.tensors]
        self._check_graph(proto, constants)
        extend_field(proto.graph.initializer, constants)
        missing, extra = diff_edges(resolved, proto)
        if missing or extra:
            raise AssertionError(f"{self._model.source}: insertion lost {missing[:3]} and added {extra[:3]}")
        return proto

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path:
        """Write a candidate's file and return its path; candidates in a folder share data files with large weights.

        Args:
            resolved: Quantized edges.
            folder: Folder of the files; created if missing.
            name: Name of the file without suffix; None: the digest of the placement.

        Raises:
            UserError: An edge does not exist in the model or cannot be quantized, or a range is missing.
        """
        draft = self._plan_insertion(self.map_edges(resolved))
        dropped = self._unused_constants(draft)
        records = [record for name, record in self._constants.float_records.items() if name not in dropped]
        folder.mkdir(parents=True, exist_ok=True)
        records += self._constants.write_files(draft.stored, folder)
        path = folder / f"{name or edges_digest(resolved)}.onnx"
        path.write_bytes(protobuf_wire.encode_model(self._frame, [*self._graph_pieces(draft), *records]))
        return path

    def export(self, resolved: Resolved, path: Path) -> Path:
        """Write the model of `insert` to one file, or above 1.9 GB to the file and `<name>.data`; return `path`."""
        return write_model(self.insert(resolved), path)

    def count_pairs(self, resolved: Resolved) -> int:
        """Return the number of Q/DQ pairs of a placement, which `qdq_graph.count_pairs` returns for its file.

        A pair on an activation counts once for all its consumers. A constant counts once for each precision, even if
        consumers read it with different scales. A bias in INT32 does not count.
        """
        return self._plan_insertion(self.map_edges(resolved)).count_pairs

    def map_edges(self, resolved: Resolved) -> Resolved:
        """Return the edges of a placement in the model of the files: here the same edges, in `CastInserter` others."""
        return resolved

    def _check_graph(self, proto: onnx.ModelProto, constants: Iterable[onnx.TensorProto]) -> None:
        """Check that a result has the inputs and outputs of the model and is valid ONNX."""
        inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
        if inputs != [value.name for value in self._model.proto.graph.input] or tuple(outputs) != self._model.outputs:
            raise AssertionError(f"{self._model.source}: insertion changed inputs or outputs: {inputs}, {outputs}")
        try:
            check_valid(proto, constants)
        except checker.ValidationError as error:
            raise AssertionError(f"{self._model.source}: insertion gave no valid ONNX: {error}") from error

    def _plan_insertion(self, resolved: Resolved) -> InsertionPlan:
        asked = self._requests.group_by_node(resolved)
        for tensor, precision in self._quantized_outputs(asked):
            for index, slot in self._model.consumers.get(tensor, ()):
                asked.consumer_masks[index] |= self._readers[index].bit(RequestBit("final", slot, precision))
            maker = self._model.producer[tensor]
            asked.producer_masks[maker] |= self._makers[maker].bit(RequestBit("final", tensor, precision))
            asked.consumer_masks[maker] |= self._readers[maker].bit(RequestBit("renamed", tensor))
        self._shared_scales.mark_shared_scales(asked)
        for index in self._products:  # nodes are in order: the Add of a bias comes later
            bias = self._readers[index][asked.consumer_masks[index]].bias
            if bias is not None:
                asked.consumer_masks[bias[0]] |= self._readers[bias[0]].bit(bias[1])
        nodes = list(map(getitem, self._readers[:GRAPH_INPUT_INDEX], asked.consumer_masks))
        return InsertionPlan(nodes, list(map(getitem, self._makers, asked.producer_masks)))

    def _quantized_outputs(self, asked: NodeRequests) -> list[tuple[str, str]]:
        slots = self._readers[GRAPH_INPUT_INDEX][asked.consumer_masks[GRAPH_INPUT_INDEX]]
        return [(self._model.outputs[int(slot)], precision) for slot, precision in sorted(slots.items())]

    def _unused_constants(self, draft: InsertionPlan) -> frozenset[str]:
        """Return the constants of the float model that the nodes of a plan do not read."""
        replaced = Counter(_join(map(attrgetter("replaced"), draft.nodes)))
        return frozenset(name for name, count in replaced.items() if count >= self._uses[name])

    def _graph_pieces(self, draft: InsertionPlan) -> list[bytes]:
        """Return the encoded pieces of the graph without its constants."""
        ahead = [
            self._header,
            draft.behind[GRAPH_INPUT_INDEX].nodes,
            *map(attrgetter("node"), draft.stored),
        ]
        pairs = zip(map(attrgetter("node"), draft.nodes), map(attrgetter("nodes"), draft.behind), strict=False)
        grid = dict.fromkeys(_join(map(attrgetter("grid"), draft.behind)))
        return [*ahead, *chain.from_iterable(pairs), *grid]
