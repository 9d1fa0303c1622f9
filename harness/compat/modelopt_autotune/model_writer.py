"""Writer of models from quantized edges: calibrated once, written as candidates, files or bytes."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.ranges import (
    CalibrationKey,
    Ranges,
    cached_ranges,
    finite_ranges,
    range_warnings,
    require_quantizable,
    restrict_space,
)
from harness.accuracy.data.batching import InputBatches, describe_sample_count, make_batches
from harness.accuracy.data.datasets import open_data
from harness.api import Array
from harness.compat.modelopt_autotune.common import AutotunerError, Config
from harness.compat.modelopt_autotune.region_index import RegionIndex
from harness.config.sections import PluginSpec
from harness.errors import UserError
from harness.graph.conversions import serialize_model, write_model
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.cast_insert import CastInserter, require_all_nodes
from harness.graph.qdq.insert import Inserter
from harness.random_inputs import random_feeds
from harness.task_setup.float_baseline import CAST_FOLDER_NAME, runtime_input_file
from harness.task_setup.model_loader import MIN_OPSET, input_types
from search.space import Resolved, Space

__all__ = ["CalibrationBatches", "ModelWriter", "export_model", "load_calibration_batches"]

_logger = logging.getLogger(__name__)
RANDOM_SAMPLES = 8
"""Random data tell a range after few of them, and nothing about accuracy after many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBatches:
    """Calibration data of a model.

    Attributes:
        fingerprint: Changes with the data and with the choice of samples.
        batches: Inputs of the model, one batch in memory at a time.
        description: Number of samples and their file, for messages.
    """

    fingerprint: str
    batches: InputBatches
    description: str


class ModelWriter:
    """Models of one space of placements.

    Args:
        atlas: The float model and its dialect.
        space: What may be quantized; `space` is what is left of it after calibration.
        config: Says what to calibrate on.
        backend: Reads the models.

    Attributes:
        calibrated_on: The data that the scales come from, for messages.
    """

    def __init__(self, atlas: RegionIndex, space: Space, config: Config, backend: PluginSpec) -> None:
        self._model = atlas.model
        self._dialect = atlas.dialect
        self._config = config
        self._backend = backend
        self._scratch = tempfile.TemporaryDirectory(prefix="qdq-autotune-")
        self.folder = Path(self._scratch.name)
        self.calibrated_on = "random data"
        self._ranges = self._calibrated_inserter(space)
        self.space = restrict_space(space, self._ranges)
        if len(space):
            require_quantizable(self.space, self._ranges, self._model.source)

    @cached_property
    def _normalized_model(self) -> Path:
        return save_to_folder(self._model, self.folder)

    @cached_property
    def float_file(self) -> Path:
        """The float model as the backend reads it, cast where its floats are others: the baseline."""
        return runtime_input_file(self._backend, self._normalized_model, self.folder / CAST_FOLDER_NAME)

    @cached_property
    def _float_model(self) -> Model:
        """What is in `float_file`."""
        if self.float_file == self._normalized_model:
            return self._model
        return load(self.float_file, source=self._model.source, min_opset=MIN_OPSET)

    @cached_property
    def _inserter(self) -> Inserter:
        ranges = finite_ranges(self._ranges)
        if self._float_model is self._model:
            return Inserter(self._model, self._dialect, ranges)
        require_all_nodes((edge for dimension in self.space.dimensions for edge in dimension.edges), self._float_model)
        return CastInserter(self._float_model, self._dialect, ranges, self._model)

    def proto(self, resolved: Resolved) -> Any:
        """A placement's model in memory, as ONNX has it."""
        return self._inserter.insert(resolved) if resolved else self._float_model.proto

    def candidate_file(self, resolved: Resolved, name: str) -> Path:
        """A placement's model as a file for building; it shares its weights with its like."""
        if not resolved:
            return self.float_file
        return self._inserter.write(resolved, self.folder / "candidates", name=name)

    def feeds(self) -> Iterable[Mapping[str, Array]]:
        """Return the calibration batches; random ones where no data were given."""
        given = self._config.calibration_data
        if given is None:
            return random_feeds(input_types(self._model), RANDOM_SAMPLES)
        return load_calibration_batches(given, self._model, self._config.calibration_samples).batches

    def _calibrated_inserter(self, space: Space) -> Ranges:
        tensors = {e.tensor for d in space.dimensions for e in d.edges if e.tensor not in self._model.constants}
        if not tensors:
            return {}
        types, given = input_types(self._model), self._config.calibration_data
        feeds: Iterable[Mapping[str, Array]]
        if given is None:
            _logger.info("%s: calibrated on random data: do not trust any accuracy", self._model.source)
            data, samples, feeds = "random feeds 1", RANDOM_SAMPLES, random_feeds(types, RANDOM_SAMPLES)
        else:
            found = load_calibration_batches(given, self._model, self._config.calibration_samples)
            data, samples, feeds = found.fingerprint, len(found.batches), found.batches
            self.calibrated_on = found.description
        key = CalibrationKey(model_sha256=self._model.sha256, data=f"{data} as {types}", samples=samples)
        try:
            ranges = cached_ranges(key, self._normalized_model, sorted(tensors), feeds, source=self._model.source)
        except UserError as error:
            if given is not None or not any(node.opaque for node in self._model.nodes):
                raise
            _logger.warning("%s: every scale is default_q_scale: %s", self._model.source, error)
            bound = 127 * self._config.default_q_scale
            return dict.fromkeys(tensors, (-bound, bound))
        for remark in range_warnings(ranges):
            _logger.warning("%s: %s", self._model.source, remark)
        return ranges


def export_model(proto: Any, path: Path | None) -> bytes:
    """A model as bytes, written to a file as well where one is given; above 2 GB the file is all there is.

    Raises:
        UserError: It is too large for bytes, and there is no file.
    """
    if path is None:
        return serialize_model(proto)
    write_model(proto, path)
    return b"" if path.with_name(f"{path.name}.data").exists() else path.read_bytes()


def load_calibration_batches(text: str, model: Model, samples: int | None = None) -> CalibrationBatches:
    """Open a file of arrays as calibration data.

    Args:
        text: An `.npz` or a `.npy` file.
        model: Its inputs are fed.
        samples: Number of samples at most, evenly spread over the file; None: all.

    Raises:
        AutotunerError: The file is neither `.npz` nor `.npy`.
        UserError: It cannot be read, or does not fit the inputs of the model.
    """
    kind = Path(text).suffix.removeprefix(".")
    if kind not in ("npz", "npy"):
        raise AutotunerError(
            f"calibration_data {text}: an .npz file with an array for each input of the model, samples first; "
            "images are for 'qdq run', which knows how to turn them into inputs"
        )
    arrays = open_data({"use": kind, "path": text}, Path.cwd(), samples, spread=True)
    return CalibrationBatches(
        fingerprint=f"{arrays.fingerprint}, {len(arrays)} of {arrays.available}",
        batches=make_batches(arrays, None, input_types(model)),
        description=describe_sample_count(arrays, samples, text),
    )
