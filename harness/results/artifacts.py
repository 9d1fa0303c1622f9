"""Exported models of a task and the choices of each method, from which all reported figures come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from harness.base.files import DamagedFile, from_json, read_json
from harness.base.text import MAX_FILE_NAME_CHARS, shorten
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins.api import Candidate
from search.space import Placement, Space, edges_digest

FLOAT_ROW = "float"
#: Record by row of the file with the dynamic axes of the original model, or of the reason why there is none.
DYNAMIC_AXES_FILE = "dynamic.json"
DYNAMIC_MODEL_SUFFIX = ".dynamic.onnx"  # of an exported model with dynamic axes
#: Recovered placements of a task with their steps and gains.
RECOVERY_FILE = "recovery.json"
NOT_TRIED = "not tried"
"""Start of the label of a placement that was not recovered, before the reason."""
#: Verdict in tables if the device only emulates a row's precision.
ACCURACY_ONLY_VERDICT = "accuracy only"
RECOVERED_PREFIX = "recovered-"


def recovered_row(sha256: str) -> str:
    """Return the row id of a recovered model from the digest of its file; the placement itself has another row."""
    return f"{RECOVERED_PREFIX}{sha256[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """Model file that is timed and scored.

    Attributes:
        id: "float", "float-PRECISION" (the float model at another float precision), the name of a PTQ tool, or the
            digest of a placement.
        file: Name in the folder `models` of the task.
        sha256: Digest of the file with its external data.
        pairs: Number of Q/DQ pairs.
        benchmarker: Name of the benchmarker of the task that builds it.
        choices: Choices of the placement; None for the float model and for models of other tools.
        timed: Whether the device runs its precisions natively; other models are scored but not confirmed.
    """

    id: str
    file: str
    sha256: str
    pairs: int
    benchmarker: str = MAIN_BENCHMARKER
    choices: Annotated[tuple[int, ...], Field(fail_fast=True)] | None = None
    timed: bool = True

    def __post_init__(self) -> None:
        for key, name in (("id", self.id), ("file", self.file)):  # rows.json may come from a stranger
            if Path(name).name != name or name == ".." or len(name) > MAX_FILE_NAME_CHARS:
                raise ValueError(f"{key}: a short name without a folder, but got {shorten(repr(name))}")

    @property
    def digest(self) -> str:
        """`Candidate.digest` of the model."""
        if self.choices is not None:
            return self.id
        return self.sha256[:16] if self.pairs else edges_digest(())

    @property
    def key(self) -> str:
        """Name in records of checks: the digest and the benchmarker that builds it."""
        return f"{self.digest} {self.benchmarker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Choice of a row by a method.

    Attributes:
        kind: "float", "baseline" or "search".
        seed: RNG seed of the search; None for the others.
        budget: Budget in evaluations at which the choice was made; None for the others.
        row: `ExportedModel.id`; "" without a result.
        rank: Rank among the choices of the search, from 0.
        minutes: Wall-clock of the search, or of the PTQ tool; None if unknown.
        search_ms: Latency by the search's own samples; None for a model of another tool (see
            `harness.run.select.final_selection`).
        loss: Loss of the metric in the search, if the search minimised it.
        final_selection: Speedup over the float model in the final selection, if there was one.
        beaten: Whether the choice of another seed was faster in the final selection.
        reason: Reason why there is no row, or why it is not timed.
        scored: Evaluations of the search with a measured metric; None if it used no metric.
        agreement: Rank correlation of proxy and metric over the evaluations that have both; None if undefined.
    """

    method: str
    kind: str
    row: str
    seed: int | None = None
    budget: int | None = None
    rank: int = 0
    minutes: float | None = None
    search_ms: float | None = None
    loss: float | None = None
    final_selection: float | None = None
    beaten: bool = False
    reason: str = ""
    scored: int | None = None
    agreement: float | None = None


def best_choice(choices: Iterable[Choice]) -> Choice | None:
    """Return the best choice of the searches by figures from before the confirmation, or None.

    The criterion is the loss of accuracy if it was minimised (latency breaks ties), else the final selection if there
    was one, else the searches' own samples. The confirmation must not select, as its figures are reported.
    """
    searched = [choice for choice in choices if choice.kind == "search" and choice.row]
    if searched and all(choice.loss is not None for choice in searched):
        return min(searched, key=lambda choice: (choice.loss or 0.0, choice.search_ms or 0.0))
    selected = [choice for choice in searched if choice.final_selection is not None]
    if selected:
        return max(selected, key=lambda choice: (not choice.beaten, choice.final_selection or 0.0))
    return min(searched, key=lambda choice: choice.search_ms or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistSet:
    """Exported models of a task, in the task's folder, as candidates."""

    folder: Path
    space: Space
    rows: tuple[ExportedModel, ...]

    @property
    def with_latency(self) -> FinalistSet:
        """Only the rows that are timed."""
        return replace(self, rows=tuple(row for row in self.rows if row.timed))

    def candidate(self, row: ExportedModel) -> Candidate:
        """Return the exported file with its quantized edges, which simulation and replay need."""
        resolved = () if row.choices is None else self.space.resolve(Placement(row.choices))
        return Candidate(
            digest=row.digest if row.choices is None else edges_digest(resolved),
            edges=resolved,
            source=lambda: self.folder / "models" / row.file,
        )


def read_dynamic_axes(folder: Path) -> dict[str, dict[str, str | None]]:
    """Return the records of `DYNAMIC_AXES_FILE` by row id; empty without the file."""
    return read_json(folder / DYNAMIC_AXES_FILE, {}, dict[str, dict[str, str | None]])


def read_finalists(folder: Path) -> tuple[tuple[ExportedModel, ...], tuple[Choice, ...]]:
    """Return the exported models and choices of a task; both are empty while searches run."""
    path = folder / "rows.json"
    if not path.exists():
        return (), ()
    body = read_json(path)
    try:
        rows = tuple(from_json(ExportedModel, row) for row in body["rows"])
        return rows, tuple(from_json(Choice, pick) for pick in body["picks"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(path, f"damaged ({error})") from error
