"""Random inputs: reproducible, and valid for every type that can be timed."""

from __future__ import annotations

import numpy as np
import pytest

from harness.base.errors import UserError
from harness.base.random_inputs import random_feeds

TYPES = {
    "f": ("float", (2, 3)),
    "h": ("float16", (4,)),
    "d": ("double", ()),
    "i": ("int64", (5,)),
    "u": ("uint8", (9,)),
    "b": ("bool", (6,)),
}


def test_feeds_depend_on_the_seed_but_neither_on_count_nor_order():
    first, second = list(random_feeds(TYPES, 3, 7)), list(random_feeds(dict(reversed(TYPES.items())), 2, 7))
    for one, other in zip(first, second, strict=False):
        for name in TYPES:
            np.testing.assert_array_equal(one[name], other[name])
    assert not np.array_equal(first[0]["f"], first[1]["f"])
    assert not np.array_equal(first[0]["f"], next(random_feeds(TYPES, 1, 8))["f"])


def test_feeds_have_type_and_shape_of_the_input_and_valid_indices():
    feed = next(random_feeds(TYPES, 1))
    assert {name: (a.dtype.name, a.shape) for name, a in feed.items()} == {
        "f": ("float32", (2, 3)), "h": ("float16", (4,)), "d": ("float64", ()), "i": ("int64", (5,)),
        "u": ("uint8", (9,)), "b": ("bool", (6,)),
    }  # fmt: skip
    assert set(np.unique(feed["i"])) <= {0, 1}


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("string", (1,), "type 'string'.* cannot be timed"),
        ("complex64", (1,), "type 'complex64'"),
        ("float8e4m3fn", (1,), "type 'float8e4m3fn'"),
        ("float", (1, 2**40), r"1,099,511,627,776 elements by its shape \[1, 1099511627776\]"),
    ],
)
def test_inputs_that_cannot_be_timed_are_rejected(kind, shape, message):
    with pytest.raises(UserError, match=f"input 's' .*{message}"):
        next(random_feeds({"x": ("float", (1,)), "s": (kind, shape)}, 1))
