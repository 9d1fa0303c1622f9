"""`qdq evaluate`: the accuracy of an engine or a model on labelled images, by a spec file."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import registry
from harness.accuracy.data.batching import image_size
from harness.accuracy.metrics.base import evaluator_params, image_input_params, low_reference_warning
from harness.api import Accuracy, Artifact, Benchmarker, Candidate, Evaluator, NeedsPreparation
from harness.compat.tao_specs.engine_file import EngineFacts, engine_for_other_runtime, load_engine, read_facts
from harness.compat.tao_specs.error_key_mapping import map_error_keys
from harness.compat.tao_specs.layout import suggest_decoder
from harness.compat.tao_specs.model_file import locate_spec_file, open_onnx_file, static_shapes, static_types
from harness.compat.tao_specs.spec import DatasetSection, EvaluateSection, Spec, require_section
from harness.config.sections import PluginSpec
from harness.errors import CandidateError, UserError
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.passes.static_shapes import parse_shape
from harness.graph.signature import Dims, with_static_inputs
from harness.progress import NullProgress, Observer
from harness.random_inputs import InputTypes
from harness.timing.workers.in_process import with_progress
from harness.verification.accuracy_store import scoring_progress

__all__ = ["EvaluationResult", "evaluate", "labelled_data"]

logger = logging.getLogger(__name__)

MIN_FLOAT_METRIC = 0.1
"""A float model that scores less has the classes of other labels, or another preprocessing: its evaluator says."""
IMAGE_SPEC_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "images": "dataset.test_data_sources.image_dir",
        "labels": "dataset.test_data_sources.json_file",
        "classes": "dataset.classes",
        "count": "dataset.count",
    }
)
"""Keys of the spec by those of the mapping that `labelled_data` makes of images."""
ARRAY_SPEC_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "path": "dataset.test_data_sources.arrays",
        "labels": "dataset.test_data_sources.labels",
        "count": "dataset.count",
    }
)
"""The same of arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        name: Of the spec file.
        what: The engine or model.
        metric: Name of the primary figure of `accuracy`.
        model: The ONNX file, where it is known and there.
        evaluate_s: Wall-clock of the evaluation.
        note: What is to be known of how it was run; "" as a rule.
        inputs: Element type and shape of each input, as the engine has them.
    """

    name: str
    what: str
    metric: str
    higher_is_better: bool
    accuracy: Accuracy
    precisions: tuple[str, ...]
    model: Path | None
    evaluate_s: float
    note: str = ""
    inputs: InputTypes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationTarget:
    """What is evaluated, ready to run."""

    what: str
    runtime: Benchmarker
    artifact: Artifact
    inputs: InputTypes
    outputs: Mapping[str, Dims]
    model: Path | None
    precisions: tuple[str, ...]


def evaluate(spec: Spec, source: Path, observer: Observer | None = None) -> EvaluationResult:
    """Score what section `evaluate` names, and write the figures to `results_dir/NAME.evaluation.json`.

    Args:
        spec: The spec file.
        source: Where it lies: relative paths start from its folder.
        observer: Sees how far it is, and is told where a float model scores next to nothing.

    Raises:
        UserError: Anything in it that cannot be used, and the runtime's or evaluator's own words where they fail.
    """
    base, seen = source.resolve().parent, observer or NullProgress()
    chosen = _resolve_engine(require_section(spec.evaluate, "evaluate", str(source)), base)
    started_s = time.monotonic()
    try:
        with map_error_keys(_spec_keys(spec.dataset), str(source)), _open_target(chosen, spec.dataset, base) as subject:
            use = _evaluator_use(chosen, spec.dataset, base, subject)
            evaluator: Evaluator = registry.create_plugin("evaluator", use.use, use.params)
            accuracy = _score(subject, evaluator, seen, source.stem)
            if not subject.precisions:
                said = low_reference_warning(accuracy, evaluator.metric, evaluator.higher_is_better, use.params)
                if said:
                    seen.say(f"{source.stem}: {said}")
    except CandidateError as error:
        raise UserError(f"{source}: {chosen.trt_engine or chosen.onnx_file}: {error}") from error
    scored = EvaluationResult(
        name=source.stem,
        what=subject.what,
        metric=evaluator.metric,
        higher_is_better=evaluator.higher_is_better,
        accuracy=accuracy,
        precisions=subject.precisions,
        model=subject.model,
        evaluate_s=time.monotonic() - started_s,
        note=str(subject.artifact.info.get("arithmetic", "")),
        inputs=subject.inputs,
    )
    _write_result(scored, base / spec.results_dir)
    return scored


def labelled_data(dataset: DatasetSection) -> dict[str, Any]:
    """Return the labelled data of section `dataset`, as evaluators take them.

    Raises:
        UserError: There are none, or no labels.
    """
    sources = dataset.test_data_sources
    found: dict[str, Any]
    if sources is not None and sources.arrays is not None:
        found = {"use": Path(sources.arrays).suffix.removeprefix("."), "path": sources.arrays}
        if found["use"] not in ("npz", "npy"):
            raise UserError(f"{ARRAY_SPEC_KEYS['path']}: a .npz or .npy file, but got {sources.arrays}")
        if sources.labels is not None:
            found["labels"] = sources.labels
    elif sources is None or sources.image_dir is None or sources.json_file is None:
        raise UserError(
            "dataset.test_data_sources: image_dir and json_file are needed, the images and their labels (.json as COCO "
            "has them, or .txt with lines 'FILENAME CLASS'), or arrays and labels (a .npz file and the name of an "
            "array in it)"
        )
    else:
        found = {"use": "images", "images": sources.image_dir, "labels": sources.json_file}
    if dataset.classes:
        found["classes"] = list(dataset.classes)
    return found if dataset.count is None else {**found, "count": dataset.count}


def _spec_keys(dataset: DatasetSection) -> Mapping[str, str]:
    sources = dataset.test_data_sources
    return IMAGE_SPEC_KEYS if sources is None or sources.arrays is None else ARRAY_SPEC_KEYS


def _resolve_engine(chosen: EvaluateSection, base: Path) -> EvaluateSection:
    """The section with the engine that another runtime built where TensorRT's was asked for."""
    asked = chosen.trt_engine
    other = None if asked is None else engine_for_other_runtime(base / asked)
    if asked is None or other is None:
        return chosen
    logger.warning("evaluate.trt_engine: there is no %s; %s is taken, which stands in its place", asked, other.name)
    return chosen.model_copy(update={"trt_engine": str(Path(asked).with_name(other.name))})


def _score(subject: _EvaluationTarget, evaluator: Evaluator, observer: Observer, name: str) -> Accuracy:
    """The accuracy; an evaluator may refuse a float model of which it finds little."""
    with subject.runtime.open(subject.artifact) as probe, scoring_progress(observer, f"inferences of {name}") as watch:
        accuracy = evaluator.score(with_progress(probe.infer, evaluator, watch))
        float_model = not subject.precisions and isinstance(evaluator, NeedsPreparation)
        if float_model and accuracy.metrics.get(evaluator.metric, 1.0) < MIN_FLOAT_METRIC:
            evaluator.prepare(probe.infer)  # type: ignore[attr-defined]
    return accuracy


@contextmanager
def _open_target(chosen: EvaluateSection, dataset: DatasetSection, base: Path) -> Iterator[_EvaluationTarget]:
    with tempfile.TemporaryDirectory(prefix="qdq-evaluate-") as scratch:
        if chosen.trt_engine is not None:
            yield _open_engine(locate_spec_file(chosen.trt_engine, base, "evaluate.trt_engine"), chosen, dataset)
        else:
            yield _build_model(chosen, dataset, base, Path(scratch))


def _open_engine(path: Path, chosen: EvaluateSection, dataset: DatasetSection) -> _EvaluationTarget:
    if path.suffix == ".onnx":
        raise UserError(f"evaluate.trt_engine: {chosen.trt_engine} is a model, no engine; call it evaluate.onnx_file")
    facts = read_facts(path) or _assume_tensorrt(path, dataset)
    runtime, artifact = load_engine(path, facts)
    model = path.parent / facts.onnx_file
    return _EvaluationTarget(
        what=str(chosen.trt_engine), runtime=runtime, artifact=artifact, inputs=facts.types, outputs=facts.outputs,
        model=model.resolve() if model.is_file() else None, precisions=facts.precisions,
    )  # fmt: skip


def _assume_tensorrt(path: Path, dataset: DatasetSection) -> EngineFacts:
    """An engine of somebody else's is taken for TensorRT's, with inputs as the spec says."""
    if not dataset.shapes:
        raise UserError(
            f"{path.name}: there is no {path.name}.json beside it, as qdq gen-trt-engine writes; say its input under "
            "dataset.shapes, for instance {images: 1x3x640x640}, and TensorRT is assumed"
        )
    inputs = {n: ("float", parse_shape(shape, f"dataset.shapes.{n}")) for n, shape in dataset.shapes.items()}
    return EngineFacts(backend="tensorrt", params={}, inputs=inputs, onnx_file="", precisions=(), describe={})


def _build_model(chosen: EvaluateSection, dataset: DatasetSection, base: Path, scratch: Path) -> _EvaluationTarget:
    path, declared = open_onnx_file(str(chosen.onnx_file), base, "evaluate.onnx_file")
    shapes = static_shapes(declared, dataset.batch_size, dataset.shapes, dims=dataset.dims)
    dynamic = any(None in dims for _, dims in declared.inputs.values())
    file = with_static_inputs(path, InputSizes(shapes=shapes), scratch / "model.onnx") if dynamic else path
    runtime: Benchmarker = registry.create_plugin("benchmarker", chosen.backend.use, chosen.backend.params)
    artifact = runtime.build(Candidate(digest=path.stem, edges=(), source=lambda: file), scratch)
    return _EvaluationTarget(
        what=str(chosen.onnx_file), runtime=runtime, artifact=artifact, inputs=static_types(declared, shapes),
        outputs=declared.outputs, model=path, precisions=tuple(sorted(declared.precisions)),
    )  # fmt: skip


def _evaluator_use(
    chosen: EvaluateSection, dataset: DatasetSection, base: Path, subject: _EvaluationTarget
) -> PluginSpec:
    data = labelled_data(dataset)
    keys = _spec_keys(dataset)
    for key in ("images", "labels") if "images" in data else ("path",):
        locate_spec_file(data[key], base, keys[key])
    images = image_input_params(data, subject.inputs)
    shape = images["input_shape"] or next(iter(shape for _, shape in subject.inputs.values()))
    if "batch_size" in dataset.model_fields_set and dataset.batch_size != shape[0]:
        logger.warning("dataset.batch_size: %d is left aside: %s takes %d", dataset.batch_size, subject.what, shape[0])
    use = chosen.evaluator or PluginSpec(use="coco_map" if str(data.get("labels")).endswith(".json") else "top1")
    params: dict[str, Any] = {"data": data, **use.params}
    if "images" in data:
        layout = suggest_decoder(subject.outputs, image_size(images["input_name"], shape))
        params.setdefault("preprocess", _preprocess_use(dataset, layout))
        if use.use == "coco_map":
            params.setdefault("decode", _require_plugin(chosen.decode or layout, "evaluate.decode", "decoder"))
    if "reference" in registry.plugin_signature("evaluator", use.use).parameters:
        raise UserError(
            f"evaluate.evaluator: {use.use!r} compares with the float model, which a spec file does not name; use "
            "it in an experiment (qdq run), or harness.accuracy.metrics.sqnr.output_sqnr in Python"
        )
    supplied = {**images, "inputs": subject.inputs, "base": base}
    return PluginSpec(use=use.use, params=evaluator_params(use.use, params, supplied))


def _preprocess_use(dataset: DatasetSection, layout: str | None) -> Mapping[str, Any]:
    use = dataset.preprocess
    if use is not None:
        return {"use": use.use, "params": use.params}
    return {"use": _require_plugin(layout, "dataset.preprocess", "preprocessing"), "params": {}}


def _require_plugin(found: str | None, key: str, kind: str) -> str:
    if found is None:
        known = ", ".join(plugin.name for plugin in registry.installed_plugins(kind))
        raise UserError(f"{key}: the outputs do not tell which {kind} this model wants; one of {known}")
    return found


def _write_result(scored: EvaluationResult, results: Path) -> None:
    body = {
        "what": scored.what,
        "metric": scored.metric,
        "metrics": dict(scored.accuracy.metrics),
        "precisions": list(scored.precisions),
        "per_item": list(scored.accuracy.per_item),
        "evidence": scored.accuracy.evidence,
        "evaluate_s": round(scored.evaluate_s, 3),
        **({"note": scored.note} if scored.note else {}),
    }
    try:
        results.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"schema": 1, **body}, allow_nan=False)
        (results / f"{scored.name}.evaluation.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"results_dir {results}: cannot be written: {error.strerror or error}") from error
