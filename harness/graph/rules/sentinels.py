"""Sentinels: finite values that mean "no value", such as -1e4 in an attention mask or -1e9 around a MaxPool's input.

With such a value in the range, one step of an 8-bit scale is larger than nearly all other values of the tensor. Unlike
outliers and the massive activations of transformers, sentinels repeat: the largest magnitudes form a narrow cluster
with a gap below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BIN_COUNT = 1 << 15  # bins by the upper 16 bits of a float32 without its sign: 128 bins for each power of two
_CHUNK_VALUES = 1 << 18
_QUANTIZATION_LEVELS = 127
_MIN_COLLAPSED_SHARE = 0.99
_MAX_CLUSTER_WIDTH_BINS = 12  # largest width of a cluster, 5 to 9 per cent, because scores are added to sentinels
_MAX_RARE_SHARE = 1e-4  # clusters with a smaller share are outliers, unless they have a single value
_MIN_GAP_RATIO = 16  # smallest number of empty bins below a cluster, 6 to 12 per cent
_MAX_CLUSTER_COUNT = 4  # several clusters, because the sum of two masks has -1e4 and -2e4
MIN_SENTINEL_MAGNITUDE = 100.0
"""Magnitude from which a value may be a sentinel: shifted windows are masked with -100."""
_MIN_LONE_SENTINEL_MAGNITUDE = 1000.0
"""8 bits can represent one value and zeros, but the value is a sentinel if it is added to scores."""


@dataclass(slots=True)
class MagnitudeHistogram:
    """Histogram of a tensor's magnitudes over several batches; the width of a bin is at most 0.8 % of its values.

    Attributes:
        bins: Numbers of the bins that are not empty, in ascending order; bin 0 has the zeros.
        counts: Number of values in each of these bins.
    """

    bins: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, values: Array) -> None:
        """Count the values of another batch, which must be finite."""
        total = np.zeros(_BIN_COUNT, np.int64)
        total[self.bins] = self.counts
        flat = np.ravel(values)
        for start in range(0, flat.size, _CHUNK_VALUES):
            part = flat[start : start + _CHUNK_VALUES].astype(np.float32).view(np.uint32) >> 16
            total += np.bincount(part & (_BIN_COUNT - 1), minlength=_BIN_COUNT)
        self.bins = np.flatnonzero(total)
        self.counts = total[self.bins]

    @property
    def has_few_magnitudes(self) -> bool:
        """Return whether the values fill at most 4 bins, as in a mask."""
        return len(self.bins) <= _MAX_CLUSTER_COUNT

    @property
    def has_sentinel(self) -> bool:
        """Return whether the tensor has a sentinel, also if all other values are zeros, as in an additive mask.

        A sentinel is a value, such as -1e4 in a mask, far above all others in magnitude, that means "none".
        """
        alone = (
            self.has_few_magnitudes
            and self.bins.size
            and self.counts[-1] > 1
            and _bin_lower_bound(self.bins[-1]) >= _MIN_LONE_SENTINEL_MAGNITUDE
        )
        return bool(alone) or self.is_collapsed_by_sentinel

    @property
    def is_collapsed_by_sentinel(self) -> bool:
        """Return whether a scale for the range with a sentinel rounds nearly all other values to 0 or one step."""
        first = int(self.bins.size > 0 and self.bins[0] == 0)
        rest, counts = self.bins[first:], self.counts[first:]
        if not rest.size or _bin_lower_bound(rest[-1]) < MIN_SENTINEL_MAGNITUDE:
            return False
        step = np.array(_bin_lower_bound(rest[-1]) / _QUANTIZATION_LEVELS, np.float32)
        below = int(np.searchsorted(rest, int(step.view(np.uint32) >> 16)))
        starts = [0, *map(int, np.flatnonzero(np.diff(rest) > _MIN_GAP_RATIO) + 1)]
        for start in starts[: -_MAX_CLUSTER_COUNT - 1 : -1]:  # of the clusters, from the largest magnitudes down
            width, count = rest[-1] - rest[start], counts[start:].sum()
            if (
                not start
                or width >= _MAX_CLUSTER_WIDTH_BINS
                or count < (_MAX_RARE_SHARE * counts.sum() if width else 2)
            ):
                return False
            rest, counts = rest[:start], counts[:start]
            if counts[:below].sum() >= _MIN_COLLAPSED_SHARE * counts.sum():
                return True
        return False


def holds_sentinel(values: Array, *, alone: bool = True) -> bool:
    """Return whether a constant with finite values has a sentinel, see `MagnitudeHistogram`; False if it is empty.

    Args:
        alone: Whether a sentinel counts if all other values are zeros.
    """
    if not values.size or max(-values.min(), values.max()) < MIN_SENTINEL_MAGNITUDE:
        return False  # the case of nearly all constants, without a histogram, which takes much longer
    spread = MagnitudeHistogram()
    spread.add(values)
    return spread.has_sentinel if alone else spread.is_collapsed_by_sentinel


def _bin_lower_bound(number: np.int64) -> float:
    return float(np.array(number << 16, np.uint32).view(np.float32))
