"""Helpers for runtimes that are timed by the host's clock, because their call returns when the outputs are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from harness.api import Array
from harness.errors import BuildFailed, CandidateError


def time_calls(run: Callable[[], object], n: int) -> list[float]:
    """Return the latency of each of n calls in ms, with nothing else between two calls."""
    clock = time.perf_counter_ns
    readings = np.empty(n)
    for index in range(n):
        start_ns = clock()
        run()
        readings[index] = clock() - start_ns
    latency_ms: list[float] = (readings / 1e6).tolist()
    return latency_ms


def to_float32(array: Array) -> Array:
    """Return a floating-point output as float32, and any other output unchanged."""
    return array.astype(np.float32, copy=False) if np.issubdtype(array.dtype, np.floating) else array


def require_static_shapes(file: str, shapes: Mapping[str, Sequence[object]]) -> None:
    """Raise `BuildFailed` if an input has a dynamic shape, which has a size that is no integer."""
    for name, shape in shapes.items():
        if not all(isinstance(size, int) for size in shape):
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            raise BuildFailed(f"{file}: input {name!r} has the dynamic shape [{sizes}]; make it static")


@contextmanager
def translate_errors(failure: type[CandidateError], what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raise a runtime's exceptions as `failure`, with its text after "WHAT: "."""
    try:
        yield
    except errors as error:
        raise failure(f"{what}: {one_line_error(error)}") from error


def one_line_error(error: BaseException) -> str:
    """Return a runtime's message on one line, without the source locations that raised it."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return " ".join(text or lines) or type(error).__name__
