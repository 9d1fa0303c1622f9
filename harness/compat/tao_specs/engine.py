"""`qdq gen-trt-engine`: the section `gen_trt_engine` of a spec file, on TensorRT or on another runtime."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.compat.tao_specs.engine_file import TENSORRT, EngineFacts, engine_path, save_engine
from harness.compat.tao_specs.model_file import open_onnx_file, static_shapes, static_types
from harness.compat.tao_specs.spec import DatasetSection, EngineSection, TensorRTOptions
from harness.config.sections import PluginSpec
from harness.errors import CandidateError, UserError
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.signature import ModelSignature, with_static_inputs
from harness.random_inputs import InputTypes

__all__ = ["build_engine"]

logger = logging.getLogger(__name__)

BATCH_SIZE_KEYS = frozenset({"min_batch_size", "opt_batch_size", "max_batch_size"})
TENSORRT_PRECISIONS: Mapping[str, str] = {"FP16": "f16", "BF16": "bf16", "TF32": "tf32", "FP32": "f32"}


def build_engine(section: EngineSection, dataset: DatasetSection, base: Path, backend: PluginSpec) -> EngineFacts:
    """Build an engine and write it, and what must be known to run it beside it.

    A model with Q/DQ pairs is built strongly typed, whatever is said: its types are then the engine's, and FP16 is put
    into the ONNX file first (TensorRT 11 has no other way; the benchmarker `tensorrt` does it).

    Args:
        section: Section `gen_trt_engine`.
        dataset: Section `dataset`, for static shapes.
        base: Folder that relative paths start from.
        backend: The runtime, with parameters beyond those of the section.

    Raises:
        UserError: Anything in it that cannot be used; no TensorRT or no GPU, with what is missing.
    """
    path, declared = open_onnx_file(section.onnx_file, base, "gen_trt_engine.onnx_file")
    options, target = section.tensorrt, engine_path(base / section.trt_engine, backend.use)
    _log_precisions(declared, section, backend)
    if backend.use == TENSORRT:
        return _build_with_tensorrt(section, (path, target), declared, dataset, backend.params)
    shapes = _shapes_at_batch(declared, options, dataset, options.opt_batch_size)
    dynamic = any(None in dims for _, dims in declared.inputs.values())
    if dynamic:
        logger.warning(
            "backend %s: engines here have one batch size; opt_batch_size, %d, is taken",
            backend.use,
            options.opt_batch_size,
        )
    if options.data_type != "FP32":
        logger.warning(
            "backend %s: data_type %s is TensorRT's; floats run as its own parameters say",
            backend.use,
            options.data_type,
        )
    facts = _make_facts((path, target), declared, backend, static_types(declared, shapes))
    with tempfile.TemporaryDirectory(prefix="qdq-engine-") as scratch:
        model = with_static_inputs(path, InputSizes(shapes=shapes), Path(scratch) / "model.onnx") if dynamic else path
        return save_engine(model, target, facts)


def _build_with_tensorrt(
    section: EngineSection,
    paths: tuple[Path, Path],
    declared: ModelSignature,
    dataset: DatasetSection,
    extra: Mapping[str, Any],
) -> EngineFacts:
    path, target = paths
    options = section.tensorrt
    params: dict[str, Any] = {
        "precision": TENSORRT_PRECISIONS[options.data_type],
        "workspace_gb": options.workspace_size * 2**20 / 1e9,
        "profiles": _optimization_profiles(declared, options, dataset),
        **extra,
    }
    types = static_types(declared, _shapes_at_batch(declared, options, dataset, options.opt_batch_size))
    try:
        return save_engine(path, target, _make_facts(paths, declared, PluginSpec(use=TENSORRT, params=params), types))
    except UserError as error:
        if isinstance(error.__cause__, CandidateError):  # TensorRT is here, and refuses the model
            raise
        raise UserError(f"{error}; or build without TensorRT: --backend openvino or --backend onnxruntime") from error


def _optimization_profiles(
    declared: ModelSignature, options: TensorRTOptions, dataset: DatasetSection
) -> dict[str, dict[str, str]]:
    """Smallest, usual and largest shape of each dynamic input."""
    sizes = {"min": options.min_batch_size, "opt": options.opt_batch_size, "max": options.max_batch_size}
    dynamic = [name for name, (_, dims) in declared.inputs.items() if None in dims]
    if not dynamic:
        if options.max_batch_size > 1:
            logger.warning("tensorrt.max_batch_size: the model's batch is fixed, so the sizes given are left aside")
        return {}
    shapes = {key: _shapes_at_batch(declared, options, dataset, size) for key, size in sizes.items()}
    return {name: {key: "x".join(map(str, shapes[key][name])) for key in sizes} for name in dynamic}


def _shapes_at_batch(
    declared: ModelSignature, options: TensorRTOptions, dataset: DatasetSection, batch: int
) -> dict[str, tuple[int, ...]]:
    """Static shapes for a batch size; where sizes are given, they count more than the first number of a shape does."""
    found = static_shapes(declared, batch, dataset.shapes, dims=dataset.dims)
    if not BATCH_SIZE_KEYS & options.model_fields_set:
        return found
    dynamic = {name for name, (_, dims) in declared.inputs.items() if dims and dims[0] is None}
    return {name: (batch, *shape[1:]) if name in dynamic else shape for name, shape in found.items()}


def _log_precisions(declared: ModelSignature, section: EngineSection, backend: PluginSpec) -> None:
    found = declared.precisions
    if found:
        logger.info("%s: Q/DQ pairs found (%s): strongly typed", section.onnx_file, ", ".join(sorted(found)))
    if "fp8e5m2" in found and backend.use == TENSORRT:
        logger.warning("%s: TensorRT takes FP8 as E4M3 alone; this file has E5M2", section.onnx_file)


def _make_facts(
    paths: tuple[Path, Path], declared: ModelSignature, backend: PluginSpec, types: InputTypes
) -> EngineFacts:
    path, target = paths
    return EngineFacts(
        backend=backend.use,
        params=dict(backend.params),
        inputs={name: (kind, tuple(shape)) for name, (kind, shape) in types.items()},
        onnx_file=os.path.relpath(path, target.resolve().parent),
        precisions=tuple(sorted(declared.precisions)),
        describe={},
        outputs=dict(declared.outputs),
    )
