"""A simulated runtime whose engines answer, so that accuracy can be measured: what saves time costs accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from harness.accuracy.metrics.fidelity import Fidelity
from harness.plugins.api import Array, Artifact, Capabilities
from harness.runtimes.simulated import SimulatedBenchmarker

__all__ = ["Bench", "Near"]


class Bench(SimulatedBenchmarker):
    """Engines whose output follows their true latency."""

    capabilities = Capabilities(dialect="openvino", in_process=True)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[Any]:
        with super().open(artifact) as probe:
            yield _Talking(probe, artifact.info["truth_ms"])

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "name": "bench"}


class _Talking:
    def __init__(self, probe: Any, truth_ms: float) -> None:
        self.sample, self.truth_ms = probe.sample, truth_ms

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": np.array([[1.0, 10.0 - self.truth_ms]], np.float32)}


class Near(Fidelity):
    """Cosine similarity as the metric."""

    metric = "cosine"
