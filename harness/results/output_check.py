"""Results of the comparison of outputs with a reference execution, and their record in the folder of a task."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harness.base.files import read_json
from harness.base.text import short_version
from harness.graph.rules.runtime_faults import known_faults
from harness.results.artifacts import ExportedModel

CHECK_FILE_NAME = "runtime_check.json"
"""Name of the record in the folder of a task."""
SUSPECT_DB = 1.5
"""Value of `file_db - engine_db` from which a faulty operator is searched for; right rows reached 2.2 dB."""
MIN_FLOAT_SQNR_DB: Mapping[str, float] = {"f32": 30.0, "fp32": 30.0}
"""Required SQNR of a float model in a runtime against ONNX Runtime, by the precision of the runtime."""
Verdict = Literal["right", "wrong result", "saturates", "refused", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCheck:
    """Result of a check of one model in one runtime.

    Attributes:
        verdict: "saturates": wrong only because the processor adds products of 8-bit integers in 16 bits. "refused":
            the runtime does not run the file; only `harness.run.verify.runtime_checker.check_file` gives this verdict.
        runtime: Name and version of the runtime; "" if unknown.
        output: Output that is furthest below its limit, or closest to it; "" if nothing was compared.
        part: Compared slices of the output, see `harness.accuracy.metrics.closeness`; "" for the whole output.
        engine_db: SQNR of the engine against the file.
        file_db: SQNR of the file against the float model; None for the float model itself.
        noise_db: SQNR of the float model in the runtime against ONNX Runtime, limited to the required range.
        reason: Reason why nothing was compared, or a remark.
        operator: First operator whose result differs while its inputs agree; "" if none was searched for or found.
        model: Path of a small model that reproduces the fault, within the task's folder; "" without one.
        float_verdict: Verdict of the float model in the runtime if a written file is not usable and neither is that.
        seconds: Duration of the check.
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
    float_verdict: str = ""
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Return whether the runtime computes something other than the file describes."""
        return self.verdict in ("wrong result", "saturates")

    @property
    def is_usable(self) -> bool:
        """Return whether nothing is known against the use of the file in the runtime."""
        return not self.is_wrong and self.verdict != "refused"

    @property
    def is_suspect(self) -> bool:
        """Return whether the engine differs from the file by more than rounding ties, but less than `MARGIN_DB`."""
        if self.verdict != "right" or self.file_db is None or self.engine_db is None or self.noise_db is None:
            return False
        return self.engine_db < min(self.file_db, self.noise_db) - SUSPECT_DB

    @property
    def label(self) -> str:
        """Text of the verdict in tables."""
        return f"wrong result in {self.runtime.partition(' ')[0]}" if self.verdict == "wrong result" else self.verdict

    @property
    def summary(self) -> str:
        """Text for a user who wrote a file, such as "checked in onnxruntime 1.24.4: 41 dB from float, ..."."""
        if self.verdict == "not checked":
            return str(self)
        found = str(self)
        if self.verdict == "right":
            against = "float" if self.file_db is None else f"float, {self.engine_db:.0f} dB from the file"
            nearest = self.engine_db if self.file_db is None else self.file_db
            found = f"{nearest:.0f} dB from {against} (output {self.output!r})"
        return f"checked in {' '.join(map(short_version, self.runtime.split(' ')))}: {found}"

    def __str__(self) -> str:
        if self.engine_db is None:  # nothing was compared, or the verdict comes from different scores
            return f"{self.label}: {self.reason}"
        if self.verdict == "right" and self.part and self.file_db is not None:
            return (
                f"right: at the values with the lowest SQNR (output {self.output!r}, {self.part}), the runtime is "
                f"{self.engine_db:.1f} dB from the file, and the file {self.file_db:.1f} dB from the float model"
            ) + (f"; {self.reason}" if self.reason else "")
        against = "" if self.file_db is None else f", the file is {self.file_db:.1f} dB from the float model"
        figures = f"{self.engine_db:.1f} dB from the file at output {self.output!r}{self.part and f' ({self.part})'}"
        text = f"{self.label}: {figures}{against}"
        if self.operator:
            text += f"; first operator that differs: {self.operator}"
        return f"{text}; {self.reason}" if self.reason else text


def wrong_result_remedies(checks: Collection[OutputCheck], runtime: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the remedies for wrong or refused results, each for all of them.

    Args:
        runtime: Name of the benchmarker.
        facts: Version and device of its runtime, see `RuntimeFault.affects`.
    """
    if any(check.verdict == "saturates" for check in checks):
        yield "weights of 7 bits (reduce_range: true), or a processor with VNNI"
    operators = set(re.findall(r"\w+", " ".join(check.operator for check in checks)))
    for fault in known_faults(runtime):
        if fault.right_in and fault.operators & operators and fault.affects(facts):
            yield f"{runtime} {fault.right_in}, without this known fault: {fault.text}"


def wrong_float_remedies(backend: Mapping[str, Any]) -> Iterator[str]:
    """Yield the remedies if a runtime computes the float model wrongly; `backend` are the facts of its benchmarker."""
    if others := [name for name in backend.get("float_params", {}) if name != backend.get("float_precision")]:
        yield f"another float precision: precision: {' or '.join(others)}"
    yield "another export of the model, without the operator that differs"


def not_checked(reason: str) -> OutputCheck:
    """Return a check with the reason why a model was not compared."""
    return OutputCheck(verdict="not checked", reason=reason)


def read_checks(folder: Path, rows: Mapping[str, ExportedModel]) -> dict[str, OutputCheck]:
    """Return the stored checks of a task by row id, without rows that have none; empty without a record.

    Args:
        folder: Folder of the task.
        rows: Rows by id.
    """
    path = folder / CHECK_FILE_NAME
    checks: dict[str, Any] = read_json(path, {"checks": {}})["checks"]
    return {name: OutputCheck(**checks[row.key]) for name, row in rows.items() if row.key in checks}


def encode_check(checked: OutputCheck) -> dict[str, Any]:
    """Return a check as JSON values, without empty fields."""
    return {key: value for key, value in asdict(checked).items() if value not in ("", None)}
