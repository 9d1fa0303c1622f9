"""Ranges of the activations of a float model, measured on data once for all placements.

The methods are mostly those of `onnxruntime.quantization.calibrate`, with the differences that
`harness.accuracy.calibration.histogram_calibrators` lists. A range does not depend on the precision:
`harness.graph.quantize.scales` derives the scale (INT8 symmetric amax / 127, UINT8 over the range, FP8 E4M3 amax /
448).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import numpy as np

from harness.accuracy.calibration.range_estimators import (
    EMPTY_RANGE,
    Ranges,
    SentinelRange,
    is_finite,
)
from harness.accuracy.data.batching import RANDOM_DATA, describe_sample_count, make_batches, random_batches
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.preprocess import preprocess_fingerprint
from harness.base.errors import MAX_COUNT, UserError
from harness.base.paths import cache_dir, replacing
from harness.base.random_inputs import InputTypes
from harness.base.text import pluralize
from harness.config.sections import ModelSpec
from harness.graph.io.files import copy_model
from harness.graph.model import Model
from harness.graph.plugin_operators import truncate_before_plugins
from harness.graph.quantize.numeric_choices import NumericChoices, channel_tensor
from harness.plugins.api import Array
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

if TYPE_CHECKING:
    from harness.accuracy.calibration.histogram_calibrators import ActivationObserver
    from harness.accuracy.calibration.range_estimators import SentinelObserver


logger = logging.getLogger(__name__)

_SCHEMA_VERSION = 3
_OBSERVERS: dict[Path, ActivationObserver] = {}  # used in the helper process only


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey:
    """Everything that ranges depend on, except the tensors.

    Attributes:
        model_sha256: SHA-256 of the model file.
        data: Fingerprint of the calibration data, or the source of random data.
        preprocess: Fingerprint of the preprocessing and of the sizes of the inputs.
        method: Name of the range estimator.
        percentile: Share of the values inside the range, in per cent; for method "percentile" only.
        samples: Largest number of batches.
    """

    model_sha256: str
    data: str
    preprocess: str = ""
    method: str = "minmax"
    percentile: float = 99.99
    samples: int


class CalibrationOptions(TypedDict, total=False):
    """Options of a calibration.

    Attributes:
        percentile: Share of the values inside the range, in per cent, by default 99.99; for method "percentile".
        channels: Number of channels (axis 1) of tensors whose channels are observed too, under the names of
            `harness.graph.quantize.numeric_choices.channel_name`.
        progress: Function that receives the number of finished batches after each one.
        source: Name of the model in messages, by default the name of its file.
    """

    percentile: float
    channels: Mapping[str, int] | None
    progress: Callable[[int], None]
    source: str


def calibrate(
    model_path: Path,
    tensors: Collection[str],
    batches: Iterable[Mapping[str, Array]],
    *,
    method: str = "minmax",
    **options: Unpack[CalibrationOptions],
) -> Ranges:
    """Return the range of each tensor by one method, as `calibrate_by_methods` does."""
    return calibrate_by_methods(model_path, tensors, batches, methods=(method,), **options)[method]


def calibrate_by_methods(
    model_path: Path,
    tensors: Collection[str],
    batches: Iterable[Mapping[str, Array]],
    *,
    methods: Collection[str],
    **options: Unpack[CalibrationOptions],
) -> dict[str, Ranges]:
    """Run the float model once on calibration data and return the range of each tensor by each method.

    The activations of one batch are in memory at a time.

    Args:
        model_path: ONNX file of the float model; its folder is not modified.
        tensors: Activations to observe; they may include inputs and outputs of the model.
        batches: Input arrays by name; iterated over once.
        methods: Names of range estimators (entry points of `qdq.range_estimators`).
        **options: Options of the calibration.

    Returns:
        For each method, the lowest and highest value of each tensor and observed channel. Ranges from which no scale
        can be made are left out by `finite_ranges` and explained by `range_warnings`: (0,
        0) for a tensor that is always zero or empty; infinite or NaN bounds for NaN or infinite values, float16 values
        beyond 6e4, sentinels (`harness.graph.rules.sentinels`) and tensors behind a plug-in operator, which are not
        observed; and bounds that are too large or too small for `harness.graph.rules.operator_sets`.

    Raises:
        UserError: The data or all activations have NaN, infinite or huge values, an activation cannot be observed, or
            the model does not run on the data.
    """
    from harness.accuracy.calibration.histogram_calibrators import runtime_operators
    from harness.accuracy.calibration.range_estimators import SentinelObserver, create_estimator

    if not tensors:
        return {method: {} for method in methods}
    percentile = options.get("percentile", 99.99)
    estimators = {method: create_estimator(method, percentile) for method in methods}
    observed = SentinelObserver(estimators, options.get("channels"))
    done, source = 0, options.get("source") or model_path.name
    with tempfile.TemporaryDirectory(prefix="qdq-ranges-") as scratch:
        folder = Path(scratch)
        copy = copy_model(model_path, folder)
        behind, plugins = truncate_before_plugins(copy, tensors, runtime_operators())
        ahead = set(tensors) - behind
        if not ahead:
            raise UserError(
                f"calibration of {source}: all that may be quantized lies behind plug-in operator {plugins}, "
                "which ONNX Runtime cannot run; give no calibration data, to compare latencies with one scale for all"
            )
        try:
            what = f"calibration of {source}"
            call_in_helper_process(what, _open_observer, copy, ahead, observed, what, factor=RUNTIME_FACTOR)
            for done, batch in enumerate(batches, start=1):
                place = getattr(batches, "batch_label", lambda _: "")(done - 1)
                batch_name = f"batch {done} ({place})" if place else f"batch {done}"
                for name, array in batch.items():
                    if array.dtype.kind == "f" and not np.isfinite(array).all():
                        raise UserError(
                            f"calibration {batch_name}: input {name!r} has NaN or infinite values; check the data and "
                            "their preprocessing"
                        )
                what = f"calibration of {source}: {batch_name}"
                call_in_helper_process(what, _observe, copy, batch, what, factor=RUNTIME_FACTOR)
                if "progress" in options:
                    options["progress"](done)
        finally:
            what = f"calibration of {source}: ranges of the values seen"
            seen = call_in_helper_process(what, _close_observer, copy, factor=RUNTIME_FACTOR)
    if not done:
        raise UserError(f"calibration of {source}: there is no data; give at least one batch")
    found = {method: {} if seen is None else seen[method] for method in methods}
    for ranges in found.values():
        given = {name: EMPTY_RANGE if name in behind else ranges.get(name, (0.0, 0.0)) for name in sorted(tensors)}
        if not any(map(is_finite, given.values())):
            raise UserError(
                f"calibration of {source}: every activation has NaN, infinite or huge values; "
                "check the model and the preprocessing of the calibration data"
            )
        by_channel = {name: ranges[name] for name in sorted(ranges.keys() - given.keys())}
        ranges.clear()
        ranges.update(given | by_channel)
    return dict(found)


def _open_observer(model_path: Path, tensors: Collection[str], collector: SentinelObserver, what: str) -> None:
    """Start a calibration in the helper process; it ends with `_close_observer`."""
    from harness.accuracy.calibration.histogram_calibrators import ActivationObserver

    with _translate_runtime_errors(what):
        _OBSERVERS[model_path] = ActivationObserver(model_path, model_path.parent, tensors, collector)


def _observe(model_path: Path, batch: Mapping[str, Array], what: str) -> None:
    if model_path not in _OBSERVERS:
        raise UserError(f"{what}: another step ended the process that calibrates; run the command again")
    with _translate_runtime_errors(what):
        _OBSERVERS[model_path].observe(batch)


def _close_observer(model_path: Path) -> dict[str, dict[str, tuple[float, float]]] | None:
    observer = _OBSERVERS.pop(model_path, None)
    return None if observer is None else observer.collector.ranges_by_estimator()


def explain_unrunnable(model_path: Path) -> str:
    """Return the reason why ONNX Runtime, which runs the calibration, refuses to load a model; "" if it loads."""
    what = f"{model_path.name}: ONNX Runtime's check"
    return call_in_helper_process(what, _explain_unrunnable, model_path, factor=RUNTIME_FACTOR)


def _explain_unrunnable(model_path: Path) -> str:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        with _translate_runtime_errors(model_path.name):
            ort.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
    except UserError as error:
        return str(error).partition("does not run: ")[2]
    return ""


def cached_ranges(
    key: CalibrationKey,
    model_path: Path,
    tensors: Collection[str],
    batches: Iterable[Mapping[str, Array]],
    **options: Unpack[CalibrationOptions],
) -> Ranges:
    """Return ranges from the cache on disk, else from `calibrate`; a cache hit reads neither model nor data.

    The cache has one file per key and set of tensors below `harness.base.paths.cache_dir()`. An unreadable file is
    replaced, and nothing is cached if the folder is not writable; both are logged.

    Args:
        key: Everything that the ranges depend on, except the tensors.
        model_path: As in `calibrate_by_methods`, like the other arguments.

    Raises:
        UserError: As in `calibrate_by_methods`.
    """
    channels = {name: count for name, count in (options.get("channels") or {}).items() if name in tensors}
    options |= {"channels": channels, "percentile": key.percentile}
    path = _cache_path(key, tensors, channels)
    try:
        if path is not None:
            kept = json.loads(path.read_bytes())
            found = {name: (float(low), float(high)) for name, (low, high) in kept["ranges"].items()}
            found |= {name: SentinelRange(*found[name]) for name in kept["sentinels"]}
            if {name for name in found if not channel_tensor(name)} != set(tensors):
                raise ValueError("its ranges are not those of the key")
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s: calibration ranges cannot be read and are made again (%s)", path, error)
    ranges = calibrate(model_path, tensors, batches, method=key.method, **options)
    if path is not None:
        plain = {name: [v if math.isfinite(v) else str(v) for v in pair] for name, pair in ranges.items()}
        sentinels = [name for name, pair in ranges.items() if isinstance(pair, SentinelRange)]
        facts = {"schema": _SCHEMA_VERSION, "key": asdict(key), "ranges": plain, "sentinels": sentinels}
        text = json.dumps(facts, allow_nan=False)
        try:
            with replacing(path) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("%s: calibration ranges are not kept (%s)", path, error)
    return ranges


@contextlib.contextmanager
def _translate_runtime_errors(where: str) -> Iterator[None]:
    """Context manager: turn ONNX Runtime's exceptions about the model or its inputs into a `UserError`."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    refused = (
        state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf, state.NotImplemented,
        state.RuntimeException, RuntimeError, ValueError,
    )  # fmt: skip
    try:
        yield
    except refused as error:
        words = " ".join(str(error).split())
        raise UserError(f"{where}: the float model does not run: {words}") from error


def _cache_path(key: CalibrationKey, tensors: Collection[str], channels: Mapping[str, int]) -> Path | None:
    import onnxruntime

    facts = asdict(key) | {
        "percentile": key.percentile if key.method == "percentile" else None,
        "tensors": sorted(tensors),
        **({"channels": channels} if channels else {}),
        "onnxruntime": onnxruntime.__version__,
        "schema": _SCHEMA_VERSION,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    try:
        folder = cache_dir() / "ranges"
        folder.mkdir(exist_ok=True)
    except OSError as error:
        logger.warning("calibration ranges are not kept: no cache folder (%s)", error)
        return None
    return folder / f"{digest}.json"


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

    Attributes:
        count: Number of batches.
        own_sizes: Whether a batch has other sizes than the inputs of the model.
        batch_label: Function that returns the name of the data of a batch for messages.

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
        self.count, self.own_sizes = len(self._batches), self._batches.own_sizes
        self.batch_label = self._batches.batch_label

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        return iter(self._batches)

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
