"""Inference functions for evaluators: concurrent inferences, reuse of known outputs, and progress reports."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.plugins.api import Array, Evaluator, Infer, InfersConcurrently, Probe
from harness.workers.engines import ScoringCallback
from harness.workers.locks import is_timing

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 8
"""Largest number of inferences at the same time; each has activations of its own in memory."""
MAX_KEPT_BYTES = 256 * 2**20
"""Of the outputs of an engine between two stages of its scoring."""
PROGRESS_INTERVAL_S = 0.5
KnownOutputs = dict[object, tuple[Mapping[str, Array], Mapping[str, Array]]]
"""Inputs, which stay where they are, and outputs by `_feeds_key`."""


@dataclass(frozen=True, slots=True)
class ConcurrentInfer:
    """Inference function of an engine (`alone`), with one that `threads` threads may call at a time (`together`)."""

    alone: Infer
    together: Infer
    threads: int

    def __call__(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.alone(feeds)


def infer_all(infer: Infer, inputs: Iterable[Mapping[str, Array]]) -> Iterator[Mapping[str, Array]]:
    """Yield the outputs for each of several inputs in order, with concurrent inferences if `infer` allows them.

    Inferences run one after the other while any process of this machine times on the same cores.
    """
    if not isinstance(infer, ConcurrentInfer):
        yield from map(infer, inputs)
        return
    pending: deque[Future[Mapping[str, Array]]] = deque()
    with ThreadPoolExecutor(infer.threads) as pool:
        try:
            for feeds in inputs:
                while pending and is_timing():
                    yield pending.popleft().result()
                pending.append(pool.submit(infer.together, feeds))
                if len(pending) > infer.threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@contextmanager
def open_infer(probe: Probe, evaluator: Evaluator, build_s: float) -> Iterator[Infer]:
    """Yield the inference function of an engine for an evaluator, with concurrent inferences if that saves time.

    Args:
        build_s: Seconds of the engine's build; the preparation of concurrent inferences may take as long.
        evaluator: Evaluator that will call it; its `inferences` tells how much time can be saved.
    """
    count = getattr(evaluator, "inferences", None)
    if isinstance(probe, InfersConcurrently) and isinstance(count, int):
        threads = min(probe.concurrency, MAX_CONCURRENCY)
        if threads > 1 and count * min(probe.sample(2)) / 1000 * (1 - 1 / threads) > build_s:
            with ExitStack() as opened:
                yield ConcurrentInfer(probe.infer, _open_lazily(probe, threads, opened), threads)
            return
    yield probe.infer


def _open_lazily(probe: Any, threads: int, opened: ExitStack) -> Infer:
    """Return an inference function for several threads, which copies the engine at its first call.

    The copy is used only if its outputs for the first inputs are equal to those of the engine that was timed.
    """
    lock = threading.Lock()
    chosen: Infer | None = None

    def one_at_a_time(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        with lock:
            return dict(probe.infer(feeds))

    def infer(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        nonlocal chosen
        if chosen is None:
            with lock:
                if chosen is None:
                    outputs: Mapping[str, Array] = probe.infer(feeds)
                    copy = opened.enter_context(probe.concurrently(threads))
                    copied = copy(feeds)
                    equal = (
                        np.array_equal(array, copied[name], equal_nan=array.dtype.kind == "f")
                        for name, array in outputs.items()
                    )
                    chosen = copy if outputs.keys() == copied.keys() and all(equal) else one_at_a_time
                    if chosen is one_at_a_time:
                        logger.warning("inferences run one after the other: a copy of the engine has other outputs")
                    return outputs
        return chosen(feeds)

    return infer


def remember_outputs(infer: Infer, known: KnownOutputs, keep: bool) -> Infer:
    """Wrap `infer` to return outputs that are known from earlier calls with the same inputs.

    The inputs of `prepare` and of the first stage are scored again with all other inputs, on the same engine.

    Args:
        known: Outputs by a key of the inputs.
        keep: Whether outputs of this scoring are added to `known`.
    """

    def remembering(infer: Infer, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        key = _feeds_key(feeds)
        if key in known:
            return known[key][1]
        outputs = infer(feeds)
        if keep and sum(array.nbytes for array in outputs.values()) * (len(known) + 1) <= MAX_KEPT_BYTES:
            known[key] = dict(feeds), {name: np.array(array) for name, array in outputs.items()}
        return outputs

    return _wrap_infer(infer, remembering)


def _feeds_key(feeds: Mapping[str, Array]) -> object:
    """Return a key of inputs: the memory addresses of arrays that cannot change, or else a digest of their values.

    An array cannot change if it is contiguous and neither it nor the owner of its memory can be written to.
    """
    places, digest = [], hashlib.blake2b()
    for name, array in sorted(feeds.items()):
        owner = array if array.base is None else array.base
        fixed = isinstance(owner, np.ndarray) and not (array.flags.writeable or owner.flags.writeable)
        if fixed and array.flags.c_contiguous:
            at = array.__array_interface__
            places.append((name, at["data"][0], at["shape"], at["typestr"]))
    if len(places) == len(feeds):
        return tuple(places)
    for name, array in sorted(feeds.items()):
        digest.update(repr((name, array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def with_progress(infer: Infer, evaluator: Evaluator, on_progress: ScoringCallback | None) -> Infer:
    """Return `infer` with reports of progress, or `infer` itself without a callback or `evaluator.inferences`."""
    total = getattr(evaluator, "inferences", None)
    if on_progress is None or not isinstance(total, int):
        return infer
    done, reported_s, lock = 0, time.monotonic(), threading.Lock()

    def counting(infer: Infer, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        nonlocal done, reported_s
        outputs = infer(feeds)
        with lock:
            done, now_s = min(done + 1, total), time.monotonic()
            if now_s - reported_s >= PROGRESS_INTERVAL_S:
                reported_s = now_s
                on_progress(done, total)
        return outputs

    return _wrap_infer(infer, counting)


def _wrap_infer(infer: Infer, wrapper: Callable[[Infer, Mapping[str, Array]], Mapping[str, Array]]) -> Infer:
    """Return an inference function that calls `wrapper`, a thread-safe function, with `infer` and the inputs."""
    if isinstance(infer, ConcurrentInfer):
        return replace(infer, alone=partial(wrapper, infer.alone), together=partial(wrapper, infer.together))
    return partial(wrapper, infer)
