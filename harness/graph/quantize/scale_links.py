"""Operators that hand values on, and so may ask for one scale on both of their sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.graph.model import Model, Node
from harness.graph.quantize.weights import QUANTIZABLE_DTYPES
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.movement import find_repeated_input, is_value_preserving

__all__ = ["ScaleLinks", "SharedScale", "find_root"]


@dataclass(frozen=True, slots=True)
class SharedScale:
    """The tensors that a scale is made from instead of the tensor's own range.

    Attributes:
        origin: The first tensor of the chain of quantized movers that leads to the tensor; the tensor itself where
            there is none.
        members: All tensors that share a scale with it around Concats; empty where no Concat is quantized.
    """

    origin: str
    members: tuple[str, ...] = ()


class ScaleLinks:
    """The operators of a model across which scales may be shared, whatever a placement quantizes.

    Args:
        model: The float model.
        dialect: How the runtime wants its Q/DQ.

    Attributes:
        source: By output of an operator that moves or repeats values: the tensor whose values it holds.
        joins: Those operators and every Concat, in topological order.
        fixed: Indices of those whose link holds in every placement: they have no insertion point, and runtimes remove
            them.
    """

    def __init__(self, model: Model, dialect: Dialect) -> None:
        self.source: dict[str, str] = {}
        self.joins: list[Node] = []
        self.fixed: set[int] = set()
        self._parents: dict[str, str] = {}
        for node in model.nodes:
            fixed = node.op not in dialect.operators and find_repeated_input(model, node) == 0
            moves = fixed or is_value_preserving(node, dialect)
            kind = model.types.get(node.inputs[0]) if node.inputs else None
            if node.opaque or not (moves or node.op == "Concat") or (kind and kind.dtype not in QUANTIZABLE_DTYPES):
                continue
            self.joins.append(node)
            if fixed:
                self.fixed.add(node.index)
            outputs = node.outputs[:1] if fixed else tuple(filter(None, node.outputs))
            for name in outputs if moves else (*outputs, *node.inputs):
                self._parents[self.group_name(name)] = self.group_name(node.inputs[0])
                if moves:
                    self.source[name] = node.inputs[0]

    def group_name(self, tensor: str) -> str:
        """Return a name for all tensors that may ever share a scale with this one."""
        return find_root(self._parents, tensor)

    def iter_value_chain(self, tensor: str) -> Iterator[str]:
        """Yield a tensor and those whose values it holds, back to the first."""
        while True:
            yield tensor
            if tensor not in self.source:
                return
            tensor = self.source[tensor]


def find_root(links: dict[str, str], name: str) -> str:
    """Return the representative of a name in a forest of links (Tarjan 1975, union-find with path halving)."""
    links.setdefault(name, name)
    while links[name] != name:
        links[name] = links[links[name]]
        name = links[name]
    return name
