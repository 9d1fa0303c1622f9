"""Benchmarker that times one placement at several input shapes, with an engine for each shape.

A reading combines one inference at each shape into one number in ms, so that all statistics are those of any latency:

- "weighted": the mean of the latencies, weighted by the shares of the requests, so the expected time of a request. The
  speedup is the ratio of the total times of the same requests. A mean of ratios would let a rare small shape outweigh
  the one that takes most of the time.
- "worst": the largest ratio to the float model's latency at the same shape, times the mean latency of the float model.
  So the speedup is that of the worst shape. This shape is selected by medians of several readings, because the largest
  of single readings is large by chance. The latencies of the float model are measured once, so that the scale is the
  same for all engines; changes of the machine's speed cancel in ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.base.errors import BuildFailed, UserError
from harness.graph.dynamic_axes import transfer_file
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.io.model_reader import read_model
from harness.plugins.api import (
    Array,
    Artifact,
    Benchmarker,
    Candidate,
    Capabilities,
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


class _ShapeSetBenchmarker:
    """Benchmarker with an engine for each shape; a candidate that is `alone` has one engine of its own file."""

    def __init__(self, inner: Benchmarker, shapes: ShapeSet) -> None:
        self._inner, self._set = inner, shapes
        self._float_model: Callable[[Path], Any] = cache(lambda file: read_model(file, file.name)[0])
        self.capabilities: Capabilities = capabilities_of(inner)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the engines.

        Raises:
            BuildFailed: The runtime refuses a model, or the model at another shape lacks a node for a Q/DQ pair.
        """
        if candidate.alone:
            return self._inner.build(candidate, workdir)
        built = tuple(
            self._inner.build(
                replace(candidate, shape=shape.label, source=partial(self._write, candidate, shape, workdir / name)),
                workdir,
            )
            for shape, name in zip(self._set.shapes, self._file_names, strict=True)
        )
        info = {shape.label: dict(each.info) for shape, each in zip(self._set.shapes, built, strict=True)}
        return Artifact(engine=_Engines(candidate, workdir, built), info={"shapes": info})

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
        facts = dict(self._inner.describe())
        return {**facts, "options": {**facts.get("options", {}), "shapes": self._set.text}}

    @property
    def _file_names(self) -> list[str]:
        return [f"shape{number}.onnx" for number in range(len(self._set.shapes))]

    def _write(self, candidate: Candidate, shape: TimedShape, target: Path) -> Path:
        path = candidate.source()
        if shape.file is None:
            return path
        if path.suffix == IR_SUFFIX:
            raise BuildFailed(f"{path.name}: an OpenVINO IR has one shape; it cannot be built at {shape.label}")
        fixed, other = self._float_model(self._set.float_file), self._float_model(shape.file)
        try:
            return transfer_file(fixed, path, other, target)
        except UserError as error:  # a failure of this candidate, which must not end the run
            raise BuildFailed(f"{path.name} at {shape.label}: {error}") from error


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
