"""Q/DQ models with more quantized edges, made without calibration: for timing only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from harness.graph.qdq.qdq_graph import DEQUANTIZE, QUANTIZE, read_qdq_graph
from search.space import Edge


def write_with_edges(shipped: Path, edges: Sequence[Edge], path: Path) -> bool:
    """Write a Q/DQ model with more edges quantized, each tensor by its own pair or one like another tensor's.

    Args:
        shipped: The model.
        edges: Inputs of nodes, with the names that they have in the model.
        path: File to write, in the folder of the model because of external data.

    Returns:
        Whether there is a pair to copy.
    """
    graph = read_qdq_graph(shipped)
    pairs = {edge.tensor: graph.edge_pair(edge) for edge in graph.edges}
    pairs = {tensor: pair for tensor, pair in pairs.items() if pair[0] is not None}
    if not pairs:
        return False
    nodes, readers = list(graph.proto.graph.node), dict(zip(graph.labels, graph.proto.graph.node, strict=True))
    for tensor in dict.fromkeys(edge.tensor for edge in edges):
        pair = pairs.get(tensor) or _copy_pair(next(iter(pairs.values())), tensor)
        rest = [node for node in nodes if not any(node is own for own in pair)]
        place = next((i for i, node in enumerate(rest, 1) if tensor in node.output), 0)
        nodes = [*rest[:place], *pair, *rest[place:]]  # in front of all readers
        for edge in edges:
            if edge.tensor == tensor:
                readers[edge.consumer].input[edge.slot] = pair[1].output[0]
    ordered = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.proto.graph.node[:]
    graph.proto.graph.node.extend(ordered)
    onnx.save(graph.proto, path)
    return True


def _copy_pair(pair: tuple[Any, Any], tensor: str) -> tuple[Any, Any]:
    """Return a pair for a tensor with the scale and zero point of another one."""
    quantize, dequantize = (onnx.NodeProto.FromString(node.SerializeToString()) for node in pair)
    quantize.input[0] = tensor
    for node, op in ((quantize, QUANTIZE), (dequantize, DEQUANTIZE)):
        node.name = node.output[0] = f"{tensor}_cost_{op}"
    dequantize.input[0] = quantize.output[0]
    return quantize, dequantize
