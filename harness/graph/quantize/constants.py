"""Quantized constants of a model, which are created once for all candidates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from harness.graph.model import Model, Node
from harness.graph.protos import encoded_size_bytes
from harness.graph.quantize import protobuf_wire
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.quantize.weight_estimators import WeightEstimator, max_magnitude
from harness.graph.quantize.weights import (
    MAX_LEVEL,
    QUANTIZABLE_DTYPES,
    Array,
    QuantizedTensor,
    bias_place,
    quantize_affine,
    quantize_weight,
    weight_axis,
)
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.precision_sensitive import find_unquantizable_constants

INLINE_BYTES = 4096
"""Larger tensors of a candidate are kept in the shared external data file."""

_MAX_INT32_BIAS = 2**30  # half of the range, so that the accumulator does not overflow


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedConstant:
    """Encoded quantized constant.

    Attributes:
        output: Name of the dequantized tensor.
        node: DequantizeLinear as an encoded field of a graph.
        tensors: Stored values, scale and zero point.
    """

    output: str
    node: bytes
    tensors: tuple[TensorProto, ...]


class ConstantQuantizer:
    """Quantizer of the constants of a model; names of results do not depend on earlier requests.

    Args:
        weight_estimator: Estimator of the magnitude that each channel's scale represents.
    """

    def __init__(self, model: Model, dialect: Dialect, weight_estimator: WeightEstimator = max_magnitude) -> None:
        self._model = model
        self._dialect = dialect
        self._weight_estimator = weight_estimator
        self._made: dict[str, QuantizedConstant] = {}
        self._scales: dict[str, Array] = {}
        self._files: dict[str, protobuf_wire.DataFile | None] = {}
        self._encoded: dict[QuantizedConstant, tuple[bytes, frozenset[protobuf_wire.DataFile]]] = {}
        self._complete: set[str] = set()

    def quantize_weight_input(self, node: Node, slot: int, precision: str) -> QuantizedConstant:
        """Quantize the weight at input `slot` of a linear operator symmetrically, with one scale per output channel.

        A weight without output channels (see `weight_axis`) gets one scale.
        """
        tensor = self._model.constants[node.inputs[slot]]
        axis = self._channel_axis(node, slot)
        name = f"{tensor.name}{NAME_PREFIX}{precision}.axis{axis}"
        if name not in self._made:
            self._store_quantized(name, self._quantize_weight(tensor.name, axis, precision))
        return self._made[name]

    def quantize_operand(self, tensor: str, precision: str, scale: Array, zero_point: Array) -> QuantizedConstant:
        """Quantize a constant operand that is taken together with an activation, with a scalar scale and zero point."""
        name = f"{tensor}{NAME_PREFIX}{precision}.{float(scale):.9g}.{float(zero_point):g}"
        if name not in self._made:
            self._store_quantized(
                name, quantize_affine(numpy_helper.to_array(self._model.constants[tensor]), scale, zero_point)
            )
        return self._made[name]

    def quantize_weight_and_bias(self, node: Node, data_scale: Array) -> dict[int, QuantizedConstant]:
        """Quantize a linear operator's weight to INT8, its bias to INT32 (scale = alpha x data scale x weight scale).

        Alpha is that of a Gemm, otherwise 1: ONNX Runtime 1.24 adds the stored bias to the integer products and scales
        their sum by all three (microsoft/onnxruntime#28130). It would quantize a float bias itself, without alpha
        (weight_bias_quantization.cc), so a negative alpha makes these scales negative.

        Weight scales are increased if the bias would not fit into 32 bits (channels with weights near 0; ONNX Runtime's
        `quantize_static` does the same). A bias with another shape than [channels] is left out.

        Returns:
            The weight by the key 1, and the bias, if there is one, by 2; the bias of a MatMul is in the Add after it
            (see `bias_place`).
        """
        weight = self.quantize_weight_input(node, 1, "int8")
        bias_name = self._bias_name(node)
        if bias_name is None:
            return {1: weight}
        bias = numpy_helper.to_array(self._model.constants[bias_name]).astype(np.float64)
        suffix = f"{node.name}.channels" if data_scale.ndim else f"{node.name}.{float(data_scale):.9g}"
        step = node.attributes.get("alpha", 1.0) * data_scale
        if data_scale.ndim:  # of a depthwise Conv, several of whose outputs may read one channel
            step = np.repeat(step, bias.size // data_scale.size)
        floor = np.abs(bias / (step.astype(np.float64) * _MAX_INT32_BIAS))
        if np.any(self._scales[weight.output] < floor):
            name, axis = f"{node.inputs[1]}{NAME_PREFIX}widened.{suffix}", self._channel_axis(node, 1)
            if name not in self._made:
                lowest = floor if axis is not None else floor.max()
                self._store_quantized(name, self._quantize_weight(node.inputs[1], axis, "int8", lowest))
            weight = self._made[name]
        name = f"{bias_name}{NAME_PREFIX}int32.{suffix}"
        if name not in self._made:
            scale = np.asarray(step * self._scales[weight.output], np.float32)
            stored = np.rint(bias / scale.astype(np.float64)).astype(np.int32)
            axis = 0 if scale.ndim else None
            self._store_quantized(name, QuantizedTensor(stored, scale, np.zeros(scale.shape, np.int32), axis))
        return {1: weight, 2: self._made[name]}

    @cached_property
    def float_records(self) -> Mapping[str, bytes]:
        """Constants of the float model by name as encoded fields of a graph: inline, or references into a data file."""
        return {name: self._encode_tensor(tensor) for name, tensor in self._model.constants.items()}

    def write_files(self, stored: Collection[QuantizedConstant], folder: Path) -> list[bytes]:
        """Write the data files that the float model and some constants refer to, unless they exist.

        Returns:
            For each constant in order: its tensors as encoded fields of a graph, inline or as references into a data
                file.
        """
        for each in stored:
            if each not in self._encoded:
                files = frozenset(filter(None, map(self._data_file_for, each.tensors)))
                self._encoded[each] = b"".join(map(self._encode_tensor, each.tensors)), files
        encoded = [self._encoded[each] for each in stored]
        for file in self._float_files.union(*(files for _, files in encoded)):
            file.write(folder)
        return [records for records, _ in encoded]

    @cached_property
    def _float_files(self) -> frozenset[protobuf_wire.DataFile]:
        return frozenset(filter(None, map(self._data_file_for, self._model.constants.values())))

    def _encode_tensor(self, tensor: TensorProto) -> bytes:
        file = self._data_file_for(tensor)
        return file.references[tensor.name] if file else protobuf_wire.encode_initializer(tensor)

    def _data_file_for(self, tensor: TensorProto) -> protobuf_wire.DataFile | None:
        """Return the data file of a constant, or None if the constant is small enough for the model file.

        All large constants of the float model are in one data file, all weights of one precision in another.
        """
        name, model = tensor.name, self._model
        precision = name.rpartition(NAME_PREFIX)[2].partition(".")[0]
        together = [tensor]
        if name in self._files:
            return self._files[name]
        if name in model.constants:
            together = list(model.constants.values())
        elif precision in MAX_LEVEL and precision not in self._complete:
            self._complete.add(precision)
            found: dict[str, QuantizedConstant] = {}
            damaged = model.cached_analysis(find_unquantizable_constants)
            for node in model.nodes:
                linear = node.op in self._dialect.linear_ops and not node.opaque
                for slot, each in enumerate(node.inputs[:2] if linear else ()):
                    # Integers, such as coordinates, are no weights; those with NaN or infinite values stay float.
                    known = each in model.constants and each not in damaged
                    if known and model.types[each].dtype in QUANTIZABLE_DTYPES:
                        stored = self.quantize_weight_input(node, slot, precision)
                        found[stored.output] = stored
            together = [each for stored in found.values() for each in stored.tensors]
        for group in (together, [tensor]):
            if name not in self._files:
                large = {t.name: t for t in group if t.HasField("raw_data") and encoded_size_bytes(t) > INLINE_BYTES}
                file = protobuf_wire.DataFile(large)
                self._files.update({t.name: file if t.name in large else None for t in group})
        return self._files[name]

    def _bias_name(self, node: Node) -> str | None:
        """Return the constant of a linear operator's bias if it may be stored as INT32, else None."""
        place = bias_place(self._model, node)
        if place is None or len(place[0].inputs) <= place[1] or node.attributes.get("alpha", 1.0) == 0:
            return None
        name = place[0].inputs[place[1]]
        bias, weight = self._model.constants.get(name), self._model.constants[node.inputs[1]]
        if bias is None or bias.data_type != TensorProto.FLOAT:
            return None
        if node.op == "MatMul":  # the runtime fuses it to a Gemm if the weight is a matrix and the bias has values
            damaged = name in self._model.cached_analysis(find_unquantizable_constants)
            return None if damaged or len(weight.dims) != 2 else name
        axis = self._channel_axis(node, 1)
        channels = None if axis is None else weight.dims[axis]
        return name if len(bias.dims) == 1 and channels in (None, bias.dims[0]) else None

    def _quantize_weight(
        self, name: str, axis: int | None, precision: str, floor: Array | float = 0.0
    ) -> QuantizedTensor:
        weight = numpy_helper.to_array(self._model.constants[name])
        limit = self._dialect.weight_limit if precision == "int8" else None
        return quantize_weight(weight, axis, precision, floor, limit, self._weight_estimator)

    def _channel_axis(self, node: Node, slot: int) -> int | None:
        rank = len(self._model.constants[node.inputs[slot]].dims)
        return weight_axis(node, slot, rank, self._dialect.transposed_axis)

    def _store_quantized(self, name: str, quantized: QuantizedTensor) -> None:
        parts = {name: quantized.values, f"{name}.scale": quantized.scale, f"{name}.zero": quantized.zero_point}
        axis = b"" if quantized.axis is None else protobuf_wire.encode_axis(quantized.axis)
        output = f"{name}.dq"
        node = protobuf_wire.encode_node("DequantizeLinear", parts, output, attributes=axis)
        tensors = tuple(numpy_helper.from_array(np.asarray(values, order="C"), key) for key, values in parts.items())
        self._made[name] = QuantizedConstant(output, node, tensors)
        self._scales[output] = quantized.scale
