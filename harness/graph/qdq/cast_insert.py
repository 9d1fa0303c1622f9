"""Insertion of a float model's placements into its cast version: the same nodes at FP16 or BF16, with some Casts.

ModelOpt's autocast keeps the names of nodes, so an insertion point is found by node and input; the tensor there may be
the result of a Cast. Spaces, digests and imported placements are those of the float model at any float precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.base.errors import UserError
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.quantize.numeric_choices import DEFAULT_CHOICES, NumericChoices
from harness.graph.rules.dialects import Dialect
from search.space import Edge, Resolved

Ranges = Mapping[str, tuple[float, float]]


def map_edges_to_cast_model(resolved: Resolved, cast: Model) -> Resolved:
    """Return quantized edges with the tensor names of a cast model: its nodes of the same names read other tensors.

    Args:
        resolved: Quantized edges of the float model, each with its precision.
        cast: Copy of the float model in which operators were cast to FP16.

    Raises:
        UserError: The cast model lacks a node.
    """
    nodes = {node.name: node for node in cast.nodes}
    require_all_nodes((edge for edge, _ in resolved), cast)

    def there(edge: Edge) -> Edge:
        return Edge(nodes[edge.consumer].inputs[edge.slot], edge.consumer, edge.slot) if edge.consumer else edge

    return tuple(sorted((there(edge), precision) for edge, precision in resolved))


def require_all_nodes(edges: Iterable[Edge], cast: Model) -> None:
    """Raise an error if a cast model lacks a node whose input may be quantized.

    Raises:
        UserError: Nodes are missing; the message names the first ones.
    """
    there = {node.name for node in cast.nodes}
    lost = sorted({edge.consumer for edge in edges if edge.consumer} - there)
    if lost:
        named = ", ".join(map(repr, lost[:3])) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise UserError(f"{cast.source}: the cast removed node {named}; use precision: f32")


class CastInserter(Inserter):
    """Writer of placements of a float model with the operators of its cast (FP16) version.

    Args:
        cast: Cast model.
        dialect: Dialect of the runtime.
        ranges: Range of each activation by its tensor in the float model.
        model: Float model; ranges are assigned to tensors of the cast model by node and input or output. None: by the
            names of tensors.
        choices: Estimators and scales of the pairs. A depthwise Conv gets one scale if its data has another name in the
            cast model.
    """

    def __init__(
        self,
        cast: Model,
        dialect: Dialect,
        ranges: Ranges,
        model: Model | None = None,
        choices: NumericChoices = DEFAULT_CHOICES,
    ) -> None:
        found = _ranges_by_name(cast, ranges) if model is None else _ranges_by_position(model, cast, ranges)
        super().__init__(cast, dialect, found, choices)
        self._cast = cast

    def map_edges(self, resolved: Resolved) -> Resolved:
        return map_edges_to_cast_model(resolved, self._cast)


def _ranges_by_position(model: Model, cast: Model, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the range of each tensor of a cast model, which is found by node and input or output.

    Names of tensors differ, because Casts of the model are merged with new ones or removed. If several tensors of the
    float model become one, its range includes all of theirs.
    """
    nodes = {node.name: node for node in cast.nodes}
    found: dict[str, tuple[float, float]] = {}
    for node in model.nodes:
        same = nodes.get(node.name)
        if same is None:
            continue
        # Operators of a newer operator set may have more inputs (the axes of ReduceMean).
        inputs, outputs = (
            zip(a, b, strict=False) for a, b in ((node.inputs, same.inputs), (node.outputs, same.outputs))
        )
        for before, after in (*inputs, *outputs):
            if before in ranges:
                low, high = ranges[before]
                known = found.get(after, (low, high))
                found[after] = min(low, known[0]), max(high, known[1])
    return {**ranges, **found}


def _ranges_by_name(cast: Model, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the range of each tensor of a cast model, by the names that ModelOpt gives to results of its Casts."""
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
