"""Normalization of a model's structure: names of nodes, constants as initializers, folded BatchNormalization.

During preparation, large weights are replaced by inputs (`externalize_weights`, `restore_weights`), because passes of
ONNX serialize the model, which is limited to 2 GiB, and protobuf copies a tensor whenever it moves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import checker, helper, numpy_helper

from harness.graph.passes.static_shapes import static_types
from harness.graph.protos import (
    attribute_value,
    constant_value,
    copy_message,
    encoded_size_bytes,
    extend_field,
    is_standard_op,
    iter_graphs,
    opset_versions,
    replace_field,
    tensors_read,
)

Weights = dict[str, onnx.TensorProto]
"""Initializers by name that are kept outside of the model."""

MAX_SHOWN_BYTES = 4096  # larger initializers are externalized; smaller ones may be shapes, which inference needs
MAX_FOLDED_BYTES = 1 << 28  # larger results are not folded
MASK_PREFIX = "qdq.unknown."


def externalize_weights(graph: onnx.GraphProto) -> Weights:
    """Turn the initializers of the main graph above 4096 bytes into its inputs, in place, and return them by name."""
    weights = {tensor.name: tensor for tensor in graph.initializer if encoded_size_bytes(tensor) > MAX_SHOWN_BYTES}
    if weights:
        replace_field(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in weights])
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights.values())
    return weights


def restore_weights(graph: onnx.GraphProto, weights: Weights) -> None:
    """Undo `externalize_weights`, in place, for the weights that nodes or outputs still use; others are removed."""
    used = {name for node in graph.node for name in tensors_read(node)}
    used.update(value.name for value in graph.output)
    replace_field(graph.input, [value for value in graph.input if value.name not in weights])
    extend_field(graph.initializer, [tensor for name, tensor in weights.items() if name in used])


def isolate_custom_ops(proto: onnx.ModelProto) -> list[str]:
    """Move operators that ONNX's own domains do not define into a separate domain, in place.

    Plug-in operators of runtimes are often exported in ONNX's domain (EfficientNMS_TRT), where the checker and the
    version converter refuse them.

    Returns:
        All operators that ONNX does not define, in any domain, as "domain.op", sorted.
    """
    opsets = opset_versions(proto)
    custom = [n for graph in iter_graphs(proto.graph) for n in graph.node if not is_standard_op(n, opsets)]
    names = sorted({f"{node.domain or 'ai.onnx'}.{node.op_type}" for node in custom})
    for node in custom:
        if node.domain in ("", "ai.onnx.ml", "ai.onnx.preview.training"):
            node.domain = MASK_PREFIX + node.domain
    for domain in sorted({node.domain for node in custom} - opsets.keys()):
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return names


def restore_custom_ops(proto: onnx.ModelProto) -> None:
    """Undo `isolate_custom_ops`, in place."""
    for graph in iter_graphs(proto.graph):
        for node in graph.node:
            if node.domain.startswith(MASK_PREFIX):
                node.domain = node.domain.removeprefix(MASK_PREFIX)
    replace_field(
        proto.opset_import, [opset for opset in proto.opset_import if not opset.domain.startswith(MASK_PREFIX)]
    )


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node of the main graph a unique name, in place; unique names are kept.

    The names are part of recorded results, so a pass with other names (onnx_ir's NameFixPass) cannot replace this one.
    """
    taken = {node.name for node in graph.node}
    seen: set[str] = set()
    last_numbers: dict[str, int] = {}  # by stem, so that thousands of equal names do not take quadratic time
    for index, node in enumerate(graph.node):
        if not node.name or node.name in seen:
            stem = node.name or f"{node.op_type}_{index}"
            name, number = stem, last_numbers.get(stem, 0)
            while name in taken or name in seen:
                number += 1
                name = f"{stem}_{number}"
            node.name, last_numbers[stem] = name, number
        seen.add(node.name)


def inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the bodies of its local functions in place of their calls; the model itself without any."""
    if not proto.functions:
        return proto
    import onnx_ir as ir  # takes 1 s and 46 MiB, with SymPy
    from onnx_ir.passes.common import InlinePass

    return ir.to_proto(InlinePass()(ir.from_proto(proto)).model)


def lower_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes of the main graph, except sparse ones, into initializers, in place."""
    rest = []
    for node in graph.node:
        value = constant_value(node) if node.op_type == "Constant" and not node.domain else None
        if value is None:
            rest.append(node)
        else:
            value.name = node.output[0]
            extend_field(graph.initializer, [value])
    if len(rest) < len(graph.node):
        replace_field(graph.node, rest)


def densify_sparse_initializers(graph: onnx.GraphProto) -> None:
    """Turn sparse initializers of the main graph into dense ones, in place; those above 256 MiB stay sparse."""
    kept = []
    for sparse in graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        if math.prod(sparse.dims) * values.itemsize > MAX_FOLDED_BYTES:
            kept.append(sparse)
            continue
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        positions = np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)
        dense[positions] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    replace_field(graph.sparse_initializer, kept)


def check_valid(proto: onnx.ModelProto, constants: Iterable[onnx.TensorProto] = ()) -> None:
    """Raise `onnx.checker.ValidationError` if a model is not valid ONNX; custom operators are allowed.

    Args:
        proto: Model, with large initializers left out, because the checker serializes it, which is limited to 2 GiB.
        constants: The initializers that were left out.
    """
    checked = copy_message(proto)
    checked.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in constants)
    for value in checked.graph.output:
        if not value.type.WhichOneof("value") or value.type.HasField("tensor_type"):
            # The checker insists on a declared type of outputs, which runtimes and `load` infer.
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
    isolate_custom_ops(checked)
    checker.check_model(checked)


_Floats = npt.NDArray[np.float64]


def fold_batch_norms(graph: onnx.GraphProto) -> int:
    """Fold each BatchNormalization that is the only reader of a Conv, ConvTranspose or Gemm; return their number.

    In inference it is y = s * (x - mean) + b with s = scale / sqrt(var + epsilon) for each channel (Ioffe and Szegedy
    2015, algorithm 2), so it can be folded into weight and bias of the operator that computes x. The graph is changed
    in place; inferred types stay valid, because the output of the operator gets the name of the replaced output.

    The rules of onnxscript.rewriter fold the same three operators, but in float32 instead of float64, without a check
    for overflow in float16, and not if a weight is shared.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in tensors_read(node))
    uses.update(value.name for value in graph.output)
    producer = {name: node for node in graph.node for name in node.output if name}
    folded = set()
    for node in graph.node:
        if node.op_type != "BatchNormalization" or node.domain or sum(map(bool, node.output)) != 1:
            continue
        known = not attribute_value(node, "training_mode", 0) and all(name in constants for name in node.input[1:5])
        linear = producer.get(node.input[0]) if known else None
        if linear is None or uses[node.input[0]] != 1 or not _fold_into(linear, node, constants, uses):
            continue
        linear.output[0] = node.output[0]
        producer[node.output[0]] = linear
        folded.add(node.name)
    if folded:
        _rewrite_graph(graph, constants, folded)
    return len(folded)


def normalize_resizes(graph: onnx.GraphProto) -> None:
    """Write each Resize in a form that ONNX Runtime accepts after its optimizations; the results do not change.

    Scales or sizes of all axes replace the attribute `axes`, which versions 1.24.4 and 1.32.0 ignore when they change
    the layout around quantized convolutions. Sizes replace scales whose products with the sizes of the data are just
    below an integer: version 1.32.0 then infers another size than it computes.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in tensors_read(node))
    types, changed = static_types(graph), False
    for node in graph.node:
        if node.op_type != "Resize" or node.domain or not {node.input[0], node.output[0]} <= types.keys():
            continue
        shape, result = (np.array(types[name].shape) for name in (node.input[0], node.output[0]))
        inputs = _resize_inputs_of_all_axes(node, shape, result, constants)
        if inputs:
            names = ["", "roi", "scales", "sizes"]
            for slot, values in inputs.items():
                names[slot] = _store_constant(values, "", f"{node.name}_{names[slot]}", constants, uses)
            replace_field(node.input, [node.input[0], *(names[slot] if slot in inputs else "" for slot in (1, 2, 3))])
            kept = [a for a in node.attribute if a.name not in ("axes", "keep_aspect_ratio_policy")]
            replace_field(node.attribute, kept)
            changed = True
    if changed:
        _rewrite_graph(graph, constants, ())


def _resize_inputs_of_all_axes(
    node: onnx.NodeProto, shape: npt.NDArray[Any], result: npt.NDArray[Any], constants: Mapping[str, onnx.TensorProto]
) -> dict[int, npt.NDArray[Any]]:
    """Return new constant inputs of a Resize by number; empty if the node stays as it is."""
    given = [numpy_helper.to_array(constants[name]) if name in constants else np.empty(0) for name in node.input[1:]]
    region, scales, sizes = [*given, *[np.empty(0)] * 3][:3]
    named = attribute_value(node, "axes", None)
    axes = np.array(range(len(shape)) if named is None else named, int) % len(shape)
    found: dict[int, npt.NDArray[Any]] = {}
    if named is not None and len(sizes) == len(axes):
        policy, ratios = attribute_value(node, "keep_aspect_ratio_policy", "stretch"), sizes / shape[axes]
        ratio = {"not_larger": ratios.min(), "not_smaller": ratios.max()}.get(policy, ratios)
        if np.allclose(ratio * shape[axes], result[axes], rtol=1e-6):  # else the ratio of sizes is not the scale
            found[3] = result
    elif len(scales) == len(axes):
        every = np.ones(len(shape), np.float32)
        every[axes] = scales
        exact = (result / shape).astype(np.float32)
        if (np.floor(every.astype(np.float64) * shape) != result).any() and np.array_equal(every, exact):
            found[3] = result
        elif named is not None:
            found[2] = every
    if found and len(region):
        found[1] = np.repeat(np.array([0, 1], region.dtype), len(shape))
        found[1][[*axes, *(axes + len(shape))]] = region
    is_computed = any(node.input[1:2]) and node.input[1] not in constants
    return {} if is_computed else dict(sorted(found.items()))


def _fold_into(
    linear: onnx.NodeProto, norm: onnx.NodeProto, constants: dict[str, onnx.TensorProto], uses: Counter[str]
) -> bool:
    """Scale weight and bias of `linear`; return False if its inputs or its element type do not allow it."""
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
    """Store new values as constant `old`, or under a new name if it is "" or other nodes read it; return the name."""
    name, number = old, 0
    while not name or uses[name] > (name == old):
        name = f"{stem}_{number}" if number else stem
        number += 1
    uses[name] = 1
    constants[name] = numpy_helper.from_array(array, name)
    return name


def _rewrite_graph(graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto], folded: Collection[str]) -> None:
    nodes = [node for node in graph.node if node.name not in folded]
    used = {name for node in nodes for name in tensors_read(node)} | {v.name for v in graph.output}
    made = {name for node in nodes for name in node.output}
    initializers = [tensor for name, tensor in constants.items() if name in used]
    types = [value for value in graph.value_info if value.name in made]
    for field, values in ((graph.node, nodes), (graph.initializer, initializers), (graph.value_info, types)):
        replace_field(field, values)


def _float64_values(tensor: onnx.TensorProto) -> _Floats:
    return np.asarray(numpy_helper.to_array(tensor)).astype(np.float64)
