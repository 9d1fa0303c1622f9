"""Nested initial placements from measured sensitivities, most rewarding units first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records import SCHEMA_VERSION
from search.space import Placement, Space

__all__ = ["ScreenedUnit", "nested_prior_placements", "read_prior"]

MAX_PRIOR_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenedUnit:
    """Dimensions that gained latency at a precision, by name."""

    dimensions: tuple[str, ...]
    precision: str


def read_prior(path: Path) -> tuple[ScreenedUnit, ...]:
    """Return the screened units that gained on their own, best gain per noise first.

    Raises:
        UserError: No file of `qdq sensitivity`, or a damaged one.
    """
    try:
        if path.stat().st_size > MAX_PRIOR_BYTES:
            raise ValueError(f"it has more than {MAX_PRIOR_BYTES} bytes")
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict) or (body.get("kind"), body.get("schema")) != ("sensitivity", SCHEMA_VERSION):
            raise ValueError(f"no sensitivities of schema {SCHEMA_VERSION}")
        return tuple(_units_with_gain(body["units"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a file of 'qdq sensitivity' that can be read: {error}") from error


def _units_with_gain(units: Sequence[Any]) -> Iterator[ScreenedUnit]:
    for unit in units:
        gain_us = unit["alone"].get("gain_us")
        if isinstance(gain_us, int | float) and gain_us > 0:
            yield ScreenedUnit(dimensions=tuple(map(str, unit["dimensions"])), precision=str(unit["precision"]))


def nested_prior_placements(units: Sequence[ScreenedUnit], space: Space, count: int) -> list[Placement]:
    """Return at most `count` different placements: growing shares of the units in the space, best first, on float."""
    places = {dimension.name: index for index, dimension in enumerate(space.dimensions)}
    known = [unit for unit in units if any(name in places for name in unit.dimensions)]
    found: dict[str, Placement] = {}
    for step in range(count if known else 0):
        choices = [0] * len(space)
        for unit in known[: math.ceil(len(known) * (step + 1) / count)]:
            for index in (places[name] for name in unit.dimensions if name in places):
                offered = space.dimensions[index].choices
                if not choices[index] and unit.precision in offered:
                    choices[index] = offered.index(unit.precision)
        placement = Placement(tuple(choices))
        found.setdefault(space.digest(placement), placement)
    return list(found.values())
