"""ONNX Runtime's calibraters, cut to what the harness needs: chosen tensors, one batch alive, no chatter.

Built on `onnxruntime.quantization.calibrate` (ONNX Runtime 1.24). What differs from its defaults, and why:

- One augmentation for all methods (`HistogramCalibrater.augment_graph`: the tensors become outputs). Its
  `MinMaxCalibrater` reduces inside the graph instead, but ReduceMin and ReduceMax of the CPU provider pass over a lone
  NaN, so a broken activation would get a range; it also takes quadratic time to augment. The figures are the same.
- Entropy starts from 511 bins: with the default of 128 bins for 128 quantized levels the search has a single
  candidate, the whole range, so that "entropy" means minmax. 511 is odd because `get_entropy_threshold` takes the
  middle bin as zero; its time grows with the square of the bins.
- Percentile keeps the 2048 bins and cuts (100 - percentile) / 2 per cent on each side, because the ranges here are not
  symmetric yet; the default for "symmetric" would be a histogram of absolute values.
- Histograms are counted in float64: 2048 edges of float16 collapse onto one another, and the width of a histogram from
  -3.4e38, the masked scores of many transformers, overflows float32.
- MSE is not among ONNX Runtime's methods; see `HistogramCalibrator`.
- A tensor with NaN or infinite values gets bounds that are not finite, where `numpy.nanmin` would pass over them; so
  does one in float16 whose values come to the end of it, as the -65504 of attention masks does.
- A histogram never outgrows 4 times its first number of bins: `merge_histogram` keeps the width of the first batch's
  bins, so one quiet image in front would ask for gigabytes.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from onnxruntime.quantization.calibrate import HistogramCalibrater, HistogramCollector

from harness.accuracy.calibration.usable_ranges import SentinelRange, is_finite
from harness.api import Array
from harness.errors import UserError
from harness.graph.rules.sentinels import MIN_SENTINEL_MAGNITUDE, MagnitudeHistogram

__all__ = [
    "AbsMaxCalibrator", "ActivationObserver", "HistogramCalibrator", "MinMaxCalibrator", "RangeBounds",
    "RangeCalibrator", "SentinelObserver", "join_ranges", "runtime_operators",
]  # fmt: skip

_MAX_BIN_GROWTH = 4
_BIN_COUNT_BY_METHOD = {"entropy": 511, "percentile": 2048, "mse": 2048}
_QUANTIZED_BIN_COUNT = 128
_QUANTIZATION_STEP_COUNT = 255
_MAX_HALF_MAGNITUDE = 6e4
RangeBounds = tuple[float, float]


class RangeCalibrator(Protocol):
    """Takes the activations of one batch after the other; holds no activation itself."""

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        """Add activations, by tensor name."""
        ...

    def ranges(self) -> dict[str, RangeBounds]:
        """Return the range of each tensor seen so far; a bound is not finite if a value was NaN or infinite."""
        ...


class ActivationObserver(HistogramCalibrater):  # type: ignore[misc]
    """Runs the float model with the chosen tensors as further outputs, on one thread and unoptimised.

    Args:
        model_path: ONNX file; a "-inferred" file appears next to it temporarily.
        folder: Scratch folder for the augmented model.
        tensors: Activations to observe.
        collector: Where they go.

    Raises:
        UserError: A tensor is not among the float activations of the model.
    """

    def __init__(self, model_path: Path, folder: Path, tensors: Collection[str], collector: RangeCalibrator) -> None:
        super().__init__(model_path, augmented_model_path=str(folder / "augmented.onnx"), use_external_data_format=True)
        self.collector = collector
        self._chosen = frozenset(tensors)
        self.augment_graph()
        self.create_inference_session()

    def select_tensors_to_calibrate(self, model: Any) -> tuple[set[str], Mapping[str, Any]]:
        """Return the chosen tensors; ONNX Runtime would take all inputs and outputs of its operator types."""
        floats, infos = super().select_tensors_to_calibrate(model)
        missing = sorted(self._chosen - floats)
        if missing:
            raise UserError(
                f"calibration: {', '.join(map(repr, missing[:5]))} cannot be observed; "
                "only float activations whose type ONNX shape inference finds can"
            )
        return set(self._chosen), infos

    def create_inference_session(self) -> None:
        """Create ONNX Runtime's session with one thread, so that ranges do not depend on the number of cores."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.infer_session = onnxruntime.InferenceSession(
            self.augmented_model_path, options, providers=["CPUExecutionProvider"]
        )

    def observe(self, batch: Mapping[str, Array]) -> None:
        """Run one batch and hand its activations to the collector."""
        self.collect_data(_SingleBatchReader(batch))


def runtime_operators() -> frozenset[tuple[str, str]]:
    """Return domain and name of each operator that ONNX Runtime runs, its own ones among them.

    It defines some of TensorRT's plug-ins too, to pass them on to TensorRT.
    """
    every = ((schema.domain, schema.name) for schema in get_all_operator_schema())
    return frozenset((domain, name) for domain, name in every if not name.endswith("_TRT"))


class MinMaxCalibrator:
    """Smallest and largest value of each tensor."""

    def __init__(self) -> None:
        self._ranges: dict[str, RangeBounds] = {}

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        """See `RangeCalibrator.collect`."""
        for name, parts in arrays.items():
            for values in parts:
                if values.size:
                    found = _min_and_max(values)
                    self._ranges[name] = join_ranges(self._ranges.get(name, found), found)

    def ranges(self) -> dict[str, RangeBounds]:
        """See `RangeCalibrator.ranges`."""
        return dict(self._ranges)


class AbsMaxCalibrator(MinMaxCalibrator):
    """The largest magnitude to both sides, as TensorRT and ModelOpt take it ("max"); one side where all values are."""

    def ranges(self) -> dict[str, RangeBounds]:
        """See `RangeCalibrator.ranges`."""
        return {name: _is_two_sided(low, high) for name, (low, high) in super().ranges().items()}


class HistogramCalibrator(HistogramCollector):  # type: ignore[misc]
    """ONNX Runtime's histograms of the values, and the range that a method takes from them.

    Entropy: the symmetric threshold with the smallest Kullback-Leibler divergence between the clipped and the
    quantized histogram, then clipped to the values seen (S. Migacz, "8-bit Inference with TensorRT", GTC 2017,
    s7310). Percentile: the quantiles (100 - p) / 2 and 100 - (100 - p) / 2, also clipped. MSE: the symmetric
    threshold with the smallest mean squared error of 8-bit integers, also clipped; see `_minimize_clipping_error`.

    Args:
        method: "entropy", "percentile" or "mse".
        percentile: Share of the values inside, in per cent; for method "percentile".
    """

    def __init__(self, method: str, percentile: float) -> None:
        super().__init__(
            method=method, symmetric=False, num_bins=_BIN_COUNT_BY_METHOD[method],
            num_quantized_bins=_QUANTIZED_BIN_COUNT, percentile=percentile,
            scenario="same",
        )  # fmt: skip
        self._zeros: dict[str, int] = {}
        self._broken: dict[str, RangeBounds] = {}

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        """See `RangeCalibrator.collect`."""
        for name, parts in arrays.items():
            for values in parts:
                if not values.size:
                    continue
                found = _min_and_max(values)
                if all(map(math.isfinite, found)):
                    self._zeros[name] = self._zeros.get(name, 0) + values.size - int(np.count_nonzero(values))
                    self.collect_value({name: values.astype(np.float64)})
                else:
                    self._broken[name] = join_ranges(self._broken.get(name, found), found)

    def merge_histogram(self, old: Any, values: Array, low: Any, high: Any, threshold: Any) -> Any:
        """Merge as ONNX Runtime does, after widening the old bins if it would add too many new ones."""
        counts, edges, old_low, old_high, old_threshold = old
        if old_threshold > 0 and len(counts) * threshold > _MAX_BIN_GROWTH * self.num_bins * old_threshold:
            centres = (edges[:-1] + edges[1:]) / 2
            counts, edges = np.histogram(centres, self.num_bins, range=(-threshold, threshold), weights=counts)
            old = (counts, edges, old_low, old_high, threshold)
        return super().merge_histogram(old, values, low, high, threshold)

    def ranges(self) -> dict[str, RangeBounds]:
        """See `RangeCalibrator.ranges`."""
        found = {}
        for name, (low, high) in self._thresholds().items():
            if low > high:  # compute_percentile takes the lower edge of a bin: a constant ends below itself
                low, high = self.histogram_dict[name][2:4]
            found[name] = (float(low), float(high))
        return found | self._broken

    def _thresholds(self) -> dict[str, RangeBounds]:
        if self.method == "mse":
            return {
                name: _minimize_clipping_error(histogram, self._zeros[name])
                for name, histogram in self.histogram_dict.items()
            }
        with contextlib.redirect_stdout(io.StringIO()):
            found = self.compute_entropy() if self.method == "entropy" else self.compute_percentile()
        return {name: bounds[:2] for name, bounds in found.items()}


def _minimize_clipping_error(histogram: Sequence[Any], zeros: int) -> RangeBounds:
    """Return the range, clipped at +-T, that 8-bit integers represent with the smallest mean squared error.

    Error of a threshold T: step^2 / 12 for each value within that is not 0 (which has no error), and (|x| - T)^2
    for each beyond (Sakr et al. 2022, "Optimal clipping and magnitude-aware differentiation", arXiv:2206.06501,
    equation 3); the step is the width of the clipped range, 0 included, over 255. All thresholds at bin edges are
    tried at once.

    Args:
        histogram: Counts of bins that lie symmetrically around 0, an even number of them; their edges; the smallest
            and the largest value.
        zeros: Number of values that are 0.
    """
    counts, edges, low, high = histogram[:4]
    half = len(counts) // 2
    folded = (counts[half:] + counts[:half][::-1]).astype(np.float64)
    middles = (edges[half:-1] + edges[half + 1 :]) / 2
    thresholds = edges[half + 1 :]
    inside = np.cumsum(folded) - zeros
    beyond = [np.append(np.cumsum((folded * middles**power)[::-1])[::-1][1:], 0.0) for power in (0, 1, 2)]
    clipped = beyond[2] - 2 * thresholds * beyond[1] + thresholds**2 * beyond[0]
    steps = (np.minimum(thresholds, max(high, 0)) + np.minimum(thresholds, max(-low, 0))) / _QUANTIZATION_STEP_COUNT
    best = float(thresholds[np.argmin(clipped + inside * steps**2 / 12)])
    return max(float(low), -best), min(float(high), best)


class _SingleBatchReader:
    """A `CalibrationDataReader` of one batch, so that no second one is ever held."""

    def __init__(self, batch: Mapping[str, Array]) -> None:
        self._batch: Mapping[str, Array] | None = batch

    def get_next(self) -> Mapping[str, Array] | None:
        batch, self._batch = self._batch, None
        return batch


def _min_and_max(values: Array) -> RangeBounds:
    low, high = float(np.min(values)), float(np.max(values))
    if values.dtype != np.float16:
        return low, high
    return (-math.inf if low < -_MAX_HALF_MAGNITUDE else low), (math.inf if high > _MAX_HALF_MAGNITUDE else high)


def join_ranges(first: RangeBounds, second: RangeBounds) -> RangeBounds:
    """Return the smallest range that contains two ranges; NaN if one of them has NaN."""
    return float(np.minimum(first[0], second[0])), float(np.maximum(first[1], second[1]))


def _is_two_sided(low: float, high: float) -> RangeBounds:
    amax = max(-low, high)
    return (0.0 if low >= 0 else -amax), (0.0 if high <= 0 else amax)


class SentinelObserver(MinMaxCalibrator):
    """Observe sentinels and tensors with few values, in addition to the ranges of another calibrator.

    Tensors with few values (masks of 0 and 1) keep their full range, whatever share of the values the method keeps.

    Args:
        collector: Calibrator of all other tensors.
    """

    def __init__(self, collector: RangeCalibrator) -> None:
        super().__init__()
        self._collector = collector
        self._spreads: dict[str, MagnitudeHistogram] = defaultdict(MagnitudeHistogram)

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        """See `RangeCalibrator.collect`."""
        super().collect(arrays)
        self._collector.collect(arrays)
        for name, parts in arrays.items():
            largest = max(map(abs, self._ranges.get(name, (math.nan,))))
            for values in parts:
                # Without large values only masks of few values matter, and one batch shows that a tensor is none.
                if math.isfinite(largest) and (
                    largest >= MIN_SENTINEL_MAGNITUDE or self._spreads[name].has_few_magnitudes
                ):
                    self._spreads[name].add(values)

    def ranges(self) -> dict[str, RangeBounds]:
        """See `RangeCalibrator.ranges`."""
        whole, found = super().ranges(), self._collector.ranges()
        for name, spread in self._spreads.items():
            if not is_finite(whole[name]):
                continue
            if spread.has_sentinel:
                found[name] = _sentinel_range(*whole[name])
            elif spread.has_few_magnitudes:
                found[name] = join_ranges(whole[name], found[name])
        return found


def _sentinel_range(low: float, high: float) -> SentinelRange:
    """Return the range of a tensor with a sentinel on one side, or on both."""
    least = 0.9 * max(-low, high)
    return SentinelRange(-math.inf if -low >= least else low, math.inf if high >= least else high)
