"""Whether what a run depends on is still what it was: shown leaf by leaf where it is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from harness.errors import UserError

__all__ = ["CHANGED_RUN_ADVICE", "FingerprintMismatch", "diff_leaves", "facts_digest", "require_same_fingerprint", "json_equal"]

CHANGED_RUN_ADVICE = "use another --out, or --accept-changes to begin a new section of the table here"

KEYS_ADDED_LATER = frozenset({"data"})
"""Keys that records of before 2026-11-23 lack; those are compared without them."""
MAX_VALUE_CHARS = 100
"""Characters of a value; lists of placements are long."""


class FingerprintMismatch(UserError):
    """What was begun cannot go on as it is now; results of before and after are not to be mixed."""


def diff_leaves(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Each leaf that differs, for instance "backend.version: '2026.3' -> '2026.4'"; absent is None.

    Args:
        there: As it was read back from JSON.
        here: As it is now, through JSON as well, so that a tuple equals the list that it became.
        where: Path of both within the whole.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from diff_leaves(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif not json_equal(old, new):
        yield f"{path}: {_truncate_repr(old)} -> {_truncate_repr(new)}"


def json_equal(one: Any, other: Any) -> bool:
    """Whether two values that JSON can hold are equal; a NaN, wherever it stands, equals itself."""
    return bool(one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def facts_digest(facts: Any) -> str:
    """Of anything that JSON can hold, and of sets: the same in every process."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, Set) else repr(value)

    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=plain).encode()).hexdigest()[:16]


def require_same_fingerprint(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to go on with something else than what was begun.

    Args:
        path: The file that tells what was begun.

    Raises:
        Changed: With each leaf that differs.
    """
    told = {key: value for key, value in here.items() if key not in KEYS_ADDED_LATER or there.get(key) is not None}
    changed = [f"  {line}" for line in diff_leaves(there, json.loads(json.dumps(told)))]
    if changed:
        raise FingerprintMismatch(
            f"{path}: this run was started with something else; results would not be comparable:\n"
            + "\n".join(changed)
            + f"\n{CHANGED_RUN_ADVICE}"
        )


def _truncate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
