"""Numeric choices: estimators of ranges and kinds of scales of the Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from harness.base.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.rules.dialects import Dialect

Granularity = Literal["tensor", "channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericChoices:
    """Choices for the scales and zero points of the Q/DQ pairs of all placements of a task.

    Attributes:
        activations: Range estimator of activations; see the entry points of `qdq.range_estimators`.
        percentile: Share of the values inside the range, in per cent; for the estimator "percentile".
        weights: Range estimator of weights; see the entry points of `qdq.weight_estimators`.
        depthwise: Scales of the INT8 data of depthwise convolutions: one, or one for each channel.
        symmetric: Whether INT8 activations have zero point 0; None: the default of the dialect.
    """

    activations: str = "minmax"
    percentile: float = 99.99
    weights: str = "max"
    depthwise: Granularity = "tensor"
    symmetric: bool | None = None

    @property
    def text(self) -> str:
        """Return the choices that differ from the defaults, for digests and tables; "" if none does."""
        share = f" {self.percentile:g}" if self.activations == "percentile" else ""
        changes = {
            f"activations {self.activations}{share}": self.activations != DEFAULT_CHOICES.activations,
            f"weights {self.weights}": self.weights != DEFAULT_CHOICES.weights,
            f"depthwise {self.depthwise}": self.depthwise != DEFAULT_CHOICES.depthwise,
            "symmetric": self.symmetric is True,
            "asymmetric": self.symmetric is False,
        }
        return ", ".join(text for text, is_change in changes.items() if is_change)

    def adapt_dialect(self, dialect: Dialect) -> Dialect:
        """Return the dialect with these choices."""
        if self.depthwise == "channel" and not dialect.channel_activations:
            raise UserError(f"depthwise: 'tensor' for dialect {dialect.name!r}, which has one scale for a tensor")
        if self.symmetric is None:
            return dialect
        if self.symmetric:
            return replace(dialect, symmetric_activation=True, affine_ops=frozenset())
        if not dialect.zero_points:
            raise UserError(f"symmetric: true for dialect {dialect.name!r}, which has no zero points")
        return replace(dialect, activation="uint8", symmetric_activation=False)


DEFAULT_CHOICES = NumericChoices()


def channel_name(tensor: str, channel: int) -> str:
    """Return the key of one channel (numbered from 0) of a tensor in a mapping of ranges; no tensor has such a name."""
    return f"{tensor}{NAME_PREFIX}channel{channel}"


def channel_tensor(name: str) -> str:
    """Return the tensor of a channel's key in a mapping of ranges (`channel_name`); "" for the key of a tensor."""
    return name.rpartition(f"{NAME_PREFIX}channel")[0]


def is_depthwise(model: Model, node: Node) -> bool:
    """Return whether a node is a Conv with constant weights and one group for each channel of its data."""
    if node.op != "Conv" or node.opaque or node.inputs[1] not in model.constants:
        return False
    weight = model.constants[node.inputs[1]]
    return len(weight.dims) > 2 and weight.dims[1] == 1 and node.attributes.get("group", 1) > 1


def depthwise_inputs(model: Model) -> Mapping[str, int]:
    """Return the number of channels (axis 1) of each activation that a depthwise convolution reads, by tensor."""
    nodes = (node for node in model.nodes if is_depthwise(model, node))
    return {node.inputs[0]: node.attributes["group"] for node in nodes if model.is_activation(node.inputs[0])}
