"""Signal-to-quantization-noise ratio (SQNR) of one output, scored apart where its slices differ in scale.

One SQNR over a whole output ignores its quiet parts: boxes in pixels hide scores that are all 0. So slices along an
axis whose RMS differ by `SEPARATE_RMS_RATIO` times or more never share a figure, and the worst figure counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.api import Array

MAX_SQNR_DB = 120.0
"""Bound of SQNR: equal outputs have no finite one, and float32 cannot tell much more apart."""
ROUNDING_RESOLUTION = 1e-6
"""Some eight units in the last place of a float32: runtimes round outputs that differ by less each in its own way."""
SEPARATE_RMS_RATIO = 30.0
"""Ratio of RMS from which two slices are scored apart."""
MAX_SLICES = 512
"""Longer axes, and those of positions, are split only where no slice lies between the loud and the quiet ones."""
MIN_VALUES = 16
"""A slice has as many values, over all samples, or its RMS says little."""
MIN_SAMPLES = 8
"""The same for outputs that have one value a sample in each slice, such as logits."""
MIN_PEAK_PROBABILITY = 1 / 255
"""Classes that never reach this probability are scored with the others: 8 bits from 0 to 1 do not show them."""
MIN_POSITION_PEAK_PROBABILITY = 4 * MIN_PEAK_PROBABILITY
"""The same for positions: of thousands with sparse scores, some come near `MIN_PEAK_PROBABILITY` by chance."""
QUIET_POWER_SHARE = 1e-3
"""A batch in which a part has less than this share of its mean power is compared with the mean power."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """Slices of an output that are scored together.

    Attributes:
        slices: Their indices, ascending.
        power: Mean square of the reference in them.
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
    """The worst figure of an output, and the slices that it belongs to (None: the whole output)."""

    sqnr_db: float
    part: OutputPart | None = None

    def __str__(self) -> str:
        return f"{self.sqnr_db:.1f} dB" if self.part is None else f"{self.part}: {self.sqnr_db:.1f} dB"


def output_sqnr(reference: Array, output: Array, parts: Sequence[OutputPart] | None = None) -> WorstPart:
    """Return the SQNR of an output against its reference, of the worst part where its slices differ in scale.

    Args:
        reference: Of any floating type; the first axis counts samples.
        output: Of the same shape.
        parts: Of `split_output`, where several batches decide on them; None: those of this reference.
    """
    found = split_output([reference]) if parts is None else parts
    figures = [WorstPart(sqnr_db=part_sqnr(reference, output, part), part=part) for part in found or (None,)]
    return min(figures, key=lambda worst: worst.sqnr_db)


def part_sqnr(reference: Array, output: Array, part: OutputPart | None = None) -> float:
    """Return the SQNR in dB of a part, or of the whole output, within +-`MAX_SQNR_DB`.

    Samples of a batch that differ in scale are scored apart like other slices, and the worst of them counts. A part
    that is silent in this batch is compared with its power over all batches.
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
    """Return the parts of an output that are scored apart; none where the whole output has one scale.

    Args:
        samples: The output for each batch of the reference; shapes that differ leave it whole.
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
        constant: Whether a slice is the same all over, on all samples.
        graded: Whether slices are split wherever `SEPARATE_RMS_RATIO` is reached, not only at a gap of
            `SEPARATE_RMS_RATIO` between neighbours.
        enough: Whether a slice has values enough.
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
        """Return the slices of an axis; axis 0 counts samples, which every other slice goes through."""
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
    """Return the axis that counts features by convention: not the positions of a row, an image or a volume."""
    if len(shape) == 3:
        return 1 if shape[1] <= shape[2] else 2
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return 3
    return 1


def _group_slices(slices: _SliceStatistics) -> tuple[tuple[int, ...], ...]:
    """Return the slices that are scored together; none where all are."""
    heard = slices.peak > ROUNDING_RESOLUTION * max(1.0, float(slices.peak.max()))
    least = MIN_PEAK_PROBABILITY if slices.graded else MIN_POSITION_PEAK_PROBABILITY
    read = heard & (~slices.probable | (slices.peak >= least))
    if not (read & slices.probable).any():  # probabilities that are all small are all there is to read
        read = heard
    groups: list[list[int]] = []
    for i in sorted(np.flatnonzero(read).tolist(), key=lambda i: -slices.scale[i]):
        # Probabilities have one unit, and those of rare classes fade out: they are split at gaps alone.
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
