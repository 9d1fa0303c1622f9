"""Inputs and outputs of a model, which preparation keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from harness.errors import UserError
from harness.graph.cleaning.shapes import types_of
from harness.graph.model import TensorType

__all__ = ["Interface"]


@dataclass(frozen=True, slots=True)
class Interface:
    """Names of inputs and outputs in their order, and the types of inputs that are tensors.

    Attributes:
        inputs: Name and type; None for sequences and optionals.
        outputs: Names.
    """

    inputs: tuple[tuple[str, TensorType | None], ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> Interface:
        """Return the interface of a graph with static inputs."""
        types = types_of(graph)
        return cls(tuple((v.name, types.get(v.name)) for v in graph.input), tuple(v.name for v in graph.output))

    def check(self, graph: onnx.GraphProto, before: Mapping[str, TensorType], source: str) -> None:
        """Compare with the prepared graph.

        Args:
            graph: The prepared graph.
            before: Types that outputs should have, as far as they are known.
            source: What messages call the model.

        Raises:
            UserError: A name, type or shape of an input or output is another.
        """
        found, types = Interface.of(graph), types_of(graph)
        pairs = [*((name, kind, dict(found.inputs).get(name)) for name, kind in self.inputs)]
        pairs += [(name, before[name], types[name]) for name in self.outputs if name in before and name in types]
        changed = next((pair for pair in pairs if pair[1] != pair[2]), None)
        if changed is None and found == self:
            return
        what = "its inputs and outputs" if changed is None else f"{changed[0]!r} from {changed[1]} to {changed[2]}"
        raise UserError(f"{source}: preparing the model would change {what}; export it with a newer opset")
