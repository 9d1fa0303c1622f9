"""How many candidates of `auto` have the kernels of an earlier one, by NVIDIA's compiler: what pre-screening saves.

`python tests/recorded/screened_searches.py resnet18 mobilenetv2` needs the extra rtx and takes minutes a model. No GPU
times the candidates: their latency is the number of megabytes that the kernels read and write, and 0.01 a kernel.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compiled_models import INITIAL, export, model_files

from harness.graph.load import load
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect, load_dialect
from harness.plugins.registry import create_plugin
from harness.run.search.prescreening import kernels_digest
from harness.runtimes.rtx_compile.compiler import Kernel, compile_file
from search.api import Failure, Observation, Score
from search.heuristics import HEURISTIC_RULES

EVALUATIONS = 40


def screen_search(path: Path, dialect: Dialect, file: Path) -> Iterator[str]:
    """Yield the digest of the kernels of each candidate of a search, "" for a refused one."""
    model = load(path, source=path.stem, min_opset=dialect.opset(["int8"]))
    space = build_space(model, dialect, precisions=["int8"])
    searcher = create_plugin("searcher", "auto", {}, {"space": space, "seed": 0})
    rules = [HEURISTIC_RULES[name](space, None) for name in INITIAL]
    waiting, known = [space.float_placement(), space.quantize_all(), *rules], dict[str, Score | Failure]()
    while len(known) < EVALUATIONS and (waiting or (waiting := list(searcher.ask(1)))):
        placement = waiting.pop(0)
        digest = space.digest(placement)
        if digest not in known:
            made = compile_file(export(model, dialect, space, placement, file), "sm89")
            known[digest] = Score(objective=sum(map(kernel_cost, made.kernels)), stderr=0.0)
            if made.refusal is not None:
                known[digest] = Failure(stage="build", reason=str(made.refusal))
            yield kernels_digest(made.kernels) if made.refusal is None else ""
        searcher.tell(Observation(placement=placement, digest=digest, outcome=known[digest]))


def kernel_cost(kernel: Kernel) -> float:
    sides = (kernel.inputs, kernel.constants, kernel.outputs)
    sizes = (math.prod(each.shape) * (1 if each.type in ("int8", "fp8") else 4) for side in sides for each in side)
    return 0.01 + sum(sizes) / 1e6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        for name, model_path in model_files(Path(work)):
            for dialect_name in ("tensorrt_rtx", "tensorrt") if name in sys.argv[1:] else ():
                found = list(screen_search(model_path, load_dialect(dialect_name), Path(work, "candidate.onnx")))
                built = [digest for digest in found if digest]
                equal, refused = len(built) - len(set(built)), len(found) - len(built)
                print(f"{name}, {dialect_name}: {equal} of {len(found)} with known kernels, {refused} refused")
