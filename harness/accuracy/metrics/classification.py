"""Top-1 and top-5 accuracy of a classifier."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.data.arrays import is_array_data
from harness.accuracy.metrics.base import open_samples, select_output, select_output_name
from harness.accuracy.metrics.intervals import encode_evidence
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import InputTypes
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins.api import Accuracy, Array, Infer

SHIFTED_SHARE = 0.5
"""Share of images and of classes with the same difference between answer and label that indicates wrong labels."""
MIN_ANSWERS = 10
"""Smallest number of answers for checks of the labels; fewer may differ from them systematically by chance."""


class Top1:
    """Share (0 to 1) of samples with their class as the highest output (top1) or among the five highest (top5).

    Args:
        data: Images, or arrays, with class labels (`harness.accuracy.data.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`; not for arrays.
        input_name: Set by the harness: name of the model's image input; not for arrays.
        input_shape: Set by the harness: static shape of that input, with three channels in axis 1 or 3 of four.
        output: Name of the output with the logits; not needed if there is one output.
        base: Set by the harness: folder that relative paths start from.
        inputs: Set by the harness: ONNX type in lower case and shape of each input.
        axes: Set by the harness: declared dimensions of each input of a model with dynamic axes.

    Raises:
        UserError: An argument is invalid, or there are no class labels.
    """

    metric = "top1"
    higher_is_better = True

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any] | None = None,
        input_name: str = "",
        input_shape: Sequence[int] = (),
        output: str | None = None,
        base: Path | None = None,
        inputs: InputTypes | None = None,
        axes: Mapping[str, Axes | None] | None = None,
    ) -> None:
        types = inputs or {input_name: ("float", tuple(input_shape))}
        self.images = open_samples(data, preprocess, types, base, axes)
        self.fingerprint = self.images.fingerprint
        self.labels = _sample_classes(self.images.data.labels, self.metric, is_array_data(data))
        self._output = output

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.images.data)

    @property
    def inferences(self) -> int:
        return self.images.inferences

    def check_outputs(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the output with the logits has a value for every class of the labels.

        Args:
            shapes: Shape of each output.

        Raises:
            UserError: The output has too few values, or `output` does not select one of several.
        """
        self._check_classes(shapes[select_output_name(shapes, self._output, f"{self.metric}: output")])

    def _check_classes(self, shape: Sequence[int]) -> None:
        outputs, highest = max(shape, default=0), max(self.labels, default=0)
        if highest < outputs:
            return
        place = self.labels.index(highest)
        shifted = highest == outputs and min(self.labels) > 0
        remedy = "they count from 1: take 1 off each" if shifted else "they are those of another model"
        if outputs == 1:
            remedy = "a single score needs a threshold, in a function for the evaluator metric"
        where = self.images.data.sample_name(place)
        raise UserError(
            f"{self.metric}: data.labels: class {highest} of {where}, but the model has {outputs} outputs, for the "
            f"classes 0 to {outputs - 1}: {remedy}"
        )

    def score(self, infer: Infer) -> Accuracy:
        """Return top1 and top5; `per_item` is 1 for a hit by `metric`, else 0. Of equal outputs the lower class leads.

        Raises:
            EvaluationFailed: Outputs are not finite or are no row of logits.
            UserError: A label is no class of the model, or most answers differ from their labels by the same number.
        """
        ranks, answers = [], []
        for (_, outputs), label in zip(self.images.run(infer), self.labels, strict=True):
            logits = self._select_logits(outputs)
            ranks.append(self._rank_of_label(logits, label))
            answers.append(int(logits.argmax()))
        self._check_label_shift(answers)
        hits = {f"top{k}": [float(rank < k) for rank in ranks] for k in (1, 5)}
        return Accuracy(
            metrics={name: float(np.mean(values)) for name, values in hits.items()},
            per_item=tuple(hits[self.metric]),
            evidence=encode_evidence("mean", {**hits, "classes": self.labels}),
            note=self._describe_single_answer(answers),
        )

    def _describe_single_answer(self, answers: list[int]) -> str:
        """Return a note if samples of several classes all get the same answer, as if the input had no effect."""
        stuck = len(answers) >= MIN_ANSWERS and len(set(answers)) == 1 < len(set(self.labels))
        return f"all {len(answers)} answers are class {answers[0]}" if stuck else ""

    def _select_logits(self, outputs: Mapping[str, Array]) -> Array:
        logits = select_output(outputs, self._output, f"{self.metric}: output")
        if logits.size != max(logits.shape, default=0):
            name = self._output or next(iter(outputs))
            raise EvaluationFailed(f"output {name!r} is no row of logits: its shape is {logits.shape}")
        return logits.reshape(-1)

    def _rank_of_label(self, logits: Array, label: int) -> int:
        """Return the number of classes that rank before the label."""
        if label >= len(logits):
            self._check_classes(logits.shape)  # which raises
        return int((logits > logits[label]).sum() + (logits[:label] == logits[label]).sum())

    def _check_label_shift(self, answers: list[int]) -> None:
        """Raise if the answers of most classes are the labels plus a constant, which indicates wrong labels.

        Quantization does not cause such a shift for most classes. A model that always answers with the second of two
        classes shifts the answers of the first class only.
        """
        if len(answers) < MIN_ANSWERS:
            return
        by_class: dict[int, list[int]] = defaultdict(list)
        for answer, label in zip(answers, self.labels, strict=True):
            by_class[label].append(answer - label)
        shift, count = Counter(chain(*by_class.values())).most_common(1)[0]
        shifted = [shifts.count(shift) > SHIFTED_SHARE * len(shifts) for shifts in by_class.values()]
        if (
            shift
            and count > SHIFTED_SHARE * len(answers)
            and sum(shifted) > SHIFTED_SHARE * len(shifted)
            and len(shifted) > 1
        ):
            raise UserError(
                f"{self.metric}: data.labels: {count} of {len(answers)} answers are the label {shift:+d}, so these "
                "count classes in another way than the model (from 1, or without its background class): correct them"
            )


def _sample_classes(labels: Array | None, metric: str, arrays: bool) -> list[int]:
    """Return the class of each sample.

    Raises:
        UserError: There are no labels, or they are not one whole number from 0 per sample.
    """
    if labels is None:
        images, rows = "a .txt file with lines 'FILENAME CLASS'", "an array of the .npz file, by its name, or a file"
        raise UserError(f"{metric}: data.labels: classes are needed, from {rows if arrays else images}")
    if labels.dtype.hasobject:
        raise UserError(
            f"{metric}: data.labels: one class a sample, but the rows differ in shape; score labels of every position "
            "by a function of your own (evaluator metric)"
        )
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1:
        raise UserError(
            f"{metric}: data.labels: one class a sample, but a row has the shape {flat.shape[1:]}; of one-hot rows "
            "give the argmax"
        )
    if flat.dtype.kind not in "fiub" or (flat < 0).any() or (flat != flat.astype(np.int64)).any():
        raise UserError(f"{metric}: data.labels: whole numbers from 0, but the first labels are {flat[:5].tolist()}")
    classes: list[int] = flat.astype(np.int64).tolist()
    return classes


class Top5(Top1):
    """Variant of `Top1` with the metric top5, the share of samples with their class among the five highest outputs."""

    metric = "top5"
