"""Signal-to-quantization-noise ratio (SQNR) of one output, with separate values for slices of different scale.

One SQNR of a whole output hides errors of its small values: scores that are all 0 next to boxes in pixels. So slices
along an axis whose RMS differ by a factor of `SEPARATE_RMS_RATIO` or more are scored separately, and the worst value
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.plugins.api import Array

MAX_SQNR_DB = 120.0
"""Largest magnitude of an SQNR in dB, for equal outputs; float32 hardly resolves more."""
ROUNDING_RESOLUTION = 1e-6
"""Relative difference that round-off may cause: about eight units in the last place of float32."""
SEPARATE_RMS_RATIO = 30.0
"""Smallest ratio of the RMS of two slices that are scored separately."""
MAX_SLICES = 512
"""Largest length of an axis that is split at any point; longer axes, and axes of positions, are split only at a gap of
`SEPARATE_RMS_RATIO` between two successive values of the RMS."""
MIN_VALUES = 16
"""Smallest number of values of a slice, over all samples, for a meaningful RMS."""
MIN_SAMPLES = 8
"""Smallest number of values of a slice that has one value per sample, such as a logit."""
MIN_PEAK_PROBABILITY = 1 / 255
"""Probability that a class must reach to be scored separately; 8 bits from 0 to 1 do not resolve smaller ones."""
MIN_POSITION_PEAK_PROBABILITY = 4 * MIN_PEAK_PROBABILITY
"""Probability that a position must reach to be scored separately; larger than `MIN_PEAK_PROBABILITY`, because among
thousands of positions some reach that by chance."""
QUIET_POWER_SHARE = 1e-3
"""Share of a part's mean power; if a batch has less, its error is compared with the mean power over all batches."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """Slices of an output that are scored together.

    Attributes:
        axis: Axis that the slices are along.
        slices: Indices of the slices, ascending.
        power: Mean square of the reference in the slices.
    """

    axis: int
    slices: tuple[int, ...]
    power: float

    def __str__(self) -> str:
        first, last = self.slices[0], self.slices[-1]
        if first == last:
            return f"axis {self.axis} slice {first}"
        if len(self.slices) == last - first + 1:
            return f"axis {self.axis} slices {first}..{last}"
        return f"axis {self.axis}, {len(self.slices)} slices among {first}..{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstPart:
    """Worst SQNR in dB of an output, and the slices that it belongs to (None: the whole output)."""

    sqnr_db: float
    part: OutputPart | None = None

    def __str__(self) -> str:
        return f"{self.sqnr_db:.1f} dB" if self.part is None else f"{self.part}: {self.sqnr_db:.1f} dB"


def output_sqnr(reference: Array, output: Array, parts: Sequence[OutputPart] | None = None) -> WorstPart:
    """Return the SQNR in dB of an output against its reference, of the worst part if its slices differ in scale.

    Args:
        reference: Output of the float model, of any floating type; the first axis counts samples.
        output: Output to compare, of the same shape.
        parts: Result of `split_output` for several batches; None: the parts of this reference.
    """
    found = split_output([reference]) if parts is None else parts
    figures = [WorstPart(sqnr_db=part_sqnr(reference, output, part), part=part) for part in found or (None,)]
    return min(figures, key=lambda worst: worst.sqnr_db)


def part_sqnr(reference: Array, output: Array, part: OutputPart | None = None) -> float:
    """Return the SQNR in dB of a part, or of the whole output, within +-120; 120 without any error.

    Samples of a batch that differ in scale are scored separately like other slices, and the worst of them counts. If a
    part is almost 0 in this batch, the error is compared with its mean power over all batches.
    """
    p, q = select_values(reference, part), select_values(output, part)
    usual = 0.0 if part is None else part.power * p.size
    if np.square(p).sum() < QUIET_POWER_SHARE * usual:
        return _ratio_db(usual, float(np.square(p - q).sum()))
    rows = _group_slices(_SliceStatistics.of([p], 0)) if p.ndim > 1 and len(p) > 1 else ()
    pairs = [(p[list(chosen)], q[list(chosen)]) for chosen in rows] or [(p, q)]
    return min(_ratio_db(float(np.square(a).sum()), float(np.square(a - b).sum())) for a, b in pairs)


def select_values(array: Array, part: OutputPart | None) -> Floats:
    """Return the values of a part, or of the whole output, as float64."""
    values: Floats = np.asarray(array, np.float64)
    return values if part is None else np.take(values, part.slices, axis=part.axis)


def split_output(samples: Sequence[Array]) -> tuple[OutputPart, ...]:
    """Return the parts of an output that are scored separately; none if the whole output has one scale.

    Args:
        samples: The reference's output for each batch; if shapes differ, the output is not split.
    """
    if len({array.shape for array in samples}) != 1 or not samples[0].size:
        return ()
    parts = []
    for axis in range(1, samples[0].ndim):
        slices = _SliceStatistics.of(samples, axis)
        for group in _group_slices(slices):
            parts.append(OutputPart(axis=axis, slices=group, power=float(slices.power[list(group)].mean())))
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceStatistics:
    """Statistics of the slices of an output along one axis, over all samples.

    Attributes:
        power: Mean square of each slice.
        scale: Quantity by which slices are grouped: the RMS, or the standard deviation of slices with one value a
            sample, because a logit may be near 0 on all samples by chance.
        peak: Largest magnitude of each slice.
        probable: Whether all values of a slice lie within 0 to 1.
        constant: Whether all values of a slice are equal, on all samples.
        graded: Whether slices are split wherever the ratio to the largest RMS of a group reaches `SEPARATE_RMS_RATIO`,
            not only at a gap of that ratio between two successive values.
        enough: Whether a slice has enough values for a meaningful RMS.
    """

    power: Floats
    scale: Floats
    peak: Floats
    probable: npt.NDArray[np.bool_]
    constant: npt.NDArray[np.bool_]
    graded: bool
    enough: bool

    @classmethod
    def of(cls, arrays: Sequence[Array], axis: int) -> _SliceStatistics:
        """Return the statistics of the slices along an axis of the given batches; axis 0 counts samples."""
        shape, others = arrays[0].shape, tuple(i for i in range(arrays[0].ndim) if i != axis)
        sums = [_slice_sums(np.asarray(array, np.float64), others) for array in arrays]
        low, high = np.min([s[0] for s in sums], axis=0), np.max([s[1] for s in sums], axis=0)
        mean, power = np.mean([s[2] for s in sums], axis=0), np.mean([s[3] for s in sums], axis=0)
        values = arrays[0].size // shape[axis] * len(arrays)
        single, scale = axis > 0 and values == shape[0] * len(arrays), np.sqrt(power)
        if single:
            spread = np.sqrt(np.maximum(power - np.square(mean), 0.0))
            scale = np.where(spread > ROUNDING_RESOLUTION * scale, spread, scale)
        return cls(
            power=power,
            scale=scale,
            peak=(peak := np.maximum(-low, high)),
            probable=(low >= 0) & (high <= 1),
            constant=high - low <= ROUNDING_RESOLUTION * np.maximum(1.0, peak),
            graded=axis == _feature_axis(shape) and shape[axis] <= MAX_SLICES,
            enough=values >= (MIN_SAMPLES if single else MIN_VALUES),
        )


def _slice_sums(array: Floats, axes: tuple[int, ...]) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the least, largest, mean and mean square of each slice."""
    return array.min(axis=axes), array.max(axis=axes), array.mean(axis=axes), np.square(array).mean(axis=axes)


def _feature_axis(shape: Sequence[int]) -> int:
    """Return the axis that by convention counts features, as opposed to positions."""
    if len(shape) == 3:
        return 1 if shape[1] <= shape[2] else 2
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return 3
    return 1


def _group_slices(slices: _SliceStatistics) -> tuple[tuple[int, ...], ...]:
    """Return groups of slices, each of which is scored separately; none if all slices are scored together."""
    heard = slices.peak > ROUNDING_RESOLUTION * max(1.0, float(slices.peak.max()))
    least = MIN_PEAK_PROBABILITY if slices.graded else MIN_POSITION_PEAK_PROBABILITY
    read = heard & (~slices.probable | (slices.peak >= least))
    if not (read & slices.probable).any():  # if all probabilities are small, they count nevertheless
        read = heard
    groups: list[list[int]] = []
    for i in sorted(np.flatnonzero(read).tolist(), key=lambda i: -slices.scale[i]):
        # Probabilities have one unit and those of rare classes decrease gradually: they are split at gaps only.
        first = slices.graded and groups and not slices.probable[[*groups[-1], i]].all()
        if groups and slices.scale[i] * SEPARATE_RMS_RATIO > slices.scale[groups[-1][0 if first else -1]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    for k in range(len(groups) - 1, 0, -1):  # quiet constants carry no information next to varying parts
        if slices.constant[groups[k]].all() and not slices.constant[groups[0]].all():
            groups[k - 1] += groups.pop(k)
    if len(groups) < 2 or not slices.enough:
        return ()
    for i in np.flatnonzero(heard & ~read).tolist():
        next(group for group in groups if slices.probable[group].any()).append(i)
    groups[-1] += np.flatnonzero(~heard).tolist()
    return tuple(tuple(sorted(group)) for group in groups)


def _ratio_db(signal: float, noise: float) -> float:
    if noise == 0:
        return MAX_SQNR_DB
    if signal == 0:
        return -MAX_SQNR_DB
    return float(np.clip(10 * (np.log10(signal) - np.log10(noise)), -MAX_SQNR_DB, MAX_SQNR_DB))
