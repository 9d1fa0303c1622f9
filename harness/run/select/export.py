"""Export of the finalists of a task: the float model, fixed baselines, and the choice of each search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness.base.files import explain_write_errors
from harness.config.experiment import Experiment, SearchSpec, split_precision
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model
from harness.graph.qdq.qdq_graph import count_pairs, read_precisions
from harness.results.artifacts import ACCURACY_ONLY_VERDICT, FLOAT_ROW, Choice, ExportedModel, FinalistSet
from harness.results.manifest import write_record
from harness.results.search_log import BudgetState, Evaluation
from harness.run.prepare.methods import (
    WarmStartModel,
    external_searcher_model_path,
    is_external_searcher,
    task_for_method,
)
from harness.run.prepare.task import Task
from harness.run.prepare.transfer import TransferredPlacement
from harness.run.select.final_selection import Incumbent, SelectionResult
from harness.run.task_run import TaskRun
from search.space import Placement, Resolved, edges_digest


def export_finalists(
    running: TaskRun,
    found: SelectionResult,
    others: Sequence[str],
    transferred: Mapping[str, TransferredPlacement] | None = None,
) -> FinalistSet:
    """Export the finalists of a task and write `rows.json`; the same journals and final selection give the same files.

    Args:
        found: Incumbents of the searches.
        others: Float precisions other than the baseline's; each gets a row.
        transferred: Placements found by other tasks, by the name of the row; see `harness.run.prepare.transfer`.

    Raises:
        UserError: A file cannot be written.
    """
    task, folder = running.task, running.folder
    exporter = _Exporter(task, folder / "models")
    fixed = [
        *_baseline_rows(running.experiment, task, exporter, others),
        *_transferred_rows(transferred or {}, exporter),
    ]
    picks = [*fixed, *_search_rows(running, found, exporter)]
    rows = tuple(exporter.rows.values())
    write_record(folder / "rows.json", {"rows": [asdict(r) for r in rows], "picks": [asdict(p) for p in picks]})
    return FinalistSet(folder=folder, space=task.space, rows=rows)


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


def _baseline_rows(experiment: Experiment, task: Task, exporter: _Exporter, others: Sequence[str]) -> Iterator[Choice]:
    yield Choice(method="float", kind="float", row=exporter.export_file(FLOAT_ROW, task.model_file, 0))
    for precision in others:
        yield Choice(method="float", kind="float", row=exporter.export_float(precision))
    for name in experiment.baselines:
        row, reason = _baseline_row(name, task, exporter)
        timed = not row or exporter.rows[row].timed
        tool = task.external_models.get(name)
        yield Choice(
            method=name,
            kind="baseline",
            row=row,
            reason=reason if timed else ACCURACY_ONLY_VERDICT,
            minutes=None if tool is None or tool.seconds is None else tool.seconds / 60,
        )


def _transferred_rows(transferred: Mapping[str, TransferredPlacement], exporter: _Exporter) -> Iterator[Choice]:
    for name, placement in transferred.items():
        if isinstance(placement, str):
            yield Choice(method=name, kind="baseline", row="", reason=placement)
        else:
            yield Choice(method=name, kind="baseline", row=exporter.export_placement(placement))


def _baseline_row(name: str, task: Task, exporter: _Exporter) -> tuple[str, str]:
    """Return the id of the row of a fixed baseline and "", or "" and the reason for its absence."""
    external, precision = task.external_models.get(name), split_precision(name)[1]
    if external is not None and external.path is None:
        return "", external.reason
    if external is not None and external.path is not None:
        return exporter.export_file(name, external.path, external.pairs), ""
    if precision is not None and precision not in task.spec.precisions:
        return "", f"no {precision} at precision {task.spec.precision}"
    return exporter.export_placement(task.placements[name]), ""


def _search_rows(running: TaskRun, selection: SelectionResult, exporter: _Exporter) -> Iterator[Choice]:
    budgets, by_loss = running.experiment.budget.evaluations, running.judge.goal.minimize == "accuracy"
    largest = max(budgets)
    for run in running.task.spec.runs:
        if run.name not in selection.states:
            yield _empty_choice(run, largest, f"{ACCURACY_ONLY_VERDICT}: no search, because latency is not measured")
            continue
        for budget in budgets:
            state, leaders = selection.states[run.name][budget], selection.incumbents[run.name][budget]
            for rank, leader in enumerate(leaders if budget == largest else leaders[:1]):
                evaluation = leader if isinstance(leader, Evaluation) else None  # its search has evaluated it
                yield Choice(
                    method=run.searcher.name,
                    kind="search",
                    row=_incumbent_row(run, leader, running.task, exporter),
                    seed=run.seed,
                    budget=budget,
                    rank=rank,
                    minutes=state.minutes,
                    search_ms=None if evaluation is None else evaluation.latency_ms,
                    loss=evaluation.score.objective if evaluation is not None and by_loss else None,
                    final_selection=selection.speedups.get(leader.digest),
                    beaten=bool(selection.speedups)
                    and leader.digest not in selection.surviving[run.searcher.name, budget],
                    scored=state.scored or None,
                    agreement=state.agreement,
                )
            if not leaders:
                yield _empty_choice(run, budget, _no_incumbent_reason(state))


def _incumbent_row(run: SearchSpec, leader: Incumbent, task: Task, exporter: _Exporter) -> str:
    """Export the incumbent of a search as the file that the search timed, and return the id of its row."""
    if isinstance(leader, WarmStartModel):
        return exporter.export_file(leader.digest, leader.path, leader.pairs)
    if not is_external_searcher(run.searcher):
        return exporter.export_edges(task_for_method(task, run.searcher).space.resolve(Placement(leader.choices)))
    path = external_searcher_model_path(run, task, leader.digest)
    if pairs := count_pairs(path):
        return exporter.export_file(leader.digest, path, pairs)
    return exporter.export_placement(task.space.float_placement())


def _no_incumbent_reason(state: BudgetState) -> str:
    """Return the reason why a search has no incumbent."""
    last = state.last_failure
    return "nothing measured" if last is None else f"nothing measured; {last.stage}: {last.reason}"


def _empty_choice(run: SearchSpec, budget: int, reason: str) -> Choice:
    return Choice(method=run.searcher.name, kind="search", row="", seed=run.seed, budget=budget, reason=reason)
