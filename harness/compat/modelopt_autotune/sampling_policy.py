"""Readings of one model: its latency, what the log says of it, and whether the machine was too restless for them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from harness.api import Candidate
from harness.compat.modelopt_autotune.arguments import MIN_TIMING_RUNS
from harness.config.sections import Sampling
from harness.records import Failed, Measured, Outcome
from harness.statistics import median_ci, stderr_of_median

__all__ = ["fixed_sampling", "is_noisy", "latency_ms", "reference_sampling", "stderr_ms", "write_log"]

NOISY_STDERR_SHARE = 0.02
"""A median that is not known to this share, either way, says more about the machine than about the model."""


def latency_ms(outcome: Outcome) -> float:
    """Median latency; infinite where the outcome is a failure."""
    return float("inf") if isinstance(outcome, Failed) else median_ci(outcome.samples_ms).value


def stderr_ms(outcome: Outcome) -> float:
    """Standard error of the median latency; 0 where the outcome is a failure."""
    return 0.0 if isinstance(outcome, Failed) else stderr_of_median(outcome.samples_ms)


def is_noisy(outcome: Outcome) -> bool:
    """Whether readings of one model alone depend on what else the machine did: then any two models compare by luck.

    On a machine whose cores others use, an inference takes its own time or that plus a time slice of the kernel's, and
    the median jumps from one to the other.
    """
    if isinstance(outcome, Failed):
        return False
    return not outcome.stable or median_ci(outcome.samples_ms).relative_width / 2 > NOISY_STDERR_SHARE


def fixed_sampling(runs: int) -> Sampling:
    """So many readings and no warm-up of the sampler's own; three are the fewest that have a median."""
    count = max(MIN_TIMING_RUNS, runs)
    return Sampling(warmup_ms=0.0, min_samples=count, max_samples=count, max_ms=1e12)


def reference_sampling(runs: int, level_ms: float) -> Sampling:
    """As an experiment samples, and for no less time than so many inferences of the float model take."""
    usual = Sampling()
    return usual.model_copy(update={"max_ms": max(usual.max_ms, runs * level_ms)})


def write_log(outcome: Outcome, candidate: Candidate, path: Path) -> None:
    """What came of a candidate, for people: readings and facts of the engine, or the reason and the runtime's words."""
    body = {"digest": candidate.digest, "quantized_edges": len(candidate.edges), **asdict(outcome)}
    tail = body.pop("log_tail", "")
    if isinstance(outcome, Measured):
        interval = median_ci(outcome.samples_ms)
        head = f"latency {interval.value:.4f} ms, 95 % interval {interval.low:.4f} to {interval.high:.4f} ms"
    else:
        head = f"failed: {outcome.stage}: {outcome.reason}"
    lines = [head, *(f"{key}: {json.dumps(value, default=str)}" for key, value in body.items() if value), tail]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
