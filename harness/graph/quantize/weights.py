"""Quantized constants: weights of linear operators (symmetric, one scale per output channel), other constants.

Each is stored quantized with a DequantizeLinear and no QuantizeLinear. OpenVINO 2026.4, ONNX Runtime and TensorRT fuse
that form into the same kernels as float weights with a Q/DQ pair, and the file is a quarter of the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from harness.graph.model import Model, Node, TensorType, read_nodes
from harness.graph.protos import copy_message
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.quantize.weight_estimators import WeightEstimator, max_magnitude

Array = npt.NDArray[Any]
QUANTIZABLE_DTYPES: Mapping[str, npt.DTypeLike] = {
    "float": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
"""Element types of what may be quantized, by their ONNX names in lower case."""
FP8_MAX = 448.0
FP8_MAX_BY_FORMAT: Mapping[str, float] = {"fp8": FP8_MAX, "fp8e5m2": 57344.0}
"""Largest finite value of E4M3 and of E5M2: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1."""
MAX_LEVEL: Mapping[str, float] = {"int8": 127.0, **FP8_MAX_BY_FORMAT}
STORAGE_DTYPES: dict[str, npt.DTypeLike] = {
    "int8": np.int8, "uint8": np.uint8, "fp8": ml_dtypes.float8_e4m3fn, "fp8e5m2": ml_dtypes.float8_e5m2
}  # fmt: skip


class QuantizedTensor(NamedTuple):
    """Quantized constant.

    Attributes:
        values: Stored values with the shape of the float constant.
        scale: Positive scale: a scalar, or one per channel along `axis`.
        zero_point: Zero point with the type of `values` and the shape of `scale`.
        axis: Axis of the channels; None: one scale for the tensor.
    """

    values: Array
    scale: Array
    zero_point: Array
    axis: int | None


def weight_axis(node: Node, slot: int, rank: int, transposed: int | None = 1) -> int | None:
    """Return the axis of the output channels of a linear operator's weight, or None for one scale for the tensor.

    Args:
        node: Node with a weight of shape [K, C, ...] (Conv), [C, K, ...] (ConvTranspose), [K, N] or with transB [N, K]
            (Gemm), or [K, N] (MatMul); a stack of matrices has one scale, because runtimes differ in its channels.
        slot: Number of the input with the weight; a left operand of Gemm or MatMul has no output channels.
        rank: Number of axes of the weight.
        transposed: Axis for ConvTranspose (see `Dialect.transposed_axis`), or None. It is not used with groups, because
            the axis then has only the channels of one group.
    """
    if slot != 1 or rank < 2:
        return None
    if node.op == "Conv":
        return 0
    if node.op == "ConvTranspose":
        return transposed if node.attributes.get("group", 1) == 1 else None
    if node.op == "Gemm":
        return 0 if node.attributes.get("transB", 0) else 1
    return 1 if node.op == "MatMul" and rank == 2 else None


def bias_place(model: Model, node: Node) -> tuple[Node, int] | None:
    """Return the node and the number of the input for a linear operator's constant bias, or None if it can have none.

    The bias of a MatMul is the constant vector of the Add that is the only reader of its result.
    """
    if node.op in ("Conv", "ConvTranspose") or (node.op == "Gemm" and node.attributes.get("beta", 1.0) == 1):
        free = len(node.inputs) < 3 or not node.inputs[2] or node.inputs[2] in model.constants
        return (node, 2) if free else None
    readers = model.consumers.get(node.outputs[0], ())
    if node.op != "MatMul" or len(readers) != 1 or node.outputs[0] in model.outputs:
        return None
    add, slot = model.nodes[readers[0][0]], 1 - readers[0][1]
    if add.op != "Add" or add.inputs[slot] not in model.constants:
        return None
    width = model.types[node.outputs[0]].shape[-1]
    return (add, slot) if tuple(model.constants[add.inputs[slot]].dims) == (width,) else None


def quantize_weight(
    weight: Array,
    axis: int | None,
    precision: str,
    floor: Array | float = 0.0,
    limit: float | None = None,
    estimator: WeightEstimator = max_magnitude,
) -> QuantizedTensor:
    """Quantize a weight symmetrically: scale = amax / 127 (INT8), amax / 448 (FP8 E4M3), amax / 57344 (E5M2).

    Channels of zeros get the largest scale of the tensor, so that a bias that is stored with this scale fits.

    Args:
        weight: Float values.
        axis: Axis of the output channels; None: one scale for the tensor.
        precision: "int8", "fp8" or "fp8e5m2".
        floor: Smallest allowed scale, for each channel or for all.
        limit: Largest stored magnitude, so that the scale is amax / limit; None: that of the precision.
        estimator: Estimator of amax for each channel.
    """
    limit = MAX_LEVEL[precision] if limit is None else limit
    values = weight.astype(np.float32)
    others = tuple(i for i in range(values.ndim) if i != axis)
    count = 1 if axis is None else values.shape[axis]
    rows = np.moveaxis(values, axis or 0, 0).reshape(count, values.size // max(1, count))
    largest = np.float32(largest_value(weight.dtype))

    def scales(amax: Array) -> Array:
        scale = np.maximum(np.minimum(np.asarray(amax, np.float32), largest) / np.float32(limit), floor)
        least = float(round_scale(0.0, weight.dtype))
        return round_scale(np.where(scale < least, scale.max(initial=least), scale), weight.dtype)

    def store(data: Array, scale: Array) -> Array:
        scaled = data / scale.astype(np.float32)
        clipped = np.clip(np.rint(scaled) if precision == "int8" else scaled, -limit, limit)
        return np.asarray(clipped.astype(STORAGE_DTYPES[precision]))

    def restore(amax: Array) -> Array:
        scale = scales(amax).reshape(-1, 1)
        return np.asarray(store(rows, scale).astype(np.float32) * scale.astype(np.float32))

    amax = estimator(rows, restore)
    scale = scales(amax[0] if axis is None else amax)
    stored = store(values, scale if axis is None else np.expand_dims(scale, others))
    return QuantizedTensor(stored, scale, np.zeros(scale.shape, STORAGE_DTYPES[precision]), axis)


def quantize_affine(values: Array, scale: Array, zero_point: Array) -> QuantizedTensor:
    """Quantize a constant like an activation with one scale and zero point (ONNX QuantizeLinear, "y = x / s + z").

    Stored values have the type of `zero_point`; values outside its range are clipped.
    """
    scaled = values.astype(np.float32) / scale.astype(np.float32)
    for kind, most in FP8_MAX_BY_FORMAT.items():
        if zero_point.dtype == STORAGE_DTYPES[kind]:
            return QuantizedTensor(np.clip(scaled, -most, most).astype(zero_point.dtype), scale, zero_point, None)
    info = np.iinfo(zero_point.dtype)
    stored = np.clip(np.rint(scaled) + int(zero_point), info.min, info.max).astype(zero_point.dtype)
    return QuantizedTensor(stored, scale, zero_point, None)


def round_scale(scale: Array | float, dtype: npt.DTypeLike) -> Array:
    """Return positive scales in a float type, also for zeros.

    They are at least 1e-10. Small scales in 16 bits are rounded up, because the next one below may be a half of the
    scale, and would cut off as much of the values.
    """
    smallest = max(1e-10, float(ml_dtypes.finfo(dtype).smallest_subnormal))  # type: ignore[no-untyped-call]
    wanted = np.maximum(np.asarray(scale, np.float64), smallest)
    found = wanted.astype(dtype)
    above: Array = np.nextafter(found, np.asarray(np.inf, dtype))
    return np.where(found.astype(np.float64) < wanted * (1 - 2.0**-9), above, found).astype(dtype)


def largest_value(dtype: npt.DTypeLike) -> float:
    """Return the largest magnitude that a scale represents, so that -128 or half a step more are finite."""
    return 0.99 * float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


_OWN_BIAS_SUFFIX = "#bias"


def is_private(model: Model, constant: str) -> bool:
    """Return whether a tensor is a constant that only one input of one node reads, and no output of the model."""
    readers = model.consumers.get(constant, ())
    return constant in model.constants and len(readers) == 1 and constant not in {*model.outputs, *model.captured}


def replace_constants(model: Model, arrays: Mapping[str, Array]) -> Model:
    """Return a copy of a model with new values of some constants, converted to their element types.

    Args:
        arrays: New values by constant, with the constant's shape, which is not checked; other names are ignored.
    """
    proto = copy_message(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in arrays:
            before = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name].astype(before.dtype), tensor.name))
    return replace(model, proto=proto)


def with_own_biases(model: Model, nodes: Iterable[Node]) -> tuple[Model, dict[str, str]]:
    """Return a copy of a model in which no other node reads the biases of `nodes`, and the bias of each by node name.

    A missing bias is added as zeros, a shared one is copied; nodes that cannot have a bias are left out.
    """
    proto, types, found = copy_message(model.proto), dict(model.types), {}
    for node in nodes:
        place = bias_place(model, node)
        output = model.types.get(node.outputs[0])
        if place is None or output is None:
            continue
        owner, slot = place
        known = owner.inputs[slot] if len(owner.inputs) > slot else ""
        if known and is_private(model, known):
            found[node.name] = known
            continue
        channels = output.shape[1 if node.op.startswith("Conv") else -1]
        name = f"{node.name}{_OWN_BIAS_SUFFIX}"
        value = model.constant_array(known) if known else np.zeros(channels, np.float32)
        if value is None or value.shape != (channels,) or NAME_PREFIX in name:
            continue
        weight = model.constant_array(node.inputs[1])
        proto.graph.initializer.append(numpy_helper.from_array(value.astype(weight.dtype), name))  # type: ignore[union-attr]
        inputs = proto.graph.node[owner.index].input
        inputs.extend([""] * (slot + 1 - len(inputs)))
        inputs[slot] = name
        types[name] = TensorType(output.dtype, (channels,))
        found[node.name] = name
    return replace(model, proto=proto, nodes=read_nodes(proto), types=types), found
