"""Placements of a float model in its cast form: the same nodes at FP16 or BF16, with Casts between some of them.

What casts a model (ModelOpt's autocast) keeps the names of its nodes, so an insertion point is found again by node and
input; the tensor there may be a Cast's. Spaces, digests and imported placements stay those of the float model, whatever
precision the rest of it runs in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx

from harness.errors import UserError
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialects import Dialect
from search.space import Edge, Resolved, digest_of

__all__ = ["CastInserter", "carried", "refuse_lost_nodes"]

LARGEST_HALF = 65504.0
Ranges = Mapping[str, tuple[float, float]]


def carried(resolved: Resolved, cast: Model) -> Resolved:
    """The same inputs of the same nodes in a cast model.

    Raises:
        UserError: A node is not there any more.
    """
    nodes = {node.name: node for node in cast.nodes}
    refuse_lost_nodes((edge for edge, _ in resolved), cast)

    def there(edge: Edge) -> Edge:
        return Edge(nodes[edge.consumer].inputs[edge.slot], edge.consumer, edge.slot) if edge.consumer else edge

    return tuple(sorted((there(edge), precision) for edge, precision in resolved))


def refuse_lost_nodes(edges: Iterable[Edge], cast: Model) -> None:
    """Refuse a cast model that lacks a node whose input may be quantized.

    Raises:
        UserError: With the names of the nodes.
    """
    there = {node.name for node in cast.nodes}
    lost = sorted({edge.consumer for edge in edges if edge.consumer} - there)
    if lost:
        named = ", ".join(map(repr, lost[:3])) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise UserError(f"{cast.source}: casting it took node {named} away; use precision: f32")


class CastInserter(Inserter):
    """Inserts placements of a float model into its cast form.

    Args:
        cast: The cast model.
        dialect: How the runtime wants its Q/DQ.
        ranges: Range of each activation by its tensor in the float model; at FP16 values end at 65504.
        model: The float model, by whose nodes and inputs the ranges are carried over; without it, by names of tensors.
    """

    def __init__(self, cast: Model, dialect: Dialect, ranges: Ranges, model: Model | None = None) -> None:
        found = _by_name(cast, ranges) if model is None else _by_place(model, cast, ranges)
        super().__init__(cast, dialect, _within_float16(cast, found))
        self._cast = cast

    def insert(self, resolved: Resolved) -> onnx.ModelProto:
        """See `Inserter.insert`."""
        return super().insert(carried(resolved, self._cast))

    def write(self, resolved: Resolved, folder: Path, *, name: str | None = None) -> Path:
        """See `Inserter.write`; the name is by default the digest in the float model."""
        return super().write(carried(resolved, self._cast), folder, name=name or digest_of(resolved))

    def pairs(self, resolved: Resolved) -> int:
        """See `Inserter.pairs`."""
        return super().pairs(carried(resolved, self._cast))


def _by_place(model: Model, cast: Model, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the range of each tensor of a cast model, by the node and input or output where the float model has it.

    Casting merges the model's own Casts with new ones or drops them, so names of tensors change. Where several tensors
    of the float model have become one, its range includes all of theirs.
    """
    nodes = {node.name: node for node in cast.nodes}
    found: dict[str, tuple[float, float]] = {}
    for node in model.nodes:
        same = nodes.get(node.name)
        if same is None:
            continue
        # A newer operator set may have more inputs (ReduceMean takes its axes there).
        inputs, outputs = (
            zip(a, b, strict=False) for a, b in ((node.inputs, same.inputs), (node.outputs, same.outputs))
        )
        for before, after in (*inputs, *outputs):
            if before in ranges:
                low, high = ranges[before]
                known = found.get(after, (low, high))
                found[after] = min(low, known[0]), max(high, known[1])
    return {**ranges, **found}


def _within_float16(cast: Model, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return ranges cut to what FP16 holds for tensors of that type, whose scale would be infinite otherwise."""
    found = dict(ranges)
    for name, (low, high) in ranges.items():
        if name in cast.types and cast.types[name].dtype == "float16":
            found[name] = max(low, -LARGEST_HALF), min(high, LARGEST_HALF)
    return found


def _by_name(cast: Model, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the range of each tensor of a cast model, by the names that ModelOpt gives to what its Casts make."""
    found = dict(ranges)
    for node in cast.nodes:
        if node.op == "Cast":
            before, after = node.inputs[0], node.outputs[0]
            origin = before if before in found else after.partition("_cast_to_")[0]
            if origin in found:
                found.setdefault(after, found[origin])
            elif after in found:
                found[before] = found[after]
    return found
