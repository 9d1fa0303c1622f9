"""Decision frame: float model, PTQ tools, simple rules, and the best placement found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.config.initial import PTQ_TOOLS
from harness.report.frames.main_frame import UNUSABLE_VERDICTS, main_frame
from harness.report.load.graph_store import sizes_of
from harness.report.load.results import CellResults, Results
from harness.report.load.stored_experiment import StoredExperiment
from harness.results_dir.artifacts import FLOAT_ROW

__all__ = ["BEST_FOUND_LABEL", "decision_frame"]

BEST_FOUND_LABEL = "best found"
RULE_LABELS = {
    "linear": "linear operators",
    "linear-fp8": "linear operators, fp8",
    "all": "all operators",
    "all-fp8": "all operators, fp8",
}
PRECISION_LABELS = {"f32": "FP32", "fp32": "FP32", "f16": "FP16", "fp16": "FP16", "bf16": "BF16"}
Losses = Mapping[tuple[str, int | None], float]


def decision_frame(results: Results) -> pd.DataFrame:
    """One line a cell and `role`, with the columns of `main_frame`.

    Roles are the float precisions, "default PTQ" (each tool), the other baselines of the experiment ("linear
    operators", "all operators", further ones by their names), and "best found": of the searchers whose choice obeys the
    bound on accuracy the one with the highest speedup in the runoff, or where there was none by its own search samples,
    or where the loss of accuracy was minimised the one that saw the least of it, so that its confirmed figures are
    fresh ones. `batch` is the first extent of the inputs, `megabytes` the size of the exported file; both are None
    where they are not known.
    """
    cells = {cell.name: cell for cell in results.cells}
    lines = []
    for name, part in main_frame(results).groupby("cell", sort=False):
        cell = cells.get(str(name))
        sizes = {} if cell is None else sizes_of(cell)
        for role, line in _iter_roles(part.to_dict("records"), results.stored, _search_losses(cell)):
            size = sizes.get(line["row"])
            facts = {"role": role, "batch": _batch_size(cell), "megabytes": None if size is None else size / 1e6}
            lines.append({**line, **facts})
    return pd.DataFrame(lines)


def _search_losses(cell: CellResults | None) -> Losses:
    """By searcher and seed the loss that the search saw of its choice, where that is what it minimised."""
    if cell is None:
        return {}
    last = (pick for pick in cell.picks if pick.rank == 0 and pick.budget == cell.budget)
    return {(pick.method, pick.seed): pick.loss for pick in last if pick.loss is not None}


def _iter_roles(
    lines: Sequence[dict[Any, Any]], stored: StoredExperiment, losses: Losses
) -> Iterator[tuple[str, dict[Any, Any]]]:
    floats = [line for line in lines if line["method"] == FLOAT_ROW]
    named = [(PRECISION_LABELS.get(line["precision"], FLOAT_ROW), line) for line in floats]
    yield from sorted(named, key=lambda pair: pair[0] != "FP32")
    yield from ((f"default PTQ, {line['method']}", line) for line in lines if line["method"] in PTQ_TOOLS)
    rules = (line for line in lines if line["method"] in stored.baselines and line["method"] not in PTQ_TOOLS)
    yield from ((RULE_LABELS.get(line["method"], line["method"]), line) for line in rules)
    found = [line for line in lines if line["method"] in stored.searchers]
    if found:
        yield BEST_FOUND_LABEL, _best_row(found, losses)


def _best_row(found: Sequence[dict[Any, Any]], losses: Losses) -> dict[Any, Any]:
    """The searcher's line that did best before the confirmation, of those that obey the bound where any does."""
    confirmed = [line for line in found if pd.notna(line["speedup"])]
    obeying = [line for line in confirmed if not str(line["decision"]).startswith(UNUSABLE_VERDICTS)]
    lines = obeying or confirmed or found
    seen = {(line["method"], line["seed"]): line for line in lines}
    if seen.keys() <= losses.keys():
        return seen[min(seen, key=lambda search: (losses[search], -_search_speedup(seen[search])))]
    met = all(pd.notna(line["runoff"]) for line in lines)
    return max(lines, key=lambda line: line["runoff"] if met else _search_speedup(line))


def _search_speedup(line: Mapping[Any, Any]) -> float:
    """The speedup that the search itself saw."""
    if pd.isna(line["speedup"]):
        return -math.inf
    return float(line["speedup"]) + (0.0 if pd.isna(line["shrinkage"]) else float(line["shrinkage"]))


def _batch_size(cell: CellResults | None) -> int | None:
    shapes = {} if cell is None else cell.facts.get("inputs", {})
    found = {shape[0] for shape in shapes.values() if shape}
    return found.pop() if len(found) == 1 else None
