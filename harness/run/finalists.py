"""The rows of a cell's table: the float model, the fixed baselines, and what each search chose.

Every row is an exported file; scoring and confirmation read that file, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.run.compose import Cell
from harness.run.config import Experiment
from harness.run.engine import Goal
from harness.run.journal import read_journal
from harness.run.readback import leaders
from search.space import Placement, digest_of

__all__ = ["FLOAT_ROW", "FP32_ROW", "Pick", "Row", "candidate_of", "choose", "read_rows", "write_json"]

FLOAT_ROW = "float"
FP32_ROW = "fp32"
_FLOAT_DIGEST = digest_of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model file that is timed and scored.

    Attributes:
        id: "float", "fp32" (the same file built in FP32), the name of a PTQ tool, or a placement's digest.
        file: Name in the cell's folder `models`.
        sha256: Of that file.
        pairs: Q/DQ pairs in it.
    """

    id: str
    file: str
    sha256: str
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A method's choice of a row.

    Attributes:
        kind: "float", "baseline" or "search".
        seed: Of the search; None for the others.
        budget: Evaluations after which the search would have stopped; None for the others.
        row: `Row.id`, or "" where the method gave nothing (`reason` says why).
        search_ms: Latency by the search's own samples.
    """

    method: str
    kind: str
    row: str
    seed: int | None = None
    budget: int | None = None
    rank: int = 0
    minutes: float | None = None
    search_ms: float | None = None
    reason: str = ""


def choose(
    experiment: Experiment, cell: Cell, goal: Goal, folder: Path, fp32: bool
) -> tuple[tuple[Row, ...], tuple[Pick, ...]]:
    """Pick and export the finalists of a cell; the same journals give the same files.

    Args:
        folder: The cell's folder with its journals.
        fp32: The backend's baseline is not FP32, so that FP32 gets a row of its own.
    """
    exporter = _Exporter(cell, folder / "models")
    picks = [*_fixed(experiment, cell, exporter, fp32), *_found(experiment, cell, goal, folder, exporter)]
    rows = tuple(exporter.rows.values())
    write_json(folder / "rows.json", {"rows": [asdict(r) for r in rows], "picks": [asdict(p) for p in picks]})
    return rows, tuple(picks)


def read_rows(folder: Path) -> tuple[tuple[Row, ...], tuple[Pick, ...]]:
    """What `choose` wrote; nothing where the searches are still going on."""
    path = folder / "rows.json"
    if not path.exists():
        return (), ()
    body = json.loads(path.read_text(encoding="utf-8"))
    return tuple(Row(**r) for r in body["rows"]), tuple(Pick(**p) for p in body["picks"])


def candidate_of(row: Row, folder: Path) -> Candidate:
    """The row's exported file as a candidate."""
    return Candidate(digest=row.id, edges=(), source=lambda: folder / "models" / row.file)


def write_json(path: Path, body: Any) -> None:
    """Replace a JSON file in one step, so that a crash leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(body, indent=1, allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)


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
            path = self._cell.inserter.export(resolved, self._models / f"{digest}.onnx")
            self._add(digest, path, self._cell.inserter.pairs(resolved))
        return digest

    def file(self, row: str, path: Path, pairs: int) -> str:
        """Row of a model that is there already."""
        if row not in self.rows:
            target = self._models / f"{FLOAT_ROW if row == FP32_ROW else row}.onnx"
            shutil.copyfile(path, target)
            self._add(row, target, pairs)
        return row

    def _add(self, row: str, path: Path, pairs: int) -> None:
        digest = hashlib.sha256()
        for part in sorted({path, *path.parent.glob(f"{path.name}.data")}):
            digest.update(part.read_bytes())
        self.rows[row] = Row(id=row, file=path.name, sha256=digest.hexdigest(), pairs=pairs)


def _fixed(experiment: Experiment, cell: Cell, exporter: _Exporter, fp32: bool) -> Iterator[Pick]:
    yield Pick(method="float", kind="float", row=exporter.file(FLOAT_ROW, cell.model_file, 0))
    if fp32:
        yield Pick(method="float (f32)", kind="float", row=exporter.file(FP32_ROW, cell.model_file, 0))
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
