"""Export of the finalists of a task: the float model, fixed baselines, and the choice of each search.

Placements of other tasks are rows too: the best one of the same model on another backend, transferred edge by edge, and
that of another model on the same backend, by the pattern cache of its task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.config.experiment import SearchSpec, TaskSpec, split_precision
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import discover_regions
from harness.graph.pattern_cache import MeasurementOrigin, build_cache, propose_placements, read_cache, write_cache
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.qdq_graph import count_pairs, read_precisions
from harness.measure.records import MAIN_BENCHMARKER
from harness.results.artifacts import (
    ACCURACY_ONLY_VERDICT,
    FLOAT_ROW,
    Choice,
    ExportedModel,
    FinalistSet,
    best_choice,
    read_finalists,
)
from harness.results.journal import read_journal
from harness.results.lines import first_line
from harness.results.manifest import recorded, write_record
from harness.results.output_check import read_checks
from harness.results.search_log import Evaluation, Goal, iter_evaluations
from harness.run.prepare.methods import (
    WarmStartModel,
    external_searcher_model_path,
    is_external_searcher,
    task_for_method,
)
from harness.run.prepare.task import Task
from harness.run.select.final_selection import Incumbent, SelectionResult
from harness.run.task_run import TaskRun
from search.api import Observation
from search.space import Placement, Resolved, edges_digest

PATTERN_CACHE_NAME = "patterns.yaml"
"""File name of a task's pattern cache, which `initial` of another experiment can name."""

TransferredPlacement = Placement | str
"""A placement of this task's space that another task found, or the reason why there is none."""


def write_pattern_cache(task: Task, goal: Goal, folder: Path) -> None:
    """Write the best schemes of a task's searches to its `patterns.yaml`, unless no search measured the float model.

    Args:
        folder: Folder of the task's results, with the journals.
    """
    observations = []
    for run in task.spec.runs:
        path = folder / "runs" / f"{run.name}.jsonl"
        if is_external_searcher(run.searcher) or "sharing" in run.searcher.without or not first_line(path):
            continue
        for trial in iter_evaluations(read_journal(path), goal):
            score = replace(trial.score, objective=trial.latency_ms)  # schemes are ranked by latency
            observations.append(Observation(placement=Placement(trial.choices), digest=trial.digest, outcome=score))
    sizes = {p.signature: len(p.operators) for p in find_patterns(task.model, discover_regions(task.model))}
    origin = MeasurementOrigin.of_backend(task.facts, task.spec.precision)
    cache = build_cache(observations, task.space, sizes, None, origin)
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
        folder = out / other.name
        if "backends" in kinds and other.model == task.spec.model:
            found[f"from_{other.backend.name}"] = _transfer_by_edges(task, folder)
        if "models" in kinds and other.backend == task.spec.backend:
            path, known = folder / PATTERN_CACHE_NAME, list[Placement]()
            if path.exists():
                origin = MeasurementOrigin.of_backend(task.facts, task.spec.precision)
                known = propose_placements(read_cache(path), task.space, origin, limit=1)
                missing = f"the pattern cache of {folder.name} contains no pattern of this model"
            else:
                missing = f"{folder.name} has no pattern cache"
            found[f"from_{other.model.name}"] = known[0] if known else missing
    return found


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


def export_finalists(
    running: TaskRun, found: SelectionResult, transferred: Mapping[str, TransferredPlacement]
) -> FinalistSet:
    """Export the finalists of a task and write `rows.json`; the same journals and final selection give the same files.

    Args:
        found: Incumbents of the searches.
        transferred: Placements found by other tasks, by the name of the row; see `transferred_placements`.
    """
    exporter = _Exporter(running.task, running.folder / "models")
    picks = [*_fixed_choices(running, transferred, exporter), *_search_choices(running, found, exporter)]
    rows = tuple(exporter.rows.values())
    record = {"rows": [asdict(row) for row in rows], "picks": [asdict(pick) for pick in picks]}
    write_record(running.folder / "rows.json", record)
    return FinalistSet(folder=running.folder, space=running.task.space, rows=rows)


class _Exporter:
    """Writer of the exported files of a task, each written once; `rows` has the exported models by row id."""

    def __init__(self, task: Task, models: Path) -> None:
        self._task = task
        self._models = models
        self.rows: dict[str, ExportedModel] = {}
        models.mkdir(parents=True, exist_ok=True)

    def export_placement(self, placement: Placement) -> str:
        """Export a placement, and return the id of its row."""
        return self.export_edges(self._task.space.resolve(placement))

    def export_edges(self, resolved: Resolved) -> str:
        """Export quantized edges, and return the id of their row.

        The row has the choices of the placement of the space with the same edges, if there is one.
        """
        space, digest = self._task.space, edges_digest(resolved)
        if not resolved:
            return self.export_file(FLOAT_ROW, self._task.model_file, 0)
        if digest not in self.rows:
            path = self._models / f"{digest}.onnx"
            with explain_write_errors(path):
                self._task.inserter.export(resolved, path)
            nearest = space.nearest(dict(resolved))
            choices = nearest.choices if space.resolve(nearest) == resolved else None
            self._add_row(digest, path, self._task.inserter.count_pairs(resolved), choices)
        return digest

    def export_file(self, row: str, path: Path, pairs: int) -> str:
        """Copy an existing model file, and return the id of its row."""
        if row not in self.rows:
            with explain_write_errors(self._models / f"{row}.onnx"):
                target = copy_model(self._task.runtime_input_file(path), self._models, f"{row}{path.suffix}")
            self._add_row(row, target, pairs)
        return row

    def export_float(self, precision: str) -> str:
        """Export the float model at another precision than the baseline's, and return the id of its row."""
        name, path = f"{FLOAT_ROW}-{precision}", self._task.runtime_input_file(self._task.float_file, precision)
        row = replace(self.rows[FLOAT_ROW], id=name, benchmarker=precision)
        if path != self._task.model_file:  # a runtime that reads files of another type at each precision
            with explain_write_errors(self._models / f"{name}.onnx"):
                target = copy_model(path, self._models, f"{name}.onnx")
            row = replace(row, file=target.name, sha256=digest_file(target))
        self.rows[name] = row
        return name

    def _add_row(self, row: str, path: Path, pairs: int, choices: tuple[int, ...] | None = None) -> None:
        emulated = self._task.accuracy_only
        timed = not emulated or emulated.isdisjoint(read_precisions(path))
        digest = digest_file(path)
        self.rows[row] = ExportedModel(id=row, file=path.name, sha256=digest, pairs=pairs, choices=choices, timed=timed)


def _fixed_choices(
    running: TaskRun, transferred: Mapping[str, TransferredPlacement], exporter: _Exporter
) -> Iterator[Choice]:
    """Yield the float model at each precision, the baselines, and the placements of other tasks."""
    task = running.task
    yield Choice(method="float", kind="float", row=exporter.export_file(FLOAT_ROW, task.model_file, 0))
    for benchmarker in running.worker.benchmarkers:
        if benchmarker != MAIN_BENCHMARKER:
            yield Choice(method="float", kind="float", row=exporter.export_float(benchmarker))
    for name in running.experiment.baselines:
        tool, precision, row, reason = task.external_models.get(name), split_precision(name)[1], "", ""
        if tool is not None and tool.path is not None:
            row = exporter.export_file(name, tool.path, tool.pairs)
        elif tool is not None:
            reason = tool.reason
        elif precision is not None and precision not in task.spec.precisions:
            reason = f"no {precision} at precision {task.spec.precision}"
        else:
            row = exporter.export_placement(task.placements[name])
        if row and not exporter.rows[row].timed:
            reason = ACCURACY_ONLY_VERDICT
        minutes = None if tool is None or tool.seconds is None else tool.seconds / 60
        yield Choice(method=name, kind="baseline", row=row, reason=reason, minutes=minutes)
    for name, placement in transferred.items():
        if isinstance(placement, str):
            yield Choice(method=name, kind="baseline", row="", reason=placement)
        else:
            yield Choice(method=name, kind="baseline", row=exporter.export_placement(placement))


def _search_choices(running: TaskRun, selection: SelectionResult, exporter: _Exporter) -> Iterator[Choice]:
    budgets, by_loss = running.experiment.budget.evaluations, running.judge.goal.minimize == "accuracy"
    largest = max(budgets)
    for run in running.task.spec.runs:
        empty = Choice(method=run.searcher.name, kind="search", row="", seed=run.seed, budget=largest)
        if run.name not in selection.states:
            yield replace(empty, reason=f"{ACCURACY_ONLY_VERDICT}: no search, because latency is not measured")
            continue
        for budget in budgets:
            state, leaders = selection.states[run.name][budget], selection.incumbents[run.name][budget]
            for rank, leader in enumerate(leaders if budget == largest else leaders[:1]):
                evaluation = leader if isinstance(leader, Evaluation) else None  # its search has evaluated it
                surviving = selection.surviving.get((run.searcher.name, budget), ())
                yield replace(
                    empty,
                    row=_export_incumbent(run, leader, running.task, exporter),
                    budget=budget,
                    rank=rank,
                    minutes=state.minutes,
                    search_ms=None if evaluation is None else evaluation.latency_ms,
                    loss=evaluation.score.objective if evaluation is not None and by_loss else None,
                    final_selection=selection.speedups.get(leader.digest),
                    beaten=bool(selection.speedups) and leader.digest not in surviving,
                    scored=state.scored or None,
                    agreement=state.agreement,
                )
            if not leaders:
                last = state.last_failure
                cause = "" if last is None else f"; {last.stage}: {last.reason}"
                yield replace(empty, budget=budget, reason=f"nothing measured{cause}")


def _export_incumbent(run: SearchSpec, leader: Incumbent, task: Task, exporter: _Exporter) -> str:
    """Export the incumbent of a search as the file that the search timed, and return the id of its row."""
    if isinstance(leader, WarmStartModel):
        return exporter.export_file(leader.digest, leader.path, leader.pairs)
    if not is_external_searcher(run.searcher):
        return exporter.export_edges(task_for_method(task, run.searcher).space.resolve(Placement(leader.choices)))
    path = external_searcher_model_path(run, task, leader.digest)
    if pairs := count_pairs(path):
        return exporter.export_file(leader.digest, path, pairs)
    return exporter.export_placement(task.space.float_placement())
