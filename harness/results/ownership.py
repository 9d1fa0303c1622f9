"""Ownership of a results folder: it belongs to one experiment, and to one process at a time."""

from __future__ import annotations

import fcntl
import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.files import json_equal, next_backup_path, write_text
from harness.base.paths import describe_process, keeps_host
from harness.config.experiment import Experiment, load_experiment, to_yaml
from harness.results.journal import CHANGED_RUN_ADVICE, FingerprintMismatch
from harness.results.manifest import EXPERIMENT_FILE, reopen_results, require_unchanged_experiment

LOCK_FILE = ".lock"
INPUTS_FOLDER = "inputs"
"""Folder of models and arrays that a Python program passed; written before the run."""
_IGNORED_FILES = {LOCK_FILE, "experiment.tmp", INPUTS_FOLDER}
#: Keys that change no result; fingerprints of searches have the keys of the executor that matter.
_CHANGEABLE_KEYS: Any = {"description": True, "executor": True, "models": {"__all__": {"expect"}}}
#: Lists whose entries have tasks, journals or rows of their own, so that one more at the end changes no result.
_EXTENDABLE_LISTS = frozenset({"models", "backends", "precision", "searchers", "seeds", "baselines"})
logger = logging.getLogger(__name__)


@contextmanager
def owned_results_dir(out: Path, experiment: Experiment, accept_changes: bool = False) -> Iterator[str]:
    """Create or lock the results folder of an experiment.

    An experiment that only adds work, such as a larger budget, owns the results of the previous version.

    Args:
        accept_changes: Take the folder over from another version of the experiment, whose file is archived.

    Yields:
        Description of the added work, and the file that is missing or damaged and is written again; or "".
    """
    text = to_yaml(experiment)
    is_recorded, solved = _require_own_dir(out, text)
    with exclusive_lock(out, "running this experiment"):
        file, added = out / EXPERIMENT_FILE, ""
        if is_recorded or not file.exists():
            write_text(file, text)
        else:
            changed, added = _compare_experiments(file, experiment, accept_changes)
            if changed:
                reopen_results(out)  # not before: a refused experiment must leave the digests of the finished files
                write_text(next_backup_path(file), file.read_text(encoding="utf-8"))  # a copy: it is never missing
                write_text(file, text)
        reopen_results(out, [file])
        yield "; ".join(filter(None, (solved, added)))


def check_ownership(out: Path, experiment: Experiment, accept_changes: bool = False) -> str:
    """Return what `owned_results_dir` would yield, or raise its error, without writing or locking anything."""
    file = out / EXPERIMENT_FILE
    place = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{out}: cannot be written, because {place} has no write permission; use another --out")
    is_recorded, solved = _require_own_dir(out, to_yaml(experiment))
    if is_recorded or not file.exists():
        return solved
    return _compare_experiments(file, experiment, accept_changes)[1]


@contextmanager
def exclusive_lock(folder: Path, action: str) -> Iterator[None]:
    """Lock a folder, created if missing; the kernel releases the lock when this process ends.

    `flock` is used directly, because lock packages fall back to lock files, which a killed process leaves behind.

    Args:
        action: Action of the process, for the message to another one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("ab+", buffering=0)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); use another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a full disk is reported when results are written
                lock.truncate(0)
                lock.write(describe_process(keeps_host()).encode())
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read(1000).decode(errors="replace").strip() or "unknown"
            raise UserError(f"{folder}: process {owner} is {action}; wait for it, or use another --out") from error
        except OSError as error:
            logger.warning("%s: this file system has no locks (%s); do not start a second run here", folder, error)
        yield


def _require_own_dir(out: Path, text: str) -> tuple[bool, str]:
    """Check that a folder may be used; return what `require_unchanged_experiment` returns."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, not a folder; use another --out")
    is_recorded, solved = require_unchanged_experiment(out, text)
    owned = is_recorded or not out.exists() or (out / EXPERIMENT_FILE).exists()
    if not owned and any(entry.name not in _IGNORED_FILES for entry in out.iterdir()):
        raise UserError(f"{out}: is not empty and holds no experiment; use another --out")
    return is_recorded, solved


def _compare_experiments(file: Path, experiment: Experiment, accept_changes: bool) -> tuple[list[str], str]:
    """Return the keys that differ from the stored experiment, and the added work; "" if existing work changed."""
    try:
        existing = load_experiment(file)  # keys that are newer than the results get their defaults
    except UserError as error:
        raise UserError(f"{error}; the owner of these results is unknown: use another --out") from error
    before, now = (each.model_dump(mode="json", exclude=_CHANGEABLE_KEYS) for each in (existing, experiment))
    changed = [key for key in now if not json_equal(before[key], now[key])]
    added = [_describe_extension(key, before[key], now[key]) for key in changed]
    if not (accept_changes or all(added)):
        keys = ", ".join(changed)
        raise FingerprintMismatch(
            f"{file.parent}: holds results of another experiment (different: {keys}); {CHANGED_RUN_ADVICE}"
        )
    return changed, "; ".join(added) if all(added) else ""


def _describe_extension(key: str, old: Any, new: Any) -> str:
    """Return the work that a key adds, or "" if it changes existing work."""

    def join(values: Iterable[Any]) -> str:
        return ", ".join(map(str, values))

    if key in _EXTENDABLE_LISTS and json_equal(old, new[: len(old)]):
        entries = new[len(old) :]
        added = (entry.get("label") or entry["use"] if isinstance(entry, dict) else entry for entry in entries)
        return f"{key}: {join(added)} added"
    if key != "budget":
        return ""
    # A budget grows, unless a search may end earlier or budgets were only removed or reordered.
    old_counts, new_counts = old["evaluations"], new["evaluations"]
    if old_counts != new_counts and not (max(new_counts) > max(old_counts) or set(new_counts) > set(old_counts)):
        return ""
    grown = [f"budget {join(old_counts)} -> {join(new_counts)}"] if old_counts != new_counts else []
    for limit in ("minutes", "task_minutes"):
        before, after = old[limit] or math.inf, new[limit] or math.inf
        if after < before:
            return ""
        if after != before:
            grown.append(f"{limit} {before:g} -> {'any' if math.isinf(after) else f'{after:g}'}")
    return ", ".join(grown)
