"""Estimate of the work in an experiment before it starts."""

from __future__ import annotations

from harness.config.experiment import Experiment
from harness.config.plan import TaskSpec, plan_tasks

__all__ = ["describe_workload"]

_SIMULATED_BACKENDS = ("simulated", "replay")
_SLOW_BUILD_PREFIXES = ("tensorrt", "trtexec")
"""How names of backends begin that time kernels while they build."""
_BUILD_RANGE_S, _SLOW_BUILD_RANGE_S = (0.2, 2.0), (5.0, 60.0)
"""Of models of some ten milliseconds: least and most."""
_PREPARE_RANGE_S = (5.0, 60.0)
"""Loading, calibration, and the models of the PTQ tools of one cell."""
_TURN_RANGE_S = (0.01, 0.1)
"""One turn of a row in the confirmation."""
TimeRange = tuple[float, float]


def describe_workload(experiment: Experiment) -> str:
    """Return the number of cells, searches and evaluations, and roughly how long they take, in words."""
    cells = plan_tasks(experiment)
    searches = sum(len(cell.runs) for cell in cells)
    evaluations = searches * max(experiment.budget.evaluations)
    low, high = (sum(ends) for ends in zip(*(_task_range_s(cell, experiment) for cell in cells), strict=True))
    more = ", and accuracy is scored besides" if any(model.evaluator for model in experiment.models) else ""
    counts = f"{_format_count(len(cells), 'cell')}, {_format_count(searches, 'search', 'searches')}"
    limit = f" ({experiment.budget.minutes:g} minutes a search at most)" if experiment.budget.minutes else ""
    counts += f", {_format_count(evaluations, 'evaluation')} at most"
    return f"ok: {counts}; roughly {_format_duration(low, high)}{limit}{more}"


def _task_range_s(cell: TaskSpec, experiment: Experiment) -> TimeRange:
    """Return the least and the most time that a cell takes as a rule."""
    name = cell.backend.use.rpartition(":")[2]
    if name in _SIMULATED_BACKENDS:
        return _PREPARE_RANGE_S[0], _PREPARE_RANGE_S[1]
    builds = _SLOW_BUILD_RANGE_S if name.startswith(_SLOW_BUILD_PREFIXES) else _BUILD_RANGE_S
    sampling, confirmation = experiment.sampling, experiment.confirmation
    longest_s = (sampling.warmup_ms + sampling.max_ms) / 1000 * (1 if sampling.beside == "never" else 2)
    samples = (longest_s / 4, longest_s)
    rows = 2 + len(experiment.baselines) + len(cell.runs) * confirmation.top_k  # the float model and its twin
    limit_s = 60 * (experiment.budget.minutes or float("inf"))

    def end_s(end: int) -> float:
        search_s = min(limit_s, max(experiment.budget.evaluations) * (builds[end] + samples[end]))
        again_s = confirmation.builds * rows * (builds[end] + confirmation.rounds * _TURN_RANGE_S[end])
        return _PREPARE_RANGE_S[end] + len(cell.runs) * search_s + again_s

    return end_s(0), end_s(1)


def _format_count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _format_duration(low_s: float, high_s: float) -> str:
    """Return a span of time, in minutes or hours."""
    if high_s < 90:
        return "a minute"
    unit_s, unit = (3600.0, "hours") if high_s > 3 * 3600 else (60.0, "minutes")
    low, high = (f"{value:.1f}" if value < 10 and unit == "hours" else f"{value:.0f}" for value in
                 (low_s / unit_s, high_s / unit_s))  # fmt: skip
    return f"{low if float(low) else 'less than 1'} to {high} {unit}"
