"""Helpers for runtimes that are timed by the host's clock, and parts that those on ONNX Runtime share."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from harness.base.errors import BuildFailed, CandidateError, MeasureFailed
from harness.plugins.api import Array, Layer, name_arrays


def time_calls(run: Callable[[], object], n: int) -> list[float]:
    """Call a function n times without a pause, and return the latency of each call in ms."""
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
    # NumPy gives types of other packages, such as bfloat16, the kind "V".
    return array.astype(np.float32, copy=False) if array.dtype.kind in "fV" else array


def require_static_shapes(file: str, shapes: Mapping[str, Sequence[object]]) -> None:
    """Raise `BuildFailed`, whose message names `file`, if a size in the shape of an input is no integer."""
    for name, shape in shapes.items():
        if not all(isinstance(size, int) for size in shape):
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            raise BuildFailed(f"{file}: input {name!r} has the dynamic shape [{sizes}]; make it static")


@contextmanager
def translate_errors(failure: type[CandidateError], what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raise `failure` with the text "WHAT: MESSAGE" if the body raises one of `errors`, a runtime's exceptions."""
    try:
        yield
    except errors as error:
        raise failure(f"{what}: {one_line_error(error)}") from error


def one_line_error(error: BaseException) -> str:
    """Return a runtime's message on one line, without the source locations that raised it."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return " ".join(text or lines) or type(error).__name__


_GENERATED_NAME_SUFFIX = re.compile(r"(_token_\d+|/duplicated(_token_\d+)?)$")


def read_profile(trace: str) -> tuple[Layer, ...]:
    """Return the nodes of ONNX Runtime's optimized graph, with mean times in ms, in the order of their first run.

    `trace` is the JSON text of its profile. A node's precision is the type of its first input. ONNX Runtime names new
    nodes like the nodes that they replace, with a suffix, which is removed in `origin`.

    Raises:
        MeasureFailed: The trace cannot be read, or has no node.
    """
    try:
        events = [event for event in json.loads(trace) if event.get("cat") == "Node"]
    except ValueError as error:
        raise MeasureFailed(f"ONNX Runtime's profile cannot be read: {error}") from error
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        found[event["name"].removesuffix("_kernel_time")].append(event)
    if not found:
        raise MeasureFailed("ONNX Runtime recorded no inference: sample the engine before reading its layers")
    return tuple(
        Layer(
            name=name,
            kind=runs[0]["args"]["op_name"],
            precision=next((kind for types in runs[0]["args"].get("input_type_shape", ()) for kind in types), ""),
            time_ms=sum(run["dur"] for run in runs) / len(runs) / 1000,
            origin=(_GENERATED_NAME_SUFFIX.sub("", name),),
            kernel=runs[0]["args"].get("provider", ""),
        )
        for name, runs in found.items()
    )


def parse_dtype(value: Any) -> np.dtype[Any]:
    """Return the NumPy type of an input or output of a session, from its type as text: "tensor(float)" is float32.

    Raises:
        MeasureFailed: NumPy has no such type.
    """
    name = value.type.removeprefix("tensor(").removesuffix(")")
    try:
        dtype: np.dtype[Any] = np.dtype({"float": "float32", "double": "float64"}.get(name, name))
    except TypeError:
        raise MeasureFailed(f"{value.name!r}: no fixed values can be made for type {value.type}") from None
    return dtype


def session_errors(ort: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of ONNX Runtime, which have no common base class other than Exception."""
    state = vars(ort.capi.onnxruntime_pybind11_state).values()
    own = (kind for kind in state if isinstance(kind, type) and issubclass(kind, Exception))
    return (RuntimeError, ValueError, TypeError, *own)


def run_session(session: Any, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the arrays in the outputs of a session by name (`name_arrays`); floating-point ones as float32."""
    names = [value.name for value in session.get_outputs()]
    arrays = name_arrays(dict(zip(names, session.run(names, dict(feeds)), strict=True)))
    return {name: to_float32(array) for name, array in arrays.items()}
