"""Graph of each task with the Q/DQ edges of its rows, from the exported files, which were timed, or `graph.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from harness.config.plan import quantized_precisions
from harness.errors import UserError
from harness.graph.io.files import model_files
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import Region, discover_regions
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import BUILTIN_DIALECTS
from harness.report.load.results import TaskResults
from harness.report.load.task_files import exported, read_graph
from harness.report.page.graph_layout import build_scene, edge_marks
from harness.results_dir.artifacts import FLOAT_ROW
from search.space import Dimension

logger = logging.getLogger(__name__)


def load_task_graph(task: TaskResults) -> dict[str, Any] | None:
    """Return `scene` (see `build_scene`), and by row id the quantized edges (`marks`) and file sizes (`bytes`).

    They come from the exported files, else from `graph.json` without rows whose file changed; None without either.
    """
    kept = read_graph(task)
    row = task.rows.get(FLOAT_ROW)
    path = None if row is None else exported(task, row)
    if path is None or not path.exists():
        return kept
    model = load(path, source=str(task.facts.get("source", task.facts["model"])))
    root = discover_regions(model)
    scene = build_scene(model, root, find_patterns(model, root), _task_dimensions(task, model, root))
    same = kept is not None and kept["scene"].get("nodes") == scene["nodes"]
    before = kept if kept is not None and same else {"marks": {}, "bytes": {}}
    files = {row.id: exported(task, row) for row in task.rows.values() if exported(task, row).exists()}
    sizes = {row: sum(part.stat().st_size for part in model_files(file)) for row, file in files.items()}
    return {
        "scene": scene,
        "marks": {**before["marks"], **_marks_by_row(task, model)},
        "bytes": {**before["bytes"], **sizes},
    }


def _task_dimensions(task: TaskResults, model: Model, root: Region) -> tuple[Dimension, ...]:
    """Return the insertion points of the task's dialect, if it is built in: a report imports no plug-in."""
    name = str(task.facts.get("dialect_use"))
    dialect = BUILTIN_DIALECTS.get(name)
    if dialect is None:
        logger.warning("%s: no insertion points on the page: %s is not a dialect of qdq-bench", task.name, name)
        return ()
    precisions = quantized_precisions(str(task.facts["precision"]))
    return build_space(model, dialect, precisions=precisions, root=root).dimensions


def _marks_by_row(task: TaskResults, model: Model) -> Mapping[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for row in task.rows.values():
        path = exported(task, row)
        if not row.pairs:
            found[row.id] = []
        elif path.exists():
            try:
                found[row.id] = edge_marks(model, import_placement(path, model))
            except UserError as error:
                logger.warning("%s: the Q/DQ edges of %s are not drawn: %s", task.name, row.id, error)
    return found
