"""Pairs inside one generated kernel: the compiler of TensorRT-RTX makes one of neighbouring operators without weights.

It generates one kernel of everything between two products: a pair in there rounds values and saves no memory traffic.
Where values only move, the operators behind decide. Measured on 1.7 with all points of nine models quantized: of 702
edges that this rule names 10 took effect, of 2145 others 2069.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from harness.graph.model import Model
from harness.graph.rules.agreements import passed_slot
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    ARITHMETIC_OPS,
    MOVEMENT_OPS,
    NORMALIZATION_OPS,
    SOFTMAX_OPS,
)

_GENERATED_OPS = (
    ACTIVATION_OPS
    | ARITHMETIC_OPS
    | NORMALIZATION_OPS
    | SOFTMAX_OPS
    | {"Exp", "GlobalAveragePool", "ReduceMax", "ReduceMean", "ReduceSum"}
)
_EPILOGUE_SOURCES = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""Products whose result is written in float, for a generated kernel behind them."""
_MOVING_OPS = MOVEMENT_OPS | {"Concat", "Dropout", "Identity"}


def find_inner_tensors(model: Model) -> frozenset[str]:
    """Return the tensors that are made and read inside one generated kernel."""
    sources = _find_sources(model)
    return frozenset(
        tensor
        for tensor, ends in _find_ends(model).items()
        if tensor not in model.constants
        and ends <= _GENERATED_OPS | {""}
        and (
            (source := sources.get(tensor, "")) in _GENERATED_OPS | _EPILOGUE_SOURCES | {""}
            or (source == "MatMul" and ends == {"Add"})
        )
    )


def _find_sources(model: Model) -> Mapping[str, str]:
    """Return the operator that computes each tensor, in front of those that move it; none for an input."""
    found: dict[str, str] = {}
    for node in model.nodes:
        slot = 0 if node.op in _MOVING_OPS and not node.opaque else passed_slot(model, node)
        moved = slot is not None and node.op != "MaxPool" and node.inputs[slot] not in model.constants
        for name in node.outputs:
            found[name] = found.get(node.inputs[slot], "") if moved and slot is not None else node.op
    return found


def _find_ends(model: Model) -> Mapping[str, frozenset[str]]:
    """Return the operators that read each tensor, behind those that only move it; "" for an output of the model."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in model.outputs:
        found[name].add("")
    for node in reversed(model.nodes):
        moves = not node.opaque and node.op != "MaxPool"
        moves &= node.op in _MOVING_OPS or passed_slot(model, node) is not None
        ends = set().union(*(found[name] for name in node.outputs)) if moves else {node.op}
        for name in {*node.inputs, *node.captures} - {""}:
            found[name] |= ends
    return {name: frozenset(ends) for name, ends in found.items()}
