"""Folding of BatchNormalization into the linear operator before it.

In inference, BatchNormalization is y = s * (x - mean) + b with s = scale / sqrt(var + epsilon) for each channel (Ioffe
and Szegedy 2015, algorithm 2), so it can be part of weight and bias of the operator that computes x.

The rules of onnxscript.rewriter fold the same three operators, but in float32 instead of float64, without a check for
overflow in float16, and not if a weight is shared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from harness.graph.protos import attribute_value, replace_field, tensors_read

_Floats = npt.NDArray[np.float64]


def fold_batch_norms(graph: onnx.GraphProto) -> int:
    """Fold each BatchNormalization that alone reads the result of a Conv, ConvTranspose or Gemm, in place.

    Inferred types stay valid: the operator's output gets the name of the output that it replaces.

    Returns:
        Number of folded nodes.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in tensors_read(node))
    uses.update(value.name for value in graph.output)
    producer = {name: node for node in graph.node for name in node.output if name}
    folded = []
    for node in graph.node:
        linear = producer.get(node.input[0]) if _is_inference_batch_norm(node, constants) else None
        if linear is None or uses[node.input[0]] != 1 or not _fold_into(linear, node, constants, uses):
            continue
        linear.output[0] = node.output[0]
        producer[node.output[0]] = linear
        folded.append(node.name)
    if folded:
        _rewrite_graph(graph, constants, frozenset(folded))
    return len(folded)


def _is_inference_batch_norm(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> bool:
    if node.op_type != "BatchNormalization" or node.domain or sum(map(bool, node.output)) != 1:
        return False
    return not attribute_value(node, "training_mode", 0) and all(name in constants for name in node.input[1:5])


def _fold_into(
    linear: onnx.NodeProto, norm: onnx.NodeProto, constants: dict[str, onnx.TensorProto], uses: Counter[str]
) -> bool:
    """Scale weight and bias of `linear`; return False if its form or its element type does not allow it."""
    if linear.domain or linear.op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    weight_name, bias_name = linear.input[1], linear.input[2] if len(linear.input) > 2 else ""
    if weight_name not in constants or (bias_name and bias_name not in constants):
        return False
    scale, shift, mean, variance = (_float64_values(constants[name]) for name in norm.input[1:5])
    factor = scale / np.sqrt(variance + attribute_value(norm, "epsilon", 1e-5))
    bias = _float64_values(constants[bias_name]) if bias_name else np.zeros(())
    if bias.size not in (1, len(factor)) or (bias.ndim and bias.shape[-1] != bias.size):
        return False
    if linear.op_type == "Gemm":
        bias = bias * attribute_value(linear, "beta", 1.0)
    weight = constants[weight_name]
    dtype = helper.tensor_dtype_to_np_dtype(weight.data_type)
    with np.errstate(over="ignore"):
        new_bias = ((np.broadcast_to(bias.reshape(-1), factor.shape) - mean) * factor + shift).astype(dtype)
        new_weight = _scale_weight(_float64_values(weight), factor, linear).astype(dtype)
    if not (np.isfinite(new_bias).all() and np.isfinite(new_weight).all()):  # usually an overflow of float16
        return False
    if linear.op_type == "Gemm":
        kept = [attribute for attribute in linear.attribute if attribute.name != "beta"]
        replace_field(linear.attribute, [*kept, helper.make_attribute("beta", 1.0)])
    del linear.input[1:]
    linear.input.append(_store_constant(new_weight, weight_name, f"{linear.name}_weight", constants, uses))
    linear.input.append(_store_constant(new_bias, bias_name, f"{linear.name}_bias", constants, uses))
    return True


def _scale_weight(weight: _Floats, factor: _Floats, linear: onnx.NodeProto) -> _Floats:
    if linear.op_type == "Gemm":
        return weight * (factor[:, None] if attribute_value(linear, "transB", 0) else factor)
    if linear.op_type == "Conv":
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    # ConvTranspose: [inputs, outputs / group, ...]; input channels are ordered by group.
    groups = attribute_value(linear, "group", 1)
    split = weight.reshape(groups, -1, *weight.shape[1:])
    return (split * factor.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))).reshape(weight.shape)


def _store_constant(
    array: npt.NDArray[Any], old: str, stem: str, constants: dict[str, onnx.TensorProto], uses: Counter[str]
) -> str:
    """Store new values under the old name, or under a new one if there is none or other nodes read it."""
    name, number = old, 0
    while not name or uses[name] > (name == old):
        name = f"{stem}_{number}" if number else stem
        number += 1
    uses[name] = 1
    constants[name] = numpy_helper.from_array(array, name)
    return name


def _rewrite_graph(graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto], folded: frozenset[str]) -> None:
    nodes = [node for node in graph.node if node.name not in folded]
    used = {name for node in nodes for name in tensors_read(node)} | {v.name for v in graph.output}
    made = {name for node in nodes for name in node.output}
    initializers = [tensor for name, tensor in constants.items() if name in used]
    types = [value for value in graph.value_info if value.name in made]
    for field, values in ((graph.node, nodes), (graph.initializer, initializers), (graph.value_info, types)):
        replace_field(field, values)


def _float64_values(tensor: onnx.TensorProto) -> _Floats:
    return np.asarray(numpy_helper.to_array(tensor)).astype(np.float64)
