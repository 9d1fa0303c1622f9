"""A foreign Q/DQ model becomes the placement that agrees with most of its edges."""

import itertools

import pytest

from search.space import Dimension, Edge, Placement, Space

EDGES = tuple(Edge(f"t{i}", f"n{i}", 0) for i in range(5))
SPACE = Space((Dimension(name="p", group="g", kind="node_input", choices=("float", "int8", "fp8"), edges=EDGES),))


@pytest.mark.parametrize(
    ("precisions", "choice"),
    [
        ((), 0),
        (("int8", "int8"), 0),
        (("int8", "int8", "int8"), 1),
        (("fp8", "fp8", "int8"), 2),
        (("int8", "int8", "fp8"), 1),
    ],
)
def test_a_dimension_is_quantized_when_more_than_half_of_its_edges_are(precisions, choice):
    assert SPACE.nearest(dict(zip(EDGES, precisions, strict=False))) == Placement((choice,))


def overlapping(*spans: tuple[int, ...]) -> Space:
    """A dimension over each span of edges: a child region's input stands for several node inputs."""
    return Space(
        tuple(
            Dimension(
                name=f"d{number}", group="g", kind="node_input", choices=("float", "int8", "fp8"),
                edges=tuple(EDGES[i] for i in span),
            )
            for number, span in enumerate(spans)
        )
    )  # fmt: skip


def test_resolve_and_nearest_round_trip_with_overlapping_edges():
    space = overlapping((0, 1), (1, 2), (2, 3, 4), (0, 1, 2))
    for choices in itertools.product((0, 1), repeat=4):
        asked = space.resolve(Placement(choices))
        assert space.resolve(space.nearest(dict(asked))) == asked
