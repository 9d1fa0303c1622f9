"""Change of the batch size of models that were exported for one sample, like most detectors.

The first size of the inputs is changed, and the constants that Reshape, Resize and Expand read as shapes. Then every
tensor that depends on the inputs is checked: its first axis must be the batch, and its shape for one sample must be
unchanged. Models that mix samples or move them to another axis are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from harness.base.errors import UserError
from harness.graph.model import TensorType
from harness.graph.passes.dimension_sizes import parse_shape
from harness.graph.passes.normalize import externalize_weights, lower_constants, restore_weights
from harness.graph.passes.static_shapes import infer_types, static_types
from harness.graph.protos import attribute_value, copy_message, iter_subgraphs, tensors_read

logger = logging.getLogger(__name__)

Shapes = Mapping[str, str | tuple[int, ...]]
SHAPE_INPUT_SLOT = {"Reshape": 1, "Expand": 1, "Resize": 3}  # number of the input that is the shape of the result
# Operators that work along the first axis, or with indices for one sample, without a change of the result's shape.
BATCH_MIXING_OPS = frozenset(
    {"CumSum", "GatherElements", "GatherND", "GRU", "LSTM", "RNN", "Scatter", "ScatterElements", "ScatterND"}
)
SHAPE_OPS = frozenset({"Shape", "Size"})  # their results do not depend on values


def with_batch_size(proto: onnx.ModelProto, shapes: Shapes, source: str) -> onnx.ModelProto:
    """Return a copy of a model with the batch size of `shapes` if it is fixed to one sample, or else the model itself.

    Raises:
        UserError: The shapes have several batch sizes, or the model cannot be changed; then the message, which starts
            with `source`, names the operator that prevents it.
    """
    batch_sizes = {}
    inputs = {value.name: value for value in proto.graph.input}
    for name, given in shapes.items():
        if name in inputs:
            declared = tuple(dim.dim_value for dim in inputs[name].type.tensor_type.shape.dim)
            size, *rest = parse_shape(given, f"{source}: shapes.{name}")
            if declared[:1] == (1,) and declared[1:] == tuple(rest) and size > 1:
                batch_sizes[name] = size
    if not batch_sizes:
        return proto
    if len(set(batch_sizes.values())) > 1:
        raise UserError(f"{source}: shapes: one number of samples for all inputs, but got {dict(batch_sizes)}")
    samples = next(iter(batch_sizes.values()))
    one = copy_message(proto)
    lower_constants(one.graph)
    weights = externalize_weights(one.graph)
    dependent = set(batch_sizes)  # tensors that are computed from values, and not only from shapes, of the inputs
    for node in one.graph.node:
        if node.op_type not in SHAPE_OPS and dependent.intersection(tensors_read(node)):
            dependent.update(name for name in node.output if name)
    many = copy_message(one)
    _set_batch_size(many.graph, set(batch_sizes), dependent, samples)
    before, after = (static_types(infer_types(model, source).graph) for model in (one, many))
    problem = _first_batch_mixing_op(one.graph, dependent, before, after, samples)
    if problem:
        widened = ", ".join(f"{name!r} to {samples}" for name in batch_sizes)
        raise UserError(
            f"{source}: shapes: the model is fixed to one sample and cannot be widened ({widened}): {problem}; "
            "export it with a dynamic batch"
        )
    restore_weights(many.graph, weights)
    logger.info("%s: batch size changed from 1 to %d", source, samples)
    return many


def _set_batch_size(graph: onnx.GraphProto, inputs: set[str], dependent: set[str], samples: int) -> None:
    """Set the batch size of inputs and of constants that are shapes; clear all other declared shapes."""
    for value in graph.input:
        if value.name in inputs:
            value.type.tensor_type.shape.dim[0].dim_value = samples
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        slot = SHAPE_INPUT_SLOT.get(node.op_type, len(node.input))
        if slot < len(node.input) and node.input[slot] in constants and node.input[0] in dependent:
            sizes = numpy_helper.to_array(constants[node.input[slot]])
            if sizes.size and sizes.flat[0] == 1:
                name = f"{node.input[slot]}.{samples}"
                if name not in constants:
                    batched = np.concatenate([[samples], sizes.ravel()[1:]]).astype(sizes.dtype)
                    constants[name] = numpy_helper.from_array(batched, name)
                    graph.initializer.append(constants[name])
                node.input[slot] = name


def _first_batch_mixing_op(
    graph: onnx.GraphProto,
    dependent: set[str],
    before: Mapping[str, TensorType],
    after: Mapping[str, TensorType],
    samples: int,
) -> str:
    """Describe the first operator whose result is not the same for each sample; "" if there is none."""
    for node in graph.node:
        if not dependent.intersection(tensors_read(node)) or node.op_type in SHAPE_OPS:
            continue
        label = f"{node.op_type} {node.name or node.output[0]!r}"
        if any(True for _ in iter_subgraphs(node)):
            return f"{label} has a subgraph"
        first = node.input[0]
        axis = attribute_value(node, "axis", 0 if node.op_type == "Gather" else None)
        along = axis == 0 or (first in before and axis == -len(before[first].shape))
        if first in dependent and (node.op_type in BATCH_MIXING_OPS or along):
            return f"{label} works along the samples"
        for name in node.output:
            if name in before and name not in after:
                return f"the result of {label} for several samples is not known"
            own = before[name].shape if name in before else None
            if own is not None and (own[:1] != (1,) or after[name].shape != (samples, *own[1:])):
                return f"{label} does not keep samples apart"
    unknown = [value.name for value in graph.output if value.name in dependent and value.name not in before]
    return f"the shape of output {unknown[0]!r} is not known" if unknown else ""
