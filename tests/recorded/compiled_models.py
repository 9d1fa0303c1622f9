"""What NVIDIA's compiler makes of the models of the zoo and of QDQ_ASSETS: a table of kernels and pairs with effect.

`python tests/recorded/compiled_models.py out/compiled` needs the extra rtx and takes an hour; it continues after an
interruption. Ranges are made from tensor names: no verdict depends on the values of scales.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from digests import _ranges

from harness import zoo
from harness.accuracy.calibration.ptq import modelopt_ptq
from harness.errors import CandidateError
from harness.explain.compiled import explain_compilation
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import TENSORRT_RTX, Dialect
from harness.random_inputs import random_feeds
from harness.runtimes.rtx_compile.compiler import compile_file
from harness.task_setup.model_loader import input_types
from search.heuristics import HEURISTIC_RULES
from search.space import Placement, Space

INITIAL = ("linear", "linear_add", "movers")
"""Rules of `initial` by default, besides `all`."""
RANDOM_COUNT = 5
SLOW = {"encoder48"}
"""Models of which only `all` is compiled, and no file of a PTQ tool: a build takes minutes."""
PRECISIONS = {"int8": ["int8"], "fp8": ["fp8"], "mixed": ["int8", "fp8"]}


def main(folder: Path) -> None:
    """Compile what is not in the journal of the folder yet, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "compiled.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    known = {(row["model"], row["kind"], row["placement"]) for row in rows}
    for name, path in model_files(folder):
        for kind, placement, file in quantized_files(name, path, folder, known):
            row = {"model": name, "kind": kind, "placement": placement, **judge(file)}
            rows.append(row)
            with journal.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)))


def model_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for name in zoo.model_names():
        yield name, zoo.write_model(name, folder / f"{name}.onnx")
    yield from ((path.stem, path) for path in sorted(Path(os.environ["QDQ_ASSETS"], "models").glob("*.onnx")))


def quantized_files(
    name: str, path: Path, folder: Path, known: set[tuple[str, str, str]]
) -> Iterator[tuple[str, str, Path]]:
    """Yield precision, placement and file of each quantized form of a model that is not known."""
    for kind, precisions in PRECISIONS.items():
        model = load(path, source=name, min_opset=TENSORRT_RTX.opset(precisions))
        space = build_space(model, TENSORRT_RTX, precisions=precisions)
        for label, placement in placements(space).items():
            if (name, kind, label) not in known and (name not in SLOW or label == "all"):
                yield kind, label, export(model, TENSORRT_RTX, space, placement, folder / "candidate.onnx")
    if (name, "int8", "modelopt_ptq") not in known and name not in SLOW:
        model = load(path, source=name, min_opset=17)
        feeds = random_feeds(input_types(model), 2)
        file = save_to_folder(model, folder / name)
        yield "int8", "modelopt_ptq", modelopt_ptq(file, folder / "ptq.onnx", feeds, dialect_name="tensorrt")


def placements(space: Space) -> dict[str, Placement]:
    rng = np.random.default_rng(0)
    rules = {name: HEURISTIC_RULES[name](space, None) for name in INITIAL}
    return {"all": space.quantize_all(), **rules, **{f"random{i}": space.random(rng) for i in range(RANDOM_COUNT)}}


def export(model: Model, dialect: Dialect, space: Space, placement: Placement, path: Path) -> Path:
    return Inserter(model, dialect, _ranges(model)).export(space.resolve(placement), path)


def judge(path: Path) -> dict[str, Any]:
    """Return the verdict on a file, with kernels by type of their first input and effects of its quantized edges."""
    try:
        made = compile_file(path, "sm89")
    except CandidateError as error:
        return {"refusal": str(error)}
    if made.refusal is not None:
        return {"refusal": str(made.refusal)}
    report = explain_compilation(path, made)
    types = Counter(next((tensor.type for tensor in kernel.inputs), "none") for kernel in made.kernels)
    return {"refusal": "", "kernels": dict(types), "effects": dict(Counter(edge.effect for edge in report.edges))}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a row of Markdown for each model."""
    heads = ("model", "built", "INT8 kernels", "FP8 kernels", "effect, INT8", "effect, FP8", "mixed", "ModelOpt PTQ")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(row)
        by_model["all"].append(row)
    for name in (*sorted(by_model.keys() - {"all"}), "all"):
        own = by_model[name]
        built = f"{sum(not row['refusal'] for row in own)} of {len(own)}"
        counts = [kernel_counts(own, kind) if name != "all" else "" for kind in ("int8", "fp8")]
        yield f"| {' | '.join([name, built, *counts, *(share(own, kind) for kind in PRECISIONS), share(own, 'ptq')])} |"


def kernel_counts(rows: list[dict[str, Any]], kind: str) -> str:
    found = [row["kernels"] for row in rows if (row["kind"], row["placement"], row["refusal"]) == (kind, "all", "")]
    total, low = sum(sum(each.values()) for each in found), sum(each.get(kind, 0) for each in found)
    return f"{low} of {total}" if found else "-"


def share(rows: list[dict[str, Any]], kind: str) -> str:
    """Return the share of quantized edges that take effect: in the initial design, or in the file of ModelOpt."""
    wanted = ("modelopt_ptq",) if kind == "ptq" else ("all", *INITIAL)
    effects: Counter[str] = Counter()
    for row in rows:
        if row["placement"] in wanted and kind in ("ptq", row["kind"]):
            effects.update(row.get("effects", {}))
    return f"{effects['taken'] / effects.total():.1%} of {effects.total()}" if effects else "-"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
