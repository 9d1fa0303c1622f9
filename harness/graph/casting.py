"""Placements of a float model in its cast form: the same nodes at FP16 or BF16, with Casts between some of them.

What casts a model (ModelOpt's autocast) keeps the names of its nodes, so an insertion point is found again by node and
input; the tensor there may be a Cast's. Spaces, digests and imported placements stay those of the float model, whatever
precision the rest of it runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from harness.errors import UserError
from harness.graph.dialects import Dialect
from harness.graph.insert import Inserter
from harness.graph.model import Model
from search.space import Edge, Resolved, digest_of

__all__ = ["CastInserter", "carried"]


def carried(resolved: Resolved, cast: Model) -> Resolved:
    """The same inputs of the same nodes in a cast model.

    Raises:
        UserError: A node is not there any more.
    """
    nodes = {node.name: node for node in cast.nodes}

    def there(edge: Edge) -> Edge:
        if not edge.consumer:
            return edge
        node = nodes.get(edge.consumer)
        if node is None:
            raise UserError(f"{cast.source}: casting it took node {edge.consumer!r} away; use precision: f32")
        return Edge(node.inputs[edge.slot], edge.consumer, edge.slot)

    return tuple(sorted((there(edge), precision) for edge, precision in resolved))


class CastInserter(Inserter):
    """Inserts placements of a float model into its cast form.

    Args:
        cast: The cast model.
        dialect: How the runtime wants its Q/DQ.
        ranges: Of the float model's activations; a Cast changes none.
    """

    def __init__(self, cast: Model, dialect: Dialect, ranges: Mapping[str, tuple[float, float]]) -> None:
        super().__init__(cast, dialect, _through_casts(cast, ranges))
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


def _through_casts(cast: Model, ranges: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    found = dict(ranges)
    for node in cast.nodes:
        if node.op == "Cast":
            before, after = node.inputs[0], node.outputs[0]
            if before in found:
                found.setdefault(after, found[before])
            elif after in found:
                found[before] = found[after]
    return found
