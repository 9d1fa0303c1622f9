"""Stored result of `qdq explain DIR ROW`: written by it, read by the report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.api import Layer
from harness.errors import UserError
from harness.results_dir.io import write_json
from harness.statistics import Interval

__all__ = [
    "AttributionReport", "EdgeFusion", "MinimalPlacement", "PartEffect", "read_attribution", "read_attributions",
    "write_attribution",
]  # fmt: skip

ATTRIBUTION_SCHEMA = 1
MAX_ATTRIBUTION_BYTES = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEffect:
    """What a part of a placement is worth: the placement without it, against the whole.

    Attributes:
        part: A pattern, or an insertion point.
        pattern: The pattern.
        operators: Of the pattern's regions, in words.
        pairs: Q/DQ pairs that go with the part.
        ratio: Latency without the part over latency of the whole placement; above 1 the part makes it faster.
        alone: Latency of the float model over latency with the part alone; None where that was not measured.
        reason: Why there is no ratio; "" where there is one.
        drop: What the part costs in accuracy: loss of the whole placement against the placement without the part, in
            the metric's unit; limits are NaN where they are not known. None where it was not measured.
    """

    part: str
    pattern: str
    operators: str
    pairs: int
    ratio: Interval | None = None
    alone: Interval | None = None
    reason: str = ""
    drop: Interval | None = None

    def gain_us(self, latency_ms: float) -> Interval | None:
        """Microseconds that the part takes off an inference of the whole placement, which lasts so long."""
        if self.ratio is None:
            return None
        low, value, high = (1000 * latency_ms * (x - 1) for x in (self.ratio.low, self.ratio.value, self.ratio.high))
        return Interval(value=value, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimalPlacement:
    """The fewest pairs found that keep the gain within the noise.

    Attributes:
        points: Names of the insertion points that are left.
        ratio: Latency of the minimal placement over that of the whole one.
        speedup: Over the float model.
        tests: Placements that were built to find it.
    """

    points: tuple[str, ...]
    pairs: int
    ratio: Interval
    speedup: Interval
    tests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFusion:
    """What became of one quantized edge in the engine.

    Attributes:
        fate: "fused" (its consumer computes on quantized data), "alone" (it runs as an operation of its own and its
            consumer computes in float), or "unknown" (the runtime does not tell).
        layer: The consumer's layer in the engine.
    """

    tensor: str
    consumer: str
    slot: int
    precision: str
    fate: str
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionReport:
    """Why a row of a cell is as fast as it is.

    Attributes:
        row: Its id.
        sha256: Of its file.
        method: What the tables call it.
        speedup: Over the float model, measured here.
        floor: Relative noise floor: smaller differences count as none.
        patterns: One a pattern that the placement quantizes, the most valuable first.
        points: One an insertion point, the same.
        minimal: None where the row is no faster than float.
        before: Layers of the float engine with their times; empty where the runtime does not tell.
        after: Layers of the row's engine.
        fates: One a quantized edge.
        latency_ms: Of the row, measured here; None in files of before.
        metric: What the drops are of; None where nothing was scored.
        drop: Loss of accuracy of the row against the float model, as in `PartEffect`.
    """

    row: str
    sha256: str
    method: str
    pairs: int
    speedup: Interval
    floor: float
    patterns: tuple[PartEffect, ...]
    points: tuple[PartEffect, ...]
    minimal: MinimalPlacement | None
    before: tuple[Layer, ...] = ()
    after: tuple[Layer, ...] = ()
    fates: tuple[EdgeFusion, ...] = ()
    latency_ms: float | None = None
    metric: str | None = None
    drop: Interval | None = None


def _attribution_path(cell: Path, row: str) -> Path:
    """Where a row's explanation lies in a cell's folder."""
    return cell / "explain" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', row)}.json"


def write_attribution(found: AttributionReport, cell: Path) -> Path:
    """Write an explanation into a cell's folder.

    Raises:
        UserError: It cannot be written.
    """
    path = _attribution_path(cell, found.row)
    write_json(path, {"schema": ATTRIBUTION_SCHEMA, **_nan_to_none(asdict(found))})
    return path


def _nan_to_none(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _nan_to_none(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nan_to_none(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_attributions(cell: Path, rows: Mapping[str, str]) -> Iterator[AttributionReport]:
    """The explanations in a cell's folder, of rows whose file is still the same.

    Args:
        cell: The cell's folder.
        rows: SHA-256 by row id.

    Raises:
        UserError: One of them is damaged.
    """
    for path in sorted((cell / "explain").glob("*.json")):
        found = read_attribution(path)
        if rows.get(found.row) == found.sha256:
            yield found


def read_attribution(path: Path) -> AttributionReport:
    """Read what `write_attribution` wrote.

    Raises:
        UserError: It is damaged, or of another schema.
    """
    try:
        if path.stat().st_size > MAX_ATTRIBUTION_BYTES:
            raise ValueError(f"larger than {MAX_ATTRIBUTION_BYTES} bytes")
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.pop("schema") != ATTRIBUTION_SCHEMA:
            raise ValueError(f"not of schema {ATTRIBUTION_SCHEMA}")
        return _parse_attribution(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); move it away and explain the row again") from error


def _parse_attribution(body: dict[str, Any]) -> AttributionReport:
    minimal = body["minimal"]
    body["speedup"], body["drop"] = _parse_interval(body["speedup"]), _parse_interval(body.get("drop"))
    body["patterns"], body["points"] = (tuple(map(_parse_effect, body[key])) for key in ("patterns", "points"))
    body["before"], body["after"] = (tuple(map(_parse_layer, body[key])) for key in ("before", "after"))
    body["fates"] = tuple(EdgeFusion(**fate) for fate in body["fates"])
    if minimal is not None:
        intervals = {key: _parse_interval(minimal[key]) for key in ("ratio", "speedup")}
        body["minimal"] = MinimalPlacement(**{**minimal, **intervals, "points": tuple(minimal["points"])})
    return AttributionReport(**body)


def _parse_effect(body: dict[str, Any]) -> PartEffect:
    return PartEffect(**{**body, **{key: _parse_interval(body.get(key)) for key in ("ratio", "alone", "drop")}})


def _parse_interval(body: dict[str, float | None] | None) -> Interval | None:
    if body is None:
        return None
    return Interval(**{key: math.nan if value is None else value for key, value in body.items()})


def _parse_layer(body: dict[str, Any]) -> Layer:
    return Layer(**{**body, "origin": tuple(body["origin"])})
