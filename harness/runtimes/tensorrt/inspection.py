"""Layers of an engine from TensorRT's engine inspector, in the formats of 10.x and 11.x.

Version 10 writes one string "Format/Datatype" per tensor ("Channel major FP16 format where channel % 4 == 0",
"Thirty-two wide channel vectorized row major Int8 format."), 11 two strings. Inputs and outputs of the engine are
"Bindings" in 10 and "I/O Tensors" in 11. Both forms are accepted for every version.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from harness.base.errors import MeasureFailed
from harness.plugins.api import Layer
from harness.runtimes.tensorrt.session import ExecutionSession, LoadedEngine

DATATYPE_KEYS = ("Datatype", "DataType", "Format/Datatype", "Format")
"""Places of the type of a tensor, by preference."""
PRECISION_PATTERNS: tuple[tuple[str, str], ...] = (
    ("fp8|float8|e4m3", "fp8"), ("fp4|float4", "fp4"), ("uint8", "uint8"), ("int8", "int8"), ("int4", "int4"),
    ("bf16|bfloat16", "bf16"), ("fp16|half|float16", "f16"), ("fp32|float32|float", "f32"),
    ("int64", "int64"), ("int32", "int32"), ("bool", "bool"),
)  # fmt: skip
"""Words for types in both spellings, the longer before those that they contain."""
_ORIGIN = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


def read_layers(text: str, times_ms: Mapping[str, float]) -> tuple[Layer, ...]:
    """Return the layers of an engine.

    The precision of a layer is that of its first input, because the key "Precision" has the requested precision
    (TensorRT developer guide, engine inspector).

    Args:
        text: JSON text of `get_engine_information`, or of trtexec's --exportLayerInfo.
        times_ms: Mean time in ms by layer name, from a profiling run.

    Raises:
        MeasureFailed: The text is no such JSON.
    """
    try:
        listed = json.loads(text)["Layers"]
        return tuple(_parse_layer(entry, times_ms) for entry in listed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeasureFailed(f"the engine inspector's answer cannot be read ({error!r}): {text[:80]}") from error


def _parse_layer(entry: Any, times_ms: Mapping[str, float]) -> Layer:
    if isinstance(entry, str):  # built without detailed verbosity
        return Layer(name=entry, kind="", precision="", time_ms=times_ms.get(entry))
    name = str(entry["Name"])
    types = [kind for side in ("Inputs", "Outputs") for kind in _tensor_precisions(entry.get(side, ()))]
    return Layer(
        name=name,
        kind=str(entry.get("ParameterType") or entry.get("LayerType", "")),
        precision=types[0] if types else "",
        time_ms=times_ms.get(name),
        origin=tuple(_ORIGIN.findall(str(entry.get("Metadata", "")))),
        kernel=str(entry.get("TacticName", "")),
    )


def _tensor_precisions(tensors: Any) -> Iterator[str]:
    for tensor in tensors:
        for key in DATATYPE_KEYS:
            word = _precision_name(str(tensor.get(key, ""))) if isinstance(tensor, Mapping) else ""
            if word:
                yield word
                break


def _precision_name(text: str) -> str:
    lower = text.lower()
    return next((word for pattern, word in PRECISION_PATTERNS if re.search(pattern, lower)), "")


def profile_layers(loaded: LoadedEngine, runs: int) -> tuple[Layer, ...]:
    """Return the layers of an engine with their mean times over `runs` inferences.

    Raises:
        MeasureFailed: The engine does not run, or cannot be inspected.
    """
    trt = loaded.library.trt
    spent_ms: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            spent_ms[layer_name] += ms

    with ExecutionSession(loaded) as session:
        session.load_timing_inputs()
        session.run()
        profiler = Profiler()
        session.context.profiler = profiler
        for _ in range(runs):
            session.run()
        text = _inspect_engine(loaded, session)
    return read_layers(text, {name: total / runs for name, total in spent_ms.items()})


def _inspect_engine(loaded: LoadedEngine, session: ExecutionSession) -> str:
    """Return the inspector's report, which needs the context if shapes are dynamic."""
    inspector: Any = loaded.engine.create_engine_inspector()
    inspector.execution_context = session.context
    answer: str = inspector.get_engine_information(loaded.library.trt.LayerInformationFormat.JSON)
    return answer
