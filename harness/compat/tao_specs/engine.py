"""`qdq gen-trt-engine`: build, save and load engines; a JSON file next to each holds the facts needed to run it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.base.errors import CandidateError, UserError
from harness.base.files import file_sha256, parse_json, read_bounded
from harness.base.random_inputs import InputTypes
from harness.base.text import safe_file_name
from harness.compat.tao_specs.dataset import (
    name_write_errors,
    open_onnx_file,
    shapes_of,
    static_inputs,
    write_static_copy,
)
from harness.compat.tao_specs.spec import DatasetSection, EngineSection, TensorRTOptions
from harness.config.sections import PluginSpec
from harness.graph.load import Dims, ModelSignature
from harness.plugins import registry
from harness.plugins.api import Artifact, Benchmarker, Candidate, SupportsSave
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
TENSORRT = "tensorrt"
TENSORRT_SUFFIXES = (".trt", ".engine", ".plan")
TENSORRT_PRECISIONS: Mapping[str, str] = {"FP16": "f16", "BF16": "bf16", "TF32": "tf32", "FP32": "f32"}
BATCH_SIZE_KEYS = frozenset({"min_batch_size", "opt_batch_size", "max_batch_size"})


class TensorRTMissing(UserError):
    """TensorRT or a GPU is missing on this machine.

    Attributes:
        model: The ONNX file that could not be built.
        shapes: Shape of each input at the optimum batch, for instance "1x3x224x224".
    """

    def __init__(self, message: str, model: Path, shapes: Mapping[str, str]) -> None:
        super().__init__(message)
        self.model, self.shapes = model, shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Content of `ENGINE.json`.

    Attributes:
        backend: Name of the benchmarker that reads the engine.
        params: Parameters of the benchmarker.
        onnx_file: Source model, relative to the folder of the engine.
        precisions: Precisions of its Q/DQ pairs.
        inputs: Element type and shape of each input.
        describe: Facts about the runtime and its device.
        outputs: Shape of each output of the source model.
    """

    backend: str
    params: dict[str, Any]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    onnx_file: str
    precisions: tuple[str, ...]
    describe: dict[str, Any]
    outputs: dict[str, Dims] = field(default_factory=dict)
    sha256: str = ""

    @classmethod
    def of(cls, declared: ModelSignature, backend: PluginSpec, types: InputTypes, onnx_file: str) -> EngineFacts:
        """Return the facts of a model that is not built yet; they lack `describe` and `sha256`."""
        return cls(
            backend=backend.use, params=dict(backend.params), inputs=dict(types), onnx_file=onnx_file,
            precisions=tuple(sorted(declared.precisions)), describe={}, outputs=dict(declared.outputs),
        )  # fmt: skip


def build_engine(section: EngineSection, dataset: DatasetSection, base: Path, backend: PluginSpec) -> EngineFacts:
    """Build an engine and write it with its facts.

    A model with Q/DQ pairs is always built strongly typed, with the types of the ONNX file, into which FP16 is written
    first (TensorRT 11 has no other way; the benchmarker `tensorrt` does it).

    Args:
        section: Section `gen_trt_engine`.
        dataset: Section `dataset`, for static shapes.
        base: Folder that relative paths start from.
        backend: The runtime, with parameters beyond those of the section.
    """
    path, declared = open_onnx_file(section.onnx_file, base, "gen_trt_engine.onnx_file")
    options, target = section.tensorrt, engine_path(base / section.trt_engine, backend.use)
    types = _types_at_batch(declared, options, dataset, options.opt_batch_size)
    facts = EngineFacts.of(declared, backend, types, os.path.relpath(path, target.resolve().parent))
    precisions = facts.precisions
    if precisions:
        logger.info("%s: Q/DQ pairs found (%s): strongly typed", section.onnx_file, ", ".join(precisions))
    if "fp8e5m2" in precisions and backend.use == TENSORRT:
        logger.warning("%s: TensorRT takes FP8 only as E4M3; this file has E5M2", section.onnx_file)
    if backend.use != TENSORRT:
        if any(None in dims for _, dims in declared.inputs.values()):
            logger.warning(
                "backend %s: its engines have one batch size; opt_batch_size, %d, is used",
                backend.use, options.opt_batch_size,
            )  # fmt: skip
        if options.data_type != "FP32":
            logger.warning(
                "backend %s: data_type %s is only for TensorRT; set the float precision by --param",
                backend.use, options.data_type,
            )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="qdq-engine-") as scratch:
            return save_engine(write_static_copy(path, declared, types, Path(scratch) / "model.onnx"), target, facts)
    sizes = {"min": options.min_batch_size, "opt": options.opt_batch_size, "max": options.max_batch_size}
    dynamic = [name for name, (_, dims) in declared.inputs.items() if None in dims]
    if not dynamic and options.max_batch_size > 1:
        logger.warning("tensorrt.max_batch_size: ignored, because the batch of the model is fixed")
    ranges = {key: shapes_of(_types_at_batch(declared, options, dataset, size)) for key, size in sizes.items()}
    params = {
        "precision": TENSORRT_PRECISIONS[options.data_type],
        "workspace_gb": options.workspace_size * 2**20 / 1e9,
        "profiles": {name: {key: "x".join(map(str, ranges[key][name])) for key in sizes} for name in dynamic},
        **backend.params,
    }
    try:
        return save_engine(path, target, replace(facts, params=params))
    except UserError as error:
        if isinstance(error.__cause__, CandidateError):  # TensorRT is installed and rejects the model
            raise
        shapes = {name: "x".join(map(str, shape)) for name, (_, shape) in types.items()}
        raise TensorRTMissing(
            f"{error}; or build without TensorRT: --backend openvino or --backend onnxruntime", path, shapes
        ) from error


def _types_at_batch(
    declared: ModelSignature, options: TensorRTOptions, dataset: DatasetSection, batch: int
) -> InputTypes:
    """Return types and shapes at a batch size, which, if given, overrides the first number of given shapes."""
    types = static_inputs(declared, dataset.shapes, dataset.dims, batch=batch)
    if not BATCH_SIZE_KEYS & options.model_fields_set:
        return types
    dynamic = {name for name, (_, dims) in declared.inputs.items() if dims and dims[0] is None}
    return {n: (kind, (batch, *shape[1:]) if n in dynamic else shape) for n, (kind, shape) in types.items()}


def engine_path(requested: Path, backend: str) -> Path:
    """Return the path of an engine: `requested`, or for another backend than TensorRT with that backend as suffix.

    Only the suffixes .trt, .engine and .plan are replaced; a path with another suffix or without one is returned as it
    is.
    """
    if backend == TENSORRT and requested.suffix not in TENSORRT_SUFFIXES:
        raise UserError(
            f"gen_trt_engine.trt_engine: a name that ends in {', '.join(TENSORRT_SUFFIXES)}, but got {requested.name}"
        )
    foreign = backend != TENSORRT and requested.suffix in TENSORRT_SUFFIXES
    return requested.with_suffix(f".{safe_file_name(backend)}") if foreign else requested


def engine_for_other_runtime(requested: Path) -> Path | None:
    """Return the engine of another runtime (see `engine_path`) if the requested one of TensorRT is missing, or None."""
    if requested.exists() or requested.suffix not in TENSORRT_SUFFIXES:
        return None
    paths = (engine_path(requested, plugin.name) for plugin in registry.installed_plugins("benchmarker"))
    existing = sorted(path for path in paths if path.is_file())
    if len(existing) > 1:
        names = ", ".join(path.name for path in existing)
        raise UserError(f"evaluate.trt_engine: there is no {requested.name}, but there are {names}: choose one")
    return existing[0] if existing else None


def save_engine(model: Path, path: Path, facts: EngineFacts) -> EngineFacts:
    """Build an engine, write it and its facts, and return the facts with digest and description of the runtime."""
    create_saver(facts.backend, facts.params, "write engines to")
    what = f"{Path(facts.onnx_file).name}: the build on {facts.backend}"
    try:
        with name_write_errors(f"trt_engine {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            describe = call_in_helper_process(what, _save, facts, model, path, factor=RUNTIME_FACTOR)
            written = replace(facts, sha256=file_sha256(path), describe=describe)
            text = json.dumps({"schema": SCHEMA_VERSION, **asdict(written)}, indent=1)
            path.with_name(f"{path.name}.json").write_text(text, encoding="utf-8")
    except CandidateError as error:
        raise UserError(f"{Path(facts.onnx_file).name}: no engine: {error}") from error
    return written


def _save(facts: EngineFacts, model: Path, path: Path) -> dict[str, Any]:
    runtime = create_saver(facts.backend, facts.params, "write engines to")
    runtime.save(Candidate(digest=model.stem, edges=(), source=lambda: model), path)
    return dict(runtime.describe())


def read_facts(path: Path) -> EngineFacts | None:
    """Return the facts in the file `NAME.json` next to the engine at `path`, or None if there is no such file."""
    file = path.with_name(f"{path.name}.json")
    if not os.path.lexists(file):
        return None
    try:
        body = parse_json(read_bounded(file))
        if body.pop("schema") != SCHEMA_VERSION:
            raise ValueError("another schema")
        facts = TypeAdapter(EngineFacts).validate_python(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{file}: damaged ({problem}); build the engine again with qdq gen-trt-engine") from error
    if facts.sha256 != file_sha256(path):
        raise UserError(f"{file}: belongs to another engine than {path.name}; build it again with qdq gen-trt-engine")
    return facts


def load_engine(path: Path, facts: EngineFacts) -> tuple[Benchmarker, Artifact]:
    """Load an engine from its file into this process."""
    runtime = create_saver(facts.backend, facts.params, "read engines from")
    try:
        return runtime, runtime.load(path)
    except CandidateError as error:
        raise UserError(
            f"{path}: {error}; an engine needs the version and the kind of device that built it: build it again"
        ) from error


def create_saver(backend: str, params: Mapping[str, Any], use: str) -> Any:
    """Return a benchmarker, or raise `UserError` if it cannot save and load engines.

    Args:
        use: Verb phrase for the message, "write engines to" or "read engines from".
    """
    benchmarker = registry.create_plugin("benchmarker", backend, params)
    if not isinstance(benchmarker, SupportsSave):
        raise UserError(f"backend {backend!r} cannot {use} a file; use openvino, onnxruntime or tensorrt")
    return benchmarker
