"""Observer of values that ranges alone do not show: sentinels, and masks with few values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from harness.accuracy.calibration.histogram_calibrators import Bounds, Collector, Extremes, joined
from harness.accuracy.calibration.usable_ranges import Sentinel, is_finite
from harness.api import Array
from harness.graph.rules.sentinels import SMALLEST_SENTINEL, Spread

__all__ = ["Watched"]


class Watched(Extremes):
    """Watches what another collector takes: for sentinels, and for tensors with few values.

    The latter (masks of 0 and 1) keep their whole range, whatever part of the values the method would keep.

    Args:
        collector: Gives the ranges of all other tensors.
    """

    def __init__(self, collector: Collector) -> None:
        super().__init__()
        self._collector = collector
        self._spreads: dict[str, Spread] = defaultdict(Spread)

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        """See `Collector.collect`."""
        super().collect(arrays)
        self._collector.collect(arrays)
        for name, parts in arrays.items():
            largest = max(map(abs, self._ranges.get(name, (math.nan,))))
            for values in parts:
                # Without large values only masks of few values matter, and one batch shows that a tensor is none.
                if math.isfinite(largest) and (largest >= SMALLEST_SENTINEL or self._spreads[name].few):
                    self._spreads[name].add(values)

    def ranges(self) -> dict[str, Bounds]:
        """See `Collector.ranges`."""
        whole, found = super().ranges(), self._collector.ranges()
        for name, spread in self._spreads.items():
            if not is_finite(whole[name]):
                continue
            if spread.sentinel:
                found[name] = _beyond(*whole[name])
            elif spread.few:
                found[name] = joined(whole[name], found[name])
        return found


def _beyond(low: float, high: float) -> Sentinel:
    """Return the range of a tensor with a sentinel on one side, or on both."""
    least = 0.9 * max(-low, high)
    return Sentinel(-math.inf if -low >= least else low, math.inf if high >= least else high)
