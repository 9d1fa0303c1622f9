"""Picks and exports the finalists of a cell: the float model, the fixed baselines, and what each search chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.graph.files import copy_model, file_digest
from harness.run.compose import Cell
from harness.run.config import Experiment
from harness.run.engine import Goal
from harness.run.journal import read_journal, writing
from harness.run.readback import leaders
from harness.run.rows import FLOAT_ROW, Pick, Row, Table, write_json
from search.space import Placement, digest_of

__all__ = ["choose"]


def choose(experiment: Experiment, cell: Cell, goal: Goal, folder: Path, others: Sequence[str]) -> Table:
    """Pick and export the finalists of a cell; the same journals give the same files.

    Args:
        folder: The cell's folder with its journals.
        others: Float precisions beside the baseline's; each gets a row.

    Raises:
        UserError: A file cannot be written.
    """
    exporter = _Exporter(cell, folder / "models")
    picks = [*_fixed(experiment, cell, exporter, others), *_found(experiment, cell, goal, folder, exporter)]
    rows = tuple(exporter.rows.values())
    write_json(folder / "rows.json", {"rows": [asdict(r) for r in rows], "picks": [asdict(p) for p in picks]})
    return Table(folder=folder, space=cell.space, rows=rows)


class _Exporter:
    """Writes each finalist once."""

    def __init__(self, cell: Cell, models: Path) -> None:
        self._cell = cell
        self._models = models
        self.rows: dict[str, Row] = {}
        models.mkdir(parents=True, exist_ok=True)

    def placement(self, placement: Placement) -> str:
        """Row of a placement."""
        resolved = self._cell.space.resolve(placement)
        digest = digest_of(resolved)
        if not resolved:
            return self.file(FLOAT_ROW, self._cell.model_file, 0)
        if digest not in self.rows:
            path = self._models / f"{digest}.onnx"
            with writing(path):
                self._cell.inserter.export(resolved, path)
            self._add(digest, path, self._cell.inserter.pairs(resolved), placement.choices)
        return digest

    def file(self, row: str, path: Path, pairs: int) -> str:
        """Row of a model that is there already."""
        if row not in self.rows:
            with writing(self._models / f"{row}.onnx"):
                target = copy_model(path, self._models, f"{row}.onnx")
            self._add(row, target, pairs)
        return row

    def float_at(self, precision: str) -> str:
        """Row of the float model at another precision than the baseline's."""
        row = replace(self.rows[FLOAT_ROW], id=f"{FLOAT_ROW}-{precision}", benchmarker=precision)
        self.rows[row.id] = row
        return row.id

    def _add(self, row: str, path: Path, pairs: int, choices: tuple[int, ...] | None = None) -> None:
        self.rows[row] = Row(id=row, file=path.name, sha256=file_digest(path), pairs=pairs, choices=choices)


def _fixed(experiment: Experiment, cell: Cell, exporter: _Exporter, others: Sequence[str]) -> Iterator[Pick]:
    yield Pick(method="float", kind="float", row=exporter.file(FLOAT_ROW, cell.model_file, 0))
    for precision in others:
        yield Pick(method="float", kind="float", row=exporter.float_at(precision))
    for name in experiment.baselines:
        foreign = cell.foreign.get(name)
        if foreign is None:
            yield Pick(method=name, kind="baseline", row=exporter.placement(cell.placements[name]))
        elif foreign.path is None:
            yield Pick(method=name, kind="baseline", row="", reason=foreign.reason)
        else:
            yield Pick(method=name, kind="baseline", row=exporter.file(name, foreign.path, foreign.pairs))


def _found(experiment: Experiment, cell: Cell, goal: Goal, folder: Path, exporter: _Exporter) -> Iterator[Pick]:
    largest = max(experiment.budget.evaluations)
    for run in cell.spec.runs:
        entries = tuple(read_journal(folder / "runs" / f"{run.name}.jsonl"))
        for budget in experiment.budget.evaluations:
            best = leaders(entries, goal, budget, experiment.confirmation.top_k if budget == largest else 1)
            for rank, trial in enumerate(best):
                yield Pick(
                    method=run.searcher.name,
                    kind="search",
                    row=exporter.placement(Placement(trial.choices)),
                    seed=run.seed,
                    budget=budget,
                    rank=rank,
                    minutes=_minutes(entries, budget),
                    search_ms=trial.score.objective,
                )
            if not best:
                yield Pick(
                    method=run.searcher.name,
                    kind="search",
                    row="",
                    seed=run.seed,
                    budget=budget,
                    reason="nothing measured",
                )


def _minutes(entries: tuple[Any, ...], budget: int) -> float:
    told = [entry.told.elapsed_s for entry in entries if entry.told is not None][:budget]
    return (told[-1] if told else 0.0) / 60
