"""GPU time of anything that can be enqueued on a stream, by CUDA events; knows nothing of any runtime.

The time of a query is the gap between two events around it, as trtexec takes it (TensorRT, samples/common/
sampleInference.cpp). Two queries are in flight: the first event of one is queued while the one before still runs, so
the host's work between them is not in the gap. A single query between two events on an idle stream would contain it,
which for small models is most of the reading.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from harness.cuda.device import Cuda
from harness.errors import CandidateError, MeasureFailed

__all__ = ["Enqueue", "GpuTimer", "Readings", "flush_bytes"]

Enqueue = Callable[[int], None]
"""Queues one inference on the stream with this handle and returns; raises where it is refused."""

DEPTH = 2
"""Queries in flight."""
LEAD = 2
"""Queries ahead of the first that counts: it must not be the one that finds the stream empty."""
FLUSH = 2
"""Times the L2 cache that is overwritten to make it cold."""
HOST_BOUND = 0.8
"""Above this share of GPU time, queuing may be what is timed; trtexec warns from here on (sampleReporting.cpp)."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Time of some queries in a row, in milliseconds.

    Attributes:
        gpu_ms: By events on the device.
        enqueue_ms: The host's time to queue each.
    """

    gpu_ms: tuple[float, ...]
    enqueue_ms: tuple[float, ...]

    @property
    def host_bound(self) -> bool:
        """Whether the host queues so slowly that the GPU may have waited for it within the readings."""
        return statistics.median(self.enqueue_ms) > HOST_BOUND * statistics.median(self.gpu_ms)


class GpuTimer:
    """Times one enqueue function on a stream of its own. A context manager: events, stream and graph end with it.

    Args:
        cuda: The device.
        enqueue: What is timed; addresses and shapes stay the same from now on.
        graph: Capture it into a CUDA graph and launch that. Where it cannot be captured, `why_eager` says why, and it
            is timed as it is.
        flush_bytes: Above 0: overwrite so much memory before each query, outside of its events, so that the L2 cache is
            cold. Such readings are of another kind: never put them beside warm ones.
        stream: A stream that what is timed is bound to already; None: one of the timer's own.

    Attributes:
        why_eager: Why no graph was made; "" where there is one, or none was wanted.
    """

    def __init__(
        self, cuda: Cuda, enqueue: Enqueue, *, graph: bool = True, flush_bytes: int = 0, stream: Any = None
    ) -> None:
        self._cuda = cuda
        self._enqueue = enqueue
        self._wanted = graph
        self._flush_bytes = flush_bytes
        self._given = stream
        self._events: list[tuple[object, object]] = []
        self._graph: object | None = None
        self._scratch: object | None = None
        self.why_eager = ""

    def __enter__(self) -> GpuTimer:
        call, api = self._cuda.call, self._cuda.api
        self._stream = self._given
        if self._given is None:  # not the default stream, which would wait for others
            self._stream = call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        try:
            self._events = [(self._event(), self._event()) for _ in range(DEPTH + 1)]
            if self._flush_bytes:
                self._scratch = call("cudaMalloc", self._flush_bytes)
            self._enqueue(int(self._stream))  # first run: lazy loading and allocation
            call("cudaStreamSynchronize", self._stream)
            if self._wanted:
                self._graph = self._captured()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call = self._cuda.call
        call("cudaStreamSynchronize", self._stream)
        if self._graph is not None:
            call("cudaGraphExecDestroy", self._graph)
        if self._scratch is not None:
            call("cudaFree", self._scratch)
        for pair in self._events:
            for event in pair:
                call("cudaEventDestroy", event)
        if self._given is None:
            call("cudaStreamDestroy", self._stream)

    def read(self, n: int) -> Readings:
        """Time n queries.

        Raises:
            MeasureFailed: CUDA refuses, or what is timed does.
        """
        gpu_ms, enqueue_ms = [], []
        for number in range(n + LEAD):
            if number >= DEPTH:
                gpu_ms.append(self._elapsed(number - DEPTH))
            enqueue_ms.append(self._query(number))
        gpu_ms.extend(self._elapsed(number) for number in range(max(0, n + LEAD - DEPTH), n + LEAD))
        return Readings(gpu_ms=tuple(gpu_ms[LEAD:]), enqueue_ms=tuple(enqueue_ms[LEAD:]))

    def end_to_end(self, n: int) -> tuple[float, ...]:
        """Host time of n queries in milliseconds, each from queuing to the end of its work, one at a time."""
        readings = []
        for _ in range(n):
            start_ns = time.perf_counter_ns()
            self._launch()
            self._cuda.call("cudaStreamSynchronize", self._stream)
            readings.append((time.perf_counter_ns() - start_ns) / 1e6)
        return tuple(readings)

    def warm_up(self, ms: float) -> int:
        """Run for so long without counting; the number of queries."""
        count, end_ns = 0, time.perf_counter_ns() + ms * 1e6
        while time.perf_counter_ns() < end_ns:
            self._launch()
            count += 1
            if count % DEPTH == 0:
                self._cuda.call("cudaStreamSynchronize", self._stream)
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return count

    def _query(self, number: int) -> float:
        """Queue one query between its events; the host's time for it in milliseconds."""
        begin, end = self._events[number % len(self._events)]
        call = self._cuda.call
        if self._scratch is not None:
            call("cudaMemsetAsync", self._scratch, number % 256, self._flush_bytes, self._stream)
        call("cudaEventRecord", begin, self._stream)
        start_ns = time.perf_counter_ns()
        self._launch()
        spent_ns = time.perf_counter_ns() - start_ns
        call("cudaEventRecord", end, self._stream)
        return spent_ns / 1e6

    def _launch(self) -> None:
        if self._graph is None:
            self._enqueue(int(self._stream))
        else:
            self._cuda.call("cudaGraphLaunch", self._graph, self._stream)

    def _elapsed(self, number: int) -> float:
        begin, end = self._events[number % len(self._events)]
        self._cuda.call("cudaEventSynchronize", end)
        return float(self._cuda.call("cudaEventElapsedTime", begin, end))

    def _event(self) -> object:
        return self._cuda.call("cudaEventCreateWithFlags", self._cuda.api.cudaEventDefault)

    def _captured(self) -> object | None:
        """The enqueue function as an executable graph; None, and `why_eager` says why, where it has none.

        A capture must be ended even where what is captured failed: the stream is of no use otherwise.
        """
        call, api = self._cuda.call, self._cuda.api
        mode = api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        graph = None
        try:
            call("cudaStreamBeginCapture", self._stream, mode)
            try:
                self._enqueue(int(self._stream))
            finally:
                graph = call("cudaStreamEndCapture", self._stream)
            made: object = call("cudaGraphInstantiate", graph, 0)
            call("cudaGraphUpload", made, self._stream)
            call("cudaStreamSynchronize", self._stream)
        except CandidateError as error:
            api.cudaGetLastError()  # or the next call would report it once more
            self.why_eager = str(error)
            _logger.warning("no CUDA graph: %s", error)
            return None
        finally:
            if graph is not None:
                api.cudaGraphDestroy(graph)
        return made


def flush_bytes(l2_bytes: int, cold_l2: bool) -> int:
    """How much memory to overwrite before each query.

    Raises:
        MeasureFailed: A cold L2 cache is wanted and the device does not tell its size.
    """
    if cold_l2 and not l2_bytes:
        raise MeasureFailed("cold_l2: this device does not tell the size of its L2 cache")
    return FLUSH * l2_bytes if cold_l2 else 0
