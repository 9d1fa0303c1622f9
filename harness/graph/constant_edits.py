"""Copies of a model with other constants and the same nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from onnx import numpy_helper

from harness.graph.model import Model, Node, TensorType, read_nodes
from harness.graph.protos import copy_message
from harness.graph.quantize.protobuf_wire import NAME_PREFIX
from harness.graph.quantize.weights import bias_place
from harness.plugins.api import Array

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
