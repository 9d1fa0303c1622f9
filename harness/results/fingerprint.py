"""Comparison of the inputs of a run with those that it was started with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.files import diff_leaves, read_json

CHANGED_RUN_ADVICE = "use another --out, or --accept-changes to archive these results and start over"
KEYS_ADDED_LATER = frozenset({"data"})  # missing in records from before 2026-11-23, and ignored for those


class FingerprintMismatch(UserError):
    """The inputs of a run have changed, so its results would not be comparable with the existing ones."""


def require_same_fingerprint(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise `FingerprintMismatch`, with each leaf that differs, if a run has other inputs than at its start."""
    compared = {key: value for key, value in new.items() if key not in KEYS_ADDED_LATER or old.get(key) is not None}
    reason = changed_data(old, compared)
    lines = (
        reason if line.startswith("data.") else line for line in diff_leaves(old, json.loads(json.dumps(compared)))
    )
    changed = [f"  {line}" for line in dict.fromkeys(lines)]
    if changed:
        raise FingerprintMismatch(
            f"{path}: this run was started with something else; results would not be comparable:\n"
            + "\n".join(changed)
            + f"\n{CHANGED_RUN_ADVICE}"
        )


def changed_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return that the evaluator has other data than at the start of a run, with their files; "" if it has the same.

    Args:
        old: Recorded facts of a task, which have digests by the key `data`.
        new: Facts now, and `evaluator`, its entry in the experiment.
    """
    before, now = old.get("data") or {}, new.get("data") or {}
    if all(before.get(name, digest) == digest for name, digest in now.items()):
        return ""
    data = ((new.get("evaluator") or {}).get("params") or {}).get("data")
    files = [data[key] for key in ("path", "images", "labels") if data.get(key)] if isinstance(data, Mapping) else []
    named = f" ({', '.join(map(str, files))})" if files else ""
    return f"the data of the evaluator changed{named}, or its code or preprocessing"


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
