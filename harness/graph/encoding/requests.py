"""What a placement asks of a model: checked, and sorted by the tensors that get Q/DQ pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from harness.errors import UserError
from harness.graph.dialects import Dialect
from harness.graph.model import Model, Node
from search.space import Edge, Resolved

__all__ = ["Asked", "Requests", "Site"]

Site = tuple[int, int]
"""An input of the model: index of the node, and slot."""

_FLOATS = frozenset({"float", "float16", "bfloat16"})


@dataclass(slots=True)
class Asked:
    """A placement, sorted.

    Attributes:
        sites: Precision by input.
        activations: Who reads the pair of a tensor at a precision; nobody where the tensor only leaves the model.
        constants: Inputs that read a quantized constant.
        finals: Precision of the tensors that leave the model quantized.
    """

    sites: dict[Site, str] = field(default_factory=dict)
    activations: dict[tuple[str, str], list[Site]] = field(default_factory=dict)
    constants: list[Site] = field(default_factory=list)
    finals: dict[str, str] = field(default_factory=dict)


class Requests:
    """Checks each edge once; many placements ask for it again.

    Args:
        model: The float model.
        dialect: Whose precisions are offered.
    """

    def __init__(self, model: Model, dialect: Dialect) -> None:
        self._model = model
        self._dialect = dialect
        self._index = {node.name: node.index for node in model.nodes}
        self._known: dict[tuple[str, int, str, str], tuple[Site, tuple[str, str] | None]] = {}

    def sort(self, resolved: Resolved) -> Asked:
        """Sort the edges of a placement.

        Raises:
            UserError: An edge is not one of this model's, cannot be quantized, or is asked for at two precisions.
        """
        asked, known = Asked(), self._known
        sites, activations = asked.sites, asked.activations
        for edge, precision in resolved:
            if not edge.consumer:
                asked.finals[self._final(edge, precision)] = precision
                activations.setdefault((edge.tensor, precision), [])
                continue
            key = (edge.consumer, edge.slot, edge.tensor, precision)
            found = known.get(key)
            if found is None:
                found = known[key] = self._place(edge, precision)
            site, source = found
            sites[site] = precision
            if source is None:
                asked.constants.append(site)
            elif source in activations:
                activations[source].append(site)
            else:
                activations[source] = [site]
        if len(sites) + len(asked.finals) < len(resolved):
            raise UserError(f"{self._model.source}: the placement asks for one edge twice")
        return asked

    def _place(self, edge: Edge, precision: str) -> tuple[Site, tuple[str, str] | None]:
        """Where an edge leads, and the pair that it needs; None for a constant, which is stored quantized."""
        source = None if edge.tensor in self._model.constants else (edge.tensor, precision)
        return (self._consumer(edge, precision).index, edge.slot), source

    def _consumer(self, edge: Edge, precision: str) -> Node:
        """The node that an edge leads into."""
        index = self._index.get(edge.consumer)
        node = None if index is None else self._model.nodes[index]
        if node is None or not 0 <= edge.slot < len(node.inputs) or node.inputs[edge.slot] != edge.tensor:
            raise UserError(
                f"{self._model.source}: {_say(edge)} is not in this model; "
                "the placement was made for another model, or for other static shapes"
            )
        if node.opaque or (edge.slot > 1 and node.op in self._dialect.linear_ops):
            what = "has a subgraph or is unknown to ONNX" if node.opaque else "takes its bias there"
            raise UserError(f"{self._model.source}: {_say(edge)} stays float: {node.op} {what}")
        self._check(edge, precision)
        return node

    def _final(self, edge: Edge, precision: str) -> str:
        """The tensor of an edge that leads out of the model."""
        if edge.tensor not in self._model.outputs or edge.tensor not in self._model.producer:
            raise UserError(f"{self._model.source}: {_say(edge)}: no node of this model makes an output of that name")
        self._check(edge, precision)
        return edge.tensor

    def _check(self, edge: Edge, precision: str) -> None:
        kind = self._model.types.get(edge.tensor)
        if kind is not None and kind.dtype not in _FLOATS:
            raise UserError(f"{self._model.source}: {_say(edge)} cannot be quantized: its type is {kind.dtype}")
        if precision not in self._offered:
            raise UserError(
                f"{self._model.source}: {_say(edge)}: precision {precision!r} is not among those that "
                f"{self._dialect.name} takes at opset {self._opset}: {', '.join(sorted(self._offered)) or 'none'}"
            )

    @cached_property
    def _opset(self) -> int:
        return max((int(o.version) for o in self._model.proto.opset_import if o.domain == ""), default=0)

    @cached_property
    def _offered(self) -> frozenset[str]:
        return frozenset(p for p in self._dialect.precisions if self._dialect.opset([p]) <= self._opset)


def _say(edge: Edge) -> str:
    return (
        f"edge {edge.tensor!r} -> input {edge.slot} of {edge.consumer!r}"
        if edge.consumer
        else f"output {edge.tensor!r}"
    )
