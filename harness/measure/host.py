"""What runtimes have in common whose call returns when the outputs are there, so that the host's clock times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from harness.api import Array
from harness.errors import BuildFailed, CandidateError

__all__ = ["plain", "refuse_dynamic", "said", "timed", "words"]


def timed(run: Callable[[], object], n: int) -> list[float]:
    """Latency of n calls, one by one, in milliseconds; nothing else happens between two calls."""
    clock = time.perf_counter_ns
    readings = np.empty(n)
    for index in range(n):
        start_ns = clock()
        run()
        readings[index] = clock() - start_ns
    values: list[float] = (readings / 1e6).tolist()
    return values


def plain(array: Array) -> Array:
    """Floating-point outputs as float32, whatever the runtime computed in; others as they are."""
    return array.astype(np.float32, copy=False) if np.issubdtype(array.dtype, np.floating) else array


def refuse_dynamic(file: str, shapes: Mapping[str, Sequence[object]]) -> None:
    """Refuse a model with an input that has no static shape.

    Args:
        file: What messages call the model.
        shapes: By input name; sizes that are no whole numbers are dynamic.

    Raises:
        BuildFailed: With the first such input.
    """
    for name, shape in shapes.items():
        if not all(isinstance(size, int) for size in shape):
            shown = ", ".join("?" if size is None else str(size) for size in shape)
            raise BuildFailed(f"{file}: input {name!r} has the dynamic shape [{shown}]; make it static")


@contextmanager
def said(failure: type[CandidateError], what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn a runtime's exceptions into ours, in its own words.

    Args:
        failure: What to raise.
        what: Begins the message.
        errors: The exceptions that the runtime raises.

    Raises:
        CandidateError: `failure`, "WHAT: the runtime's words".
    """
    try:
        yield
    except errors as error:
        raise failure(f"{what}: {words(error)}") from error


def words(error: BaseException) -> str:
    """A runtime's own words on one line, without the places in its source that raised them."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return " ".join(kept or lines) or type(error).__name__
