"""Unrounded figures of a results folder as frames: methods, finalists, curves of searches, samples and variance."""

from __future__ import annotations

import logging
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from harness.accuracy.metrics.intervals import decode_accuracy, drop_estimate
from harness.base.statistics import Interval, block_ci, median_ci, paired_ratio_ci, speedup_verdict
from harness.measure.provenance import processor_label
from harness.measure.turn_log import BuildKey, Turn, TurnEvent, TurnMatrix, disturbance_note
from harness.plugins.api import Accuracy
from harness.report.report_table import frame_rows
from harness.results.artifacts import FLOAT_ROW, Choice, best_choice
from harness.results.folder import Results, TaskResults
from harness.results.search_log import SearchLog
from search.pareto import hypervolume, insert_nondominated

logger = logging.getLogger(__name__)
CURVE_COLUMNS = ["task", "searcher", "seed", "evaluations", "minutes", "speedup"]
HYPERVOLUME_COLUMNS = ["task", "searcher", "seed", "evaluations", "minutes", "volume", "scored"]
PLOT_GRID = 150  # cells per axis; of candidates in the same cell, which would overlap in a plot, one is drawn
#: Median latency in ms of each turn, by worker (build, group).
Turns = Mapping[BuildKey, Mapping[int, float]]
MIN_SEEDS_FOR_INTERVAL = 6  # with fewer, no interval of the median reaches a confidence of 95 %
MAX_REASON_CHARS = 60
MISSING_VERDICT = "missing"
MAIN_COLUMNS = (
    "task", "model", "backend", "device", "precision", "quantized", "method", "latency_ms", "latency_low_ms",
    "latency_high_ms", "speedup", "speedup_low", "speedup_high", "metric", "score", "drop", "drop_low", "drop_high",
    "pairs", "builds_ok", "builds", "minutes", "verdict", "beyond", "reason", "decision", "seed", "budget",
    "search_ms", "shrinkage", "final_selection", "scored", "agreement", "row", "sha256", "best", "tied", "status",
    "busy",
)  # fmt: skip


class RowStatus(StrEnum):
    """Status of a row of the main table, which its decision states in words."""

    SHIPPABLE = "shippable"  # faster than the float model and, with a bound on accuracy, within it
    NOT_FASTER = "not faster"  # the float model itself, a tie or slower
    INACCURATE = "inaccurate"  # beyond the bound on accuracy
    NOT_SCORED = "not scored"
    WRONG = "wrong"  # the runtime's result contradicts the file, or saturates
    UNDECIDED = "undecided"  # missing, failed or not confirmed, or the float model scores nothing


#: Status of rows that break the bound on accuracy, have no score, or compute a wrong result.
UNUSABLE = (RowStatus.INACCURATE, RowStatus.NOT_SCORED, RowStatus.WRONG)


def main_frame(results: Results) -> pd.DataFrame:
    """Return confirmed latency, speedup, accuracy, cost, verdict and decision of each method of each task.

    A searcher has the row of its best seed at the largest budget (`harness.results.artifacts.best_choice`), with
    confirmed figures. Methods without results have the verdict "missing".

    Returns:
        Columns `MAIN_COLUMNS`. `status` is a `RowStatus`; `busy` marks shippable rows whose confirmation was disturbed;
        `best` marks the fastest confirmed method of a finished task within the bound on
        accuracy, `tied` methods not distinguishable from it, `beyond` a drop above the bound. Intervals are 95 %.
    """
    expected = (FLOAT_ROW, *results.stored.baselines, *results.stored.searchers)
    lines: list[dict[str, Any]] = []
    for task in results.tasks:
        searches: dict[str, list[Choice]] = {}
        for pick in _final_choices(task):
            if pick.rank == 0:
                searches.setdefault(pick.method, []).append(pick)
        chosen = [best_choice(p for p in picks if not task.wrong(p.row)) or picks[0] for picks in searches.values()]
        own = [_choice_row(task, pick) for pick in (*(p for p in task.picks if p.kind != "search"), *chosen)]
        present = {line["method"] for line in own}
        own += [_missing_row(_task_columns(task), method) for method in expected if method not in present]
        lines += _rank_rows(task, own)
    for spec in {spec.name: spec for spec in results.stored.tasks if spec.name in results.waiting}.values():
        names = {"task": spec.name, "model": spec.model.name, "backend": spec.backend.name, "device": MISSING_VERDICT}
        facts = {**names, "precision": spec.precision, "quantized": spec.precision, "metric": None}
        lines += [_missing_row(facts, method) for method in expected]
    return pd.DataFrame(lines, columns=list(MAIN_COLUMNS))


def _final_choices(task: TaskResults) -> Iterator[Choice]:
    """Yield the choices of the searches at the largest budget."""
    return (pick for pick in task.picks if pick.kind == "search" and pick.budget == task.budget)


def _rank_rows(task: TaskResults, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the fastest row of a finished task and the rows that are not distinguishable from it.

    If the fastest row ties with the float model, the float model is marked; slower rows are never marked.
    """
    confirmed = [line for line in lines if line["speedup"] is not None] if task.complete else []
    if not task.facts["backend"].get("float_open", True):  # the experiment sets the precision: others only compare
        confirmed = [line for line in confirmed if line["method"] != FLOAT_ROW or line["row"] == FLOAT_ROW]
    within = [line for line in confirmed if task.obeys(line["row"]) and line["verdict"] != "slower"]
    top = max((line for line in within if line["verdict"] != "tie"), key=lambda line: line["speedup"], default=None)
    tied = statistical_ties(task, top["row"]) if top is not None else frozenset()
    for line in lines:
        line["best"] = top is not None and line in within and line["row"] == top["row"]
        line["tied"] = line in within and line["row"] in tied
        line["status"], line["decision"] = _decide(task, line)
        disturbed = disturbance_note(task.disturbed) or (
            line["row"] in task.summaries and task.summaries[line["row"]].fully_disturbed
        )
        line["busy"] = line["status"] == RowStatus.SHIPPABLE and bool(disturbed)
        if line["busy"]:
            line["decision"] += "; the machine was busy: confirm again"
    return lines


def _decide(task: TaskResults, line: Mapping[str, Any]) -> tuple[RowStatus, str]:
    """Return status and decision of a row by its verdict and the bound on accuracy, with the reason against it."""
    verdict, row, scored = line["verdict"], line["row"], line["score"] is not None
    if verdict == "baseline":
        return RowStatus.NOT_FASTER, verdict
    if verdict == MISSING_VERDICT:
        return RowStatus.UNDECIDED, verdict
    if verdict not in ("faster", "tie", "slower"):
        return RowStatus.WRONG if task.wrong(row) else RowStatus.UNDECIDED, f"not shipped: {verdict}"
    if task.blind:
        return RowStatus.UNDECIDED, "not shipped: the float model scores nothing"
    if not task.obeys(row) and scored:
        return RowStatus.INACCURATE, "not shipped: accuracy"
    if not task.obeys(row):
        reason = task.scores.get(row, {}).get("reason")  # as a rule, outputs that are not finite
        why = "" if reason is None else f" ({textwrap.shorten(str(reason), MAX_REASON_CHARS, placeholder=' ...')})"
        return RowStatus.NOT_SCORED, f"not shipped: not scored{why}"
    if verdict == "faster":
        if scored and task.allowed is not None:
            return RowStatus.SHIPPABLE, "ship: fastest" if line["best"] else "ship"
        why = "no bound on accuracy" if scored else "accuracy unknown"
        return RowStatus.SHIPPABLE, f"{'fastest' if line['best'] else 'faster'}, {why}"
    is_tie = verdict == "tie" and line["method"] != FLOAT_ROW
    return RowStatus.NOT_FASTER, "tie: use float" if is_tie else f"not shipped: {verdict}"


def _choice_row(task: TaskResults, pick: Choice) -> dict[str, Any]:
    summary, row, failed = task.summaries.get(pick.row), task.rows.get(pick.row), task.failed.get(pick.row)
    search = next((s for s in task.searches if (s.searcher, s.seed) == (pick.method, pick.seed)), None)
    fastest = str(task.facts["backend"].get("float_precision", "float"))
    precision = f"{task.facts['precision']}+{fastest}"
    if pick.kind == "float":
        precision = fastest if pick.row == FLOAT_ROW else pick.row.removeprefix(f"{FLOAT_ROW}-")
    if pick.kind == "search":  # builds of the search, for other methods of the confirmation
        good, tried = (0, 0) if search is None else (search.successes, search.evaluations)
    else:
        good, tried = (0, task.lost.get(pick.row, 0)) if summary is None else (summary.builds_ok, summary.builds)
    is_baseline = pick.row == FLOAT_ROW and pick.kind == "float"
    verdict, reason = "not confirmed", ""
    if task.wrong(pick.row) and not is_baseline:
        verdict, reason = task.checks[pick.row].label, str(task.checks[pick.row])
    elif pick.reason:
        verdict, reason = textwrap.shorten(pick.reason, MAX_REASON_CHARS, placeholder=" ..."), pick.reason
    elif summary is not None:
        verdict = "baseline" if is_baseline else summary.verdict
    elif failed is not None:
        verdict, reason = f"failed: {failed.stage}", failed.reason
    base_ms = None if search is None else search_float_ms(task, search)
    drop, shrinkage = task.drop(pick.row), None  # shrinkage: speedup by the search's samples minus the confirmed one
    if summary is not None and base_ms is not None and pick.search_ms is not None:
        shrinkage = summary.shrinkage(base_ms / pick.search_ms)
    return {
        **_task_columns(task),
        "precision": precision,
        "method": pick.method,
        **interval_columns("latency{}_ms", None if summary is None else summary.latency_ms),
        **interval_columns("speedup{}", None if summary is None else summary.speedup),
        "score": task.score(pick.row),
        **interval_columns("drop{}", _accuracy_drop(task, pick.row)),
        "pairs": None if row is None else row.pairs,
        "builds_ok": good,
        "builds": tried,
        "verdict": verdict,
        "beyond": drop is not None and task.goal.loss_excess(drop) > 0,
        "reason": reason,
        "shrinkage": shrinkage,
        "sha256": None if row is None else row.sha256,
        **{key: getattr(pick, key) for key in ("minutes", "seed", "budget", "search_ms", "final_selection", "scored")},
        "agreement": pick.agreement,
        "row": pick.row,
    }


def _task_columns(task: TaskResults) -> dict[str, Any]:
    backend, precision = task.facts["backend"], task.facts["precision"]
    device, options = str(backend.get("device", backend.get("name"))), backend.get("options", {})
    if device == task.environment.get("cpu", {}).get("model"):  # older runs recorded the bare name
        device = processor_label(device, task.environment)
    if (threads := options.get("threads")) is not None:
        streams = f", {options['streams']} streams" if "streams" in options else ""
        device = f"{device}, {threads} thread{'' if threads == 1 else 's'}{streams}"
    names = {"task": task.name, "model": task.facts["model"], "backend": backend_label(task), "device": device}
    return {**names, "precision": precision, "quantized": precision, "metric": task.metric}


def _missing_row(facts: dict[str, Any], method: str) -> dict[str, Any]:
    counts = {"builds_ok": 0, "builds": 0, "beyond": False, "best": False, "tied": False, "busy": False}
    words = {"method": method, "verdict": MISSING_VERDICT, "decision": MISSING_VERDICT, "reason": "", "row": ""}
    return {**dict.fromkeys(MAIN_COLUMNS), **facts, **counts, **words, "status": RowStatus.UNDECIDED}


def interval_columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return value and limits of an interval by column, None without one; `name` is a format such as "latency{}_ms"."""
    values = (None,) * 3 if interval is None else (interval.value, interval.low, interval.high)
    shown = (None if value is None or np.isnan(value) else value for value in values)
    return {name.format(part): value for part, value in zip(("", "_low", "_high"), shown, strict=True)}


def paired_accuracies(task: TaskResults, row: str) -> tuple[Accuracy, Accuracy] | None:
    """Return the recorded accuracy of the float model and of another row; None if a score is missing."""
    scores = [task.scores.get(name, {}) for name in (FLOAT_ROW, row)]
    if row == FLOAT_ROW or not all("metrics" in score for score in scores):
        return None
    return decode_accuracy(scores[0]), decode_accuracy(scores[1])


def _accuracy_drop(task: TaskResults, row: str) -> Interval | None:
    """Return the loss of accuracy with its interval over images; NaN limits without one, None without a score."""
    value = task.drop(row)
    if value is None or task.metric is None:
        return None
    if (pair := paired_accuracies(task, row)) is not None:
        try:
            estimate = drop_estimate(*pair, task.metric, higher_is_better=task.higher_is_better)
        except ValueError as error:
            logger.warning("%s: no interval of the drop of %s: %s", task.folder, row, error)
            estimate = None
        if estimate is not None:
            return estimate.interval
    return Interval(value=value, low=math.nan, high=math.nan)


def backend_label(task: TaskResults) -> str:
    """Return the label of the backend, the part of the task's name between model and precision."""
    prefix, suffix = f"{task.facts['model']}-", f"-{task.facts['precision']}"
    label = task.name.removeprefix(prefix).removesuffix(suffix)
    return label if f"{prefix}{label}{suffix}" == task.name else str(task.facts["backend"].get("name"))


def precision_frame(main: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of tasks that have scores and of models that were quantized to several precisions."""
    scored = main.groupby("task")["score"].transform("count") > 0
    several = main.groupby(["model", "backend"])["quantized"].transform("nunique") > 1
    return main[scored | several].reset_index(drop=True)


def finalist_frame(results: Results) -> pd.DataFrame:
    """Return a row for each placement that a search sent to the confirmation, of every seed and rank.

    It has the columns of `main_frame` without marks and decision. The second best of a search is called "METHOD #2".
    The main table lacks such rows: a selection among them by confirmed figures would bias the reported ones.
    """
    lines = [
        {**_choice_row(task, pick), "method": pick.method if pick.rank == 0 else f"{pick.method} #{pick.rank + 1}"}
        for task in results.tasks
        for pick in _final_choices(task)
    ]
    decided = ("best", "tied", "decision", "status", "busy")
    return pd.DataFrame(lines, columns=[c for c in MAIN_COLUMNS if c not in decided])


def with_backend_column(main: pd.DataFrame) -> pd.DataFrame:
    """Return the frame, with "BACKEND on DEVICE" in the column `device` if there are several backends."""
    several = len(main) > 0 and main["backend"].nunique() > 1
    return main.assign(device=main["backend"] + " on " + main["device"]) if several else main


def search_float_ms(task: TaskResults, search: SearchLog | None = None) -> float | None:
    """Return the float model's latency in a search in ms (default: the median over all searches).

    Without a reading it is the confirmed one; None without either.
    """
    searches = task.searches if search is None else [search]
    if readings := [each.float_ms for each in searches if each.float_ms is not None]:
        return float(np.median(readings))
    summary = task.summaries.get(FLOAT_ROW)
    return None if summary is None else summary.latency_ms.value


def curve_frame(tasks: Iterable[TaskResults]) -> pd.DataFrame:
    """Return the speedup of the incumbent over the float model after each evaluation of every search (`CURVE_COLUMNS`).

    The search's own readings define the incumbent, and `TaskResults.latencies_ms` its latency. One placement thus has
    the same speedup in all searches, and a curve falls where a reading that is low by chance replaced a better
    incumbent.
    """
    curves = []
    for task, search in ((each, search) for each in tasks for search in each.searches):
        if not search.incumbents or (base_ms := search_float_ms(task)) is None:
            continue
        first, steps = search.incumbents[0].evaluations, dict[int, float]()
        for step in search.incumbents:  # a retry that is better than its evaluation comes later and replaces it
            steps[step.evaluations - 1] = task.latencies_ms[step.digest]
        starts = sorted(steps)
        speedups = base_ms / np.array([steps[start] for start in starts])
        figures = {
            "evaluations": np.arange(first, search.evaluations + 1),
            "minutes": np.array(search.elapsed_s)[first - 1 :] / 60,
            "speedup": np.repeat(speedups, np.diff([*starts, search.evaluations])),
        }
        curves.append(pd.DataFrame({"task": task.name, "searcher": search.searcher, "seed": search.seed, **figures}))
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=CURVE_COLUMNS)


def hypervolume_frame(tasks: Iterable[TaskResults]) -> pd.DataFrame:
    """Return the hypervolume of all scored placements after each scored evaluation, and at the end of the search.

    It is a share of the box between the ideal and a reference point (Zitzler and Thiele, "Multiobjective evolutionary
    algorithms", IEEE Transactions on Evolutionary Computation 3, 1999): latency from 0 to that of the float model, loss
    of accuracy from none to the largest of any search of the task. A gain of accuracy counts as no loss. Latencies are
    `TaskResults.latencies_ms`.

    Returns:
        Columns task, searcher, seed, evaluations, minutes, volume, scored (number of scored evaluations so far).
    """
    curves = []
    for task in tasks:
        losses = []
        for search in task.searches:
            reference = task.score(FLOAT_ROW) if search.float_value is None else search.float_value
            values = [] if task.metric is None or reference is None else [trial.value for trial in search.scored]
            drop = (reference or 0.0) - np.array(values)
            losses.append(np.maximum(0.0, drop if task.higher_is_better else -drop))
        worst = max((float(each.max()) for each in losses if len(each)), default=0.0) or 1.0
        base_ms = search_float_ms(task)
        for search, loss in zip(task.searches, losses, strict=True):
            if base_ms is None or not len(loss):
                continue
            latency = np.array([task.latencies_ms[trial.digest] for trial in search.scored]) / base_ms
            front: list[tuple[float, float]] = []
            volumes = [0.0]
            for point in zip(latency.tolist(), (loss / worst).tolist(), strict=True):
                is_new = insert_nondominated(front, point, tuple)
                volumes.append(hypervolume(front, (1.0, 1.0)) if is_new else volumes[-1])
            figures = {
                "task": task.name, "searcher": search.searcher, "seed": search.seed,
                "evaluations": [trial.evaluations for trial in search.scored],
                "minutes": np.array([trial.elapsed_s for trial in search.scored]) / 60, "volume": volumes[1:],
                "scored": range(1, len(loss) + 1),
            }  # fmt: skip
            curve = pd.DataFrame(figures, columns=HYPERVOLUME_COLUMNS)
            if search.scored[-1].evaluations != search.evaluations:  # unchanged until the end of the search
                end = {"evaluations": search.evaluations, "minutes": search.elapsed_s[-1] / 60}
                curve = pd.concat([curve, curve.iloc[[-1]].assign(**end)])
            curves.append(curve)
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=HYPERVOLUME_COLUMNS)


def pareto_front(points: pd.DataFrame, higher_is_better: bool) -> pd.DataFrame:
    """Return the nondominated rows in order of latency; of equal rows one.

    Args:
        points: Columns latency_ms, score.
        higher_is_better: Direction of the score.
    """
    loss = (points["score"] * (-1 if higher_is_better else 1)).astype(float)
    ordered = points.assign(loss=loss).sort_values(["latency_ms", "loss"])
    best = ordered["loss"].cummin().shift(fill_value=np.inf)
    front: pd.DataFrame = ordered[ordered["loss"] < best]
    return front.drop(columns="loss")


def close_intervals(main: pd.DataFrame) -> pd.DataFrame:
    """Return the main rows with latency and score; missing limits of a single build are set to its latency."""
    points = main[main["score"].notna() & main["latency_ms"].notna()].copy()
    closed = np.isfinite(points["latency_high_ms"].astype(float))
    for column in ("latency_low_ms", "latency_high_ms"):
        points[column] = points[column].where(closed, points["latency_ms"])
    return points


def candidate_frame(task: TaskResults) -> pd.DataFrame:
    """Return `latency_ms` and `score` of scored candidates by the searches' own samples, without overlapping points."""
    pairs = [(trial.latency_ms, trial.value) for search in task.searches for trial in search.scored]
    points = pd.DataFrame(pairs, columns=["latency_ms", "score"], dtype=float)
    ranges = (points.max() - points.min()).replace(0.0, 1.0)
    fields = ((points - points.min()) / ranges * PLOT_GRID).round()
    return points[~fields.duplicated()]


def valid_turns(events: Iterable[TurnEvent]) -> list[Turn]:
    """Return the turns of the last worker of each build and group, without failed rows; see `TurnMatrix`."""
    valid: dict[BuildKey, dict[str, dict[int, Turn]]] = defaultdict(lambda: defaultdict(dict))
    workers: dict[BuildKey, int] = {}
    for event in events:
        key = (event.build, event.group)
        if isinstance(event, Turn):
            if event.worker > workers.setdefault(key, event.worker):
                valid.pop(key)
                workers[key] = event.worker
            valid[key][event.row][event.round] = event
        else:
            valid[key].pop(event.row, None)
    return [turn for rows in valid.values() for turns in rows.values() for turn in turns.values()]


def sample_frame(tasks: Iterable[TaskResults]) -> pd.DataFrame:
    """Return every valid sample: columns task, row, build, group, round, sample, latency_ms."""
    lines = [
        (task.name, turn.row, turn.build, turn.group, turn.round, number, latency_ms)
        for task in tasks
        for turn in valid_turns(task.events)
        for number, latency_ms in enumerate(turn.samples_ms)
    ]
    return pd.DataFrame(lines, columns=["task", "row", "build", "group", "round", "sample", "latency_ms"])


def confirmed_choices(task: TaskResults) -> dict[tuple[str, int], dict[int, str]]:
    """Return the confirmed row that each seed chose, by searcher and budget, then by seed."""
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for pick in task.picks:
        if pick.kind != "search" or pick.rank or pick.seed is None or pick.budget is None:
            continue
        if pick.row in task.summaries:
            rows.setdefault((pick.method, pick.budget), {})[pick.seed] = pick.row
    return rows


def speedups_at(task: TaskResults, budget: int) -> dict[str, list[float]]:
    """Return the confirmed speedups of the choices at a budget by searcher, one per seed."""
    choices = {searcher: rows for (searcher, at), rows in confirmed_choices(task).items() if at == budget}
    return {name: [task.summaries[row].speedup.value for row in rows.values()] for name, rows in choices.items()}


def interval_over_seeds(figures: Sequence[Interval]) -> Interval:
    """Return the median over seeds with its 95 % interval.

    Below `MIN_SEEDS_FOR_INTERVAL` seeds, which give no 95 % interval of their median (Hettmansperger and Sheather
    1986), the limits are the lowest and the highest limit of the single seeds.
    """
    middle = median_ci([figure.value for figure in figures])
    if len(figures) >= MIN_SEEDS_FOR_INTERVAL:
        return middle
    return replace(middle, low=min(figure.low for figure in figures), high=max(figure.high for figure in figures))


def ratio_over_seeds(ratios: Sequence[Interval]) -> Interval:
    """Return `interval_over_seeds` of ratios; its limits are 0 and infinity if a seed has no finite ones (one turn)."""
    middle = interval_over_seeds(ratios)
    bounded = all(math.isfinite(ratio.high) for ratio in ratios)
    return middle if bounded else replace(middle, low=0.0, high=math.inf)


def statistical_ties(task: TaskResults, best: str) -> frozenset[str]:
    """Return the rows whose confirmed latency is not distinguishable from that of the row `best`, with `best` itself.

    The rule is that of the verdicts: the interval of the ratio contains 1, or the difference is below 1 % or below the
    noise floor.
    """
    turns = TurnMatrix(task.events).turns
    others = {
        row: speedup_verdict(ratio, task.noise_floor or 0.0)
        for row in task.summaries
        if row != best and (ratio := paired_ratio(turns, best, row)) is not None
    }
    return frozenset({best, *(row for row, verdict in others.items() if verdict == "tie")})


def paired_ratio(turns: Mapping[str, Turns], row: str, other: str) -> Interval | None:
    """Return the latency of `other` over that of `row`, both confirmed; None if no build has both.

    `turns` has the turns of each row. Rows of one worker are paired turn by turn; rows of different workers by build,
    each over its own baseline. The ratio of a row to itself is exactly 1.
    """
    if row == other:
        return Interval(value=1.0, low=1.0, high=1.0)
    shared = [key for key in turns.get(row, {}) if key in turns.get(other, {})]
    pairs = [_common_turns(turns[other][key], turns[row][key]) for key in shared]
    if pairs := [pair for pair in pairs if pair[0]]:
        return paired_ratio_ci([slow for slow, _ in pairs], [fast for _, fast in pairs])
    speedups: tuple[dict[int, float], dict[int, float]] = ({}, {})  # over the own baseline, by build
    for name, by_build in zip((row, other), speedups, strict=True):
        for key, row_turns in turns.get(name, {}).items():
            base_ms, row_ms = _common_turns(turns.get(FLOAT_ROW, {}).get(key, {}), row_turns)
            if base_ms:
                by_build[key[0]] = float(np.median(np.divide(base_ms, row_ms)))
    builds = sorted(speedups[0].keys() & speedups[1].keys())
    return block_ci([[speedups[0][build] / speedups[1][build]] for build in builds]) if builds else None


def _common_turns(one: Mapping[int, float], two: Mapping[int, float]) -> tuple[list[float], list[float]]:
    both = sorted(one.keys() & two.keys())
    return [one[number] for number in both], [two[number] for number in both]


def variance_frame(results: Results) -> pd.DataFrame:
    """Return relative standard deviations of `inference`, `turn` and fresh `build`, a row per task.

    Each is the median over the task's rows (`rows`: their number). Analysis of variance on logarithms, samples nested
    in turns in builds, by the method of moments: the variance of the means of a level minus that of the level below
    (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013, section 6). Negative ones count as 0.
    """
    lines = []
    for task in results.tasks:
        rows: dict[str, dict[BuildKey, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
        for turn in valid_turns(task.events):
            rows[turn.row][turn.build, turn.group].append(turn.samples_ms)
        parts = []
        for builds in rows.values():
            logs = [[np.log(turn) for turn in turns if len(turn) > 1] for turns in builds.values()]
            logs = [turns for turns in logs if len(turns) > 1]
            if len(logs) < 2:
                continue
            within = float(np.mean([turn.var(ddof=1) for turns in logs for turn in turns]))
            samples = float(np.mean([len(turn) for turns in logs for turn in turns]))
            means = [[float(turn.mean()) for turn in turns] for turns in logs]
            between_turns = float(np.mean([np.var(turns, ddof=1) for turns in means]))
            per_build = float(np.mean([len(turns) for turns in means]))
            between_builds = float(np.var([np.mean(turns) for turns in means], ddof=1))
            turn_variance = max(0.0, between_turns - within / samples)
            build_variance = max(0.0, between_builds - between_turns / per_build)
            parts.append([math.sqrt(variance) for variance in (within, turn_variance, build_variance)])
        if parts:
            middle = dict(zip(("inference", "turn", "build"), np.median(parts, axis=0).tolist(), strict=True))
            lines.append({"task": task.name, "rows": len(parts), **middle})
    return pd.DataFrame(lines, columns=["task", "rows", "inference", "turn", "build"])


def rows_by_task(frame: pd.DataFrame) -> dict[str, list[dict[Any, Any]]]:
    """Return the rows of a frame as dictionaries, by task."""
    found: dict[str, list[dict[Any, Any]]] = {}
    for row in frame_rows(frame):
        found.setdefault(row["task"], []).append(row)
    return found
