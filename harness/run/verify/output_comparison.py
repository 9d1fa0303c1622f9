"""Comparison of a runtime's outputs with a reference execution of the model file; no labels are needed.

Two SQNR in dB are computed for each output: `file_db` of the file against the float model, both in ONNX Runtime without
graph optimizations, and `engine_db` of the engine against the file. The result is wrong if `engine_db` is lower than
`file_db` by more than `MARGIN_DB`. If it is lower by `SUSPECT_DB` to `MARGIN_DB`, the result is wrong only if a single
operator with a wrong result is found (`harness.run.verify.fault_localization`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.closeness import MAX_SQNR_DB, OutputPart, part_sqnr, select_values, split_output
from harness.base.errors import EvaluationFailed
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.qdq.reduce_model import find_exact_outputs
from harness.measure.records import Failed
from harness.plugins.api import Array
from harness.results.output_check import MIN_FLOAT_SQNR_DB, OutputCheck, not_checked

MARGIN_DB = 6.0
"""Limit of `file_db - engine_db` of a right result; different rounding alone can make both figures equal."""
MIN_FILE_SQNR_DB = 3.0
"""Smallest `file_db` at which outputs can prove a wrong result; below it, only a faulty operator can."""
MAX_REQUIRED_SQNR_DB = 80.0
"""Highest `engine_db` that is required, as integer kernels round differently."""
ONE_STEP_DB = 20 * math.log10(255)
"""SQNR of an 8-bit output that is one step off; required of outputs behind pairs that equal the float model's."""
MIN_HALF_SQNR_DB = 8.0
"""Required SQNR at all other precisions; with the 8 bits of BF16, class scores of YOLOX-Nano reach 15 dB."""
MIN_FINITE_FRACTION = 0.9
"""Share of values that must be finite in model and file; other outputs are not compared."""
OVERFLOW_MAGNITUDE = 1e30
"""Larger values count as infinite, as rounding decides whether they overflow."""
Outputs = Sequence[Mapping[str, Array]]
"""Outputs by name, sample by sample."""


def compare_with_file(
    floats: Outputs,
    file: Outputs,
    engine: Outputs,
    engine_float: Outputs | None = None,
    *,
    precision: str = "f32",
    skipped: Collection[str] = (),
    exact: Collection[str] = (),
    groups: Sequence[object] = (),
    most_db: float = MAX_REQUIRED_SQNR_DB,
    whole: bool = False,
) -> OutputCheck:
    """Return the check of the engine of a quantized model, for its worst output; "not checked" if none is comparable.

    Args:
        floats: Outputs of the float model in ONNX Runtime.
        file: Outputs of the model's file in ONNX Runtime.
        engine: Outputs of the engine.
        engine_float: Outputs of the float model in the runtime; None if it does not run there.
        precision: Float precision of the runtime, such as "f32"; see `min_sqnr_db`.
        skipped: Names of outputs that are not compared.
        exact: Names of outputs that no Q/DQ pair of the file changes.
        groups: Shapes of the inputs by sample; an output is compared if its shape depends on nothing else. (): all
            samples have the same.
        most_db: Highest SQNR that is required, in dB.
        whole: Compare whole outputs, even if their slices differ in scale.
    """
    least = min_sqnr_db(precision)
    checks = []
    for name, masks in _finite_masks(floats, skipped, file, groups).items():
        float_samples, file_samples, engine_samples = (
            _masked_samples(outputs, name, masks) for outputs in (floats, file, engine)
        )
        engine_float_samples = None if engine_float is None else _masked_samples(engine_float, name, masks)
        for part in (not whole and split_output([array for array in float_samples if array is not None])) or (None,):
            file_db, engine_db = (
                _mean_sqnr_db(float_samples, file_samples, part),
                _mean_sqnr_db(file_samples, engine_samples, part),
            )
            noise_db = (
                most_db
                if engine_float_samples is None
                else min(most_db, max(least, _mean_sqnr_db(float_samples, engine_float_samples, part)))
            )
            required_db = ONE_STEP_DB if file_db >= MAX_SQNR_DB and name not in exact else file_db
            limit_db = min(required_db, noise_db) - MARGIN_DB
            wrong = engine_db < limit_db and file_db >= MIN_FILE_SQNR_DB
            check = _make_check(wrong, name, part, engine_db, file_db, noise_db)
            # An exact output without pairs is not reported as the worst one.
            checks.append((math.inf if name in exact and not wrong else engine_db - limit_db, check))
    return _worst_output(checks, file, skipped)


def compare_float(
    floats: Outputs,
    engine: Outputs,
    precision: str,
    skipped: Collection[str] = (),
    groups: Sequence[object] = (),
) -> OutputCheck:
    """Return the check of the float model's engine against ONNX Runtime; see `compare_with_file` for the arguments."""
    least = min_sqnr_db(precision)
    checks = []
    for name, masks in _finite_masks(floats, skipped, floats, groups).items():
        float_samples, engine_samples = _masked_samples(floats, name, masks), _masked_samples(engine, name, masks)
        for part in split_output([array for array in float_samples if array is not None]) or (None,):
            engine_db = _mean_sqnr_db(float_samples, engine_samples, part)
            checks.append((engine_db - least, _make_check(engine_db < least, name, part, engine_db, None, None)))
    return _worst_output(checks, floats, skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Setup of the comparison of files on one benchmarker; see `compare_with_file`.

    Attributes:
        reference: Function that runs a file in ONNX Runtime.
        engine: Function that runs a file on the benchmarker.
    """

    floats: Outputs
    engine_float: Outputs | None
    precision: str
    skipped: frozenset[str]
    groups: Sequence[object]
    reference: Callable[[Path], Outputs | Failed]
    engine: Callable[[Path], Outputs | Failed]

    def judge(self, path: Path) -> OutputCheck:
        """Return the check of a model file.

        Raises:
            EvaluationFailed: The file does not run in ONNX Runtime or in the runtime.
        """
        file = require_outputs(self.reference(path), "its file in ONNX Runtime")
        engine = require_outputs(self.engine(path), "the engine")
        exact = frozenset() if path.suffix == IR_SUFFIX else find_exact_outputs(path)
        limits: dict[str, Any] = {"precision": self.precision, "skipped": self.skipped, "exact": exact}
        limits["groups"] = self.groups
        return compare_with_file(self.floats, file, engine, self.engine_float, **limits)


def require_outputs(outputs: Outputs | Failed, what: str) -> Outputs:
    """Return the outputs, or raise `EvaluationFailed` with the name of the run in `what` if it failed."""
    if isinstance(outputs, Failed):
        raise EvaluationFailed(f"{what}: {outputs.stage}: {outputs.reason}")
    return outputs


def min_sqnr_db(precision: str) -> float:
    """Return the required SQNR in dB of a float model in a runtime that computes in this precision."""
    return MIN_FLOAT_SQNR_DB.get(precision, MIN_HALF_SQNR_DB)


def _make_check(
    wrong: bool, name: str, part: OutputPart | None, engine_db: float, file_db: float | None, noise_db: float | None
) -> OutputCheck:
    return OutputCheck(
        verdict="wrong result" if wrong else "right",
        output=name,
        part="" if part is None else str(part),
        engine_db=engine_db,
        file_db=file_db,
        noise_db=noise_db,
    )


def _worst_output(checks: Sequence[tuple[float, OutputCheck]], file: Outputs, skipped: Collection[str]) -> OutputCheck:
    if checks:
        return min(checks, key=lambda each: each[0])[1]
    broken = [name for name, array in file[0].items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
    if broken:
        return not_checked(f"the file itself gives NaN or infinite values at {', '.join(map(repr, broken))}")
    names = f" that does not depend on indices ({', '.join(sorted(skipped))})" if skipped else ""
    return not_checked(f"no output of floating type{names}")


def _finite_masks(
    floats: Outputs, skipped: Collection[str], file: Outputs, groups: Sequence[object]
) -> dict[str, list[Array]]:
    """Return for each comparable output and each sample a mask of the values that are finite in model and file."""
    masks_by_output = {}
    for name, array in floats[0].items():
        if name in skipped or array.dtype.kind != "f" or not array.size:
            continue
        pairs = [
            (first[name], second[name])
            for first, second in zip(floats, file, strict=True)
            if name in first and name in second
        ]
        if len(pairs) < len(floats):
            continue
        shapes = {
            (group, a.shape) for group, pair in zip(groups or [()] * len(pairs), pairs, strict=True) for a in pair
        }
        if len(shapes) == len(set(groups) or {()}):
            masks = [
                (np.abs(first) < OVERFLOW_MAGNITUDE) & (np.abs(second) < OVERFLOW_MAGNITUDE) for first, second in pairs
            ]
            if min(float(mask.mean()) for mask in masks) >= MIN_FINITE_FRACTION:
                masks_by_output[name] = masks
    return masks_by_output


def _masked_samples(outputs: Outputs, name: str, masks: Sequence[Array]) -> list[Array | None]:
    """Return an output by sample with 0 outside of the mask; None for a sample without it or of another size."""
    arrays = [sample.get(name) for sample in outputs]
    return [
        None if array is None or array.size != mask.size else np.where(mask, array.reshape(mask.shape), 0)
        for array, mask in zip(arrays, masks, strict=True)
    ]


def _mean_sqnr_db(reference: Sequence[Array | None], outputs: Sequence[Array | None], part: OutputPart | None) -> float:
    """Return the mean SQNR over samples of one part of an output; `-MAX_SQNR_DB` if it is missing or not finite."""
    return float(
        np.mean([_sample_sqnr_db(expected, actual, part) for expected, actual in zip(reference, outputs, strict=True)])
    )


def _sample_sqnr_db(reference: Array | None, output: Array | None, part: OutputPart | None) -> float:
    if reference is None or output is None or not np.isfinite(select_values(output, part)).all():
        return -MAX_SQNR_DB
    return part_sqnr(*np.atleast_1d(reference, output), part)
