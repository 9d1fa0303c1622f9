"""Whether what a run depends on is still what it was: shown leaf by leaf where it is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from harness.errors import UserError

__all__ = ["ADVICE", "Changed", "changes", "facts_digest", "refuse_changes", "same"]

ADVICE = "use another --out, or --accept-changes to begin a new section of the table here"

ADDED = frozenset({"data"})
"""Keys that records of before 2026-11-23 lack; those are compared without them."""
SHOWN = 100
"""Characters of a value; lists of placements are long."""


class Changed(UserError):
    """What was begun cannot go on as it is now; results of before and after are not to be mixed."""


def changes(there: Any, here: Any, where: str = "") -> Iterator[str]:
    """Each leaf that differs, for instance "backend.version: '2026.3' -> '2026.4'"; absent is None.

    Args:
        there: As it was read back from JSON.
        here: As it is now, through JSON as well, so that a tuple equals the list that it became.
        where: Path of both within the whole.
    """
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in sorted({*there, *here}):
            yield from changes(there.get(key), here.get(key), f"{where}.{key}" if where else str(key))
    elif not same(there, here):
        yield f"{where}: {_short(there)} -> {_short(here)}"


def same(one: Any, other: Any) -> bool:
    """Whether two values that JSON can hold are equal; a NaN, wherever it stands, equals itself."""
    return bool(one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def facts_digest(facts: Any) -> str:
    """Of anything that JSON can hold, and of sets: the same in every process."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, Set) else repr(value)

    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=plain).encode()).hexdigest()[:16]


def refuse_changes(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to go on with something else than what was begun.

    Args:
        path: The file that tells what was begun.

    Raises:
        Changed: With each leaf that differs.
    """
    told = {key: value for key, value in here.items() if key not in ADDED or there.get(key) is not None}
    changed = [f"  {line}" for line in changes(there, json.loads(json.dumps(told)))]
    if changed:
        raise Changed(
            f"{path}: this run was started with something else; results would not be comparable:\n"
            + "\n".join(changed)
            + f"\n{ADVICE}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
