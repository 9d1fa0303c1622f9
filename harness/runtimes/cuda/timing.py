"""GPU time of work that is queued on a stream, by CUDA events, for any runtime.

The time of a query is the time between two events around it, as in trtexec (TensorRT, samples/common/
sampleInference.cpp). A query is queued while the one before still runs, so its time does not contain the host's work.
With a single query on an idle stream it would, which for small models is most of the reading.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from harness.base.errors import CandidateError, MeasureFailed
from harness.runtimes.cuda.device import CudaRuntime

Enqueue = Callable[[int], None]
"""Queues one inference on the stream with this handle and returns; raises where it is refused."""

QUERIES_IN_FLIGHT = 2
"""Queries in flight."""
LEAD_IN_QUERIES = 2
"""Queries ahead of the first that counts: it must not be the one that finds the stream empty."""
L2_FLUSH_FACTOR = 2
"""Times the L2 cache that is overwritten to make it cold."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTimings:
    """Times of consecutive queries (inferences) in milliseconds.

    Attributes:
        gpu_ms: Time of each query on the device, by events.
        enqueue_ms: Time of the host to queue each query.
        device_waited: Whether the device reached a query before all of it was queued. Then it may have waited for the
            host, so that `gpu_ms` contains time of the host.
    """

    gpu_ms: tuple[float, ...]
    enqueue_ms: tuple[float, ...]
    device_waited: tuple[bool, ...]

    @property
    def host_bound(self) -> float:
        """Return the share (0 to 1) of the queries during which the device may have waited for the host."""
        return sum(self.device_waited) / len(self.device_waited)


class GpuTimer:
    """Timer of a function that queues one query (inference) on a stream; a context manager.

    Args:
        enqueue: Function that is timed, given the handle of a stream; addresses and shapes must not change while the
            timer is open.
        graph: Whether the query is captured as a CUDA graph, which is then timed; if that fails, the function is timed
            and `why_eager` has the reason.
        flush_bytes: Number of bytes that are overwritten before each query, outside of its events, so that the L2 cache
            is cold; 0: none. Such readings are not comparable with warm ones.
        stream: Stream that the function uses; None: a new one.

    Attributes:
        why_eager: Reason why there is no CUDA graph; "" if there is one, or none was requested.
    """

    def __init__(
        self, cuda: CudaRuntime, enqueue: Enqueue, *, graph: bool = True, flush_bytes: int = 0, stream: Any = None
    ) -> None:
        self._cuda = cuda
        self._enqueue = enqueue
        self._wanted = graph
        self._flush_bytes = flush_bytes
        self._given = stream
        self._open = ExitStack()
        self._events: list[tuple[object, object]] = []
        self._graph: object | None = None
        self._scratch: object | None = None
        self.why_eager = ""

    def __enter__(self) -> GpuTimer:
        with ExitStack() as opened:  # after a failure, releases the resources that were created before
            self._stream = self._given if self._given is not None else self._create_stream(opened)
            self._events = [
                (self._create_event(opened), self._create_event(opened)) for _ in range(QUERIES_IN_FLIGHT + 1)
            ]
            if self._flush_bytes:
                self._scratch = self._create_resource(opened, "cudaMalloc", self._flush_bytes, release="cudaFree")
            self._enqueue(int(self._stream))  # first run: lazy loading and allocation
            self._cuda.call("cudaStreamSynchronize", self._stream)
            if self._wanted:
                self._graph = self._instantiate_graph(opened)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._cuda.call("cudaStreamSynchronize", self._stream)

    def read(self, n: int) -> GpuTimings:
        """Time n queries.

        Raises:
            MeasureFailed: A call of CUDA or the timed function fails.
        """
        gpu_ms, enqueue_ms, waited = [], [], []
        for number in range(n + LEAD_IN_QUERIES):
            if number >= QUERIES_IN_FLIGHT:
                gpu_ms.append(self._elapsed_ms(number - QUERIES_IN_FLIGHT))
            enqueue_ms.append(self._enqueue_query(number))
            waited.append(self._has_started(number))
        gpu_ms.extend(
            self._elapsed_ms(number)
            for number in range(max(0, n + LEAD_IN_QUERIES - QUERIES_IN_FLIGHT), n + LEAD_IN_QUERIES)
        )
        return GpuTimings(
            gpu_ms=tuple(gpu_ms[LEAD_IN_QUERIES:]),
            enqueue_ms=tuple(enqueue_ms[LEAD_IN_QUERIES:]),
            device_waited=tuple(waited[LEAD_IN_QUERIES:]),
        )

    def end_to_end(self, n: int) -> tuple[float, ...]:
        """Return host times of n queries in milliseconds, each from queuing to completion, one at a time."""
        readings = []
        for _ in range(n):
            start_ns = time.perf_counter_ns()
            self._launch()
            self._cuda.call("cudaStreamSynchronize", self._stream)
            readings.append((time.perf_counter_ns() - start_ns) / 1e6)
        return tuple(readings)

    def warm_up(self, ms: float) -> int:
        """Run for `ms` milliseconds without timing; return the number of queries."""
        count, end_ns = 0, time.perf_counter_ns() + ms * 1e6
        while time.perf_counter_ns() < end_ns:
            self._launch()
            count += 1
            if count % QUERIES_IN_FLIGHT == 0:
                self._cuda.call("cudaStreamSynchronize", self._stream)
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return count

    def _enqueue_query(self, number: int) -> float:
        """Queue one query between its events, and return the host's time for it in milliseconds."""
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

    def _elapsed_ms(self, number: int) -> float:
        begin, end = self._events[number % len(self._events)]
        self._cuda.call("cudaEventSynchronize", end)
        return float(self._cuda.call("cudaEventElapsedTime", begin, end))

    def _has_started(self, number: int) -> bool:
        """Return whether the device has reached the first event of a query.

        "Not ready" counts as CUDA's last error, which is cleared, because the next launch may check for one.
        """
        api = self._cuda.api
        (status,) = api.cudaEventQuery(self._events[number % len(self._events)][0])
        api.cudaGetLastError()
        return not int(status)

    def _create_resource(self, opened: ExitStack, function: str, *args: object, release: str) -> object:
        """Create a resource that is released with all others."""
        made: object = self._cuda.call(function, *args)
        opened.callback(self._cuda.call, release, made)
        return made

    def _create_stream(self, opened: ExitStack) -> Any:
        """Create a stream other than the default stream, which would synchronize with others."""
        flags = self._cuda.api.cudaStreamNonBlocking
        return self._create_resource(opened, "cudaStreamCreateWithFlags", flags, release="cudaStreamDestroy")

    def _create_event(self, opened: ExitStack) -> object:
        flags = self._cuda.api.cudaEventDefault
        return self._create_resource(opened, "cudaEventCreateWithFlags", flags, release="cudaEventDestroy")

    def _instantiate_graph(self, opened: ExitStack) -> object | None:
        """Return the enqueue function as an executable graph, or None with the reason in `why_eager`."""
        call = self._cuda.call
        try:
            graph = self._capture_graph()
            try:
                made = self._create_resource(opened, "cudaGraphInstantiate", graph, 0, release="cudaGraphExecDestroy")
            finally:
                call("cudaGraphDestroy", graph)
            call("cudaGraphUpload", made, self._stream)
            call("cudaStreamSynchronize", self._stream)
        except CandidateError as error:
            self._cuda.api.cudaGetLastError()  # clears the error, which the next call would report again
            self.why_eager = str(error)
            _logger.warning("no CUDA graph: %s", error)
            return None
        return made

    def _capture_graph(self) -> object:
        """Return the work that the enqueue function queues, as a graph.

        The capture is ended even if the captured function failed, or the stream would be unusable. The first error is
        raised.
        """
        call, api = self._cuda.call, self._cuda.api
        call("cudaStreamBeginCapture", self._stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            self._enqueue(int(self._stream))
        except BaseException:
            status, graph = api.cudaStreamEndCapture(self._stream)
            if not int(status):
                api.cudaGraphDestroy(graph)
            raise
        ended: object = call("cudaStreamEndCapture", self._stream)
        return ended


def flush_bytes(l2_bytes: int, cold_l2: bool) -> int:
    """Return the number of bytes to overwrite before each query: twice the L2 cache, or 0 for a warm cache.

    Raises:
        MeasureFailed: `cold_l2` is set, and the device does not report the size of its L2 cache.
    """
    if cold_l2 and not l2_bytes:
        raise MeasureFailed("cold_l2: this device does not report the size of its L2 cache")
    return L2_FLUSH_FACTOR * l2_bytes if cold_l2 else 0
