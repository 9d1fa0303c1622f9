"""Layer times of an engine, over inferences without a disturbance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import Candidate, Layer

__all__ = ["LayerTimings", "time_layers"]

MAX_TIMED_ENGINES = 3
MAX_QUIET_STRETCH = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimings:
    """What one engine said of its layers.

    Attributes:
        layers: With their times, which runtimes give as means.
        readings_ms: Of the inferences behind them.
    """

    layers: tuple[Layer, ...]
    readings_ms: Sequence[float]

    @property
    def whole_ms(self) -> float:
        """Median time of an inference."""
        return statistics.median(self.readings_ms)

    @property
    def stretch(self) -> float:
        """Mean over median time: what pauses have added to the means."""
        return statistics.fmean(self.readings_ms) / self.whole_ms


def time_layers(benchmarker: Any, candidate: Candidate, workdir: Path, runs: int) -> LayerTimings:
    """Build a candidate, let it run, and ask what each layer took.

    Runtimes count means, so one inference that was held up puts its pause on whatever layer it was in. An engine whose
    mean is a tenth above its median is therefore built and counted again, and the calmest of up to three counts.

    Args:
        benchmarker: One that tells its layers.
        candidate: What is built, in this process.
        workdir: A scratch folder.
        runs: Inferences.

    Raises:
        CandidateError: It cannot be built or run.
    """
    found: list[LayerTimings] = []
    while len(found) < MAX_TIMED_ENGINES and not any(each.stretch < MAX_QUIET_STRETCH for each in found):
        folder = workdir / str(len(found))
        folder.mkdir(parents=True, exist_ok=True)
        artifact = benchmarker.build(candidate, folder)
        with benchmarker.open(artifact) as probe:
            readings_ms = probe.sample(runs)
            found.append(LayerTimings(layers=tuple(benchmarker.layers(artifact)), readings_ms=readings_ms))
    return min(found, key=lambda each: each.stretch)
