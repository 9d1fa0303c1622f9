"""An engine in a file, and what must be known to run it, in a small file beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Artifact, Benchmarker, Candidate, SupportsSave
from harness.errors import CandidateError, UserError
from harness.graph.signature import Dims
from harness.random_inputs import InputTypes
from harness.task_setup.model_loader import safe_file_name

__all__ = [
    "TENSORRT", "EngineFacts", "engine_for_other_runtime", "engine_path", "load_engine", "read_facts",
    "save_engine",
]  # fmt: skip

SCHEMA_VERSION = 1
TENSORRT = "tensorrt"
TENSORRT_SUFFIXES = (".trt", ".engine", ".plan")
"""Names that say that an engine is TensorRT's."""
MAX_FACTS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is written beside an engine, as `ENGINE.json`.

    Attributes:
        backend: Name of the benchmarker that reads it.
        params: Its parameters.
        inputs: Element type and shape of each input.
        onnx_file: What it was built from, from the folder of the engine.
        outputs: Shape of each output of that file.
        precisions: Of the Q/DQ pairs in it.
        describe: The runtime's own facts.
        sha256: Of the engine's file.
    """

    backend: str
    params: dict[str, Any]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    onnx_file: str
    precisions: tuple[str, ...]
    describe: dict[str, Any]
    outputs: dict[str, Dims] = field(default_factory=dict)
    sha256: str = ""

    @property
    def types(self) -> InputTypes:
        """Element type and shape of each input."""
        return self.inputs


def engine_path(asked: Path, backend: str) -> Path:
    """Where an engine goes: another runtime's is called after that, where the name asked for says it were TensorRT's.

    Raises:
        UserError: An engine of TensorRT's by a name that does not say so.
    """
    if backend == TENSORRT and asked.suffix not in TENSORRT_SUFFIXES:
        raise UserError(
            f"gen_trt_engine.trt_engine: a name that ends in {', '.join(TENSORRT_SUFFIXES)}, but got {asked.name}"
        )
    foreign = backend != TENSORRT and asked.suffix in TENSORRT_SUFFIXES
    return asked.with_suffix(f".{safe_file_name(backend)}") if foreign else asked


def engine_for_other_runtime(asked: Path) -> Path | None:
    """The engine that stands where another was asked for, see `engine_path`; None where that is there, or none is.

    Raises:
        UserError: Engines of several runtimes are.
    """
    if asked.exists() or asked.suffix not in TENSORRT_SUFFIXES:
        return None
    others = (engine_path(asked, plugin.name) for plugin in registry.installed_plugins("benchmarker"))
    found = sorted(path for path in others if path.is_file())
    if len(found) > 1:
        raise UserError(
            f"evaluate.trt_engine: there is no {asked.name}, but {', '.join(path.name for path in found)}: name one"
        )
    return found[0] if found else None


def save_engine(model: Path, path: Path, facts: EngineFacts) -> EngineFacts:
    """Build an engine, write it and its facts.

    Raises:
        UserError: The runtime is not there, refuses the model, cannot write engines, or the folder cannot be made.
    """
    runtime = _create_runtime(facts.backend, facts.params)
    if not isinstance(runtime, SupportsSave):
        raise UserError(
            f"backend {facts.backend!r} cannot write engines to a file; use openvino, onnxruntime or tensorrt"
        )
    candidate = Candidate(digest=model.stem, edges=(), source=lambda: model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        runtime.save(candidate, path)
        written = EngineFacts(**{**asdict(facts), "sha256": _sha256(path), "describe": dict(runtime.describe())})
        _facts_path(path).write_text(
            json.dumps({"schema": SCHEMA_VERSION, **asdict(written)}, indent=1), encoding="utf-8"
        )
    except CandidateError as error:
        raise UserError(f"{Path(facts.onnx_file).name}: no engine: {error}") from error
    except OSError as error:
        raise UserError(f"trt_engine {path}: cannot be written: {error.strerror or error}") from error
    return written


def read_facts(path: Path) -> EngineFacts | None:
    """What stands beside an engine; None where there is nothing.

    Raises:
        UserError: Damaged, or of another engine than the file.
    """
    beside = _facts_path(path)
    if not beside.exists():
        return None
    try:
        if beside.stat().st_size > MAX_FACTS_BYTES:
            raise ValueError("too large")
        body = json.loads(beside.read_text(encoding="utf-8"))
        if body.pop("schema") != SCHEMA_VERSION:
            raise ValueError("another schema")
        inputs = {name: (str(kind), tuple(map(int, shape))) for name, (kind, shape) in body["inputs"].items()}
        outputs = {n: tuple(None if d is None else int(d) for d in dims) for n, dims in body["outputs"].items()}
        facts = EngineFacts(**{**body, "inputs": inputs, "outputs": outputs, "precisions": tuple(body["precisions"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{beside}: damaged ({error}); build the engine again with qdq gen-trt-engine") from error
    if facts.sha256 != _sha256(path):
        raise UserError(f"{beside}: belongs to another engine than {path.name}; build it again with qdq gen-trt-engine")
    return facts


def load_engine(path: Path, facts: EngineFacts) -> tuple[Benchmarker, Artifact]:
    """Read an engine back.

    Raises:
        UserError: The runtime is not there, or refuses the file.
    """
    runtime = _create_runtime(facts.backend, facts.params)
    if not isinstance(runtime, SupportsSave):
        raise UserError(f"backend {facts.backend!r} cannot read engines from a file")
    try:
        artifact = runtime.load(path)
    except CandidateError as error:
        raise UserError(
            f"{path}: {error}; an engine runs with the version and on the kind of device that built it: build it again"
        ) from error
    return runtime, artifact


def _create_runtime(use: str, params: dict[str, Any]) -> Benchmarker:
    made: Benchmarker = registry.create_plugin("benchmarker", use, params)
    return made


def _facts_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
