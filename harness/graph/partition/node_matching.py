"""Which nodes of two graphs compute the same, whatever they are called; private to
`harness.graph.qdq.import_placement`.

Both graphs are numbered with the data: a node by its operator and the numbers of what it reads, so equal numbers mean
equal computations from the inputs of the model on. Q/DQ pairs, casts and identities are seen through; constants count
by their shape, for a quantized weight has no other thing in common with the float one. Nodes of one number (the
projections of query and key, say) are paired in the order of the file, where both graphs have equally many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

import onnx
from onnx import TensorProto

__all__ = ["match_equivalent_nodes"]

_TRANSPARENT_OPS = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear"})
_INTEGER_TYPES = frozenset(
    {TensorProto.INT64, TensorProto.BOOL}
)  # of shapes and axes, which newer opsets spell otherwise


def match_equivalent_nodes(theirs: onnx.GraphProto, ours: onnx.GraphProto) -> dict[str, str]:
    """For the first output of each of their nodes that has a counterpart, the first output of that one."""
    numbers: dict[Hashable, int] = {}
    found, wanted = (_number_computations(graph, numbers) for graph in (theirs, ours))
    twins: dict[str, str] = {}
    for number, names in found.items():
        counterparts = wanted.get(number, [])
        if len(counterparts) == len(names):
            twins.update(zip(names, counterparts, strict=True))
    return twins


def _number_computations(graph: onnx.GraphProto, numbers: dict[Hashable, int]) -> Mapping[int, list[str]]:
    """First outputs of the nodes by number; equal computations get equal numbers in all graphs of one table."""

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    constants = {tensor.name: tensor for tensor in graph.initializer}
    known = {name: number(("constant", *tensor.dims)) for name, tensor in constants.items()}
    inputs = [value.name for value in graph.input if value.name not in constants]
    known.update((name, number(("input", place))) for place, name in enumerate(inputs))
    skipped = {name for name, tensor in constants.items() if tensor.data_type in _INTEGER_TYPES}
    found: dict[int, list[str]] = defaultdict(list)
    for node in graph.node:
        if node.op_type == "Constant":
            skipped.update(node.output)
        elif node.op_type in _TRANSPARENT_OPS and node.input[0] in known:
            known[node.output[0]] = known[node.input[0]]
        else:
            reads = tuple(known.get(name, -1) for name in node.input if name and name not in skipped)
            own = number((node.domain, node.op_type, reads))
            found[own].append(next(name for name in node.output if name))
            known.update((name, number((own, place))) for place, name in enumerate(node.output))
    return found
