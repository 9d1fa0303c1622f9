"""Comparison of a runtime's outputs with a reference execution of the model file; no labels are needed.

Two SQNR in dB are computed for each output: `file_db` of the file against the float model, both in ONNX Runtime without
graph optimizations, and `engine_db` of the engine against the file. The result is wrong if `engine_db` is lower than
`file_db` by more than `MARGIN_DB`. If it is lower by `SUSPECT_DB` to `MARGIN_DB`, the result is wrong only if a single
operator with a wrong result is found.

`find_fault` searches for that operator, and cuts a small model around it for a bug report. The model is cut at one
tensor at a time. Further outputs inside it are never added, as they would change what the runtime fuses. A binary
search on the longest path to the differing output finds the first tensor that differs.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.accuracy.metrics.closeness import MAX_SQNR_DB, OutputPart, part_sqnr, select_values, split_output
from harness.base.errors import EvaluationFailed, UserError
from harness.graph.qdq.reduce_model import ModelGraph
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Array, capabilities_of
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
    values_db = []
    for expected, actual in zip(reference, outputs, strict=True):
        if expected is None or actual is None or not np.isfinite(select_values(actual, part)).all():
            values_db.append(-MAX_SQNR_DB)
        else:
            values_db.append(part_sqnr(*np.atleast_1d(expected, actual), part))
    return float(np.mean(values_db))


ModelRunner = Callable[[Path, Sequence[Mapping[str, Array]]], Outputs | Failed]
"""Build a model file and return its outputs for some inputs."""
LOCALIZATION_LIMIT_S = 120.0
MAX_REQUIRED_TENSOR_SQNR_DB = 30.0  # before the margin; rounding has a large effect in tensors of small values
LOCALIZATION_SAMPLE_COUNT = 2
SQNR_THRESHOLDS_DB = (
    24.0,
    14.0,
    -math.inf,
)  # of the engine against the file; tried in order until an operator is found
MAX_TENSORS_COMPARED = 6  # on the longest path, if the output itself hardly differs
MAX_OPERATORS_SHOWN = 8  # in the description of a small model
MAX_OPERATORS_AS_PROOF = 16  # over more operators, differences of rounding add up and prove nothing
MAX_EXTRACTED_OPERATORS = 64  # of a cut; beyond it, the whole model up to the tensor is used


class WrongOperator(NamedTuple):
    """Operator whose result differs while its inputs agree.

    Attributes:
        operator: Name and type of the operator, with the operators before it in the small model.
        model: File of a small model that reproduces the difference.
        extracted: Whether the small model's inputs are tensors inside the original model, with recorded values.
        feeds: Inputs of the small model.
        file: Outputs of the small model in ONNX Runtime without graph optimizations.
        engine: Outputs of the small model in the runtime.
        checked: Comparison of these outputs.
    """

    operator: str
    model: Path
    extracted: bool
    feeds: Sequence[Mapping[str, Array]]
    file: Outputs
    engine: Outputs
    checked: OutputCheck


@dataclass(frozen=True, kw_only=True)
class SuspectModel:
    """Model file whose outputs differ between the runtime and ONNX Runtime.

    Attributes:
        feeds: Inputs at which the outputs differ.
        output: Name of the output that differs.
        most_db: SQNR of the float model in the runtime at that output, the highest that can be required.
        proven: Whether the output proves a wrong result; if not, only a small model can.
        reference: Function that runs a file in ONNX Runtime without graph optimizations.
        engine: Function that runs a file in the runtime.
        work: Scratch folder.
        limit_s: Time limit of the search.
        started_s: Reading of the monotonic clock when the search began.
        checks_by_tensor: Comparisons made so far; None: the model cannot be cut and compared there.
    """

    path: Path
    feeds: Sequence[Mapping[str, Array]]
    output: str
    most_db: float
    proven: bool
    reference: ModelRunner
    engine: ModelRunner
    work: Path
    limit_s: float = LOCALIZATION_LIMIT_S
    started_s: float = field(default_factory=time.monotonic)
    checks_by_tensor: dict[str, OutputCheck | None] = field(default_factory=dict)

    @cached_property
    def graph(self) -> ModelGraph:
        """Return the graph of the file."""
        return ModelGraph(self.path)

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the search has reached its time limit."""
        return time.monotonic() - self.started_s > self.limit_s

    def differs(self, tensor: str, below_db: float) -> bool:
        """Return whether the model, cut at a tensor, gives different values there; False if it cannot be compared.

        Args:
            below_db: SQNR below which values differ; wrong results as in `compare_with_file` always do.
        """
        if tensor not in self.checks_by_tensor:
            comparison = self._compare(tensor, self.feeds[:LOCALIZATION_SAMPLE_COUNT])
            self.checks_by_tensor[tensor] = None if comparison is None else comparison[2]
        check = self.checks_by_tensor[tensor]
        if check is None or check.engine_db is None:
            return False
        return check.is_wrong or check.engine_db < below_db

    def extract(self, tensor: str) -> WrongOperator | None:
        """Return the smallest cut of the model that reproduces the fault at a tensor, or None if no cut does."""
        count = 1
        while not self.is_out_of_time and (self.proven or count <= MAX_OPERATORS_AS_PROOF):
            front = self.graph.boundary_tensors(tensor, count)
            is_whole = set(front) <= set(self.graph.inputs) or count > MAX_EXTRACTED_OPERATORS
            feeds = self.feeds[:LOCALIZATION_SAMPLE_COUNT] if is_whole else self._record_values(front)
            if feeds is not None:
                comparison = self._compare(tensor, feeds, None if is_whole else feeds[0])
                if comparison is not None and comparison[2].is_wrong:
                    file, engine, checked = comparison
                    earlier = ModelGraph(self._part_file).float_operators()[:-1]
                    behind = f" behind {', '.join(earlier)}" if 0 < len(earlier) <= MAX_OPERATORS_SHOWN else ""
                    return WrongOperator(
                        operator=f"{self.graph.operator(tensor)}{behind}",
                        model=self._part_file,
                        extracted=not is_whole,
                        feeds=feeds,
                        file=file,
                        engine=engine,
                        checked=checked,
                    )
            if is_whole:
                return None
            count *= 2
        return None

    def _compare(
        self, tensor: str, feeds: Sequence[Mapping[str, Array]], inputs: Mapping[str, Array] | None = None
    ) -> tuple[Outputs, Outputs, OutputCheck] | None:
        """Return outputs of file and engine at a tensor, and their comparison; None if a run fails."""
        read = self.graph.write_submodel(self._part_file, [tensor], inputs)
        feeds = [{name: sample[name] for name in read} for sample in feeds]
        self.graph.write_submodel(self._inner_values_file, [tensor], inputs, without_pairs=True)
        file, floats = self.reference(self._part_file, feeds), self.reference(self._inner_values_file, feeds)
        engine = file if isinstance(file, Failed) else self.engine(self._part_file, feeds)
        if isinstance(file, Failed) or isinstance(floats, Failed) or isinstance(engine, Failed):
            return None
        most_db = min(MAX_REQUIRED_TENSOR_SQNR_DB, self.most_db)
        return file, engine, compare_with_file(floats, file, engine, most_db=most_db)

    def _record_values(self, tensors: Sequence[str]) -> list[Mapping[str, Array]] | None:
        """Return the values of tensors of the file for each feed, computed by the reference; None if it fails."""
        inner = [name for name in tensors if name not in self.graph.inputs]
        feeds = self.feeds[:LOCALIZATION_SAMPLE_COUNT]
        values: Outputs | Failed = [{} for _ in feeds]
        if inner:
            read = self.graph.write_submodel(self._inner_values_file, inner)
            values = self.reference(
                self._inner_values_file, [{name: sample[name] for name in read} for sample in feeds]
            )
        if isinstance(values, Failed):
            return None
        return [
            {name: {**inputs, **sample}[name] for name in tensors} for inputs, sample in zip(feeds, values, strict=True)
        ]

    @property
    def _part_file(self) -> Path:
        """Path of the cut that is compared."""
        return self.work / "part.onnx"

    @property
    def _inner_values_file(self) -> Path:
        """Path of a model with inner tensors as outputs."""
        return self.work / "inside.onnx"


def find_fault(suspect: SuspectModel) -> WrongOperator | None:
    """Return the first operator whose wrong result a cut of the model around it reproduces on the runtime.

    None if no cut does, or the time limit of `suspect` is reached before one is found.
    """
    tried: set[str] = set()
    for below_db in SQNR_THRESHOLDS_DB:
        first = _first_differing_tensor(suspect, below_db)
        if first is not None and first not in tried and (fault := suspect.extract(first)) is not None:
            return fault
        tried.add(first or "")
    return None


def _first_differing_tensor(suspect: SuspectModel, below_db: float) -> str | None:
    """Return a tensor that differs while all tensors that it is computed from agree, or None."""
    path = suspect.graph.longest_path(suspect.output)
    candidates = [
        suspect.output,
        *path[:: max(1, len(path) // MAX_TENSORS_COMPARED)],
    ]  # a difference inside the model may be small at the output
    differing = next(
        (name for name in candidates if not suspect.is_out_of_time and suspect.differs(name, below_db)), None
    )
    while differing is not None:
        # Bisection of the longest path to a tensor that differs, for the first one that does
        tensors = suspect.graph.longest_path(differing)
        low, high = 0, len(tensors) - 1
        while low < high and not suspect.is_out_of_time:
            middle = (low + high) // 2
            if suspect.differs(tensors[middle], below_db):
                high = middle
            else:
                low = middle + 1
        differing = tensors[high]
        sources = suspect.graph.sources(differing)
        before = next(
            (name for name in sources if not suspect.is_out_of_time and suspect.differs(name, below_db)), None
        )
        if before is None:
            return differing
        differing = before
    return None


def write_report(fault: WrongOperator, path: Path, facts: Mapping[str, Any]) -> None:
    """Write the small model, its inputs and outputs (`.npz`), and a description with a script (`.txt`).

    Existing files are replaced. The keys of the arrays are "input:NAME", "expected:NAME" and "found:NAME".

    Args:
        path: Path of the model; the other files have the same stem.
        facts: Name, version, device and options of the runtime.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(fault.model, path)
    arrays = {f"input:{name}": array for name, array in fault.feeds[0].items()}
    arrays |= {f"expected:{name}": array for name, array in fault.file[0].items()}
    arrays |= {f"found:{name}": array for name, array in fault.engine[0].items()}
    np.savez(path.with_suffix(".npz"), allow_pickle=False, **arrays)
    import onnxruntime

    options = ", ".join(f"{key} {value}" for key, value in facts.get("options", {}).items())
    inputs = "recorded values of tensors inside the model" if fault.extracted else "inputs of the model"
    name, hint, code = str(facts.get("name")), facts.get("options", {}).get("precision", "f32"), ""
    with suppress(UserError):  # a plug-in of the user describes itself by another name
        code = capabilities_of(registry.load_plugin("benchmarker", name)).script
    run = code.format(file=path.name, precision=hint) or f"found = ...  # outputs of {path.name} in {name}, by name"
    text = f"""Wrong result in {name} {facts.get("version")}

Operator: {fault.operator}
Device: {facts.get("device")}
Options: {options}
Difference: output {fault.checked.output!r} has a signal-to-noise ratio of {fault.checked.engine_db:.1f} dB against
ONNX Runtime {onnxruntime.__version__} without graph optimizations. Runtimes that are right agree to 30 dB and more.
Made with onnx {version("onnx")}.

Files: {path.name}, and {path.with_suffix(".npz").name} with
- {inputs} ("input:NAME"),
- the outputs of ONNX Runtime ("expected:NAME"),
- the outputs of {name} ("found:NAME").

To reproduce, in the folder of this file:

import numpy as np
import onnxruntime as ort

arrays = np.load("{path.with_suffix(".npz").name}")
feeds = {{key.removeprefix("input:"): arrays[key] for key in arrays if key.startswith("input:")}}
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession("{path.name}", options)
names = [value.name for value in session.get_outputs()]
expected = dict(zip(names, session.run(names, feeds)))
{run}
for name in names:
    error = np.square(expected[name] - found[name]).sum()
    print(name, 10 * np.log10(np.square(expected[name]).sum() / error), "dB")
"""
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
