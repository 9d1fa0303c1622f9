"""Contracts of the plug-ins: benchmarkers (latency), evaluators (accuracy), and peers (searches of other tools).

A plug-in *raises* `harness.errors.BuildFailed`, `MeasureFailed` or `EvaluationFailed`; the harness
owns warm-up, repeats, interleaving, time limits, isolation and records, so that every runtime is
sampled in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from search.space import Resolved

__all__ = [
    "Accuracy", "Array", "Artifact", "Benchmarker", "Candidate", "Evaluator", "Infer", "Layer", "ExternalSearcher", "ExternalSearchTask",
    "Probe",
]  # fmt: skip

Array = npt.NDArray[Any]
Infer = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs the built engine once: input arrays by name to output arrays by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that is to be built.

    Attributes:
        digest: Identity of its resolved Q/DQ edges ("float" edges give the digest of no edges), or
            for a foreign Q/DQ model the first 16 hexadecimal digits of its file's SHA-256.
        edges: The quantized edges; empty for the float model and for foreign Q/DQ models.
        source: Gives the path of the ONNX file, writing it first where needed. Replay and
            simulation never call it.
    """

    digest: str
    edges: Resolved
    source: Callable[[], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A built engine: whatever the benchmarker needs to open it, and facts worth recording."""

    engine: Any
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a built engine, as its runtime tells it.

    Attributes:
        name: The runtime's own.
        kind: What it computes, in the runtime's words, for instance "Convolution", "Reorder".
        precision: What it computes in, in the runtime's words, for instance "u8", "bf16".
        time_ms: Mean time of one inference; None where the engine was not built to count it, or nothing ran.
        origin: The model's nodes that became this layer; none for what the runtime adds.
        kernel: The implementation that was chosen; "" where the runtime does not say.
    """

    name: str
    kind: str
    precision: str
    time_ms: float | None = None
    origin: tuple[str, ...] = ()
    kernel: str = ""


class Probe(Protocol):
    """An opened engine, ready to run.

    One that knows what its device did (a GPU's clocks, heat) has `conditions() -> Mapping[str, float]`, asked after
    readings were taken.
    """

    def sample(self, n: int) -> Sequence[float]:
        """Run n inferences on fixed inputs and return the latency of each, in milliseconds."""
        ...

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run one inference on these inputs; the engine is the one that `sample` times."""
        ...


@runtime_checkable
class Benchmarker(Protocol):
    """Builds and opens engines of one runtime with fixed options (the constructor's arguments).

    1. `build` raises `BuildFailed` with the runtime's own words where the model is refused.
    2. `open` yields a probe whose `sample` measures inference alone: no build, no copy of weights.
    3. `describe` gives JSON-able facts, and raises `UserError` alone, where the runtime or its device is missing (the
       constructor never looks for them; the harness describes before anything that takes long): `name`, `version`,
       `device`, `options`, and `float_precision` (what float operations run in). A runtime that can run them in
       several gives `float_params` (precision to constructor parameters), and `float_open` where the parameters
       leave the choice to the harness, which then takes the fastest. A `note` is a sentence that stands below every
       table with its figures, which no mean pools with those of others.
    4. The attribute `dialect` names the Q/DQ dialect that it reads; by default the one called like the
       benchmarker. The class attribute `in_process = True` says that there is nothing to isolate, and
       `accuracy_only` is the set of precisions that the device emulates: they are built and scored, never timed.
    5. One that can keep an engine has `save(candidate: Candidate, path: Path)` and `load(path: Path) -> Artifact`.
    6. One that can tell what became of the model has `layers(artifact: Artifact) -> Sequence[Layer]`.
    7. One that reads another file than it is given (float operations cast to FP16) has `cast(path: Path, folder: Path)
       -> Path`, which gives that file, made in the folder, and of that file itself. The harness casts the float model
       once, searches and delivers in that form, and `build` is given it.
    8. One whose constructor names `base` gets there the folder that relative paths of the experiment start from.
    9. One whose engines run on a GPU has `gpu() -> str`, which says on which: its UUID. Builders time kernels there, so
       nothing of this user is built, scored or timed on it at the same time. The class attribute `in_turns = False`
       says that turns of two engines cannot share the machine's pace: candidates are always timed alone.
    """

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the candidate's engine; `workdir` is a scratch folder of this candidate alone."""
        ...

    def open(self, artifact: Artifact) -> AbstractContextManager[Probe]:
        """Open an engine that `build` made in this process."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Facts for provenance and for the table: at least name, version, device, options.

        One that has answers for a single model alone says which, by `model_sha256`; others are refused.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSearchTask:
    """What a peer is given.

    Attributes:
        model: File of the cleaned float model, which every method of the table starts from.
        workdir: Folder for whatever the peer writes; it is the peer's alone, and gone after the search.
        precision: Of quantized values: "int8", "fp8".
        seed: Fixes all draws.
        find: The file of a Q/DQ model that a parameter names: a PTQ tool's ("modelopt_ptq"), or one of the user's.
            Raises `BuildFailed` where the tool made none.
    """

    model: Path
    workdir: Path
    precision: str
    seed: int
    find: Callable[[str], Path]


class ExternalSearcher(Protocol):
    """Somebody else's search, which brings whole models and not placements; the factory gives its context manager.

    1. `ask` gives the file of the next model, None where there is none left; the file is the harness' from then on.
       Each model is told before the next is asked for, and costs what any evaluation costs.
    2. The same task and the same tells give the same files, byte for byte: a run is resumed by running it again.
    3. `BuildFailed`, raised on entering or asking, ends the peer's search and nothing else; so does whatever else it
       raises, on being told and on leaving too.
    4. One that an experiment names as `package.module:Class` has the class attribute `kind = "peer"`.
    """

    def ask(self) -> Path | None:
        """The next model that is to be timed."""
        ...

    def tell(self, latency_ms: float | None) -> None:
        """Latency of the model that was asked for last; None where it could not be built or timed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What an evaluator found.

    Attributes:
        metrics: Figures by name, the evaluator's own `metric` among them.
        per_item: One value per image, in data order, where the metric is their mean (top-1 hits);
            empty where it is not a mean (mAP).
        evidence: What the metrics can be computed from again on any choice of the images, as text that
            `harness.accuracy.metrics.intervals` makes and reads; "" where there is nothing beside `per_item`.
        note: What has to be said beside the figures, for instance which outputs they leave out; "" as a rule.
    """

    metrics: Mapping[str, float]
    per_item: tuple[float, ...] = ()
    evidence: str = ""
    note: str = ""


@runtime_checkable
class Evaluator(Protocol):
    """Scores an engine on data.

    Attributes:
        metric: Name of the primary figure among those of `score`.
        higher_is_better: Direction of that figure.

    An evaluator that compares with the float model also has `prepare(infer: Infer) -> None`: the harness calls it once
    with the float model's engine, before any other engine is scored; what it keeps it writes to a file, because engines
    may be scored in other processes.

    One with `fingerprint: str`, which changes with the data that it scores on, is not used to go on with results that
    were begun on other data; those of the harness have it.

    One that takes long may have `inferences: int`, how often `score`, and `prepare`, run the engine: then a bar shows
    how far it is.
    """

    metric: str
    higher_is_better: bool

    def score(self, infer: Infer) -> Accuracy:
        """Accuracy of the engine behind `infer`; raises `EvaluationFailed` where there is none."""
        ...
