"""Fixed placements: those that roles of operators define, without measurements, and those that experts would try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from search.moves import result_readers
from search.space import Placement, Space

FixedPlacement = Callable[[Space, str | None], Placement]
"""Function of a space and a precision (None: each point's first one) that returns a placement."""

FUSED_ROLES = frozenset({"linear", "add", "pool", "concat"})
"""Roles that OpenVINO and TensorRT fuse and run in INT8 together."""


def _quantize_inputs(*roles: str) -> FixedPlacement:
    return lambda space, precision: space.quantize_roles(roles, precision)


def _quantize_inputs_and_results(*roles: str) -> FixedPlacement:
    """Return a function that quantizes inputs with these roles, and of `FUSED_ROLES` among them also the results."""
    moved = FUSED_ROLES.intersection(roles)

    def place(space: Space, precision: str | None) -> Placement:
        after = result_readers(space)
        before = [index for index, dimension in enumerate(space.dimensions) if dimension.role in roles]
        behind = [i for index in before if space.dimensions[index].role in moved for i in after.get(index, ())]
        return space.quantize_dimensions([*before, *behind], precision)

    return place


FIXED_PLACEMENTS: Mapping[str, FixedPlacement] = {
    "float": lambda space, _: space.float_placement(),
    "all": lambda space, precision: space.quantize_all(precision),
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
"""Fixed placements by the names that experiments and commands use. `_io`: inputs and results are quantized."""

FUSING_RUNTIME_PLACEMENTS = ("linear_pool_concat", "linear_movement", "linear_add", "movers")
INTEGER_RUNTIME_PLACEMENTS = ("movers_io", "linear_io", "gates_io")


def expert_placements(space: Space) -> Iterator[Placement]:
    """Return the three or four placements that are fastest on most models of a kind of runtime, least obvious first.

    ONNX Runtime runs most operators in INT8 only if the result is quantized too, for all of its readers ("Quantize ONNX
    models", QDQ format). Its dialect has points at outputs, those of other runtimes have none. The placements therefore
    quantize the readers of a result with the operator, and one adds gates, x * sigmoid(x). Matrix products may have a
    float result: in a Transformer `linear` is the fastest, and it is an initial placement by default.

    OpenVINO and TensorRT fuse linear operators, residual additions, pooling and concatenation. Quantized additions may
    double the time (a Transformer in BF16 on OpenVINO: 8.8 ms with, 4.1 ms without them). Movement operators such as
    the transpositions of attention heads may run on integers.
    """
    names = INTEGER_RUNTIME_PLACEMENTS if space.has_output_points else FUSING_RUNTIME_PLACEMENTS
    return (FIXED_PLACEMENTS[name](space, None) for name in names)
