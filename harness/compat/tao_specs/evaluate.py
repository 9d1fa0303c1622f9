"""`qdq evaluate`: accuracy of an engine or a model on labelled data, by a spec file."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.accuracy.data.batching import image_input, image_size
from harness.accuracy.data.decode_boxes import suggest_decoder
from harness.accuracy.data.preprocess import Layout, parse_preprocess
from harness.accuracy.metrics.base import low_reference_warning
from harness.base.errors import CandidateError, UserError
from harness.base.progress import NullProgress, Observer
from harness.base.random_inputs import InputTypes
from harness.compat.tao_specs.dataset import data_keys, labelled_data, map_error_keys
from harness.compat.tao_specs.engine import (
    TENSORRT,
    EngineFacts,
    create_saver,
    engine_for_other_runtime,
    load_engine,
    read_facts,
)
from harness.compat.tao_specs.model_file import (
    locate_spec_file,
    name_write_errors,
    open_onnx_file,
    static_inputs,
    write_static_copy,
)
from harness.compat.tao_specs.spec import DatasetSection, EvaluateSection, Spec, require_section
from harness.config.sections import PluginSpec, PreprocessSpec
from harness.graph.load import Dims
from harness.graph.passes.dimension_sizes import parse_shape
from harness.plugins import registry
from harness.plugins.api import Accuracy, Candidate, Evaluator, NeedsPreparation
from harness.run.prepare.accuracy_store import scoring_progress
from harness.run.prepare.model_loader import complete_evaluator
from harness.workers.engines import ScoringCallback
from harness.workers.helper_process import RUNTIME_FACTOR, call_with_reports
from harness.workers.inference import open_infer, with_progress

logger = logging.getLogger(__name__)

SCORING_FACTOR = 24 * RUNTIME_FACTOR
MIN_FLOAT_METRIC = (
    0.1  # of a float model; below it, the evaluator checks whether labels and preprocessing fit the model
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """Engine or model under evaluation.

    Attributes:
        what: Name of the engine or model in the spec.
        file: The engine if `saved`, else the model with static inputs.
        inputs: Element type and shape of each input of the engine.
        outputs: Shape of each output.
        model: ONNX file; None if it is unknown or missing.
        precisions: Precisions of its Q/DQ pairs.
    """

    what: str
    backend: PluginSpec
    file: Path
    saved: bool
    inputs: InputTypes
    outputs: Mapping[str, Dims]
    model: Path | None
    precisions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Scores of an evaluation.

    Attributes:
        name: Stem of the spec file.
        what: Name of the engine or model in the spec.
        model: ONNX file; None if it is unknown or missing.
        evaluate_s: Wall-clock time of the evaluation.
        note: Remark on the arithmetic, or "".
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
    inputs: InputTypes


def evaluate(spec: Spec, source: Path, observer: Observer | None = None) -> EvaluationResult:
    """Score the target of section `evaluate`, and write the scores to `results_dir/NAME.evaluation.json`.

    Args:
        source: Path of the spec; relative paths start from its folder.
        observer: Receives progress, and a warning if a float model has a negligible score.

    Raises:
        UserError: The spec cannot be used, or the runtime or the evaluator fails.
    """
    base, reporter = source.resolve().parent, observer or NullProgress()
    section = _resolve_engine(require_section(spec.evaluate, "evaluate", str(source)), base)
    started_s = time.monotonic()
    try:
        with (
            map_error_keys(data_keys(spec.dataset), str(source)),
            _open_target(section, spec.dataset, base) as target,
        ):
            use = _evaluator_use(section, spec.dataset, base, target)
            with scoring_progress(reporter, f"inferences of {source.stem}") as watch:
                what = f"{source}: {target.what}: the evaluation"
                scored = call_with_reports(what, _score, target, use, factor=SCORING_FACTOR, on_report=watch)
            if not target.precisions:
                text = low_reference_warning(scored.accuracy, scored.metric, scored.higher_is_better, use.params)
                if text:
                    reporter.say(f"{source.stem}: {text}")
    except CandidateError as error:
        raise UserError(f"{source}: {section.trt_engine or section.onnx_file}: {error}") from error
    scored = replace(scored, name=source.stem, evaluate_s=time.monotonic() - started_s)
    _write_result(scored, base / spec.results_dir)
    return scored


def _resolve_engine(section: EvaluateSection, base: Path) -> EvaluateSection:
    """Return the section with the engine of another runtime if that of TensorRT is missing."""
    requested = section.trt_engine
    other = None if requested is None else engine_for_other_runtime(base / requested)
    if requested is None or other is None:
        return section
    logger.warning("evaluate.trt_engine: there is no %s; %s is used instead", requested, other.name)
    return section.model_copy(update={"trt_engine": str(Path(requested).with_name(other.name))})


def _score(target: EvaluationTarget, use: PluginSpec, on_progress: ScoringCallback) -> EvaluationResult:
    """Return the scores without name and time; an evaluator may reject a float model with a low score."""
    evaluator: Evaluator = registry.create_plugin("evaluator", use.use, use.params)
    if target.saved:
        runtime, artifact = load_engine(target.file, target.backend)
    else:
        runtime = registry.create_plugin("benchmarker", target.backend.use, target.backend.params)
        candidate = Candidate(digest=target.file.stem, edges=(), source=lambda: target.file)
        artifact = runtime.build(candidate, target.file.parent)
    with runtime.open(artifact) as probe, open_infer(probe, evaluator, 0.0) as infer:
        accuracy = evaluator.score(with_progress(infer, evaluator, on_progress))
        float_model = not target.precisions and isinstance(evaluator, NeedsPreparation)
        if float_model and accuracy.metrics.get(evaluator.metric, 1.0) < MIN_FLOAT_METRIC:
            evaluator.prepare(probe.infer)  # type: ignore[attr-defined]
    return EvaluationResult(
        name="",
        what=target.what,
        metric=evaluator.metric,
        higher_is_better=evaluator.higher_is_better,
        accuracy=accuracy,
        precisions=target.precisions,
        model=target.model,
        evaluate_s=0.0,
        note=str(artifact.info.get("arithmetic", "")),
        inputs=target.inputs,
    )


@contextmanager
def _open_target(section: EvaluateSection, dataset: DatasetSection, base: Path) -> Iterator[EvaluationTarget]:
    with tempfile.TemporaryDirectory(prefix="qdq-evaluate-") as scratch:
        if section.trt_engine is not None:
            yield _open_engine(locate_spec_file(section.trt_engine, base, "evaluate.trt_engine"), section, dataset)
        else:
            yield _build_model(section, dataset, base, Path(scratch))


def _open_engine(path: Path, section: EvaluateSection, dataset: DatasetSection) -> EvaluationTarget:
    if path.suffix == ".onnx":
        raise UserError(f"evaluate.trt_engine: {section.trt_engine} is a model; use the key evaluate.onnx_file")
    facts = read_facts(path) or _assume_tensorrt(path, dataset)
    create_saver(facts.backend, facts.params, "read engines from")
    model = path.parent / facts.onnx_file
    return EvaluationTarget(
        what=str(section.trt_engine), backend=PluginSpec(use=facts.backend, params=facts.params), file=path, saved=True,
        inputs=facts.inputs, outputs=facts.outputs, model=model.resolve() if model.is_file() else None,
        precisions=facts.precisions,
    )  # fmt: skip


def _assume_tensorrt(path: Path, dataset: DatasetSection) -> EngineFacts:
    """Return facts for an engine of another tool, which is assumed to be of TensorRT, with the inputs of the spec."""
    if not dataset.shapes:
        raise UserError(
            f"{path.name}: there is no {path.name}.json, as qdq gen-trt-engine writes; give its input under "
            "dataset.shapes, for instance {images: 1x3x640x640}, and TensorRT is assumed"
        )
    inputs = {n: ("float", parse_shape(shape, f"dataset.shapes.{n}")) for n, shape in dataset.shapes.items()}
    return EngineFacts(backend=TENSORRT, params={}, inputs=inputs, onnx_file="", precisions=(), describe={})


def _build_model(section: EvaluateSection, dataset: DatasetSection, base: Path, scratch: Path) -> EvaluationTarget:
    path, declared = open_onnx_file(str(section.onnx_file), base, "evaluate.onnx_file")
    types = static_inputs(declared, dataset.shapes, dataset.dims, batch=dataset.batch_size)
    file = write_static_copy(path, declared, types, scratch / "model.onnx")
    return EvaluationTarget(
        what=str(section.onnx_file), backend=section.backend, file=file, saved=False, inputs=types,
        outputs=declared.outputs, model=path, precisions=tuple(sorted(declared.precisions)),
    )  # fmt: skip


def _evaluator_use(
    section: EvaluateSection, dataset: DatasetSection, base: Path, target: EvaluationTarget
) -> PluginSpec:
    data, keys = labelled_data(dataset), data_keys(dataset)
    for key in ("images", "labels") if "images" in data else ("path",):
        locate_spec_file(data[key], base, keys[key])
    use = section.evaluator or PluginSpec(use="coco_map" if str(data.get("labels")).endswith(".json") else "top1")
    if "reference" in registry.plugin_signature("evaluator", use.use).parameters:
        raise UserError(
            f"evaluate.evaluator: {use.use!r} compares with the float model, which a spec file does not name; use "
            "it in an experiment (qdq run), or harness.accuracy.metrics.sqnr.output_sqnr in Python"
        )
    params, preprocess = {"data": data, **use.params}, dataset.preprocess if "images" in data else None
    if "images" in data:
        given = params.get("preprocess") if preprocess is None else preprocess.mapping
        axes = None if given is None else parse_preprocess(given)[2]
        layout = suggest_layout(target.inputs, target.outputs, axes)
        if preprocess is None and "preprocess" not in params:
            preprocess = PreprocessSpec(use=_require_plugin(layout, "dataset.preprocess", "preprocessing"))
        if use.use == "coco_map":
            params.setdefault("decode", _require_plugin(section.decode or layout, "evaluate.decode", "decoder"))
    batch = next((shape[0] for _, shape in target.inputs.values() if shape), 1)
    if "batch_size" in dataset.model_fields_set and dataset.batch_size != batch:
        logger.warning("dataset.batch_size: %d is ignored: %s takes %d", dataset.batch_size, target.what, batch)
    return complete_evaluator(use.model_copy(update={"params": params}), target.inputs, base, preprocess)


def suggest_layout(inputs: InputTypes, outputs: Mapping[str, Dims], axes: Layout | None = None) -> str | None:
    """Return the name that decoder and preprocessing of a detector share, by the shapes of its image input and outputs.

    None if the shapes fit no decoder or several.

    Args:
        axes: Order of the axes of the image input, if the preprocessing states it.
    """
    name = image_input(inputs)
    return suggest_decoder(outputs, image_size(name, inputs[name][1], axes))


def _require_plugin(name: str | None, key: str, kind: str) -> str:
    if name is None:
        names = ", ".join(plugin.name for plugin in registry.installed_plugins(kind))
        raise UserError(f"{key}: the shapes of the outputs do not determine the {kind} of this model; one of {names}")
    return name


def _write_result(scored: EvaluationResult, results: Path) -> None:
    body: dict[str, Any] = {
        "schema": 1,
        "what": scored.what,
        "metric": scored.metric,
        "metrics": dict(scored.accuracy.metrics),
        "precisions": list(scored.precisions),
        "per_item": list(scored.accuracy.per_item),
        "evidence": scored.accuracy.evidence,
        "evaluate_s": round(scored.evaluate_s, 3),
        **({"note": scored.note} if scored.note else {}),
    }
    with name_write_errors(f"results_dir {results}"):
        results.mkdir(parents=True, exist_ok=True)
        text = json.dumps(body, allow_nan=False)
        (results / f"{scored.name}.evaluation.json").write_text(text + "\n", encoding="utf-8")
