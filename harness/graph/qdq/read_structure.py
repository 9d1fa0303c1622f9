"""What the ONNX file asked for: its linear operators, which of their inputs are quantized, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from harness.errors import UserError
from harness.graph.qdq.read_edges import node_name, read_qdq_edges
from harness.graph.rules.operator_sets import LINEAR_OPS

__all__ = ["QDQGraph", "read_qdq_graph"]

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
TRANSPARENT_OPS = frozenset({"Cast", "Identity", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze"})
FOLDABLE_OPS = frozenset({"Add", "BatchNormalization", "Div", "Identity", "Mul", "Sub"})
"""What runtimes fold into the linear operator in front, which some of them then call by the folded one's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQGraph:
    """A Q/DQ model as its file has it.

    Attributes:
        operators: Operator of each node by name.
        linear: Precisions of data and weight of each linear operator by name; None where an input is float.
        pairs: Names of its Q and DQ nodes.
        consumers: By linear operator, the operators that read its output, pairs included.
        unfusable_reasons: By Q or DQ node, what no runtime can fuse about it.
        pair_neighbours: By Q or DQ node, the node in front of the pair and those behind it.
        folded_into: By the name of a node that may be folded into a linear operator, or of what it or the linear
            operator puts out, the linear operators in front of it; one as a rule.
    """

    operators: Mapping[str, str]
    linear: Mapping[str, tuple[str | None, str | None]]
    pairs: frozenset[str]
    consumers: Mapping[str, tuple[str, ...]]
    unfusable_reasons: Mapping[str, str]
    pair_neighbours: Mapping[str, tuple[str, tuple[str, ...]]]
    folded_into: Mapping[str, tuple[str, ...]]


def read_qdq_graph(path: Path) -> QDQGraph:
    """Read a model's structure.

    Raises:
        UserError: No ONNX file.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise UserError(f"{path}: no ONNX model ({error})") from error
    graph = _GraphIndex(proto, path.parent)
    edges = {(edge.consumer, edge.slot): precision for edge, precision in read_qdq_edges(proto).items()}
    linear = [node for node in proto.graph.node if node.op_type in LINEAR_OPS]
    pairs = [node for node in proto.graph.node if node.op_type in (QUANTIZE, DEQUANTIZE)]
    return QDQGraph(
        operators={node_name(node): node.op_type for node in proto.graph.node},
        linear={node_name(node): (edges.get((node_name(node), 0)), edges.get((node_name(node), 1))) for node in linear},
        pairs=frozenset(node_name(node) for node in pairs),
        consumers={node_name(node): tuple(graph.consumers(node.output[0])) for node in linear},
        unfusable_reasons={node_name(node): text for node in pairs if (text := graph.unfusable_reason(node))},
        pair_neighbours={
            node_name(node): (graph.producer_label(node), tuple(graph.consumer_labels(node))) for node in pairs
        },
        folded_into=graph.find_folded(linear),
    )


class _GraphIndex:
    """Who makes and who reads a tensor."""

    def __init__(self, proto: onnx.ModelProto, folder: Path) -> None:
        self._folder = folder
        self._maker = {name: node for node in proto.graph.node for name in node.output}
        self._readers: dict[str, list[Any]] = {}
        for node in proto.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        for node in proto.graph.node:
            if node.op_type == "Constant":
                self._constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")

    def consumers(self, tensor: str) -> Iterator[str]:
        """Operators that read a tensor."""
        return (node.op_type for node in self._readers.get(tensor, ()))

    def producer_label(self, node: Any) -> str:
        """The node in front of a pair, or "a constant", "an input"."""
        name = node.input[0]
        while (maker := self._maker.get(name)) is not None and maker.op_type in (QUANTIZE, DEQUANTIZE):
            name = maker.input[0]
        if maker is None:
            return "a constant" if name in self._constants else f"input {name}"
        return node_name(maker)

    def consumer_labels(self, node: Any) -> Iterator[str]:
        """The nodes behind a pair."""
        for reader in self._readers.get(node.output[0], ()):
            if reader.op_type in (QUANTIZE, DEQUANTIZE) and node.op_type == QUANTIZE:
                yield from self.consumer_labels(reader)
            else:
                yield node_name(reader)

    def find_folded(self, linear: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """By name of what may be folded into linear operators, those in front of it; see `QDQGraph`."""
        found: dict[str, tuple[str, ...]] = {}
        for node in linear:
            names = [node.output[0]]
            while (reader := self._single_consumer(names[-1])) is not None and reader.op_type in FOLDABLE_OPS:
                names += [node_name(reader), reader.output[0]]
            if reader is not None and reader.op_type == QUANTIZE:  # what the operator puts out quantized
                names.append(node_name(reader))
            for name in dict.fromkeys(names):
                found[name] = (*found.get(name, ()), node_name(node))
        return found

    def _single_consumer(self, tensor: str) -> Any:
        readers = self._readers.get(tensor, [])
        return readers[0] if len(readers) == 1 else None

    def unfusable_reason(self, node: Any) -> str:
        """Why no runtime fuses a Q or DQ; "" where nothing speaks against it."""
        if node.input[1] not in self._constants:
            return "its scale is computed, not constant"
        if node.op_type != DEQUANTIZE:
            return ""
        before = self._maker.get(node.input[0])
        while before is not None and before.op_type in TRANSPARENT_OPS:
            before = self._maker.get(before.input[0])
        if before is None or before.op_type != QUANTIZE or before.input[1] not in self._constants:
            return ""
        if not np.array_equal(self._values(before.input[1]), self._values(node.input[1])):
            return "its scale differs from that of the QuantizeLinear in front of it"
        zeros = [self._values(pair.input[2]) for pair in (before, node) if len(pair.input) > 2]
        if len(zeros) == 2 and not np.array_equal(*zeros):
            return "its zero point differs from that of the QuantizeLinear in front of it"
        return ""

    def _values(self, name: str) -> Any:
        tensor = self._constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor, base_dir=str(self._folder)).astype(np.float64)
