"""Insertion of a placement's Q/DQ pairs into a model, with a protobuf message or a file as result.

An activation gets one pair per precision, directly after its producer, which all quantized consumers share; a constant
is stored quantized with a DequantizeLinear; float consumers read the float tensor. Files are joined from encoded pieces
without sorting or parsing the graph, see `harness.graph.quantize.node_variants` and `protobuf_wire`.

A placement of a float model may also be inserted into its cast version: the same nodes at FP16 or BF16, with some
Casts. ModelOpt's autocast keeps the names of nodes, so an insertion point is found by node and input; the tensor there
may be the result of a Cast. Spaces, digests and imported placements are those of the float model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from operator import attrgetter
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
from harness.graph.quantize.constants import ConstantQuantizer, QuantizedConstant
from harness.graph.quantize.node_variants import GRAPH_INPUT_INDEX, NodeVariants
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES, NumericChoices
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.quantize.scales import ActivationScales
from harness.graph.rules.dialects import Dialect
from harness.plugins.registry import load_plugin
from search.space import Edge, Resolved, edges_digest


def _join(parts: Iterable[Iterable[Any]]) -> Iterable[Any]:
    """Return the items of all parts, of which most are empty."""
    return chain.from_iterable(filter(None, parts))


class Inserter:
    """Writer of placements of a float model as ONNX models in one dialect. Not thread-safe.

    Args:
        model: Float model.
        dialect: Dialect of the runtime.
        ranges: Smallest and largest value of each activation that may be quantized, by tensor name.
        choices: Estimators and scales of the pairs.

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
        self._constants = ConstantQuantizer(model, dialect, load_plugin("weight estimator", choices.weights))
        scales = ActivationScales(model, dialect, ranges, choices)
        self._variants = NodeVariants(model, dialect, scales, self._constants)
        self._uses = Counter(name for node in model.nodes for name in (*node.inputs, *node.captures))
        self._uses.update(model.outputs)
        self._header = protobuf_wire.encode_fields(model.proto.graph, protobuf_wire.GRAPH_HEADER_FIELDS)

    def insert(self, resolved: Resolved) -> onnx.ModelProto:
        """Return a copy of the model with the Q/DQ pairs of quantized edges, and with all weights inside."""
        resolved = self.map_edges(resolved)
        pieces, stored, floats = self._encode_graph(resolved)
        proto = onnx.ModelProto.FromString(protobuf_wire.encode_model(self._model.proto, pieces))
        constants = [self._model.constants[name] for name in floats]
        constants += [tensor for constant in stored for tensor in constant.tensors]
        source, before = self._model.source, self._model.proto.graph
        inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
        if inputs != [value.name for value in before.input] or tuple(outputs) != self._model.outputs:
            raise AssertionError(f"{source}: insertion changed inputs or outputs: {inputs}, {outputs}")
        try:
            check_valid(proto, constants)
        except checker.ValidationError as error:
            raise AssertionError(f"{source}: insertion gave no valid ONNX: {error}") from error
        extend_field(proto.graph.initializer, constants)
        missing, extra = diff_edges(resolved, proto)
        if missing or extra:
            raise AssertionError(f"{source}: insertion lost {missing[:3]} and added {extra[:3]}")
        return proto

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path:
        """Write a candidate's file and return its path; candidates in a folder share data files with large weights.

        Args:
            resolved: Quantized edges.
            folder: Folder of the files; created if missing.
            name: Name of the file without suffix; None: the digest of the placement.
        """
        pieces, stored, floats = self._encode_graph(self.map_edges(resolved))
        folder.mkdir(parents=True, exist_ok=True)
        records = [
            *map(self._constants.float_records.__getitem__, floats),
            *self._constants.write_files(stored, folder),
        ]
        path = folder / f"{name or edges_digest(resolved)}.onnx"
        path.write_bytes(protobuf_wire.encode_model(self._model.proto, [*pieces, *records]))
        return path

    def export(self, resolved: Resolved, path: Path) -> Path:
        """Write the model of `insert` to one file, or above 1.9 GB to the file and `<name>.data`; return `path`."""
        return write_model(self.insert(resolved), path)

    def count_pairs(self, resolved: Resolved) -> int:
        """Return the number of Q/DQ pairs of a placement, which `qdq_graph.count_pairs` returns for its file.

        A pair on an activation counts once for all its consumers. A constant counts once for each precision, even if
        consumers read it with different scales. A bias in INT32 does not count.
        """
        nodes, behind = self._variants.choose(self.map_edges(resolved))
        constants = {constant for variant in nodes for constant in variant.quantized}
        return sum(encoded.pairs for encoded in behind) + len(constants)

    def map_edges(self, resolved: Resolved) -> Resolved:
        """Return the edges of a placement in the model of the files: here the same edges, in `CastInserter` others."""
        return resolved

    def _encode_graph(self, resolved: Resolved) -> tuple[list[bytes], Collection[QuantizedConstant], list[str]]:
        """Return the pieces of a graph without its constants, and its quantized and its float constants."""
        nodes, behind = self._variants.choose(resolved)
        stored = dict.fromkeys(_join(map(attrgetter("stored"), nodes)))
        pieces = [self._header, behind[GRAPH_INPUT_INDEX].nodes, *map(attrgetter("node"), stored)]
        pairs = zip(map(attrgetter("node"), nodes), map(attrgetter("nodes"), behind), strict=False)
        pieces += chain.from_iterable(pairs)
        pieces += dict.fromkeys(_join(map(attrgetter("grid"), behind)))
        replaced = Counter(_join(map(attrgetter("replaced"), nodes)))
        unused = {name for name, count in replaced.items() if count >= self._uses[name]}
        return pieces, stored, [name for name in self._model.constants if name not in unused]


def require_all_nodes(edges: Iterable[Edge], cast: Model) -> None:
    """Raise `UserError` if a cast model lacks a node whose input may be quantized."""
    lost = sorted({edge.consumer for edge in edges if edge.consumer} - cast.nodes_by_name.keys())
    if lost:
        named = ", ".join(map(repr, lost[:3])) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise UserError(f"{cast.source}: the cast removed node {named}; use precision: f32")


class CastInserter(Inserter):
    """Writer of placements of a float model with the operators of its cast (FP16) version.

    Args:
        cast: Cast model.
        dialect: Dialect of the runtime.
        ranges: Range of each activation by its tensor in the float model; a tensor of the cast model gets that of the
            same input or output of the node with the same name.
        model: Float model.
        choices: Estimators and scales of the pairs. A depthwise Conv gets one scale if its data has another name in the
            cast model.
    """

    def __init__(
        self,
        cast: Model,
        dialect: Dialect,
        ranges: Mapping[str, tuple[float, float]],
        model: Model,
        choices: NumericChoices = DEFAULT_CHOICES,
    ) -> None:
        found: dict[str, tuple[float, float]] = {}
        for node in model.nodes:
            same = cast.nodes_by_name.get(node.name)
            if same is None:
                continue
            # Names of tensors differ, because Casts of the model are merged with new ones or removed. Operators of a
            # newer operator set may have more inputs (the axes of ReduceMean).
            inputs = zip(node.inputs, same.inputs, strict=False)
            for before, after in (*inputs, *zip(node.outputs, same.outputs, strict=False)):
                if before in ranges:  # several tensors of the float model may have become one
                    low, high = ranges[before]
                    known = found.get(after, (low, high))
                    found[after] = min(low, known[0]), max(high, known[1])
        super().__init__(cast, dialect, {**ranges, **found}, choices)

    def map_edges(self, resolved: Resolved) -> Resolved:
        require_all_nodes((edge for edge, _ in resolved), self._model)
        nodes, found = self._model.nodes_by_name, []
        for edge, precision in resolved:  # nodes of the same names read other tensors
            tensor = nodes[edge.consumer].inputs[edge.slot] if edge.consumer else edge.tensor
            found.append((Edge(tensor, edge.consumer, edge.slot), precision))
        return tuple(sorted(found))
