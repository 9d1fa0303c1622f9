"""The rows of a cell's table, and which method chose which. Every row is an exported file; nothing else is timed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.measure.engines import MAIN

__all__ = ["FLOAT_ROW", "Pick", "Row", "candidate_of", "read_rows", "write_json"]

FLOAT_ROW = "float"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model file that is timed and scored.

    Attributes:
        id: "float", "float-PRECISION" (the same file at another float precision), the name of a PTQ tool, or a
            placement's digest.
        file: Name in the cell's folder `models`.
        sha256: Of that file.
        pairs: Q/DQ pairs in it.
        benchmarker: Which of the cell's benchmarkers builds it.
    """

    id: str
    file: str
    sha256: str
    pairs: int
    benchmarker: str = MAIN


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
