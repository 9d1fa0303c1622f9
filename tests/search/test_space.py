"""A foreign Q/DQ model becomes the placement that agrees with most of its edges."""

import pytest

from search.space import Dimension, Edge, Placement, Space

EDGES = tuple(Edge(f"t{i}", f"n{i}", 0) for i in range(5))
SPACE = Space(
    (Dimension(name="p", group="g", kind="node_input", choices=("float", "int8", "fp8"), edges=EDGES),),
)


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
