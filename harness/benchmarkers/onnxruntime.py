"""Latency on ONNX Runtime's CPU provider."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.api import Array, Artifact, Candidate
from harness.errors import BuildFailed, MeasureFailed, UserError
from harness.measure.provenance import checked_threads, cpu_model
from harness.measure.sampling import fixed_inputs

__all__ = ["ONNXRuntimeBenchmarker"]

Optimization = Literal["disabled", "basic", "extended", "all"]
LEVELS: Mapping[str, str] = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
PROVIDER = "CPUExecutionProvider"


class ONNXRuntimeBenchmarker:
    """Makes a session and times it with inputs and outputs bound beforehand.

    Args:
        threads: Threads within an operator, at most the cores that this process may use.
        optimization: Level of graph optimization; below "extended" no Q/DQ pair becomes an integer kernel.

    Raises:
        UserError: ONNX Runtime is not installed.
        ValueError: More threads than cores, or an unknown level.
    """

    def __init__(self, threads: int = 1, optimization: Optimization = "all") -> None:
        if optimization not in LEVELS:
            raise ValueError(f"optimization: one of {', '.join(LEVELS)}, but got {optimization!r}")
        self._threads = checked_threads(threads)
        self._optimization = optimization
        self._ort = _import_onnxruntime()
        # Its exceptions derive from Exception one by one, without a class of their own above them.
        state = vars(self._ort.capi.onnxruntime_pybind11_state).values()
        own = (kind for kind in state if isinstance(kind, type) and issubclass(kind, Exception))
        self._errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, *own)

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Make the session from the candidate's file.

        Raises:
            BuildFailed: ONNX Runtime refuses the model, or a shape is not static.
        """
        path = candidate.source()
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.execution_mode = self._ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = getattr(self._ort.GraphOptimizationLevel, LEVELS[self._optimization])
        options.log_severity_level = 3
        try:
            session = self._ort.InferenceSession(str(path), options, providers=[PROVIDER])
        except self._errors as error:
            raise BuildFailed(f"ONNX Runtime refuses {path.name}: {_words(error)}") from error
        for value in session.get_inputs():
            if not all(isinstance(size, int) for size in value.shape):
                raise BuildFailed(
                    f"{path.name}: input {value.name!r} has the dynamic shape {value.shape}; make it static"
                )
        return Artifact(engine=session)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_Probe]:
        """A probe with its inputs and outputs bound once.

        Raises:
            MeasureFailed: No fixed input can be made for an input's type.
        """
        yield _Probe(artifact.engine, self._errors)

    def describe(self) -> Mapping[str, Any]:
        """Name, version, device, options; floats always run in FP32 here."""
        return {
            "name": "onnxruntime",
            "version": self._ort.__version__,
            "device": cpu_model(),
            "options": {"threads": self._threads, "optimization": self._optimization, "provider": PROVIDER},
            "float_precision": "f32",
        }


class _Probe:
    """One session with a binding for the timed runs."""

    def __init__(self, session: Any, errors: tuple[type[Exception], ...]) -> None:
        self._session = session
        self._errors = errors
        self._inputs = fixed_inputs({v.name: (_dtype(v), tuple(v.shape)) for v in session.get_inputs()})
        self._binding = session.io_binding()
        for name, array in self._inputs.items():
            self._binding.bind_cpu_input(name, array)
        for value in session.get_outputs():
            self._binding.bind_output(value.name, "cpu")

    def sample(self, n: int) -> Sequence[float]:
        """Time n synchronous runs on memory bound beforehand."""
        run, binding, clock = self._session.run_with_iobinding, self._binding, time.perf_counter_ns
        readings = np.empty(n)
        try:
            for index in range(n):
                start_ns = clock()
                run(binding)
                readings[index] = clock() - start_ns
        except self._errors as error:
            raise MeasureFailed(f"ONNX Runtime: {_words(error)}") from error
        values: list[float] = (readings / 1e6).tolist()
        return values

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Outputs by name; floating-point ones as float32."""
        names = [value.name for value in self._session.get_outputs()]
        try:
            results = self._session.run(names, dict(feeds))
        except self._errors as error:
            raise MeasureFailed(f"ONNX Runtime: {_words(error)}") from error
        return {name: _plain(array) for name, array in zip(names, results, strict=True)}


def _import_onnxruntime() -> Any:
    """ONNX Runtime without its telemetry.

    Raises:
        UserError: It is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f"benchmarker 'onnxruntime': {error}; pip install 'nvidia-modelopt[onnx]' brings it as onnxruntime-gpu"
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _dtype(value: Any) -> np.dtype[Any]:
    """Element type from ONNX Runtime's name of it, for instance "tensor(float)"."""
    name = value.type.removeprefix("tensor(").removesuffix(")")
    name = {"float": "float32", "double": "float64"}.get(name, name)
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except TypeError:
        raise MeasureFailed(f"input {value.name!r}: no fixed input can be made for type {value.type}") from None
    return dtype


def _plain(array: Array) -> Array:
    return array.astype(np.float32, copy=False) if np.issubdtype(array.dtype, np.floating) else array


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
