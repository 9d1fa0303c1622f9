"""Comparison of two results folders: two machines, two versions, before and after a change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.base.errors import UserError
from harness.base.files import diff_leaves
from harness.base.statistics import Interval, speedup_verdict
from harness.config.yaml_loader import read_experiment_yaml
from harness.measure.turn_log import TWIN, disturbance_note
from harness.report.frames import main_frame, sample_frame
from harness.report.report_table import (
    MISSING_CELL,
    Column,
    ReportTable,
    Row,
    TableSpec,
    frame_rows,
    interval_column,
    is_missing,
    number_column,
    text_column,
)
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import NOISY_FLOOR, Results, TaskResults

ROW_KEY = ["task", "method", "float_precision"]
FINGERPRINT_KEYS = (
    "model_sha256", "backend", "precision", "space", "dialect", "calibration", "ranges", "sampling", "goal",
    "evaluator", "preprocess", "qdq_bench",
)  # fmt: skip
TRANSIENT_KEYS = ("load_average", "mhz", "temperature_c", "clocks.sm", "temperature.gpu", "power.draw")
IGNORED_EXPERIMENT_KEYS = ("experiment", "description", "models", "backends", "precision", "sampling")
BUSY_LOAD_AVERAGE = 1.0  # in busy cores; a larger difference is reported as a possible cause of different latencies


COMPARISON = TableSpec(
    name="compare",
    title="Comparison",
    columns=(
        text_column("task"),
        text_column("method"),
        *(number_column(f"latency {side} ms", f"latency_{side}_ms", "{:.3f}") for side in (1, 2)),
        interval_column("ratio [CI]", "ratio", "ratio_low", "ratio_high"),
        text_column("verdict"),
        *(number_column(f"own verdict {side}", f"verdict_{side}", "{}") for side in (1, 2)),
        *(number_column(f"speedup {side}", f"speedup_{side}", "{:.2f}") for side in (1, 2)),
        *(number_column(f"metric {side}", f"score_{side}", "{:.4f}") for side in (1, 2)),
        Column("placement", lambda row: {True: "same", False: "another"}.get(row["same_file"], MISSING_CELL), True),
    ),
    caption=(
        "Ratio: latency in the first folder over that in the second, so above 1 the second is faster; 95 % interval, "
        "Welch's t over the medians of fresh builds on a logarithmic scale. Verdict: on the second; a tie if the "
        "interval contains 1, or the difference is below 1 % or below the larger noise floor. Own verdict: of each "
        "folder, over its own float baseline. Placement: whether both chose the same file."
    ),
)


def comparison_table(first: Results, second: Results) -> ReportTable:
    """Return the table of `compare_frame`, with warnings about noise."""
    warnings = []
    for one, two in _shared_tasks(first, second):
        floors = [task.noise_floor or 0.0 for task in (one, two)]
        if max(floors) > NOISY_FLOOR:
            warnings.append(
                f"Noisy machine: the noise floor of {one.name} is {floors[0]:.1%} in the first and {floors[1]:.1%} in "
                "the second; differences below the larger one are ties."
            )
        for side, task in (("first", one), ("second", two)):
            if note := disturbance_note(task.disturbed):
                warnings.append(f"Noisy machine, {task.name} in the {side}: {note}.")
    return COMPARISON.build(compare_frame(first, second), warnings=warnings)


def compare_frame(first: Results, second: Results) -> pd.DataFrame:
    """Return the rows of both folders, matched by task and method, with the ratio of latencies, first over second.

    Raises:
        UserError: The folders have no task in common.
    """
    names = {task.name for task in first.tasks} & {task.name for task in second.tasks}
    if not names:
        task_names = [", ".join(task.name for task in results.tasks) or "none" for results in (first, second)]
        raise UserError(
            f"{first.folder} and {second.folder} have no task in common (tasks: {'; '.join(task_names)}); the name of "
            "a task is MODEL-BACKEND-PRECISION by the labels of the experiment"
        )
    mains = []
    for results in (first, second):
        main = main_frame(results)  # float rows differ by their precision, the others by their method
        main = main.assign(float_precision=main["precision"].where(main["method"] == FLOAT_ROW, ""))
        mains.append(main[main["task"].isin(names)])
    both = mains[0].merge(mains[1], on=ROW_KEY, how="outer", suffixes=("_1", "_2"), sort=False)
    row_keys = pd.concat([main[ROW_KEY] for main in mains]).itertuples(index=False, name=None)
    order = {key: place for place, key in enumerate(dict.fromkeys(row_keys))}
    rows = sorted(frame_rows(both), key=lambda row: order[tuple(row[key] for key in ROW_KEY)])
    medians = []  # of each fresh build in ms, by task and row
    for results in (first, second):
        samples = sample_frame(results.tasks)
        keys = ["task", "row", "build", "group"]
        turns = samples[samples["row"] != TWIN].groupby([*keys, "round"], as_index=False)["latency_ms"].median()
        builds = turns.groupby(keys, as_index=False)["latency_ms"].median()
        medians.append({key: part["latency_ms"].tolist() for key, part in builds.groupby(["task", "row"])})
    floors = {name: max(results.task(name).noise_floor or 0.0 for results in (first, second)) for name in names}
    return pd.DataFrame([_comparison_row(row, floors[row["task"]], medians) for row in rows])


def differing_rows(first: Results, second: Results, frame: pd.DataFrame) -> list[str]:
    """Return the rows with different results, as TASK/METHOD, and the tasks that only one folder has.

    A row differs if its latency does beyond noise, if it changed between faster and slower than float, or if the same
    file has another score. A searcher may choose another placement.

    Args:
        first: Results of the first folder.
        second: Results of the second folder.
        frame: Result of `compare_frame`.
    """
    rows = []
    for row in frame_rows(frame):
        one, two = row["score_1"], row["score_2"]
        rescored = is_missing(one) != is_missing(two)
        if not is_missing(one) and not is_missing(two):  # beyond the rounding of other processors
            rescored = not math.isclose(one, two, rel_tol=1e-3, abs_tol=1e-4)
        reversed_verdict = {row["verdict_1"], row["verdict_2"]} == {"faster", "slower"}
        if row["verdict"] in ("faster", "slower") or reversed_verdict or (row["same_file"] is True and rescored):
            rows.append(f"{row['task']}/{row['method']}")
    return rows + sorted({task.name for task in first.tasks} ^ {task.name for task in second.tasks})


def _comparison_row(
    row: Row, noise_floor: float, medians: Sequence[Mapping[tuple[str, str], list[float]]]
) -> dict[str, Any]:
    builds = [medians[side].get((row["task"], row[f"row_{side + 1}"]), []) for side in (0, 1)]
    files = row["sha256_1"], row["sha256_2"]
    missing = " and ".join(str(side) for side in (1, 2) if is_missing(row[f"latency_ms_{side}"]))
    figures: dict[str, Any] = {"ratio": None, "ratio_low": None, "ratio_high": None, "verdict": f"missing in {missing}"}
    if all(builds):
        ratio = _latency_ratio(*builds)
        verdict = speedup_verdict(ratio, noise_floor)
        figures = {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "verdict": verdict}
    columns = ("verdict_1", "verdict_2", "speedup_1", "speedup_2", "score_1", "score_2")
    return {
        "task": row["task"],
        "method": f"{row['method']} {row['float_precision']}".strip(),
        "latency_1_ms": row["latency_ms_1"],
        "latency_2_ms": row["latency_ms_2"],
        **figures,
        **{key: row[key] for key in columns},
        "same_file": None if any(map(is_missing, files)) else files[0] == files[1],
    }


def _latency_ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the unpaired ratio of the latencies, first over second; a single build on a side gives no limits.

    Logarithms with Welch's degrees of freedom ("The generalization of 'Student's' problem", Biometrika 34, 1947).
    """
    from scipy.stats import ttest_ind

    logs = [np.log(side) for side in (first, second)]
    shift = float(logs[0].mean() - logs[1].mean())
    if min(len(side) for side in logs) < 2:
        return Interval(value=math.exp(shift), low=0.0, high=math.inf)
    low = high = shift
    if any(side.var() for side in logs):
        limits = ttest_ind(*logs, equal_var=False).confidence_interval()
        low, high = float(limits.low), float(limits.high)
    return Interval(value=math.exp(shift), low=math.exp(low), high=math.exp(high))


def _shared_tasks(first: Results, second: Results) -> list[tuple[TaskResults, TaskResults]]:
    others = {task.name: task for task in second.tasks}
    return [(task, others[task.name]) for task in first.tasks if task.name in others]


def describe_differences(first: Results, second: Results) -> Iterator[str]:
    """Yield a line for each difference of load, machine, libraries, code, model, settings, and experiment keys.

    A line names its tasks unless all tasks have the difference.
    """
    tasks: dict[str, list[str]] = defaultdict(list)
    both = _shared_tasks(first, second)
    for pair in both:
        one, two = (
            {
                "environment": _without_transient(task.environment),
                **{key: task.facts.get(key) for key in FINGERPRINT_KEYS},
            }
            for task in pair
        )
        for line in (*_load_warnings(*pair), *diff_leaves(one, two)):
            tasks[line].append(pair[0].name)
    for line, names in tasks.items():
        yield line if len(names) == len(both) else f"{line} ({', '.join(names)})"
    yield from diff_leaves(_experiment_keys(first), _experiment_keys(second), "experiment")
    for results, other in ((first, second), (second, first)):
        others = {task.name for task in other.tasks}
        if alone := [task.name for task in results.tasks if task.name not in others]:
            yield f"only in {results.folder}: {', '.join(alone)}"


def _load_warnings(task: TaskResults, other: TaskResults) -> Iterator[str]:
    """Yield a warning if the load differs, which states whether this may explain the difference in latency."""
    averages = [side.environment.get("load_average") for side in (task, other)]
    # The first average of a list is that over the last minute.
    loads: list[Any] = [value[0] if isinstance(value, list) and value else value for value in averages]
    if (
        not all(isinstance(load, int | float) for load in loads)
        or abs(more := loads[1] - loads[0]) <= BUSY_LOAD_AVERAGE
    ):
        return
    slower = [side.summaries[FLOAT_ROW].latency_ms.value for side in (task, other) if FLOAT_ROW in side.summaries]
    noise_floor = max(task.noise_floor or 0.0, other.noise_floor or 0.0)
    gap = math.log(slower[1] / slower[0]) if len(slower) == 2 else 0.0
    likely = abs(gap) > math.log1p(noise_floor) and (gap > 0) == (more > 0)  # the busier machine was slower
    yield (
        f"environment.load_average: {loads[0]:g} -> {loads[1]:g}: {abs(more):.1f} more busy cores at the start of the "
        f"{'second' if more > 0 else 'first'}{', a likely cause of the differences in latency' if likely else ''}"
    )


def _experiment_keys(results: Results) -> dict[str, Any]:
    """Return the experiment file with lists as mappings by name of entry, so that each difference is one line."""
    body = dict(read_experiment_yaml(results.stored.text, str(results.folder / "experiment.yaml")))
    for key, value in body.items():
        if isinstance(value, list) and all(isinstance(entry, str | Mapping) for entry in value):
            body[key] = {str(e if isinstance(e, str) else e.get("label") or e.get("use")): e for e in value}
    return {key: value for key, value in body.items() if key not in IGNORED_EXPERIMENT_KEYS}


def _without_transient(facts: Any) -> Any:
    if isinstance(facts, Mapping):
        return {key: _without_transient(value) for key, value in facts.items() if key not in TRANSIENT_KEYS}
    return [_without_transient(value) for value in facts] if isinstance(facts, list) else facts
