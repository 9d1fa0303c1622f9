"""Latency on OpenVINO's CPU plug-in, which has INT8 kernels for x86 and Arm."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from harness.base.errors import BuildFailed, MeasureFailed, UserError, install_hint
from harness.config.sections import PluginSpec, normalize_float_precision
from harness.measure.provenance import count_cores, machine_lacks_vnni, machine_processor_label, validate_threads
from harness.measure.sampling import make_fixed_inputs
from harness.plugins.api import Array, Artifact, Candidate, Capabilities, Infer, Layer
from harness.runtimes.host_clock import one_line_error, require_static_shapes, time_calls, to_float32, translate_errors

logger = logging.getLogger(__name__)
Precision = Annotated[Literal["auto", "f32", "bf16"], BeforeValidator(normalize_float_precision)]
REPRODUCTION_SCRIPT = """import openvino as ov
core = ov.Core()
compiled = core.compile_model(core.read_model("{file}"), "CPU", {{"INFERENCE_PRECISION_HINT": "{precision}"}})
found = dict(zip(names, compiled(feeds).to_tuple()))"""
NON_LAYER_TYPES = ("Const", "Input", "Output")
COMPILE_ERRORS = (RuntimeError,)
FEED_ERRORS = (RuntimeError, TypeError, ValueError, KeyError)


def engine_properties(threads: int, precision: str, streams: int = 1) -> dict[str, Any]:
    """Return OpenVINO's properties, by name, with which a model is compiled for timing.

    Args:
        threads: Number of inference threads of all streams together.
        precision: Precision of float operations, "f32" or "bf16".
        streams: Number of inferences at the same time: 1 for latency, more for throughput.
    """
    return {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": True,
    }


def float_execution(threads: int = 1) -> PluginSpec:
    """Return the backend that computes a file in float as the file describes it, also an OpenVINO IR."""
    return PluginSpec(use="openvino", params={"integer_kernels": False, "precision": "f32", "threads": threads})


class OpenVINOBenchmarker:
    """Benchmarker of OpenVINO on the CPU: latency with one stream, or throughput of several streams.

    Args:
        threads: Number of inference threads of all streams together, at most the cores that this process may use.
        precision: Precision of float operations (OpenVINO's `INFERENCE_PRECISION_HINT`). "auto" is FP32, unless the CPU
            reports BF16: then the harness times both and uses the faster one.
        profile: Record the time of every layer, for `layers`. This takes time, so do not compare such engines.
        reduce_range: Store weights in 7 bits (dialect `openvino_7bit`); None: only on a processor that adds products in
            16 bits, where 8 bits saturate.
        integer_kernels: Whether quantized operators run in integers; if False, they are computed in float as the file
            describes them, for a reference.
        streams: Number of asynchronous requests; above 1, a reading is the time per inference while all of them run,
            which is the inverse of the throughput.

    Raises:
        UserError: OpenVINO is not installed.
        ValueError: There are more threads than cores or more streams than threads, or the CPU lacks the precision.
    """

    # CPUs have no FP8 kernels: OpenVINO converts to float and back, so scores are true and latencies are not.
    capabilities = Capabilities(
        emulated=frozenset({"fp8", "fp8e5m2"}), dynamic=True, tensors_only=True, script=REPRODUCTION_SCRIPT
    )

    def __init__(
        self,
        threads: int = 1,
        precision: Precision = "auto",
        profile: bool = False,
        reduce_range: bool | None = None,
        integer_kernels: bool = True,
        streams: int = 1,
    ) -> None:
        precision = normalize_float_precision(precision)
        self._threads = validate_threads(threads)
        if not 1 <= streams <= threads:
            raise ValueError(f"streams: 1 to {threads} (threads, each of which serves one stream), but got {streams!r}")
        self._streams = streams
        self._ov = _import_openvino()
        self._core = self._ov.Core()
        offered = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if precision == "bf16" and "BF16" not in offered:
            raise ValueError(f"precision: this CPU offers {', '.join(offered)}, but got 'bf16'; use 'f32' or 'auto'")
        self._open = precision == "auto"
        self._float = "f32" if self._open else precision
        self._offered = ("f32", "bf16") if "BF16" in offered else ("f32",)
        self._profile = profile
        self._integer_kernels = integer_kernels
        self._reduced = machine_lacks_vnni() if reduce_range is None else reduce_range
        self._dialect = "openvino_7bit" if self._reduced else "openvino"
        self.capabilities = replace(self.capabilities, dialect=self._dialect)

    @property
    def _options(self) -> dict[str, Any]:
        described = {} if self._integer_kernels else {"LP_TRANSFORMS_MODE": False}
        return {
            **engine_properties(self._threads, self._float, self._streams),
            "PERF_COUNT": self._profile,
            **described,
        }

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        """Compile the candidate's file.

        Raises:
            BuildFailed: OpenVINO refuses the model, or an input's shape is not static.
        """
        path = candidate.source()
        with translate_errors(BuildFailed, f"OpenVINO refuses {path.name}", COMPILE_ERRORS):
            # External weights would stay mapped in the engine, and rewriting their file would end it (SIGBUS).
            model = self._core.read_model(path, config={"ENABLE_MMAP": False})
            compiled = self._core.compile_model(model, "CPU", self._options)
        if not candidate.dynamic:
            require_static_shapes(
                path.name, {port.any_name: _dimension_sizes(port.partial_shape) for port in compiled.inputs}
            )
        counts = Counter(layer.precision for layer in _read_executed_layers(compiled))
        return Artifact(engine=compiled, info={"layers": dict(sorted(counts.items()))})

    def save(self, candidate: Candidate, path: Path) -> None:
        """Write the candidate's engine to a file for `load` (OpenVINO docs, "Model caching").

        Raises:
            BuildFailed: OpenVINO refuses the model.
        """
        artifact = self.build(candidate, path.parent)
        exported = io.BytesIO()
        artifact.engine.export_model(exported)
        path.write_bytes(exported.getbuffer())

    def load(self, path: Path) -> Artifact:
        """Load an engine that `save` wrote, for this version of OpenVINO and this kind of processor only.

        Raises:
            BuildFailed: OpenVINO refuses it.
        """
        with translate_errors(BuildFailed, f"OpenVINO cannot load {path.name}", COMPILE_ERRORS):
            return Artifact(engine=self._core.import_model(path.read_bytes(), "CPU", self._options))

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[_OpenVINOProbe]:
        """Open a probe with inputs in fixed memory.

        Raises:
            MeasureFailed: An input has a type without random values.
        """

        def copy_with_streams(streams: int) -> Any:
            exported = io.BytesIO()
            artifact.engine.export_model(exported)
            options = {**self._options, **engine_properties(self._threads * streams, self._float, streams)}
            return self._core.import_model(exported.getvalue(), "CPU", options)

        concurrency = count_cores() // self._threads if self._streams == 1 else 1
        yield _OpenVINOProbe(artifact.engine, self._ov, self._streams, concurrency, copy_with_streams)

    def layers(self, artifact: Artifact) -> tuple[Layer, ...]:
        """Return the layers of an engine in order of execution, from the plug-in's execution graph.

        With `profile` each layer has its mean time over the inferences so far; sample the engine first.
        """
        return _read_executed_layers(artifact.engine)

    def describe(self) -> Mapping[str, Any]:
        profiled: dict[str, Any] = {"profile": True} if self._profile else {}
        if self._streams > 1:
            profiled["streams"] = self._streams
        if not self._integer_kernels:
            profiled["integer_kernels"] = False
        return {
            "name": "openvino",
            "version": self._ov.__version__,
            "device": machine_processor_label(self._core.get_property("CPU", "FULL_DEVICE_NAME")),
            "options": {"threads": self._threads, "precision": self._float, **profiled},
            "float_precision": self._float,
            "float_open": self._open,
            "float_params": {precision: {"precision": precision} for precision in self._offered},
            **({"dialect": self._dialect} if self._reduced else {}),
        }


class _OpenVINOProbe:
    """Compiled model with separate requests for timing and evaluation.

    Args:
        compiled: Compiled model.
        ov: Module `openvino`.
        streams: Number of streams of the model.
        concurrency: Number of inferences that may run at the same time without sharing cores.
        copy: Function that returns a copy of the engine with several streams, each with the threads of the engine.
    """

    def __init__(self, compiled: Any, ov: Any, streams: int, concurrency: int, copy: Callable[[int], Any]) -> None:
        self._compiled = compiled
        self.concurrency = concurrency
        self._copy = copy
        self._streams = streams
        self._ends_ns: list[int] = []
        self._queue: Any = [compiled.create_infer_request()]
        if streams > 1:
            self._queue = ov.AsyncInferQueue(compiled, streams)
            self._queue.set_callback(lambda *_: self._ends_ns.append(time.perf_counter_ns()))
        self._scored: Any = None
        if any(port.partial_shape.is_dynamic for port in compiled.inputs):
            return  # an engine with dynamic axes, which is not timed
        types = {}
        for port in compiled.inputs:
            element = port.get_element_type()
            if element.get_type_name() in ("string", "dynamic"):
                raise MeasureFailed(
                    f"input {port.any_name!r}: no fixed input can be made for type {element.get_type_name()}"
                )
            types[port.any_name] = (np.dtype(element.to_dtype()), tuple(int(size) for size in port.shape))
        self._inputs = make_fixed_inputs(types)
        for request in self._queue:
            for port in compiled.inputs:
                request.set_tensor(port, ov.Tensor(self._inputs[port.any_name], shared_memory=True))

    def sample(self, n: int) -> Sequence[float]:
        """Time n inferences without copies of inputs and outputs; with several streams, return times per inference."""
        with translate_errors(MeasureFailed, "OpenVINO", COMPILE_ERRORS):
            if self._streams == 1:
                return time_calls(partial(self._queue[0].infer, share_outputs=True), n)
            # Each reading is over as many inferences as there are streams. Further requests before the first and after
            # the last reading keep all streams busy.
            self._ends_ns.clear()
            for _ in range((n + 3) * self._streams):
                self._queue.start_async()
            self._queue.wait_all()
        ends_ns = np.sort(self._ends_ns)[self._streams :: self._streams][: n + 1]
        readings: list[float] = (np.diff(ends_ns) / 1e6 / self._streams).tolist()
        return readings

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by their names in the model, floating-point ones as float32."""
        if self._scored is None:
            self._scored = self._compiled.create_infer_request()
        return self._run(self._scored, feeds)

    @contextmanager
    def concurrently(self, count: int) -> Iterator[Infer]:
        """Yield an inference function for several threads, which uses a copy of the engine with more streams.

        OpenVINO cannot copy an engine that was read from a file; its inferences run one after the other.
        """
        try:
            engine = self._copy(count)
        except COMPILE_ERRORS as error:
            logger.info("images are scored one after the other: the engine cannot be copied: %s", one_line_error(error))
            engine, count = self._compiled, 1
        requests: SimpleQueue[Any] = SimpleQueue()
        for _ in range(count):
            requests.put(engine.create_infer_request())

        def infer(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
            request = requests.get()
            try:
                return self._run(request, feeds)
            finally:
                requests.put(request)

        yield infer

    def _run(self, request: Any, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a request of the engine or of its copy, and return the outputs by name."""
        with translate_errors(MeasureFailed, "OpenVINO", FEED_ERRORS):
            results = request.infer(dict(feeds)).values()
        named = zip(self._compiled.outputs, results, strict=True)
        return {name: to_float32(array) for port, array in named for name in _output_names(port)}


def _output_names(port: Any) -> list[str]:
    """Return the names of an output, without those of tensors before a no-op Cast, which OpenVINO merged into it."""
    own = str(port.node.get_friendly_name()).rpartition("/")[0]
    return [own] if own in port.names else sorted(port.names)


def _import_openvino() -> Any:
    """Import OpenVINO without its telemetry.

    Its import reports to a server and writes to the home folder, unless `openvino_telemetry` cannot be imported; then
    OpenVINO uses a stub (openvino/tools/ovc/telemetry_utils.py).

    Raises:
        UserError: It is not installed.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise UserError(f"benchmarker 'openvino': {error}; {install_hint('cpu')}") from error
    return openvino


def _dimension_sizes(shape: Any) -> list[object]:
    """Return the sizes of a shape, dynamic ones as text; a dynamic rank gives one dynamic size."""
    if shape.rank.is_dynamic:
        return ["..."]
    return [str(size) if size.is_dynamic else size.get_length() for size in shape]


def _read_executed_layers(compiled: Any) -> tuple[Layer, ...]:
    """Return the layers of the execution graph (OpenVINO docs, "Query device properties", runtime information).

    Nodes that depend only on constants, such as conversions of weights, run once and have no time.
    """
    ordered = compiled.get_runtime_model().get_ordered_ops()
    once: set[str] = set()  # nodes that no input of the model reaches
    layers = []
    for op in ordered:
        rt_info, name = op.get_rt_info(), op.get_friendly_name()
        info = {key: _read_text(rt_info[key]) for key in rt_info}
        sources = {value.get_node().get_friendly_name() for value in op.input_values()}
        if info["layerType"].startswith("Const") or (sources and sources <= once):
            once.add(name)
        if info["layerType"] in NON_LAYER_TYPES:
            continue
        time_us = info.get("execTimeMcs", "")
        layers.append(
            Layer(
                name=name,
                kind=info["layerType"],
                precision=info["runtimePrecision"],
                time_ms=int(time_us) / 1000 if time_us.isdigit() and name not in once else None,
                origin=tuple(filter(None, info.get("originalLayersNames", "").split(","))),
                kernel=info.get("primitiveType", ""),
            )
        )
    return tuple(layers)


def _read_text(value: Any) -> str:
    return str(value.astype(str) if hasattr(value, "astype") else value)
