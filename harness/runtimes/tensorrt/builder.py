"""Build of a TensorRT engine from an ONNX file: parse, configure, build, load."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed
from harness.runtimes.tensorrt.library import TensorRTLibrary, TimingCache
from harness.runtimes.tensorrt.options import BuildOptions, ShapeProfile

TIMING_RUNS_PER_TACTIC = 8
"""Runs of each kernel that TensorRT averages when it chooses; trtexec's default, the API's is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedEngine:
    """Serialized engine (`content`), with size, digest and options of its build (`info`) as JSON values."""

    content: bytes
    info: Mapping[str, Any]


def build_plan(
    library: TensorRTLibrary, model: Path | bytes, options: BuildOptions, cache: TimingCache, *, quantized: bool
) -> SerializedEngine:
    """Build an engine.

    Args:
        library: TensorRT.
        model: Path of the model, with external data next to it, or the serialized model.
        options: Options of the build, whose profiles are those of the dynamic inputs only.
        cache: Timing cache, which the build reads and updates according to its policy.
        quantized: Whether the model has Q/DQ pairs, on which the flags of a weakly typed network depend.

    Raises:
        BuildFailed: TensorRT refuses the model or finds no engine; the message has TensorRT's text and the nodes.
        UserError: The timing cache cannot be used.
    """
    trt = library.trt
    library.messages.clear()
    builder = _create_or_explain(library, trt.Builder)
    network = builder.create_network(_network_flags(library, options))
    parser = trt.OnnxParser(network, library.log)  # owns the weights: it lives until the engine is built
    parsed = parser.parse(model) if isinstance(model, bytes) else parser.parse_from_file(str(model))
    if not parsed:
        raise BuildFailed(
            f"TensorRT cannot parse the model: {'; '.join(_format_parser_errors(parser)) or library.drain_messages()}"
        )
    config = builder.create_builder_config()
    _configure_builder(library, config, options, quantized)
    _add_profile(library, builder, config, options.profiles)
    cache.enter(library, config)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise BuildFailed(f"TensorRT builds no engine: {library.drain_messages()}")
    content = bytes(built)
    cache.leave(config)
    return SerializedEngine(
        content=content,
        info={
            "plan_bytes": len(content),
            "plan_sha256": hashlib.sha256(content).hexdigest(),
            "precision": options.precision,
            "typing": options.typing,
            "timing_cache": cache.policy,
        },
    )


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


def _network_flags(library: TensorRTLibrary, options: BuildOptions) -> int:
    """Return the network flags as bits; their numbers come from the enum, because they differ between versions."""
    flags = library.trt.NetworkDefinitionCreationFlag
    return 1 << int(flags.STRONGLY_TYPED) if options.typing == "strong" else 0


def _configure_builder(library: TensorRTLibrary, config: Any, options: BuildOptions, quantized: bool) -> None:
    trt = library.trt
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    config.avg_timing_iterations = TIMING_RUNS_PER_TACTIC
    verbosity = trt.ProfilingVerbosity
    config.profiling_verbosity = verbosity.DETAILED if options.detailed else verbosity.LAYER_NAMES_ONLY
    if options.precision != "tf32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    if options.typing == "weak":
        for flag in weak_typing_flags(options.precision, quantized=quantized):
            config.set_flag(getattr(trt.BuilderFlag, flag))


def weak_typing_flags(precision: str, *, quantized: bool) -> Iterator[str]:
    """Yield the builder flags of the precisions that a weakly typed network of 10.x may use besides FP32."""
    if precision in ("f16", "bf16"):
        yield {"f16": "FP16", "bf16": "BF16"}[precision]
    if quantized:
        yield "INT8"


def _add_profile(library: TensorRTLibrary, builder: Any, config: Any, profiles: Mapping[str, ShapeProfile]) -> None:
    if not profiles:
        return
    made = builder.create_optimization_profile()
    for name, profile in profiles.items():
        made.set_shape(name, profile.min, profile.opt, profile.max)
    if config.add_optimization_profile(made) < 0:
        raise BuildFailed(f"TensorRT refuses the profile: {library.drain_messages()}")


def _format_parser_errors(parser: Any) -> Iterator[str]:
    """Yield the parser's errors with the nodes that they concern."""
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        name, operator = error.node_name(), error.node_operator()
        where = f"node {name!r} ({operator}): " if name or operator else ""
        yield f"{where}{' '.join(error.desc().split())}"
