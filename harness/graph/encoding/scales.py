"""Scales and zero points of activations, from calibrated ranges, in the form of a dialect.

Tensors on both sides of an operator that only moves values keep one scale, so that their Q/DQ pairs cancel out and the
operator runs on stored integers. The tensors around a Concat share one where all inputs of the Concat are quantized,
but for what an absorbed activation makes beside negative values: it disappears into a zero point at 0 alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from harness.errors import UserError
from harness.graph.dialects import Dialect
from harness.graph.encoding import wire
from harness.graph.encoding.weights import FP8_KINDS, QUANTIZABLE, STORAGE, Array, smallest_scale
from harness.graph.encoding.wire import TAG, UNROUNDED
from harness.graph.model import Model, Node
from harness.graph.operators import LARGEST

__all__ = ["Pair", "Scales", "moves_values"]

_MOVES = frozenset({
    "MaxPool", "Reshape", "Transpose", "Flatten", "Slice", "Split", "Squeeze", "Unsqueeze", "Identity", "Expand",
    "Tile", "DepthToSpace", "SpaceToDepth", "Gather",
})  # fmt: skip


def moves_values(node: Node, dialect: Dialect) -> bool:
    """Whether an operator's outputs hold values of its first input alone, or where kernels take and give integers,
    values between two of them."""
    if node.op == "Resize":
        modes = ("nearest", "linear") if dialect.quantize_outputs else ("nearest",)
        return node.attributes.get("mode", "nearest") in modes
    return node.op in _MOVES


@dataclass(frozen=True, slots=True)
class Pair:
    """A Q/DQ pair on an activation, encoded.

    Attributes:
        output: The dequantized tensor.
        nodes: QuantizeLinear and DequantizeLinear, as records of a graph.
        grid: Scale and zero point by name, as records of a graph.
    """

    output: str
    nodes: bytes
    grid: Mapping[str, bytes]


class Scales:
    """Scale and zero point of every activation; tensor groups are decided once, here.

    Args:
        model: The float model.
        dialect: The form wanted.
        ranges: Smallest and largest value of each activation.
    """

    def __init__(self, model: Model, dialect: Dialect, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._model = model
        self._dialect = dialect
        self._ranges = ranges
        self._grids: dict[tuple[str, str, bool], tuple[Array, Array]] = {}
        self._pairs: dict[tuple[str, str, bool, str | None], Pair] = {}
        self._source: dict[str, str] = {}
        links: dict[str, str] = {}
        for node in model.nodes:
            joined = node.op == "Concat"
            if node.opaque or not (joined or moves_values(node, dialect)):
                continue
            for name in filter(None, (*node.outputs, *(node.inputs if joined else ()))):
                links[_root(links, name)] = _root(links, node.inputs[0])
                if not joined:
                    self._source[name] = self._source.get(node.inputs[0], node.inputs[0])
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in list(links):
            self._members[_root(links, name)].append(name)
        self._group = {name: root for root, names in self._members.items() for name in names}
        self._clipped = {name for node in model.nodes if node.op in dialect.absorbed for name in node.outputs}
        self._unit = {n.outputs[0] for n in model.nodes if n.op == "Softmax" and dialect.unit_softmax}
        data = [node.inputs[0] for node in model.nodes if node.op in dialect.affine_ops]
        self._affine = {self._source.get(name, name) for name in data} | {self.group(name) for name in data}

    def group(self, tensor: str) -> str:
        """A name for the tensors that share a scale with this one where a Concat among them is quantized."""
        return self._group.get(tensor, tensor)

    def members(self, group: str) -> Sequence[str]:
        """The tensors of a group."""
        return self._members[group]

    def of(self, tensor: str, precision: str, *, shared: bool = False) -> tuple[Array, Array]:
        """Scale and zero point of a tensor, as scalars; the scale has the tensor's type and is positive.

        INT8 symmetric: amax / 127; affine: (high - low) / 255 over a range that includes 0 (Jacob et al. 2018,
        "Quantization and training of neural networks", eqs. 1 and 12); FP8: amax / 448 (E5M2: 57344).

        Args:
            tensor: Its name.
            precision: "int8" or "fp8".
            shared: Whether the scale is that of the group around a Concat.

        Raises:
            UserError: No range is known, or it is not finite.
        """
        key = (tensor, precision, shared)
        known = self._grids.get(key)
        if known is None:
            known = self._grids[key] = self._grid(tensor, precision, shared)
        return known

    def _grid(self, tensor: str, precision: str, shared: bool) -> tuple[Array, Array]:
        low, high = self._range(tensor, shared)
        kind = self._model.types.get(tensor)
        dtype = QUANTIZABLE.get(kind.dtype if kind else "float", np.float32)
        amax = max(-low, high)
        if precision in FP8_KINDS:
            return _scale(amax / FP8_KINDS[precision], dtype), np.zeros((), STORAGE[precision])
        origin = self.group(tensor) if shared else self._source.get(tensor, tensor)
        storage, affine = self._dialect.activation, not self._dialect.symmetric_activation
        if not affine and (origin in self._affine or (low == 0 and self._dialect.unsigned_positive)):
            storage, affine = "uint8", True
        if not affine:
            return _scale(amax / 127, dtype), np.asarray(128 if storage == "uint8" else 0, STORAGE[storage])
        scale = _scale((high - low) / 255, dtype)
        bounds = np.iinfo(STORAGE[storage])
        zero = int(np.clip(round(bounds.min - low / float(scale)), bounds.min, bounds.max))
        return scale, np.asarray(zero, STORAGE[storage])

    def pair(self, tensor: str, precision: str, *, shared: bool = False, final: str | None = None) -> Pair:
        """The Q/DQ pair on an activation, made once.

        Args:
            tensor: Its name.
            precision: "int8" or "fp8".
            shared: See `of`.
            final: The precision at which this tensor leaves the model; such a pair takes over the tensor's name.

        Raises:
            UserError: See `of`.
        """
        key = (tensor, precision, shared, final)
        if key not in self._pairs:
            scale, zero = self.of(tensor, precision, shared=shared)
            name = f"{tensor}{TAG}{precision}{'.shared' if shared else ''}"
            source = tensor if final is None else tensor + UNROUNDED
            output = tensor if final == precision else f"{name}.dq"
            # Zero points are few and shared; scales are one per tensor.
            grid = {f"{name}.scale": scale, f"{TAG}zero.{zero.dtype}.{float(zero):g}": zero}
            nodes = wire.node("QuantizeLinear", (source, *grid), f"{name}.q")
            nodes += wire.node("DequantizeLinear", (f"{name}.q", *grid), output, name=f"{name}.dq")
            encoded = {key: wire.initializer(numpy_helper.from_array(value, key)) for key, value in grid.items()}
            self._pairs[key] = Pair(output, nodes, encoded)
        return self._pairs[key]

    def _range(self, tensor: str, shared: bool) -> tuple[float, float]:
        """The range that a tensor's scale is made from, widened to include 0."""
        origin = self._source.get(tensor, tensor)
        sources = self._members[self.group(tensor)] if shared else [origin]
        bounds = [self._observed(name) for name in sources if self._known(name)] or [self._observed(tensor)]
        low, high = min(0.0, *(low for low, _ in bounds)), max(0.0, *(high for _, high in bounds))
        return self._range(tensor, False) if shared and low < 0 and origin in self._clipped else (low, high)

    def _known(self, tensor: str) -> bool:
        """Whether a tensor counts in the range of those that share a scale; a constant that says "none" does not."""
        if tensor in self._model.constants:
            return all(abs(bound) <= LARGEST for bound in self._observed(tensor))
        return tensor in self._ranges

    def _observed(self, tensor: str) -> tuple[float, float]:
        if tensor in self._unit:
            return 0.0, 1.0
        constant = self._model.constants.get(tensor)
        if constant is not None:
            values = numpy_helper.to_array(constant).astype(np.float32)
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


def _root(links: dict[str, str], name: str) -> str:
    """The representative of a name in a forest of links (Tarjan 1975, union-find with path halving)."""
    links.setdefault(name, name)
    while links[name] != name:
        links[name] = links[links[name]]
        name = links[name]
    return name


def _scale(value: float, dtype: npt.DTypeLike) -> Array:
    return np.asarray(max(value, smallest_scale(dtype)), dtype)
