"""Checks of files by a runtime, against their float model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.base.progress import NullProgress
from harness.config.sections import Limits
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins import registry
from harness.plugins.api import Candidate, Infer
from harness.run.verify.runtime_checker import CheckPlan, RuntimeChecker


def checks(engines: Any, floating: Path, feeds: Iterable[Any], folder: Path, files: Mapping[str, Path]) -> list[Any]:
    """The checks of some files, by digests of their placements."""
    floats = {MAIN_BENCHMARKER: floating}
    plan = CheckPlan(
        float_file=floating, floats=floats, feeds=feeds, folder=folder, work=folder / "work", limits=Limits()
    )  # fmt: skip
    with RuntimeChecker(plan, engines, NullProgress()) as checker:
        candidates = [Candidate(digest=key, edges=(), source=lambda file=file: file) for key, file in files.items()]
        return [checker.check(candidate) for candidate in candidates]


@contextmanager
def running(path: Path, folder: Path, **params: Any) -> Iterator[Infer]:
    """A file in an engine of ONNX Runtime."""
    runtime: Any = registry.create_plugin("benchmarker", "onnxruntime", params)
    with runtime.open(runtime.build(Candidate(digest="q", edges=(), source=lambda: path), folder)) as probe:
        yield probe.infer
