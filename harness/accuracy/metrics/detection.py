"""Mean average precision of a detector by the rules of COCO."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from harness.accuracy.data.decode import DetectionDecoder, Detections, format_output_shapes
from harness.accuracy.data.decode_boxes import suggest_decoder
from harness.accuracy.data.preprocess import Prepared, parse_plugin_spec, parse_preprocess
from harness.accuracy.metrics.average_precision import MAP_METRICS, map_facts, mixable_map_facts
from harness.accuracy.metrics.base import LabelledImages
from harness.accuracy.metrics.box_matching import CategoryMatches, interpolate_precision, match_boxes
from harness.accuracy.metrics.intervals import MAX_MIXABLE_IMAGES, NEGLIGIBLE_SCORE, encode_evidence
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Infer

MIN_BOX_AP50 = 0.2
"""AP50 without regard to classes above which a model is considered to find the boxes."""
MAX_CLASS_AP50_SHARE = 0.1
"""Ratio of the AP50 with classes to that without below which the classes are considered to be in another order."""


class CocoMAP(LabelledImages):
    """mAP (0 to 1) over IoU 0.50 to 0.95 on images with boxes; also at 0.50 and 0.75, and by size of the boxes.

    The metric is that of pycocotools (Lin et al. 2014, arXiv:1405.0312). Class k of the model is the k-th name of
    `data.classes`, or without them the k-th of the labels' category ids in ascending order.

    Args:
        data: Images with COCO labels (`harness.accuracy.data.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`.
        decode: Decoder, by name or `{use: NAME, params: {...}}`.
        input_name: Set by the harness, as are `input_shape` and `base`; see `LabelledImages`.

    Raises:
        UserError: An argument is invalid, or the labels have no box.
    """

    metric = "map"

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any],
        decode: str | Mapping[str, Any],
        input_name: str,
        input_shape: Sequence[int],
        base: Path | None = None,
    ) -> None:
        use, params = parse_plugin_spec(decode)
        decoder = registry.check_params("decoder", use, params, supplied=("outputs", "prepared", "size"))
        self._decoder, self._decode = use, cast(DetectionDecoder, functools.partial(decoder, **params))
        self._own = not decoder.__module__.startswith("harness.")
        super().__init__(data, preprocess, input_name, input_shape, base)
        labels = self.images.data.coco
        if labels is None:
            raise UserError("coco_map: data.labels: boxes are needed, from a .json file in COCO's form")
        if not labels["annotations"]:
            raise UserError(f"coco_map: data.labels: {data['labels']}: there is no box on any of the images")
        self._labels = labels
        self._preprocess = parse_preprocess(preprocess)[0]
        self._fitting: str | None = None

    def check_outputs(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the decoder accepts the outputs of one image; custom decoders are not checked.

        Args:
            shapes: Shape of each output. The decoder receives zeros, which a custom one might not support.

        Raises:
            EvaluationFailed: The decoder refuses the shapes.
        """
        if self._own:
            return
        size = self.images.size
        blank = Prepared(tensor=np.zeros((3, *size), np.float32), scale=1.0, offset=(0.0, 0.0), original=size)
        self._decode_image({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, blank)

    def prepare(self, infer: Infer) -> None:
        """Check that the classes of the float model are in the order of the labels.

        Raises:
            EvaluationFailed: Outputs are not finite, or the decoder refuses their shapes.
            UserError: The boxes match those of the labels, but most classes do not.
        """
        found = self._detect(infer)
        boxes = _coco_figures(match_boxes(self._labels, found, by_class=False)).get("map50", 0.0)
        classes = coco_metrics(self._labels, found).get("map50", 0.0)
        if boxes > MIN_BOX_AP50 and classes < MAX_CLASS_AP50_SHARE * boxes:
            raise UserError(
                f"coco_map: the float model finds the boxes (AP50 {boxes:.3f} with classes left aside) but not their "
                f"classes (AP50 {classes:.3f}): the labels' categories are in another order than the model's classes; "
                "list these by name in data.classes"
            )

    def score(self, infer: Infer) -> Accuracy:
        """Return the metrics of `MAP_METRICS` by name, without those of a size (small, medium, large) that no box has.

        Raises:
            EvaluationFailed: Outputs are not finite, or the decoder refuses their shapes.
            UserError: A class of the model is beyond the categories of the labels.
        """
        matches = match_boxes(self._labels, self._detect(infer))
        mixed = len(self) <= MAX_MIXABLE_IMAGES
        figures = _coco_figures(matches)
        note = self._suggest_layout() if figures.get(self.metric, 1.0) < NEGLIGIBLE_SCORE else ""
        return Accuracy(
            metrics=figures,
            evidence=encode_evidence("map", map_facts(matches, len(self))),
            mixable=encode_evidence("map", mixable_map_facts(matches, len(self))) if mixed else "",
            note=note,
        )

    def _suggest_layout(self) -> str:
        """Return a hint at the decoder and preprocessing that fit the outputs' shapes; "" if they are used already."""
        used = {"decode": self._decoder, "preprocess": self._preprocess}
        others = [f"{key}: {self._fitting}" for key, name in used.items() if name != self._fitting]
        return f"detectors with outputs of these shapes want {' and '.join(others)}" if self._fitting and others else ""

    def _detect(self, infer: Infer) -> list[Detections]:
        return [self._decode_image(outputs, item) for item, outputs in self.images.run(infer)]

    def _decode_image(self, outputs: Mapping[str, Array], item: Prepared) -> Detections:
        fitting = suggest_decoder({name: array.shape for name, array in outputs.items()}, self.images.size)
        self._fitting = fitting
        advice = f"; decode: {fitting} fits these shapes" if fitting not in (None, self._decoder) else ""
        try:
            found = self._decode(outputs, item, self.images.size)
        except EvaluationFailed as error:
            raise EvaluationFailed(f"decode: {error}{advice}") from error
        highest, known = int(found.classes.max(initial=-1)), len(self._labels["categories"])
        if highest >= known and advice:
            raise UserError(
                f"decode: by decoder {self._decoder!r} the model finds class {highest}, but the labels have {known} "
                f"categories; its outputs are {format_output_shapes(outputs)}{advice}"
            )
        return found


def coco_metrics(labels: Mapping[str, Any], found: Sequence[Detections]) -> dict[str, float]:
    """Return COCO's metrics (0 to 1) of detections by name, without those of a size class that has no boxes.

    Args:
        labels: `pycocotools.coco.COCO.dataset`; not changed.
        found: Detections of each image, in the order of the labels.

    Raises:
        UserError: A class index is beyond the categories of the labels.
    """
    return _coco_figures(match_boxes(labels, found))


def _coco_figures(matches: Sequence[CategoryMatches]) -> dict[str, float]:
    """Return COCO's metrics by name, without those of a size class that has no boxes."""
    precision = {area: interpolate_precision(matches, area) for area, _ in MAP_METRICS.values()}
    return {
        name: float(np.mean(precision[area][list(levels)].ravel()))
        for name, (area, levels) in MAP_METRICS.items()
        if precision[area].size
    }
