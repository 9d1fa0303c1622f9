"""Evaluations side by side: each drop against the first with its interval, and what to do about a large one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.accuracy.data.batching import image_input, image_size
from harness.accuracy.metrics.intervals import drop_estimate, few_images_note, metric_estimate
from harness.api import Array
from harness.compat.tao_specs.calibration_feeds import open_calibration_feeds
from harness.compat.tao_specs.evaluate import EvaluationResult
from harness.compat.tao_specs.layout import suggest_decoder
from harness.compat.tao_specs.model_file import static_shapes, static_types
from harness.compat.tao_specs.sensitivity import rank_layers, suggest_skip_names
from harness.compat.tao_specs.spec import DatasetSection
from harness.config.sections import PluginSpec
from harness.errors import CandidateError, UserError
from harness.graph.signature import read_signature
from harness.progress import Observer
from harness.random_inputs import InputTypes
from harness.statistics import Interval

__all__ = ["MAX_ACCEPTABLE_DROP", "ComparisonRow", "advise_native_layers", "compare_evaluations"]

FLOAT32_NOTE = "run in float32, see above"
MAX_ACCEPTABLE_DROP = 0.01
"""A larger drop asks for other skip_names (TAO documentation, "ModelOpt ONNX Backend", step 5: above 1 to 2 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One row of the comparison.

    Attributes:
        interval: The metric with its 95 % interval over images, where there is one.
        drop: Against the first row, positive where this one is worse; None for the first itself.
    """

    scored: EvaluationResult
    interval: Interval
    drop: Interval | None
    note: str

    def cells(self) -> tuple[str, ...]:
        """As text: spec, engine or model, precisions, metric, drop, note."""
        drop = "baseline" if self.drop is None else _format_interval(self.drop, "+.4f")
        precisions = "+".join(self.scored.precisions) or "float"
        metric = f"{self.scored.metric} {_format_interval(self.interval, '.4f')}"
        return self.scored.name, self.scored.what, precisions, metric, drop, self.note


def compare_evaluations(found: Sequence[EvaluationResult]) -> tuple[ComparisonRow, ...]:
    """The rows of a comparison, the first evaluation being the baseline.

    Raises:
        UserError: They have different metrics or different images.
    """
    first = found[0]
    lines = []
    for scored in found:
        if scored.metric != first.metric:
            raise UserError(f"{scored.name}: its metric is {scored.metric}, that of {first.name} {first.metric}")
        value = scored.accuracy.metrics[scored.metric]
        own = metric_estimate(scored.accuracy, scored.metric)
        figure = Interval(value=value, low=value, high=value) if own is None else own.interval
        drop = None if scored is first else _estimate_drop(first, scored)
        few = "" if own is None else few_images_note(own.images)
        note = "; ".join(filter(None, (few, FLOAT32_NOTE if scored.note else "")))
        lines.append(ComparisonRow(scored=scored, interval=figure, drop=drop, note=note))
    return tuple(lines)


def advise_native_layers(line: ComparisonRow, dataset: DatasetSection, base: Path, observer: Observer) -> list[str]:
    """Which layers to leave native, as lines; nothing where the drop is acceptable or there are no Q/DQ pairs.

    Args:
        line: A row.
        dataset: Section `dataset` of its spec, whose images the layers are tried on.
        base: Folder that relative paths start from.
        observer: Sees how far it is.
    """
    drop, path = line.drop, line.scored.model
    if drop is None or drop.value <= MAX_ACCEPTABLE_DROP or not line.scored.precisions:
        return []
    head = [
        f"{line.scored.name}: the drop, {drop.value:.4f}, is above {MAX_ACCEPTABLE_DROP:.2f}; leave some layers native:"
    ]
    if path is None:
        return [*head, f"(which ones cannot be said: the ONNX file of {line.scored.what} is not there)"]
    try:
        return head + suggest_skip_names(
            rank_layers(path, _open_feeds(path, line.scored.inputs, dataset, base), observer)
        )
    except (CandidateError, UserError) as error:
        return [*head, f"(which ones cannot be said: {error})"]


def _open_feeds(path: Path, inputs: InputTypes, dataset: DatasetSection, base: Path) -> Iterable[Mapping[str, Array]]:
    """Return a few inputs, of the calibration data where they are named, else of the labelled images.

    Args:
        path: The model.
        inputs: As the evaluation fed them; where they are not known, the model and the spec say.
        dataset: Section `dataset`.
        base: Folder that relative paths start from.
    """
    declared, sources = read_signature(path), dataset.test_data_sources
    types = inputs or static_types(declared, static_shapes(declared, 1, dataset.shapes, dims=dataset.dims))
    evaluated = None if sources is None else sources.image_dir or sources.arrays
    changes: dict[str, Any] = {"samples": 4, "calibration_data": dataset.calibration_data or evaluated}
    if sources is not None and sources.image_dir is not None and dataset.preprocess is None:
        name = image_input(types)
        layout = suggest_decoder(declared.outputs, image_size(name, types[name][1]))
        changes["preprocess"] = layout and PluginSpec(use=layout)
    return open_calibration_feeds(dataset.model_copy(update=changes), types, base).batches


def _estimate_drop(first: EvaluationResult, scored: EvaluationResult) -> Interval:
    try:
        found = drop_estimate(first.accuracy, scored.accuracy, scored.metric, higher_is_better=scored.higher_is_better)
    except ValueError as error:
        raise UserError(f"{scored.name} and {first.name} cannot be compared: {error}") from error
    if found is not None:
        return found.interval
    sign = 1.0 if scored.higher_is_better else -1.0
    value = sign * (first.accuracy.metrics[first.metric] - scored.accuracy.metrics[scored.metric])
    return Interval(value=value, low=value, high=value)


def _format_interval(figure: Interval, digits: str) -> str:
    if figure.low == figure.high:
        return format(figure.value, digits)
    return f"{figure.value:{digits}} [{figure.low:{digits}}, {figure.high:{digits}}]"
