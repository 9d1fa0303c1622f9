"""Random inputs: what a model is timed, calibrated and compared on where nobody gave data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import UserError

__all__ = ["InputTypes", "check_types", "feeds_digest", "random_feeds"]

_NUMPY_NAMES: Mapping[str, str] = {"float": "float32", "double": "float64"}
MAX_INPUT_ELEMENTS = 2**28
"""Elements of an input at most, a gigabyte of FP32: who declares more is mistaken, or wants the memory."""


InputTypes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Element type, by its ONNX name in lower case or by NumPy's, and static shape of each input."""


def random_feeds(types: InputTypes, count: int, seed: int = 0) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Inputs drawn at random: enough for a latency, never for an accuracy.

    Floats are standard normal, integers and booleans 0 or 1, which are valid as token ids, masks and indices alike.

    Args:
        types: See `Types`.
        count: Number of feeds; feed i is the same for every count and every order of the inputs.
        seed: Of the draw.

    Yields:
        One array an input, by name.

    Raises:
        UserError: An input is neither number nor boolean.
    """
    dtypes = check_types(types)
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        yield {name: _draw_array(rng, dtype, types[name][1]) for name, dtype in dtypes.items()}


def feeds_digest(feeds: Iterable[Mapping[str, npt.NDArray[Any]]]) -> str:
    """Return a digest of names, types, shapes and values of inputs."""
    found = hashlib.sha256()
    for sample in feeds:
        for name, array in sorted(sample.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def check_types(types: InputTypes) -> dict[str, np.dtype[Any]]:
    """NumPy's type of each input, in the order of their names.

    Raises:
        UserError: An input is neither number nor boolean, or larger than anybody means it: it cannot be timed.
    """
    for name, (_, shape) in types.items():
        if math.prod(shape) > MAX_INPUT_ELEMENTS:
            raise UserError(
                f"input {name!r} has {math.prod(shape):,} elements by its shape {list(shape)}, but at most "
                f"{MAX_INPUT_ELEMENTS:,} are made up to time a model; give it a smaller shape (key shapes of the model)"
            )
    return {name: _numpy_type(name, kind) for name, (kind, _) in sorted(types.items())}


def _numpy_type(name: str, kind: str) -> np.dtype[Any]:
    try:
        found = np.dtype(_NUMPY_NAMES.get(kind, kind))
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "fiub":
        raise UserError(
            f"input {name!r} is of type {kind!r}: engines are timed on random numbers, so this model cannot be timed; "
            "export it anew with floats, integers or booleans as its inputs"
        )
    return found


def _draw_array(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
    return np.asarray(values, dtype=dtype)
