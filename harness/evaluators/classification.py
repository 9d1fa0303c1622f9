"""Top-1 and top-5 accuracy of a classifier."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.api import Accuracy, Array, Infer
from harness.errors import EvaluationFailed, UserError
from harness.evaluators.inputs import LabelledImages, only_output
from harness.evaluators.intervals import evidence_of

__all__ = ["Top1", "Top5"]

SHIFTED = 0.5  # share of images, and of classes, whose answer is their label plus one and the same number


class Top1(LabelledImages):
    """Share of images whose class is the highest output (top1) or among the five highest (top5).

    Args:
        data: Images with class labels (`harness.evaluators.datasets`).
        preprocess: Name, or `{use: NAME, params: {...}}`.
        input_name: Set by the harness, as `input_shape` and `base`; see `LabelledImages`.
        output: Which output holds the logits; not needed where there is one.

    Raises:
        UserError: Anything wrong with these.
    """

    metric = "top1"

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
        labels = self.images.data.labels
        if labels is None:
            raise UserError(
                f"{self.metric}: data.labels: classes are needed, from a .txt file with lines 'FILENAME CLASS'"
            )
        self._labels: list[int] = labels.tolist()
        self._output = output

    def score(self, infer: Infer) -> Accuracy:
        """See `harness.api.Evaluator`; `per_item` holds the hits. Of equal outputs the lower class wins.

        Raises:
            EvaluationFailed: Outputs that are not finite, or are no row of logits.
            UserError: A class that the model does not have, or most answers are shifted against the labels.
        """
        ranks, answers = [], []
        for (_, outputs), label in zip(self.images.run(infer), self._labels, strict=True):
            logits = self._logits(outputs)
            ranks.append(self._rank(logits, label))
            answers.append(int(logits.argmax()))
        self._check_shift(answers)
        hits = {f"top{k}": [float(rank < k) for rank in ranks] for k in (1, 5)}
        return Accuracy(
            metrics={name: float(np.mean(values)) for name, values in hits.items()},
            per_item=tuple(hits[self.metric]),
            evidence=evidence_of("mean", hits),
        )

    def _logits(self, outputs: Mapping[str, Array]) -> Array:
        logits = only_output(outputs, self._output, f"{self.metric}: output")
        if logits.size != max(logits.shape, default=0):
            name = self._output or next(iter(outputs))
            raise EvaluationFailed(f"output {name!r} is no row of logits: its shape is {logits.shape}")
        return logits.reshape(-1)

    def _rank(self, logits: Array, label: int) -> int:
        """How many classes come before the right one."""
        if label >= len(logits):
            raise UserError(f"{self.metric}: data.labels: class {label}, but the model has {len(logits)} outputs")
        return int((logits > logits[label]).sum() + (logits[:label] == logits[label]).sum())

    def _check_shift(self, answers: list[int]) -> None:
        """Quantization may spoil answers, but it does not shift those of most classes: so this is about the labels.

        One that answers with the second of two classes, come what may, shifts the answers of the first alone.
        """
        by_class: dict[int, list[int]] = defaultdict(list)
        for answer, label in zip(answers, self._labels, strict=True):
            by_class[label].append(answer - label)
        shift, count = Counter(chain(*by_class.values())).most_common(1)[0]
        shifted = [shifts.count(shift) > SHIFTED * len(shifts) for shifts in by_class.values()]
        if shift and count > SHIFTED * len(answers) and sum(shifted) > SHIFTED * len(shifted) and len(shifted) > 1:
            raise UserError(
                f"{self.metric}: data.labels: {count} of {len(answers)} answers are the label {shift:+d}, so these "
                "count classes in another way than the model (from 1, or without its background class): correct them"
            )


class Top5(Top1):
    """As `Top1`, but the share among the five highest is the metric that counts."""

    metric = "top5"
