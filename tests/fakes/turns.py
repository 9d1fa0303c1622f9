"""What a contest is held with in tests: rows without files, engines that take no time, an observer that listens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.base.progress import NullProgress
from harness.config.sections import Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.plugins.api import Candidate
from harness.run.confirm.confirmation import TimedRow
from harness.workers.engines import BuiltEngine, Engines


class Instant:
    """Engines that all read the same."""

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        return BuiltEngine(handle=0, build_s=0.1)

    def sample(self, handle: int, sampling: Sampling) -> Samples:
        return Samples(latency_ms=(2.0,) * 3, warmup=0, measure_s=0.0, stable=True)

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return {}

    @contextmanager
    def open(self) -> Iterator[Engines]:
        yield self  # type: ignore[misc]


class Listening(NullProgress):
    """Observer that keeps messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def row(name: str) -> TimedRow:
    return TimedRow(name=name, candidate=Candidate(digest=name, edges=(), source=lambda: Path("never asked for")))
