"""The engines of a cell: the backend as asked, beside it the same runtime in FP32, and what they are used for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.api import Accuracy, Candidate
from harness.measure.engines import Built, Engines, Samples
from harness.measure.sandbox import Sandbox, WorkerSpec
from harness.records import Failed
from harness.run.config import Limits, Sampling, Use
from harness.run.finalists import FLOAT_ROW, FP32_ROW, Row, candidate_of, write_json
from harness.run.observe import Observer
from harness.run.trial import score_candidate

__all__ = ["Bench", "ScoreBook"]


class Bench:
    """Engines that build the candidate "fp32" with the backend's FP32 options and all others as asked.

    A context manager; each set of options has a worker process of its own, the second starts when needed.
    """

    def __init__(self, backend: Use, evaluator: Use | None, limits: Limits) -> None:
        self._backend = backend
        self._evaluator = evaluator
        self._limits = limits
        self._stack = ExitStack()
        self._fp32: Engines | None = None

    def __enter__(self) -> Self:
        self._main: Engines = self._start(self._backend.params)
        self.facts: Mapping[str, Any] = self._main.describe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def has_fp32(self) -> bool:
        """Whether FP32 is not already the precision of the float baseline."""
        return "fp32_params" in self.facts

    def describe(self) -> Mapping[str, Any]:
        """Facts of the backend as asked."""
        return self.facts

    def build(self, candidate: Candidate) -> Built | Failed:
        """Build in the worker that the candidate belongs to."""
        return self._engines(candidate.digest == FP32_ROW).build(candidate)
