"""Graphs of a results folder: each cell's model as a picture, and the Q/DQ edges of each row on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from harness import registry
from harness.errors import UserError
from harness.graph.dialects import Dialect
from harness.graph.importer import import_qdq
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.patterns import find_patterns
from harness.graph.regions import discover
from harness.graph.space import build_space
from harness.report.picture import marks_of, scene_of
from harness.report.results import CellResults
from harness.run.rows import FLOAT_ROW
from search.space import Dimension

__all__ = ["graph_of"]

logger = logging.getLogger(__name__)


def graph_of(cell: CellResults) -> dict[str, Any] | None:
    """The picture of a cell's model (`scene`, see `picture`) and by row id the quantized edges (`marks`).

    It is read off the exported files, so what is drawn is what was timed; None where they are not in the folder.
    """
    row = cell.rows.get(FLOAT_ROW)
    path = None if row is None else cell.folder / "models" / row.file
    if path is None or not path.exists():
        return None
    model = load(path, source=str(cell.facts.get("source", cell.facts["model"])))
    root = discover(model)
    scene = scene_of(model, root, find_patterns(model, root), _dimensions(cell, model))
    return {"scene": scene, "marks": _marks(cell, model)}


def _dimensions(cell: CellResults, model: Model) -> tuple[Dimension, ...]:
    """Insertion points as the runtime's dialect has them; none where its plug-in is not installed any more."""
    name = str(cell.facts["backend"].get("name"))
    try:
        dialect: Any = registry.load("dialect", getattr(registry.load("benchmarker", name), "dialect", name))
    except UserError as error:
        logger.warning("%s: no insertion points on the page: %s", cell.name, error)
        return ()
    if not isinstance(dialect, Dialect):
        return ()
    return build_space(model, dialect, precisions=(str(cell.facts["precision"]),)).dimensions


def _marks(cell: CellResults, model: Model) -> Mapping[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for row in cell.rows.values():
        path = cell.folder / "models" / row.file
        if not row.pairs:
            found[row.id] = []
        elif path.exists():
            try:
                found[row.id] = marks_of(model, import_qdq(path, model))
            except UserError as error:
                logger.warning("%s: the Q/DQ edges of %s are not drawn: %s", cell.name, row.id, error)
    return found
