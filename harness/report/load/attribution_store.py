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
    "Effect",
    "Explanation",
    "Fate",
    "Kept",
    "read_explanation",
    "read_explanations",
    "write_explanation",
]

SCHEMA = 1
MAX_BYTES = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
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

    def gained_us(self, latency_ms: float) -> Interval | None:
        """Microseconds that the part takes off an inference of the whole placement, which lasts so long."""
        if self.ratio is None:
            return None
        low, value, high = (1000 * latency_ms * (x - 1) for x in (self.ratio.low, self.ratio.value, self.ratio.high))
        return Interval(value=value, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
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
class Fate:
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
class Explanation:
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
        drop: Loss of accuracy of the row against the float model, as in `Effect`.
    """

    row: str
    sha256: str
    method: str
    pairs: int
    speedup: Interval
    floor: float
    patterns: tuple[Effect, ...]
    points: tuple[Effect, ...]
    minimal: Kept | None
    before: tuple[Layer, ...] = ()
    after: tuple[Layer, ...] = ()
    fates: tuple[Fate, ...] = ()
    latency_ms: float | None = None
    metric: str | None = None
    drop: Interval | None = None


def _file(cell: Path, row: str) -> Path:
    """Where a row's explanation lies in a cell's folder."""
    return cell / "explain" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', row)}.json"


def write_explanation(found: Explanation, cell: Path) -> Path:
    """Write an explanation into a cell's folder.

    Raises:
        UserError: It cannot be written.
    """
    path = _file(cell, found.row)
    write_json(path, {"schema": SCHEMA, **_finite(asdict(found))})
    return path


def _finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_explanations(cell: Path, rows: Mapping[str, str]) -> Iterator[Explanation]:
    """The explanations in a cell's folder, of rows whose file is still the same.

    Args:
        cell: The cell's folder.
        rows: SHA-256 by row id.

    Raises:
        UserError: One of them is damaged.
    """
    for path in sorted((cell / "explain").glob("*.json")):
        found = read_explanation(path)
        if rows.get(found.row) == found.sha256:
            yield found


def read_explanation(path: Path) -> Explanation:
    """Read what `write_explanation` wrote.

    Raises:
        UserError: It is damaged, or of another schema.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.pop("schema") != SCHEMA:
            raise ValueError(f"not of schema {SCHEMA}")
        return _explanation(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); move it away and explain the row again") from error


def _explanation(body: dict[str, Any]) -> Explanation:
    minimal = body["minimal"]
    body["speedup"], body["drop"] = _interval(body["speedup"]), _interval(body.get("drop"))
    body["patterns"], body["points"] = (tuple(map(_effect, body[key])) for key in ("patterns", "points"))
    body["before"], body["after"] = (tuple(map(_layer, body[key])) for key in ("before", "after"))
    body["fates"] = tuple(Fate(**fate) for fate in body["fates"])
    if minimal is not None:
        intervals = {key: _interval(minimal[key]) for key in ("ratio", "speedup")}
        body["minimal"] = Kept(**{**minimal, **intervals, "points": tuple(minimal["points"])})
    return Explanation(**body)


def _effect(body: dict[str, Any]) -> Effect:
    return Effect(**{**body, **{key: _interval(body.get(key)) for key in ("ratio", "alone", "drop")}})


def _interval(body: dict[str, float | None] | None) -> Interval | None:
    if body is None:
        return None
    return Interval(**{key: math.nan if value is None else value for key, value in body.items()})


def _layer(body: dict[str, Any]) -> Layer:
    return Layer(**{**body, "origin": tuple(body["origin"])})
