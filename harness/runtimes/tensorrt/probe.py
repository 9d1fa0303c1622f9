"""Opened engine: timed on fixed inputs, and run on given ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from harness.api import Array
from harness.runtimes.cuda.timing import GpuTimer
from harness.runtimes.tensorrt.session import ExecutionSession, LoadedEngine
from harness.timing.host_clock import to_float32

__all__ = ["EngineProbe"]

HOST_TIMING_RUNS = 5
"""Inferences whose time on the host's clock is put beside the GPU's."""


class EngineProbe:
    """An opened engine: one session that is timed, one that evaluators use; a context manager.

    Attributes:
        why_eager: See `harness.runtimes.cuda.timing.GpuTimer`.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._open = ExitStack()
        self._scored: ExecutionSession | None = None
        self._host: dict[str, float] = {}
        self.why_eager = ""

    def __enter__(self) -> EngineProbe:
        loaded = self._loaded
        with ExitStack() as opened:
            session = opened.enter_context(ExecutionSession(loaded))
            session.load_timing_inputs()
            timer = GpuTimer(loaded.cuda, session.enqueue, graph=loaded.graph, flush_bytes=loaded.flush_bytes)
            self._timer = opened.enter_context(timer)
            self.why_eager = timer.why_eager
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def sample(self, n: int) -> Sequence[float]:
        """Return GPU times of n inferences in milliseconds, by CUDA events."""
        readings = self._timer.read(n)
        self._loaded.clocks.sample()
        self._host = {"enqueue_ms": statistics.median(readings.enqueue_ms), "host_bound": readings.host_bound}
        return readings.gpu_ms

    def conditions(self) -> Mapping[str, float]:
        """Return the conditions of the GPU during sampling, and the host's overhead.

        For the last series of readings: the host's time to queue one (`enqueue_ms`), the share during which the GPU may
        have
        waited for the host (`host_bound`), and the time from queuing to completion (`end_to_end_ms`).
        """
        facts = {**self._loaded.clocks.take_facts(), **self._host}
        facts["end_to_end_ms"] = statistics.median(self._timer.end_to_end(HOST_TIMING_RUNS))
        facts["cuda_graph"] = float(self._loaded.graph and not self.why_eager)
        return facts

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name, floating-point ones as float32; accepts any shape that the profile covers."""
        if self._scored is None:
            self._scored = self._open.enter_context(ExecutionSession(self._loaded))
        self._scored.load_inputs(feeds)
        self._scored.run()
        return {name: _to_float32(array) for name, array in self._scored.copy_outputs().items()}


def _to_float32(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.kind == "V" else to_float32(array)
