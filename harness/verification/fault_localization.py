"""Find the operator that a runtime computes wrongly, and write a small model that shows it, ready for a bug report.

The model is cut at one tensor after the other, never opened in between: a further output would keep the runtime from
fusing what it fuses. On the longest way to the output that differs a binary search finds the first tensor that does.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from harness.api import Array
from harness.graph.qdq.reduce_model import ModelGraph
from harness.records import Failed
from harness.verification.output_comparison import OutputCheck, Outputs, compare_with_file

ModelRunner = Callable[[Path, Sequence[Mapping[str, Array]]], Outputs | Failed]
"""Build a model file and return its outputs for some inputs."""
LOCALIZATION_LIMIT_S = 120.0
MAX_REQUIRED_TENSOR_SQNR_DB = 30.0  # less the margin: one rounding tie has a large effect in a tensor of small values
LOCALIZATION_SAMPLE_COUNT = 2
SQNR_THRESHOLDS_DB = (24.0, 14.0, -math.inf)  # of engine to file, tried in order to find the first tensor
MAX_TENSORS_COMPARED = 6  # if the output itself hardly differs
MAX_OPERATORS_SHOWN = 8  # of a small model
MAX_OPERATORS_AS_PROOF = 16  # rounding ties add up over more operators, which prove nothing
MAX_EXTRACTED_OPERATORS = 64  # then the whole model up to the tensor is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongOperator:
    """The first tensor whose values differ while those that it is computed from agree.

    Attributes:
        model: File of a model of few operators that shows it.
        extracted: The model takes recorded values of tensors inside the file, and not the file's inputs.
        feeds: Inputs of that model.
        file: Its outputs in ONNX Runtime without graph optimizations.
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
    """A model file, and two ways to run it whose outputs differ.

    Attributes:
        feeds: Inputs on which they disagree.
        most_db: The runtime's own noise at that output.
        proven: True if the output proves a wrong result; else only a few operators that differ by themselves do.
        reference: Runs a file in ONNX Runtime without graph optimizations.
    """

    path: Path
    feeds: Sequence[Mapping[str, Array]]
    output: str
    most_db: float
    proven: bool
    reference: ModelRunner
    engine: ModelRunner
    work: Path
    started_s: float = field(default_factory=time.monotonic)
    checks_by_tensor: dict[str, OutputCheck | None] = field(default_factory=dict)

    @cached_property
    def graph(self) -> ModelGraph:
        """Return the graph of the file."""
        return ModelGraph(self.path)

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the search has used its time."""
        return time.monotonic() - self.started_s > LOCALIZATION_LIMIT_S

    def differs(self, tensor: str, below_db: float) -> bool:
        """Return whether the two are apart at a tensor of the file, cut there; what cannot be compared agrees.

        Args:
            below_db: They are apart below this ratio, and in any case where the pairs in front do not explain it.
        """
        if tensor not in self.checks_by_tensor:
            found = self._compare(tensor, self.feeds[:LOCALIZATION_SAMPLE_COUNT])
            self.checks_by_tensor[tensor] = None if found is None else found[2]
        found_there = self.checks_by_tensor[tensor]
        if found_there is None or found_there.engine_db is None:
            return False
        return found_there.is_wrong or found_there.engine_db < below_db

    def extract(self, tensor: str) -> WrongOperator | None:
        """Return the smallest model that shows the fault at a tensor; None where not even the largest does."""
        count = 1
        while not self.is_out_of_time and (self.proven or count <= MAX_OPERATORS_AS_PROOF):
            front = self.graph.boundary_tensors(tensor, count)
            whole = set(front) <= set(self.graph.inputs) or count > MAX_EXTRACTED_OPERATORS
            feeds = self.feeds[:LOCALIZATION_SAMPLE_COUNT] if whole else self._record_values(front)
            if feeds is not None:
                found = self._compare(tensor, feeds, None if whole else feeds[0])
                if found is not None and found[2].is_wrong:
                    file, engine, checked = found
                    return WrongOperator(
                        operator=self._describe_operator(tensor),
                        model=self._part_file,
                        extracted=not whole,
                        feeds=feeds,
                        file=file,
                        engine=engine,
                        checked=checked,
                    )
            if whole:
                return None
            count *= 2
        return None

    def _compare(
        self, tensor: str, feeds: Sequence[Mapping[str, Array]], inputs: Mapping[str, Array] | None = None
    ) -> tuple[Outputs, Outputs, OutputCheck] | None:
        """Run the part that computes a tensor in both, and without its pairs; None where one of these does not run."""
        self.graph.write_submodel(self._part_file, [tensor], inputs)
        self.graph.write_submodel(self._inner_values_file, [tensor], inputs, without_pairs=True)
        file, floats = self.reference(self._part_file, feeds), self.reference(self._inner_values_file, feeds)
        engine = file if isinstance(file, Failed) else self.engine(self._part_file, feeds)
        if isinstance(file, Failed) or isinstance(floats, Failed) or isinstance(engine, Failed):
            return None
        most_db = min(MAX_REQUIRED_TENSOR_SQNR_DB, self.most_db)
        return file, engine, compare_with_file(floats, file, engine, most_db=most_db)

    def _record_values(self, tensors: Sequence[str]) -> list[Mapping[str, Array]] | None:
        """Return the values of tensors inside the file, by the reference, and of its inputs."""
        inner = [name for name in tensors if name not in self.graph.inputs]
        feeds = self.feeds[:LOCALIZATION_SAMPLE_COUNT]
        found: Outputs | Failed = [{} for _ in feeds]
        if inner:
            self.graph.write_submodel(self._inner_values_file, inner)
            found = self.reference(self._inner_values_file, feeds)
        if isinstance(found, Failed):
            return None
        return [
            {name: {**given, **sample}[name] for name in tensors} for given, sample in zip(feeds, found, strict=True)
        ]

    def _describe_operator(self, tensor: str) -> str:
        """Return the operator that computes a tensor, and those in the part with it, which a runtime may fuse."""
        others = ModelGraph(self._part_file).float_operators()[:-1]
        behind = f" behind {', '.join(others)}" if 0 < len(others) <= MAX_OPERATORS_SHOWN else ""
        return f"{self.graph.operator(tensor)}{behind}"

    @property
    def _part_file(self) -> Path:
        """File of the part that is compared."""
        return self.work / "part.onnx"

    @property
    def _inner_values_file(self) -> Path:
        """File that gives values of tensors inside a model."""
        return self.work / "inside.onnx"


def find_fault(suspect: SuspectModel) -> WrongOperator | None:
    """Return the first operator that differs; None where there is none, or none was found in time.

    Rounding ties add up and a fault may be faint at the output, so operators have to differ by themselves.
    """
    tried: set[str] = set()
    for below_db in SQNR_THRESHOLDS_DB:
        first = _first_differing_tensor(suspect, below_db)
        if first is not None and first not in tried and (fault := suspect.extract(first)) is not None:
            return fault
        tried.add(first or "")
    return None


def _first_differing_tensor(suspect: SuspectModel, below_db: float) -> str | None:
    """Return a tensor where the two are apart while they agree on those that it is computed from; None: nowhere."""
    way = suspect.graph.longest_path(suspect.output)
    looked = [
        suspect.output,
        *way[:: max(1, len(way) // MAX_TENSORS_COMPARED)],
    ]  # what differs inside may be faint at the output
    bad = next((name for name in looked if not suspect.is_out_of_time and suspect.differs(name, below_db)), None)
    while bad is not None:
        bad = _first_differing_on_path(suspect, bad, below_db)
        sources = suspect.graph.sources(bad)
        before = next(
            (name for name in sources if not suspect.is_out_of_time and suspect.differs(name, below_db)), None
        )
        if before is None:
            return bad
        bad = before
    return None


def _first_differing_on_path(suspect: SuspectModel, bad: str, below_db: float) -> str:
    """Return the first tensor that differs on the longest way to one that does."""
    way = suspect.graph.longest_path(bad)
    low, high = 0, len(way) - 1
    while low < high and not suspect.is_out_of_time:
        middle = (low + high) // 2
        if suspect.differs(way[middle], below_db):
            high = middle
        else:
            low = middle + 1
    return way[high]


def write_report(fault: WrongOperator, path: Path, facts: Mapping[str, Any]) -> None:
    """Write the small model, arrays for it (`.npz`) and how to see the fault (`.txt`) side by side.

    Args:
        path: Of the model.
        facts: Of the runtime: name, version, device, options.
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
    runs = {
        "openvino": f"""import openvino as ov
core = ov.Core()
compiled = core.compile_model(core.read_model("{path.name}"), "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})
found = dict(zip(names, compiled(feeds).to_tuple()))""",
        "onnxruntime": f"""found = dict(zip(names, ort.InferenceSession("{path.name}").run(names, feeds)))""",
    }
    run = runs.get(name, f"found = ...  # outputs of {path.name} in {name}, by name")
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
