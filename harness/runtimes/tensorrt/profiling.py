"""Layers of an engine with their times, from separate runs, because a profiler slows the engine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.api import Layer
from harness.runtimes.tensorrt.inspection import read_layers
from harness.runtimes.tensorrt.session import ExecutionSession, LoadedEngine

__all__ = ["profile_layers"]


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
