"""Fixed placements: the dimensions that each quantizes, its precision, and those that experts try by runtime."""

import pytest

from search.api import Dimension, Edge, Placement, Space
from search.fixed_placements import FIXED_PLACEMENTS, expert_placements

ROLES = ("linear", "activation", "mul", "pool", "movement", "normalization")
"""A chain in which each node reads what the one before gives."""


def chain(*, output: bool = False, precisions: tuple[str, ...] = ("int8",)) -> Space:
    dimensions = [
        Dimension(
            name=f"d{i}", group="g", kind="node_input", choices=("float", *precisions), role=role,
            edges=(Edge(f"t{i}", f"n{i}", 0),),
        )
        for i, role in enumerate(ROLES)
    ]  # fmt: skip
    end = Dimension(name="end", group="g", kind="output", choices=("float", "int8"), edges=(Edge("z", "", 0),))
    return Space((*dimensions, end) if output else tuple(dimensions))


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("linear", (1, 0, 0, 0, 0, 0)),
        ("linear_pool_concat", (1, 0, 0, 1, 0, 0)),
        ("linear_movement", (1, 0, 0, 0, 1, 0)),
        ("linear_io", (1, 1, 0, 0, 0, 0)),
        ("movers_io", (1, 1, 0, 1, 1, 0)),
        ("gates_io", (1, 1, 1, 1, 1, 0)),
    ],
)
def test_fixed_placement_quantizes_its_roles_and_with_io_their_outputs(name, taken):
    assert FIXED_PLACEMENTS[name](chain(), None) == Placement(taken)


@pytest.mark.parametrize("name", FIXED_PLACEMENTS)
def test_fixed_placement_keeps_float_where_precision_is_unavailable(name):
    both, one = chain(precisions=("int8", "fp8")), chain()
    at_int8, at_fp8 = FIXED_PLACEMENTS[name](both, "int8"), FIXED_PLACEMENTS[name](both, "fp8")
    assert at_int8 == FIXED_PLACEMENTS[name](both, None)
    assert at_fp8.choices == tuple(2 * choice for choice in at_int8.choices)
    assert FIXED_PLACEMENTS[name](one, "fp8") == one.float_placement()


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (False, ["linear_pool_concat", "linear_movement", "linear_add", "movers"]),
        (True, ["movers_io", "linear_io", "gates_io"]),
    ],
)
def test_expert_placements_depend_on_output_dimensions(output, names):
    space = chain(output=output)
    assert list(expert_placements(space)) == [FIXED_PLACEMENTS[name](space, None) for name in names]


def test_expert_placements_of_subspace_use_whole_space():
    part = chain(output=True).subspace(range(len(ROLES)))
    assert part.dimensions == chain().dimensions
    for space in (part, part.with_dimensions(part.dimensions[:3]), part.subspace([0, 1])):
        assert next(expert_placements(space)) == FIXED_PLACEMENTS["movers_io"](space, None)
