"""Distance between the outputs of an engine and the float model's outputs, which are stored in a reference file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.sqnr import (
    MAX_SQNR_DB,
    ROUNDING_RESOLUTION,
    Floats,
    OutputPart,
    part_sqnr,
    select_values,
    split_output,
)
from harness.base.errors import EvaluationFailed
from harness.base.paths import replacing
from harness.base.text import MAX_NAMES_SHOWN, format_names
from harness.plugins.api import Array

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
            said.append(f"fidelity is undefined: every output is constant on all inputs ({self._skipped_note})")
        elif self.silent:
            said.append(f"fidelity leaves out what is the same all over, on all inputs: {self._skipped_note}")
        if self.untyped:
            said.append(f"fidelity does not compare outputs of whole numbers and others: {format_names(self.untyped)}")
        if cut := [_describe_parts(name, parts) for name, parts in self.parts.items() if parts]:
            said.append(f"fidelity scores slices of different scale apart: {'; '.join(cut[:MAX_NAMES_SHOWN])}")
        return ". ".join(said)

    @property
    def _skipped_note(self) -> str:
        return format_names(self.silent)

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


@dataclass(slots=True)
class _BatchFigures:
    """Figures batch by batch, by output and part."""

    sqnr_db: dict[tuple[str, OutputPart | None], list[float]] = field(default_factory=lambda: defaultdict(list))
    cosine: dict[tuple[str, OutputPart | None], list[float]] = field(default_factory=lambda: defaultdict(list))
    kl: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


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
    rows = _BatchFigures()
    for reference, outputs in pairs:
        _check_outputs(reference, outputs, layout)
        for name, parts in layout.parts.items():
            p, q = reference[name], outputs[name]
            for part in parts or (None,):
                rows.sqnr_db[name, part].append(part_sqnr(p, q, part))
                if not sqnr_only:
                    rows.cosine[name, part].append(_cosine_similarity(select_values(p, part), select_values(q, part)))
            if not sqnr_only:
                rows.kl[name].append(_kl_divergence(*np.atleast_1d(select_values(p, None), select_values(q, None))))
    sqnr_db = {key: _replace_exact_batches(values) for key, values in rows.sqnr_db.items()}
    worst = min(sqnr_db, key=lambda key: np.mean(sqnr_db[key]))
    said = "" if len(sqnr_db) == 1 else _describe_part(*worst, float(np.mean(sqnr_db[worst])))
    figures = {"sqnr_db": sqnr_db[worst]}
    if not sqnr_only:
        figures |= {"cosine": min(rows.cosine.values(), key=np.mean), "kl": max(rows.kl.values(), key=np.mean)}
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


def _check_outputs(reference: Mapping[str, Array], outputs: Mapping[str, Array], layout: ComparisonLayout) -> None:
    for name, expected in reference.items():
        if expected.dtype.kind != "f":
            continue
        found = outputs.get(name)
        if found is None or found.shape != expected.shape:
            what = "is missing" if found is None else f"has the shape {found.shape}"
            raise EvaluationFailed(f"output {name!r} {what}, the float model's has {expected.shape}")
    if not layout.parts:
        raise EvaluationFailed(f"no output of floating type among {', '.join(reference)}: nothing to compare")


def _float_outputs(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in outputs.items() if array.dtype.kind == "f" and array.size}


def _replace_exact_batches(values: Sequence[float]) -> list[float]:
    """Return the values, those of batches without any error replaced by the best of the others."""
    best = max((value for value in values if value < MAX_SQNR_DB), default=MAX_SQNR_DB)
    return [min(value, best) for value in values]


def _describe_parts(name: str, parts: Sequence[OutputPart]) -> str:
    more = f" and {len(parts) - MAX_NAMES_SHOWN} more" if len(parts) > MAX_NAMES_SHOWN else ""
    return f"output {name!r}: {' and '.join(map(str, parts[:MAX_NAMES_SHOWN]))}{more}"


def _describe_part(name: str, part: OutputPart | None, sqnr_db: float) -> str:
    where = "" if part is None else f", {part}"
    return f"output {name!r}{where}: {sqnr_db:.1f} dB"


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
