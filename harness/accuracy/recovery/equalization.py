"""Recovery steps that keep the float function: scales of channels move between neighbouring operators.

Cross-layer equalization: Nagel et al. 2019, arXiv:1906.04721, section 4.1. SmoothQuant: Xiao et al. 2023, "SmoothQuant:
accurate and efficient post-training quantization for large language models", arXiv:2211.10438, equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.accuracy.recovery.pipeline import Feeds, PlacedModel
from harness.graph.constant_edits import is_private, replace_constants
from harness.graph.load import save_to_folder
from harness.graph.model import Model, Node
from harness.graph.quantize.numeric_choices import is_depthwise
from harness.graph.segmented_run import channel_maxima
from harness.plugins.api import Array
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

_HOMOGENEOUS_OPS = frozenset({"Identity", "LeakyRelu", "Relu"})
"""Operators with f(s x) = s f(x) for s > 0, through which a scale can move."""
_MAX_SWEEPS = 20
_CONVERGED_FACTOR = 1.01
_SMOOTHING_EXPONENT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaledPair:
    """Constants around a tensor whose channels may be scaled.

    Attributes:
        before: Constants that are divided by the scales along their first axis.
        after: Constants that are multiplied by the scales, each with its axis.
        tensor: Name of the scaled tensor.
    """

    before: tuple[str, ...]
    after: tuple[tuple[str, int], ...]
    tensor: str


class CrossLayerEqualization:
    """Scaling of the channels between two convolutions, through ReLU, for equal weight ranges on both sides.

    s_i = sqrt(r1_i r2_i) / r2_i (Nagel et al. 2019, arXiv:1906.04721, equation 11), with the largest range of all
    convolutions that read the channel.
    """

    keeps_function = True

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Equalize all pairs of convolutions until they change by less than 1 %; arguments as in `RecoveryStep.apply`.

        Returns:
            The changed placement, or None if the model has no such pair.
        """
        pairs = [pair for node in placed.model.nodes if (pair := _convolution_pair(placed.model, node))]
        if not pairs:
            return None
        arrays = _private_arrays(placed.model, pairs)
        for _ in range(_MAX_SWEEPS):
            factors = [_equalize(pair, arrays) for pair in pairs]
            if max(factors) < _CONVERGED_FACTOR:
                break
        return replace(placed, model=replace_constants(placed.model, arrays))


class SmoothQuant:
    """Move of the range of activation channels from a LayerNorm into the weights of the MatMuls after it.

    s_j = max|X_j|^a / max|W_j|^(1 - a) with a = 0.5; scale and shift of the normalization are divided by s.
    """

    keeps_function = True

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Move the ranges of all such channels into the weights; arguments as in `RecoveryStep.apply`.

        Returns:
            The changed placement, or None if no LayerNorm is followed by MatMuls only.
        """
        pairs = [pair for node in placed.model.nodes if (pair := _normalized_pair(placed.model, node))]
        if not pairs:
            return None
        path = save_to_folder(placed.model, folder / "smoothed")
        what, tensors = f"smoothing of {placed.model.source}", [pair.tensor for pair in pairs]
        maxima = call_in_helper_process(what, channel_maxima, path, tensors, batches, factor=RUNTIME_FACTOR)
        arrays = _private_arrays(placed.model, pairs)
        for pair in pairs:
            after = _channel_magnitudes(pair, arrays)
            found = maxima[pair.tensor].astype(np.float64)
            usable = (found > 0) & (after > 0)
            powers = (
                np.where(usable, found, 1) ** _SMOOTHING_EXPONENT,
                np.where(usable, after, 1) ** (1 - _SMOOTHING_EXPONENT),
            )
            _scale_channels(pair, arrays, powers[0] / powers[1])
        return replace(placed, model=replace_constants(placed.model, arrays))


def _private_arrays(model: Model, pairs: Sequence[_ScaledPair]) -> dict[str, Array]:
    names = {name for pair in pairs for name in (*pair.before, *(name for name, _ in pair.after))}
    arrays = ((name, model.constant_array(name)) for name in sorted(names))
    return {name: array.astype(np.float64) for name, array in arrays if array is not None}


def _channel_magnitudes(pair: _ScaledPair, arrays: dict[str, Array]) -> Array:
    """Return the largest magnitude of the weights that read each channel."""
    found = [np.abs(np.moveaxis(arrays[name], axis, 0)) for name, axis in pair.after]
    return np.asarray(np.max([each.reshape(len(each), -1).max(axis=1) for each in found], axis=0))


def _scale_channels(pair: _ScaledPair, arrays: dict[str, Array], scales: Array) -> None:
    """Divide the constants before the tensor by the scales of its channels, and multiply those after it, in place."""
    for name in pair.before:
        arrays[name] = arrays[name] / scales.reshape(-1, *[1] * (arrays[name].ndim - 1))
    for name, axis in pair.after:
        shape = [-1 if i == axis else 1 for i in range(arrays[name].ndim)]
        arrays[name] = arrays[name] * scales.reshape(shape)


def _equalize(pair: _ScaledPair, arrays: dict[str, Array]) -> float:
    """Equalize one pair in place, and return the largest factor by which a channel changed (at least 1)."""
    weight = arrays[pair.before[0]]
    first, second = np.abs(weight).reshape(len(weight), -1).max(axis=1), _channel_magnitudes(pair, arrays)
    usable = (first > 0) & (second > 0)
    scales = np.sqrt(np.where(usable, first, 1) / np.where(usable, second, 1))
    _scale_channels(pair, arrays, scales)
    return float(np.max(np.maximum(scales, 1 / scales)))


def _readers(model: Model, tensor: str) -> list[tuple[Node, int]] | None:
    """Return the consumers of a tensor with their input indices; None if it is an output or a subgraph reads it."""
    if tensor in model.outputs or tensor in model.captured:
        return None
    return [(model.nodes[index], slot) for index, slot in model.consumers.get(tensor, ())]


def _convolution_pair(model: Model, node: Node) -> _ScaledPair | None:
    if node.op != "Conv" or node.opaque or not all(is_private(model, name) for name in node.inputs[1:] if name):
        return None
    tensor, readers = node.outputs[0], _readers(model, node.outputs[0])
    while readers is not None and len(readers) == 1 and readers[0][0].op in _HOMOGENEOUS_OPS:
        tensor = readers[0][0].outputs[0]
        readers = _readers(model, tensor)
    after = []
    for reader, slot in readers or ():
        grouped = reader.attributes.get("group", 1) != 1
        channels_differ = grouped and (
            not is_depthwise(model, reader) or model.constants[reader.inputs[1]].dims[0] != reader.attributes["group"]
        )
        if reader.op != "Conv" or slot != 0 or not is_private(model, reader.inputs[1]) or channels_differ:
            return None
        after.append((reader.inputs[1], 0 if grouped else 1))
    before = tuple(name for name in node.inputs[1:3] if name)
    return _ScaledPair(before=before, after=tuple(after), tensor=tensor) if after else None


def _normalized_pair(model: Model, node: Node) -> _ScaledPair | None:
    before = tuple(_normalization_constants(model, node))
    readers = _readers(model, node.outputs[0]) if before else None
    after = []
    for reader, slot in readers or ():
        matrix = reader.inputs[1] if len(reader.inputs) > 1 else ""
        if (
            reader.op != "MatMul"
            or slot != 0
            or not is_private(model, matrix)
            or len(model.constants[matrix].dims) != 2
        ):
            return None
        after.append((matrix, 0))
    return _ScaledPair(before=before, after=tuple(after), tensor=node.outputs[0]) if after else None


def _normalization_constants(model: Model, node: Node) -> Iterator[str]:
    """Yield scale and shift of a LayerNormalization, or of the Mul and Add at its end; nothing for other nodes."""
    if node.op == "LayerNormalization":
        names = [name for name in node.inputs[1:3] if name]
    elif node.op == "Add":
        shift = next((name for name in node.inputs if name in model.constants), "")
        mul = next((made for name in node.inputs if (made := model.producer_node(name)) and made.op == "Mul"), None)
        alone = mul is not None and _readers(model, mul.outputs[0])
        scale = next((name for name in mul.inputs if name in model.constants), "") if mul is not None else ""
        names = [scale, shift] if alone and len(alone) == 1 else []
    else:
        return
    width = model.types[node.outputs[0]].shape[-1] if node.outputs[0] in model.types else 0
    if names and all(is_private(model, name) and tuple(model.constants[name].dims) == (width,) for name in names):
        yield from names
