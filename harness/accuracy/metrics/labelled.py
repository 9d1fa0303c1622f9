"""Metrics on labels: top-1 and top-5 accuracy, mean average precision, mean IoU, and functions of the user."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from harness.accuracy.data.arrays import is_array_data
from harness.accuracy.data.datasets import ImageDataset
from harness.accuracy.data.decode import DetectionDecoder, Detections, format_output_shapes, suggest_decoder
from harness.accuracy.data.labels import VOID_CLASS, Mask
from harness.accuracy.data.preprocess import Prepared, Size, parse_plugin_spec, parse_preprocess
from harness.accuracy.metrics.average_precision import (
    map_facts,
    map_figures,
    match_boxes,
    mixable_map_facts,
)
from harness.accuracy.metrics.base import SampleEvaluator, select_output, select_output_name
from harness.accuracy.metrics.intervals import MAX_MIXABLE_IMAGES, NEGLIGIBLE_SCORE, encode_evidence
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import InputTypes
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Infer

SHIFTED_SHARE = 0.5
"""Share of images and of classes with the same difference between answer and label that indicates wrong labels."""
MIN_ANSWERS = 10
"""Smallest number of answers for checks of the labels; fewer may differ from them systematically by chance."""


class Top1(SampleEvaluator):
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
        super().__init__(data, preprocess, inputs or {input_name: ("float", tuple(input_shape))}, base, axes)
        labels, where = self.samples.data.labels, f"{self.metric}: data.labels"
        if labels is None:
            source = "a .txt file with lines 'FILENAME CLASS'"
            if is_array_data(data):
                source = "an array of the .npz file, by its name, or a file"
            raise UserError(f"{where}: classes are needed, from {source}")
        if labels.dtype.hasobject:
            raise UserError(
                f"{where}: one class a sample, but the rows differ in shape; score labels of every position by a "
                "function of your own (evaluator metric)"
            )
        flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
        if flat.ndim != 1:
            shape = flat.shape[1:]
            raise UserError(
                f"{where}: one class a sample, but a row has the shape {shape}; of one-hot rows give the argmax"
            )
        if flat.dtype.kind not in "fiub" or (flat < 0).any() or (flat != flat.astype(np.int64)).any():
            raise UserError(f"{where}: whole numbers from 0, but the first labels are {flat[:5].tolist()}")
        self.labels: list[int] = flat.astype(np.int64).tolist()
        self._output = output

    def check_outputs(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the output with the logits has a value for every class of the labels.

        Args:
            shapes: Shape of each output.

        Raises:
            UserError: The output has too few values, or `output` does not select one of several.
        """
        shape = shapes[select_output_name(shapes, self._output, f"{self.metric}: output")]
        outputs, highest = max(shape, default=0), max(self.labels, default=0)
        if highest < outputs:
            return
        place = self.labels.index(highest)
        shifted = highest == outputs and min(self.labels) > 0
        remedy = "they count from 1: take 1 off each" if shifted else "they are those of another model"
        if outputs == 1:
            remedy = "a single score needs a threshold, in a function for the evaluator metric"
        where = self.samples.data.sample_name(place)
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
        for (_, outputs), label in zip(self.samples.run(infer), self.labels, strict=True):
            name = select_output_name(outputs, self._output, f"{self.metric}: output")
            logits = outputs[name].reshape(-1)
            if len(logits) != max(outputs[name].shape, default=0):
                raise EvaluationFailed(f"output {name!r} is no row of logits: its shape is {outputs[name].shape}")
            if label >= len(logits):
                self.check_outputs({name: logits.shape})  # which raises
            ranks.append(int((logits > logits[label]).sum() + (logits[:label] == logits[label]).sum()))
            answers.append(int(logits.argmax()))
        self._check_label_shift(answers)
        hits = {f"top{k}": [float(rank < k) for rank in ranks] for k in (1, 5)}
        # One answer for samples of several classes: as if the input had no effect.
        is_stuck = len(answers) >= MIN_ANSWERS and len(set(answers)) == 1 < len(set(self.labels))
        return Accuracy(
            metrics={name: float(np.mean(values)) for name, values in hits.items()},
            per_item=tuple(hits[self.metric]),
            evidence=encode_evidence("mean", {**hits, "classes": self.labels}),
            note=f"all {len(answers)} answers are class {answers[0]}" if is_stuck else "",
        )

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


class LabelledImages(SampleEvaluator):
    """Base class of evaluators on images.

    Args:
        data: Images (`harness.accuracy.data.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`.
        input_name: Set by the harness: name of the model's image input.
        input_shape: Set by the harness: static shape of that input, with three channels in axis 1 or 3 of four.
        base: Set by the harness: folder that relative paths start from.

    Raises:
        UserError: An argument is invalid.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any],
        input_name: str,
        input_shape: Sequence[int],
        base: Path | None = None,
    ) -> None:
        if is_array_data(data):
            raise UserError(
                f"data.use: images are needed here ('images' or 'shapes'), but got {data['use']!r}: boxes and masks "
                "are labels of images. Arrays with a label each are for top1, top5, metric and loss"
            )
        super().__init__(data, preprocess, {input_name: ("float", tuple(input_shape))}, base)
        assert isinstance(self.samples.data, ImageDataset)
        self.images = self.samples.data


class Top5(Top1):
    """Variant of `Top1` with the metric top5, the share of samples with their class among the five highest outputs."""

    metric = "top5"


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
        if self.images.mask is None:
            raise UserError("miou: data.masks: masks are needed, a folder of PNG files")
        self._mask = self.images.mask
        self._output = output

    def score(self, infer: Infer) -> Accuracy:
        """Return the mean intersection over union, with the pixel counts of each image as evidence.

        Raises:
            EvaluationFailed: Outputs are not finite or are no map of classes.
            UserError: No pixel of the masks has a class; a mask cannot be read, has another size than its image, or a
                class that the model lacks; or the preprocessing cuts off a part of an image.
        """
        areas = []
        for i, (item, outputs) in enumerate(self.samples.run(infer)):
            found, classes = self._pixel_classes(outputs)
            mask = self._mask(i)
            if classes is not None and mask.max() >= classes:
                raise UserError(
                    f"miou: data.masks: class {mask.max()} on {self.images.sample_name(i)!r}, but the model has "
                    f"{classes} outputs, for the classes 0 to {classes - 1}: correct the masks"
                )
            known = mask != VOID_CLASS
            found, mask = _map_to_image(found, cast(Prepared, item), self.samples.size)[known], mask[known]
            count = int(max(found.max(initial=0), mask.max(initial=0))) + 1
            sides = mask[found == mask], mask, found
            right, labelled, answered = (np.bincount(part, minlength=count) for part in sides)
            present = np.flatnonzero(labelled + answered)
            columns = np.stack([present, right[present], labelled[present], answered[present]], axis=1)
            areas.append(columns.ravel().tolist())
        totals: dict[int, npt.NDArray[np.int64]] = {}
        for row in areas:
            for k, *counts in zip(*(row[place::4] for place in range(4)), strict=True):
                totals[k] = totals.get(k, np.zeros(3, np.int64)) + np.array(counts)
        shares = [right / (labelled + answered - right) for right, labelled, answered in totals.values() if labelled]
        if not shares:
            raise UserError(
                "miou: data.masks: no pixel of any mask has a class (255 is none); give masks of class indices"
            )
        evidence = encode_evidence("miou", {"areas": areas})
        mixable = evidence if len(areas) <= MAX_MIXABLE_IMAGES else ""
        return Accuracy(metrics={"miou": float(np.mean(shares))}, evidence=evidence, mixable=mixable)

    def _pixel_classes(self, outputs: Mapping[str, Array]) -> tuple[npt.NDArray[np.int32], int | None]:
        """Return the class of each pixel of the output, and the number of classes if it is known."""
        values = select_output(outputs, self._output, "miou: output")
        (height, width), shape = self.samples.size, values.shape
        # The classes are last if axes 1 and 2 have the aspect ratio of the input, but axes 2 and 3 do not.
        if len(shape) == 4 and shape[1] * width == shape[2] * height and shape[2] * width != shape[3] * height:
            values = values.transpose(0, 3, 1, 2)
        if values.ndim == 4 and len(values) == 1 and values.shape[1] > 1:
            return values[0].argmax(axis=0).astype(np.int32), values.shape[1]
        if values.ndim < 3 or values.size != values.shape[-1] * values.shape[-2]:
            raise EvaluationFailed(
                "a map of logits (1 x classes x height x width) or of classes is needed, but the output's shape is "
                f"{values.shape}"
            )
        return np.rint(values.reshape(values.shape[-2:])).astype(np.int32), None


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
        labels = self.images.coco
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
        size = self.samples.size
        blank = Prepared(tensor=np.zeros((3, *size), np.float32), scale=1.0, offset=(0.0, 0.0), original=size)
        self._decode_image({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, blank)

    def prepare(self, infer: Infer) -> None:
        """Check that the classes of the float model are in the order of the labels.

        Raises:
            EvaluationFailed: Outputs are not finite, or the decoder refuses their shapes.
            UserError: The boxes match those of the labels, but most classes do not.
        """
        found = self._detect(infer)
        boxes, classes = (
            map_figures(match_boxes(self._labels, found, by_class=by_class)).get("map50", 0.0)
            for by_class in (False, True)
        )
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
        figures, note, fitting = map_figures(matches), "", self._fitting
        if fitting and figures.get(self.metric, 1.0) < NEGLIGIBLE_SCORE:
            used = {"decode": self._decoder, "preprocess": self._preprocess}
            others = [f"{key}: {fitting}" for key, name in used.items() if name != fitting]
            note = f"detectors with outputs of these shapes want {' and '.join(others)}" if others else ""
        is_mixable = len(self) <= MAX_MIXABLE_IMAGES
        return Accuracy(
            metrics=figures,
            evidence=encode_evidence("map", map_facts(matches, len(self))),
            mixable=encode_evidence("map", mixable_map_facts(matches, len(self))) if is_mixable else "",
            note=note,
        )

    def _detect(self, infer: Infer) -> list[Detections]:
        return [self._decode_image(outputs, item) for item, outputs in self.samples.run(infer) if item]

    def _decode_image(self, outputs: Mapping[str, Array], item: Prepared) -> Detections:
        fitting = suggest_decoder({name: array.shape for name, array in outputs.items()}, self.samples.size)
        self._fitting = fitting
        advice = f"; decode: {fitting} fits these shapes" if fitting not in (None, self._decoder) else ""
        try:
            found = self._decode(outputs, item, self.samples.size)
        except EvaluationFailed as error:
            raise EvaluationFailed(f"decode: {error}{advice}") from error
        highest, known = int(found.classes.max(initial=-1)), len(self._labels["categories"])
        if highest >= known and advice:
            raise UserError(
                f"decode: by decoder {self._decoder!r} the model finds class {highest}, but the labels have {known} "
                f"categories; its outputs are {format_output_shapes(outputs)}{advice}"
            )
        return found


class Metric(SampleEvaluator):
    """Metric that a Python function `(outputs, labels)` computes; higher is better (`Loss`: lower is better).

    The function receives the outputs of all samples, joined along the first axis, and their labels, one row per sample.
    Outputs, or labels, of different shapes are a list with an array for each sample.
    It returns one number, or one number per sample: then the metric is their mean and has a confidence interval.

    Args:
        data: Arrays, or images with class labels (`harness.accuracy.data.datasets`).
        function: `module:function`.
        inputs: Set by the harness: ONNX type in lower case and shape of each input.
        preprocess: Name, or `{use: NAME, params: {...}}`; not for arrays.
        output: Name of the output that the function receives. None: the only output, or a mapping of all by name.
        base: Set by the harness: folder that relative paths start from.
        axes: Set by the harness: declared dimensions of each input of a model with dynamic axes.

    Raises:
        UserError: An argument is invalid, or the data have no labels.
    """

    metric = "metric"

    def __init__(
        self,
        data: Mapping[str, Any],
        function: str,
        inputs: InputTypes,
        preprocess: str | Mapping[str, Any] | None = None,
        output: str | None = None,
        base: Path | None = None,
        axes: Mapping[str, Axes | None] | None = None,
    ) -> None:
        self._name, self._output = function, output
        if ":" not in function:
            raise UserError(f"{self.metric}: function: a name of the form module:function, but got {function!r}")
        self._function: Any = registry.load_plugin("function", function)
        super().__init__(data, preprocess, inputs, base, axes)
        if self.samples.data.labels is None:
            raise UserError(f"{self.metric}: data.labels: labels are needed, one row for each sample")
        self.fingerprint += f" {function} {source_digest(self._function)}"

    def score(self, infer: Infer) -> Accuracy:
        """Return the result of the function for the outputs of an engine.

        Raises:
            EvaluationFailed: Outputs are not finite, or the function raises or returns an invalid value.
        """
        rows = [outputs for _, outputs in self.samples.run(infer)]
        joined: Any = {}
        for name in rows[0]:
            parts = [np.atleast_1d(row[name]) for row in rows]
            # Outputs whose other axes differ stay a list.
            joined[name] = np.concatenate(parts) if len({part.shape[1:] for part in parts}) == 1 else parts
        if self._output is not None or len(joined) == 1:
            joined = select_output(joined, self._output, f"{self.metric}: output")
        labels: Any = self.samples.data.labels
        labels = list(labels) if labels.dtype.hasobject else labels
        try:
            found = registry.call_plugin(self._name, lambda: np.asarray(self._function(joined, labels), np.float64))
        except UserError as error:
            raise EvaluationFailed(str(error)) from error
        if found.shape not in ((), (len(self),)) or not np.isfinite(found).all():
            what = f"an array of the shape {found.shape}" if found.shape else found
            wanted = f"one finite number, or one for each of {len(self)} samples"
            raise EvaluationFailed(f"{self._name}: {wanted}, but it returned {what}")
        per_item: tuple[float, ...] = tuple(found.tolist()) if found.shape else ()
        return Accuracy(metrics={self.metric: float(found.mean())}, per_item=per_item)


class Loss(Metric):
    """Variant of `Metric` that is better if lower."""

    metric = "loss"
    higher_is_better = False


def source_digest(function: Any) -> str:
    """Return the SHA-256 of a function's source file, in a notebook of the function's source; "" without source."""
    try:
        file = Path(inspect.getfile(function))
        source = file.read_bytes() if file.exists() else inspect.getsource(function).encode()
    except (TypeError, OSError):
        return ""
    return hashlib.sha256(source).hexdigest()
