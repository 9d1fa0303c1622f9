"""Base of the evaluators: prepared images, runs of the engine, and construction by the harness."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.data.arrays import SUBSET_KEYS, canonical_json, is_array_data
from harness.accuracy.data.batching import image_input, image_preparer, make_batch, make_batches
from harness.accuracy.data.datasets import ImageDataset, open_data
from harness.accuracy.data.preprocess import Prepared, preprocess_fingerprint
from harness.accuracy.metrics.intervals import NEGLIGIBLE_SCORE
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import InputTypes
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Infer
from harness.workers.inference import infer_all

MAX_CACHE_BYTES = 600 * 2**20
"""Largest size of the prepared images that an evaluator keeps, because it scores hundreds of engines on them."""


def evaluator_params(use: str, params: Mapping[str, Any], supplied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an evaluator: those of the experiment, and those that the harness supplies.

    An evaluator receives the parameters of `supplied` that its constructor names. The harness offers `input_name` and
    `input_shape` (of the image input), `inputs` (ONNX type in lower case and shape of every input), `axes` (declared
    dimensions of every input of a model with dynamic axes: a size, a symbol or None), `reference` (path
    for the outputs of the float model, one per evaluator), `base` (folder of the experiment) and, for a random model,
    `random_outputs` (names of the outputs that change from run to run).

    Args:
        use: Name or `package.module:Class`.
        params: Parameters of the experiment.
        supplied: Parameters of the harness; an experiment cannot set these names.

    Raises:
        UserError: Unknown or missing parameters.
    """
    wanted = inspect.signature(registry.load_plugin("evaluator", use)).parameters
    if "labels" in params and "labels" not in wanted and "data" in wanted:
        raise UserError(
            f"evaluator {use!r}: labels belong to the data, for instance data: {{use: npz, path: data.npz, labels: y}}"
        )
    given = {name: value for name, value in supplied.items() if name in wanted}
    registry.check_params("evaluator", use, params, given)
    return {**params, **given}


def require_finite(outputs: Mapping[str, Array], item: str) -> Mapping[str, Array]:
    """Return the outputs, or raise if one has NaN or infinite values.

    Args:
        outputs: Outputs of an engine by name.
        item: Name of the input for the message.

    Raises:
        EvaluationFailed: An output has NaN or infinite values.
    """
    for name, array in outputs.items():
        if array.dtype.kind not in "biuUSO" and not np.isfinite(array).all():
            raise EvaluationFailed(f"output {name!r} has NaN or infinite values on {item}")
    return outputs


class SampleSet:
    """Labelled data as inputs of one model: arrays, or images with a preprocessing.

    An image is prepared once and kept while there is room.

    Args:
        data: A mapping for `harness.accuracy.data.datasets.open_data`.
        preprocess: Name, or `{use: NAME, params: {...}}`; not for arrays.
        inputs: Element type and shape of each input of the model.
        base: Folder that relative paths start from; None: the working folder.
        axes: Declared dimensions of each input, see `harness.accuracy.data.batching.make_batches`.

    Attributes:
        size: Height and width of the image input.

    Raises:
        UserError: An argument is invalid, or the data do not fit the inputs.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any] | None,
        inputs: InputTypes,
        base: Path | None = None,
        axes: Mapping[str, Axes | None] | None = None,
    ) -> None:
        if not isinstance(data, Mapping):
            raise UserError(f"data: a mapping such as {{use: npz, path: data.npz, labels: y}}, but got {data!r}")
        if is_array_data(data):
            preprocess = None
        elif preprocess is None:
            raise UserError("data: images need 'preprocess', the name of what turns an image into an input")
        self._input_name = "" if preprocess is None else image_input(inputs)
        self.data, self.size = open_data(data, base), (0, 0)
        self.fingerprint = self.data.fingerprint
        if preprocess is None:
            self._arrays = make_batches(self.data, None, inputs, axes=axes)
            self.batch = self._arrays.size
            return
        self._shape = tuple(inputs[self._input_name][1])
        self.batch = self._shape[0]
        self.size, self._prepare = image_preparer(preprocess, self._input_name, self._shape)
        self.fingerprint += f" {preprocess_fingerprint(preprocess)}"
        source = {key: value for key, value in data.items() if key not in SUBSET_KEYS}
        self._source = canonical_json(source), base, preprocess_fingerprint(preprocess), self._shape[1:]
        self._cache: dict[str, Prepared] = {}
        self._room = MAX_CACHE_BYTES

    @property
    def inferences(self) -> int:
        """Return the number of inferences that `run` performs, one for each batch."""
        return -(-len(self.data) // self.batch)

    def share_inputs(self, caches: dict[object, Any]) -> None:
        """Keep prepared images in a cache that other evaluators use as well, also on other subsets of the images.

        Args:
            caches: Caches by data, preprocessing and input.
        """
        if self._input_name:
            self._cache = caches.setdefault(self._source, self._cache)

    def run(self, infer: Infer) -> Iterator[tuple[Prepared | None, Mapping[str, Array]]]:
        """Run the engine on every sample; yield each image, or None, with its outputs, batch axis included.

        Raises:
            EvaluationFailed: An output has NaN or infinite values.
            UserError: An image cannot be read, or the preprocessing gives another shape or type than the input's.
        """
        size, waiting = self.batch, deque[list[Prepared]]()

        def batches() -> Iterator[dict[str, Array]]:
            for start in range(0, len(self.data), size):
                items = [self._prepare_image(i) for i in range(start, min(start + size, len(self.data)))]
                waiting.append(items)
                yield {self._input_name: make_batch([item.tensor for item in items], size)}

        feeds = batches() if self._input_name else self._arrays
        for index, found in enumerate(infer_all(infer, feeds)):
            name, count = self.data.sample_name(index * size), min(size, len(self.data) - index * size)
            outputs = require_finite(found, f"image {name!r}" if self._input_name else name)
            items = waiting.popleft() if self._input_name else [None] * count
            for k, item in enumerate(items):
                # With a batch of one, an output may have no batch axis (boxes from a graph with NMS).
                yield item, outputs if size == 1 else {name: array[k : k + 1] for name, array in outputs.items()}

    def _prepare_image(self, i: int) -> Prepared:
        name = self.data.sample_name(i)
        if name in self._cache:
            return self._cache[name]
        assert isinstance(self.data, ImageDataset)
        item = self._prepare(self.data.image(i))
        if item.tensor.shape != self._shape[1:] or item.tensor.dtype != np.float32:
            raise UserError(
                f"preprocess gives {item.tensor.dtype} {item.tensor.shape} for image {name!r}, "
                f"but the input {self._input_name!r} wants float32 {self._shape[1:]}"
            )
        if item.tensor.nbytes <= self._room:
            self._room -= item.tensor.nbytes
            item.tensor.flags.writeable = False  # shared by evaluators, and key of remembered outputs
            self._cache[name] = item
        return item


def image_input_params(data: object, inputs: InputTypes) -> dict[str, Any]:
    """Return `input_name` and `input_shape` for an evaluator that takes them; "" and () if the data are arrays.

    Raises:
        UserError: Images do not fit the inputs of the model.
    """
    if is_array_data(data) or isinstance(data, str):
        return {"input_name": "", "input_shape": ()}
    name = image_input(inputs)
    return {"input_name": name, "input_shape": inputs[name][1]}


class SampleEvaluator:
    """Base class of evaluators on samples, with a metric of which higher values are better.

    Args:
        data: Images or arrays (`harness.accuracy.data.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`; not for arrays.
        inputs: Element type and shape of each input of the model.
        base: Folder that relative paths start from.
        axes: Declared dimensions of each input of a model with dynamic axes.
    """

    higher_is_better = True

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any] | None,
        inputs: InputTypes,
        base: Path | None = None,
        axes: Mapping[str, Axes | None] | None = None,
    ) -> None:
        self.samples = SampleSet(data, preprocess, inputs, base, axes)
        self.share_inputs = self.samples.share_inputs
        self.fingerprint = self.samples.fingerprint

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples.data)

    @property
    def inferences(self) -> int:
        """Return the number of inferences per score."""
        return self.samples.inferences


def select_output(outputs: Mapping[str, Array], name: str | None, where: str) -> Array:
    """Return the output that holds the logits; see `select_output_name` for arguments and errors."""
    return outputs[select_output_name(outputs, name, where)]


def select_output_name(outputs: Collection[str], name: str | None, where: str) -> str:
    """Return the name of the output that holds the logits.

    Args:
        outputs: Names of all outputs.
        name: Name of the output; None if there is only one.
        where: Prefix of messages, for instance "top1: output".

    Raises:
        UserError: No name is given and there are several outputs, or none has this name.
    """
    if name is None and len(outputs) > 1:
        raise UserError(f"{where}: say which of {', '.join(sorted(outputs))} holds the logits")
    found = name or next(iter(outputs), "")
    if found not in outputs:
        raise UserError(f"{where}: the model has no output {found!r}, only {', '.join(sorted(outputs))}")
    return found


def low_reference_warning(accuracy: Accuracy, metric: str, higher_is_better: bool, params: Mapping[str, Any]) -> str:
    """Return a warning if the float model itself scores below 0.01 or gives one class for all samples; else "".

    Args:
        accuracy: Score of the float model.
        metric: Name of the metric.
        higher_is_better: Direction of the metric; no warning if a value near 0 is good.
        params: Parameters of the evaluator; the message names those that may be wrong.
    """
    value = accuracy.metrics.get(metric, 1.0)
    one_class = metric in ("top1", "top5") and bool(accuracy.note)
    if not higher_is_better or not (0 <= value < NEGLIGIBLE_SCORE or one_class):
        return ""
    return (
        f"the float model itself has {metric} {value:.4f}, so no drop from there says anything: it is not fed, or not "
        f"read, as it was trained. {likely_causes(params, accuracy.note)}"
    )


def likely_causes(params: Mapping[str, Any], note: str = "") -> str:
    """Return a sentence that names what may be wrong if a float model scores low.

    Args:
        params: Parameters of the evaluator.
        note: Note of the evaluator about the score.
    """
    used = {key: params[key] for key in ("preprocess", "decode") if isinstance(params.get(key), str | Mapping)}
    suspects = [
        f"{key} (now {given if isinstance(given, str) else given['use']!r}; qdq list has the others)"
        for key, given in used.items()
    ]
    if params.get("input_shape"):
        suspects.append(f"the input's shape (now {'x'.join(map(str, params['input_shape']))})")
    labels = "the labels, and the order of their classes (key 'classes')"
    return f"Look at {', '.join([*suspects, labels])}{f'; {note}' if note else ''}"
