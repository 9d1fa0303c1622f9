"""`qdq evaluate`: accuracy of engines or models by spec files, its loss, and the layers to leave native."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.accuracy.data.batching import image_input, image_size
from harness.accuracy.data.decode import suggest_decoder
from harness.accuracy.data.preprocess import Layout, parse_preprocess
from harness.accuracy.metrics.base import low_reference_warning
from harness.accuracy.metrics.closeness import compare_outputs, plan_comparison
from harness.accuracy.metrics.intervals import drop_estimate, few_images_note, metric_estimate
from harness.base.errors import CandidateError, EvaluationFailed, UserError
from harness.base.files import file_sha256
from harness.base.progress import NullProgress, Observer
from harness.base.statistics import Interval
from harness.compat.tao_specs.dataset import (
    calibration_feeds,
    data_keys,
    labelled_data,
    locate_spec_file,
    map_error_keys,
    name_write_errors,
    open_calibration_data,
    open_onnx_file,
    static_inputs,
    write_static_copy,
)
from harness.compat.tao_specs.engine import (
    TENSORRT,
    EngineFacts,
    create_saver,
    engine_for_other_runtime,
    load_engine,
    read_facts,
)
from harness.compat.tao_specs.spec import DatasetSection, EvaluateSection, Spec, require_section
from harness.config.sections import PluginSpec, PreprocessSpec
from harness.graph.load import read_signature
from harness.graph.passes.dimension_sizes import parse_shape
from harness.graph.qdq.reduce_model import UPCAST_NOTE, PairRemover, write_float32_copy
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Benchmarker, Candidate, Evaluator, NeedsPreparation
from harness.run.prepare.accuracy_store import scoring_progress
from harness.run.prepare.model_loader import complete_evaluator
from harness.runtimes.onnxruntime import unfused_execution
from harness.workers.engines import ScoringCallback
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process, call_with_reports
from harness.workers.inference import open_infer, with_progress

logger = logging.getLogger(__name__)

SCORING_FACTOR = 24 * RUNTIME_FACTOR
#: Metric of a float model below which the evaluator checks whether labels and preprocessing fit the model.
MIN_FLOAT_METRIC = 0.1
FLOAT32_NOTE = "run in float32, see above"
#: A larger drop needs other skip_names (TAO documentation, "ModelOpt ONNX Backend", step 5: above 1 to 2 %).
MAX_ACCEPTABLE_DROP = 0.01
MAX_FEEDS = 4
MAX_SUGGESTED_LAYERS = 8


class EvaluationTarget(NamedTuple):
    """Engine or model under evaluation.

    Attributes:
        what: Name of the engine or model in the spec.
        file: The engine, or the model with static inputs.
        facts: Facts of the engine; those of a model have no digest.
        model: ONNX file; None if it is unknown or missing.
    """

    what: str
    file: Path
    facts: EngineFacts
    model: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Scores of an evaluation.

    Attributes:
        name: Stem of the spec file.
        evaluate_s: Wall-clock time of the build and the evaluation.
        note: Remark on the arithmetic, or "".
    """

    name: str
    target: EvaluationTarget
    metric: str
    higher_is_better: bool
    accuracy: Accuracy
    evaluate_s: float = 0.0
    note: str = ""


def evaluate(spec: Spec, source: Path, observer: Observer | None = None) -> EvaluationResult:
    """Score the target of section `evaluate`, and write the scores to `results_dir/NAME.evaluation.json`.

    Args:
        source: Path of the spec; relative paths start from its folder.
        observer: Receives progress, and a warning if a float model has a negligible score.
    """
    base, reporter, dataset = source.resolve().parent, observer or NullProgress(), spec.dataset
    section = require_section(spec.evaluate, "evaluate", str(source))
    started_s = time.monotonic()
    try:
        with (
            map_error_keys(data_keys(dataset), str(source)),
            tempfile.TemporaryDirectory(prefix="qdq-evaluate-") as scratch,
            scoring_progress(reporter, f"inferences of {source.stem}") as watch,
        ):
            target = _open_target(section, dataset, base, Path(scratch))
            use = _evaluator_use(section, dataset, base, target)
            what = f"{source}: {target.what}: the evaluation"
            scored = call_with_reports(what, _score, source.stem, target, use, factor=SCORING_FACTOR, on_report=watch)
    except CandidateError as error:
        raise UserError(f"{source}: {section.trt_engine or section.onnx_file}: {error}") from error
    if not target.facts.precisions:
        text = low_reference_warning(scored.accuracy, scored.metric, scored.higher_is_better, use.params)
        if text:
            reporter.say(f"{source.stem}: {text}")
    scored = replace(scored, evaluate_s=time.monotonic() - started_s)
    body: dict[str, Any] = {
        "schema": 1,
        "what": target.what,
        "metric": scored.metric,
        "metrics": dict(scored.accuracy.metrics),
        "precisions": list(target.facts.precisions),
        "per_item": list(scored.accuracy.per_item),
        "evidence": scored.accuracy.evidence,
        "evaluate_s": round(scored.evaluate_s, 3),
        **({"note": scored.note} if scored.note else {}),
    }
    results = base / spec.results_dir
    with name_write_errors(f"results_dir {results}"):
        results.mkdir(parents=True, exist_ok=True)
        text = json.dumps(body, allow_nan=False)
        (results / f"{scored.name}.evaluation.json").write_text(text + "\n", encoding="utf-8")
    return scored


def _score(name: str, target: EvaluationTarget, use: PluginSpec, on_progress: ScoringCallback) -> EvaluationResult:
    """Return the scores without the time; an evaluator may reject a float model with a low score."""
    evaluator: Evaluator = registry.create_plugin("evaluator", use.use, use.params)
    facts = target.facts
    if facts.sha256:
        runtime, artifact = load_engine(target.file, facts)
    else:
        runtime = registry.create_plugin("benchmarker", facts.backend, facts.params)
        candidate = Candidate(digest=target.file.stem, edges=(), source=lambda: target.file)
        artifact = runtime.build(candidate, target.file.parent)
    with runtime.open(artifact) as probe, open_infer(probe, evaluator, 0.0) as infer:
        accuracy = evaluator.score(with_progress(infer, evaluator, on_progress))
        float_model = not facts.precisions and isinstance(evaluator, NeedsPreparation)
        if float_model and accuracy.metrics.get(evaluator.metric, 1.0) < MIN_FLOAT_METRIC:
            evaluator.prepare(probe.infer)  # type: ignore[attr-defined]
    return EvaluationResult(
        name=name,
        target=target,
        metric=evaluator.metric,
        higher_is_better=evaluator.higher_is_better,
        accuracy=accuracy,
        note=str(artifact.info.get("arithmetic", "")),
    )


def _open_target(section: EvaluateSection, dataset: DatasetSection, base: Path, scratch: Path) -> EvaluationTarget:
    """Return the engine, or the model with static inputs, which is written to `scratch`."""
    requested = section.trt_engine
    if requested is None:
        path, declared = open_onnx_file(str(section.onnx_file), base, "evaluate.onnx_file")
        types = static_inputs(declared, dataset.shapes, dataset.dims, batch=dataset.batch_size)
        facts = EngineFacts.of(declared, section.backend, types, path.name)
        file = write_static_copy(path, declared, types, scratch / "model.onnx")
        return EvaluationTarget(what=str(section.onnx_file), file=file, facts=facts, model=path)
    other = engine_for_other_runtime(base / requested)
    if other is not None:
        logger.warning("evaluate.trt_engine: there is no %s; %s is used instead", requested, other.name)
        requested = str(Path(requested).with_name(other.name))
    path = locate_spec_file(requested, base, "evaluate.trt_engine")
    if path.suffix == ".onnx":
        raise UserError(f"evaluate.trt_engine: {requested} is a model; use the key evaluate.onnx_file")
    stored = read_facts(path)
    if stored is None:  # an engine of another tool
        if not dataset.shapes:
            raise UserError(
                f"{path.name}: there is no {path.name}.json, as qdq gen-trt-engine writes; give its input under "
                "dataset.shapes, for instance {images: 1x3x640x640}, and TensorRT is assumed"
            )
        stored = EngineFacts(
            backend=TENSORRT,
            params={},
            inputs={n: ("float", parse_shape(shape, f"dataset.shapes.{n}")) for n, shape in dataset.shapes.items()},
            onnx_file="",
            precisions=(),
            describe={},
            sha256=file_sha256(path),
        )
    create_saver(stored.backend, stored.params, "read engines from")
    model = path.parent / stored.onnx_file
    found = model.resolve() if model.is_file() else None
    return EvaluationTarget(what=requested, file=path, facts=stored, model=found)


def _evaluator_use(
    section: EvaluateSection, dataset: DatasetSection, base: Path, target: EvaluationTarget
) -> PluginSpec:
    data, inputs = labelled_data(dataset, base), target.facts.inputs
    use = section.evaluator or PluginSpec(use="coco_map" if str(data.get("labels")).endswith(".json") else "top1")
    if "reference" in registry.plugin_signature("evaluator", use.use).parameters:
        raise UserError(
            f"evaluate.evaluator: {use.use!r} compares with the float model, which a spec file does not name; use "
            "it in an experiment (qdq run), or harness.accuracy.metrics.closeness.output_sqnr in Python"
        )
    params, preprocess = {"data": data, **use.params}, dataset.preprocess if "images" in data else None
    if "images" in data:
        given = params.get("preprocess") if preprocess is None else preprocess.mapping
        axes = None if given is None else parse_preprocess(given)[2]
        layout = _suggest_layout(target.facts, axes)
        if preprocess is None and "preprocess" not in params:
            preprocess = PreprocessSpec(use=_require_plugin(layout, "dataset.preprocess", "preprocessing"))
        if use.use == "coco_map":
            params.setdefault("decode", _require_plugin(section.decode or layout, "evaluate.decode", "decoder"))
    batch = next((shape[0] for _, shape in inputs.values() if shape), 1)
    if "batch_size" in dataset.model_fields_set and dataset.batch_size != batch:
        logger.warning("dataset.batch_size: %d is ignored: %s takes %d", dataset.batch_size, target.what, batch)
    return complete_evaluator(use.model_copy(update={"params": params}), inputs, base, preprocess)


def _suggest_layout(facts: EngineFacts, axes: Layout | None = None) -> str | None:
    """Return the name that decoder and preprocessing of a detector share, by the shapes of its image input and outputs.

    None if the shapes fit no decoder or several.

    Args:
        axes: Order of the axes of the image input, if the preprocessing states it.
    """
    name = image_input(facts.inputs)
    return suggest_decoder(facts.outputs, image_size(name, facts.inputs[name][1], axes))


def _require_plugin(name: str | None, key: str, kind: str) -> str:
    if name is None:
        names = ", ".join(plugin.name for plugin in registry.installed_plugins(kind))
        raise UserError(f"{key}: the shapes of the outputs do not determine the {kind} of this model; one of {names}")
    return name


def compare_evaluations(results: Sequence[EvaluationResult]) -> tuple[list[tuple[str, ...]], list[Interval | None]]:
    """Compare evaluations; the first is the baseline.

    Returns:
        For each evaluation its row (spec, engine or model, precisions, metric with its 95 % interval over images, drop,
        note), and its drop: the loss against the first, positive if it is worse; None for the first.
    """

    def text(interval: Interval, digits: str) -> str:
        if interval.low == interval.high:
            return format(interval.value, digits)
        return f"{interval.value:{digits}} [{interval.low:{digits}}, {interval.high:{digits}}]"

    first, rows, drops = results[0], list[tuple[str, ...]](), list[Interval | None]()
    for scored in results:
        facts, metric, accuracy = scored.target.facts, scored.metric, scored.accuracy
        if metric != first.metric:
            raise UserError(f"{scored.name}: its metric is {metric}, but that of {first.name} is {first.metric}")
        value, reference = accuracy.metrics[metric], first.accuracy.metrics[metric]
        estimate, drop = metric_estimate(accuracy, metric), None
        interval = Interval(value=value, low=value, high=value) if estimate is None else estimate.interval
        if scored is not first:
            try:
                lost = drop_estimate(first.accuracy, accuracy, metric, higher_is_better=scored.higher_is_better)
            except ValueError as error:
                raise UserError(f"{scored.name} and {first.name} cannot be compared: {error}") from error
            loss = (reference - value) * (1.0 if scored.higher_is_better else -1.0)
            drop = Interval(value=loss, low=loss, high=loss) if lost is None else lost.interval
        few = "" if estimate is None else few_images_note(estimate.images)
        rows.append((
            scored.name,
            scored.target.what,
            "+".join(facts.precisions) or "float",
            f"{metric} {text(interval, '.4f')}",
            "baseline" if drop is None else text(drop, "+.4f"),
            "; ".join(filter(None, (few, FLOAT32_NOTE if scored.note else ""))),
        ))  # fmt: skip
        drops.append(drop)
    return rows, drops


def advise_native_layers(
    scored: EvaluationResult, drop: Interval | None, dataset: DatasetSection, base: Path, observer: Observer
) -> list[str]:
    """Return lines with layers to leave native; none if the drop is at most `MAX_ACCEPTABLE_DROP` or not known.

    There are none either if nothing is quantized. If the layers cannot be ranked, a line has the reason.

    Args:
        drop: Its drop, see `compare_evaluations`.
        dataset: Section `dataset` of the spec; a few images, of its calibration data or else labelled data, are run.
        base: Folder that relative paths start from.
    """
    target, sources = scored.target, dataset.test_data_sources
    if drop is None or drop.value <= MAX_ACCEPTABLE_DROP or not target.facts.precisions:
        return []
    head = f"{scored.name}: the drop, {drop.value:.4f}, is above {MAX_ACCEPTABLE_DROP:.2f}; leave layers native:"
    if target.model is None:
        return [head, f"(layers cannot be ranked: the ONNX file of {target.what} is missing)"]
    evaluated = None if sources is None else sources.image_dir or sources.arrays
    changes: dict[str, Any] = {"samples": MAX_FEEDS, "calibration_data": dataset.calibration_data or evaluated}
    try:
        if sources is not None and sources.image_dir is not None and dataset.preprocess is None:
            layout = _suggest_layout(target.facts)
            changes["preprocess"] = layout and PreprocessSpec(use=layout)
        dataset = dataset.model_copy(update=changes)
        feeds, _ = calibration_feeds(dataset, open_calibration_data(dataset, base), target.facts.inputs)
        ranked = rank_layers(target.model, feeds, observer)
    except (CandidateError, UserError) as error:
        return [head, f"(layers cannot be ranked: {error})"]
    if not ranked:
        return [head, "no activation of this model is quantized: the drop comes from its weights alone"]
    worst = [f'  - "{node}"  # {sqnr_db:.1f} dB' for node, sqnr_db in ranked[:MAX_SUGGESTED_LAYERS]]
    columns = "skip_names:  # the worst layers first, by outputs with and without the Q/DQ pairs of the layer"
    return [head, columns, *worst]


def rank_layers(path: Path, feeds: Iterable[Mapping[str, Array]], observer: Observer) -> list[tuple[str, float]]:
    """Return the names of the layers of a Q/DQ model, those that alone reduce SQNR most first.

    Args:
        path: The model. ONNX Runtime runs it without optimizers, which emulates any precision.
        feeds: Inputs, all of the same shapes; the first `MAX_FEEDS` are used.
        observer: Receives progress, one step per layer.

    Returns:
        Name of each layer, and SQNR in dB of the model's worst output if only this layer is quantized.

    Raises:
        CandidateError: The model does not run.
    """
    inputs = list(itertools.islice(feeds, MAX_FEEDS))
    ranked: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="qdq-sensitivity-") as scratch:
        types = {name: ("", array.shape) for feed in inputs[:1] for name, array in feed.items()}
        fixed = write_static_copy(path, read_signature(path), types, Path(scratch) / "static.onnx") if inputs else path
        wide = write_float32_copy(fixed, Path(scratch))
        if wide is not None:
            observer.say(f"{path.name}: {UPCAST_NOTE}")
        remover, file = PairRemover(wide or fixed), Path(scratch) / path.name

        def run(quantized: Iterable[str]) -> list[Mapping[str, Array]]:
            model = remover.write(frozenset(quantized), file)
            what = f"{path.name}: the run in ONNX Runtime"
            return call_in_helper_process(what, _run_in_onnxruntime, model, inputs, factor=RUNTIME_FACTOR)

        expected = run(())
        layout = plan_comparison(expected)
        with observer.work(f"{path.name}: each layer quantized alone", len(remover.quantized_nodes)) as step:
            for node in remover.quantized_nodes:
                try:
                    found = compare_outputs(zip(expected, run([node]), strict=True), layout)
                    ranked.append((node, found.metrics["sqnr_db"]))
                except EvaluationFailed:
                    ranked.append((node, -np.inf))
                step.advance()
    return sorted(ranked, key=lambda layer: layer[1])


def _run_in_onnxruntime(path: Path, inputs: list[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
    reference = unfused_execution()
    runtime: Benchmarker = registry.create_plugin("benchmarker", reference.use, reference.params)
    candidate = Candidate(digest=path.stem, edges=(), source=lambda: path)
    with runtime.open(runtime.build(candidate, path.parent)) as probe:
        return [probe.infer(feed) for feed in inputs]
