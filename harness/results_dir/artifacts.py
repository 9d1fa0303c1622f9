"""The rows of a cell's table, and which method chose which. Every row is an exported file; nothing else is timed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.errors import UserError
from harness.timing.workers.engines import MAIN_BENCHMARKER
from harness.results_dir.journal import explain_write_errors
from search.space import Placement, Space, digest_of

__all__ = [
    "ACCURACY_ONLY_VERDICT", "DYNAMIC_AXES_FILE", "FLOAT_ROW", "Choice", "ExportedModel", "FinalistSet", "best_choice", "read_json", "read_finalists",
    "write_json", "write_text",
]  # fmt: skip

FLOAT_ROW = "float"
DYNAMIC_AXES_FILE = "dynamic.json"
"""By row: the file with the dynamic axes of the original model, where it was checked, or why there is none."""
ACCURACY_ONLY_VERDICT = "accuracy only"
"""What tables say in the place of a verdict where the device has no speed at a row's precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """One model file that is timed and scored.

    Attributes:
        id: "float", "float-PRECISION" (the float model at another float precision), the name of a PTQ tool, or a
            placement's digest.
        file: Name in the cell's folder `models`.
        sha256: Of that file, external data included.
        pairs: Q/DQ pairs in it.
        benchmarker: Which of the cell's benchmarkers builds it.
        choices: Of the placement; None for the float model and for models of other tools.
        timed: The device has a speed at its precisions; where not, it is scored and never confirmed.
    """

    id: str
    file: str
    sha256: str
    pairs: int
    benchmarker: str = MAIN_BENCHMARKER
    choices: tuple[int, ...] | None = None
    timed: bool = True

    @property
    def digest(self) -> str:
        """`Candidate.digest` of the row."""
        if self.choices is not None:
            return self.id
        return self.sha256[:16] if self.pairs else digest_of(())

    @property
    def key(self) -> str:
        """Name of the row's model in records of checks: its digest and the benchmarker that builds it."""
        return f"{self.digest} {self.benchmarker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A method's choice of a row.

    Attributes:
        kind: "float", "baseline" or "search".
        seed: Of the search; None for the others.
        budget: Evaluations after which the search would have stopped; None for the others.
        row: `Row.id`, or "" where the method gave nothing.
        search_ms: Latency by the search's own samples; None where it chose a model of another tool, see
            `harness.selection.final_selection`.
        loss: Loss of the metric that the search saw, where that is what it minimised; None elsewhere.
        runoff: Speedup over the float model in the runoff that chose the row; None where there was none.
        beaten: By the choice of another seed, in that runoff.
        reason: Why there is no row, or none that is timed.
        scored: Evaluations of the search whose metric was measured; None where it looked at none.
        agreement: Rank correlation of proxy and metric over those that have both; None where it cannot be told.
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
    runoff: float | None = None
    beaten: bool = False
    reason: str = ""
    scored: int | None = None
    agreement: float | None = None


def best_choice(picks: Iterable[Choice]) -> Choice | None:
    """The searches' choice that did best before the confirmation, which reports and must not choose.

    By the loss of accuracy where that was minimised, the faster of equal ones; else by the runoff where any of them
    came through one, else by the searches' own samples; None where nothing was measured.
    """
    found = [pick for pick in picks if pick.kind == "search" and pick.row]
    if found and all(pick.loss is not None for pick in found):
        return min(found, key=lambda pick: (pick.loss or 0.0, pick.search_ms or 0.0))
    met = [pick for pick in found if pick.runoff is not None]
    if met:
        return max(met, key=lambda pick: (not pick.beaten, pick.runoff or 0.0))
    return min(found, key=lambda pick: pick.search_ms or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistSet:
    """The rows of a cell, as something that can be built.

    Attributes:
        folder: The cell's.
        space: Of the placements that the rows' choices are in.
    """

    folder: Path
    space: Space
    rows: tuple[ExportedModel, ...]

    @property
    def with_latency(self) -> FinalistSet:
        """The rows that have a speed."""
        return replace(self, rows=tuple(row for row in self.rows if row.timed))

    def candidate(self, row: ExportedModel) -> Candidate:
        """The row's exported file, with the edges that are quantized in it: simulation and replay go by these."""
        resolved = () if row.choices is None else self.space.resolve(Placement(row.choices))
        return Candidate(
            digest=row.digest if row.choices is None else digest_of(resolved),
            edges=resolved,
            source=lambda: self.folder / "models" / row.file,
        )


def read_finalists(folder: Path) -> tuple[tuple[ExportedModel, ...], tuple[Choice, ...]]:
    """What `choose` wrote; nothing where the searches are still going on."""
    path = folder / "rows.json"
    if not path.exists():
        return (), ()
    body = read_json(path)
    return tuple(_decode_row(r) for r in body["rows"]), tuple(Choice(**p) for p in body["picks"])


def _decode_row(body: dict[str, Any]) -> ExportedModel:
    choices = body.pop("choices", None)
    return ExportedModel(**body, choices=None if choices is None else tuple(choices))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that `write_json` wrote.

    Raises:
        UserError: It is damaged.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); move the file away to have it made again") from error
    if not isinstance(body, dict):
        raise UserError(f"{path}: not a file of qdq-bench; move it away to have it made again")
    return body


def write_json(path: Path, body: Any) -> None:
    """Replace a JSON file in one step, see `write_text`."""
    write_text(path, json.dumps(body, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a crash leaves the old or the new one.

    Raises:
        UserError: It cannot be written; the old one stands.
    """
    temporary = path.with_suffix(".tmp")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
