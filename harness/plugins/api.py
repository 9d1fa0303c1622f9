"""Contracts of the plug-ins: benchmarkers (latency), evaluators (accuracy), and external searchers.

Plug-ins *raise* `harness.base.errors.BuildFailed`, `MeasureFailed` or `EvaluationFailed`. The harness is responsible
for warm-up, repetitions, interleaving, time limits, isolation and records, so that all runtimes are sampled alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from harness.base.errors import UserError
from search.space import Resolved

Array = npt.NDArray[Any]
#: Runs the built engine once: input arrays by name to output arrays by name.
Infer = Callable[[Mapping[str, Array]], Mapping[str, Array]]


def name_arrays(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays in the outputs of ONNX Runtime by name; text has a type of fixed length.

    Those of a sequence have the names "boxes[0]", "boxes[1]" and so on, the values of a map are one array, and an empty
    optional has none.
    """
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            found |= name_arrays({f"{name}[{index}]": each for index, each in enumerate(value)})
        elif value is not None:
            array = np.asarray(list(value.values()) if isinstance(value, dict) else value)
            found[name] = array.astype(str) if array.dtype == object else array
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Model that a benchmarker builds.

    Attributes:
        digest: Digest of the quantized edges, or of an empty list for the float model; for a Q/DQ model of another tool
            the first 16 hexadecimal digits of the file's SHA-256.
        edges: Quantized edges; empty for the float model and for models of other tools.
        source: Function that writes the ONNX file if it is missing, and returns its path. Replay and simulation never
            call it.
        shape: Label of the input shape that the file is built at, if the task has several; "" otherwise. A simulated
            latency depends on it.
        alone: Whether only this file is built in a task with several shapes; otherwise one file per shape is built.
        dynamic: Whether inputs of the file may have dynamic axes, for engines that are not timed; only benchmarkers
            whose capabilities have `dynamic` build such a file.
    """

    digest: str
    edges: Resolved
    source: Callable[[], Path]
    shape: str = ""
    alone: bool = False
    dynamic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Built engine in the form that the benchmarker opens; `info` has JSON values for the journal."""

    engine: Any
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Layer of a built engine, as the runtime reports it.

    Attributes:
        name: Name in the runtime.
        kind: Operation in the runtime's terms, for instance "Convolution", "Reorder".
        precision: Precision in the runtime's terms, for instance "u8", "bf16".
        time_ms: Mean time of one inference; None if the engine was not built for profiling, or did not run.
        origin: Nodes of the model that became this layer; empty for layers that the runtime adds.
        kernel: Implementation that the runtime chose; "" if unknown.
    """

    name: str
    kind: str
    precision: str
    time_ms: float | None = None
    origin: tuple[str, ...] = ()
    kernel: str = ""


class Probe(Protocol):
    """Opened engine, ready to run; see also `ReportsConditions`. Its methods raise `MeasureFailed` if a run fails."""

    def sample(self, n: int) -> Sequence[float]:
        """Run n inferences on fixed inputs and return the latency of each in milliseconds."""
        ...

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run one inference on inputs by name, on the engine that `sample` times, and return the outputs by name."""
        ...


@runtime_checkable
class InfersConcurrently(Protocol):
    """Probe that can run several inferences at the same time, for scoring while nothing is timed.

    Attributes:
        concurrency: Number of inferences for which this process has cores.
    """

    @property
    def concurrency(self) -> int: ...

    def concurrently(self, count: int) -> AbstractContextManager[Infer]:
        """Return a context with an `infer` that `count` threads may call at the same time.

        Its outputs equal those of `Probe.infer` bit for bit.
        """
        ...


@runtime_checkable
class ReportsConditions(Protocol):
    """Probe that reads the state of its device."""

    def conditions(self) -> Mapping[str, float]:
        """Return clocks in MHz, temperatures in °C and other readings by name; called after sampling."""
        ...


@runtime_checkable
class ReportsParts(Protocol):
    """Probe whose latency is computed from several ones, for instance those at the shapes of a task."""

    def parts_ms(self, n: int) -> Mapping[str, float]:
        """Return the median of the last n readings of each part in ms."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties of a benchmarker that the harness needs before it builds anything.

    Attributes:
        dialect: Q/DQ dialect that the runtime reads (`qdq list dialect`), which a class of your own names; None: the
            dialect with the name of the benchmarker. A runtime that computes each pair as written reads
            `onnxruntime_unfused`.
        in_process: Whether the benchmarker runs in the main process, because it executes no model (replay, simulation).
        emulated: Precisions that the device emulates: such models are built and scored, but not timed.
        interleaved: Whether turns of two engines can be interleaved, which removes drift of the machine.
        compile_only: Whether the benchmarker only compiles models and has no latency, so that no search can use it.
        dynamic: Whether it builds candidates with dynamic axes, so that samples are scored at their own sizes.
        tensors_only: Whether models with outputs that are sequences or maps cannot run.
        tunes_builds: Whether a build times kernels, and so takes seconds to minutes.
        script: Python code that runs the file `{file}` on `feeds` at the float precision `{precision}`, and sets
            `found`, the outputs by name, for reports of wrong results; "" if there is none.
    """

    dialect: str | None = None
    in_process: bool = False
    emulated: frozenset[str] = frozenset()
    interleaved: bool = True
    compile_only: bool = False
    dynamic: bool = False
    tensors_only: bool = False
    tunes_builds: bool = False
    script: str = ""


@runtime_checkable
class Benchmarker(Protocol):
    """Builds and opens engines of one runtime with fixed options, the arguments of the constructor.

    1. `build` raises `BuildFailed` with the message of the runtime if it rejects the model.
    2. `open` gives a probe whose `sample` measures inference alone, without build or copies of weights.
    3. `describe` returns JSON-able facts, and raises only `UserError`, if the runtime or its device is missing (the
       constructor does not look for them; the harness calls `describe` before anything slow): `name`, `version`,
       `device`, `options`, and `float_precision` (precision of float operations). A runtime with several float
       precisions adds `float_params` (precision to constructor parameters), and `float_open` if the parameters leave
       the choice to the harness, which then takes the fastest. A `note` is a sentence below every table with its
       results, which are then excluded from means with those of other runtimes.
    4. An attribute `capabilities`, of the class or of the instance, differs from the defaults of `Capabilities` as
       needed. `in_process` and `interleaved` are read from the class.
    5. An engine runs after the file of its model was removed, and does not overwrite outputs that `infer` returned.
    6. Optional methods are those of `SupportsSave`, `SupportsLayers`, `SupportsCast` and `UsesGpu`.
    7. If the constructor has a parameter `base`, it receives the folder that relative paths of the experiment start
       from.
    """

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Build the candidate's engine; `workdir` is a scratch folder for this candidate."""
        ...

    def open(self, artifact: Artifact) -> AbstractContextManager[Probe]:
        """Open an engine that `build` made in this process; raise `MeasureFailed` if it cannot run."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return facts for records and tables: name, version, device, options and float_precision.

        A benchmarker for a single model gives its digest as `model_sha256`; other models are rejected.
        """
        ...


def capabilities_of(benchmarker: object) -> Capabilities:
    """Return the capabilities of a benchmarker or of its class."""
    found: Capabilities = getattr(benchmarker, "capabilities", Capabilities())
    return found


def require_timing(use: str, benchmarker: object) -> None:
    """Raise `UserError` if a backend compiles models but does not time them."""
    if capabilities_of(benchmarker).compile_only:
        raise UserError(
            f"backend {use!r} only compiles models, without timing: use it in qdq explain or qdq inspect check"
        )


@runtime_checkable
class SupportsSave(Protocol):
    """Benchmarker that can store an engine in a file."""

    def save(self, candidate: Candidate, path: Path) -> None:
        """Build the candidate's engine and write it to a file that `load` reads; raise `BuildFailed` as `build`."""
        ...

    def load(self, path: Path) -> Artifact:
        """Read the engine from such a file; raise `BuildFailed` if it is none, or of another version or device."""
        ...


@runtime_checkable
class SupportsLayers(Protocol):
    """Benchmarker that reports the layers of a built engine."""

    def layers(self, artifact: Artifact) -> Sequence[Layer]:
        """Return the layers of an engine, which was sampled before; raise `MeasureFailed` if they are not reported."""
        ...


@runtime_checkable
class SupportsCast(Protocol):
    """Benchmarker that converts a model before it builds it, for instance float operations to FP16.

    The harness converts the float model once, inserts Q/DQ pairs into the result, and passes such files to `build`.
    """

    def cast(self, path: Path, folder: Path) -> Path:
        """Write the converted model to `folder` and return its path; return `path` if it is converted already.

        Raises:
            BuildFailed: The model cannot be converted.
        """
        ...


@runtime_checkable
class UsesGpu(Protocol):
    """Benchmarker whose engines run on a GPU.

    Builders time kernels on the GPU, so processes of this user take turns to build, score and time engines on it.
    """

    def gpu(self) -> str:
        """Return the UUID of the GPU."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSearchTask:
    """Arguments of an external searcher.

    Attributes:
        model: File of the cleaned float model, which all methods start from.
        workdir: Folder for files of the searcher; removed after the search.
        precision: Precision of quantized values: "int8", "fp8".
        seed: Seed of all random draws.
        find: Function that returns the file of a Q/DQ model by the name of a PTQ tool ("modelopt_ptq") or a path of the
            user; it raises `BuildFailed` if the tool failed.
    """

    model: Path
    workdir: Path
    precision: str
    seed: int
    find: Callable[[str], Path]


class ExternalSearcher(Protocol):
    """Search of another tool, which proposes whole models instead of placements; the factory is a context manager.

    1. `ask` returns the file of the next model, or None after the last; the harness owns the file from then on.
       `tell` is called for each model before the next `ask`, and each costs one evaluation.
    2. The same task and the same results give the same files, byte for byte: a run is resumed by running it again.
    3. `BuildFailed`, raised on entering or in `ask`, ends only this search; so does any other exception, also in
       `tell` and on leaving.
    4. A class that an experiment names as `package.module:Class` has the class attribute `kind = "external searcher"`.
    """

    def ask(self) -> Path | None:
        """Return the file of the next model to time, or None after the last."""
        ...

    def tell(self, latency_ms: float | None) -> None:
        """Receive the latency of the last model; None if it could not be built or timed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Result of an evaluator.

    Attributes:
        metrics: Scores by name, among them the evaluator's own `metric`.
        per_item: One value per image, in data order, if the metric is their mean (top-1 hits); else empty (mAP).
        evidence: Text from which `harness.accuracy.metrics.intervals` recomputes the metrics on any resample of the
            images; "" if `per_item` suffices.
        mixable: Text from which `harness.accuracy.metrics.intervals` computes the metric of images that are divided
            among several engines; "" if `per_item` suffices.
        note: Remark for the reader of the scores, for instance on outputs that are left out; usually "".
    """

    metrics: Mapping[str, float]
    per_item: tuple[float, ...] = ()
    evidence: str = ""
    mixable: str = ""
    note: str = ""


@runtime_checkable
class Evaluator(Protocol):
    """Scores an engine on data.

    Attributes:
        metric: Name of the primary score among those of `score`.
        higher_is_better: Direction of that score.

    Optional are the method of `NeedsPreparation`; `fingerprint: str`, which changes with the data, so that results on
    other data are not continued; and `inferences: int`, how often `score` and `prepare` run the engine, for a progress
    bar.
    """

    metric: str
    higher_is_better: bool

    def score(self, infer: Infer) -> Accuracy:
        """Return the accuracy of the engine behind `infer`; raise `EvaluationFailed` if there is none."""
        ...


@runtime_checkable
class SharesInputs(Protocol):
    """Evaluator that keeps prepared inputs, which other evaluators of the process may use."""

    def share_inputs(self, caches: dict[object, Any]) -> None:
        """Keep prepared inputs in a cache of `caches`, which has a key for each kind of input."""
        ...


@runtime_checkable
class NeedsPreparation(Protocol):
    """Evaluator that compares with the float model."""

    def prepare(self, infer: Infer) -> None:
        """Run the float model on the data, before any other engine is scored, and write what scores need to a file.

        Other instances of the evaluator, which may score in other processes, read the file. Its path is the argument
        `reference` of the constructor, which the harness gives if there is such a parameter.

        Raises:
            EvaluationFailed: The outputs cannot be used.
        """
        ...
