"""A model that was exported for one sample, made for several: detectors mostly come like this.

Their inputs say 1, and so do the constants that Reshape, Resize and Expand take as shapes. Both are changed, and then
every tensor behind the inputs is looked at: each has to have the samples along its first axis, and to be for a sample
what it was. What mixes samples, or moves them to another axis, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from harness.errors import UserError
from harness.graph.cleaning.clean import attach, detach, lower_constants
from harness.graph.cleaning.shapes import infer, parse_shape, types_of
from harness.graph.model import TensorType, captures, subgraphs

__all__ = ["rebatched"]

logger = logging.getLogger(__name__)

Shapes = Mapping[str, str | tuple[int, ...]]
SHAPE_INPUT = {"Reshape": 1, "Expand": 1, "Resize": 3}
"""Where an operator takes a shape of its result."""
MIXING = frozenset(
    {"CumSum", "GatherElements", "GatherND", "GRU", "LSTM", "RNN", "Scatter", "ScatterElements", "ScatterND"}
)
"""These go along the first axis, or by indices that are fixed to one sample, and the shape does not tell."""
ASKING = frozenset({"Shape", "Size"})
"""What is behind these is no data."""


def rebatched(proto: onnx.ModelProto, shapes: Shapes, source: str) -> onnx.ModelProto:
    """The model for as many samples as the shapes have, where it is fixed to one; else the model itself.

    Args:
        proto: The model; a changed one is a copy.
        shapes: By input; only the first size may differ from the model's.
        source: What messages call the model.

    Raises:
        UserError: It cannot be changed so, with the operator that keeps it from that.
    """
    wanted = _wanted(proto.graph, shapes, source)
    if not wanted:
        return proto
    if len(set(wanted.values())) > 1:
        raise UserError(f"{source}: shapes: one number of samples for all inputs, but got {dict(wanted)}")
    samples = next(iter(wanted.values()))
    one, many = onnx.ModelProto(), onnx.ModelProto()
    one.CopyFrom(proto)
    lower_constants(one.graph)
    weights = detach(one.graph)
    behind = _behind(one.graph, set(wanted))
    many.CopyFrom(one)
    _widen(many.graph, set(wanted), behind, samples)
    before, after = (types_of(infer(made, source).graph) for made in (one, many))
    mixing = _mixing(one.graph, behind, before, after, samples)
    if mixing:
        inputs = ", ".join(f"{name!r} to {samples}" for name in wanted)
        raise UserError(
            f"{source}: shapes: the model is fixed to one sample and cannot be widened ({inputs}): {mixing}; "
            "export it with a dynamic batch"
        )
    attach(many.graph, weights)
    logger.info("%s: fixed to one sample, made for %d", source, samples)
    return many


def _wanted(graph: onnx.GraphProto, shapes: Shapes, source: str) -> dict[str, int]:
    """Samples by input, for those inputs that are fixed to one."""
    found = {}
    inputs = {value.name: value for value in graph.input}
    for name, given in shapes.items():
        if name in inputs:
            declared = tuple(dim.dim_value for dim in inputs[name].type.tensor_type.shape.dim)
            samples, *rest = parse_shape(given, f"{source}: shapes.{name}")
            if declared[:1] == (1,) and declared[1:] == tuple(rest) and samples > 1:
                found[name] = samples
    return found


def _behind(graph: onnx.GraphProto, inputs: set[str]) -> set[str]:
    """Tensors that are computed from these inputs; what was only asked for its shape is not."""
    found = set(inputs)
    for node in graph.node:
        if node.op_type not in ASKING and found.intersection(_read(node)):
            found.update(name for name in node.output if name)
    return found


def _read(node: onnx.NodeProto) -> tuple[str, ...]:
    """What a node reads, what its bodies read from outside included."""
    return (*node.input, *captures(node))


def _widen(graph: onnx.GraphProto, inputs: set[str], behind: set[str], samples: int) -> None:
    """Write the number of samples into inputs and into constants that are shapes; forget what was said of shapes."""
    for value in graph.input:
        if value.name in inputs:
            value.type.tensor_type.shape.dim[0].dim_value = samples
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        slot = SHAPE_INPUT.get(node.op_type, len(node.input))
        if slot < len(node.input) and node.input[slot] in constants and node.input[0] in behind:
            sizes = numpy_helper.to_array(constants[node.input[slot]])
            if sizes.size and sizes.flat[0] == 1:
                name = f"{node.input[slot]}.{samples}"
                if name not in constants:
                    wide = np.concatenate([[samples], sizes.ravel()[1:]]).astype(sizes.dtype)
                    constants[name] = numpy_helper.from_array(wide, name)
                    graph.initializer.append(constants[name])
                node.input[slot] = name


def _mixing(
    graph: onnx.GraphProto,
    behind: set[str],
    before: Mapping[str, TensorType],
    after: Mapping[str, TensorType],
    samples: int,
) -> str:
    """The first operator whose result is not the same for each sample; "" where there is none."""
    for node in graph.node:
        if not behind.intersection(_read(node)) or node.op_type in ASKING:
            continue
        what = f"{node.op_type} {node.name or node.output[0]!r}"
        if any(True for _ in subgraphs(node)):
            return f"{what} has a body"
        if node.input[0] in behind and (node.op_type in MIXING or _along_samples(node, before)):
            return f"{what} works along the samples"
        for name in node.output:
            if name in before and name not in after:
                return f"what {what} makes of several samples is not known"
            if name in before and not _same(before[name], after[name], samples):
                return f"{what} does not keep samples apart"
    unknown = [value.name for value in graph.output if value.name in behind and value.name not in before]
    return f"the shape of output {unknown[0]!r} cannot be told" if unknown else ""


def _along_samples(node: onnx.NodeProto, types: Mapping[str, TensorType]) -> bool:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    if axis is None:
        return bool(node.op_type == "Gather")  # whose default is 0
    known = types.get(node.input[0])
    first: bool = axis == 0 or (known is not None and axis == -len(known.shape))
    return first


def _same(before: TensorType, after: TensorType, samples: int) -> bool:
    apart: bool = before.shape[:1] == (1,) and after.shape == (samples, *before.shape[1:])
    return apart
