"""Reader of Q/DQ models of any tool, for `import_insertion_points`."""

from __future__ import annotations

from typing import Any

from harness.graph.io.files import to_proto
from harness.graph.qdq.qdq_graph import QDQGraph


def get_quantized_tensors(onnx_model: Any) -> set[str]:
    """Return the float model's names of the tensors with a Q/DQ pair in a `ModelProto` or `onnx_graphsurgeon.Graph`.

    ModelOpt's function of this name returns the names of the quantized tensors, which no float model has;
    `import_insertion_points` accepts both.
    """
    return {edge.tensor for edge in QDQGraph(to_proto(onnx_model)).edges}
