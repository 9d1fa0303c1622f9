"""Transfer of placements between tasks: same model on another backend, other model on the same backend.

Between backends the best placement is transferred edge by edge and written in the other backend's dialect. Between
models it is transferred by the pattern cache: each pattern that both models have gets the best scheme found for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.config.experiment import TaskSpec
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.graph.pattern_cache import MeasurementOrigin, build_cache, propose_placements, read_cache, write_cache
from harness.graph.qdq.import_placement import import_placement
from harness.results.artifacts import best_choice, read_finalists
from harness.results.journal import read_journal
from harness.results.lines import first_line
from harness.results.manifest import recorded
from harness.results.output_check import read_checks
from harness.results.search_log import Goal, iter_evaluations
from harness.run.prepare.methods import is_external_searcher
from harness.run.prepare.task import Task
from search.api import Observation
from search.space import Placement

PATTERN_CACHE_NAME = "patterns.yaml"
"""File name of a task's pattern cache, which `initial` of another experiment can name."""

TransferredPlacement = Placement | str
"""A placement of this task's space that another task found, or the reason why there is none."""


def write_pattern_cache(task: Task, goal: Goal, folder: Path) -> None:
    """Write the best schemes of a task's searches to its `patterns.yaml`, unless no search measured the float model.

    Args:
        folder: Folder of the task's results, with the journals.

    Raises:
        UserError: The file cannot be written.
    """
    sizes = {p.signature: len(p.operators) for p in find_patterns(task.model, discover_regions(task.model))}
    cache = build_cache(_pattern_observations(task, goal, folder), task.space, sizes, None, _measurement_origin(task))
    if cache.patterns:
        path = folder / PATTERN_CACHE_NAME
        with explain_write_errors(path), recorded(path):
            write_cache(cache, path)


def transferred_placements(
    kinds: Sequence[str], task: Task, tasks: Sequence[TaskSpec], out: Path
) -> Mapping[str, TransferredPlacement]:
    """Return the placements that other tasks found, or the reason why one cannot be used, by the name of their row.

    A row is named "from_BACKEND" or "from_MODEL". Tasks of another precision are left out.

    Args:
        kinds: "backends": the same model on other backends; "models": other models on the same backend.
        tasks: All tasks of the experiment, after their searches and the selection of their finalists.
        out: Results folder of the experiment.
    """
    found: dict[str, TransferredPlacement] = {}
    for other in tasks:
        if other.name == task.spec.name or other.precision != task.spec.precision:
            continue
        if "backends" in kinds and other.model == task.spec.model:
            found[f"from_{other.backend.name}"] = _transfer_by_edges(task, out / other.name)
        if "models" in kinds and other.backend == task.spec.backend:
            found[f"from_{other.model.name}"] = _transfer_by_patterns(task, out / other.name)
    return found


def _pattern_observations(task: Task, goal: Goal, folder: Path) -> Iterator[Observation]:
    for run in task.spec.runs:
        path = folder / "runs" / f"{run.name}.jsonl"
        if is_external_searcher(run.searcher) or "sharing" in run.searcher.without or not first_line(path):
            continue
        for trial in iter_evaluations(read_journal(path), goal):
            score = replace(trial.score, objective=trial.latency_ms)  # schemes are ranked by latency
            yield Observation(placement=Placement(trial.choices), digest=trial.digest, outcome=score)


def _transfer_by_edges(task: Task, folder: Path) -> TransferredPlacement:
    rows, picks = read_finalists(folder)
    checks = read_checks(folder, {row.id: row for row in rows})
    best = best_choice(pick for pick in picks if pick.row not in checks or not checks[pick.row].is_wrong)
    if best is None:
        return f"{folder.name} selected no placement"
    row = next(row for row in rows if row.id == best.row)
    if not row.pairs:
        return task.space.float_placement()
    try:
        return task.space.nearest(import_placement(folder / "models" / row.file, task.model))
    except UserError as error:
        return str(error)


def _transfer_by_patterns(task: Task, folder: Path) -> TransferredPlacement:
    if not (folder / PATTERN_CACHE_NAME).exists():
        return f"{folder.name} has no pattern cache"
    known = propose_placements(read_cache(folder / PATTERN_CACHE_NAME), task.space, _measurement_origin(task), limit=1)
    return known[0] if known else f"the pattern cache of {folder.name} contains no pattern of this model"


def _measurement_origin(task: Task) -> MeasurementOrigin:
    return MeasurementOrigin.of_backend(task.facts, task.spec.precision)
