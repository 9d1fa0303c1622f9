"""Agreement with the float model on data without labels: share of equal classes or matching boxes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from harness.accuracy.data.decode import DetectionDecoder, Detections, box_iou
from harness.accuracy.data.preprocess import parse_plugin_spec
from harness.accuracy.metrics.base import PreparedArrays, PreparedImages, open_samples, select_output
from harness.accuracy.metrics.closeness import open_reference, write_reference
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import InputTypes
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins import registry
from harness.plugins.api import Accuracy, Infer

MIN_OVERLAP = 0.5
"""Smallest IoU of two boxes that match, as in AP50."""


class FloatAgreement:
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
    higher_is_better = True

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
        self.samples = open_samples(data, preprocess, inputs, base, axes)
        self._reference, self._output, self._min_score = Path(reference), output, min_score
        self._decode = None if decode is None else _open_decoder(decode)
        if decode is not None and isinstance(self.samples, PreparedArrays):
            raise UserError("agreement: decode: boxes need images; give data: {use: images, images: FOLDER}")
        facts = [self.samples.fingerprint, decode, output, min_score]
        self.fingerprint = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples.data)

    @property
    def inferences(self) -> int:
        return self.samples.inferences

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
        expected = self._read_reference()
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
            found = self._decode(outputs, item, cast(PreparedImages, self.samples).size)
            kept = found.scores >= self._min_score
            yield Detections(boxes=found.boxes[kept], scores=found.scores[kept], classes=found.classes[kept])

    def _read_reference(self) -> list[Detections]:
        with open_reference(self._reference, self.fingerprint, "agreement") as stored:
            ends = np.cumsum(stored["counts"])[:-1]
            parts = {name: np.split(stored[name], ends) for name in Detections.__slots__}
        return [Detections(**{name: parts[name][i] for name in parts}) for i in range(len(ends) + 1)]


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


def _open_decoder(decode: str | Mapping[str, Any]) -> DetectionDecoder:
    use, params = parse_plugin_spec(decode)
    decoder = registry.check_params("decoder", use, params, supplied=("outputs", "prepared", "size"))
    return cast(DetectionDecoder, functools.partial(decoder, **params))
