"""Calibraters of ONNX Runtime for selected tensors, with one batch in memory at a time and without console output.

They are based on `onnxruntime.quantization.calibrate` (ONNX Runtime 1.24), with these differences:

- All methods use `HistogramCalibrater.augment_graph`, which makes the tensors outputs of the model. ONNX Runtime's
  `MinMaxCalibrater` adds ReduceMin and ReduceMax to the graph instead. On the CPU these skip a single NaN, so an
  invalid activation would get a range; the augmentation also takes quadratic time. The ranges are the same.
- Entropy starts from 511 bins: with the default of 128 bins for 128 quantized levels the search has a single
  candidate, the whole range, which is minmax. The number is odd because `get_entropy_threshold` takes the middle bin as
  zero, and not larger because the time grows with its square.
- Percentile uses 2048 bins and cuts (100 - percentile) / 2 per cent on each side, because the ranges are not symmetric
  yet; the default for "symmetric" would be a histogram of absolute values.
- Histograms are counted in float64: with float16, many of 2048 bin edges would be equal, and the width of a histogram
  from -3.4e38, the masked scores of many transformers, overflows float32.
- `MSECalibrator` and `L2Calibrator` are additional methods.
- A tensor with NaN or infinite values gets bounds that are not finite, whereas `numpy.nanmin` ignores NaN. The same
  applies to float16 values near the end of its range, such as the -65504 of attention masks.
- A histogram is limited to 4 times its first number of bins: `merge_histogram` keeps the bin width of the first batch,
  so a first image with small activations would lead to gigabytes of bins.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from harness.accuracy.calibration.range_estimators import RangeBounds, SentinelObserver, join_ranges, min_and_max
from harness.base.errors import UserError
from harness.graph.segmented_run import open_reference_session
from harness.plugins.api import Array
from harness.plugins.registry import without_module

with without_module("torch"):  # `onnxruntime.tools` imports PyTorch where it is installed, which takes 3 s
    from onnxruntime.quantization.calibrate import HistogramCalibrater, HistogramCollector

_MAX_BIN_GROWTH = 4
_QUANTIZED_BIN_COUNT = 128
_QUANTIZATION_STEP_COUNT = 255
_MAX_L2_ROUNDS = 8


class ActivationObserver(HistogramCalibrater):  # type: ignore[misc]
    """Runner of the float model with chosen tensors as additional outputs, on one thread, without optimizations.

    Args:
        model_path: ONNX file; ONNX Runtime temporarily writes a file "-inferred" next to it.
        folder: Scratch folder for the augmented model.
        tensors: Names of the activations to observe.
        collector: Receiver of the activations.

    Raises:
        UserError: A tensor is not among the float activations of the model.
    """

    def __init__(self, model_path: Path, folder: Path, tensors: Collection[str], collector: SentinelObserver) -> None:
        super().__init__(model_path, augmented_model_path=str(folder / "augmented.onnx"), use_external_data_format=True)
        self.collector = collector
        self._chosen = frozenset(tensors)
        self.augment_graph()
        self.create_inference_session()

    def select_tensors_to_calibrate(self, model: Any) -> tuple[set[str], Mapping[str, Any]]:
        """Return the chosen tensors, and the types of all tensors by name; ONNX Runtime's method selects by operator.

        Raises:
            UserError: A chosen tensor is not among the float activations of the model.
        """
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
        self.infer_session = open_reference_session(self.augmented_model_path)

    def observe(self, batch: Mapping[str, Array]) -> None:
        """Run one batch and hand its activations to the collector."""
        self.collect_data(_SingleBatchReader(batch))


def runtime_operators() -> frozenset[tuple[str, str]]:
    """Return domain and name of each operator that ONNX Runtime defines, including those of its own domain.

    Plug-in operators that it only passes on to TensorRT ("..._TRT") are left out.
    """
    every = ((schema.domain, schema.name) for schema in get_all_operator_schema())
    return frozenset((domain, name) for domain, name in every if not name.endswith("_TRT"))


class HistogramCalibrator(HistogramCollector):  # type: ignore[misc]
    """Base class of estimators that derive a range from ONNX Runtime's histogram of the values."""

    method_name: ClassVar[str]
    bin_count: ClassVar[int] = 2048

    def __init__(self) -> None:
        super().__init__(
            method=self.method_name, symmetric=False, num_bins=self.bin_count,
            num_quantized_bins=_QUANTIZED_BIN_COUNT, percentile=99.99, scenario="same",
        )  # fmt: skip
        self._zeros: dict[str, int] = {}
        self._broken: dict[str, RangeBounds] = {}

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        for name, parts in arrays.items():
            for values in parts:
                if not values.size:
                    continue
                found = min_and_max(values)
                if all(map(math.isfinite, found)):
                    self._zeros[name] = self._zeros.get(name, 0) + values.size - int(np.count_nonzero(values))
                    self.collect_value({name: values.astype(np.float64)})
                else:
                    self._broken[name] = join_ranges(self._broken.get(name, found), found)

    def merge_histogram(self, old: Any, values: Array, low: Any, high: Any, threshold: Any) -> Any:
        """Return the histogram with new values, as ONNX Runtime does, but widen its bins if it would add too many."""
        counts, edges, old_low, old_high, old_threshold = old
        if old_threshold > 0 and len(counts) * threshold > _MAX_BIN_GROWTH * self.num_bins * old_threshold:
            centres = (edges[:-1] + edges[1:]) / 2
            counts, edges = np.histogram(centres, self.num_bins, range=(-threshold, threshold), weights=counts)
            old = (counts, edges, old_low, old_high, threshold)
        return super().merge_histogram(old, values, low, high, threshold)

    def ranges(self) -> dict[str, RangeBounds]:
        found = {}
        with contextlib.redirect_stdout(io.StringIO()):
            thresholds = self.compute_collection_result() if self.histogram_dict else {}
        for name, (low, high, *_) in thresholds.items():
            if low > high:  # compute_percentile uses the lower edge of a bin, which is below a constant
                low, high = self.histogram_dict[name][2:4]
            found[name] = (float(low), float(high))
        return found | self._broken


class PercentileCalibrator(HistogramCalibrator):
    """Estimator that takes the quantiles (100 - p) / 2 and 100 - (100 - p) / 2 in per cent, within the values seen.

    Args:
        percentile: Share p of the values inside the range, in per cent.
    """

    method_name = "percentile"

    def __init__(self, percentile: float = 99.99) -> None:
        super().__init__()
        self.percentile = percentile


class EntropyCalibrator(HistogramCalibrator):
    """Estimator of the symmetric threshold with the least Kullback-Leibler divergence of the quantized histogram.

    S. Migacz, "8-bit Inference with TensorRT", GTC 2017, s7310.
    """

    method_name = "entropy"
    bin_count = 511


class MSECalibrator(HistogramCalibrator):
    """Estimator of the symmetric threshold with the least mean squared error of 8 bits, within the values seen.

    Error of a threshold T: step^2 / 12 for each value within that is not 0 (which has no error), and (|x| - T)^2
    for each beyond (Sakr et al. 2022, "Optimal clipping and magnitude-aware differentiation", arXiv:2206.06501,
    equation 3); the step is the width of the clipped range, 0 included, over 255. All thresholds at bin edges are
    tried at once.
    """

    method_name = "mse"

    def compute_collection_result(self) -> dict[str, RangeBounds]:
        """Return the threshold of each tensor, clipped to the values seen."""
        found = {}
        for name, (counts, edges, low, high, *_) in self.histogram_dict.items():
            half = len(counts) // 2  # the bins lie symmetrically around 0
            both = _Side(counts[half:] + counts[:half][::-1], edges[half:], math.inf)
            width = np.minimum(both.bounds, max(high, 0)) + np.minimum(both.bounds, max(-low, 0))
            errors = both.clipped + (both.inside - self._zeros[name]) * (width / _QUANTIZATION_STEP_COUNT) ** 2 / 12
            best = float(both.bounds[np.argmin(errors)])
            found[name] = max(float(low), -best), min(float(high), best)
        return found


class L2Calibrator(HistogramCalibrator):
    """Estimator of the range, with independent ends, with the least squared error of 8-bit integers.

    The criterion is that of PyTorch's `HistogramObserver` (after Caffe2's norm_minimization.cc), which moves the ends
    by quantiles. Here each end in turn is set to the best edge of a bin until both stay the same.
    """

    method_name = "l2"

    def compute_collection_result(self) -> dict[str, RangeBounds]:
        """Return the range of each tensor."""
        found = {}
        for name, (counts, edges, low, high, *_) in self.histogram_dict.items():
            half = len(counts) // 2
            sides = [
                _Side(counts[half:], edges[half:], max(high, 0)),
                _Side(counts[:half][::-1], -edges[: half + 1][::-1], max(-low, 0)),
            ]
            ends = [side.bounds[-1] for side in sides]
            for _ in range(_MAX_L2_ROUNDS):
                before = list(ends)
                for index, side in enumerate(sides):
                    other, end = sides[1 - index], ends[1 - index]
                    within = side.inside + other.inside[np.searchsorted(other.bounds, end)] - self._zeros[name]
                    steps = (side.bounds + end) / _QUANTIZATION_STEP_COUNT
                    ends[index] = side.bounds[np.argmin(side.clipped + within * steps**2 / 12)]
                if ends == before:
                    break
            found[name] = max(float(low), -float(ends[1])), min(float(high), float(ends[0]))
        return found


class _Side:
    """Magnitudes of the values on one side of 0, or on both.

    Attributes:
        bounds: Candidates for the end of the range: the edges of bins, at most the largest value.
        inside: Number of values within each candidate.
        clipped: Sum of squared errors of the values beyond each candidate.
    """

    def __init__(self, counts: Array, edges: Array, largest: float) -> None:
        counts = counts.astype(np.float64)
        middles = (edges[:-1] + edges[1:]) / 2
        self.bounds = np.minimum(edges[1:], largest)
        self.inside = np.cumsum(counts)
        beyond = [np.append(np.cumsum((counts * middles**power)[::-1])[::-1][1:], 0.0) for power in (0, 1, 2)]
        self.clipped = beyond[2] - 2 * edges[1:] * beyond[1] + edges[1:] ** 2 * beyond[0]


class _SingleBatchReader:
    """A `CalibrationDataReader` of one batch."""

    def __init__(self, batch: Mapping[str, Array]) -> None:
        self._batch: Mapping[str, Array] | None = batch

    def get_next(self) -> Mapping[str, Array] | None:
        batch, self._batch = self._batch, None
        return batch
