"""Benchmarkers that run one placement at several input shapes.

`ShapeSet` times a placement at several shapes, with an engine for each shape. A reading combines one inference at each
shape into one number in ms, so that all statistics are those of any latency:

- "weighted": the mean of the latencies, weighted by the shares of the requests, so the expected time of a request. The
  speedup is the ratio of the total times of the same requests. A mean of ratios would let a rare small shape outweigh
  the one that takes most of the time.
- "worst": the largest ratio to the float model's latency at the same shape, times the mean latency of the float model.
  So the speedup is that of the worst shape. This shape is selected by medians of several readings, because the largest
  of single readings is large by chance. The latencies of the float model are measured once, so that the scale is the
  same for all engines; changes of the machine's speed cancel in ratios.

`SampleSizes` runs samples at their own sizes. Engines are built and timed at the sizes of the search. A sample of other
sizes is run on a second engine, of the same file with dynamic axes, which is built for the first such sample.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

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
class TimedShape:
    """Shape that placements are timed at.

    Attributes:
        label: Name of the shape, for instance "batch=8".
        share: Share of the requests; the shares of a set add up to 1.
        inputs: Shape of each input by name.
        file: File of the float model at this shape; None if it is the shape of the search.
        float_ms: Latency of the float model in ms at this shape, for the objective "worst"; otherwise 0.
    """

    label: str
    share: float
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    file: Path | None = None
    float_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSet:
    """Shapes with an objective; a call with a benchmarker returns one that times engines at all shapes.

    Attributes:
        objective: "weighted": mean latency by the shares. "worst": latency at the shape with the largest ratio to the
            float model's, scaled to the mean of the float latencies.
        float_file: File of the float model at the shape of the search, into which Q/DQ pairs are inserted.
    """

    objective: Literal["weighted", "worst"]
    float_file: Path
    shapes: tuple[TimedShape, ...]

    def __call__(self, benchmarker: Benchmarker) -> Benchmarker:
        return _ShapeSetBenchmarker(benchmarker, self)

    @property
    def text(self) -> str:
        """Description of the objective and the shapes: "weighted mean over batch=1 (0.7); batch=8 (0.3)"."""
        if self.objective == "worst":
            return f"worst ratio to float over {'; '.join(shape.label for shape in self.shapes)}"
        return f"weighted mean over {'; '.join(f'{shape.label} ({shape.share:.4g})' for shape in self.shapes)}"

    def combine(self, latencies_ms: Array) -> Array:
        """Combine the readings at all shapes.

        Args:
            latencies_ms: Readings in ms, with shape [shapes, readings].

        Returns:
            One latency in ms for each reading.
        """
        if self.objective == "weighted":
            return np.array([shape.share for shape in self.shapes]) @ latencies_ms
        levels = np.array([shape.float_ms for shape in self.shapes])
        worst = int(np.argmax(np.median(latencies_ms, axis=1) / levels))
        combined: Array = latencies_ms[worst] * (levels.mean() / levels[worst])
        return combined


@dataclass(frozen=True, slots=True)
class _Engines:
    candidate: Candidate
    workdir: Path
    built: tuple[Artifact, ...]


class _ResizingBenchmarker:
    """Benchmarker that also builds candidates at other sizes than those of the search."""

    def __init__(self, inner: Benchmarker) -> None:
        self._inner = inner
        self._float_model: Callable[[Path], Any] = cache(lambda file: read_model(file, file.name)[0])
        self.capabilities: Capabilities = capabilities_of(inner)

    def describe(self) -> Mapping[str, Any]:
        return self._inner.describe()

    def _transfer(self, path: Path, fixed: Path, resized: Path, target: Path, sizes: str) -> Path:
        """Write the Q/DQ pairs of a file of the float model `fixed` into the same model at other sizes.

        Raises:
            BuildFailed: The file is an OpenVINO IR, or a Q/DQ pair has no place in the other model.
        """
        if path.suffix == IR_SUFFIX:
            raise BuildFailed(f"{path.name}: an OpenVINO IR has one shape; it cannot be built {sizes}")
        try:
            return transfer_file(self._float_model(fixed), path, self._float_model(resized), target)
        except UserError as error:  # a failure of this candidate, which must not end the run
            raise BuildFailed(f"{path.name} {sizes}: {error}") from error


class _ShapeSetBenchmarker(_ResizingBenchmarker):
    """Benchmarker with an engine for each shape; a candidate that is `alone` has one engine of its own file."""

    def __init__(self, inner: Benchmarker, shapes: ShapeSet) -> None:
        super().__init__(inner)
        self._set = shapes

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the engines.

        Raises:
            BuildFailed: The runtime refuses a model, or the model at another shape lacks a node for a Q/DQ pair.
        """
        if candidate.alone:
            return self._inner.build(candidate, workdir)

        def write(shape: TimedShape, target: Path) -> Path:
            path = candidate.source()
            if shape.file is None:
                return path
            return self._transfer(path, self._set.float_file, shape.file, target, f"at {shape.label}")

        built = {
            shape.label: self._inner.build(
                replace(candidate, shape=shape.label, source=partial(write, shape, workdir / f"shape{number}.onnx")),
                workdir,
            )
            for number, shape in enumerate(self._set.shapes)
        }
        info = {label: dict(each.info) for label, each in built.items()}
        return Artifact(engine=_Engines(candidate, workdir, tuple(built.values())), info={"shapes": info})

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[Probe]:
        """Open a probe of all engines."""
        if not isinstance(artifact.engine, _Engines):
            with self._inner.open(artifact) as probe:
                yield probe
            return
        engines = artifact.engine
        with ExitStack() as opened:
            probes = [opened.enter_context(self._inner.open(each)) for each in engines.built]

            @cache
            def find_searched() -> Probe:
                """Return the probe at the shape of the search, on which evaluators run."""
                for shape, probe in zip(self._set.shapes, probes, strict=True):
                    if shape.file is None:
                        return probe
                own = self._inner.build(engines.candidate, engines.workdir)
                return opened.enter_context(self._inner.open(own))

            yield _ShapeSetProbe(probes, self._set, find_searched)

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the runtime, with the shapes among its options."""
        facts = dict(super().describe())
        return {**facts, "options": {**facts.get("options", {}), "shapes": self._set.text}}


class _ShapeSetProbe:
    def __init__(self, probes: Sequence[Probe], shapes: ShapeSet, find_searched: Callable[[], Probe]) -> None:
        self._probes, self._set, self._find_searched = probes, shapes, find_searched
        self._readings: list[list[float]] = [[] for _ in probes]

    def sample(self, n: int) -> Sequence[float]:
        """Time n inferences at each shape, one shape after the other, and return n combined readings.

        If n is above 1, one more inference at each shape is run first and not counted, because it fills the caches.
        """
        for probe, known in zip(self._probes, self._readings, strict=True):
            if n > 1:
                probe.sample(1)
            known.extend(probe.sample(n))
        combined: list[float] = self._set.combine(np.array([known[-n:] for known in self._readings])).tolist()
        return combined

    def parts_ms(self, n: int) -> Mapping[str, float]:
        """Return the median of the last n readings of each shape in ms."""
        shapes = zip(self._set.shapes, self._readings, strict=True)
        return {shape.label: float(np.median(known[-n:])) for shape, known in shapes}

    def conditions(self) -> Mapping[str, float]:
        """Return the conditions of the runtime's device."""
        first = self._probes[0]
        return first.conditions() if isinstance(first, ReportsConditions) else {}

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run one inference at the shape of the search."""
        return self._find_searched().infer(feeds)


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


class _SampleSizesBenchmarker(_ResizingBenchmarker):
    def __init__(self, inner: Benchmarker, sizes: SampleSizes) -> None:
        super().__init__(inner)
        self._sizes = sizes

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        built = self._inner.build(candidate, workdir)
        return Artifact(engine=_Engines(candidate, workdir, (built,)), info=built.info)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[Probe]:
        """Open a probe of the engine, whose `infer` builds the one with dynamic axes at the first use."""
        engines, sizes = artifact.engine, self._sizes
        with self._inner.open(engines.built[0]) as probe, ExitStack() as opened:

            @cache
            def open_dynamic() -> Probe:
                file, path = sizes.dynamic, engines.candidate.source()
                if path != sizes.fixed:
                    target = engines.workdir / "dynamic.onnx"
                    file = self._transfer(path, sizes.fixed, sizes.dynamic, target, "with dynamic axes")
                candidate = replace(engines.candidate, source=lambda: file, dynamic=True)
                return opened.enter_context(self._inner.open(self._inner.build(candidate, engines.workdir)))

            yield _SampleSizesProbe(probe, sizes, open_dynamic)


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
