"""Compare what a runtime computes with what the model file says.

Two figures per output, signal-to-noise ratios in dB: `file_db` says how far the file is from the float model, both in
ONNX Runtime without graph optimizations; `engine_db` says how far the engine is from the file. An engine that is more
than `MARGIN_DB` further from the file than the file is from the float model computes something else. Between
`SUSPECT_DB` and `MARGIN_DB` it does where a single operator is found that does
(`harness.verification.fault_localization`): a file that is far from the float model leaves little signal to lose. No
labels are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.accuracy.metrics.sqnr import MAX_SQNR_DB, OutputPart, part_sqnr, select_values, split_output
from harness.api import Array
from harness.errors import EvaluationFailed
from harness.records import Failed
from harness.results_dir.artifacts import ExportedModel
from harness.results_dir.io import read_json

CHECK_FILE_NAME = "runtime_check.json"
"""Name of the record in the folder of a task."""
MARGIN_DB = 6.0
"""Rounding ties that fall the other way put an engine as far from the file as the file is from the float model."""
SUSPECT_DB = 1.5
"""Difference from which an operator is searched for. Of ten right rows that were 0.7 to 2.2 dB further none had one."""
MIN_FILE_SQNR_DB = 3.0
"""Below, the file itself has lost the output: an engine is wrong only where an operator is found that is."""
MAX_REQUIRED_SQNR_DB = 80.0
"""No engine has to be closer to its file: kernels for integers round floats apart from those of the float model."""
MIN_FLOAT_SQNR_DB: Mapping[str, float] = {"f32": 30.0, "fp32": 30.0}
"""Least ratio of a float model in a runtime to the same model in ONNX Runtime, by the precision of the runtime."""
MIN_HALF_SQNR_DB = 8.0
"""The same for all other precisions. BF16 has 8 bits of mantissa: YOLOX-Nano comes to 15 dB at its class scores."""
MIN_FINITE_FRACTION = 0.9
"""Share of an output that is finite in model and file, at least, or it is not compared."""
OVERFLOW_MAGNITUDE = 1e30
"""Larger values count as infinite: where exp overflows, the next rounding decides whether a value is."""
Outputs = Sequence[Mapping[str, Array]]
"""Outputs by name, sample by sample."""
Verdict = Literal["right", "wrong result", "saturates", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCheck:
    """Result of a check of one model in one runtime.

    Attributes:
        output: The output that is furthest below its limit; "" where nothing was compared.
        part: Its slices, see `harness.accuracy.metrics.sqnr`; "" for all of it.
        engine_db: Engine against file.
        file_db: File against float model; None for a float model, which is its own file.
        noise_db: The float model in the runtime against the float model in ONNX Runtime.
        reason: Why nothing was compared, or what else has to be said.
        operator: The first operator whose result differs while its inputs agree; "" where none was searched for or
            found.
        model: Path, within the task's folder, of a small model that shows the fault; "" where there is none.
    """

    verdict: Verdict
    runtime: str = ""
    output: str = ""
    part: str = ""
    engine_db: float | None = None
    file_db: float | None = None
    noise_db: float | None = None
    reason: str = ""
    operator: str = ""
    model: str = ""
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Return whether the runtime computes something other than the file describes."""
        return self.verdict in ("wrong result", "saturates")

    @property
    def is_suspect(self) -> bool:
        """Return whether the engine differs from the file by more than rounding ties, but less than `MARGIN_DB`."""
        if self.verdict != "right" or self.file_db is None or self.engine_db is None or self.noise_db is None:
            return False
        return self.engine_db < min(self.file_db, self.noise_db) - SUSPECT_DB

    @property
    def label(self) -> str:
        """The verdict as tables print it."""
        return f"wrong result in {self.runtime.partition(' ')[0]}" if self.verdict == "wrong result" else self.verdict

    def __str__(self) -> str:
        if self.verdict == "not checked":
            return f"not checked: {self.reason}"
        if self.engine_db is None:  # found by the scores alone
            return f"{self.label}: {self.reason}"
        if self.verdict == "right" and self.part and self.file_db is not None:
            return (
                f"right: where they agree least (output {self.output!r}, {self.part}), the runtime is "
                f"{self.engine_db:.1f} dB from the file, and the file {self.file_db:.1f} dB from the float model"
            ) + (f"; {self.reason}" if self.reason else "")
        against = "" if self.file_db is None else f", the file is {self.file_db:.1f} dB from the float model"
        figures = f"{self.engine_db:.1f} dB from the file at output {self.output!r}{self.part and f' ({self.part})'}"
        said = f"{self.label}: {figures}{against}"
        if self.operator:
            said += f"; first operator that differs: {self.operator}"
        return f"{said}; {self.reason}" if self.reason else said


def not_checked(reason: str) -> OutputCheck:
    """Return a record that says why a model was not compared."""
    return OutputCheck(verdict="not checked", reason=reason)


def compare_with_file(  # noqa: PLR0913 - four sets of outputs, and what limits them
    floats: Outputs,
    file: Outputs,
    engine: Outputs,
    engine_float: Outputs | None = None,
    *,
    precision: str = "f32",
    skipped: Collection[str] = (),
    most_db: float = MAX_REQUIRED_SQNR_DB,
    whole: bool = False,
) -> OutputCheck:
    """Judge the engine of a quantized model.

    Args:
        floats: Of the float model in ONNX Runtime.
        file: Of the model's file in ONNX Runtime.
        engine: Of the engine.
        engine_float: Of the float model in the runtime; None where it does not run there.
        skipped: Outputs that are not compared.
        most_db: No engine has to be closer to its file than this.
        whole: Compare outputs as they are, also where their slices differ in scale.
    """
    least = min_sqnr_db(precision)
    found = []
    for name, masks in _finite_masks(floats, skipped, file).items():
        own, said, done = (_masked_samples(outputs, name, masks) for outputs in (floats, file, engine))
        noisy = None if engine_float is None else _masked_samples(engine_float, name, masks)
        for part in (not whole and split_output([array for array in own if array is not None])) or (None,):
            file_db, engine_db = _mean_sqnr_db(own, said, part), _mean_sqnr_db(said, done, part)
            noise_db = most_db if noisy is None else min(most_db, max(least, _mean_sqnr_db(own, noisy, part)))
            limit_db = min(file_db, noise_db) - MARGIN_DB
            wrong = engine_db < limit_db and file_db >= MIN_FILE_SQNR_DB
            judged = _make_check(wrong, name, part, engine_db, file_db, noise_db)
            found.append((engine_db - limit_db, judged))
    return _worst_output(found, file, skipped)


def compare_float(floats: Outputs, engine: Outputs, precision: str, skipped: Collection[str] = ()) -> OutputCheck:
    """Judge the engine of the float model; see `compare_with_file`."""
    least = min_sqnr_db(precision)
    found = []
    for name, masks in _finite_masks(floats, skipped, floats).items():
        own, done = _masked_samples(floats, name, masks), _masked_samples(engine, name, masks)
        for part in split_output([array for array in own if array is not None]) or (None,):
            engine_db = _mean_sqnr_db(own, done, part)
            found.append((engine_db - least, _make_check(engine_db < least, name, part, engine_db, None, None)))
    return _worst_output(found, floats, skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Setup of the comparison of files on one benchmarker; see `compare_with_file`."""

    floats: Outputs
    engine_float: Outputs | None
    precision: str
    skipped: frozenset[str]
    reference: Callable[[Path], Outputs | Failed]
    engine: Callable[[Path], Outputs | Failed]

    def judge(self, path: Path) -> OutputCheck:
        """Compare what the runtime computes with the file.

        Raises:
            EvaluationFailed: It does not run in one of the two.
        """
        file = require_outputs(self.reference(path), "its file in ONNX Runtime")
        engine = require_outputs(self.engine(path), "the engine")
        limits: dict[str, Any] = {"precision": self.precision, "skipped": self.skipped}
        return compare_with_file(self.floats, file, engine, self.engine_float, **limits)


def require_outputs(outputs: Outputs | Failed, what: str) -> Outputs:
    """Return the outputs.

    Raises:
        EvaluationFailed: There are none.
    """
    if isinstance(outputs, Failed):
        raise EvaluationFailed(f"{what}: {outputs.stage}: {outputs.reason}")
    return outputs


def min_sqnr_db(precision: str) -> float:
    """Return the least ratio of a right float model in a runtime that computes in this precision."""
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


def _worst_output(found: Sequence[tuple[float, OutputCheck]], file: Outputs, skipped: Collection[str]) -> OutputCheck:
    if found:
        return min(found, key=lambda each: each[0])[1]
    broken = [name for name, array in file[0].items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
    if broken:
        return not_checked(f"the file itself gives NaN or infinite values at {', '.join(map(repr, broken))}")
    names = f" that does not depend on indices ({', '.join(sorted(skipped))})" if skipped else ""
    return not_checked(f"no output of floating type{names}")


def _finite_masks(floats: Outputs, skipped: Collection[str], file: Outputs) -> dict[str, list[Array]]:
    """Return, of each output that can be compared, the places of each sample where model and file are finite."""
    found = {}
    for name, array in floats[0].items():
        if name in skipped or array.dtype.kind != "f" or not array.size:
            continue
        pairs = [
            (own[name], said[name]) for own, said in zip(floats, file, strict=True) if name in own and name in said
        ]
        if len(pairs) == len(floats) and {a.shape for pair in pairs for a in pair} == {array.shape}:
            masks = [(np.abs(own) < OVERFLOW_MAGNITUDE) & (np.abs(said) < OVERFLOW_MAGNITUDE) for own, said in pairs]
            if min(float(mask.mean()) for mask in masks) >= MIN_FINITE_FRACTION:
                found[name] = masks
    return found


def _masked_samples(outputs: Outputs, name: str, masks: Sequence[Array]) -> list[Array | None]:
    """Return an output sample by sample, 0 where the mask is; None where it is missing or of another size."""
    arrays = [sample.get(name) for sample in outputs]
    return [
        None if array is None or array.size != mask.size else np.where(mask, array.reshape(mask.shape), 0)
        for array, mask in zip(arrays, masks, strict=True)
    ]


def _mean_sqnr_db(reference: Sequence[Array | None], outputs: Sequence[Array | None], part: OutputPart | None) -> float:
    """Return the mean over samples of the ratio of one part of an output.

    An output that is missing, of another size or not finite is as far away as can be.
    """
    return float(np.mean([_sample_sqnr_db(own, found, part) for own, found in zip(reference, outputs, strict=True)]))


def _sample_sqnr_db(reference: Array | None, output: Array | None, part: OutputPart | None) -> float:
    if reference is None or output is None or not np.isfinite(select_values(output, part)).all():
        return -MAX_SQNR_DB
    return part_sqnr(*np.atleast_1d(reference, output), part)


def read_checks(folder: Path, rows: Mapping[str, ExportedModel]) -> dict[str, OutputCheck]:
    """Return what was found of each row of a task, by row; nothing where rows were never checked."""
    path = folder / CHECK_FILE_NAME
    found: dict[str, Any] = read_json(path)["checks"] if path.exists() else {}
    return {name: OutputCheck(**found[row.key]) for name, row in rows.items() if row.key in found}


def encode_check(checked: OutputCheck) -> dict[str, Any]:
    """Return a record as JSON holds it."""
    return {key: value for key, value in asdict(checked).items() if value not in ("", None)}
