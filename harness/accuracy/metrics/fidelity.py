"""Fidelity: signal-to-noise ratio of an engine's outputs against the float model; needs no labels."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.data.batching import InputBatches, make_batches
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.preprocess import preprocess_fingerprint
from harness.accuracy.metrics.base import require_finite
from harness.accuracy.metrics.closeness import (
    WORST_PREFIX,
    ComparisonLayout,
    compare_outputs,
    open_reference,
    plan_comparison,
    write_reference,
)
from harness.accuracy.metrics.intervals import encode_evidence
from harness.accuracy.metrics.sqnr import MAX_SQNR_DB
from harness.base.errors import EvaluationFailed, UserError
from harness.base.random_inputs import random_feeds
from harness.base.text import format_names
from harness.graph.passes.dimension_sizes import Axes
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
    of the worst output, or of its worst part if slices differ in scale (`harness.accuracy.metrics.sqnr`); `note` names
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
            if len(self) * sum(map(_input_bytes, self._inputs.values())) > MAX_KEPT_BYTES:
                return made
            self._kept = list(made)
        return iter(self._kept)

    def prepare(self, infer: Infer) -> None:
        """Run the float model on the inputs and write its outputs to the reference file.

        Raises:
            EvaluationFailed: The float model itself gives NaN or infinite values.
        """
        samples = [self._comparable(o, f"sample {i}") for i, o in enumerate(infer_all(infer, self.feeds()))]
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
            found = compare_outputs(self._output_pairs(reference, infer), layout, sqnr_only=self._sqnr_only)
        metrics = found.metrics
        worst = f"{WORST_PREFIX}{found.worst}" if found.worst and metrics["sqnr_db"] < MAX_SQNR_DB else ""
        random = f"fidelity leaves out outputs that change from run to run: {format_names(sorted(self._random))}"
        return Accuracy(
            metrics=metrics,
            per_item=tuple(found.figures["sqnr_db"]),
            evidence=encode_evidence("mean", found.figures),
            note=". ".join(filter(None, (layout.note, random if self._random else "", worst))),
        )

    def _comparable(self, outputs: Mapping[str, Array], item: str) -> dict[str, Array]:
        """Return the outputs that do not change from run to run.

        Raises:
            EvaluationFailed: There are none, or one has NaN or infinite values.
        """
        found = {name: array for name, array in require_finite(outputs, item).items() if name not in self._random}
        if outputs and not found:
            raise EvaluationFailed(
                "every output depends on random operators, so none can be compared with the float model's; score the "
                "model with a metric on labelled data, or export it without them (model.eval() removes a Dropout)"
            )
        return found

    def _output_pairs(self, reference: Any, infer: Infer) -> Iterator[tuple[dict[str, Array], Mapping[str, Array]]]:
        """Yield the float model's outputs and the engine's for each batch."""
        for i, found in enumerate(infer_all(infer, self.feeds())):
            outputs, prefix = self._comparable(found, f"sample {i}"), f"{i}/"
            yield {k.removeprefix(prefix): reference[k] for k in reference.files if k.startswith(prefix)}, outputs


def _input_bytes(input_type: tuple[str, tuple[int, ...]]) -> int:
    """Return an upper bound of the bytes of an input; an element has at most 8 bytes."""
    return 8 * math.prod(input_type[1])
