"""Keys that every `data` mapping may have: selection of samples, and of one half of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.base.errors import MAX_COUNT, UserError

SUBSET_KEYS = ("start", "count", "half", "every")
HALF_NAMES = ("search", "report")


def half_of(name: str) -> str:
    """Return the half ("search" or "report") that a sample belongs to, by a hash of its name."""
    return HALF_NAMES[hashlib.sha256(name.encode()).digest()[0] % 2]


def select_rows(spec: Mapping[str, Any], names: Sequence[str], what: str) -> Sequence[int]:
    """Return the indices of the samples that the keys `start`, `count`, `half` and `every` select, ascending.

    Args:
        spec: A data mapping; `half` is "search" or "report" (see `half_of`), and `every` n takes each n-th of the
            samples that the other keys select.
        names: Names of all samples.
        what: Name of the data for messages.

    Raises:
        UserError: A key has an invalid value, or no sample is selected.
    """
    total, start = len(names), read_int_key(spec, "start", 0)
    count = total - start if spec.get("count") is None else read_int_key(spec, "count", 1)
    if start >= total or start + count > total:
        asked = f"start {start}" + (f" and count {count}" if spec.get("count") is not None else "")
        raise UserError(f"data: {asked} reach beyond the end: {what} has {total}")
    chosen: Sequence[int] = range(start, start + count)
    half = spec.get("half")
    if half is not None:
        if half not in HALF_NAMES:
            raise UserError(f"data.half: one of {', '.join(HALF_NAMES)}, but got {half!r}")
        chosen = [i for i in chosen if half_of(names[i]) == half]
        if not chosen:
            raise UserError(f"data.half: none of the {count} samples is of the half {half!r}; use more of them")
    return chosen[:: read_int_key(spec, "every", 1)]


def read_int_key(spec: Mapping[str, Any], key: str, least: int) -> int:
    """Return an integer key of a data mapping.

    Args:
        spec: A data mapping.
        key: Name of the key.
        least: Smallest allowed value, and the default.

    Raises:
        UserError: The value is no integer, too small or too large.
    """
    value = spec.get(key, least)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"data.{key}: a whole number from {least}, but got {value!r}")
    if value > MAX_COUNT:
        raise UserError(f"data.{key}: at most {MAX_COUNT:,}, but got {value}")
    return value


def read_text_key(spec: Mapping[str, Any], key: str) -> str:
    """Return a required text key of a data mapping; raise `UserError` if it is missing, "" or no text."""
    value = spec.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"data.{key}: this key is required, but got {value!r}")
    return value


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Return a mapping as JSON with sorted keys, for digests."""
    return json.dumps(value, sort_keys=True, default=str).encode()
