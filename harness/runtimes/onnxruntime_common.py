"""Parts that the runtimes on ONNX Runtime share: types of tensors, outputs, profiles (of a file, or of a console)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.api import Array, Layer
from harness.errors import MeasureFailed
from harness.timing.host_clock import to_float32

_GENERATED_NAME_SUFFIX = re.compile(r"(_token_\d+|/duplicated(_token_\d+)?)$")


def read_profile(trace: str) -> tuple[Layer, ...]:
    """Return the nodes of the optimized graph from a trace of events, by time of their first run.

    A node's precision is that of its first input. Optimizers name new nodes after the nodes that they replace, with a
    suffix.

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
    """Return the element type of an input or output for ONNX Runtime's name of it, for instance "tensor(float)".

    Raises:
        MeasureFailed: NumPy has no such type.
    """
    name = value.type.removeprefix("tensor(").removesuffix(")")
    try:
        dtype: np.dtype[Any] = np.dtype({"float": "float32", "double": "float64"}.get(name, name))
    except TypeError:
        raise MeasureFailed(f"{value.name!r}: no fixed values can be made for type {value.type}") from None
    return dtype


def run_session(session: Any, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the outputs of a session by name; floating-point ones as float32."""
    names = [value.name for value in session.get_outputs()]
    return {n: to_float32(array) for n, array in zip(names, session.run(names, dict(feeds)), strict=True)}
