"""Inputs whose values must not be rounded: parameters of operators, poles, and what leads to them; unfit constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from harness.graph.model import Model, Node
from harness.graph.rules.operator_sets import (
    ACTIVATIONS,
    ARITHMETIC,
    FLOATS,
    LARGEST,
    LINEAR,
    MOVEMENT,
    PARAMETERS,
    POLES,
    POOLING,
    SHAPES,
)
from harness.graph.rules.sentinels import holds_sentinel

__all__ = ["Place", "parameters", "poles", "sentinels", "unheld"]

Place = tuple[int, int]
"""An input of a model's node: index of the node, input."""

_REDUCTIONS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
_JOINS = frozenset({"Concat", "ScatterElements", "ScatterND", "Where"})
_MOVES = MOVEMENT | _JOINS | {
    "Cast", "CastLike", "Compress", "Dropout", "GatherElements", "GatherND", "Identity", "ReverseSequence", "TopK",
}  # fmt: skip
_COMPUTES_SHAPES = _MOVES | ARITHMETIC | _REDUCTIONS | {
    "Abs", "Ceil", "Clip", "Exp", "Floor", "Log", "Mod", "Neg", "Reciprocal", "Relu", "Round", "Sign",
}  # fmt: skip
_ABOVE_ZERO = frozenset({"HardSigmoid", "Sigmoid", "Softplus"})
_KEEPS_ZERO = _MOVES | POOLING | _REDUCTIONS | (ACTIVATIONS - _ABOVE_ZERO) | ARITHMETIC | {
    "Abs", "Ceil", "CumSum", "Floor", "Neg", "Round", "Sign", "Trilu",
}  # fmt: skip
"""Operators that make 0 of 0, and those that may make it of other values that a grid holds (1 - x)."""
_NEVER_NEGATIVE = _ABOVE_ZERO | {
    "Abs", "Exp", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Softmax", "Sqrt",
}  # fmt: skip
_SQUARES = frozenset({"Abs", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2", "ReduceSumSquare"})
_GUARD = 1e-3
"""Smallest value that keeps a denominator away from 0: results become at most a thousand times as large."""

_Demand = tuple[float, bool]
"""What keeps the input of a node away from its pole.

The value that a constant must have at least, and whether a sum or difference may come near to the pole: behind a
square, as in a normalization, the difference of a value and its mean is often 0 and does no harm.
"""


def unheld(model: Model) -> frozenset[str]:
    """Return the constants in floating point with NaN, infinite or huge values, which no scale holds."""
    arrays = ((name, _array(model, name).astype(np.float32)) for name in _floats(model))
    return frozenset(name for name, values in arrays if not (np.abs(values) <= LARGEST).all())


def sentinels(model: Model) -> frozenset[str]:
    """Return the constants in floating point, weights apart, whose scale would round all but a sentinel to 0."""
    read = {name for node in model.nodes if node.op not in LINEAR for name in node.inputs}
    names = [name for name in _floats(model) if name in read and name not in model.fact(unheld)]
    return frozenset(name for name in names if holds_sentinel(_array(model, name), alone=False))


def _floats(model: Model) -> list[str]:
    """Return the names of the constants in floating point."""
    kinds = {name: model.types[name].dtype for name in model.constants if name in model.types}
    return [name for name, kind in kinds.items() if kind in FLOATS]


def _array(model: Model, name: str) -> npt.NDArray[np.floating]:
    array: npt.NDArray[np.floating] = numpy_helper.to_array(model.constants[name])
    return array


def parameters(model: Model) -> frozenset[Place]:
    """Return the inputs that are parameters of their operator, and those of the operators that compute them.

    Shapes and indices are followed through arithmetic, other parameters through what only moves values.
    """
    return _leading(model, SHAPES, _COMPUTES_SHAPES) | _leading(model, PARAMETERS, _MOVES)


def _leading(model: Model, sinks: Mapping[str, frozenset[int]], through: frozenset[str]) -> frozenset[Place]:
    found: set[Place] = set()
    tensors: set[str] = set()
    for node in reversed(model.nodes):
        own = frozenset() if node.opaque else sinks.get(node.op, frozenset())
        if node.op in through and not tensors.isdisjoint(node.outputs):
            own |= frozenset(range(len(node.inputs)))
        found.update((node.index, slot) for slot in own)
        tensors.update(name for slot, name in enumerate(node.inputs) if slot in own and name)
    return frozenset(found)


def poles(model: Model) -> frozenset[Place]:
    """Return the inputs of operators with a pole at 0, and those of operators that pass a 0 on to one.

    A grid rounds small values to 0. Linear operators end the search, for they sum up many values.
    """
    found: set[Place] = set()
    demands: dict[str, _Demand] = {}
    for node in reversed(model.nodes):
        behind = _both(demands[name] for name in node.outputs if name in demands)
        for slot, name in enumerate(() if node.opaque else node.inputs):
            demand = (_GUARD, True) if _is_pole(model, node, slot) else _passed(model, node, slot, behind)
            if demand is not None and name:
                found.add((node.index, slot))
                demands[name] = _both((demand, demands.get(name, demand))) or demand
    return frozenset(found)


def _both(demands: Iterable[_Demand]) -> _Demand | None:
    known = tuple(demands)
    return (max(least for least, _ in known), any(signed for _, signed in known)) if known else None


def _is_pole(model: Model, node: Node, slot: int) -> bool:
    if node.op == "Pow":
        exponent = _constant(model, node.inputs[1])
        return slot == 0 and (exponent is None or bool((exponent < 0).any()))
    return slot in POLES.get(node.op, ())


def _passed(model: Model, node: Node, slot: int, demand: _Demand | None) -> _Demand | None:
    """Return the demand on an input that follows from the one on the node's result; None where none does."""
    if demand is None or node.op not in _KEEPS_ZERO or slot in PARAMETERS.get(node.op, ()):
        return None
    least, signed = demand
    constants = [values for name in node.inputs if (values := _constant(model, name)) is not None]
    if node.op in ("Add", "Mean", "Sub", "Sum") and not constants and not signed:
        return None
    if _is_guarded(model, node, constants, least):
        return None
    squares = node.op in _SQUARES or _is_square(model, node)
    return least**2 if node.op == "Sqrt" else least, signed and not squares


def _is_guarded(model: Model, node: Node, constants: list[npt.NDArray[np.float64]], least: float) -> bool:
    """Return whether a node keeps its result away from 0 by a constant.

    A Clip does not: OpenVINO 2026.4.1 rounds its bounds to stored integers, so a small one becomes 0.
    """
    if node.op not in ("Add", "Max", "Sum") or not any((values >= least).all() for values in constants):
        return False
    others = (name for name in node.inputs if name not in model.constants)
    return node.op == "Max" or all(_is_never_negative(model, name) for name in others)


def _is_never_negative(model: Model, tensor: str) -> bool:
    while (index := model.producer.get(tensor)) is not None:
        node = model.nodes[index]
        if node.op in _NEVER_NEGATIVE or _is_square(model, node):
            return True
        if node.op == "Clip" and len(node.inputs) > 1:
            low = _constant(model, node.inputs[1])
            return low is not None and bool((low >= 0).all())
        if node.op not in (_MOVES | POOLING | _REDUCTIONS) - _JOINS:
            return False
        tensor = node.inputs[0]
    return False


def _is_square(model: Model, node: Node) -> bool:
    if node.op == "Mul":
        return node.inputs[0] == node.inputs[1]
    exponent = _constant(model, node.inputs[1]) if node.op == "Pow" else None
    return exponent is not None and bool((exponent % 2 == 0).all())


def _constant(model: Model, name: str) -> npt.NDArray[np.float64] | None:
    tensor = model.constants.get(name)
    return None if tensor is None else numpy_helper.to_array(tensor).astype(np.float64)
