"""Import of TensorRT 10.x or 11.x, collection of its messages, and its timing cache.

Differences between the major versions are decided by the version number. A test such as `hasattr(BuilderFlag, "FP16")`
would silently build FP32 instead of FP16 on 11.

The timing cache stores which kernel was the fastest for a layer, so its policy is a factor of an experiment. With
`cold` every build times its kernels again, so builds of one model differ by the noise of these timings; with `shared`
later builds use the kernels of earlier ones; `frozen` reads the cache and never writes it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed, MeasureFailed, UserError, install_hint
from harness.base.paths import replacing
from harness.plugins.api import Layer
from harness.runtimes.cuda import CudaRuntime, Device
from harness.runtimes.tensorrt.options import CachePolicy, ParsedSource, TensorRTParameters, has_qdq

MIN_VERSION = (10, 9)
MAX_LOG_LINES = 200
_INSTALL_HINT = f"{install_hint('tensorrt')} (TensorRT >= 10.9 and cuda-python; needs an NVIDIA GPU and its driver)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTLibrary:
    """Imported module of TensorRT, checked for its version, with a logger that collects messages.

    Attributes:
        version: Version of TensorRT, for instance "10.16.1.11".
        log: Logger of TensorRT, which must exist as long as the objects that use it.
        messages: The last `MAX_LOG_LINES` warnings and errors, in order.
    """

    trt: Any
    version: str
    major: int
    log: Any
    messages: deque[str]

    def drain_messages(self) -> str:
        """Return the last five different warnings and errors on one line, and clear all; if none, say so."""
        lines = list(dict.fromkeys(self.messages))
        self.messages.clear()
        return " ".join(lines[-5:]) or "TensorRT gave no reason"

    def load_plugins(self, files: Sequence[Path]) -> None:
        """Register TensorRT's standard plugins and those of libraries; raise `UserError` if one does not load."""
        self.trt.init_libnvinfer_plugins(self.log, "")
        for path in files:
            self.messages.clear()
            try:
                _load_plugin_library(self.trt, path)
            except OSError:
                raise UserError(
                    f"plugins: {path.name} does not load ({self.drain_messages()}); it must be built for TensorRT "
                    f"{self.version}, and what it links to must be found: see ldd {path}"
                ) from None


def open_library(module: Callable[[], Any] | None = None) -> TensorRTLibrary:
    """Import TensorRT and create its logger.

    Args:
        module: Function that returns the module, for tests; None: it is imported.

    Raises:
        UserError: TensorRT is not installed, its libraries are missing, or it is too old.
    """
    trt = (module or _import_tensorrt)()
    version = str(trt.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise UserError(f"TensorRT names its version {version!r}, which is none; {_INSTALL_HINT}")
    if (int(found[1]), int(found[2])) < MIN_VERSION:
        raise UserError(f"TensorRT {version} is too old: {MIN_VERSION[0]}.{MIN_VERSION[1]} or later; {_INSTALL_HINT}")
    messages: deque[str] = deque(maxlen=MAX_LOG_LINES)
    kept = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING)

    class Listener(trt.ILogger):  # type: ignore[misc, name-defined]
        """Logger that collects warnings and errors instead of printing them."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in kept:
                messages.append(" ".join(str(text).split()))

    return TensorRTLibrary(trt=trt, version=version, major=int(found[1]), log=Listener(), messages=messages)


@functools.cache
def _load_plugin_library(trt: Any, path: Path) -> Any:
    """Load a library of plugins once per process, because TensorRT's registry refuses plugins that it has.

    Raises:
        OSError: The library does not load.
    """
    handle = trt.get_plugin_registry().load_library(str(path))
    if handle is None:
        raise OSError(path)
    return handle


def _import_tensorrt() -> Any:
    try:
        import tensorrt
    except ModuleNotFoundError as error:
        raise UserError(f"TensorRT is not installed ({error}); {_INSTALL_HINT}") from error
    except (ImportError, OSError) as error:  # the module exists, but a library that it needs is missing
        raise UserError(
            f"TensorRT's libraries are missing ({error}); {_INSTALL_HINT}, or put its lib folder into LD_LIBRARY_PATH"
        ) from error
    return tensorrt


MAX_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class TimingCache:
    """Timing cache with its policy. "cold": not used; "shared": read and extended; "frozen": only read.

    Attributes:
        path: File of the cache; not read if the policy is cold.
    """

    policy: CachePolicy
    path: Path

    def enter(self, library: TensorRTLibrary, config: Any) -> None:
        """Load the timing cache, an empty one if it is cold or missing, into the configuration of a build.

        Raises:
            UserError: The file cannot be read, is too large, damaged, or of another TensorRT or GPU; or the policy is
                frozen and it is missing.
            BuildFailed: TensorRT makes no empty cache.
        """
        content = b"" if self.policy == "cold" else self._read()
        library.messages.clear()
        cache = config.create_timing_cache(content)
        if cache is None or not config.set_timing_cache(cache, False):
            if not content:
                raise BuildFailed(f"TensorRT makes no empty timing cache: {library.drain_messages()}")
            raise UserError(
                f"timing cache {self.path}: damaged, or made by another TensorRT or on another GPU "
                f"({library.drain_messages()}); delete it, or name another file"
            )

    def leave(self, config: Any) -> None:
        """Add the timings of a build to a shared cache atomically, merged with those of other processes.

        Raises:
            UserError: The file cannot be written.
        """
        if self.policy != "shared":
            return
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self._read()
            others = config.create_timing_cache(content) if content else None
            if others is not None:  # a file that was damaged meanwhile is replaced
                cache.combine(others, False)  # False: of another TensorRT or GPU, it is refused
            with replacing(self.path) as part:
                part.write_bytes(bytes(cache.serialize()))
        except OSError as error:
            raise UserError(f"timing cache {self.path}: cannot be written ({error.strerror or error})") from error

    def _read(self) -> bytes:
        try:
            if self.path.stat().st_size > MAX_CACHE_BYTES:
                raise UserError(f"timing cache {self.path}: more than 1 GiB; that is no timing cache")
            return self.path.read_bytes()
        except FileNotFoundError as error:
            if self.policy == "frozen":
                raise UserError(
                    f"timing cache {self.path}: no such file, and a frozen cache is never made; "
                    "run with timing_cache: shared once"
                ) from error
            return b""
        except OSError as error:
            raise UserError(f"timing cache {self.path}: cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTHandle:
    """Resources that need TensorRT and a GPU, created on first use."""

    library: TensorRTLibrary
    cuda: CudaRuntime
    device: Device
    cache: TimingCache


TIMING_RUNS_PER_TACTIC = 8
"""Runs of each kernel that TensorRT averages when it chooses; trtexec's default, the API's is 1."""


def build_plan(
    library: TensorRTLibrary, source: ParsedSource, options: TensorRTParameters, cache: TimingCache
) -> tuple[bytes, dict[str, Any]]:
    """Build an engine, and return it serialized, with size, digest and options of the build as JSON values.

    Args:
        library: TensorRT.
        source: Model file, with external data next to it, and its profiles.
        options: Options of the build.
        cache: Timing cache, which the build reads and updates according to its policy.

    Raises:
        BuildFailed: TensorRT refuses the model or finds no engine; the message has TensorRT's text and the nodes.
        UserError: The timing cache cannot be used.
    """
    trt = library.trt
    library.messages.clear()
    builder = _create_or_explain(library, trt.Builder)
    # The numbers of flags come from the enum, because they differ between versions.
    strong = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strong if options.typing == "strong" else 0)
    parser = trt.OnnxParser(network, library.log)  # owns the weights: it lives until the engine is built
    if not parser.parse_from_file(str(source.path)):
        problems = []
        for index in range(parser.num_errors):
            error = parser.get_error(index)
            name, operator = error.node_name(), error.node_operator()
            where = f"node {name!r} ({operator}): " if name or operator else ""
            problems.append(f"{where}{' '.join(error.desc().split())}")
        raise BuildFailed(f"TensorRT cannot parse the model: {'; '.join(problems) or library.drain_messages()}")
    config = builder.create_builder_config()
    _configure_builder(library, config, options, has_qdq(source.structure))
    if source.profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in source.profiles.items():
            profile.set_shape(name, shapes.min, shapes.opt, shapes.max)
        if config.add_optimization_profile(profile) < 0:
            raise BuildFailed(f"TensorRT refuses the profile: {library.drain_messages()}")
    cache.enter(library, config)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise BuildFailed(f"TensorRT builds no engine: {library.drain_messages()}")
    content = bytes(built)
    cache.leave(config)
    info = {
        "plan_bytes": len(content),
        "plan_sha256": hashlib.sha256(content).hexdigest(),
        "precision": options.float_precision,
        "typing": options.typing,
        "timing_cache": cache.policy,
    }
    return content, info


def load_engine(library: TensorRTLibrary, content: bytes, source: str) -> Any:
    """Return TensorRT's engine object for a serialized engine; `source` is its name in messages.

    Raises:
        BuildFailed: The content is no engine, one of another TensorRT or GPU, or needs too much memory.
    """
    library.messages.clear()
    runtime = _create_or_explain(library, library.trt.Runtime)
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BuildFailed(
            f"{source}: TensorRT {library.version} cannot load this engine ({library.drain_messages()}); an engine "
            "runs only with the TensorRT version and the kind of GPU that built it: build it again here"
        )
    return engine


def _create_or_explain(library: TensorRTLibrary, make: Callable[[Any], Any]) -> Any:
    """Create a builder or a runtime, and raise with TensorRT's messages if it fails.

    Raises:
        BuildFailed: TensorRT returns none, usually for lack of GPU memory; its bindings then raise a `TypeError`.
    """
    try:
        return make(library.log)
    except TypeError as error:
        raise BuildFailed(f"TensorRT cannot start on this GPU: {library.drain_messages()}") from error


def _configure_builder(library: TensorRTLibrary, config: Any, options: TensorRTParameters, quantized: bool) -> None:
    trt = library.trt
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    config.avg_timing_iterations = TIMING_RUNS_PER_TACTIC
    verbosity = trt.ProfilingVerbosity
    config.profiling_verbosity = verbosity.DETAILED if options.profile else verbosity.LAYER_NAMES_ONLY
    if options.float_precision != "tf32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    if options.typing == "weak":
        for flag in weak_typing_flags(options.float_precision, quantized=quantized):
            config.set_flag(getattr(trt.BuilderFlag, flag))


def weak_typing_flags(precision: str, *, quantized: bool) -> Iterator[str]:
    """Yield the builder flags of the precisions that a weakly typed network of 10.x may use besides FP32."""
    if precision in ("f16", "bf16"):
        yield {"f16": "FP16", "bf16": "BF16"}[precision]
    if quantized:
        yield "INT8"


DATATYPE_KEYS = ("Datatype", "DataType", "Format/Datatype", "Format")
"""Places of the type of a tensor, by preference."""
PRECISION_PATTERNS: tuple[tuple[str, str], ...] = (
    ("fp8|float8|e4m3", "fp8"), ("fp4|float4", "fp4"), ("uint8", "uint8"), ("int8", "int8"), ("int4", "int4"),
    ("bf16|bfloat16", "bf16"), ("fp16|half|float16", "f16"), ("fp32|float32|float", "f32"),
    ("int64", "int64"), ("int32", "int32"), ("bool", "bool"),
)  # fmt: skip
"""Words for types in both spellings, the longer before those that they contain."""
_ORIGIN = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


def read_layers(text: str, times_ms: Mapping[str, float]) -> tuple[Layer, ...]:
    """Return the layers of an engine.

    The precision of a layer is that of its first input, because the key "Precision" has the requested precision
    (TensorRT developer guide, engine inspector).

    Args:
        text: JSON text of `get_engine_information`, or of trtexec's --exportLayerInfo.
        times_ms: Mean time in ms by layer name, from a profiling run.

    Raises:
        MeasureFailed: The text is no such JSON.
    """
    try:
        listed = json.loads(text)["Layers"]
        return tuple(_parse_layer(entry, times_ms) for entry in listed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeasureFailed(f"the engine inspector's answer cannot be read ({error!r}): {text[:80]}") from error


def _parse_layer(entry: Any, times_ms: Mapping[str, float]) -> Layer:
    if isinstance(entry, str):  # built without detailed verbosity
        return Layer(name=entry, kind="", precision="", time_ms=times_ms.get(entry))
    name = str(entry["Name"])
    types = []
    for tensor in (*entry.get("Inputs", ()), *entry.get("Outputs", ())):
        texts = [str(tensor.get(key, "")).lower() for key in DATATYPE_KEYS] if isinstance(tensor, Mapping) else []
        types += [word for text in texts for pattern, word in PRECISION_PATTERNS if re.search(pattern, text)][:1]
    return Layer(
        name=name,
        kind=str(entry.get("ParameterType") or entry.get("LayerType", "")),
        precision=types[0] if types else "",
        time_ms=times_ms.get(name),
        origin=tuple(_ORIGIN.findall(str(entry.get("Metadata", "")))),
        kernel=str(entry.get("TacticName", "")),
    )
