"""Latency on ONNX Runtime, with its CPU, CUDA and TensorRT execution providers."""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from harness.base.errors import BuildFailed, MeasureFailed, UserError, install_hint
from harness.config.sections import PluginSpec, normalize_float_precision
from harness.graph.qdq.reduce_model import UPCAST_NOTE, write_float32_copy
from harness.measure.provenance import (
    count_cores,
    describe_environment,
    machine_lacks_vnni,
    machine_processor_label,
    validate_threads,
)
from harness.measure.sampling import make_fixed_inputs
from harness.plugins.api import Array, Artifact, Candidate, Capabilities, Infer, Layer
from harness.runtimes.host_clock import (
    one_line_error,
    parse_dtype,
    read_profile,
    require_static_shapes,
    run_session,
    session_errors,
    time_calls,
    translate_errors,
)

logger = logging.getLogger(__name__)

Provider = Literal["cpu", "cuda", "tensorrt"]
Optimization = Literal["disabled", "basic", "extended", "all"]
Activation = Literal["uint8", "int8"]
Precision = Annotated[Literal["auto", "f32", "f16"], BeforeValidator(normalize_float_precision)]
PROVIDER_NAMES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""By preference: what the first one cannot run goes to the next."""
OPTIMIZATION_LEVEL_NAMES: Mapping[str, str] = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
DIALECT_BY_ACTIVATION: Mapping[str, str] = {"uint8": "onnxruntime", "int8": "onnxruntime_s8"}
"""By storage of activations; those with weights of 7 bits are called so with `_7bit` behind."""
FATAL, WARNING = 4, 2
"""Severities of what its logger prints."""


def unfused_execution(optimization: Optimization = "disabled", **params: Any) -> PluginSpec:
    """Return the backend that computes a file operator by operator, as the file describes it."""
    return PluginSpec(use="onnxruntime", params={"optimization": optimization, **params})


class ONNXRuntimeBenchmarker:
    """Benchmarker of ONNX Runtime, on the CPU, on CUDA or with its TensorRT provider.

    Args:
        threads: Threads within an operator on the CPU, at most the cores that this process may use.
        optimization: Level of graph optimization; below "extended" no Q/DQ pair becomes an integer kernel, so that
            UINT8 activations have the dialect `onnxruntime_unfused`.
        provider: Execution provider. Operators that it does not support run on CUDA (for "tensorrt") or on the CPU.
        activation: Type of quantized activations: "uint8" (U8S8, dialect `onnxruntime`) or "int8" (S8S8, dialect
            `onnxruntime_s8`); weights are INT8 in both. TensorRT accepts only INT8, in its own dialect.
        precision: Precision of float operations; "f16" only with TensorRT, where "auto" selects the faster one.
        profile: Record the time of every node, for `layers`. This takes time, so do not compare such engines.
        reduce_range: Store weights in 7 bits; None: only on a processor that adds products in 16 bits, where 8 bits
            saturate. Not for TensorRT.

    Raises:
        UserError: ONNX Runtime is not installed, or the provider does not work on this machine.
        ValueError: There are more threads than cores, or a parameter has an unknown value.
    """

    capabilities = Capabilities(
        dynamic=True, script='found = dict(zip(names, ort.InferenceSession("{file}").run(names, feeds)))'
    )

    def __init__(
        self,
        threads: int = 1,
        optimization: Optimization = "all",
        provider: Provider = "cpu",
        activation: Activation | None = None,
        precision: Precision = "auto",
        profile: bool = False,
        reduce_range: bool | None = None,
    ) -> None:
        precision = normalize_float_precision(precision)
        if activation is None:
            activation = "int8" if provider == "tensorrt" else "uint8"
        if provider == "tensorrt" and activation != "int8":
            raise ValueError(f"activation: TensorRT accepts only int8, but got {activation!r}")
        if provider != "tensorrt" and precision == "f16":
            raise ValueError("precision: auto or f32 with this provider, but got 'f16'")
        if reduce_range and provider == "tensorrt":
            raise ValueError("reduce_range: TensorRT computes with weights of 8 bits as they are; leave it out")
        unfused = provider == "cpu" and optimization in ("disabled", "basic") and activation == "uint8"
        unfused = unfused and not reduce_range
        lacking = provider == "cpu" and not unfused and machine_lacks_vnni()
        self._reduced = lacking if reduce_range is None else reduce_range
        self._dialect = (
            "tensorrt"
            if provider == "tensorrt"
            else "onnxruntime_unfused"
            if unfused
            else DIALECT_BY_ACTIVATION[activation] + "_7bit" * self._reduced
        )
        self.capabilities = replace(self.capabilities, dialect=self._dialect)
        self._threads = validate_threads(threads)
        self._optimization, self._provider, self._activation = optimization, provider, activation
        self._profile = profile
        self._open = precision == "auto" and provider == "tensorrt"
        self._float = "f32" if precision == "auto" else precision
        self._ort = _import_onnxruntime()
        self._errors = session_errors(self._ort)
        if provider != "cpu":
            self._check_device()

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Create a session from the candidate's file.

        Raises:
            BuildFailed: ONNX Runtime refuses the model, or a shape is not static.
        """
        path = candidate.source()
        file, info = self._own_file(candidate, workdir)
        with translate_errors(BuildFailed, f"ONNX Runtime refuses {path.name}", self._errors):
            session = self._create_session(
                str(file), quantized=self._needs_int8(path), profile=workdir if self._profile else None
            )
        if not candidate.dynamic:
            require_static_shapes(path.name, {value.name: value.shape for value in session.get_inputs()})
        return Artifact(engine=session, info=info)

    def save(self, candidate: Candidate, path: Path) -> None:
        """Write the optimized graph to a file for `load` (ONNX Runtime docs, "Graph optimizations", offline mode).

        Raises:
            BuildFailed: ONNX Runtime refuses the model.
        """
        source = candidate.source()
        with (
            tempfile.TemporaryDirectory(prefix="qdq-save-") as scratch,
            translate_errors(BuildFailed, f"ONNX Runtime refuses {source.name}", self._errors),
        ):
            file, _ = self._own_file(candidate, Path(scratch))
            self._create_session(str(file), quantized=self._needs_int8(source), optimized=path)

    def load(self, path: Path) -> Artifact:
        """Load a graph that `save` wrote, for this version of ONNX Runtime and this kind of processor only.

        Raises:
            BuildFailed: ONNX Runtime refuses it.
        """
        with (
            tempfile.TemporaryDirectory(prefix="qdq-load-") as scratch,
            translate_errors(BuildFailed, f"ONNX Runtime cannot load {path.name}", self._errors),
        ):
            file, info = self._own_file(Candidate(digest=path.stem, edges=(), source=lambda: path), Path(scratch))
            return Artifact(engine=self._create_session(file.read_bytes()), info=info)

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_ONNXRuntimeProbe]:
        """Open a probe with inputs and outputs in fixed memory.

        Raises:
            MeasureFailed: An input has a type without random values.
        """
        cpu = self._provider == "cpu"
        concurrency = count_cores() if cpu and self._threads == 1 else 1  # all runs share one pool of more threads
        yield _ONNXRuntimeProbe(artifact.engine, self._ort, "cpu" if cpu else "cuda", concurrency)

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of an engine with mean times of its inferences so far, and end its profiling.

        Raises:
            MeasureFailed: The engine was built without `profile`, or not sampled.
        """
        if not self._profile:
            raise MeasureFailed("ONNX Runtime reports its layers only with profile: true")
        try:
            return read_profile(Path(artifact.engine.end_profiling()).read_text(encoding="utf-8"))
        except OSError as error:
            raise MeasureFailed(f"ONNX Runtime's profile cannot be read: {error}") from error

    def describe(self) -> Mapping[str, Any]:
        precisions = {name: {"precision": name} for name in ("f32", "f16")}
        device = machine_processor_label()
        if self._provider != "cpu":
            gpus = describe_environment().get("gpus", ())
            device = str(gpus[0]["name"]) if gpus else "NVIDIA GPU"
        return {
            "name": "onnxruntime",
            "version": self._ort.__version__,
            "device": device,
            "options": {
                "threads": self._threads,
                **({"spinning": "within a run"} if self._threads != 1 else {}),
                "optimization": self._optimization,
                "provider": PROVIDER_NAMES[self._provider][0],
                "activation": self._activation,
                **({"profile": True} if self._profile else {}),
            },
            "float_precision": self._float,
            **({"float_open": self._open, "float_params": precisions} if self._provider == "tensorrt" else {}),
            **({"dialect": self._dialect} if self._reduced or self._dialect == "onnxruntime_unfused" else {}),
        }

    def _needs_int8(self, path: Path) -> bool:
        """Return whether TensorRT needs INT8 enabled; a float model with INT8 enabled would need a calibration."""
        return self._provider == "tensorrt" and b"DequantizeLinear" in path.read_bytes()

    def _own_file(self, candidate: Candidate, folder: Path) -> tuple[Path, dict[str, str]]:
        """Return a candidate's file, or a float32 copy of one that the CPU provider computes wrongly, with a note.

        Files of the harness are right, because its dialects for ONNX Runtime have no pairs in 16 bits.

        Raises:
            BuildFailed: The file cannot be read.
        """
        path, wide = candidate.source(), None
        if self._provider == "cpu" and not candidate.edges:
            with translate_errors(BuildFailed, f"ONNX Runtime refuses {path.name}", (UserError,)):
                wide = write_float32_copy(path, folder)
        if wide is None:
            return path, {}
        logger.warning("%s: %s", path.name, UPCAST_NOTE)
        return wide, {"arithmetic": UPCAST_NOTE}

    def _create_session(
        self, model: str | bytes, *, quantized: bool = False, optimized: Path | None = None, profile: Path | None = None
    ) -> Any:
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        if self._threads != 1:
            # Threads that spin between runs would take cores from the engine that is timed in turns with this one.
            options.add_session_config_entry("session.force_spinning_stop", "1")
        options.execution_mode = self._ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = getattr(
            self._ort.GraphOptimizationLevel, OPTIMIZATION_LEVEL_NAMES[self._optimization]
        )
        options.log_severity_level = 3
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile / "profile")
        own: dict[str, dict[str, Any]] = {
            "TensorrtExecutionProvider": {"trt_fp16_enable": self._float == "f16", "trt_int8_enable": quantized},
        }
        providers = [(name, own.get(name, {})) for name in PROVIDER_NAMES[self._provider]]
        return self._ort.InferenceSession(model, options, providers=providers, enable_fallback=False)

    def _check_device(self) -> None:
        """Raise `UserError` if a provider lacks its libraries or GPU; ONNX Runtime would silently use the CPU."""
        from harness.graph.builder import GraphBuilder

        wanted, missing = PROVIDER_NAMES[self._provider][0], io.StringIO()
        with redirect_stdout(missing):  # it prints the libraries that it cannot load
            self._ort.preload_dlls()
        why = missing.getvalue().partition("\n")[0] or "it fell back to the CPU"
        builder = GraphBuilder("probe")
        builder.output(builder.op("Relu", builder.input("x", (1, 4))))
        self._ort.set_default_logger_severity(FATAL)
        try:
            found = self._create_session(builder.build().SerializeToString()).get_providers()
        except self._errors as error:
            found, why = [], one_line_error(error)
        finally:
            self._ort.set_default_logger_severity(WARNING)
        if wanted not in found:
            offered = ", ".join(self._ort.get_available_providers())
            raise UserError(
                f"benchmarker 'onnxruntime': {wanted} does not work here ({why}); it needs an NVIDIA GPU, its driver, "
                f"and the CUDA libraries{' and TensorRT' if self._provider == 'tensorrt' else ''} that ONNX Runtime "
                f"{self._ort.__version__} was built for. Compiled in: {offered}. Use provider: cpu"
            )


class _ONNXRuntimeProbe:
    """Session with inputs and outputs of timed runs in fixed memory of the device.

    Args:
        concurrency: Number of threads that may run the session at a time (ONNX Runtime docs, "Thread management").
    """

    def __init__(self, session: Any, ort: Any, device: str, concurrency: int) -> None:
        self._session = session
        self._errors = session_errors(ort)
        self.concurrency = concurrency
        if not all(isinstance(size, int) for v in session.get_inputs() for size in v.shape):
            return  # an engine with dynamic axes, which is not timed
        arrays = make_fixed_inputs({v.name: (parse_dtype(v), tuple(v.shape)) for v in session.get_inputs()})
        self._inputs = {name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in arrays.items()}
        self._binding = session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for value in session.get_outputs():
            self._binding.bind_output(value.name, device)

    def sample(self, n: int) -> Sequence[float]:
        """Time n synchronous runs; on a GPU a run ends when the GPU has finished."""
        with translate_errors(MeasureFailed, "ONNX Runtime", self._errors):
            return time_calls(partial(self._session.run_with_iobinding, self._binding), n)

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name; floating-point ones as float32."""
        with translate_errors(MeasureFailed, "ONNX Runtime", self._errors):
            return run_session(self._session, feeds)

    def concurrently(self, count: int) -> AbstractContextManager[Infer]:
        return nullcontext(self.infer)


def _import_onnxruntime() -> Any:
    """Import ONNX Runtime without its telemetry.

    Raises:
        UserError: It is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f"benchmarker 'onnxruntime': {error}; {install_hint('cpu')}, or with ModelOpt {install_hint('modelopt')}"
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime
