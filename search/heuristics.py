"""Placements by expert rules: roles of operators, and the readers of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from search.move_sets import readers
from search.space import Placement, Space

__all__ = ["RULES", "expert_rules"]

Rule = Callable[[Space, str | None], Placement]
"""Makes the placement in a space at a precision; None: each point's first one."""

MOVERS = frozenset({"linear", "add", "pool", "concat"})
"""Roles that fusing runtimes run in INT8 together."""


def _inputs_of(*roles: str) -> Rule:
    return lambda space, precision: space.only(roles, precision)


def _inputs_and_results_of(*roles: str) -> Rule:
    """The points of some roles, and those that read the results of `MOVERS` among them."""
    moved = MOVERS.intersection(roles)

    def rule(space: Space, precision: str | None) -> Placement:
        after = readers(space)
        before = [index for index, dimension in enumerate(space.dimensions) if dimension.role in roles]
        behind = [i for index in before if space.dimensions[index].role in moved for i in after.get(index, ())]
        return space.at([*before, *behind], precision)

    return rule


RULES: Mapping[str, Rule] = {
    "linear": _inputs_of("linear"),
    "linear_add": _inputs_of("linear", "add"),
    "linear_pool": _inputs_of("linear", "pool"),
    "linear_pool_concat": _inputs_of("linear", "pool", "concat"),
    "linear_movement": _inputs_of("linear", "movement"),
    "movers": _inputs_of(*MOVERS),
    "linear_io": _inputs_and_results_of("linear"),
    "movers_io": _inputs_and_results_of(*MOVERS),
    "gates_io": _inputs_and_results_of(*MOVERS, "movement", "mul"),
}
"""By name; `initial` and `baselines` of an experiment know them by it. `_io`: inputs and results."""

FUSING = ("linear_pool_concat", "linear_movement", "linear_add", "movers")
INTEGER = ("movers_io", "linear_io", "gates_io")


def expert_rules(space: Space) -> Iterator[Placement]:
    """Placements that win on the kind of runtime that a space is made for, most surprising first.

    ONNX Runtime runs an operator in INT8 only where its result is quantized too, for all who read it ("Quantize ONNX
    models", QDQ format); a dialect of that kind has points at outputs, others have none. There whatever reads a result
    goes with the operator, and gates, x * sigmoid(x), run on integers too or not at all; in a Transformer the linear
    operators do best without its additions. OpenVINO and TensorRT fuse linear operators, residual additions, pooling
    and concatenation. The additions alone may double the time (a Transformer in BF16 on OpenVINO: 8.8 ms with, 4.1
    without them); the heads of attention may be moved as integers.
    """
    integer = any(dimension.kind == "output" for dimension in space.dimensions)
    return (RULES[name](space, None) for name in (INTEGER if integer else FUSING))
