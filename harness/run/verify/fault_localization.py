"""Search for the operator that a runtime computes wrongly, and a small model that reproduces it for a bug report.

The model is cut at one tensor at a time. Further outputs inside it are never added, as they would change what the
runtime fuses. A binary search on the longest path to the differing output finds the first tensor that differs.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from harness.base.errors import UserError
from harness.graph.qdq.reduce_model import ModelGraph
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Array, capabilities_of
from harness.results.output_check import OutputCheck
from harness.run.verify.output_comparison import Outputs, compare_with_file

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongOperator:
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
                    # Operator that computes a tensor, and the operators before it in the cut, as text
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
        # First tensor that differs on the longest path to a tensor that does
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
    path.with_suffix(".txt").write_text(_report_text(fault, path, facts), encoding="utf-8")


def _report_text(fault: WrongOperator, path: Path, facts: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key} {value}" for key, value in facts.get("options", {}).items())
    inputs = "recorded values of tensors inside the model" if fault.extracted else "inputs of the model"
    name = str(facts.get("name"))
    return f"""Wrong result in {name} {facts.get("version")}

Operator: {fault.operator}
Device: {facts.get("device")}
Options: {options}
Difference: output {fault.checked.output!r} has a signal-to-noise ratio of {fault.checked.engine_db:.1f} dB against
ONNX Runtime {_package_version()} without graph optimizations. Runtimes that are right agree to 30 dB and more.
Made with onnx {version("onnx")}.

Files: {path.name}, and {path.with_suffix(".npz").name} with
- {inputs} ("input:NAME"),
- the outputs of ONNX Runtime ("expected:NAME"),
- the outputs of {name} ("found:NAME").

To reproduce, in the folder of this file:

{_reproduction_script(name, path, facts)}"""


def _package_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _reproduction_script(name: str, path: Path, facts: Mapping[str, Any]) -> str:
    hint = facts.get("options", {}).get("precision", "f32")
    code = ""
    with suppress(UserError):  # a plug-in of the user describes itself by another name
        code = capabilities_of(registry.load_plugin("benchmarker", name)).script
    run = code.format(file=path.name, precision=hint) or f"found = ...  # outputs of {path.name} in {name}, by name"
    return f"""import numpy as np
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
