"""Checks that are no command of qdq: the timer, the contract of a benchmarker, trtexec's figures, TensorRT's verdicts.

`main` prints a line for each check and writes `checks.json` into the working directory.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import zoo
from harness.accuracy.metrics.sqnr import output_sqnr
from harness.api import Array, Candidate, Infer, ReportsConditions, SupportsLayers, SupportsSave
from harness.config.sections import PluginSpec
from harness.errors import BuildFailed, CandidateError, MeasureFailed, UserError
from harness.explain.layers import is_low_precision, open_profiled, time_layers
from harness.graph.builder import GraphBuilder
from harness.graph.io.helper_process import RUNTIME_FACTOR, HelperCallFailed, call_in_helper_process
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.paths import hide_paths, resolve_path
from harness.random_inputs import random_feed
from harness.registry import create_plugin
from harness.results_dir.io import write_json
from harness.runtimes.cuda.device import CudaRuntime, GpuMonitor, open_device
from harness.runtimes.cuda.timing import GpuTimer
from harness.runtimes.tensorrt.builder import build_plan, load_engine
from harness.runtimes.tensorrt.inspection import profile_layers
from harness.runtimes.tensorrt.library import open_library
from harness.runtimes.tensorrt.options import BuildOptions
from harness.runtimes.tensorrt.session import LoadedEngine
from harness.runtimes.tensorrt.timing_cache import TimingCache

__all__ = ["Check", "check_benchmarker", "check_timer", "compare_verdicts", "compare_with_trtexec", "main"]

TIMER_BYTES = (2**26, 2**30)
ROUNDS, READINGS = 10, 50
"""Rounds of a comparison in turns, and inferences of a turn."""
MAX_DIFFERENCE, MAX_DIFFERENCE_MS = 0.02, 0.002
"""Two timings agree if they differ by less than one of these: a share of the second, or the resolution of an event."""
MIN_SQNR_DB: Mapping[str, float] = {"float": 30.0, "int8": 15.0}
"""Against ONNX Runtime on the same file; FP16 and TF32 are allowed, a wrong engine is at 0."""
REQUIRED_FACTS = ("name", "version", "device", "options", "float_precision")
INPUT_TYPES = {"x": ("float", (1, 3, 32, 32))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {'passed' if self.passed else 'FAILED'}: {self.detail}"


def check_timer() -> Iterator[Check]:
    """Yield whether the timer reads the same with and without a CUDA graph, and its A/A floor, on memsets."""
    cuda, device = open_device()
    for size in TIMER_BYTES:
        pointer = cuda.call("cudaMalloc", min(size, device.memory_bytes // 4))
        try:
            yield from _check_timer_on(cuda, pointer, min(size, device.memory_bytes // 4))
        finally:
            cuda.call("cudaFree", pointer)


def _check_timer_on(cuda: CudaRuntime, pointer: Any, size: int) -> Iterator[Check]:
    def enqueue(stream: int) -> None:
        cuda.call("cudaMemsetAsync", pointer, 0, size, stream)

    with GpuTimer(cuda, enqueue, graph=False) as plain, GpuTimer(cuda, enqueue) as graph:
        plain.warm_up(200.0)
        turns = [(plain.read(READINGS), graph.read(READINGS), graph.read(READINGS)) for _ in range(ROUNDS)]
    plain_ms, graph_ms, again_ms = ([median(turn[side].gpu_ms) for turn in turns] for side in range(3))
    host_bound = max(each.host_bound for turn in turns for each in turn[1:])
    yield _agreement(f"{size} bytes, with and without a graph", plain_ms, graph_ms)
    yield _agreement(f"{size} bytes, A/A", again_ms, graph_ms)
    yield Check(name=f"{size} bytes, no wait for the host", passed=host_bound == 0, detail=f"share {host_bound:.3f}")


def _agreement(name: str, one_ms: list[float], other_ms: list[float]) -> Check:
    """Return whether two timings, taken in turns, agree; the detail has the spread of the ratio over the turns."""
    one, other = median(one_ms), median(other_ms)
    ratios = sorted(a / b for a, b in zip(one_ms, other_ms, strict=True))
    passed = abs(one - other) <= max(MAX_DIFFERENCE * other, MAX_DIFFERENCE_MS)
    detail = f"{one:.4f} and {other:.4f} ms; ratio {one / other:.4f}, in turns {ratios[0]:.4f} to {ratios[-1]:.4f}"
    return Check(name=name, passed=passed, detail=detail)


def compare_with_trtexec(use: str) -> Iterator[Check]:
    """Yield whether the timer agrees with the GPU compute time that trtexec exports, on trtexec's own engine.

    Args:
        use: Model, as `zoo:NAME` or a path.
    """
    work = _work_folder()
    path = zoo.write_model(use.removeprefix("zoo:"), work / "m.onnx") if use[:4] == "zoo:" else resolve_path(use)
    for graph in (True, False):
        theirs, ours = (create_plugin("benchmarker", u, {"cuda_graph": graph}) for u in ("trtexec", "tensorrt"))
        try:
            built = theirs.build(_candidate(path), work)
            with theirs.open(built) as one, ours.open(ours.load(built.engine.plan)) as other:
                turns = [(median(other.sample(READINGS)), median(one.sample(READINGS))) for _ in range(ROUNDS)]
            yield _agreement(f"timer and trtexec, cuda_graph {graph}", *map(list, zip(*turns, strict=True)))
        except CandidateError as error:
            yield Check(name=f"timer and trtexec, cuda_graph {graph}", passed=False, detail=str(error))


def _work_folder() -> Path:
    """Return the scratch folder of this step, which is not sent."""
    folder = Path("work").resolve()
    folder.mkdir(exist_ok=True)
    return folder


def _candidate(path: Path) -> Candidate:
    return Candidate(digest="0" * 16, edges=(), source=lambda: path)


def check_benchmarker(use: str) -> Iterator[Check]:
    """Yield whether a benchmarker keeps the contract of `harness.api.Benchmarker`; a check that raises has failed."""
    contract = BenchmarkerContract(use, _work_folder())
    for name in [name for name in vars(BenchmarkerContract) if name.startswith("check_")]:
        try:
            passed, detail = getattr(contract, name)()
        except Exception as error:  # whatever a plug-in raises, the other checks run
            passed, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Check(name=name.removeprefix("check_").replace("_", " "), passed=passed, detail=detail)


class BenchmarkerContract:
    """Checks of one benchmarker; each returns whether it passed, with the detail.

    Args:
        use: Name of the benchmarker.
        work: Scratch folder.
    """

    def __init__(self, use: str, work: Path) -> None:
        self._use, self._work = use, work
        self._made = create_plugin("benchmarker", use, {})
        self._feeds = random_feed(INPUT_TYPES, 0)

    def check_description(self) -> tuple[bool, str]:
        facts = dict(self._made.describe())
        return all(facts.get(name) for name in REQUIRED_FACTS), hide_paths(json.dumps(facts))

    def check_float_model(self) -> tuple[bool, str]:
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
        return same, "an inference leaves the results of the one before as they are"

    def check_wrong_inputs(self) -> tuple[bool, str]:
        with self._open() as probe:
            try:
                probe.infer({"unknown": self._feeds["x"]})
            except MeasureFailed as error:
                return True, str(error)
        return False, "an unknown input was taken"

    def check_damaged_file(self) -> tuple[bool, str]:
        path = self._work / "damaged.onnx"
        path.write_bytes(b"no model")
        try:
            self._made.build(_candidate(path), self._work)
        except BuildFailed as error:
            return True, hide_paths(str(error))
        return False, "it was built"

    def check_engine_without_its_file(self) -> tuple[bool, str]:
        path = self._write_model("float")
        artifact = self._made.build(_candidate(path), self._work)
        path.unlink()
        with self._made.open(artifact) as probe:
            return len(probe.sample(3)) == 3, "runs after the model file was removed"

    def check_saved_engine(self) -> tuple[bool, str]:
        if not isinstance(self._made, SupportsSave):
            return True, "not supported"
        made: Any = self._made
        file = self._work / "saved.engine"
        made.save(_candidate(self._write_model("float")), file)
        with self._open() as built, made.open(made.load(file)) as loaded:
            return self._compare(loaded.infer, built.infer, "float")

    def check_layers(self) -> tuple[bool, str]:
        if not isinstance(self._made, SupportsLayers):
            return True, "not supported"
        profiled = open_profiled(PluginSpec(use=self._use))
        layers = time_layers(profiled, _candidate(self._write_model("int8")), self._work / "profiled", READINGS).layers
        shown = ", ".join(f"{layer.kind} {layer.precision}" for layer in layers)
        return any(is_low_precision(layer.precision) for layer in layers), shown

    def _open(self) -> Any:
        return self._made.open(self._made.build(_candidate(self._write_model("float")), self._work))

    def _write_model(self, form: str) -> Path:
        """Write two convolutions, in float or with every point quantized."""
        builder = GraphBuilder("small", seed=0)
        middle = builder.op("Relu", builder.conv(builder.input("x", INPUT_TYPES["x"][1]), 16, 3, pad=1))
        builder.output(builder.conv(middle, 16, 3, pad=1), name="y")
        path = builder.save(self._work / "float.onnx")
        if form == "float":
            return path
        dialect = load_dialect(dialect_name_for(self._made, self._use, self._made.describe()))
        model = load(path, min_opset=dialect.opset([form]))
        space = build_space(model, dialect, precisions=[form])
        ranges = {edge.tensor: (-4.0, 4.0) for dimension in space.dimensions for edge in dimension.edges}
        resolved = space.resolve(space.quantize_all())
        return Inserter(model, dialect, ranges).export(resolved, self._work / f"{form}.onnx")

    def _check_outputs(self, path: Path, form: str) -> tuple[bool, str]:
        """Compare with ONNX Runtime, which runs the file operator by operator."""
        cpu = create_plugin("benchmarker", "onnxruntime", {"optimization": "disabled"})
        found = self._made.open(self._made.build(_candidate(path), self._work))
        with found as probe, cpu.open(cpu.build(_candidate(path), self._work)) as reference:
            return self._compare(probe.infer, reference.infer, form)

    def _compare(self, infer: Infer, reference: Infer, form: str) -> tuple[bool, str]:
        wanted, outputs = reference(self._feeds), infer(self._feeds)
        if wanted.keys() != outputs.keys():
            return False, f"outputs {', '.join(outputs)} instead of {', '.join(wanted)}"
        sqnr_db = min(output_sqnr(wanted[name], _as_float(outputs[name])).sqnr_db for name in wanted)
        return sqnr_db >= MIN_SQNR_DB[form], f"SQNR {sqnr_db:.1f} dB against {MIN_SQNR_DB[form]:g}"


def _as_float(array: Array) -> Array:
    return np.asarray(array, np.float32)


def compare_verdicts() -> Iterator[Check]:
    """Yield a check for each small model that only one of TensorRT and TensorRT-RTX's compiler accepts, and the counts.

    Verdicts are kept in `verdicts.jsonl`, so that an interrupted comparison continues. A difference is a finding, not a
    failure: the step fails only if a verdict is missing.
    """
    cases = importlib.import_module("compiler_cases")
    recorded, journal = cases.read_verdicts(), Path("verdicts.jsonl")
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    found = {row["case"]: row for row in map(json.loads, lines)}
    with journal.open("a", encoding="utf-8") as log:
        for case in cases.cases():
            if case.name not in found:
                found[case.name] = {"case": case.name, **_tensorrt_verdict(case, cases)}
                log.write(json.dumps(found[case.name]) + "\n")
                log.flush()
    counts = Counter((recorded[name], row["verdict"]) for name, row in found.items())
    for (theirs, ours), count in sorted(counts.items()):
        yield Check(name=f"TensorRT-RTX {theirs}, TensorRT {ours}", passed=True, detail=str(count))
    for name, row in found.items():
        if (recorded[name] in ("parser", "builder")) != (row["verdict"] in ("parser", "builder", "crash", "error")):
            detail = f"TensorRT-RTX {recorded[name]}, TensorRT {row['verdict']} {row['message']}"
            yield Check(name=name, passed=True, detail=detail)
    known = sum(row["verdict"] != "error" for row in found.values())
    yield Check(name="all verdicts", passed=known == len(recorded), detail=f"{known} of {len(recorded)}")


def _tensorrt_verdict(case: Any, cases: Any) -> dict[str, str]:
    """Return TensorRT's verdict in the words of `compiler_cases.verdict`, "crash" or "error", with its message."""
    path = cases.save(case, _work_folder() / "case.onnx")
    try:
        what = f"{case.name}: the build"
        precisions = call_in_helper_process(what, _build_precisions, path, cases.node_name(case), factor=RUNTIME_FACTOR)
    except BuildFailed as error:
        stage = "parser" if "cannot parse" in str(error) else "builder"
        return {"verdict": stage, "message": hide_paths(str(error))}
    except HelperCallFailed as error:
        return {"verdict": "crash", "message": error.how}
    except UserError:
        raise  # no GPU: no other model has a verdict either
    except Exception as error:  # of the bindings or of ours: one model only
        return {"verdict": "error", "message": hide_paths(f"{type(error).__name__}: {error}")}
    low = [kind for kind in precisions if kind in ("int8", "fp8")]
    return {"verdict": (low or ["float" if precisions else "built"])[0], "message": ""}


def _build_precisions(path: Path, node: str) -> tuple[str, ...]:
    """Build an engine, without our checks before a build, and return the precisions of the layers of a node."""
    cuda, device = open_device()
    library, options = open_library(), BuildOptions(precision="tf32", detailed=True)
    plan = build_plan(library, path, options, TimingCache("cold", path.with_suffix(".none")), quantized=True)
    engine = load_engine(library, plan.content, path.name)
    loaded = LoadedEngine(library=library, engine=engine, cuda=cuda, clocks=GpuMonitor(device.uuid), graph=False)
    return tuple(layer.precision for layer in profile_layers(loaded, 1) if node in layer.origin)


MEASURES: Mapping[str, Callable[..., Iterator[Check]]] = {
    "timer": check_timer,
    "conformance": check_benchmarker,
    "trtexec-timing": compare_with_trtexec,
    "verdicts": compare_verdicts,
}


def main(arguments: list[str]) -> int:
    """Run one measure in the working directory; return the exit status."""
    checks = []
    try:
        for check in MEASURES[arguments[0]](*arguments[1:]):
            checks.append(check)
            sys.stdout.write(f"{check}\n")
    except (UserError, CandidateError) as error:
        checks.append(Check(name="measure", passed=False, detail=hide_paths(str(error))))
    write_json(Path("checks.json"), {"checks": [asdict(check) for check in checks]})
    failed = [check.name for check in checks if not check.passed]
    shown = f" ({', '.join(failed)})" if failed else ""
    sys.stdout.write(f"{len(failed)} of {len(checks)} checks failed{shown}\n")
    return int(bool(failed))
