"""Inputs that must not be quantized: parameters of operators, poles, inputs that lead to them, and some constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from harness.graph.model import Model, Node
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    ARITHMETIC_OPS,
    LINEAR_OPS,
    MAX_CONSTANT_MAGNITUDE,
    MOVEMENT_OPS,
    PARAMETER_SLOTS,
    POLE_SLOTS,
    POOLING_OPS,
    QUANTIZABLE_FLOAT_TYPES,
    SHAPE_SLOTS,
)
from harness.graph.rules.sentinels import MIN_SENTINEL_MAGNITUDE, holds_sentinel

NodeInput = tuple[int, int]
"""An input of a model's node: index of the node, input."""

_REDUCTION_OPS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
_JOIN_OPS = frozenset({"Concat", "ScatterElements", "ScatterND", "Where"})
_VALUE_PRESERVING_OPS = MOVEMENT_OPS | _JOIN_OPS | {
    "Cast", "CastLike", "Compress", "Dropout", "GatherElements", "GatherND", "Identity", "ReverseSequence", "TopK",
}  # fmt: skip
_SHAPE_COMPUTING_OPS = _VALUE_PRESERVING_OPS | ARITHMETIC_OPS | _REDUCTION_OPS | {
    "Abs", "Ceil", "Clip", "Exp", "Floor", "Log", "Mod", "Neg", "Reciprocal", "Relu", "Round", "Sign",
}  # fmt: skip
_POSITIVE_OPS = frozenset({"HardSigmoid", "Sigmoid", "Softplus"})
_ZERO_PRESERVING_OPS = _VALUE_PRESERVING_OPS | POOLING_OPS | _REDUCTION_OPS | (ACTIVATION_OPS - _POSITIVE_OPS)
_ZERO_PRESERVING_OPS |= ARITHMETIC_OPS | {
    "Abs", "Ceil", "CumSum", "Floor", "Neg", "Round", "Sign", "Trilu",
}  # fmt: skip
"""Operators that make 0 of 0, and those that may make it of other values that a grid holds (1 - x)."""
_NONNEGATIVE_OPS = _POSITIVE_OPS | {
    "Abs", "Exp", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Softmax", "Sqrt",
}  # fmt: skip
_POLE_OPS = frozenset(POLE_SLOTS) | {"Pow"}
_EVEN_OPS = frozenset({"Abs", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2", "ReduceSumSquare"})
_MIN_GUARD_VALUE = 0.1
"""Smallest value that guards a denominator: small values that round to 0 become at most ten times as large by it.

A guard behind a Sqrt may be smaller, 0.01; the 1e-5 or 1e-3 that a normalization adds to its variance is no guard.
"""

_Demand = tuple[float, bool]
"""What keeps the input of a node away from its pole.

The value that a constant must have at least, and whether a sum or difference may come near to the pole: behind a
square, as in a normalization, the difference of a value and its mean is often 0 and does no harm.
"""
_SIGN_PRESERVING_OPS = (_VALUE_PRESERVING_OPS | POOLING_OPS | _REDUCTION_OPS) - _JOIN_OPS


def find_unquantizable_constants(model: Model) -> frozenset[str]:
    """Return the names of floating-point constants with NaN, infinite or huge (above 1e30) values."""
    magnitudes = model.cached_analysis(_largest_magnitudes)
    return frozenset(name for name, largest in magnitudes.items() if not largest <= MAX_CONSTANT_MAGNITUDE)


def find_sentinel_constants(model: Model) -> frozenset[str]:
    """Return the names of constants, except weights, whose scale would round nearly all values but a sentinel to 0."""
    read = {name for node in model.nodes if node.op not in LINEAR_OPS for name in node.inputs}
    magnitudes = model.cached_analysis(_largest_magnitudes)
    names = (name for name in read if MIN_SENTINEL_MAGNITUDE <= magnitudes.get(name, 0) <= MAX_CONSTANT_MAGNITUDE)
    return frozenset(
        name for name in names if holds_sentinel(numpy_helper.to_array(model.constants[name]), alone=False)
    )


def _largest_magnitudes(model: Model) -> Mapping[str, float]:
    """Return the largest magnitude of each floating-point constant that is not empty; NaN if a value is NaN."""
    found: dict[str, float] = {}
    for name, tensor in model.constants.items():
        if name in model.types and model.types[name].dtype in QUANTIZABLE_FLOAT_TYPES:
            # The bytes of float32 are not copied, which matters with thousands of small constants.
            raw = tensor.raw_data if tensor.data_type == onnx.TensorProto.FLOAT else b""
            values = np.frombuffer(raw, "<f4") if raw else numpy_helper.to_array(tensor)
            if values.size:
                lowest, highest = float(values.min()), float(values.max())
                found[name] = max(-lowest, highest) if lowest == lowest else lowest
    return found


def find_parameter_inputs(model: Model) -> frozenset[NodeInput]:
    """Return the inputs that are parameters of their operator, and the inputs from which these are computed.

    Shapes and indices are traced back through arithmetic, other parameters through operators that only move values.
    """
    return _inputs_leading_to(model, SHAPE_SLOTS, _SHAPE_COMPUTING_OPS) | _inputs_leading_to(
        model, PARAMETER_SLOTS, _VALUE_PRESERVING_OPS
    )


def _inputs_leading_to(
    model: Model, sinks: Mapping[str, frozenset[int]], through: frozenset[str]
) -> frozenset[NodeInput]:
    found: set[NodeInput] = set()
    tensors: set[str] = set()
    for node in reversed(model.nodes):
        own = frozenset() if node.opaque else sinks.get(node.op, frozenset())
        if node.op in through and not tensors.isdisjoint(node.outputs):
            own |= frozenset(range(len(node.inputs)))
        if not own:
            continue
        found.update((node.index, slot) for slot in own)
        tensors.update(name for slot, name in enumerate(node.inputs) if slot in own and name)
    return frozenset(found)


def find_cache_nodes(model: Model) -> frozenset[int]:
    """Return the indices of the nodes that extend a cache and return it as an output.

    A cache is an input whose values are joined with others, by Concat or ScatterND, and read by the rest of the model.
    """
    floats = {name for name, kind in model.types.items() if kind.dtype in QUANTIZABLE_FLOAT_TYPES}
    joined: dict[str, bool] = dict.fromkeys(floats.intersection(model.inputs), False)
    for node in model.nodes:
        moved = [joined[name] for name in node.inputs if name in joined]
        if moved and not node.opaque and node.op in _VALUE_PRESERVING_OPS:
            joined.update((name, any(moved) or node.op in _JOIN_OPS) for name in node.outputs if name in floats)
    found: set[int] = set()
    for output in filter(joined.get, model.outputs):
        path, queue = set(), [output]
        while queue:
            maker = model.producer_node(queue.pop())
            if maker is not None and maker.index not in path:
                path.add(maker.index)
                queue += [name for name in maker.inputs if name in joined]
        joins = (model.nodes[index] for index in path if model.nodes[index].op in _JOIN_OPS)
        readers = {reader for join in joins for name in join.outputs for reader, _ in model.consumers.get(name, ())}
        if not readers <= path:
            found |= path
    return frozenset(found)


def find_pole_inputs(model: Model) -> frozenset[NodeInput]:
    """Return the inputs of operators with a pole at 0, and of operators before them that keep a value at 0.

    Quantization rounds small values to 0. Linear operators end the search, because they sum many values.
    """
    found: set[NodeInput] = set()
    demands: dict[str, _Demand] = {}
    for node in reversed(model.nodes):
        behind = _merge_demands(demands[name] for name in node.outputs if name in demands)
        if node.opaque or (behind is None and node.op not in _POLE_OPS):
            continue
        passed, poles = _propagate_demand(model, node, behind), POLE_SLOTS.get(node.op, frozenset())
        if node.op == "Pow":
            exponent = _float64_constant(model, node.inputs[1])
            poles = frozenset({0}) if exponent is None or bool((exponent < 0).any()) else poles
        for slot, name in enumerate(node.inputs):
            demand = None if slot in PARAMETER_SLOTS.get(node.op, ()) else passed
            if slot in poles:
                demand = (_MIN_GUARD_VALUE, True)
            if demand is not None and name:
                found.add((node.index, slot))
                demands[name] = _merge_demands((demand, demands.get(name, demand))) or demand
    return frozenset(found)


def _merge_demands(demands: Iterable[_Demand]) -> _Demand | None:
    known = tuple(demands)
    return (max(least for least, _ in known), any(signed for _, signed in known)) if known else None


def _propagate_demand(model: Model, node: Node, demand: _Demand | None) -> _Demand | None:
    """Return the demand on the inputs of a node that follows from the demand on its result, or None.

    A constant, such as an added epsilon, may keep the result away from 0. The bounds of a Clip do not count, because
    OpenVINO 2026.4.1 rounds them to stored integers, so small ones become 0.
    """
    if demand is None or node.op not in _ZERO_PRESERVING_OPS:
        return None
    least, signed = demand
    constants = [values for name in node.inputs if (values := _float64_constant(model, name)) is not None]
    if node.op in ("Add", "Mean", "Sub", "Sum") and not constants and not signed:
        return None
    if node.op in ("Add", "Max", "Sum") and any((values >= least).all() for values in constants):
        others = (name for name in node.inputs if name not in model.constants)
        if node.op == "Max" or model.cached_analysis(find_nonnegative_tensors).issuperset(others):
            return None
    squares = node.op in _EVEN_OPS or _is_square(model, node)
    return least**2 if node.op == "Sqrt" else least, signed and not squares


def find_nonnegative_tensors(model: Model) -> frozenset[str]:
    """Return the results of nodes that are never negative, in one pass through the graph."""
    found: set[str] = set()
    for node in model.nodes:
        positive = node.op in _NONNEGATIVE_OPS or _is_square(model, node)
        if not positive and node.op == "Clip" and len(node.inputs) > 1:
            low = _float64_constant(model, node.inputs[1])
            positive = low is not None and bool((low >= 0).all())
        elif not positive and node.op in _SIGN_PRESERVING_OPS:
            positive = node.inputs[0] in found
        if positive:
            found.update(node.outputs)
    return frozenset(found)


def _is_square(model: Model, node: Node) -> bool:
    if node.op == "Mul":
        return node.inputs[0] == node.inputs[1]
    exponent = _float64_constant(model, node.inputs[1]) if node.op == "Pow" else None
    return exponent is not None and bool((exponent % 2 == 0).all())


def _float64_constant(model: Model, name: str) -> npt.NDArray[np.float64] | None:
    values = model.constant_array(name)
    return None if values is None else values.astype(np.float64)
