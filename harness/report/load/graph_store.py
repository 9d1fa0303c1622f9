"""Stored graph of a cell: its picture and the quantized edges of each row, in `graph.json`.

Exported models are large and kept out of version control; with this file a fresh clone renders the same page.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.report.load.results import CellResults
from harness.results_dir.artifacts import ExportedModel
from harness.results_dir.io import write_text

__all__ = ["GRAPH_FILE", "exported", "read_graph", "sizes_of", "write_graph"]

GRAPH_FILE = "graph.json"
SCHEMA = 1
MAX_GRAPH_BYTES = 50_000_000
logger = logging.getLogger(__name__)


def read_graph(cell: CellResults) -> dict[str, Any] | None:
    """Return the stored graph of a cell, with the marks of rows whose file is unchanged; None if there is none."""
    path = cell.folder / GRAPH_FILE
    try:
        if not path.exists() or path.stat().st_size > MAX_GRAPH_BYTES:
            return None
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            return None
        shas = {row: facts.sha256 for row, facts in cell.rows.items()}
        current = [row for row in body["marks"] if row in shas and body["rows"][row] == shas[row]]
        sizes = {row: int(size) for row, size in body.get("bytes", {}).items() if row in current}
        return {"scene": dict(body["scene"]), "marks": {row: body["marks"][row] for row in current}, "bytes": sizes}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: damaged, so there is no graph: %s", path, error)
        return None


def write_graph(cell: CellResults, graph: Mapping[str, Any]) -> None:
    """Write `graph.json` unless it is up to date."""
    rows = {row: cell.rows[row].sha256 for row in graph["marks"] if row in cell.rows}
    text = json.dumps({"schema": SCHEMA, "rows": rows, **graph}, separators=(",", ":"), allow_nan=False)
    path = cell.folder / GRAPH_FILE
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def sizes_of(cell: CellResults) -> Mapping[str, int]:
    """Return the size of each exported file in bytes by row id, as `write_graph` stored it; empty without a graph."""
    kept = read_graph(cell)
    return {} if kept is None else kept["bytes"]


def exported(cell: CellResults, row: ExportedModel) -> Path:
    """Return the path of a row's exported model, which may be absent."""
    return cell.folder / "models" / row.file
