"""Top-1 and top-5 accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.api import Accuracy, Array, Infer
from harness.errors import EvaluationFailed, UserError
from harness.evaluators.inputs import PreparedImages

__all__ = ["Top1"]


class Top1:
    """Share of images whose class is the highest output (top1) or among the five highest (top5).

    Args:
        data: Images with class labels (`harness.evaluators.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`.
        input_name: Set by the harness: name of the model's image input.
        input_shape: Set by the harness: its static shape, batch x 3 x height x width.
        output: Which output holds the logits; not needed where there is one.
        base: Set by the harness: folder that relative paths start from.

    Raises:
        UserError: Anything wrong with these.
    """

    metric = "top1"
    higher_is_better = True

    def __init__(
        self,
        data: Mapping[str, Any],
        preprocess: str | Mapping[str, Any],
        input_name: str,
        input_shape: Sequence[int],
        output: str | None = None,
        base: Path | None = None,
    ) -> None:
        self._images = PreparedImages(data, preprocess, input_name, input_shape, base)
        labels = self._images.data.labels
        if labels is None:
            raise UserError("top1: data.labels: classes are needed, from a .txt file with lines 'FILENAME CLASS'")
        self._labels = labels
        self._output = output
        self.fingerprint = self._images.fingerprint

    def __len__(self) -> int:
        """Number of images."""
        return len(self._images.data)

    def score(self, infer: Infer) -> Accuracy:
        """See `harness.api.Evaluator`; `per_item` holds the top-1 hits. Of equal outputs the lower class wins.

        Raises:
            EvaluationFailed: Outputs that are not finite, or are no row of logits.
        """
        ranks = np.array(
            [
                self._rank(self._logits(outputs), label)
                for (_, outputs), label in zip(self._images.run(infer), self._labels.tolist(), strict=True)
            ]
        )
        metrics = {f"top{k}": float((ranks < k).mean()) for k in (1, 5)}
        return Accuracy(metrics=metrics, per_item=tuple((ranks < 1).astype(float).tolist()))

    def _logits(self, outputs: Mapping[str, Array]) -> Array:
        if self._output is None and len(outputs) > 1:
            raise UserError(f"top1: output: say which of {', '.join(sorted(outputs))} holds the logits")
        name = self._output or next(iter(outputs))
        if name not in outputs:
            raise UserError(f"top1: output: the model has no output {name!r}, only {', '.join(sorted(outputs))}")
        logits = outputs[name]
        if logits.size != max(logits.shape, default=0):
            raise EvaluationFailed(f"output {name!r} is no row of logits: its shape is {logits.shape}")
        return logits.reshape(-1)

    @staticmethod
    def _rank(logits: Array, label: int) -> int:
        """How many classes come before the right one."""
        if label >= len(logits):
            raise UserError(f"top1: data.labels: class {label}, but the model has {len(logits)} outputs")
        return int((logits > logits[label]).sum() + (logits[:label] == logits[label]).sum())
