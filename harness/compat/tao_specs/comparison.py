"""Comparison of evaluations, and the layers to leave native if a drop is large."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.closeness import compare_outputs, plan_comparison
from harness.accuracy.metrics.intervals import drop_estimate, few_images_note, metric_estimate
from harness.base.errors import CandidateError, EvaluationFailed, UserError
from harness.base.progress import Observer
from harness.base.random_inputs import InputTypes
from harness.base.statistics import Interval
from harness.compat.tao_specs.dataset import calibration_feeds, open_calibration_data
from harness.compat.tao_specs.evaluate import EvaluationResult, suggest_layout
from harness.compat.tao_specs.model_file import static_inputs, write_static_copy
from harness.compat.tao_specs.spec import DatasetSection
from harness.config.sections import PreprocessSpec
from harness.graph.load import read_signature
from harness.graph.qdq.reduce_model import PairRemover
from harness.graph.qdq.upcast import UPCAST_NOTE, write_float32_copy
from harness.plugins import registry
from harness.plugins.api import Array, Benchmarker, Candidate
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

FLOAT32_NOTE = "run in float32, see above"
#: A larger drop needs other skip_names (TAO documentation, "ModelOpt ONNX Backend", step 5: above 1 to 2 %).
MAX_ACCEPTABLE_DROP = 0.01
MAX_FEEDS = 4
MAX_SUGGESTED_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """Row of the comparison.

    Attributes:
        interval: The metric with its 95 % interval over images; without one, both limits are the metric.
        drop: Loss against the first row, positive if this row is worse; None for the first row.
    """

    scored: EvaluationResult
    interval: Interval
    drop: Interval | None
    note: str

    def cells(self) -> tuple[str, ...]:
        """Return spec, engine or model, precisions, metric, drop and note as text."""
        drop = "baseline" if self.drop is None else _format_interval(self.drop, "+.4f")
        precisions = "+".join(self.scored.precisions) or "float"
        metric = f"{self.scored.metric} {_format_interval(self.interval, '.4f')}"
        return self.scored.name, self.scored.what, precisions, metric, drop, self.note


def compare_evaluations(results: Sequence[EvaluationResult]) -> tuple[ComparisonRow, ...]:
    """Return the rows of a comparison; the first evaluation is the baseline.

    Raises:
        UserError: The evaluations have different metrics or different images.
    """
    first = results[0]
    rows = []
    for scored in results:
        if scored.metric != first.metric:
            raise UserError(f"{scored.name}: its metric is {scored.metric}, but that of {first.name} is {first.metric}")
        estimate = metric_estimate(scored.accuracy, scored.metric)
        interval = _point(scored.accuracy.metrics[scored.metric]) if estimate is None else estimate.interval
        drop = None if scored is first else _estimate_drop(first, scored)
        few = "" if estimate is None else few_images_note(estimate.images)
        note = "; ".join(filter(None, (few, FLOAT32_NOTE if scored.note else "")))
        rows.append(ComparisonRow(scored=scored, interval=interval, drop=drop, note=note))
    return tuple(rows)


def _estimate_drop(first: EvaluationResult, scored: EvaluationResult) -> Interval:
    try:
        estimate = drop_estimate(
            first.accuracy, scored.accuracy, scored.metric, higher_is_better=scored.higher_is_better
        )
    except ValueError as error:
        raise UserError(f"{scored.name} and {first.name} cannot be compared: {error}") from error
    if estimate is not None:
        return estimate.interval
    sign = 1.0 if scored.higher_is_better else -1.0
    return _point(sign * (first.accuracy.metrics[first.metric] - scored.accuracy.metrics[scored.metric]))


def _point(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


def _format_interval(interval: Interval, digits: str) -> str:
    if interval.low == interval.high:
        return format(interval.value, digits)
    return f"{interval.value:{digits}} [{interval.low:{digits}}, {interval.high:{digits}}]"


def advise_native_layers(row: ComparisonRow, dataset: DatasetSection, base: Path, observer: Observer) -> list[str]:
    """Return lines with layers to leave native; none if the drop is at most `MAX_ACCEPTABLE_DROP` or not known.

    There are none either if nothing is quantized. If the layers cannot be ranked, a line has the reason.

    Args:
        dataset: Section `dataset` of the row's spec, whose images the layers are ranked by.
        base: Folder that relative paths start from.
    """
    drop, path = row.drop, row.scored.model
    if drop is None or drop.value <= MAX_ACCEPTABLE_DROP or not row.scored.precisions:
        return []
    head = f"{row.scored.name}: the drop, {drop.value:.4f}, is above {MAX_ACCEPTABLE_DROP:.2f}; leave layers native:"
    if path is None:
        return [head, f"(layers cannot be ranked: the ONNX file of {row.scored.what} is missing)"]
    try:
        feeds = _open_feeds(path, row.scored.inputs, dataset, base)
        return [head, *suggest_skip_names(rank_layers(path, feeds, observer))]
    except (CandidateError, UserError) as error:
        return [head, f"(layers cannot be ranked: {error})"]


def _open_feeds(path: Path, inputs: InputTypes, dataset: DatasetSection, base: Path) -> Iterable[Mapping[str, Array]]:
    """Return a few inputs from the calibration data, or else from the labelled data."""
    declared, sources = read_signature(path), dataset.test_data_sources
    types = inputs or static_inputs(declared, dataset.shapes, dataset.dims)
    evaluated = None if sources is None else sources.image_dir or sources.arrays
    changes: dict[str, Any] = {"samples": MAX_FEEDS, "calibration_data": dataset.calibration_data or evaluated}
    if sources is not None and sources.image_dir is not None and dataset.preprocess is None:
        layout = suggest_layout(types, declared.outputs)
        changes["preprocess"] = layout and PreprocessSpec(use=layout)
    dataset = dataset.model_copy(update=changes)
    return calibration_feeds(dataset, open_calibration_data(dataset, base), types)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSensitivity:
    """Effect of the Q/DQ pairs of one layer.

    Attributes:
        sqnr_db: SQNR of the model's worst output if only this layer is quantized; lower is worse.
    """

    node: str
    sqnr_db: float


def rank_layers(path: Path, feeds: Iterable[Mapping[str, Array]], observer: Observer) -> tuple[LayerSensitivity, ...]:
    """Return the layers of a Q/DQ model, those that alone reduce SQNR most first.

    Args:
        path: The model. ONNX Runtime runs it without optimizers, which emulates any precision.
        feeds: Inputs, all of the same shapes; the first `MAX_FEEDS` are used.
        observer: Receives progress, one step per layer.

    Raises:
        CandidateError: The model does not run.
    """
    inputs = list(itertools.islice(feeds, MAX_FEEDS))
    ranked = []
    with tempfile.TemporaryDirectory(prefix="qdq-sensitivity-") as scratch, ExitStack() as stack:
        types = {name: ("", array.shape) for feed in inputs[:1] for name, array in feed.items()}
        fixed = write_static_copy(path, read_signature(path), types, Path(scratch) / "static.onnx") if inputs else path
        wide = write_float32_copy(fixed, Path(scratch))
        if wide is not None:
            observer.say(f"{path.name}: {UPCAST_NOTE}")
        remover = PairRemover(wide or fixed)
        step = stack.enter_context(
            observer.work(f"{path.name}: each layer quantized alone", len(remover.quantized_nodes))
        )
        file = Path(scratch) / path.name
        expected = _run_model(remover.write(frozenset(), file), inputs)
        layout = plan_comparison(expected)
        for node in remover.quantized_nodes:
            outputs = _run_model(remover.write(frozenset({node}), file), inputs)
            try:
                sqnr_db = compare_outputs(zip(expected, outputs, strict=True), layout).metrics["sqnr_db"]
            except EvaluationFailed:
                sqnr_db = -np.inf
            step.advance()
            ranked.append(LayerSensitivity(node=node, sqnr_db=sqnr_db))
    return tuple(sorted(ranked, key=lambda layer: layer.sqnr_db))


def _run_model(path: Path, inputs: list[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
    what = f"{path.name}: the run in ONNX Runtime"
    return call_in_helper_process(what, _run_in_onnxruntime, path, inputs, factor=RUNTIME_FACTOR)


def _run_in_onnxruntime(path: Path, inputs: list[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
    runtime: Benchmarker = registry.create_plugin("benchmarker", "onnxruntime", {"optimization": "disabled"})
    candidate = Candidate(digest=path.stem, edges=(), source=lambda: path)
    with runtime.open(runtime.build(candidate, path.parent)) as probe:
        return [probe.infer(feed) for feed in inputs]


def suggest_skip_names(ranked: Sequence[LayerSensitivity]) -> list[str]:
    """Return the `MAX_SUGGESTED_LAYERS` first layers of `ranked`, the worst first, as `skip_names` of a spec file.

    If there are none, because no activation is quantized, return one sentence.
    """
    if not ranked:
        return ["no activation of this model is quantized: the drop comes from its weights alone"]
    lines = ["skip_names:  # the worst layers first, by outputs with and without the Q/DQ pairs of the layer"]
    return lines + [f'  - "{layer.node}"  # {layer.sqnr_db:.1f} dB' for layer in ranked[:MAX_SUGGESTED_LAYERS]]
