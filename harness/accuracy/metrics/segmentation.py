"""Mean intersection over union of a segmentation model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.accuracy.data.masks import VOID_CLASS, Mask
from harness.accuracy.data.preprocess import Prepared, Size
from harness.accuracy.metrics.base import LabelledImages, select_output
from harness.accuracy.metrics.intervals import MAX_MIXABLE_IMAGES, encode_evidence
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins.api import Accuracy, Array, Infer


class MeanIoU(LabelledImages):
    """Mean over classes of their pixels' intersection over union (0 to 1), over all images at their original size.

    Everingham et al. 2015, "The PASCAL Visual Object Classes challenge: a retrospective", section 2.3. The class of a
    pixel is that of the nearest pixel of the output. Classes that occur in no mask are left out of the mean.

    Args:
        data: Images with masks (`harness.accuracy.data.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`; it must keep the whole image, for instance "tf_imagenet" with
            `resize: stretch`.
        input_name: Set by the harness, as are `input_shape` and `base`; see `LabelledImages`.
        output: Name of the output with the logits, 1 x classes x height x width or 1 x height x width x classes, or the
            class of each pixel, 1 x height x width or 1 x 1 x height x width; not needed if there is one output.

    Raises:
        UserError: An argument is invalid, or the data have no masks.
    """

    metric = "miou"

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any],
        input_name: str,
        input_shape: Sequence[int],
        output: str | None = None,
        base: Path | None = None,
    ) -> None:
        super().__init__(data, preprocess, input_name, input_shape, base)
        if self.images.data.mask is None:
            raise UserError("miou: data.masks: masks are needed, a folder of PNG files")
        self._mask = self.images.data.mask
        self._output = output

    def score(self, infer: Infer) -> Accuracy:
        """Return the mean intersection over union, with the pixel counts of each image as evidence.

        Raises:
            EvaluationFailed: Outputs are not finite or are no map of classes.
            UserError: No pixel of the masks has a class; a mask cannot be read, has another size than its image, or a
                class that the model lacks; or the preprocessing cuts off a part of an image.
        """
        areas = []
        for i, (item, outputs) in enumerate(self.images.run(infer)):
            found, classes = self._pixel_classes(outputs)
            mask = self._mask(i)
            if classes is not None and mask.max() >= classes:
                raise UserError(
                    f"miou: data.masks: class {mask.max()} on {self.images.data.sample_name(i)!r}, "
                    f"but the model has {classes} outputs, for the classes 0 to {classes - 1}: correct the masks"
                )
            areas.append(_class_areas(_map_to_image(found, item, self.images.size), mask))
        evidence = encode_evidence("miou", {"areas": areas})
        mixable = evidence if len(areas) <= MAX_MIXABLE_IMAGES else ""
        return Accuracy(metrics={"miou": _mean_iou(areas)}, evidence=evidence, mixable=mixable)

    def _pixel_classes(self, outputs: Mapping[str, Array]) -> tuple[npt.NDArray[np.int32], int | None]:
        """Return the class of each pixel of the output, and the number of classes if it is known."""
        values = select_output(outputs, self._output, "miou: output")
        if values.ndim == 4 and self._are_classes_last(values.shape):
            values = values.transpose(0, 3, 1, 2)
        if values.ndim == 4 and len(values) == 1 and values.shape[1] > 1:
            return values[0].argmax(axis=0).astype(np.int32), values.shape[1]
        if values.ndim < 3 or values.size != values.shape[-1] * values.shape[-2]:
            raise EvaluationFailed(
                "a map of logits (1 x classes x height x width) or of classes is needed, but the output's shape is "
                f"{values.shape}"
            )
        return np.rint(values.reshape(values.shape[-2:])).astype(np.int32), None

    def _are_classes_last(self, shape: Sequence[int]) -> bool:
        """Return whether axes 1 and 2 have the aspect ratio of the input, but axes 2 and 3 do not."""
        height, width = self.images.size
        return shape[1] * width == shape[2] * height and shape[2] * width != shape[3] * height


def _map_to_image(found: npt.NDArray[np.int32], item: Prepared, size: Size) -> Mask:
    """Return the class of each pixel of the image, from a map that covers the model's input.

    Raises:
        UserError: The preprocessing cut off a part of the image.
    """
    height, width = item.original
    across, down = found.shape[1] / size[1], found.shape[0] / size[0]
    left, top = item.offset[0] * across, item.offset[1] * down
    right, bottom = left + width * item.scales[0] * across, top + height * item.scales[1] * down
    if min(left, top) < -1 or right > found.shape[1] + 1 or bottom > found.shape[0] + 1:
        raise UserError(
            "miou: preprocess cuts off a part of the image, so the model cannot answer for all of its pixels; "
            "use one that keeps the whole image, 'tf_imagenet' with {resize: stretch} for instance"
        )
    box = (max(left, 0), max(top, 0), min(right, found.shape[1]), min(bottom, found.shape[0]))
    resized = Image.fromarray(found).resize((width, height), Image.Resampling.NEAREST, box=box)
    return np.asarray(resized).astype(np.int64)


def _class_areas(found: Mask, mask: Mask) -> list[int]:
    """Return four numbers for each class of an image: the class, and its pixels found correctly, labelled and found."""
    known = mask != VOID_CLASS
    found, mask = found[known], mask[known]
    count = int(max(found.max(initial=0), mask.max(initial=0))) + 1
    right, labelled, answered = (np.bincount(part, minlength=count) for part in (mask[found == mask], mask, found))
    return [
        int(value) for k in np.flatnonzero(labelled + answered) for value in (k, right[k], labelled[k], answered[k])
    ]


def _mean_iou(areas: list[list[int]]) -> float:
    """Return the mean over the classes that occur in the labels.

    Raises:
        UserError: There is no labelled pixel.
    """
    totals: dict[int, npt.NDArray[np.int64]] = {}
    for row in areas:
        for k, *counts in zip(*(row[place::4] for place in range(4)), strict=True):
            totals[k] = totals.get(k, np.zeros(3, np.int64)) + np.array(counts)
    shares = [right / (labelled + found - right) for right, labelled, found in totals.values() if labelled]
    if not shares:
        raise UserError("miou: data.masks: no pixel of any mask has a class (255 is none); give masks of class indices")
    return float(np.mean(shares))
