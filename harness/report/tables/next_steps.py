"""Next steps: the model to deploy with its timing settings, or remedies if no row of a task qualifies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.report.load.display_names import format_drop, metric_name
from harness.report.load.graph_store import exported
from harness.report.load.results import CellResults, Results
from harness.report.load.search_logs import SearchLog
from harness.report.tables.check_notes import wrong_result_rows
from harness.report.tables.notes import without_vnni
from harness.results_dir.artifacts import DYNAMIC_AXES_FILE, FLOAT_ROW
from harness.results_dir.io import read_json
from harness.statistics import Interval
from harness.timing.provenance import format_options

__all__ = ["describe_next_steps", "describe_winners"]

MAX_SUGGESTED_DROP_SHARE = 0.1
"""Share of the float model's figure; nobody wants a bound that lets more of it go."""
_MainRow = Mapping[Any, Any]


def describe_winners(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """For each finished cell the fastest row that may be shipped, a line each: its file, and the options of its engine.

    Nothing of a cell whose models are no longer there.

    Args:
        results: A results folder.
        main: Its `harness.report.frames.main_frame.main_frame`.
    """
    lines = main[main["best"].eq(True)].to_dict("records")
    for cell in results.cells:
        own = (line for line in lines if line["cell"] == cell.name)
        line = next((line for line in own if str(line["decision"]).startswith(("ship", "fast"))), None)
        if line is None or line["row"] not in cell.rows:
            continue
        path = exported(cell, cell.rows[line["row"]])
        if path.exists():
            backend = cell.facts["backend"]
            floating = backend.get("float_params", {}).get(line["precision"], {})  # a float row has its own precision
            options = format_options({**backend.get("options", {}), **floating})
            how = f"; timed with {options}: deploy it so" if options else ""
            taken = f"take {path} ({line['method']}, {line['speedup']:.2f}x, {line['decision']}{how})"
            yield f"{cell.name}: {taken}{_dynamic_axes_note(cell, str(line['row']))}"


def _dynamic_axes_note(cell: CellResults, row: str) -> str:
    """Return what became of the form of a row that keeps the dynamic axes of the original; "" where it has none."""
    path = cell.folder / DYNAMIC_AXES_FILE
    noted = read_json(path) if path.exists() else {}
    return f"; {noted[row]['said']}" if row in noted and noted[row]["said"] else ""


def describe_next_steps(results: Results, main: pd.DataFrame) -> Iterator[str]:
    """For each finished cell of which no row may be shipped: why, and what may help, a line each.

    Nothing of a cell whose float model scores next to nothing, or whose rows failed: the tables say what to look at.

    Args:
        results: A results folder.
        main: Its `harness.report.frames.main_frame.main_frame`.
    """
    asked = {spec.name for spec in results.stored.cells}
    for cell in results.cells:
        lines = [line for line in main.to_dict("records") if line["cell"] == cell.name and line["method"] != FLOAT_ROW]
        shipped = any(str(line["decision"]).startswith(("ship", "fast")) for line in lines)
        if shipped or cell.name not in asked or not cell.complete or cell.blind:
            continue
        beyond = [line for line in lines if line["verdict"] == "faster" and line["beyond"]]
        slow = [line for line in lines if line["verdict"] in ("tie", "slower")]
        if wrong := wrong_result_rows(cell):
            reason = f"{cell.facts['backend'].get('name')} computes something else than the file for {', '.join(wrong)}"
            yield _format_paragraph(cell, reason, _wrong_result_steps(cell))
        elif beyond:
            yield _format_paragraph(
                cell, _accuracy_reason(cell, beyond), [*_search_steps(cell), *_accuracy_steps(cell, beyond)]
            )
        elif slow:
            reason = "none is faster than the float model"
            yield _format_paragraph(cell, reason, [*_latency_steps(cell, slow, results), *_search_steps(cell)])


def _format_paragraph(cell: CellResults, reason: str, steps: Iterable[str]) -> str:
    return "\n".join([f"No row of {cell.name} may be shipped: {reason}. What may help:", *(f"- {s}" for s in steps)])


def _search_steps(cell: CellResults) -> Iterator[str]:
    """Yield what a further search may do: one that ended by itself gains nothing by a larger budget."""
    budget = cell.budget
    if not budget:
        return
    ended = {f"{s.searcher}-{s.seed}": s for s in cell.searches if s.end is not None and s.evaluations < budget}
    short = [s for s in cell.searches if s.end is None and s.evaluations < budget]
    if short:
        yield (
            f"more budget.minutes: {_search_names(short)} did not come to {budget} evaluations; what was "
            "measured is kept"
        )
    if not cell.searches or any(s.evaluations >= budget for s in cell.searches):
        yield f"a larger budget than {budget} evaluations; what was measured is kept"
    elif broken := [s for s in ended.values() if s.end is not None and s.end.failed]:
        yield f"a searcher that does not break: {_search_names(broken)} did"
    elif ended:
        yield (
            f"another searcher, or more to choose from (sharing: region): {_search_names(ended.values())} had "
            "nothing more to "
            "propose"
        )


def _search_names(searches: Iterable[SearchLog]) -> str:
    return ", ".join(f"{search.searcher}-{search.seed}" for search in searches)


def _wrong_result_steps(cell: CellResults) -> Iterator[str]:
    for model in sorted({check.model for check in cell.checks.values() if check.model}):
        yield f"a report to the makers of the runtime: {cell.folder / model} shows the fault (see the text beside it)"
    if any(check.verdict == "saturates" for check in cell.checks.values()):
        yield "weights of 7 bits (reduce_range: true), or a processor with VNNI"
    yield "another version of the runtime"


def _accuracy_reason(cell: CellResults, lines: Sequence[_MainRow]) -> str:
    least = _least_lossy_row(lines)
    drop = Interval(value=least["drop"], low=_number_or_nan(least["drop_low"]), high=_number_or_nan(least["drop_high"]))
    return (
        f"what is faster loses more {metric_name(cell.metric)} than the bound {cell.allowed or 0.0:g} "
        f"(least: {least['method']}, {format_drop(drop, cell.metric)})"
    )


def _accuracy_steps(cell: CellResults, lines: Sequence[_MainRow]) -> Iterator[str]:
    least = _least_lossy_row(lines)
    yield _calibration_hint(cell)
    if _number_or_nan(least["drop_low"]) <= (cell.allowed or 0.0):  # not where nobody knows it
        yield "more images: by its interval that drop may be within the bound"
    if least["drop"] <= MAX_SUGGESTED_DROP_SHARE * abs(cell.score(FLOAT_ROW) or 0.0):
        bound = math.ceil(least["drop"] * 1e4 - 1e-6) / 1e4
        yield f"a looser bound: at {bound:g} {least['method']} could be shipped, {least['speedup']:.2f}x"


def _latency_steps(cell: CellResults, lines: Sequence[_MainRow], results: Results) -> Iterator[str]:
    if without_vnni(cell):
        yield "a processor with VNNI or AMX: this one has neither, and INT8 gains little there"
    ties = [line for line in lines if line["verdict"] == "tie" and line["speedup"] > 1 and not line["beyond"]]
    if ties:
        fastest = _fastest_row(ties)
        shown = f"{fastest['speedup']:.2f} [{fastest['speedup_low']:.2f}, {fastest['speedup_high']:.2f}]"
        more = f"more confirmation.builds than {cell.builds}"
        yield f"a quieter machine, or {more}: {fastest['method']} is a tie at {shown}"
    if ruled_out := _count_infeasible(cell):
        yield _calibration_hint(cell)
        yield f"a looser bound than {cell.allowed:g}: evaluations that were faster than float and broke it: {ruled_out}"
    placed = [line for line in lines if line["row"] in cell.rows and cell.rows[line["row"]].choices is not None]
    if placed:
        method = _fastest_row(placed)["method"]
        yield f"qdq explain {results.folder} {cell.name}/{method}: what its pairs cost and give on this runtime"


def _calibration_hint(cell: CellResults) -> str:
    if cell.facts["calibrated_on"] == "random data":
        return "calibration data: the ranges are those of random data"
    method = cell.facts.get("calibration", {}).get("method", "minmax")
    return f"another calibration.method than {method}, {'entropy' if method == 'mse' else 'mse'} for instance"


def _least_lossy_row(lines: Sequence[_MainRow]) -> _MainRow:
    return min(lines, key=lambda line: line["drop"])


def _fastest_row(lines: Sequence[_MainRow]) -> _MainRow:
    return max(lines, key=lambda line: line["speedup"])


def _number_or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _count_infeasible(cell: CellResults) -> int:
    """How many evaluations of the searches were faster than the float model, and broke the bound."""
    base_ms, goal = cell.summaries[FLOAT_ROW].latency_ms.value, cell.goal
    return sum(
        look.latency_ms < (search.float_ms or base_ms) and goal.loss_excess(goal.loss(look.value)) > 0
        for search in cell.searches
        for look in search.looked
    )
