"""Conformance tests for authors of runtimes.

Example::

    from harness.runtimes.testing import BenchmarkerContract

    class TestMyRuntime(BenchmarkerContract):
        def make(self): return MyBenchmarker(threads=1)

Run pytest on the file with this class. It tests the contract of `harness.plugins.api.Benchmarker` on a model of two
convolutions, in float and with all points quantized in the dialect of the runtime. The outputs are compared with those
of ONNX Runtime without graph optimizations. Methods that are optional are tested if the benchmarker has them. Figures
and messages are recorded as properties of the tests, which pytest writes to a file with `--junitxml`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np

from harness.accuracy.metrics.closeness import output_sqnr
from harness.base.errors import BuildFailed, MeasureFailed
from harness.base.paths import hide_paths
from harness.base.random_inputs import random_feed
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.graph.segmented_run import open_reference_session
from harness.plugins.api import Array, Benchmarker, Candidate, ReportsConditions, SupportsLayers, SupportsSave

__all__ = ["BenchmarkerContract", "file_candidate"]

Record = Callable[[str, object], None]
LAYER_RUNS = 50
REQUIRED_FACTS = ("name", "version", "device", "options", "float_precision")
INPUT_TYPES = {"x": ("float", (1, 3, 32, 32))}


def file_candidate(path: Path) -> Candidate:
    """Return a candidate whose model is a file; its digest is zeros, so it identifies no model."""
    return Candidate(digest="0" * 16, edges=(), source=lambda: path)


class BenchmarkerContract:
    """Tests of the contract that every benchmarker keeps; a subclass defines `make`.

    Attributes:
        min_sqnr_db: Required SQNR of the outputs in dB by the form of the model; low enough for FP16 and TF32.
    """

    min_sqnr_db: ClassVar[Mapping[str, float]] = {"float": 30.0, "int8": 15.0}

    def make(self) -> Benchmarker:
        """Return a new benchmarker; the only method that a subclass must implement."""
        raise NotImplementedError("a subclass of BenchmarkerContract defines make(self)")

    def make_profiled(self) -> Benchmarker:
        """Return a benchmarker whose engines record the time of each layer; by default that of `make`."""
        return self.make()

    def test_description_has_the_required_facts(self, record_property: Record) -> None:
        facts = dict(self.make().describe())
        record_property("facts", hide_paths(json.dumps(facts)))
        missing = [name for name in REQUIRED_FACTS if facts.get(name) in (None, "")]
        assert not missing, f"describe() lacks {', '.join(missing)}"

    def test_float_model_computes_the_reference(self, tmp_path: Path, record_property: Record) -> None:
        record_property("sqnr_db", self._require_reference_outputs(tmp_path, "float"))

    def test_int8_model_computes_the_reference(self, tmp_path: Path, record_property: Record) -> None:
        record_property("sqnr_db", self._require_reference_outputs(tmp_path, "int8"))

    def test_readings_are_positive(self, tmp_path: Path, record_property: Record) -> None:
        with self._open_float(tmp_path) as probe:
            readings_ms = [*probe.sample(20), *probe.sample(2)]
            conditions = dict(probe.conditions()) if isinstance(probe, ReportsConditions) else {}
        record_property("conditions", ", ".join(conditions) or "none")
        assert len(readings_ms) == 22, f"sample(20) and sample(2) returned {len(readings_ms)} readings"
        assert all(0 < ms < 1000 for ms in readings_ms), "a reading is not between 0 and 1000 ms"
        assert all(map(math.isfinite, conditions.values())), "a condition is not finite"

    def test_results_do_not_change_with_the_next_inference(self, tmp_path: Path) -> None:
        feeds = random_feed(INPUT_TYPES, 0)
        with self._open_float(tmp_path) as probe:
            first = dict(probe.infer(feeds))
            copy = {name: array.copy() for name, array in first.items()}
            probe.infer({name: -array for name, array in feeds.items()})
        assert copy, "infer() returned no output"
        assert all(np.array_equal(first[name], copy[name]) for name in copy), "an inference changed earlier results"

    def test_unknown_input_is_a_failed_measurement(self, tmp_path: Path, record_property: Record) -> None:
        with self._open_float(tmp_path) as probe:
            try:
                probe.infer({"unknown": random_feed(INPUT_TYPES, 0)["x"]})
            except MeasureFailed as error:
                record_property("message", str(error))
                return
        raise AssertionError("an input with an unknown name was accepted")

    def test_damaged_file_is_a_failed_build(self, tmp_path: Path, record_property: Record) -> None:
        (tmp_path / "damaged.onnx").write_bytes(b"no model")
        try:
            self.make().build(file_candidate(tmp_path / "damaged.onnx"), tmp_path)
        except BuildFailed as error:
            record_property("message", hide_paths(str(error)))
            return
        raise AssertionError("a file that is no model was built")

    def test_engine_does_not_depend_on_its_file(self, tmp_path: Path) -> None:
        made, path = self.make(), _write_model(self.make(), "float", tmp_path)
        artifact = made.build(file_candidate(path), tmp_path)
        path.unlink()
        with made.open(artifact) as probe:
            assert len(probe.sample(3)) == 3, "the engine does not run after its model file was removed"

    def test_saved_engine_computes_the_same(self, tmp_path: Path) -> None:
        if not isinstance(self.make(), SupportsSave):
            raise SkipTest("the benchmarker has no method save")
        made: Any = self.make()
        file, feeds = tmp_path / "saved.engine", random_feed(INPUT_TYPES, 0)
        made.save(file_candidate(_write_model(made, "float", tmp_path)), file)
        with self._open_float(tmp_path) as built, made.open(made.load(file)) as loaded:
            self._require_equal_outputs(built.infer(feeds), loaded.infer(feeds), "float")

    def test_layers_show_the_quantized_precision(self, tmp_path: Path, record_property: Record) -> None:
        if not isinstance(self.make(), SupportsLayers):
            raise SkipTest("the benchmarker has no method layers")
        made: Any = self.make_profiled()
        precisions: dict[str, set[str]] = {}
        for form in ("float", "int8"):
            artifact = made.build(file_candidate(_write_model(made, form, tmp_path)), tmp_path)
            with made.open(artifact) as probe:
                probe.sample(LAYER_RUNS)
                layers = made.layers(artifact)
            record_property(f"{form} layers", ", ".join(f"{layer.kind} {layer.precision}" for layer in layers))
            precisions[form] = {layer.precision for layer in layers}
        assert precisions["int8"] - precisions["float"], "no layer of the INT8 model has a precision of its own"

    def _open_float(self, folder: Path) -> Any:
        made = self.make()
        return made.open(made.build(file_candidate(_write_model(made, "float", folder)), folder))

    def _require_reference_outputs(self, folder: Path, form: str) -> float:
        made, feeds = self.make(), random_feed(INPUT_TYPES, 0)
        path = _write_model(made, form, folder)
        session = open_reference_session(str(path))
        wanted = dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))
        with made.open(made.build(file_candidate(path), folder)) as probe:
            return self._require_equal_outputs(wanted, probe.infer(feeds), form)

    def _require_equal_outputs(self, wanted: Mapping[str, Array], found: Mapping[str, Array], form: str) -> float:
        """Return the SQNR in dB of the worst output, and require that it is at least `min_sqnr_db`."""
        shapes, wanted_shapes = ({name: array.shape for name, array in each.items()} for each in (found, wanted))
        assert shapes == wanted_shapes, f"outputs {shapes} instead of {wanted_shapes}"
        outputs = {name: np.asarray(array, np.float32) for name, array in found.items()}
        sqnr_db = min(output_sqnr(wanted[name], outputs[name]).sqnr_db for name in wanted)
        least_db = self.min_sqnr_db[form]
        assert sqnr_db >= least_db, f"the SQNR of the {form} model is {sqnr_db:.1f} dB, less than {least_db:g} dB"
        return sqnr_db


def _write_model(benchmarker: Benchmarker, form: str, folder: Path) -> Path:
    """Write two convolutions, in float or with every point quantized in the dialect of the benchmarker."""
    builder = GraphBuilder("small", seed=0)
    middle = builder.op("Relu", builder.conv(builder.input("x", INPUT_TYPES["x"][1]), 16, 3, pad=1))
    builder.output(builder.conv(middle, 16, 3, pad=1), name="y")
    path = builder.save(folder / "float.onnx")
    if form == "float":
        return path
    facts = benchmarker.describe()
    dialect = load_dialect(dialect_name_for(benchmarker, str(facts["name"]), facts))
    model = load(path, min_opset=dialect.opset([form]))
    space = build_space(model, dialect, precisions=[form])
    ranges = {edge.tensor: (-4.0, 4.0) for dimension in space.dimensions for edge in dimension.edges}
    return Inserter(model, dialect, ranges).export(space.resolve(space.quantize_all()), folder / f"{form}.onnx")
