"""What NVIDIA's compiler makes of the models of the zoo and of QDQ_ASSETS: a table of kernels and pairs with effect.

`python tests/recorded/compiled_models.py out/compiled` needs the extra rtx and takes two hours; it continues after an
interruption. A second argument is another dialect than `tensorrt_rtx`. Ranges are made from tensor names: no verdict
depends on the values of scales.
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
from harness.accuracy.tools.ptq import quantize
from harness.base.errors import CandidateError
from harness.base.files import facts_digest
from harness.base.random_inputs import random_feeds
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect, load_dialect
from harness.insight.compiled import explain_compilation
from harness.run.prepare.model_loader import input_types
from harness.runtimes.rtx_compile import compile_file
from search.fixed_placements import FIXED_PLACEMENTS
from search.space import Placement, Space

INITIAL = ("linear", "linear_add", "movers")
"""Rules of `initial` by default, besides `all`."""
RANDOM_COUNT = 5
PRECISIONS = {"int8": ["int8"], "fp8": ["fp8"], "mixed": ["int8", "fp8"]}


def main(folder: Path, dialect: Dialect) -> None:
    """Compile what is not in the journal of the folder yet, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "compiled.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    known = {(row["model"], row["kind"], row["placement"]) for row in rows}
    for name, path in model_files(folder):
        for labels, file in quantized_files(path, folder, dialect, {key[1:] for key in known if key[0] == name}):
            row = {"model": name, **labels, **judge(file)}
            rows.append(row)
            with journal.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)))


def model_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for name in zoo.model_names():
        yield name, zoo.write_model(name, folder / f"{name}.onnx")
    yield from ((path.stem, path) for path in sorted(Path(os.environ["QDQ_ASSETS"], "models").glob("*.onnx")))


def quantized_files(
    path: Path, folder: Path, dialect: Dialect, known: set[tuple[str, str]]
) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield precision, placement and its digest, and the file, of each quantized form of a model that is not known."""
    for kind, precisions in PRECISIONS.items():
        model = load(path, source=path.stem, min_opset=dialect.opset(precisions))
        space = build_space(model, dialect, precisions=precisions)
        for label, placement in placements(space).items():
            if (kind, label) not in known:
                labels = {"kind": kind, "placement": label, "placement_digest": space.digest(placement)}
                yield labels, export(model, dialect, space, placement, folder / "candidate.onnx")
    if ("int8", "modelopt_ptq") not in known:
        model = load(path, source=path.stem, min_opset=17)
        feeds = random_feeds(input_types(model), 2)
        file = save_to_folder(model, folder / path.stem)
        labels = {"kind": "int8", "placement": "modelopt_ptq"}
        quantize("modelopt_ptq", file, folder / "ptq.onnx", feeds, dialect_name="tensorrt")
        yield labels, folder / "ptq.onnx"


def placements(space: Space) -> dict[str, Placement]:
    rng = np.random.default_rng(0)
    rules = {name: FIXED_PLACEMENTS[name](space, None) for name in INITIAL}
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
    effects = dict(Counter(edge.effect for edge in report.edges))
    facts = [
        [each.kind, each.tactic, *([t.type, *t.shape] for t in (*each.inputs, *each.constants, *each.outputs))]
        for each in made.kernels
    ]
    return {"refusal": "", "kernels": dict(types), "kernels_digest": facts_digest(facts), "effects": effects}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a row of Markdown for each model."""
    heads = (
        "model", "built", "equal kernels", "INT8 kernels", "FP8 kernels", "effect, INT8", "effect, FP8", "mixed",
        "ModelOpt PTQ",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(row)
        by_model["all"].append(row)
    for name in (*sorted(by_model.keys() - {"all"}), "all"):
        own = by_model[name]
        built = [f"{sum(not row['refusal'] for row in own)} of {len(own)}", equal_kernels(own)]
        counts = [kernel_counts(own, kind) if name != "all" else "" for kind in ("int8", "fp8")]
        shares = [share(own, kind) for kind in (*PRECISIONS, "ptq")]
        yield f"| {' | '.join([name, *built, *counts, *shares])} |"


def equal_kernels(rows: list[dict[str, Any]]) -> str:
    """Return how many of the distinct placements of a model and precision have the kernels of another one."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row.get("kernels_digest") and "placement_digest" in row:
            found[row["model"], row["kind"]][row["placement_digest"]] = row["kernels_digest"]
    equal = sum(len(kernels) - len(set(kernels.values())) for kernels in found.values())
    return f"{equal} of {sum(map(len, found.values()))}" if found else "-"


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
    main(Path(sys.argv[1]), load_dialect(*sys.argv[2:] or ["tensorrt_rtx"]))
