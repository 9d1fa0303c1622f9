"""Random inputs, for timing, calibration and comparison of models without data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.base.errors import UserError

_NUMPY_NAMES: Mapping[str, str] = {"float": "float32", "double": "float64"}
MAX_INPUT_ELEMENTS = 2**28  # 1 GiB of FP32

#: Element type (ONNX name in lower case, or NumPy name) and static shape of each input.
InputTypes = Mapping[str, tuple[str, tuple[int, ...]]]


def random_feeds(types: InputTypes, count: int, seed: int = 0) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield random inputs, sufficient for latency but not for accuracy.

    Floats are standard normal; integers and booleans are 0 or 1, which are valid token ids, masks and indices.

    Args:
        count: Number of feeds; feed i depends neither on the count nor on the order of the inputs.
    """
    return (random_feed(types, index, seed) for index in range(count))


def random_feed(types: InputTypes, index: int, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return feed `index` of `random_feeds`."""
    rng, feed = np.random.default_rng([seed, index]), dict[str, npt.NDArray[Any]]()
    for name, dtype in check_types(types).items():
        shape = types[name][1]
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        feed[name] = np.asarray(values, dtype=dtype)
    return feed


def feeds_digest(feeds: Iterable[Mapping[str, npt.NDArray[Any]]]) -> str:
    """Return the SHA-256 (hexadecimal digits) of names, types, shapes and values of inputs."""
    digest = hashlib.sha256()
    for sample in feeds:
        for name, array in sorted(sample.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def check_types(types: InputTypes) -> dict[str, np.dtype[Any]]:
    """Return the NumPy type of each input, sorted by name."""
    for name, (_, shape) in types.items():
        if math.prod(shape) > MAX_INPUT_ELEMENTS:
            raise UserError(
                f"input {name!r} has {math.prod(shape):,} elements by its shape {list(shape)}, but random inputs have "
                f"at most {MAX_INPUT_ELEMENTS:,}; give it a smaller shape (key shapes of the model)"
            )
    return {name: _numpy_type(name, kind) for name, (kind, _) in sorted(types.items())}


def numpy_type_name(kind: str) -> str:
    """Return the name of the NumPy type for an ONNX element type in lower case, for instance "float32" for "float"."""
    return _NUMPY_NAMES.get(kind, kind)


def _numpy_type(name: str, kind: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(numpy_type_name(kind))
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise UserError(
            f"input {name!r} is of type {kind!r}: engines are timed on random numbers, so this model cannot be timed; "
            "export it again with floats, integers or booleans as inputs"
        )
    return dtype
