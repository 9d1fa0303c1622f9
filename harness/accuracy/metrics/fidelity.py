"""Fidelity: signal-to-noise ratio of an engine's outputs against the float model; needs no labels."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.data.arrays import is_array_data
from harness.accuracy.data.batching import InputBatches, make_batches
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.decode import DetectionDecoder, Detections, box_iou
from harness.accuracy.data.preprocess import parse_plugin_spec, preprocess_fingerprint
from harness.accuracy.metrics.base import SampleEvaluator, require_finite, select_output
from harness.accuracy.metrics.closeness import (
    MAX_SQNR_DB,
    WORST_PREFIX,
    ComparisonLayout,
    compare_outputs,
    open_reference,
    plan_comparison,
    write_reference,
)
from harness.accuracy.metrics.intervals import encode_evidence
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import InputTypes, random_feeds
from harness.base.text import format_names
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Infer
from harness.workers.inference import infer_all

FIGURES_VERSION = 2
"""Version of the definition of the figures: 2 is the worst output and part; 1 was the mean over outputs."""
LAYOUT = "layout"
RANDOM_BATCH_COUNT = 16
"""Default number of batches of random inputs."""
MAX_KEPT_BYTES = 100 * 2**20
"""Largest total size of inputs that are kept in memory; larger ones are made anew for every engine."""


class Fidelity:
    """SQNR (sqnr_db), cosine similarity (cosine) and KL divergence (kl) of the outputs, against the float model.

    The harness calls `prepare` once with the float model's engine; each engine is then scored on the same inputs.
    Figures are means over batches of the model's batch size; `per_item` has the SQNR of each batch. Each figure is that
    of the worst output, or of its worst part if slices differ in scale (see `closeness`); `note` names
    it. Constant outputs (`harness.accuracy.metrics.closeness.constant_outputs`) are left out and named in `note`.

    Args:
        reference: Set by the harness: file of the float model's outputs (inputs are never stored).
        inputs: Set by the harness: ONNX type in lower case and shape of each input.
        data: Images or arrays (`harness.accuracy.data.datasets`); None: random inputs.
        preprocess: Preprocessing of an image; name, or `{use: NAME, params: {...}}`.
        samples: Maximum number of samples, None: all; for random data the number of batches, None: 16.
        sqnr_only: Whether to compute only sqnr_db, which takes less time.
        base: Set by the harness: folder that relative paths start from.
        random_outputs: Set by the harness: outputs that change from run to run, which are not compared.
        axes: Set by the harness: declared dimensions of each input of a model with dynamic axes.

    Raises:
        UserError: An argument is invalid, or the data do not fit the inputs of the model.
    """

    metric = "sqnr_db"
    higher_is_better = True

    def __init__(
        self,
        reference: str | Path,
        inputs: Mapping[str, tuple[str, tuple[int, ...]]],
        data: Mapping[str, Any] | None = None,
        preprocess: str | Mapping[str, Any] | None = None,
        samples: int | None = None,
        base: Path | None = None,
        sqnr_only: bool = False,
        random_outputs: Sequence[str] = (),
        axes: Mapping[str, Axes | None] | None = None,
    ) -> None:
        if samples is not None and samples < 1:
            raise UserError(f"fidelity: samples: a whole number from 1, but got {samples}")
        self._reference = Path(reference)
        self._inputs = dict(inputs)
        self._samples = RANDOM_BATCH_COUNT if samples is None else samples
        self._sqnr_only, self._random = sqnr_only, frozenset(random_outputs)
        self._batches: InputBatches | None = None
        self._kept: list[dict[str, Array]] = []
        facts: list[Any] = [FIGURES_VERSION, samples if data is not None else self._samples, list(self._inputs.items())]
        if data is not None:
            opened = open_data(data, base, samples)
            self._batches = make_batches(opened, preprocess, self._inputs, axes=axes)
            facts += [opened.fingerprint, None if preprocess is None else preprocess_fingerprint(preprocess)]
        if self._random:
            facts.append(sorted(self._random))
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._samples if self._batches is None else len(self._batches)

    @property
    def inferences(self) -> int:
        return len(self)

    def feeds(self) -> Iterator[dict[str, Array]]:
        """Yield the inputs of each batch by name, the same at each call."""
        if not self._kept:
            made = random_feeds(self._inputs, self._samples) if self._batches is None else iter(self._batches)
            values = sum(math.prod(shape) for _, shape in self._inputs.values())
            if len(self) * 8 * values > MAX_KEPT_BYTES:  # a value has at most 8 bytes
                return made
            self._kept = list(made)
        return iter(self._kept)

    def prepare(self, infer: Infer) -> None:
        """Run the float model on the inputs and write its outputs to the reference file.

        Raises:
            EvaluationFailed: The float model itself gives NaN or infinite values.
        """
        samples = list(self._outputs(infer))
        arrays: dict[str, Array] = {
            f"{i}/{name}": array for i, sample in enumerate(samples) for name, array in sample.items()
        }
        arrays |= {LAYOUT: np.array(plan_comparison(samples).to_json())}
        write_reference(self._reference, arrays, self.fingerprint)

    def score(self, infer: Infer) -> Accuracy:
        """Return the distance of an engine's outputs from those of the float model.

        Raises:
            EvaluationFailed: There is no reference for these inputs, or outputs are not finite or do not match those of
                the float model by name and shape.
        """
        with open_reference(self._reference, self.fingerprint, "fidelity") as reference:
            layout = ComparisonLayout.from_json(str(reference[LAYOUT]))
            pairs = (
                ({k.removeprefix(f"{i}/"): reference[k] for k in reference.files if k.startswith(f"{i}/")}, outputs)
                for i, outputs in enumerate(self._outputs(infer))
            )
            found = compare_outputs(pairs, layout, sqnr_only=self._sqnr_only)
        metrics = found.metrics
        worst = f"{WORST_PREFIX}{found.worst}" if found.worst and metrics["sqnr_db"] < MAX_SQNR_DB else ""
        random = f"fidelity leaves out outputs that change from run to run: {format_names(sorted(self._random))}"
        return Accuracy(
            metrics=metrics,
            per_item=tuple(found.figures["sqnr_db"]),
            evidence=encode_evidence("mean", found.figures),
            note=". ".join(filter(None, (layout.note, random if self._random else "", worst))),
        )

    def _outputs(self, infer: Infer) -> Iterator[dict[str, Array]]:
        """Yield the outputs of each batch that do not change from run to run.

        Raises:
            EvaluationFailed: There are none, or one has NaN or infinite values.
        """
        for i, outputs in enumerate(infer_all(infer, self.feeds())):
            finite = require_finite(outputs, f"sample {i}")
            found = {name: array for name, array in finite.items() if name not in self._random}
            if outputs and not found:
                raise EvaluationFailed(
                    "every output depends on random operators, so none can be compared with the float model's; score "
                    "the model with a metric on labelled data, or export it without them (model.eval() removes a "
                    "Dropout)"
                )
            yield found


MIN_OVERLAP = 0.5
"""Smallest IoU of two boxes that match, as in AP50."""


class FloatAgreement(SampleEvaluator):
    """Share of samples with the float model's class; with a decoder, F1 score of the boxes against the float model's.

    Two boxes match if they have the same class and an IoU of at least 0.5. The share of an image is twice the number of
    matches over the number of boxes of both models. The harness calls `prepare` once with the float model's engine.
    `per_item` has one share (0 to 1) per sample, 1 for an image without boxes in both models, and the metric is their
    mean.

    Args:
        data: Images or arrays (`harness.accuracy.data.datasets`); labels are not used.
        reference: Set by the harness: file with the classes or boxes of the float model.
        inputs: Set by the harness: ONNX type in lower case and shape of each input.
        preprocess: Name, or `{use: NAME, params: {...}}`; not for arrays.
        decode: Decoder of a detector, by name or `{use: NAME, params: {...}}`; None: a classifier.
        output: Name of the output with the logits of a classifier; not needed if there is one output.
        min_score: Boxes with a lower score are ignored.
        base: Set by the harness: folder that relative paths start from.
        axes: Set by the harness: declared dimensions of each input of a model with dynamic axes.

    Raises:
        UserError: An argument is invalid.
    """

    metric = "agreement"

    def __init__(
        self,
        data: Mapping[str, Any],
        reference: str | Path,
        inputs: InputTypes,
        preprocess: str | Mapping[str, Any] | None = None,
        decode: str | Mapping[str, Any] | None = None,
        output: str | None = None,
        min_score: float = 0.3,
        base: Path | None = None,
        axes: Mapping[str, Axes | None] | None = None,
    ) -> None:
        super().__init__(data, preprocess, inputs, base, axes)
        self._reference, self._output, self._min_score = Path(reference), output, min_score
        self._decode: DetectionDecoder | None = None
        if decode is not None:
            use, chosen = parse_plugin_spec(decode)
            decoder = registry.check_params("decoder", use, chosen, supplied=("outputs", "prepared", "size"))
            self._decode = functools.partial(decoder, **chosen)
        if decode is not None and is_array_data(data):
            raise UserError("agreement: decode: boxes need images; give data: {use: images, images: FOLDER}")
        facts = [self.samples.fingerprint, decode, output, min_score]
        self.fingerprint = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def prepare(self, infer: Infer) -> None:
        """Write the classes or boxes of the float model to the reference file.

        Raises:
            EvaluationFailed: Outputs are not finite or are no row of classes, or the decoder refuses their shapes.
        """
        answers = list(self._answers(infer))
        arrays = {name: np.concatenate([getattr(a, name) for a in answers]) for name in Detections.__slots__}
        arrays |= {"counts": np.array([len(a.classes) for a in answers])}
        write_reference(self._reference, arrays, self.fingerprint)

    def score(self, infer: Infer) -> Accuracy:
        """Return the agreement of an engine with the float model.

        Raises:
            EvaluationFailed: There is no reference for these data, or outputs are not finite or are no row of classes.
        """
        with open_reference(self._reference, self.fingerprint, "agreement") as stored:
            ends = np.cumsum(stored["counts"])[:-1]
            parts = {name: np.split(stored[name], ends) for name in Detections.__slots__}
        expected = [Detections(**{name: parts[name][i] for name in parts}) for i in range(len(ends) + 1)]
        shares = tuple(matched_share(*pair) for pair in zip(expected, self._answers(infer), strict=True))
        return Accuracy(metrics={self.metric: float(np.mean(shares))}, per_item=shares)

    def _answers(self, infer: Infer) -> Iterator[Detections]:
        """Yield the boxes of each sample; the class of a classifier is a box without area."""
        for item, outputs in self.samples.run(infer):
            if self._decode is None or item is None:
                logits = select_output(outputs, self._output, "agreement: output")
                if np.squeeze(logits).ndim > 1:
                    raise EvaluationFailed(
                        f"agreement: an output of shape {'x'.join(map(str, logits.shape))} holds no classes; give a "
                        "decoder of boxes, or for maps and sequences the evaluator fidelity"
                    )
                yield Detections(boxes=np.zeros((1, 4)), scores=np.ones(1), classes=np.array([logits.argmax()]))
                continue
            found = self._decode(outputs, item, self.samples.size)
            kept = found.scores >= self._min_score
            yield Detections(boxes=found.boxes[kept], scores=found.scores[kept], classes=found.classes[kept])


def matched_share(expected: Detections, found: Detections) -> float:
    """Return the F1 score of detections: twice the matches over the number of all boxes; 1 if there are no boxes.

    In the order of their scores, found boxes are matched with the unmatched expected box of the same class that they
    overlap most. Boxes without area match each other if they have the same class.
    """
    count = len(expected.classes) + len(found.classes)
    if not count or not len(expected.classes):
        return float(not count)
    same = found.classes[:, None] == expected.classes[None]
    points = ~expected.boxes.any(axis=1)
    overlap = np.where(same, np.where(points, 1.0, box_iou(found.boxes, expected.boxes)), 0.0)
    matches = 0
    for row in overlap:
        best = int(row.argmax())
        if row[best] >= MIN_OVERLAP:
            matches += 1
            overlap[:, best] = 0.0
    return 2 * matches / count
