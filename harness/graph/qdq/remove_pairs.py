"""A Q/DQ model with most of its pairs taken out of the way, to see what the others do alone."""

from __future__ import annotations

from pathlib import Path

import onnx

from harness.graph.io.reader import read_model
from harness.graph.io.writer import write_model
from harness.graph.qdq.read_edges import unique_node_names

__all__ = ["PairRemover"]

_NON_CONSUMER_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast", "Identity"})


class PairRemover:
    """Takes pairs out of a Q/DQ model, node by node: an input is read in front of the QuantizeLinear.

    Constants that are stored quantized stay so, in every variant.

    Args:
        path: A Q/DQ model, whoever made it.

    Raises:
        UserError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._proto, _ = read_model(path, str(path))
        makers = {name: node for node in self._proto.graph.node for name in node.output if name}
        self._inputs: dict[str, dict[int, str]] = {}
        self._labels = unique_node_names(self._proto.graph)
        for node, label in zip(self._proto.graph.node, self._labels, strict=True):
            if node.op_type in _NON_CONSUMER_OPS:
                continue
            for slot, name in enumerate(node.input):
                dequantize = makers.get(name)
                if dequantize is None or dequantize.op_type != "DequantizeLinear":
                    continue
                quantize = makers.get(dequantize.input[0])
                if quantize is not None and quantize.op_type == "QuantizeLinear":
                    self._inputs.setdefault(label, {})[slot] = quantize.input[0]

    @property
    def quantized_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that read pairs, as edges call them, in the order of the graph."""
        return tuple(self._inputs)

    def write(self, kept_nodes: frozenset[str], path: Path) -> Path:
        """Write the model with the pairs in front of these nodes alone; other nodes read what is in front of theirs."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        for node, label in zip(proto.graph.node, self._labels, strict=True):
            if label in self._inputs and label not in kept_nodes:
                for slot, source in self._inputs[label].items():
                    node.input[slot] = source
        return write_model(proto, path)
