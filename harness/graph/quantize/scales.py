"""Scales and zero points of activations, from calibrated ranges, in the form of a dialect.

A scale is computed from the range of the tensor, or from those of all tensors that share it (`SharedScale`): then the
Q/DQ pairs on both sides of an operator cancel out, and it runs on stored integers. The output of an activation that the
runtime computes by clipping does not share a scale with tensors that have negative values, because the clipping needs
the zero point at the lowest stored value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from harness.base.errors import UserError
from harness.graph.model import Model, Node
from harness.graph.quantize import protobuf_wire
from harness.graph.quantize.numeric_choices import (
    DEFAULT_CHOICES,
    NumericChoices,
    channel_name,
    depthwise_inputs,
    is_depthwise,
)
from harness.graph.quantize.protobuf_wire import FLOAT_BIAS_PREFIX, NAME_PREFIX
from harness.graph.quantize.weights import (
    FP8_MAX_BY_FORMAT,
    QUANTIZABLE_DTYPES,
    STORAGE_DTYPES,
    Array,
    largest_value,
    round_scale,
)
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.movement import find_repeated_input, is_value_preserving
from harness.graph.rules.operator_sets import MAX_CONSTANT_MAGNITUDE
from harness.graph.rules.sentinels import holds_sentinel


@dataclass(frozen=True, slots=True)
class SharedScale:
    """Tensors from whose ranges a scale is computed instead of the range of its tensor.

    Attributes:
        origin: First tensor of the chain of quantized operators that only move values to the tensor, or the tensor.
        members: All tensors that share the scale around quantized Concats; empty without them.
    """

    origin: str
    members: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.origin, len(self.members), *self.members[:1]))  # members may be thousands


class ScaleLinks:
    """Operators of a model whose inputs and outputs may share a scale in some placement.

    Attributes:
        source: Input tensor of each operator that only moves or repeats values, by its output tensors.
        joins: These operators and every Concat, in topological order.
        fixed: Indices of joins without an insertion point, which runtimes remove, so that every placement shares the
            scale.
    """

    def __init__(self, model: Model, dialect: Dialect) -> None:
        self.source: dict[str, str] = {}
        self.joins: list[Node] = []
        self.fixed: set[int] = set()
        self._parents: dict[str, str] = {}
        for node in model.nodes:
            fixed = node.op not in dialect.operators and find_repeated_input(model, node) == 0
            moves = fixed or is_value_preserving(node, interpolated=dialect.quantize_outputs)
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
        """Return the representative of the tensors that may share a scale with a tensor; without others, the tensor."""
        return find_root(self._parents, tensor)


def find_root(links: dict[str, str], name: str) -> str:
    """Return the representative of a name in a forest of links (Tarjan 1975, union-find with path halving).

    Args:
        links: Parent of each name; paths are shortened in place, and a new name is added with itself as parent.
    """
    links.setdefault(name, name)
    while links[name] != name:
        links[name] = links[links[name]]
        name = links[name]
    return name


class EncodedPairs(NamedTuple):
    """Encoded Q/DQ pairs on activations.

    Attributes:
        output: Name of the dequantized tensor; "" for several pairs.
        nodes: QuantizeLinear and DequantizeLinear nodes as encoded fields of a graph.
        grid: Scales and zero points, each as an encoded field of a graph.
        pairs: Number of pairs.
    """

    output: str
    nodes: bytes
    grid: tuple[bytes, ...]
    pairs: int = 1


class ActivationScales:
    """Scales and zero points of activations.

    Args:
        ranges: Smallest and largest value of each activation by name; for channels by `channel_name`.
        choices: Choices for scales by channel.
    """

    def __init__(
        self,
        model: Model,
        dialect: Dialect,
        ranges: Mapping[str, tuple[float, float]],
        choices: NumericChoices = DEFAULT_CHOICES,
    ) -> None:
        self._model = model
        self._dialect = dialect
        self._ranges = ranges
        self._depthwise = depthwise_inputs(model) if choices.depthwise == "channel" else {}
        self._grids: dict[tuple[str, str, SharedScale | None], tuple[Array, Array]] = {}
        self._pairs: dict[tuple[str, str, SharedScale | None, str | None], EncodedPairs] = {}
        self._joint_ranges: dict[SharedScale, tuple[float, float] | None] = {}
        self.links = ScaleLinks(model, dialect)
        self._clipped = {name for node in model.nodes if node.op in dialect.absorbed for name in node.outputs}
        self._clipped.update(name for name, source in self.links.source.items() if source in self._clipped)
        self._unit: set[str] = set()
        """Results of Softmax nodes, and the tensors that have the same values after other operators."""
        for node in model.nodes if dialect.unit_softmax else ():
            repeated = find_repeated_input(model, node)
            slot = 0 if repeated is None and node.op in dialect.absorbed else repeated
            if (node.op == "Softmax" and not node.opaque) or (slot is not None and node.inputs[slot] in self._unit):
                self._unit.add(node.outputs[0])
            self._unit.update(name for name in node.outputs if self.links.source.get(name) in self._unit)
        self._own_zeros = not dialect.shares_zero_points and any(node.op == "Pad" for node in model.nodes)
        self._affine: set[str] = set()
        chained: set[str] = set()  # each is followed once: chains may be long, and have many readers
        for tensor in (node.inputs[0] for node in model.nodes if node.op in dialect.affine_ops):
            self._affine.add(self.links.group_name(tensor))
            while tensor and tensor not in chained:
                chained.add(tensor)
                tensor = self.links.source.get(tensor, "")
        self._affine |= chained

    def scale_and_zero_point(self, tensor: str, precision: str, tie: SharedScale | None = None) -> tuple[Array, Array]:
        """Return scale and zero point of a tensor, as scalars; the scale has the tensor's type and is positive.

        INT8 symmetric: amax / 127; affine: (high - low) / 255 over a range that includes 0 (Jacob et al. 2018,
        "Quantization and training of neural networks", eqs. 1 and 12); FP8: amax / 448 (E5M2: 57344).

        Args:
            tie: Tensors from whose ranges the scale is computed; None: only the tensor itself.
        """
        key = (tensor, precision, tie)
        if key not in self._grids:
            low, high = self._scale_range(tensor, tie)
            if precision in FP8_MAX_BY_FORMAT:
                scale = round_scale(max(-low, high) / FP8_MAX_BY_FORMAT[precision], self._dtype(tensor))
                self._grids[key] = scale, np.zeros((), STORAGE_DTYPES[precision])
            else:
                self._grids[key] = self._int8_grid(tensor, tie, (low, high), (low, high))
        return self._grids[key]

    def has_channel_scales(self, node: Node, slot: int, precision: str) -> bool:
        """Return whether an input of a node has one scale for each channel; other inputs then do not use its pair."""
        known = slot == 0 and precision == "int8" and is_depthwise(self._model, node)
        return known and node.inputs[0] in self._depthwise and channel_name(node.inputs[0], 0) in self._ranges

    def channel_scales(self, tensor: str) -> tuple[Array, Array]:
        """Return INT8 scales and zero points of a tensor, of shape (channels,); see `scale_and_zero_point`."""
        ranges = [self._ranges.get(channel_name(tensor, i), (0.0, 0.0)) for i in range(self._depthwise[tensor])]
        most = largest_value(self._dtype(tensor))
        pairs = [(max(-most, min(0.0, low)), min(most, max(0.0, high))) for low, high in ranges]
        # One storage type for all channels: the dialect's choice for the whole tensor.
        whole = min(low for low, _ in pairs), max(high for _, high in pairs)
        grids = [self._int8_grid(tensor, None, pair, whole) for pair in pairs]
        scale, zero = (np.stack(parts) for parts in zip(*grids, strict=True))
        # Channels that are always 0 take the largest scale, so that a bias expressed in it stays representable.
        return np.where([low == high for low, high in pairs], scale.max(), scale).astype(scale.dtype), zero

    def _dtype(self, tensor: str) -> npt.DTypeLike:
        kind = self._model.types.get(tensor)
        return QUANTIZABLE_DTYPES.get(kind.dtype if kind else "float", np.float32)

    def _int8_grid(
        self, tensor: str, tie: SharedScale | None, bounds: tuple[float, float], whole: tuple[float, float]
    ) -> tuple[Array, Array]:
        """Return scale and zero point for the range `bounds`; that of the tensor, `whole`, decides the type."""
        (low, high), dtype = bounds, self._dtype(tensor)
        origin = tensor if tie is None else self.links.group_name(tensor) if tie.members else tie.origin
        storage, affine = self._dialect.activation, not self._dialect.symmetric_activation
        if not affine and (origin in self._affine or (whole[0] == 0 and self._dialect.unsigned_positive)):
            storage, affine = "uint8", True
        if not affine:
            return round_scale(max(-low, high) / 127, dtype), np.asarray(
                128 if storage == "uint8" else 0, STORAGE_DTYPES[storage]
            )
        scale = round_scale((high - low) / 255, dtype)
        limits = np.iinfo(STORAGE_DTYPES[storage])
        zero = int(np.clip(round(limits.min - low / float(scale)), limits.min, limits.max))
        return scale, np.asarray(zero, STORAGE_DTYPES[storage])

    def encode_pair(
        self, tensor: str, precision: str, tie: SharedScale | None = None, *, final: str | None = None
    ) -> EncodedPairs:
        """Return the Q/DQ pair on an activation; see `scale_and_zero_point`, also for errors.

        Args:
            final: Precision of a quantized output of the model, whose pair at this precision gets the tensor's name;
                None for other tensors.
        """
        key = (tensor, precision, tie, final)
        if key in self._pairs:  # the producer and each consumer ask for it
            return self._pairs[key]
        scale, zero = self.scale_and_zero_point(tensor, precision, tie)
        name = f"{tensor}{NAME_PREFIX}{precision}{'.shared' if tie and tie.members else ''}"
        source = tensor if final is None else tensor + FLOAT_BIAS_PREFIX
        output = tensor if final == precision else f"{name}.dq"
        # Zero points are few and shared, except where the runtime would change them; scales are one per tensor.
        own = self._own_zeros and zero.any()
        zero_name = f"{name}.zero" if own else f"{NAME_PREFIX}zero.{zero.dtype}.{float(zero):g}"
        self._pairs[key] = _encode_pair(name, source, output, {f"{name}.scale": scale, zero_name: zero})
        return self._pairs[key]

    def encode_channel_pair(self, tensor: str, *, final: bool = False) -> EncodedPairs:
        """Return the INT8 pair with one scale for each channel; see `channel_scales`.

        Args:
            final: Whether the tensor is a quantized output of the model, whose name another pair gets.
        """
        name = f"{tensor}{NAME_PREFIX}int8.channels"
        grid = dict(zip((f"{name}.scale", f"{name}.zero"), self.channel_scales(tensor), strict=True))
        source = tensor + FLOAT_BIAS_PREFIX if final else tensor
        return _encode_pair(name, source, f"{name}.dq", grid, protobuf_wire.encode_axis(1))

    def _scale_range(self, tensor: str, tie: SharedScale | None) -> tuple[float, float]:
        """Return the range for the scale of a tensor, extended to include 0 and limited to values of its type."""
        tie = SharedScale(tensor) if tie is None else tie
        key = SharedScale("", tie.members) if tie.members else tie
        if key not in self._joint_ranges:
            bounds = []
            for name in tie.members or (tie.origin,):
                constant = self._model.constant_array(name)
                counts = name in self._ranges
                if constant is not None:  # constants with sentinels such as -1e9 do not count
                    held = all(abs(bound) <= MAX_CONSTANT_MAGNITUDE for bound in self._observed_range(name))
                    counts = held and not holds_sentinel(constant)
                if counts:
                    bounds.append(self._observed_range(name))
            lows, highs = zip(*bounds, strict=True) if bounds else ((), ())
            self._joint_ranges[key] = (min(lows), max(highs)) if bounds else None
        low, high = self._joint_ranges[key] or self._observed_range(tensor)
        most = largest_value(self._dtype(tensor))
        low, high = max(-most, min(0.0, low)), min(most, max(0.0, high))
        if tie.members and low < 0 and tensor in self._clipped:
            return self._scale_range(tensor, SharedScale(tie.origin))
        return low, high

    def _observed_range(self, tensor: str) -> tuple[float, float]:
        if tensor in self._unit:
            return 0.0, 1.0
        constant = self._model.constant_array(tensor)
        if constant is not None:
            values = constant.astype(np.float32)
            return float(values.min(initial=0)), float(values.max(initial=0))
        if tensor not in self._ranges:
            raise UserError(f"{self._model.source}: no range is known for tensor {tensor!r}; calibrate the model again")
        low, high = self._ranges[tensor]
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UserError(
                f"{self._model.source}: the range of tensor {tensor!r} is ({low}, {high}), not finite; "
                "look for inf or nan in the calibration data and in the float model's activations"
            )
        return low, high


def _encode_pair(
    name: str, source: str, output: str, grid: Mapping[str, Array], attributes: bytes = b""
) -> EncodedPairs:
    encode = partial(protobuf_wire.encode_node, attributes=attributes)
    nodes = encode("QuantizeLinear", (source, *grid), f"{name}.q")
    nodes += encode("DequantizeLinear", (f"{name}.q", *grid), output, name=f"{name}.dq")
    records = tuple(
        protobuf_wire.encode_initializer(numpy_helper.from_array(value, key)) for key, value in grid.items()
    )
    return EncodedPairs(output, nodes, records)
