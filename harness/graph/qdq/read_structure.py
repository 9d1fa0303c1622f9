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
from harness.graph.qdq.read_edges import delivered, label
from harness.graph.rules.operator_sets import LINEAR

__all__ = ["Asked", "read_asked"]

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
MOVES = frozenset({"Cast", "Identity", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze"})
FOLDED = frozenset({"Add", "BatchNormalization", "Div", "Identity", "Mul", "Sub"})
"""What runtimes fold into the linear operator in front, which some of them then call by the folded one's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A Q/DQ model as its file has it.

    Attributes:
        operators: Operator of each node by name.
        linear: Precisions of data and weight of each linear operator by name; None where an input is float.
        pairs: Names of its Q and DQ nodes.
        behind: By linear operator, the operators that read its output, pairs included.
        odd: By Q or DQ node, what no runtime can fuse about it.
        feeds: By Q or DQ node, the node in front of the pair and those behind it.
        stands_for: By the name of a node that may be folded into a linear operator, or of what it or the linear
            operator puts out, the linear operators in front of it; one as a rule.
    """

    operators: Mapping[str, str]
    linear: Mapping[str, tuple[str | None, str | None]]
    pairs: frozenset[str]
    behind: Mapping[str, tuple[str, ...]]
    odd: Mapping[str, str]
    feeds: Mapping[str, tuple[str, tuple[str, ...]]]
    stands_for: Mapping[str, tuple[str, ...]]


def read_asked(path: Path) -> Asked:
    """Read a model's structure.

    Raises:
        UserError: No ONNX file.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise UserError(f"{path}: no ONNX model ({error})") from error
    graph = _Graph(proto, path.parent)
    edges = {(edge.consumer, edge.slot): precision for edge, precision in delivered(proto).items()}
    linear = [node for node in proto.graph.node if node.op_type in LINEAR]
    pairs = [node for node in proto.graph.node if node.op_type in (QUANTIZE, DEQUANTIZE)]
    return Asked(
        operators={label(node): node.op_type for node in proto.graph.node},
        linear={label(node): (edges.get((label(node), 0)), edges.get((label(node), 1))) for node in linear},
        pairs=frozenset(label(node) for node in pairs),
        behind={label(node): tuple(graph.readers(node.output[0])) for node in linear},
        odd={label(node): text for node in pairs if (text := graph.oddity(node))},
        feeds={label(node): (graph.source(node), tuple(graph.users(node))) for node in pairs},
        stands_for=graph.stands_for(linear),
    )


class _Graph:
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

    def readers(self, tensor: str) -> Iterator[str]:
        """Operators that read a tensor."""
        return (node.op_type for node in self._readers.get(tensor, ()))

    def source(self, node: Any) -> str:
        """The node in front of a pair, or "a constant", "an input"."""
        name = node.input[0]
        while (maker := self._maker.get(name)) is not None and maker.op_type in (QUANTIZE, DEQUANTIZE):
            name = maker.input[0]
        if maker is None:
            return "a constant" if name in self._constants else f"input {name}"
        return label(maker)

    def users(self, node: Any) -> Iterator[str]:
        """The nodes behind a pair."""
        for reader in self._readers.get(node.output[0], ()):
            if reader.op_type in (QUANTIZE, DEQUANTIZE) and node.op_type == QUANTIZE:
                yield from self.users(reader)
            else:
                yield label(reader)

    def stands_for(self, linear: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """By name of what may be folded into linear operators, those in front of it; see `Asked`."""
        found: dict[str, tuple[str, ...]] = {}
        for node in linear:
            names = [node.output[0]]
            while (reader := self._only_reader(names[-1])) is not None and reader.op_type in FOLDED:
                names += [label(reader), reader.output[0]]
            if reader is not None and reader.op_type == QUANTIZE:  # what the operator puts out quantized
                names.append(label(reader))
            for name in dict.fromkeys(names):
                found[name] = (*found.get(name, ()), label(node))
        return found

    def _only_reader(self, tensor: str) -> Any:
        readers = self._readers.get(tensor, [])
        return readers[0] if len(readers) == 1 else None

    def oddity(self, node: Any) -> str:
        """Why no runtime fuses a Q or DQ; "" where nothing speaks against it."""
        if node.input[1] not in self._constants:
            return "its scale is computed, not constant"
        if node.op_type != DEQUANTIZE:
            return ""
        before = self._maker.get(node.input[0])
        while before is not None and before.op_type in MOVES:
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
