"""Stored files of reports in the folder of a task: attributions of rows (`explain/`) and the graph (`graph.json`).

Exported models are large and not in version control; with `graph.json` a fresh clone renders the same page.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from harness.base.errors import UserError
from harness.base.files import DamagedFile, from_json, json_equal, read_json
from harness.base.statistics import Interval
from harness.plugins.api import Layer
from harness.results.artifacts import ExportedModel
from harness.results.folder import TaskResults
from harness.results.manifest import write_record

GRAPH_FILE = "graph.json"
ATTRIBUTION_SCHEMA = 2
GRAPH_SCHEMA = 1  # increase it when the layout or the marks change; otherwise reports keep the graphs they stored
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEffect:
    """Effect of a part of a placement: the placement without it, compared with the whole placement.

    Attributes:
        part: Name of a pattern or an insertion point.
        operators: Operators of the pattern's regions.
        pairs: Number of Q/DQ pairs of the part.
        ratio: Latency without the part over latency of the whole placement; above 1 the part saves time.
        alone: Latency of the float model over latency with the part alone; None if not measured.
        reason: Why there is no ratio, or "".
        noise_floor: Relative noise floor of the step that measured it; smaller differences count as none.
        drop: Accuracy that the part costs: loss of the whole placement against the placement without the part, in the
            unit of the metric; unknown limits are NaN. None if not measured.
    """

    part: str
    pattern: str
    operators: str
    pairs: int
    ratio: Interval | None = None
    alone: Interval | None = None
    reason: str = ""
    noise_floor: float = 0.0
    drop: Interval | None = None

    def exceeds(self, noise_floor: float) -> bool:
        """Return whether the whole interval of the effect on time is beyond a noise floor."""
        ratio = self.ratio
        return ratio is not None and (ratio.low > 1 + noise_floor or ratio.high < 1 / (1 + noise_floor))

    def gain_us(self, latency_ms: float) -> Interval | None:
        """Return the microseconds that the part saves per inference of the whole placement, of latency `latency_ms`."""
        if self.ratio is None:
            return None
        low, value, high = (1000 * latency_ms * (x - 1) for x in (self.ratio.low, self.ratio.value, self.ratio.high))
        return Interval(value=value, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimalPlacement:
    """Smallest placement found that is as fast as the whole placement within the noise.

    Attributes:
        points: Names of its insertion points.
        ratio: Latency of the minimal placement over that of the whole one.
        speedup: Speedup over the float model.
        tests: Number of placements that were built to find it.
    """

    points: Annotated[tuple[str, ...], Field(fail_fast=True)]
    pairs: int
    ratio: Interval
    speedup: Interval
    tests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Comparison of placements, timed in turns with the whole placement.

    Attributes:
        title: Name of the step.
        noise_floor: Relative noise floor of the step.
        aa_ratios: Latency of the whole placement over that of its twin, for each build.
        ratios: Latency over that of the whole placement, by the pattern or the points (joined by ", ") that are left
            out or alone. "float" is the float model, "9 points" a placement of the search for the fewest points.
    """

    title: str
    noise_floor: float
    aa_ratios: Annotated[tuple[float, ...], Field(fail_fast=True)]
    ratios: Mapping[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFusion:
    """Use of one quantized edge in the engine.

    Attributes:
        fusion: "fused" (the consumer computes on quantized data), "not fused" (the pair is an operation of its own and
            the consumer computes in float), or "unknown".
    """

    tensor: str
    consumer: str
    slot: int
    precision: str
    fusion: str
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionReport:
    """Explanation of the latency of a row.

    Attributes:
        speedup: Speedup over the float model in this measurement.
        noise_floor: Median of the relative noise floors of the steps; smaller differences count as none.
        patterns: Effects of the patterns that the placement quantizes, the most valuable first.
        points: Effects of insertion points, the most valuable first.
        minimal: Smallest placement with the same gain; None if the row is no faster than float.
        before: Layers of the float engine with their times; empty if the runtime does not report them.
        after: Layers of the row's engine.
        edges: Fusion of each quantized edge.
        latency_ms: Latency of the row in this measurement; None in older files.
        metric: Metric of the drops; None if nothing was scored.
        drop: Loss of accuracy of the row against the float model, as in `PartEffect`.
        steps: Measured steps, in order.
        recovery: For a file that recovery made: the measured placement it was made from, and what changed; or "".
    """

    row: str
    sha256: str
    method: str
    pairs: int
    speedup: Interval
    noise_floor: float
    patterns: Annotated[tuple[PartEffect, ...], Field(fail_fast=True)]
    points: Annotated[tuple[PartEffect, ...], Field(fail_fast=True)]
    minimal: MinimalPlacement | None
    before: Annotated[tuple[Layer, ...], Field(fail_fast=True)] = ()
    after: Annotated[tuple[Layer, ...], Field(fail_fast=True)] = ()
    edges: Annotated[tuple[EdgeFusion, ...], Field(fail_fast=True)] = ()
    latency_ms: float | None = None
    metric: str | None = None
    drop: Interval | None = None
    steps: Annotated[tuple[MeasuredStep, ...], Field(fail_fast=True)] = ()
    recovery: str = ""


def write_attribution(report: AttributionReport, task: Path) -> Path:
    """Write an attribution into the folder of a task and return its path."""
    path = task / "explain" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', report.row)}.json"
    write_record(path, {"schema": ATTRIBUTION_SCHEMA, **_nan_to_none(asdict(report))})
    return path


def _nan_to_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nan_to_none(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nan_to_none(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_attributions(task: TaskResults) -> Iterator[AttributionReport]:
    """Yield the attributions of the rows of a task whose file is unchanged; those of another schema are logged."""
    digests = {row: exported_row.sha256 for row, exported_row in task.rows.items()}
    for path in sorted((task.folder / "explain").glob("*.json")):
        report = read_attribution(path)
        if report is not None and digests.get(report.row) == report.sha256:
            yield report


def read_attribution(path: Path) -> AttributionReport | None:
    """Read an attribution that `write_attribution` wrote; None, with a warning, if another version wrote it."""

    def restore_nan(body: dict[str, Any]) -> dict[str, Any]:
        is_interval = body.keys() == {"value", "low", "high"}
        return {key: math.nan if is_interval and value is None else value for key, value in body.items()}

    body = read_json(path)
    if body.pop("schema", None) != ATTRIBUTION_SCHEMA:
        logger.warning("%s: not of schema %s, so not shown; explain the row again", path, ATTRIBUTION_SCHEMA)
        return None
    try:
        return from_json(AttributionReport, json.loads(json.dumps(body), object_hook=restore_nan))
    except (ValueError, TypeError) as error:
        raise DamagedFile(path, f"damaged ({error})", remedy="move it away and explain the row again") from error


def exported(task: TaskResults, row: ExportedModel) -> Path:
    """Return the path of a row's exported model, which may be absent."""
    return task.folder / "models" / row.file


def read_graph(task: TaskResults) -> dict[str, Any] | None:
    """Return the stored graph of a task, with the marks of rows whose file is unchanged.

    None if there is no graph, or it has another schema or is damaged; a damaged one is logged.
    """
    path = task.folder / GRAPH_FILE
    try:
        if not path.exists():
            return None
        body = read_json(path)
        if body["schema"] != GRAPH_SCHEMA:
            return None
        digests = {row: exported_row.sha256 for row, exported_row in task.rows.items()}
        current = [row for row in body["marks"] if row in digests and body["rows"][row] == digests[row]]
        sizes = {row: int(size) for row, size in body.get("bytes", {}).items() if row in current}
        return {"scene": dict(body["scene"]), "marks": {row: body["marks"][row] for row in current}, "bytes": sizes}
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: damaged, so there is no graph: %s", path, error)
        return None


def write_graph(task: TaskResults, graph: Mapping[str, Any]) -> None:
    """Write the result of `load_task_graph` to `graph.json` unless the file is up to date."""
    rows = {row: task.rows[row].sha256 for row in graph["marks"] if row in task.rows}
    body = {"schema": GRAPH_SCHEMA, "rows": rows, **graph}
    path = task.folder / GRAPH_FILE
    if not path.exists() or not json_equal(read_json(path), json.loads(json.dumps(body))):
        write_record(path, body)


def sizes_of(task: TaskResults) -> Mapping[str, int]:
    """Return the size of each exported file in bytes by row id, as `write_graph` stored it; empty without a graph."""
    graph = read_graph(task)
    return {} if graph is None else graph["bytes"]
