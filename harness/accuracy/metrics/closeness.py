"""Distance between the outputs of an engine and the float model's outputs, which are stored in a reference file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.base.errors import EvaluationFailed
from harness.base.paths import replacing
from harness.base.text import MAX_NAMES_SHOWN, format_names
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
    rows = _group_slices([p], 0)[0] if p.ndim > 1 and len(p) > 1 else ()
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
        groups, power = _group_slices(samples, axis)
        for group in groups:
            parts.append(OutputPart(axis=axis, slices=group, power=float(power[list(group)].mean())))
    return tuple(parts)


def _group_slices(arrays: Sequence[Array], axis: int) -> tuple[tuple[tuple[int, ...], ...], Floats]:
    """Group the slices of an output along an axis of the given batches, of which axis 0 counts samples.

    Returns:
        Groups of slices, each of which is scored separately, none if all slices are scored together; and the mean
        square of each slice.
    """
    shape, others = arrays[0].shape, tuple(i for i in range(arrays[0].ndim) if i != axis)
    exact = [np.asarray(array, np.float64) for array in arrays]
    low, high = np.min([a.min(axis=others) for a in exact], axis=0), np.max([a.max(axis=others) for a in exact], axis=0)
    power = np.mean([np.square(a).mean(axis=others) for a in exact], axis=0)
    values = arrays[0].size // shape[axis] * len(arrays)
    single, scale, peak = axis > 0 and values == shape[0] * len(arrays), np.sqrt(power), np.maximum(-low, high)
    if single:  # by the standard deviation, because a logit may be near 0 on all samples by chance
        mean = np.mean([a.mean(axis=others) for a in exact], axis=0)
        spread = np.sqrt(np.maximum(power - np.square(mean), 0.0))
        scale = np.where(spread > ROUNDING_RESOLUTION * scale, spread, scale)
    features = 1  # by convention the axis that counts features, as opposed to positions
    if len(shape) == 3 and shape[1] > shape[2]:
        features = 2
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        features = 3
    # Graded slices are split wherever the ratio to the largest of a group reaches `SEPARATE_RMS_RATIO`, others only at
    # a gap of that ratio between two successive ones.
    is_graded = axis == features and shape[axis] <= MAX_SLICES
    probable, constant = (low >= 0) & (high <= 1), high - low <= ROUNDING_RESOLUTION * np.maximum(1.0, peak)
    heard = peak > ROUNDING_RESOLUTION * max(1.0, float(peak.max()))
    read = heard & (~probable | (peak >= (MIN_PEAK_PROBABILITY if is_graded else MIN_POSITION_PEAK_PROBABILITY)))
    if not (read & probable).any():  # if all probabilities are small, they count nevertheless
        read = heard
    groups: list[list[int]] = []
    for i in sorted(np.flatnonzero(read).tolist(), key=lambda i: -scale[i]):
        # Probabilities have one unit and those of rare classes decrease gradually: they are split at gaps only.
        first = is_graded and groups and not probable[[*groups[-1], i]].all()
        if groups and scale[i] * SEPARATE_RMS_RATIO > scale[groups[-1][0 if first else -1]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    for k in range(len(groups) - 1, 0, -1):  # quiet constants carry no information next to varying parts
        if constant[groups[k]].all() and not constant[groups[0]].all():
            groups[k - 1] += groups.pop(k)
    if len(groups) < 2 or values < (MIN_SAMPLES if single else MIN_VALUES):
        return (), power
    for i in np.flatnonzero(heard & ~read).tolist():
        next(group for group in groups if probable[group].any()).append(i)
    groups[-1] += np.flatnonzero(~heard).tolist()
    return tuple(tuple(sorted(group)) for group in groups), power


def _ratio_db(signal: float, noise: float) -> float:
    if noise == 0:
        return MAX_SQNR_DB
    if signal == 0:
        return -MAX_SQNR_DB
    return float(np.clip(10 * (np.log10(signal) - np.log10(noise)), -MAX_SQNR_DB, MAX_SQNR_DB))


WORST_PREFIX = "worst: "
"""Prefix of the last sentence of a note, which names the output, or part of one, with the smallest SQNR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonLayout:
    """Rules for comparing the outputs of a model, derived from the float model's outputs.

    Attributes:
        parts: Outputs that are compared, each with the parts that are scored separately; none: the whole output.
        silent: Outputs of floating type that are not compared, because they are constant (`constant_outputs`).
        untyped: Outputs of other types, which are not compared.
    """

    parts: Mapping[str, Sequence[OutputPart]]
    silent: Sequence[str] = ()
    untyped: Sequence[str] = ()

    @property
    def note(self) -> str:
        """Return a note on outputs that are compared in parts or skipped; "" if there are none."""
        said = []
        if self.silent and self.parts.keys() <= set(self.silent):
            said.append(f"fidelity is undefined: every output is constant on all inputs ({format_names(self.silent)})")
        elif self.silent:
            said.append(f"fidelity leaves out outputs that are constant on all inputs: {format_names(self.silent)}")
        if self.untyped:
            said.append(f"fidelity does not compare outputs of whole numbers and others: {format_names(self.untyped)}")
        cut = []
        for name, parts in self.parts.items():
            more = f" and {len(parts) - MAX_NAMES_SHOWN} more" if len(parts) > MAX_NAMES_SHOWN else ""
            cut += [f"output {name!r}: {' and '.join(map(str, parts[:MAX_NAMES_SHOWN]))}{more}"] if parts else []
        if cut:
            said.append(f"fidelity scores slices of different scale apart: {'; '.join(cut[:MAX_NAMES_SHOWN])}")
        return ". ".join(said)

    def to_json(self) -> str:
        """Return the layout as text, for `from_json`."""
        parts = {name: [[p.axis, p.slices, p.power] for p in found] for name, found in self.parts.items()}
        return json.dumps({"parts": parts, "silent": list(self.silent), "untyped": list(self.untyped)})

    @classmethod
    def from_json(cls, text: str) -> ComparisonLayout:
        """Return the layout that `to_json` wrote."""
        facts = json.loads(text)
        parts = {
            name: tuple(OutputPart(axis=axis, slices=tuple(slices), power=power) for axis, slices, power in found)
            for name, found in facts.pop("parts").items()
        }
        return cls(parts=parts, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """Result of a comparison of outputs.

    Attributes:
        figures: Values of sqnr_db, cosine and kl for each batch, of the output or part with the worst mean.
        worst: Description of the output, or part of one, with the worst SQNR; "" if only one was compared.
    """

    figures: Mapping[str, Sequence[float]]
    worst: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean over batches of each figure, by name."""
        return {name: float(np.mean(values)) for name, values in self.figures.items()}


def plan_comparison(samples: Sequence[Mapping[str, Array]]) -> ComparisonLayout:
    """Return the rules for comparing the outputs of a model; if all its outputs are constant, these are compared.

    Args:
        samples: The float model's outputs by name, for each batch.
    """
    left_out = constant_outputs(samples)
    floats = dict.fromkeys(name for sample in samples for name in _float_outputs(sample))
    counted = [name for name in floats if name not in left_out] or list(floats)
    parts = {name: split_output([sample[name] for sample in samples if name in sample]) for name in counted}
    untyped = tuple(n for n in (samples[0] if samples else ()) if samples[0][n].dtype.kind != "f")
    return ComparisonLayout(parts=parts, silent=left_out, untyped=untyped)


def compare_outputs(
    pairs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]],
    layout: ComparisonLayout,
    *,
    sqnr_only: bool = False,
) -> Closeness:
    """Return figures of the closeness of outputs, each for the output, or part of one, where it is worst.

    - sqnr_db: 10 log10 of signal power over error power, within +-MAX_SQNR_DB. A batch without any error gets the best
      value of the other batches, because MAX_SQNR_DB would dominate the mean.
    - cosine: Cosine similarity of the flattened values; 1 if both are 0.
    - kl: Kullback-Leibler divergence in nats of the softmax over the class axis (the second of four, else the last) of
      the whole output, reference first, mean over the other axes.

    Args:
        pairs: For each batch the float model's outputs and the engine's.
        layout: Layout of the float model's outputs.
        sqnr_only: Whether to compute only sqnr_db.

    Raises:
        EvaluationFailed: An output is missing or of another shape, or none is of floating type.
    """
    sqnr_db, cosine, kl = (defaultdict[Any, list[float]](list) for _ in range(3))
    for reference, outputs in pairs:
        for name, expected in reference.items():
            found = outputs.get(name)
            if expected.dtype.kind == "f" and (found is None or found.shape != expected.shape):
                what = "is missing" if found is None else f"has the shape {found.shape}"
                raise EvaluationFailed(f"output {name!r} {what}, the float model's has {expected.shape}")
        if not layout.parts:
            raise EvaluationFailed(f"no output of floating type among {', '.join(reference)}: nothing to compare")
        for name, parts in layout.parts.items():
            p, q = reference[name], outputs[name]
            for part in parts or (None,):
                sqnr_db[name, part].append(part_sqnr(p, q, part))
                if not sqnr_only:
                    cosine[name, part].append(_cosine_similarity(select_values(p, part), select_values(q, part)))
            if not sqnr_only:
                kl[name].append(_kl_divergence(*np.atleast_1d(select_values(p, None), select_values(q, None))))
    for key, values in sqnr_db.items():
        best = max((value for value in values if value < MAX_SQNR_DB), default=MAX_SQNR_DB)
        sqnr_db[key] = [min(value, best) for value in values]
    worst = min(sqnr_db, key=lambda key: np.mean(sqnr_db[key]))
    figures: dict[str, Sequence[float]] = {"sqnr_db": sqnr_db[worst]}
    if not sqnr_only:
        figures |= {"cosine": min(cosine.values(), key=np.mean), "kl": max(kl.values(), key=np.mean)}
    name, part = worst
    where = "" if part is None else f", {part}"
    said = "" if len(sqnr_db) == 1 else f"output {name!r}{where}: {np.mean(sqnr_db[worst]):.1f} dB"
    return Closeness(figures=figures, worst=said)


def constant_outputs(samples: Iterable[Mapping[str, Array]]) -> tuple[str, ...]:
    """Return the names of the floating-point outputs that are constant over all samples and positions.

    Their values span at most `ROUNDING_RESOLUTION` of the largest magnitude, or of 1 if that is larger. Differences
    between engines at that scale are round-off and say nothing about quantization: relative to a signal of 1e-9, an
    error of 1e-7 is an SQNR of -40 dB although no consumer of the output would notice it.
    """
    spans: dict[str, tuple[float, float]] = {}
    for sample in samples:
        for name, array in _float_outputs(sample).items():
            low, high = spans.get(name, (np.inf, -np.inf))
            spans[name] = min(low, float(array.min())), max(high, float(array.max()))
    return tuple(
        name for name, (low, high) in spans.items() if high - low <= ROUNDING_RESOLUTION * max(1.0, -low, high)
    )


def _float_outputs(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in outputs.items() if array.dtype.kind == "f" and array.size}


def _cosine_similarity(p: Floats, q: Floats) -> float:
    norms = (float(np.linalg.norm(p)), float(np.linalg.norm(q)))
    if 0.0 in norms:
        return float(norms[0] == norms[1])
    return float(np.vdot(p / norms[0], q / norms[1]))


def _kl_divergence(p: Floats, q: Floats) -> float:
    from scipy.special import log_softmax  # takes 0.3 s, and only this metric needs it

    axis = 1 if p.ndim == 4 else -1
    if not p.size:
        return 0.0
    log_p, log_q = (log_softmax(x, axis=axis) for x in (p, q))
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=axis).mean())


FINGERPRINT = "fingerprint"


def write_reference(path: Path, arrays: Mapping[str, Array], fingerprint: str) -> None:
    """Write a reference file: answers of the float model, in NumPy's `.npz` format, atomically.

    Args:
        path: Path of the file; an existing one is replaced, and the folder is created.
        arrays: Outputs of the float model, or what an evaluator derives from them, by name.
        fingerprint: Fingerprint of the evaluator; `open_reference` refuses a file with another one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **{**arrays, FINGERPRINT: np.array(fingerprint)})


@contextmanager
def open_reference(path: Path, fingerprint: str, evaluator: str) -> Iterator[Any]:
    """Yield the arrays of a reference file by name, read on demand.

    Args:
        path: Path of the file.
        fingerprint: Fingerprint of the evaluator.
        evaluator: Name of the evaluator for messages.

    Raises:
        EvaluationFailed: There is no such file, or it has another fingerprint.
    """
    if not path.is_file():
        raise EvaluationFailed(
            f"no outputs of the float model in {path}: {evaluator} compares with them, so score the float model before "
            "any other; 'qdq run' does, in code call prepare(infer) with the float model's engine"
        )
    with np.load(path, allow_pickle=False) as stored:
        if FINGERPRINT not in stored or str(stored[FINGERPRINT]) != fingerprint:
            raise EvaluationFailed(f"{path} was made on other inputs: remove it and run again")
        yield stored
