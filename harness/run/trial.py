"""One trial: build, sample, and score where it matters, on engines that may fail at any step."""

from __future__ import annotations

import time
from dataclasses import replace

from harness.api import Candidate
from harness.measure.engines import Engines
from harness.measure.stats import median_ci
from harness.records import Failed, Measured, Outcome
from harness.run.config import Sampling
from harness.run.engine import Attempt

__all__ = ["attempt_with"]


def attempt_with(engines: Engines, sampling: Sampling, *, scored: bool) -> Attempt:
    """An attempt that uses these engines.

    Args:
        scored: Ask the evaluator about candidates that are faster than the incumbent; only they can win.
    """

    def attempt(candidate: Candidate, beat_ms: float | None) -> Outcome:
        built = engines.build(candidate)
        if isinstance(built, Failed):
            return built
        try:
            samples = engines.sample(built.handle, sampling)
            if isinstance(samples, Failed):
                return samples
            measured = Measured(
                samples_ms=samples.latency_ms,
                discarded_ms=samples.discarded_ms,
                warmup=samples.warmup,
                stable=samples.stable,
                build_s=built.build_s,
                measure_s=samples.measure_s,
                info=built.info,
            )
            if not scored or (beat_ms is not None and median_ci(samples.latency_ms).value >= beat_ms):
                return measured
            started_s = time.monotonic()
            accuracy = engines.evaluate(built.handle)
            if isinstance(accuracy, Failed):
                return accuracy
            spent_s = time.monotonic() - started_s
            return replace(measured, metrics=accuracy.metrics, per_item=accuracy.per_item, evaluate_s=spent_s)
        finally:
            engines.release(built.handle)

    return attempt
