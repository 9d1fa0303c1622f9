"""How close the outputs of an engine are to those of the float model; needs no labels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from harness.api import Accuracy, Array, Infer
from harness.errors import EvaluationFailed, UserError
from harness.evaluators.datasets import open_data
from harness.evaluators.feeding import Batches, batches
from harness.evaluators.inputs import finite
from harness.evaluators.intervals import evidence_of
from harness.evaluators.preprocess import open_preprocess, preprocess_fingerprint
from harness.feeds import random_feeds

__all__ = ["MAX_SQNR_DB", "Fidelity", "compare", "silent"]

MAX_SQNR_DB = 120.0
"""Bound of SQNR: equal outputs have no finite one, and float32 cannot tell much more apart."""
RESOLUTION = 1e-6
"""Some eight units in the last place of a float32: runtimes round outputs that differ by less each in its own way."""
FINGERPRINT, SILENT = "fingerprint", "silent"
RANDOM = 16
"""Batches of random inputs."""
SHOWN = 5
Floats = npt.NDArray[np.float64]


class Fidelity:
    """SQNR (sqnr_db), cosine similarity (cosine) and KL divergence (kl) of the outputs, against the float model.

    The harness calls `prepare` once with the float model's engine; each engine is then scored on the same inputs.
    Figures are means over batches, of the size that the model takes; `per_item` holds SQNR. Outputs that are the same
    all over are left out, and named in `note`; see `silent`.

    Args:
        reference: Set by the harness: file of the float model's outputs (inputs are never stored).
        inputs: Set by the harness: ONNX type in lower case and shape of each input.
        data: Images or arrays (`harness.evaluators.datasets`); None: random inputs.
        preprocess: What turns an image into an input; name, or `{use: NAME, params: {...}}`.
        samples: How many samples of the data at most, None: all; so many batches where they are random, None: 16.
        base: Set by the harness: folder that relative paths start from.

    Raises:
        UserError: Anything wrong with these; images for a model with several inputs, arrays that do not fit.
    """

    metric = "sqnr_db"
    higher_is_better = True

    def __init__(
        self,
        reference: str | Path,
        inputs: Mapping[str, tuple[str, tuple[int, ...]]],
        data: Mapping[str, Any] | None = None,
        preprocess: str | Mapping[str, Any] | None = None,
        samples: int | None = None,
        base: Path | None = None,
    ) -> None:
        if samples is not None and samples < 1:
            raise UserError(f"fidelity: samples: a whole number from 1, but got {samples}")
        self._reference = Path(reference)
        self._inputs = dict(inputs)
        self._samples = RANDOM if samples is None else samples
        self._batches: Batches | None = None
        facts: list[Any] = [samples if data is not None else self._samples, list(self._inputs.items())]
        if data is not None:
            opened = open_data(data, base, samples)
            made = None if preprocess is None else open_preprocess(preprocess)
            self._batches = batches(opened, made, self._inputs)
            facts += [opened.fingerprint, None if preprocess is None else preprocess_fingerprint(preprocess)]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __len__(self) -> int:
        """Number of batches."""
        return self._samples if self._batches is None else len(self._batches)

    @property
    def inferences(self) -> int:
        """See `harness.api.Evaluator`."""
        return len(self)

    def feeds(self) -> Iterator[dict[str, Array]]:
        """The inputs, the same at each call."""
        return random_feeds(self._inputs, self._samples) if self._batches is None else iter(self._batches)

    def prepare(self, infer: Infer) -> None:
        """Run the float model on the inputs and write its outputs to the reference file; see `harness.api.Evaluator`.

        Raises:
            EvaluationFailed: The float model itself gives NaN or infinite values.
        """
        samples = [dict(finite(infer(feeds), f"sample {i}")) for i, feeds in enumerate(self.feeds())]
        arrays: dict[str, Array] = {
            f"{i}/{name}": array for i, sample in enumerate(samples) for name, array in sample.items()
        }
        arrays |= {FINGERPRINT: np.array(self.fingerprint), SILENT: np.array(silent(samples), np.str_)}
        self._reference.parent.mkdir(parents=True, exist_ok=True)
        partial = self._reference.with_name(f"{self._reference.name}.{os.getpid()}")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        partial.replace(self._reference)

    def score(self, infer: Infer) -> Accuracy:
        """See `harness.api.Evaluator`.

        Raises:
            EvaluationFailed: No reference, or one of other inputs; outputs that are not finite or
                do not match those of the float model.
        """
        if not self._reference.is_file():
            raise EvaluationFailed(
                f"no outputs of the float model in {self._reference}: fidelity compares with them, so score the float "
                "model before any other; 'qdq run' does, in code call prepare(infer) with the float model's engine"
            )
        figures: dict[str, list[float]] = {"sqnr_db": [], "cosine": [], "kl": []}
        with np.load(self._reference, allow_pickle=False) as reference:
            if SILENT not in reference or str(reference[FINGERPRINT]) != self.fingerprint:
                raise EvaluationFailed(f"{self._reference} was made on other inputs: remove it and run again")
            left_out: list[str] = reference[SILENT].tolist()
            expected: dict[str, Array] = {}
            for i, feeds in enumerate(self.feeds()):
                outputs = finite(infer(feeds), f"sample {i}")
                prefix = f"{i}/"
                expected = {k.removeprefix(prefix): reference[k] for k in reference.files if k.startswith(prefix)}
                for name, value in compare(expected, outputs, left_out).items():
                    figures[name].append(value)
        metrics = {name: float(np.mean(values)) for name, values in figures.items()}
        return Accuracy(
            metrics=metrics,
            per_item=tuple(figures["sqnr_db"]),
            evidence=evidence_of("mean", figures),
            note=_note(left_out, expected),
        )


def silent(samples: Iterable[Mapping[str, Array]]) -> tuple[str, ...]:
    """Names of the outputs of floating type that are the same all over, in every place of every sample.

    Their values span no more than `RESOLUTION` of the largest magnitude, or of 1 where that is larger. What engines
    differ by there is round-off, which says nothing of quantization: beside a signal of 1e-9 an error of 1e-7, that no
    reader of the output would see, is an SQNR of -40 dB, and beside a constant of 1000 one beyond 120.
    """
    spans: dict[str, tuple[float, float]] = {}
    for sample in samples:
        for name, array in _floats(sample).items():
            low, high = spans.get(name, (np.inf, -np.inf))
            spans[name] = min(low, float(array.min())), max(high, float(array.max()))
    return tuple(name for name, (low, high) in spans.items() if high - low <= RESOLUTION * max(1.0, -low, high))


def compare(
    reference: Mapping[str, Array], outputs: Mapping[str, Array], left_out: Collection[str] = ()
) -> dict[str, float]:
    """How close one sample's outputs are; each figure is the mean over the outputs of floating type.

    - sqnr_db: 10 log10 of signal power over error power, within +-MAX_SQNR_DB.
    - cosine: of the flattened outputs; 1 for two without any signal.
    - kl: Kullback-Leibler divergence in nats of the softmax over the class axis (the second of four,
      else the last), reference first, mean over the other axes.

    Args:
        reference: The float model's.
        outputs: The engine's.
        left_out: Outputs that do not count, unless there is no other; see `silent`.

    Raises:
        EvaluationFailed: An output is missing or of another shape, or none is of floating type.
    """
    floats = _floats(reference)
    counted = [name for name in floats if name not in left_out] or list(floats)
    rows = []
    for name, expected in floats.items():
        found = outputs.get(name)
        if found is None or found.shape != expected.shape:
            what = "is missing" if found is None else f"has the shape {found.shape}"
            raise EvaluationFailed(f"output {name!r} {what}, the float model's has {expected.shape}")
        if name in counted:
            p, q = np.atleast_1d(expected.astype(np.float64), found.astype(np.float64))
            rows.append((_sqnr_db(p, q), _cosine(p, q), _kl(p, q)))
    if not rows:
        raise EvaluationFailed(f"no output of floating type among {', '.join(reference)}: nothing to compare")
    sqnr_db, cosine, kl = np.mean(rows, axis=0).tolist()
    return {"sqnr_db": sqnr_db, "cosine": cosine, "kl": kl}


def _floats(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in outputs.items() if array.dtype.kind == "f" and array.size}


def _note(left_out: list[str], outputs: Mapping[str, Array]) -> str:
    """What the figures leave out, or that there is nothing else."""
    if not left_out:
        return ""
    more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
    names = f"{', '.join(map(repr, left_out[:SHOWN]))}{more}"
    if _floats(outputs).keys() <= set(left_out):
        return f"fidelity says nothing here: every output is the same all over, on all inputs ({names})"
    return f"fidelity leaves out what is the same all over, on all inputs: {names}"


def _sqnr_db(p: Floats, q: Floats) -> float:
    signal, noise = float(np.square(p).sum()), float(np.square(p - q).sum())
    if noise == 0:
        return MAX_SQNR_DB
    if signal == 0:
        return -MAX_SQNR_DB
    return float(np.clip(10 * (np.log10(signal) - np.log10(noise)), -MAX_SQNR_DB, MAX_SQNR_DB))


def _cosine(p: Floats, q: Floats) -> float:
    norms = (float(np.linalg.norm(p)), float(np.linalg.norm(q)))
    if 0.0 in norms:
        return float(norms[0] == norms[1])
    return float(np.vdot(p / norms[0], q / norms[1]))


def _kl(p: Floats, q: Floats) -> float:
    axis = 1 if p.ndim == 4 else -1
    log_p, log_q = (log_softmax(x, axis=axis) for x in (p, q))
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=axis).mean())
