"""Operators that a runtime computes wrongly, or refuses, with an INT8 input; each fault is a placement rule.

The faults were found by comparing each quantizable operator, in many shapes, alone and between others, with ONNX
Runtime without optimizations on the same Q/DQ file. FP8 is right in all cases, because it is computed in floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.graph.model import Model, Node
from harness.graph.rules.operator_sets import MOVEMENT_OPS

MAX_EPSILON = 1e-3
"""Of a normalization; wrong results are 43 dB from right ones there, for data with a deviation of 0.3."""


@dataclass(frozen=True, slots=True)
class RuntimeFault:
    """Fault of a runtime.

    Attributes:
        text: The rule as a sentence.
        operators: Types of operators that may have the fault.
        matches: Function that returns whether a node of these types has the fault if its data are quantized.
        also_behind: Operators with one activation or a Concat through which the fault passes, besides
            `_INTEGER_PRESERVING_OPS`.
    """

    text: str
    operators: frozenset[str]
    matches: Callable[[Model, Node], bool]
    also_behind: frozenset[str] = frozenset()


def _reduces_batch(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a mean or sum of [N > 1, C, L] over C, or over L alone with C < N, is 0 to 20 dB off."""
    known = model.types.get(node.inputs[0])
    if known is None or len(known.shape) != 3:
        return False
    axes = {2} if node.op == "GlobalAveragePool" else _reduction_axes(model, node)
    batch, channels, _ = known.shape
    if batch == 1 or (axes is not None and 0 in axes):
        return False
    return axes is None or 1 in axes or channels < batch


def _reduction_axes(model: Model, node: Node) -> set[int] | None:
    """Return the axes of a reduction of a tensor of rank 3 as numbers from 0, or None if they are not constant."""
    given = node.attributes.get("axes", ())
    if len(node.inputs) > 1 and node.inputs[1]:
        axes = model.constant_array(node.inputs[1])
        if axes is None:
            return None
        given = axes.reshape(-1).tolist()
    everything = () if node.attributes.get("noop_with_empty_axes", 0) else range(3)
    return {int(axis) % 3 for axis in given or everything}


def _pads_with_value(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a constant other than 0 is scaled like the data, so the borders are wrong (2 to 19 dB)."""
    if node.attributes.get("mode", "constant") != "constant":
        return False
    value = node.inputs[2] if len(node.inputs) > 2 else ""
    constant = model.constant_array(value)
    return bool(value) and (constant is None or bool(constant.any()))


def _has_large_epsilon(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 normalizes the stored integers with the same epsilon (5 dB with 0.1, for data as above)."""
    return float(node.attributes.get("epsilon", 1e-5)) > 1.001 * MAX_EPSILON


def _is_softmax_of_one(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4: QLinearSoftmax gives 0 instead of 1 over an axis of length 1."""
    known = model.types.get(node.inputs[0])
    return known is not None and bool(known.shape) and known.shape[int(node.attributes.get("axis", -1))] == 1


def _is_cubic(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 cannot run it on integers, which it tries where the result has the scale of the data."""
    return bool(node.attributes.get("mode") == "cubic")


def _has_rounded_bound(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 rounds the bounds of a Clip to steps of the pair in front of it, by up to a step.

    A positive lower bound may become 0, for which a root, a logarithm or a division behind it is 0 to 15 dB off; and a
    bound may fall below the integer that a Floor makes of it. Bounds around 0 (0 and 6) only lose accuracy.
    """
    given = zip((*node.inputs[1:], "", ""), (-np.inf, np.inf), strict=False)
    bounds = [model.constant_array(name) if name else np.array(limit) for name, limit in given]
    if any(bound is None or bound.size != 1 for bound in bounds):  # computed, so unknown
        return True
    low, high = (bound.item() for bound in bounds if bound is not None)
    if low > 0 or high < 0:
        return True
    if not any(math.isfinite(bound) and bound for bound in (low, high)):
        return False
    readers = [model.nodes[index] for index, _ in model.consumers.get(node.outputs[0], ())]
    kinds = {model.types[reader.outputs[0]].dtype for reader in readers if reader.outputs[0] in model.types}
    return any(reader.op in _STEP_OPS for reader in readers) or not kinds <= _FLOAT_TYPES


RUNTIME_FAULTS: Mapping[str, RuntimeFault] = {
    "batched reduction": RuntimeFault(
        "The runtime computes a mean or sum over the rows of several matrices wrongly.",
        frozenset({"GlobalAveragePool", "ReduceMean", "ReduceSum"}),
        _reduces_batch,
    ),
    "padding value": RuntimeFault(
        "The runtime scales the value of a Pad, which is not 0, as if it were data.",
        frozenset({"Pad"}),
        _pads_with_value,
    ),
    "epsilon": RuntimeFault(
        "The runtime adds the large epsilon of a normalization to unscaled data.",
        frozenset({"GroupNormalization", "InstanceNormalization", "LayerNormalization"}),
        _has_large_epsilon,
    ),
    "clip bound": RuntimeFault(
        "The runtime rounds the bounds of a Clip to steps of the pair in front, past 0 or the integer of a Floor.",
        frozenset({"Clip"}),
        _has_rounded_bound,
        also_behind=frozenset({"Add", "Concat", "Div", "Mul", "Sub"}),
    ),
    "softmax of one": RuntimeFault(
        "The runtime computes 0 for a Softmax over an axis of length 1.", frozenset({"Softmax"}), _is_softmax_of_one
    ),
    "cubic resize": RuntimeFault(
        "The runtime cannot resize integers with mode cubic.", frozenset({"Resize"}), _is_cubic
    ),
}
"""Faults by the name of their rule; a dialect names those of its runtime."""

_STEP_OPS = frozenset({"Ceil", "Floor", "Mod", "Round", "Sign"})
_FLOAT_TYPES = frozenset({"bfloat16", "double", "float", "float16"})
_INTEGER_PRESERVING_OPS = MOVEMENT_OPS | {"LeakyRelu", "MaxPool", "PRelu", "Relu"}
"""Operators behind which a runtime dequantizes instead of in front of them."""


def find_affected_nodes(model: Model) -> Mapping[str, frozenset[int]]:
    """Return, by name of the fault, the indices of nodes with it and of nodes that pass stored integers to them."""
    nodes: dict[str, set[int]] = {name: set() for name in RUNTIME_FAULTS}
    tensors: dict[str, set[str]] = {name: set() for name in RUNTIME_FAULTS}
    for node in reversed(model.nodes):
        if node.opaque or not node.inputs:
            continue
        activations = [name for name in node.inputs if model.is_activation(name)]
        alone = node.op == "Concat" or len(activations) == 1
        for name, fault in RUNTIME_FAULTS.items():
            leads = node.op in _INTEGER_PRESERVING_OPS or (alone and node.op in fault.also_behind)
            affected = leads and not tensors[name].isdisjoint(node.outputs)
            if affected or (node.op in fault.operators and fault.matches(model, node)):
                nodes[name].add(node.index)
                tensors[name].update(activations if alone else node.inputs[:1])
    return {name: frozenset(indices) for name, indices in nodes.items()}
