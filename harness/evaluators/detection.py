"""Mean average precision of a detector, as COCO counts it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from harness import registry
from harness.api import Accuracy, Infer
from harness.errors import UserError
from harness.evaluators.decode import Decode, Detections
from harness.evaluators.inputs import PreparedImages
from harness.evaluators.preprocess import open_plugin

__all__ = ["CocoMAP", "coco_metrics"]

METRICS = ("map", "map50", "map75", "maps", "mapm", "mapl")  # the order of COCOeval.stats


class CocoMAP:
    """mAP over IoU 0.50 to 0.95 on images with boxes; also at 0.50 and 0.75, and for small, medium and large boxes.

    Lin et al. 2014, arXiv:1405.0312, through pycocotools. The model's class k is the k-th of the
    labels' category ids in ascending order, whatever order the file lists them in.

    Args:
        data: Images with COCO labels (`harness.evaluators.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`.
        decode: Decoder, by name or `{use: NAME, params: {...}}`.
        input_name: Set by the harness: name of the model's image input.
        input_shape: Set by the harness: its static shape, batch x 3 x height x width.
        base: Set by the harness: folder that relative paths start from.

    Raises:
        UserError: Anything wrong with these, or labels without a single box.
    """

    metric = "map"
    higher_is_better = True

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any],
        decode: str | Mapping[str, Any],
        input_name: str,
        input_shape: Sequence[int],
        base: Path | None = None,
    ) -> None:
        use, params = open_plugin(decode)
        decoder = registry.check_params("decoder", use, params, given=("outputs", "prepared", "size"))
        self._decode: Decode = functools.partial(decoder, **params)
        self._images = PreparedImages(data, preprocess, input_name, input_shape, base)
        labels = self._images.data.coco
        if labels is None:
            raise UserError("coco_map: data.labels: boxes are needed, from a .json file in COCO's form")
        if not labels["annotations"]:
            raise UserError("coco_map: data.labels: there is no box on any of the images")
        self._labels = labels
        self.fingerprint = self._images.fingerprint

    def __len__(self) -> int:
        """Number of images."""
        return len(self._images.data)

    def score(self, infer: Infer) -> Accuracy:
        """See `harness.api.Evaluator`; a size class without boxes has no figure.

        Raises:
            EvaluationFailed: Outputs that are not finite, or of a shape that the decoder does not know.
        """
        found = [self._decode(outputs, item, self._images.size) for item, outputs in self._images.run(infer)]
        return Accuracy(metrics=coco_metrics(self._labels, found))


def coco_metrics(labels: Mapping[str, Any], found: Sequence[Detections]) -> dict[str, float]:
    """COCO's figures for detections on the images of `labels`, in their order.

    Args:
        labels: `pycocotools.coco.COCO.dataset`; not changed.
        found: One entry an image.

    Raises:
        UserError: A class index beyond the categories of the labels.
    """
    categories = sorted(category["id"] for category in labels["categories"])
    results: list[dict[str, Any]] = []
    for image, detections in zip(labels["images"], found, strict=True):
        highest = int(detections.classes.max(initial=-1))
        if highest >= len(categories):
            raise UserError(f"the model finds class {highest}, but the labels have {len(categories)} categories")
        for box, score, index in zip(detections.boxes, detections.scores, detections.classes, strict=True):
            left, top, right, bottom = box.tolist()
            results.append(
                {
                    "id": len(results) + 1,
                    "image_id": image["id"],
                    "category_id": categories[index],
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                    "score": float(score),
                }
            )
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth, answers = (_indexed({**labels, "annotations": a}) for a in (labels["annotations"], results))
        evaluation = COCOeval(truth, answers, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # pycocotools says -1 where there is nothing to find
    return {name: float(value) for name, value in zip(METRICS, evaluation.stats[:6], strict=True) if value >= 0}


def _indexed(dataset: Mapping[str, Any]) -> Any:
    """A COCO object; `COCO.loadRes` would do for results, but fails when there are none."""
    coco = COCO()
    # COCOeval adds keys to the annotations
    coco.dataset = {**dataset, "annotations": [copy.copy(a) for a in dataset["annotations"]]}
    coco.createIndex()
    return coco
