"""Comparison of two results folders: two machines, two versions, before and after a change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.config.yaml_loader import read_experiment_yaml
from harness.errors import UserError
from harness.report.frames.confirmation_samples import sample_frame
from harness.report.frames.main_frame import main_frame
from harness.report.load.results import NOISY_FLOOR, CellResults, Results
from harness.report.report_table import MISSING_CELL, ReportTable, format_interval
from harness.results_dir.artifacts import FLOAT_ROW
from harness.results_dir.fingerprint import diff_leaves
from harness.statistics import Interval, speedup_verdict
from harness.timing.turn_log import TWIN, disturbance_note

__all__ = ["compare_frame", "comparison_table", "describe_differences"]

ROW_KEY_COLUMNS = ["cell", "method", "float_precision"]
FINGERPRINT_KEYS = (
    "model_sha256", "backend", "precision", "space", "dialect", "calibration", "ranges", "sampling", "goal",
    "evaluator", "preprocess", "qdq_bench",
)  # fmt: skip
TRANSIENT_KEYS = ("load_average", "mhz", "temperature_c", "clocks.sm", "temperature.gpu", "power.draw")
"""Of an environment: differs from minute to minute."""
SEPARATELY_COMPARED_KEYS = ("experiment", "description", "models", "backends", "precision", "sampling")
"""Keys of an experiment that say nothing, or what the cells themselves say."""
BUSY_LOAD_AVERAGE = 1.0
"""A machine that was busier by more than so many cores is a likely cause of other latencies."""
COMPARISON_NOTE = (
    "Ratio: latency in the first folder over that in the second, so above 1 the second is faster; 95 % interval, "
    "Welch's over the medians of fresh builds on a logarithmic scale. Verdict: on the second, a tie where the interval "
    "contains 1 or the difference is below 1 % or below the larger A/A floor. Own verdict: of each folder, over "
    "its own float baseline. Placement: whether both chose one file."
)


def compare_frame(first: Results, second: Results) -> pd.DataFrame:
    """Rows of both folders matched by cell and method: latencies, their ratio with its interval, verdict, scores.

    Raises:
        UserError: The folders have no cell in common.
    """
    names = {cell.name for cell in first.cells} & {cell.name for cell in second.cells}
    if not names:
        there = [", ".join(cell.name for cell in results.cells) or "none" for results in (first, second)]
        raise UserError(
            f"{first.folder} and {second.folder} have no cell in common (cells: {'; '.join(there)}); cells are called "
            "MODEL-BACKEND-PRECISION by the labels of the experiment"
        )
    one, two = _index_by_row_key(first), _index_by_row_key(second)
    both = one.merge(two, on=ROW_KEY_COLUMNS, how="outer", suffixes=("_1", "_2"), sort=False)
    both = both[both["cell"].isin(names)]
    order = {key: place for place, key in enumerate(dict.fromkeys([*_row_keys(one), *_row_keys(two)]))}
    both = both.iloc[sorted(range(len(both)), key=lambda place: order[_row_keys(both)[place]])]
    medians = [_build_medians(results) for results in (first, second)]
    return pd.DataFrame([_comparison_row(row, first, second, medians) for row in both.to_dict("records")])


def _index_by_row_key(results: Results) -> pd.DataFrame:
    """The main rows; float rows are told apart by their precision, all others have one a method."""
    main = main_frame(results)
    return main.assign(float_precision=main["precision"].where(main["method"] == "float", ""))


def _row_keys(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    return list(frame[ROW_KEY_COLUMNS].itertuples(index=False, name=None))


def _build_medians(results: Results) -> dict[tuple[str, str], list[float]]:
    """Median latency of each fresh build, by cell and row."""
    samples = sample_frame(results)
    samples = samples[samples["row"] != TWIN]
    turns = samples.groupby(["cell", "row", "build", "group", "round"], as_index=False)["latency_ms"].median()
    builds = turns.groupby(["cell", "row", "build", "group"], as_index=False)["latency_ms"].median()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in builds.to_dict("records"):
        found[line["cell"], line["row"]].append(line["latency_ms"])
    return found


def _comparison_row(
    row: Mapping[Any, Any],
    first: Results,
    second: Results,
    medians: Sequence[Mapping[tuple[str, str], list[float]]],
) -> dict[str, Any]:
    builds = [medians[side].get((row["cell"], row[f"row_{side + 1}"]), []) for side in (0, 1)]
    ratio = _latency_ratio(*builds) if all(builds) else None
    floor = max((results.cell(row["cell"]).floor or 0.0) for results in (first, second))
    return {
        "cell": row["cell"],
        "method": f"{row['method']} {row['float_precision']}".strip(),
        "latency_1_ms": row["latency_ms_1"],
        "latency_2_ms": row["latency_ms_2"],
        "ratio": None if ratio is None else ratio.value,
        "ratio_low": None if ratio is None else ratio.low,
        "ratio_high": None if ratio is None else ratio.high,
        "verdict": _missing_side(row) if ratio is None else speedup_verdict(ratio, floor),
        "verdict_1": row["verdict_1"],
        "verdict_2": row["verdict_2"],
        "speedup_1": row["speedup_1"],
        "speedup_2": row["speedup_2"],
        "score_1": row["score_1"],
        "score_2": row["score_2"],
        "same_file": _both_equal(row["sha256_1"], row["sha256_2"]),
    }


def _verdict_text(verdict: Any) -> str:
    return MISSING_CELL if pd.isna(verdict) else str(verdict)


def _missing_side(row: Mapping[Any, Any]) -> str:
    sides = [str(side) for side in (1, 2) if pd.isna(row[f"latency_ms_{side}"])]
    return f"missing in {' and '.join(sides)}"


def _both_equal(one: Any, two: Any) -> bool | None:
    return None if pd.isna(one) or pd.isna(two) else one == two


def _latency_ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Latency of the first over the second, unpaired; a side of one build leaves the interval open.

    Logarithms with Welch's degrees of freedom ("The generalization of 'Student's' problem", Biometrika 34, 1947).
    """
    from scipy.special import stdtrit

    logs = [np.log(side) for side in (first, second)]
    shift = float(logs[0].mean() - logs[1].mean())
    if min(len(side) for side in logs) < 2:
        return Interval(value=math.exp(shift), low=0.0, high=math.inf)
    parts = [float(side.var(ddof=1)) / len(side) for side in logs]
    spread = sum(part**2 / (len(side) - 1) for part, side in zip(parts, logs, strict=True))
    freedom = sum(parts) ** 2 / spread if spread else math.inf
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(parts)) if spread else 0.0
    return Interval(value=math.exp(shift), low=math.exp(shift - half), high=math.exp(shift + half))


def comparison_table(first: Results, second: Results) -> ReportTable:
    """The matched rows, ready to show."""
    raw = compare_frame(first, second)
    cells = pd.DataFrame([_format_comparison_row(row) for row in raw.to_dict("records")])
    return ReportTable(
        name="compare",
        title="Comparison",
        cells=cells,
        raw=raw,
        note=COMPARISON_NOTE,
        warnings=tuple(_noise_notes(first, second)),
    )


def _noise_notes(first: Results, second: Results) -> Iterator[str]:
    """Cells of which one machine was too noisy to tell much."""
    for one, two in _shared_tasks(first, second):
        floors = [cell.floor or 0.0 for cell in (one, two)]
        if max(floors) > NOISY_FLOOR:
            yield (
                f"Noisy machine: the A/A floor of {one.name} is {floors[0]:.1%} in the first and {floors[1]:.1%} in "
                "the second; what differs by less than the larger one is a tie."
            )
        for side, cell in (("first", one), ("second", two)):
            if told := disturbance_note(cell.disturbed):
                yield f"Noisy machine, {cell.name} in the {side}: {told}."


def _shared_tasks(first: Results, second: Results) -> list[tuple[CellResults, CellResults]]:
    """The cells that both have."""
    others = {cell.name: cell for cell in second.cells}
    return [(cell, others[cell.name]) for cell in first.cells if cell.name in others]


def _format_comparison_row(row: Mapping[Any, Any]) -> dict[str, str]:
    same = {True: "same", False: "another"}
    return {
        "cell": row["cell"],
        "method": row["method"],
        "latency 1 ms": format_interval(row["latency_1_ms"], None, None, 3),
        "latency 2 ms": format_interval(row["latency_2_ms"], None, None, 3),
        "ratio [CI]": format_interval(row["ratio"], row["ratio_low"], row["ratio_high"]),
        "verdict": row["verdict"],
        "own verdict 1": _verdict_text(row["verdict_1"]),
        "own verdict 2": _verdict_text(row["verdict_2"]),
        "speedup 1": format_interval(row["speedup_1"], None, None),
        "speedup 2": format_interval(row["speedup_2"], None, None),
        "metric 1": format_interval(row["score_1"], None, None, 4),
        "metric 2": format_interval(row["score_2"], None, None, 4),
        "placement": same.get(row["same_file"], MISSING_CELL),
    }


def describe_differences(first: Results, second: Results) -> Iterator[str]:
    """What is not the same: load, machine, libraries, code, model, settings, keys of the experiment.

    Lines about cells name those that they hold for, where it is not all.
    """
    found: dict[str, list[str]] = defaultdict(list)
    both = _shared_tasks(first, second)
    for cell, other in both:
        for line in (*_load_warnings(cell, other), *diff_leaves(_fingerprint_facts(cell), _fingerprint_facts(other))):
            found[line].append(cell.name)
    for line, names in found.items():
        yield line if len(names) == len(both) else f"{line} ({', '.join(names)})"
    yield from diff_leaves(_experiment_keys(first), _experiment_keys(second), "experiment")
    for results, rest in ((first, {c.name for c in second.cells}), (second, {c.name for c in first.cells})):
        if alone := [cell.name for cell in results.cells if cell.name not in rest]:
            yield f"only in {results.folder}: {', '.join(alone)}"


def _load_warnings(cell: CellResults, other: CellResults) -> Iterator[str]:
    """That one machine had more to do beside the run, where that may be why latencies differ."""
    loads = [_as_load_average(side.environment.get("load_average")) for side in (cell, other)]
    if None in loads or abs(more := (loads[1] or 0.0) - (loads[0] or 0.0)) <= BUSY_LOAD_AVERAGE:
        return
    slower = [side.summaries[FLOAT_ROW].latency_ms.value for side in (cell, other) if FLOAT_ROW in side.summaries]
    floor = max(cell.floor or 0.0, other.floor or 0.0)
    gap = math.log(slower[1] / slower[0]) if len(slower) == 2 else 0.0
    likely = abs(gap) > math.log1p(floor) and (gap > 0) == (more > 0)  # whoever had more to do was slower
    yield (
        f"environment.load_average: {loads[0]:g} -> {loads[1]:g}: {abs(more):.1f} more busy cores when the "
        f"{'second' if more > 0 else 'first'} began{', a likely cause of what differs in latency' if likely else ''}"
    )


def _as_load_average(found: Any) -> float | None:
    """Of the last minute."""
    value = found[0] if isinstance(found, list) and found else found
    return float(value) if isinstance(value, int | float) else None


def _experiment_keys(results: Results) -> dict[str, Any]:
    """The experiment's keys; entries of lists by their names, so that each that differs is one line."""
    body = read_experiment_yaml(results.stored.text, str(results.folder / "experiment.yaml"))
    return {key: _index_by_name(value) for key, value in body.items() if key not in SEPARATELY_COMPARED_KEYS}


def _index_by_name(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(entry, str | Mapping) for entry in value):
        return value
    return {str(e if isinstance(e, str) else e.get("label") or e.get("use")): e for e in value}


def _fingerprint_facts(cell: CellResults) -> dict[str, Any]:
    return {
        "environment": _without_transient(cell.environment),
        **{key: cell.facts.get(key) for key in FINGERPRINT_KEYS},
    }


def _without_transient(facts: Any) -> Any:
    """Facts without those that pass."""
    if isinstance(facts, Mapping):
        return {key: _without_transient(value) for key, value in facts.items() if key not in TRANSIENT_KEYS}
    return [_without_transient(value) for value in facts] if isinstance(facts, list) else facts
