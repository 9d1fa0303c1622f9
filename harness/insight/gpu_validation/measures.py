"""Checks without a command of qdq: the timer, trtexec's figures, equal kernels, TensorRT's verdicts.

`main` prints a line for each check and writes `checks.json` into the working directory.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import zoo
from harness.base.errors import BuildFailed, CandidateError, UserError
from harness.base.files import write_json
from harness.base.paths import hide_paths, resolve_path
from harness.insight.gpu_validation.conformance import (
    Check,
    check_benchmarker,
    file_candidate,
    work_folder,
)
from harness.plugins.registry import create_plugin
from harness.runtimes.cuda.device import CudaRuntime, GpuMonitor, open_device
from harness.runtimes.cuda.timing import GpuTimer
from harness.runtimes.tensorrt.builder import build_plan, load_engine
from harness.runtimes.tensorrt.inspection import profile_layers
from harness.runtimes.tensorrt.library import TimingCache, open_library
from harness.runtimes.tensorrt.options import BuildOptions
from harness.runtimes.tensorrt.session import LoadedEngine
from harness.workers.helper_process import RUNTIME_FACTOR, HelperCallFailed, call_in_helper_process

TIMER_BYTES = (2**26, 2**30)
ROUNDS, READINGS = 10, 50
"""Rounds of a comparison in turns, and inferences of a turn."""
MAX_DIFFERENCE, MAX_DIFFERENCE_MS = 0.02, 0.002
"""Two timings agree if they differ by less than this share of the second, or by less than the resolution in ms."""


def check_timer() -> Iterator[Check]:
    """Yield whether the timer reads the same with and without a CUDA graph, and on repetition (A/A), for memsets."""
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
    work, path = work_folder(), _model_file(use)
    for graph in (True, False):
        theirs, ours = (create_plugin("benchmarker", u, {"cuda_graph": graph}) for u in ("trtexec", "tensorrt"))
        try:
            built = theirs.build(file_candidate(path), work)
            with theirs.open(built) as one, ours.open(ours.load(built.engine.plan)) as other:
                turns = [(median(other.sample(READINGS)), median(one.sample(READINGS))) for _ in range(ROUNDS)]
            yield _agreement(f"timer and trtexec, cuda_graph {graph}", *map(list, zip(*turns, strict=True)))
        except CandidateError as error:
            yield Check(name=f"timer and trtexec, cuda_graph {graph}", passed=False, detail=str(error))


def _model_file(use: str) -> Path:
    if use.startswith("zoo:"):
        return zoo.write_model(use.removeprefix("zoo:"), work_folder() / "model.onnx")
    return resolve_path(use)


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
    path = cases.save(case, work_folder() / "case.onnx")
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
    """Run one measure in the working directory; return the exit status, 1 if a check failed.

    Args:
        arguments: Key of `MEASURES`, and the arguments of its function.
    """
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
