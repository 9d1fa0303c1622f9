"""Comparison of the inputs of a run with those that it was started with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.results_dir.io import read_json

CHANGED_RUN_ADVICE = "use another --out, or --accept-changes to archive these results and start over"
KEYS_ADDED_LATER = frozenset({"data"})  # missing in records from before 2026-11-23, and ignored for those
MAX_VALUE_CHARS = 100


class FingerprintMismatch(UserError):
    """The inputs of a run have changed, so its results would not be comparable with the existing ones."""


def diff_leaves(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield each leaf that differs, for instance "backend.version: '2026.3' -> '2026.4'"; a missing one is None.

    Args:
        old: Value read from JSON.
        new: Value after a round trip through JSON, where tuples become lists.
        path: Key path of both values, the prefix of the results.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from diff_leaves(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif not json_equal(old, new):
        yield f"{path}: {_truncate_repr(old)} -> {_truncate_repr(new)}"


def json_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal, where NaN equals NaN."""
    return bool(one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def facts_digest(facts: Any) -> str:
    """Return a digest (16 hexadecimal digits) of JSON values and sets, the same in every process."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, Set) else repr(value)

    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=plain).encode()).hexdigest()[:16]


def require_same_fingerprint(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise `FingerprintMismatch`, with each leaf that differs, if a run has other inputs than at its start."""
    compared = {key: value for key, value in new.items() if key not in KEYS_ADDED_LATER or old.get(key) is not None}
    changed = [f"  {line}" for line in diff_leaves(old, json.loads(json.dumps(compared)))]
    if changed:
        raise FingerprintMismatch(
            f"{path}: this run was started with something else; results would not be comparable:\n"
            + "\n".join(changed)
            + f"\n{CHANGED_RUN_ADVICE}"
        )


def read_matching_record(path: Path, basis: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a file, or None if there is none yet.

    Args:
        basis: Current decisive facts; raise `FingerprintMismatch` if those of the record differ.
    """
    if not path.exists():
        return None
    record = read_json(path)
    require_same_fingerprint(path, {key: record.get(key) for key in basis}, basis)
    return record


def _truncate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
