"""Custom metric: a plain Python function of outputs and labels."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.base import open_samples, select_output
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import InputTypes
from harness.graph.passes.dimension_sizes import Axes
from harness.plugins import registry
from harness.plugins.api import Accuracy, Array, Infer


class Metric:
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
    higher_is_better = True

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
        self.samples = open_samples(data, preprocess, inputs, base, axes)
        if self.samples.data.labels is None:
            raise UserError(f"{self.metric}: data.labels: labels are needed, one row for each sample")
        self.fingerprint = f"{self.samples.fingerprint} {function} {source_digest(self._function)}"

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples.data)

    @property
    def inferences(self) -> int:
        return self.samples.inferences

    def score(self, infer: Infer) -> Accuracy:
        """Return the result of the function for the outputs of an engine.

        Raises:
            EvaluationFailed: Outputs are not finite, or the function raises or returns an invalid value.
        """
        rows = [outputs for _, outputs in self.samples.run(infer)]
        try:
            found = registry.call_plugin(self._name, lambda: np.asarray(self._evaluate_function(rows), np.float64))
        except UserError as error:
            raise EvaluationFailed(str(error)) from error
        if found.shape not in ((), (len(self),)) or not np.isfinite(found).all():
            what = f"an array of the shape {found.shape}" if found.shape else found
            wanted = f"one finite number, or one for each of {len(self)} samples"
            raise EvaluationFailed(f"{self._name}: {wanted}, but it returned {what}")
        per_item: tuple[float, ...] = tuple(found.tolist()) if found.shape else ()
        return Accuracy(metrics={self.metric: float(found.mean())}, per_item=per_item)

    def _evaluate_function(self, rows: Sequence[Mapping[str, Array]]) -> Any:
        joined: Any = {name: _join([np.atleast_1d(row[name]) for row in rows]) for name in rows[0]}
        if self._output is not None or len(joined) == 1:
            joined = select_output(joined, self._output, f"{self.metric}: output")
        labels = self.samples.data.labels
        return self._function(joined, list(labels) if labels is not None and labels.dtype.hasobject else labels)


def _join(outputs: Sequence[Array]) -> Array | Sequence[Array]:
    """Return outputs joined along the first axis, or as they are if their other axes differ."""
    return np.concatenate(outputs) if len({output.shape[1:] for output in outputs}) == 1 else outputs


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
