"""Ranges of the activations of a float model, from data, once for all placements.

The methods are those of `onnxruntime.quantization.calibrate`; `harness.calibrate._observer` says what is used of it
and which of its quirks are kept out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.api import Array
from harness.errors import UserError, nearest
from harness.graph.files import copy_model
from harness.paths import cache_folder

if TYPE_CHECKING:
    from harness.calibrate._observer import Collector

__all__ = ["CalibrationKey", "Method", "Ranges", "cached_ranges", "calibrate"]

logger = logging.getLogger(__name__)

Method = Literal["minmax", "entropy", "percentile"]
Ranges = Mapping[str, tuple[float, float]]
"""Lowest and highest value by tensor name. Symmetric or not is for the dialect to decide."""

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey:
    """What ranges depend on, beside the tensors.

    Attributes:
        model_sha256: Of the model file.
        data: Fingerprint of the calibration data, or what it was drawn from ("random:0").
        preprocess: Name of the preprocessing; "" where there is none.
        method: How a range is taken from the values.
        percentile: For method "percentile"; the others ignore it.
        samples: Number of batches at most.
    """

    model_sha256: str
    data: str
    preprocess: str = ""
    method: Method = "minmax"
    percentile: float = 99.99
    samples: int


def calibrate(
    model_path: Path,
    tensors: Collection[str],
    batches: Iterable[Mapping[str, Array]],
    *,
    method: Method = "minmax",
    percentile: float = 99.99,
    progress: Callable[[int], None] | None = None,
) -> Ranges:
    """Run the float model on calibration data and take the range of each tensor.

    All activations of one batch are in memory at a time, never those of two.

    Args:
        model_path: ONNX file of the float model; its folder is left as it is.
        tensors: Activations to observe, inputs and outputs of the model among them if wanted.
        batches: Input arrays by name, read once, one at a time.
        method: "minmax": all values seen. "entropy", "percentile": a part of them, see `_observer.Histograms`.
        percentile: Share of the values inside the range, in per cent; for method "percentile".
        progress: Called with the number of batches done after each one.

    Returns:
        Lowest and highest value of each tensor, finite; (0.0, 0.0) for a tensor that is always zero or empty.

    Raises:
        UserError: An activation is NaN or infinite, cannot be observed, or the model does not run on the data.
    """
    from harness.calibrate._observer import Observer

    if not tensors:
        return {}
    collector = _collector(method, percentile)
    done = 0
    with tempfile.TemporaryDirectory(prefix="qdq-ranges-") as scratch:
        folder = Path(scratch)
        with _runtime_errors(model_path):
            observer = Observer(copy_model(model_path, folder), folder, tensors, collector)
        for done, batch in enumerate(batches, start=1):
            with _runtime_errors(model_path):
                observer.observe(batch)
            if progress is not None:
                progress(done)
    if not done:
        raise UserError(f"calibration of {model_path.name}: there is no data; give at least one batch")
    found = collector.ranges()
    return {name: found.get(name, (0.0, 0.0)) for name in sorted(tensors)}


def cached_ranges(
    key: CalibrationKey,
    model_path: Path,
    tensors: Collection[str],
    batches: Iterable[Mapping[str, Array]],
    *,
    progress: Callable[[int], None] | None = None,
) -> Ranges:
    """Ranges from the cache on disk, else from `calibrate`; then neither model nor data are touched.

    One file for each key and set of tensors, below `harness.paths.cache_folder()`. A file that cannot be read is made
    again, a folder that cannot be written is done without; both are logged.

    Args:
        key: All that the ranges depend on, beside the tensors.
        model_path: See `calibrate`, as for the others.

    Raises:
        UserError: See `calibrate`.
    """
    path = _cache_path(key, tensors)
    known = None if path is None else _read(path, tensors)
    if known is not None:
        return known
    ranges = calibrate(model_path, tensors, batches, method=key.method, percentile=key.percentile, progress=progress)
    if path is not None:
        _write(path, key, ranges)
    return ranges


def _collector(method: Method, percentile: float) -> Collector:
    from harness.calibrate._observer import Extremes, Histograms

    if method == "minmax":
        return Extremes()
    if method not in ("entropy", "percentile"):
        raise UserError(f"calibration: no method {method!r}; {nearest(method, ('minmax', 'entropy', 'percentile'))}")
    return Histograms(method, percentile)


@contextlib.contextmanager
def _runtime_errors(model_path: Path) -> Iterator[None]:
    """Turns what ONNX Runtime says of the model or of its inputs into a `UserError`."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    refused = (
        state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf, state.NotImplemented,
        state.RuntimeException, RuntimeError, ValueError,
    )  # fmt: skip
    try:
        yield
    except refused as error:
        words = " ".join(str(error).split())
        raise UserError(f"calibration of {model_path.name}: the float model does not run: {words}") from error


def _cache_path(key: CalibrationKey, tensors: Collection[str]) -> Path | None:
    import onnxruntime

    facts = asdict(key) | {
        "percentile": key.percentile if key.method == "percentile" else None,
        "tensors": sorted(tensors),
        "onnxruntime": onnxruntime.__version__,
        "schema": _SCHEMA,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    try:
        folder = cache_folder() / "ranges"
        folder.mkdir(exist_ok=True)
    except OSError as error:
        logger.warning("calibration ranges are not kept: no cache folder (%s)", error)
        return None
    return folder / f"{digest}.json"


def _read(path: Path, tensors: Collection[str]) -> Ranges | None:
    try:
        found = {
            name: (float(low), float(high)) for name, (low, high) in json.loads(path.read_bytes())["ranges"].items()
        }
        if found.keys() != set(tensors) or not all(math.isfinite(v) for pair in found.values() for v in pair):
            raise ValueError("its ranges are not those of the key")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s: calibration ranges cannot be read and are made again (%s)", path, error)
        return None
    return found


def _write(path: Path, key: CalibrationKey, ranges: Ranges) -> None:
    text = json.dumps({"schema": _SCHEMA, "key": asdict(key), "ranges": ranges}, allow_nan=False)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("%s: calibration ranges are not kept (%s)", path, error)
