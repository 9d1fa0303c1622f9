"""Checks of the contract of a benchmarker, on a model of two convolutions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.accuracy.metrics.sqnr import output_sqnr
from harness.base.errors import BuildFailed, MeasureFailed
from harness.base.paths import hide_paths
from harness.base.random_inputs import random_feed
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.insight.layers import is_low_precision, open_profiled, time_layers
from harness.plugins.api import Array, Candidate, Infer, ReportsConditions, SupportsLayers, SupportsSave
from harness.plugins.registry import create_plugin
from search.space import Space

LAYER_RUNS = 50
MIN_SQNR_DB: Mapping[str, float] = {"float": 30.0, "int8": 15.0}
"""Required SQNR against ONNX Runtime on the same file; low enough for FP16 and TF32."""
REQUIRED_FACTS = ("name", "version", "device", "options", "float_precision")
INPUT_TYPES = {"x": ("float", (1, 3, 32, 32))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        detail: Figures or the reason, as a line.
    """

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {'passed' if self.passed else 'FAILED'}: {self.detail}"


def check_benchmarker(use: str, work: Path | None = None, params: Mapping[str, Any] | None = None) -> Iterator[Check]:
    """Yield the checks of a benchmarker's contract, `harness.plugins.api.Benchmarker`; a check that raises has failed.

    Args:
        use: Name of the benchmarker.
        work: Scratch folder; None: see `work_folder`.
        params: Parameters of the benchmarker.
    """
    contract = BenchmarkerContract(use, work or work_folder(), params)
    for name in [name for name in vars(BenchmarkerContract) if name.startswith("check_")]:
        try:
            passed, detail = getattr(contract, name)()
        except Exception as error:  # whatever a plug-in raises, the other checks run
            passed, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Check(name=name.removeprefix("check_").replace("_", " "), passed=passed, detail=detail)


class BenchmarkerContract:
    """Checks of one benchmarker; each returns whether it passed, with the detail, and may raise any error instead.

    Args:
        use: Name of the benchmarker.
        work: Scratch folder for models and engines, which must exist.
        params: Parameters of the benchmarker.
    """

    def __init__(self, use: str, work: Path, params: Mapping[str, Any] | None = None) -> None:
        self._spec, self._work = PluginSpec(use=use, params=dict(params or {})), work
        self._made = create_plugin("benchmarker", use, self._spec.params)
        self._feeds = random_feed(INPUT_TYPES, 0)

    def check_description(self) -> tuple[bool, str]:
        facts = dict(self._made.describe())
        return all(facts.get(name) for name in REQUIRED_FACTS), hide_paths(json.dumps(facts))

    def check_float_model(self) -> tuple[bool, str]:
        """Compare the outputs of the float model with ONNX Runtime's; return whether they agree, and the figures."""
        return self._check_outputs(self._write_model("float"), "float")

    def check_int8_model(self) -> tuple[bool, str]:
        return self._check_outputs(self._write_model("int8"), "int8")

    def check_readings(self) -> tuple[bool, str]:
        with self._open() as probe:
            readings_ms = [*probe.sample(20), *probe.sample(2)]
            conditions = dict(probe.conditions()) if isinstance(probe, ReportsConditions) else {}
        good = len(readings_ms) == 22 and all(0 < ms < 1000 for ms in readings_ms)
        good = good and all(map(math.isfinite, conditions.values()))
        return good, f"{len(readings_ms)} readings; conditions: {', '.join(conditions) or 'none'}"

    def check_results_last(self) -> tuple[bool, str]:
        with self._open() as probe:
            first = dict(probe.infer(self._feeds))
            copy = {name: array.copy() for name, array in first.items()}
            probe.infer({name: -array for name, array in self._feeds.items()})
        same = all(np.array_equal(first[name], copy[name]) for name in copy)
        return same, "an inference does not change the results of the previous one"

    def check_wrong_inputs(self) -> tuple[bool, str]:
        """Run an engine on an input of an unknown name; return whether it raises `MeasureFailed`, and its message."""
        with self._open() as probe:
            try:
                probe.infer({"unknown": self._feeds["x"]})
            except MeasureFailed as error:
                return True, str(error)
        return False, "an unknown input was accepted"

    def check_damaged_file(self) -> tuple[bool, str]:
        path = self._work / "damaged.onnx"
        path.write_bytes(b"no model")
        try:
            self._made.build(file_candidate(path), self._work)
        except BuildFailed as error:
            return True, hide_paths(str(error))
        return False, "it was built"

    def check_engine_without_its_file(self) -> tuple[bool, str]:
        path = self._write_model("float")
        artifact = self._made.build(file_candidate(path), self._work)
        path.unlink()
        with self._made.open(artifact) as probe:
            return len(probe.sample(3)) == 3, "runs after the model file was removed"

    def check_saved_engine(self) -> tuple[bool, str]:
        if not isinstance(self._made, SupportsSave):
            return True, "not supported"
        made: Any = self._made
        file = self._work / "saved.engine"
        made.save(file_candidate(self._write_model("float")), file)
        with self._open() as built, made.open(made.load(file)) as loaded:
            return self._compare(loaded.infer, built.infer, "float")

    def check_layers(self) -> tuple[bool, str]:
        if not isinstance(self._made, SupportsLayers):
            return True, "not supported"
        profiled = open_profiled(self._spec)
        layers = time_layers(
            profiled, file_candidate(self._write_model("int8")), self._work / "profiled", LAYER_RUNS
        ).layers
        shown = ", ".join(f"{layer.kind} {layer.precision}" for layer in layers)
        return any(is_low_precision(layer.precision) for layer in layers), shown

    def _open(self) -> Any:
        return self._made.open(self._made.build(file_candidate(self._write_model("float")), self._work))

    def _write_model(self, form: str) -> Path:
        """Write two convolutions, in float or with every point quantized."""
        builder = GraphBuilder("small", seed=0)
        middle = builder.op("Relu", builder.conv(builder.input("x", INPUT_TYPES["x"][1]), 16, 3, pad=1))
        builder.output(builder.conv(middle, 16, 3, pad=1), name="y")
        path = builder.save(self._work / "float.onnx")
        if form == "float":
            return path
        dialect = load_dialect(dialect_name_for(self._made, self._spec.use, self._made.describe()))
        model = load(path, min_opset=dialect.opset([form]))
        space = build_space(model, dialect, precisions=[form])
        resolved = space.resolve(space.quantize_all())
        return Inserter(model, dialect, equal_ranges(space)).export(resolved, self._work / f"{form}.onnx")

    def _check_outputs(self, path: Path, form: str) -> tuple[bool, str]:
        """Compare with ONNX Runtime, which runs the file operator by operator."""
        cpu = create_plugin("benchmarker", "onnxruntime", {"optimization": "disabled"})
        found = self._made.open(self._made.build(file_candidate(path), self._work))
        with found as probe, cpu.open(cpu.build(file_candidate(path), self._work)) as reference:
            return self._compare(probe.infer, reference.infer, form)

    def _compare(self, infer: Infer, reference: Infer, form: str) -> tuple[bool, str]:
        wanted, outputs = reference(self._feeds), infer(self._feeds)
        if wanted.keys() != outputs.keys():
            return False, f"outputs {', '.join(outputs)} instead of {', '.join(wanted)}"
        sqnr_db = min(output_sqnr(wanted[name], _as_float(outputs[name])).sqnr_db for name in wanted)
        return sqnr_db >= MIN_SQNR_DB[form], f"SQNR {sqnr_db:.1f} dB against {MIN_SQNR_DB[form]:g}"


def _as_float(array: Array) -> Array:
    return np.asarray(array, np.float32)


def work_folder() -> Path:
    """Return the scratch folder of this step, `work` in the working directory, created if missing; it is not sent."""
    folder = Path("work").resolve()
    folder.mkdir(exist_ok=True)
    return folder


def equal_ranges(space: Space) -> dict[str, tuple[float, float]]:
    """Return the range -4 to 4 for every tensor of a space, by name."""
    return {edge.tensor: (-4.0, 4.0) for dimension in space.dimensions for edge in dimension.edges}


def file_candidate(path: Path) -> Candidate:
    """Return a candidate whose model is a file; its digest is zeros, so it identifies no model."""
    return Candidate(digest="0" * 16, edges=(), source=lambda: path)
