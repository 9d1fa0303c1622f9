"""Observer of values that ranges alone do not show: sentinels, and masks with few values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from harness.accuracy.calibration.histogram_calibrators import (
    MinMaxCalibrator,
    RangeBounds,
    RangeCalibrator,
    join_ranges,
)
from harness.accuracy.calibration.usable_ranges import SentinelRange, is_finite
from harness.api import Array
from harness.graph.rules.sentinels import MIN_SENTINEL_MAGNITUDE, MagnitudeHistogram

__all__ = ["SentinelObserver"]


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
