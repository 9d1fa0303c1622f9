"""Calibration batches of a model, from the data of its specification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from harness.accuracy.calibration.ptq import PtqOptions
from harness.accuracy.calibration.ranges import CalibrationKey
from harness.accuracy.data.batching import RANDOM_DATA, describe_sample_count, make_batches, random_batches
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.preprocess import preprocess_fingerprint
from harness.base.errors import MAX_COUNT
from harness.base.random_inputs import InputTypes
from harness.base.text import pluralize
from harness.config.sections import ModelSpec
from harness.graph.model import Model
from harness.graph.quantize.numeric_choices import NumericChoices
from harness.graph.rules.dialects import Dialect
from harness.plugins.api import Array

ALL_SAMPLES = MAX_COUNT  # number of samples without a limit


def data_batches(batches: Iterable[Mapping[str, Array]], count: int) -> tuple[Mapping[str, Array], ...]:
    """Return the first calibration batches, or none if they are random."""
    return () if getattr(batches, "is_random", False) else tuple(islice(batches, count))


class CalibrationBatches:
    """Calibration batches of one model; each iteration makes them again.

    Args:
        spec: Specification of the model.
        model: The model.
        types: Element type and shape of each input of the model.
        spread: Whether samples are taken evenly from a file of arrays, which `description` then names.

    Raises:
        UserError: The data or the preprocessing is invalid, or does not fit the inputs.
    """

    def __init__(self, spec: ModelSpec, model: Model, types: InputTypes, *, spread: bool = False) -> None:
        self._spec = spec
        self._model = model
        self._types = types
        self.settings = spec.calibration
        self.is_random = spec.calibration.data is None
        self._preprocess = None if spec.preprocess is None else spec.preprocess.mapping
        if spec.calibration.data is None:
            self._batches = random_batches(types, self.settings.samples)
            self.description = RANDOM_DATA
            self.fingerprint = "random feeds 1"
        else:
            dataset = open_data(spec.calibration.data, spec.base_dir, self.settings.samples, spread=spread)
            axes = None if spread or model.origin is None else model.origin.axes
            self._batches = make_batches(dataset, self._preprocess, self._types, axes=axes)
            self.description = pluralize(len(dataset), "sample")
            self.fingerprint = dataset.fingerprint
            if spread:
                limit = self.settings.samples if self.settings.samples < ALL_SAMPLES else None
                self.description = describe_sample_count(dataset, limit, str(spec.calibration.data["path"]))
                self.fingerprint += f", {len(dataset)} of {dataset.available}"
        if spread:  # the specification has no shapes then
            self.fingerprint += f" as {self._types}"

    @property
    def count(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    @property
    def own_sizes(self) -> bool:
        """Return whether a batch has other sizes than the inputs of the model."""
        return self._batches.own_sizes

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        return iter(self._batches)

    def batch_label(self, index: int) -> str:
        """Return the name of the data of a batch for messages."""
        return self._batches.batch_label(index)

    @property
    def numeric_choices(self) -> NumericChoices:
        """Return the numeric choices of the specification."""
        return NumericChoices(
            activations=self.settings.method,
            percentile=self.settings.percentile,
            weights=self.settings.weights,
            depthwise=self.settings.depthwise,
            symmetric=self.settings.symmetric,
        )

    def ptq_options(self, dialect: Dialect, precision: str) -> PtqOptions:
        """Return the options for PTQ tools, see `harness.accuracy.calibration.ptq.quantize`."""
        return {
            "dialect_name": dialect.name,
            "method": self.settings.method,
            "percentile": self.settings.percentile,
            "precision": precision,
        }

    @property
    def cache_key(self) -> CalibrationKey:
        """Return the cache key of ranges measured on these batches."""
        used = self._preprocess
        return CalibrationKey(
            model_sha256=self._model.sha256,
            data=self.fingerprint,
            preprocess=f"{used and preprocess_fingerprint(used)} {sorted(self._spec.shapes.items())}"
            f"{sorted(self._spec.dims.items()) if self._spec.dims else ''}",
            method=self.settings.method,
            percentile=self.settings.percentile,
            samples=self.settings.samples,
        )
