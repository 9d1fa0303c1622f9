"""Benchmarker that runs samples at their own sizes, on a form of the engine's file with the dynamic axes of the model.

Engines are built and timed at the sizes of the search. A sample of other sizes is run on a second engine, of the same
file with dynamic axes, which is built for the first such sample.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed, UserError
from harness.graph.dynamic_axes import load_dynamic, transfer_file
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.io.files import write_model
from harness.graph.io.model_reader import read_model
from harness.graph.model import Model
from harness.plugins.api import (
    Array,
    Artifact,
    Benchmarker,
    Candidate,
    Capabilities,
    Infer,
    InfersConcurrently,
    Probe,
    ReportsConditions,
    capabilities_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSizes:
    """Two forms of a float model; a call with a benchmarker returns one that runs samples at their own sizes.

    Attributes:
        fixed: File of the float model at the sizes of the search.
        dynamic: File of the same model with its dynamic axes.
        shapes: Shape of each input at the sizes of the search.
        tensors: Names of the tensors that `dynamic` computes; others exist only at fixed sizes.
    """

    fixed: Path
    dynamic: Path
    shapes: Mapping[str, tuple[int, ...]]
    tensors: frozenset[str] = field(repr=False)

    def __call__(self, benchmarker: Benchmarker) -> Benchmarker:
        return _SampleSizesBenchmarker(benchmarker, self)

    def fit(self, feeds: Mapping[str, Array]) -> bool:
        """Return whether inputs have the sizes of the search."""
        return all(array.shape == self.shapes.get(name, array.shape) for name, array in feeds.items())


def make_sample_sizes(model: Model, fixed: Path) -> SampleSizes:
    """Write a float model with its dynamic axes to `dynamic.onnx` in the folder of its file at fixed sizes.

    Raises:
        UserError: The model cannot be prepared with dynamic axes.
    """
    twin = load_dynamic(model)
    if twin is None:
        raise UserError(f"{model.source}: its inputs are static, so samples of other sizes do not run")
    made = {name for node in twin.proto.graph.node for name in node.output}
    return SampleSizes(
        fixed=fixed,
        dynamic=write_model(twin.proto, fixed.with_name("dynamic.onnx")),
        shapes={name: model.types[name].shape for name in model.inputs},
        tensors=frozenset({*made, *twin.inputs}),
    )


@dataclass(frozen=True, slots=True)
class _Engine:
    candidate: Candidate
    workdir: Path
    built: Artifact


class _SampleSizesBenchmarker:
    def __init__(self, inner: Benchmarker, sizes: SampleSizes) -> None:
        self._inner, self._sizes = inner, sizes
        self._float_model: Callable[[Path], Any] = cache(lambda file: read_model(file, file.name)[0])
        self.capabilities: Capabilities = capabilities_of(inner)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        built = self._inner.build(candidate, workdir)
        return Artifact(engine=_Engine(candidate, workdir, built), info=built.info)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[Probe]:
        """Open a probe of the engine, whose `infer` builds the one with dynamic axes at the first use."""
        engine: _Engine = artifact.engine
        with self._inner.open(engine.built) as probe, ExitStack() as opened:

            @cache
            def open_dynamic() -> Probe:
                path = self._write(engine.candidate.source(), engine.workdir / "dynamic.onnx")
                candidate = replace(engine.candidate, source=lambda: path, dynamic=True)
                return opened.enter_context(self._inner.open(self._inner.build(candidate, engine.workdir)))

            yield _SampleSizesProbe(probe, self._sizes, open_dynamic)

    def describe(self) -> Mapping[str, Any]:
        return self._inner.describe()

    def _write(self, path: Path, target: Path) -> Path:
        """Write a quantized form of the float model with dynamic axes, and return the path of the file.

        Raises:
            BuildFailed: The file is an OpenVINO IR, or a Q/DQ pair has no place in the model with dynamic axes.
        """
        if path == self._sizes.fixed:
            return self._sizes.dynamic
        if path.suffix == IR_SUFFIX:
            raise BuildFailed(f"{path.name}: an OpenVINO IR has one shape, so samples of other sizes do not run")
        fixed, dynamic = self._float_model(self._sizes.fixed), self._float_model(self._sizes.dynamic)
        try:
            return transfer_file(fixed, path, dynamic, target)
        except UserError as error:  # a failure of this candidate, which must not end the run
            raise BuildFailed(f"{path.name} with dynamic axes: {error}") from error


class _SampleSizesProbe:
    def __init__(self, probe: Probe, sizes: SampleSizes, open_dynamic: Callable[[], Probe]) -> None:
        self._probe, self._sizes, self._open_dynamic = probe, sizes, open_dynamic
        self._lock = threading.Lock()

    @property
    def concurrency(self) -> int:
        return self._probe.concurrency if isinstance(self._probe, InfersConcurrently) else 1

    def sample(self, n: int) -> Sequence[float]:
        return self._probe.sample(n)

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        return self._infer(feeds, self._probe.infer)

    @contextmanager
    def concurrently(self, count: int) -> Iterator[Infer]:
        """Yield an inference function for several threads; samples of other sizes run one after the other."""
        assert isinstance(self._probe, InfersConcurrently)  # `concurrency` is 1 otherwise
        with self._probe.concurrently(count) as infer:
            yield lambda feeds: self._infer(feeds, infer)

    def conditions(self) -> Mapping[str, float]:
        return self._probe.conditions() if isinstance(self._probe, ReportsConditions) else {}

    def _infer(self, feeds: Mapping[str, Array], infer: Infer) -> Mapping[str, Array]:
        if self._sizes.fit(feeds):
            return infer(feeds)
        with self._lock:
            return self._open_dynamic().infer(feeds)
