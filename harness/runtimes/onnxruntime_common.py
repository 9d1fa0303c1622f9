"""Profiles that ONNX Runtime writes: natively to a file, in WebAssembly to the console."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

from harness.api import Layer
from harness.errors import MeasureFailed

__all__ = ["read_profile"]

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
        raise MeasureFailed("ONNX Runtime counted nothing: sample the engine before asking for its layers")
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
