"""Range estimators of activations; plug-ins add one by an entry point of `qdq.range_estimators`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from harness.base.errors import UserError
from harness.base.text import format_names
from harness.graph.quantize.numeric_choices import channel_name, channel_tensor
from harness.graph.rules.operator_sets import MAX_CONSTANT_MAGNITUDE, MIN_CONSTANT_SCALE
from harness.graph.rules.sentinels import MIN_SENTINEL_MAGNITUDE, MagnitudeHistogram
from harness.plugins import registry
from harness.plugins.api import Array
from search.space import Space

_MAX_HALF_MAGNITUDE = 6e4
RangeBounds = tuple[float, float]


class RangeEstimator(Protocol):
    """Estimator of ranges from the activations of successive batches, which it does not keep; it must be picklable.

    If the constructor has a parameter `percentile`, it receives the percentile of the calibration.
    """

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        """Add the activations of a batch.

        Args:
            arrays: Arrays of each tensor by name, usually one; a channel of a tensor is an entry of its own, named by
                `harness.graph.quantize.numeric_choices.channel_name`.
        """
        ...

    def ranges(self) -> Mapping[str, RangeBounds]:
        """Return (lowest, highest) of each tensor seen so far; a bound is not finite if a value was NaN or infinite."""
        ...


def create_estimator(name: str, percentile: float) -> RangeEstimator:
    """Return a new range estimator.

    Args:
        name: Name of an entry point of `qdq.range_estimators`.
        percentile: Percentile for estimators with this parameter.

    Raises:
        UserError: There is no estimator of this name, or its constructor fails.
    """
    takes = "percentile" in registry.plugin_signature("range estimator", name).parameters
    made: RangeEstimator = registry.create_plugin("range estimator", name, {"percentile": percentile} if takes else {})
    return made


class MinMaxCalibrator:
    """Estimator that takes the smallest and the largest value of each tensor."""

    def __init__(self) -> None:
        self._ranges: dict[str, RangeBounds] = {}

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        for name, found in _bounds_of_arrays(arrays):
            self._ranges[name] = join_ranges(self._ranges.get(name, found), found)

    def ranges(self) -> dict[str, RangeBounds]:
        return dict(self._ranges)


class AbsMaxCalibrator(MinMaxCalibrator):
    """Estimator that takes the largest magnitude for both sides, as TensorRT and ModelOpt do ("max").

    If all values have one sign, the range is from 0 to the largest magnitude on that side.
    """

    def ranges(self) -> dict[str, RangeBounds]:
        found = {}
        for name, (low, high) in super().ranges().items():
            amax = max(-low, high)
            found[name] = (0.0 if low >= 0 else -amax), (0.0 if high <= 0 else amax)
        return found


class MeanMinMaxCalibrator:
    """Estimator that takes the mean over batches of the smallest value, and that of the largest value.

    This is NNCF's default for activations ("mean_min_max"), without its asymmetric rounding.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, int]] = {}

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        for name, (low, high) in _bounds_of_arrays(arrays):
            sums = self._sums.get(name, (0.0, 0.0, 0))
            self._sums[name] = (sums[0] + low, sums[1] + high, sums[2] + 1)

    def ranges(self) -> dict[str, RangeBounds]:
        return {name: (low / count, high / count) for name, (low, high, count) in self._sums.items()}


def _bounds_of_arrays(arrays: Mapping[str, Sequence[Array]]) -> Iterable[tuple[str, RangeBounds]]:
    return ((name, min_and_max(values)) for name, parts in arrays.items() for values in parts if values.size)


def min_and_max(values: Array) -> RangeBounds:
    """Return the smallest and the largest value; float16 values beyond 6e4 in magnitude count as infinite."""
    low, high = float(np.min(values)), float(np.max(values))
    if values.dtype != np.float16:
        return low, high
    return (-math.inf if low < -_MAX_HALF_MAGNITUDE else low), (math.inf if high > _MAX_HALF_MAGNITUDE else high)


def join_ranges(first: RangeBounds, second: RangeBounds) -> RangeBounds:
    """Return the smallest range that contains two ranges; NaN if one of them has NaN."""
    return float(np.minimum(first[0], second[0])), float(np.maximum(first[1], second[1]))


class SentinelObserver(MinMaxCalibrator):
    """Estimator that passes activations to others, and detects sentinels and tensors with few different values.

    Tensors with few different values, such as masks of 0 and 1, keep their full range with every method.

    Args:
        estimators: Estimators by name.
        channels: Number of channels (axis 1) of tensors whose channels are estimated too, under the names of
            `harness.graph.quantize.numeric_choices.channel_name`.
    """

    def __init__(self, estimators: Mapping[str, RangeEstimator], channels: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._estimators = estimators
        self._channels = channels or {}
        self._spreads: dict[str, MagnitudeHistogram] = defaultdict(MagnitudeHistogram)

    def collect(self, arrays: Mapping[str, Sequence[Array]]) -> None:
        super().collect(arrays)
        channels = {
            channel_name(name, i): [values[:, i] for values in arrays[name]]
            for name, count in self._channels.items()
            for i in range(count if name in arrays else 0)
        }
        for estimator in self._estimators.values():
            estimator.collect({**arrays, **channels})
        for name, parts in arrays.items():
            largest = max(map(abs, self._ranges.get(name, (math.nan,))))
            for values in parts:
                # A tensor without large values matters only as a mask; one batch shows whether it may be one.
                if math.isfinite(largest) and (
                    largest >= MIN_SENTINEL_MAGNITUDE or self._spreads[name].has_few_magnitudes
                ):
                    self._spreads[name].add(values)

    def ranges_by_estimator(self) -> dict[str, dict[str, RangeBounds]]:
        """Return the range of each tensor and channel, by name of the estimator and then of the tensor.

        The range of a tensor with a sentinel is a `SentinelRange`.
        """
        by_estimator = {estimator: dict(each.ranges()) for estimator, each in self._estimators.items()}
        whole = self.ranges()
        for name, spread in self._spreads.items():
            if not is_finite(whole[name]):
                continue
            low, high = whole[name]
            least = 0.9 * max(-low, high)
            for found in by_estimator.values():
                if spread.has_sentinel:
                    found[name] = SentinelRange(
                        -math.inf if -low >= least else low, math.inf if high >= least else high
                    )
                elif spread.has_few_magnitudes:
                    found[name] = join_ranges(whole[name], found[name])
        return by_estimator


class RangeEstimatorContract:
    """Tests of the contract of a range estimator; a subclass defines `make`."""

    def make(self) -> RangeEstimator:
        """Return a new estimator; the only method that a subclass must implement."""
        raise NotImplementedError("a subclass of RangeEstimatorContract defines make(self)")

    def _ranges(self, *batches: Mapping[str, Sequence[Array]]) -> Mapping[str, tuple[Any, Any]]:
        estimator = self.make()
        for batch in batches:
            estimator.collect(batch)
        return estimator.ranges()

    def test_ranges_lie_within_the_largest_magnitude(self) -> None:
        rng = np.random.default_rng(0)
        batches = [rng.normal(1, 2, (1, 4, 50)).astype(np.float32) for _ in range(4)]
        low, high = self._ranges(*({"x": [values]} for values in batches))["x"]
        largest = max(float(np.abs(values).max()) for values in batches) * 1.001
        assert -largest <= low < high <= largest, "a range is not beyond what was seen"

    def test_tensors_are_independent_and_batches_add_up(self) -> None:
        rng = np.random.default_rng(1)
        x, y = (rng.normal(0, size, (1, 300)).astype(np.float32) for size in (1, 30))
        found = self._ranges({"x": [x]}, {"y": [y]}, {"x": [x + 1]})
        assert found.keys() == {"x", "y"}
        assert found["x"] == self._ranges({"x": [x]}, {"x": [x + 1]})["x"]

    def test_zeros_constants_and_empty_arrays(self) -> None:
        found = self._ranges({"zero": [np.zeros((2, 3), np.float32)], "empty": [np.zeros((0, 3), np.float32)]})
        assert found["zero"] == (0, 0)
        assert "empty" not in found, "an empty tensor has no range"
        low, high = self._ranges({"x": [np.full((2, 3), 5, np.float32)]})["x"]
        assert low <= high, "a constant has a range"

    def test_values_that_are_not_finite_make_the_range_so(self) -> None:
        for value in (np.nan, np.inf):
            values = np.array([[1, value, 2]], np.float32)
            found = self._ranges({"x": [np.ones((1, 3), np.float32)]}, {"x": [values]})["x"]
            assert not np.isfinite(found).all(), f"{value} is not passed over"

    def test_arrays_are_not_changed_and_the_estimator_pickles(self) -> None:
        import copy
        import pickle

        values = np.random.default_rng(2).normal(0, 1, (1, 64)).astype(np.float32)
        before, estimator = values.copy(), self.make()
        estimator.collect({"x": [values]})
        np.testing.assert_array_equal(values, before)
        assert pickle.dumps(estimator), "calibration may run in another process"
        assert copy.deepcopy(estimator).ranges() == estimator.ranges()


Ranges = Mapping[str, tuple[float, float]]
"""Lowest and highest value by tensor name; they are made symmetric later if the dialect requires it."""


EMPTY_RANGE = (math.inf, -math.inf)
"""Range of a tensor that was not observed."""


_OUTSIDE = ""  # consumer of the outputs of the model, see `Edge`


class SentinelRange(NamedTuple):
    """Range of a tensor with a sentinel, such as -1e4 in a mask; infinite on the side of the sentinel."""

    low: float
    high: float


def finite_ranges(ranges: Ranges) -> Ranges:
    """Return the ranges from which a scale can be made, without infinite, huge and zero ones; see `range_warnings`."""
    return {
        name: pair
        for name, pair in ranges.items()
        if is_finite(pair) and (channel_tensor(name) or not _is_constant_zero(pair))
    }


def is_finite(pair: tuple[float, float]) -> bool:
    """Return whether the bounds of a range are finite and at most 1e30 in magnitude."""
    return all(abs(bound) <= MAX_CONSTANT_MAGNITUDE for bound in pair)


def _is_constant_zero(pair: tuple[float, float]) -> bool:
    return all(abs(bound) <= MIN_CONSTANT_SCALE for bound in pair)


def restrict_space(space: Space, ranges: Ranges) -> Space:
    """Return the space without the edges of tensors that stay float, and without dimensions that have no other edge.

    The edges of a dimension to one node stay float together, because a weight and its data must have the same
    precision; the inputs of a Concat are independent.
    """
    broken = ranges.keys() - finite_ranges(ranges).keys()
    apart = {edge.consumer for d in space.dimensions if d.role == "concat" for edge in d.edges} | {_OUTSIDE}
    kept = []
    for dimension in space.dimensions:
        torn = {edge.consumer for edge in dimension.edges if edge.tensor in broken}.difference(apart)
        edges = [edge for edge in dimension.edges if edge.tensor not in broken and edge.consumer not in torn]
        if edges:
            kept.append(replace(dimension, edges=tuple(edges)))
    return space.with_dimensions(tuple(kept))


def range_warnings(ranges: Ranges) -> tuple[str, ...]:
    """Return warnings about tensors that stay float, one line per reason; empty if there are none."""
    ranges = {name: pair for name, pair in ranges.items() if not channel_tensor(name)}
    sentinels = [name for name, pair in ranges.items() if isinstance(pair, SentinelRange)]
    unseen = [name for name, pair in ranges.items() if pair == EMPTY_RANGE]
    named = {*sentinels, *unseen}
    broken = [name for name, pair in ranges.items() if not is_finite(pair) and name not in named]
    dead = [name for name, pair in ranges.items() if _is_constant_zero(pair)]
    said = []
    if unseen:
        said.append(
            "behind plug-in operators, which calibration cannot run, or not there at the sizes of the samples, so they "
            f"stay float: {format_names(unseen)}"
        )
    if broken:
        said.append(f"NaN, infinite or huge on calibration data, so they stay float: {format_names(broken)}")
    if sentinels:
        said.append(
            "one large value (such as the -10000 of a mask) repeats on calibration data and no scale holds the others "
            f"next to it, so they stay float: {format_names(sentinels)}"
        )
    if dead:
        said.append(f"always 0, or without values, on calibration data (dead): {format_names(dead)}; they stay float")
    return tuple(said)


def require_quantizable(space: Space, ranges: Ranges, source: str) -> None:
    """Raise an error for a space in which calibration has left nothing to quantize.

    Raises:
        UserError: No dimension is left; the message starts with `source` and gives the reasons.
    """
    if not len(space):
        raise UserError(
            f"{source}: calibration leaves nothing to quantize: {'; '.join(range_warnings(ranges))}; "
            "check the calibration data and their preprocessing"
        )
