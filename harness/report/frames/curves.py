"""Frames of the searches' own readings: speedup and hypervolume after each evaluation, and points for Pareto plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import TaskResults
from harness.results.search_log import SearchLog
from search.pareto import hypervolume, insert_nondominated

CURVE_COLUMNS = ["task", "searcher", "seed", "evaluations", "minutes", "speedup"]
HYPERVOLUME_COLUMNS = ["task", "searcher", "seed", "evaluations", "minutes", "volume", "scored"]
PLOT_GRID = 150  # cells per axis; of candidates in the same cell, which would overlap in a plot, one is drawn


class Curve(NamedTuple):
    """Curve of one search: a value (speedup or hypervolume) by number of evaluations and by wall-clock in minutes."""

    searcher: str
    seed: int
    evaluations: npt.NDArray[np.int_]
    minutes: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]


def median_float_ms(task: TaskResults) -> float | None:
    """Return the float model's median latency over the searches in ms, else the confirmed one; None without either."""
    readings = [search.float_ms for search in task.searches if search.float_ms is not None]
    return float(np.median(readings)) if readings else _confirmed_float_ms(task)


def search_float_ms(task: TaskResults, search: SearchLog) -> float | None:
    """Return the float model's latency in this search in ms, else the confirmed one; None without either."""
    return _confirmed_float_ms(task) if search.float_ms is None else search.float_ms


def _confirmed_float_ms(task: TaskResults) -> float | None:
    summary = task.summaries.get(FLOAT_ROW)
    return None if summary is None else summary.latency_ms.value


def curve_frame(tasks: Iterable[TaskResults]) -> pd.DataFrame:
    """Return the speedup of the incumbent over the float model after each evaluation of every search (`CURVE_COLUMNS`).

    The search's own readings define the incumbent, and `TaskResults.latencies_ms` its latency. One placement thus has
    the same speedup in all searches, and a curve falls where a reading that is low by chance replaced a better
    incumbent.
    """
    curves = [
        pd.DataFrame({"task": task.name, **curve._asdict()}) for task in tasks for curve in iter_speedup_curves(task)
    ]
    if not curves:
        return pd.DataFrame(columns=CURVE_COLUMNS)
    return pd.concat(curves, ignore_index=True).rename(columns={"values": "speedup"})


def iter_speedup_curves(task: TaskResults) -> Iterator[Curve]:
    """Yield the curve of each search of a task that has an incumbent; see `curve_frame`."""
    base_ms = median_float_ms(task)
    for search in task.searches if base_ms is not None else ():
        if not search.incumbents:
            continue
        first, steps = search.incumbents[0].evaluations, dict[int, float]()
        for step in search.incumbents:  # a retry that is better than its evaluation comes later and replaces it
            steps[step.evaluations - 1] = task.latencies_ms[step.digest]
        starts = sorted(steps)
        speedups = base_ms / np.array([steps[start] for start in starts])
        yield Curve(
            searcher=search.searcher,
            seed=search.seed,
            evaluations=np.arange(first, search.evaluations + 1),
            minutes=np.array(search.elapsed_s)[first - 1 :] / 60,
            values=np.repeat(speedups, np.diff([*starts, search.evaluations])),
        )


def hypervolume_frame(tasks: Iterable[TaskResults]) -> pd.DataFrame:
    """Return the hypervolume of all scored placements after each scored evaluation, and at the end of the search.

    It is a share of the box between the ideal and a reference point (Zitzler and Thiele, "Multiobjective evolutionary
    algorithms", IEEE Transactions on Evolutionary Computation 3, 1999): latency from 0 to that of the float model, loss
    of accuracy from none to the largest of any search of the task. A gain of accuracy counts as no loss. Latencies are
    `TaskResults.latencies_ms`.

    Returns:
        Columns task, searcher, seed, evaluations, minutes, volume, scored (number of scored evaluations so far).
    """
    curves = [curve for task in tasks for curve in _hypervolume_curves(task)]
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=HYPERVOLUME_COLUMNS)


def _hypervolume_curves(task: TaskResults) -> Iterator[pd.DataFrame]:
    losses = [_accuracy_losses(task, search) for search in task.searches]
    worst = max((float(each.max()) for each in losses if len(each)), default=0.0) or 1.0
    base_ms = median_float_ms(task)
    for search, loss in zip(task.searches, losses, strict=True):
        if base_ms is None or not len(loss):
            continue
        latency = np.array([task.latencies_ms[trial.digest] for trial in search.scored]) / base_ms
        figures = {
            "task": task.name, "searcher": search.searcher, "seed": search.seed,
            "evaluations": [trial.evaluations for trial in search.scored],
            "minutes": np.array([trial.elapsed_s for trial in search.scored]) / 60,
            "volume": list(_cumulative_hypervolumes(zip(latency.tolist(), (loss / worst).tolist(), strict=True))),
            "scored": range(1, len(loss) + 1),
        }  # fmt: skip
        curve = pd.DataFrame(figures, columns=HYPERVOLUME_COLUMNS)
        if search.scored[-1].evaluations != search.evaluations:  # unchanged until the end of the search
            end = {"evaluations": search.evaluations, "minutes": search.elapsed_s[-1] / 60}
            curve = pd.concat([curve, curve.iloc[[-1]].assign(**end)])
        yield curve


def _accuracy_losses(task: TaskResults, search: SearchLog) -> npt.NDArray[np.float64]:
    """Return the loss of each scored evaluation against the float model; empty if the float model has no score."""
    reference = task.score(FLOAT_ROW) if search.float_value is None else search.float_value
    if task.metric is None or reference is None:
        return np.empty(0)
    drop = reference - np.array([trial.value for trial in search.scored])
    return np.maximum(0.0, drop if task.higher_is_better else -drop)


def _cumulative_hypervolumes(points: Iterable[tuple[float, float]]) -> Iterator[float]:
    front: list[tuple[float, float]] = []
    volume = 0.0
    for point in points:
        if insert_nondominated(front, point, tuple):
            volume = hypervolume(front, (1.0, 1.0))
        yield volume


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


def candidate_label(task: TaskResults) -> str:
    """Return the legend entry of the candidates; it names their data if the rows are scored on other data."""
    return "scored in the searches" + (", on their half of the data" if task.facts.get("halves") else "")
