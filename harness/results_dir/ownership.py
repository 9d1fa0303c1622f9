"""A results folder belongs to one experiment, and to one process at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.results_dir.fingerprint import CHANGED_RUN_ADVICE, FingerprintMismatch, json_equal
from harness.config.experiment import Experiment, load_experiment, to_yaml
from harness.results_dir.lock import LOCK_FILE, exclusive_lock
from harness.results_dir.artifacts import write_text
from harness.results_dir.archive_previous import next_backup_path

__all__ = ["check_ownership", "owned_results_dir"]

EXPERIMENT_FILE = "experiment.yaml"
_IGNORED_FILES = {LOCK_FILE, "experiment.tmp"}
_CHANGEABLE_KEYS = {"description", "executor"}
"""Keys that may change at any time; what matters of the executor is in the fingerprint of a search."""
_EXTENDABLE_LISTS = frozenset({"models", "backends", "precision", "searchers", "seeds", "baselines"})
"""Keys whose entries have cells, journals or rows of their own: one more at the end changes nothing before it."""


@contextmanager
def owned_results_dir(out: Path, experiment: Experiment, accept_changes: bool = False) -> Iterator[str]:
    """Hold the results folder for this experiment; made where missing.

    An experiment that only asks for more than before, a larger budget for instance, is still the same one.

    Args:
        accept_changes: Take the folder over from another version of the experiment, whose file is kept beside.

    Yields:
        What it asks for that was not asked for before, "" where nothing.

    Raises:
        UserError: Another process is at work there, another experiment's results are there, or it cannot be written.
    """
    _require_own_dir(out)
    with exclusive_lock(out, "running this experiment"):
        file = out / EXPERIMENT_FILE
        if not file.exists():
            write_text(file, to_yaml(experiment))
            yield ""
            return
        changed, grown = _compare_experiments(file, experiment, accept_changes)
        if changed:
            write_text(next_backup_path(file), file.read_text(encoding="utf-8"))  # a copy: the folder always has its file
            write_text(file, to_yaml(experiment))
        yield grown


def check_ownership(out: Path, experiment: Experiment, accept_changes: bool = False) -> str:
    """What `claimed` would say of whose results are in a folder; nothing is written, and nobody is kept out.

    Raises:
        UserError: It would refuse the folder.
    """
    _require_own_dir(out)
    return _compare_experiments(out / EXPERIMENT_FILE, experiment, accept_changes)[1] if (out / EXPERIMENT_FILE).exists() else ""


def _require_own_dir(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, not a folder; use another --out")
    if out.exists() and not (out / EXPERIMENT_FILE).exists() and any(entry.name not in _IGNORED_FILES for entry in out.iterdir()):
        raise UserError(f"{out}: is not empty and holds no experiment; use another --out")


def _compare_experiments(file: Path, experiment: Experiment, accept_changes: bool) -> tuple[list[str], str]:
    """The keys that differ from those of the folder, and what they ask for besides, "" where not for that alone."""
    try:
        there = load_experiment(file)  # so that a key which is newer than these results has its default there
    except UserError as error:
        raise UserError(f"{error}; nobody knows whose results these are: use another --out") from error
    before, now = (each.model_dump(mode="json", exclude=_CHANGEABLE_KEYS) for each in (there, experiment))
    changed = [key for key in now if not json_equal(before[key], now[key])]
    grown = [_describe_extension(key, before[key], now[key]) for key in changed]
    if not (accept_changes or all(grown)):
        raise FingerprintMismatch(f"{file.parent}: holds results of another experiment (different: {', '.join(changed)}); {CHANGED_RUN_ADVICE}")
    return changed, "; ".join(grown) if all(grown) else ""


def _describe_extension(key: str, there: Any, here: Any) -> str:
    """What a key asks for besides what it asked for before; "" where it asks for something else."""
    if key == "budget":
        return _describe_budget_extension(there, here)
    if key not in _EXTENDABLE_LISTS or not json_equal(there, here[: len(there)]):
        return ""
    added = (entry.get("label") or entry["use"] if isinstance(entry, dict) else entry for entry in here[len(there) :])
    return f"{key}: {_join(added)} added"


def _describe_budget_extension(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """How a budget has grown; "" where a search may end before it did, or budgets only went or changed places."""
    (old, old_min), (new, new_min) = ((each["evaluations"], each["minutes"]) for each in (there, here))
    if old != new and not (max(new) > max(old) or set(new) > set(old)):
        return ""
    if (new_min or math.inf) < (old_min or math.inf):
        return ""
    evaluations = f"budget {_join(old)} -> {_join(new)}" if old != new else ""
    minutes = f"minutes {old_min:g} -> {f'{new_min:g}' if new_min else 'any'}" if old_min != new_min else ""
    return ", ".join(filter(None, (evaluations, minutes)))


def _join(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
