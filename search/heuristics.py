"""Placements by expert rules: roles of operators, and the readers of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from search.moves import result_readers
from search.space import Placement, Space

__all__ = ["HEURISTIC_RULES", "expert_placements"]

HeuristicRule = Callable[[Space, str | None], Placement]
"""Makes the placement in a space at a precision; None: each point's first one."""

FUSED_ROLES = frozenset({"linear", "add", "pool", "concat"})
"""Roles that fusing runtimes run in INT8 together."""


def _quantize_inputs(*roles: str) -> HeuristicRule:
    return lambda space, precision: space.quantize_roles(roles, precision)


def _quantize_inputs_and_results(*roles: str) -> HeuristicRule:
    """Return a rule that quantizes the points of some roles, and the readers of the results of `FUSED_ROLES`."""
    moved = FUSED_ROLES.intersection(roles)

    def rule(space: Space, precision: str | None) -> Placement:
        after = result_readers(space)
        before = [index for index, dimension in enumerate(space.dimensions) if dimension.role in roles]
        behind = [i for index in before if space.dimensions[index].role in moved for i in after.get(index, ())]
        return space.quantize_dimensions([*before, *behind], precision)

    return rule


HEURISTIC_RULES: Mapping[str, HeuristicRule] = {
    "linear": _quantize_inputs("linear"),
    "linear_add": _quantize_inputs("linear", "add"),
    "linear_pool": _quantize_inputs("linear", "pool"),
    "linear_pool_concat": _quantize_inputs("linear", "pool", "concat"),
    "linear_movement": _quantize_inputs("linear", "movement"),
    "movers": _quantize_inputs(*FUSED_ROLES),
    "linear_io": _quantize_inputs_and_results("linear"),
    "movers_io": _quantize_inputs_and_results(*FUSED_ROLES),
    "gates_io": _quantize_inputs_and_results(*FUSED_ROLES, "movement", "mul"),
}
"""By name; `initial` and `baselines` of an experiment know them by it. `_io`: inputs and results."""

FUSING_RUNTIME_RULES = ("linear_pool_concat", "linear_movement", "linear_add", "movers")
INTEGER_RUNTIME_RULES = ("movers_io", "linear_io", "gates_io")


def expert_placements(space: Space) -> Iterator[Placement]:
    """Return the placements that are fastest on most models of a kind of runtime, the least obvious first.

    ONNX Runtime runs most operators in INT8 only where the result is quantized too, for all of its readers ("Quantize
    ONNX models", QDQ format); a dialect of that kind has points at outputs, others have none. There the readers of a
    result are quantized with the operator, and gates, x * sigmoid(x), run on integers too or not at all. Products of
    matrices also have a float result: in a Transformer `linear` is the fastest rule, an initial placement by default.

    OpenVINO and TensorRT fuse linear operators, residual additions, pooling and concatenation. The additions alone may
    double the time (a Transformer in BF16 on OpenVINO: 8.8 ms with, 4.1 without them); the heads of attention may be
    moved as integers.
    """
    names = INTEGER_RUNTIME_RULES if space.has_output_points else FUSING_RUNTIME_RULES
    return (HEURISTIC_RULES[name](space, None) for name in names)
