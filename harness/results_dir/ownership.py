"""A results folder belongs to one experiment, and to one process at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.results_dir.fingerprint import ADVICE, Changed, same
from harness.config.experiment import Experiment, load_experiment, to_yaml
from harness.results_dir.lock import LOCK, held
from harness.results_dir.artifacts import write_text
from harness.results_dir.archive_previous import free_name

__all__ = ["check_claim", "claimed"]

FILE = "experiment.yaml"
_OURS = {LOCK, "experiment.tmp"}
_FREE = {"description", "executor"}
"""Keys that may change at any time; what matters of the executor is in the fingerprint of a search."""
_LISTS = frozenset({"models", "backends", "precision", "searchers", "seeds", "baselines"})
"""Keys whose entries have cells, journals or rows of their own: one more at the end changes nothing before it."""


@contextmanager
def claimed(out: Path, experiment: Experiment, accept_changes: bool = False) -> Iterator[str]:
    """Hold the results folder for this experiment; made where missing.

    An experiment that only asks for more than before, a larger budget for instance, is still the same one.

    Args:
        accept_changes: Take the folder over from another version of the experiment, whose file is kept beside.

    Yields:
        What it asks for that was not asked for before, "" where nothing.

    Raises:
        UserError: Another process is at work there, another experiment's results are there, or it cannot be written.
    """
    _refuse_foreign(out)
    with held(out, "running this experiment"):
        file = out / FILE
        if not file.exists():
            write_text(file, to_yaml(experiment))
            yield ""
            return
        changed, grown = _changes(file, experiment, accept_changes)
        if changed:
            write_text(free_name(file), file.read_text(encoding="utf-8"))  # a copy: the folder always has its file
            write_text(file, to_yaml(experiment))
        yield grown


def check_claim(out: Path, experiment: Experiment, accept_changes: bool = False) -> str:
    """What `claimed` would say of whose results are in a folder; nothing is written, and nobody is kept out.

    Raises:
        UserError: It would refuse the folder.
    """
    _refuse_foreign(out)
    return _changes(out / FILE, experiment, accept_changes)[1] if (out / FILE).exists() else ""


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, not a folder; use another --out")
    if out.exists() and not (out / FILE).exists() and any(entry.name not in _OURS for entry in out.iterdir()):
        raise UserError(f"{out}: is not empty and holds no experiment; use another --out")


def _changes(file: Path, experiment: Experiment, accept_changes: bool) -> tuple[list[str], str]:
    """The keys that differ from those of the folder, and what they ask for besides, "" where not for that alone."""
    try:
        there = load_experiment(file)  # so that a key which is newer than these results has its default there
    except UserError as error:
        raise UserError(f"{error}; nobody knows whose results these are: use another --out") from error
    before, now = (each.model_dump(mode="json", exclude=_FREE) for each in (there, experiment))
    changed = [key for key in now if not same(before[key], now[key])]
    grown = [_growth(key, before[key], now[key]) for key in changed]
    if not (accept_changes or all(grown)):
        raise Changed(f"{file.parent}: holds results of another experiment (different: {', '.join(changed)}); {ADVICE}")
    return changed, "; ".join(grown) if all(grown) else ""


def _growth(key: str, there: Any, here: Any) -> str:
    """What a key asks for besides what it asked for before; "" where it asks for something else."""
    if key == "budget":
        return _larger(there, here)
    if key not in _LISTS or not same(there, here[: len(there)]):
        return ""
    added = (entry.get("label") or entry["use"] if isinstance(entry, dict) else entry for entry in here[len(there) :])
    return f"{key}: {_listed(added)} added"


def _larger(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """How a budget has grown; "" where a search may end before it did, or budgets only went or changed places."""
    (old, old_min), (new, new_min) = ((each["evaluations"], each["minutes"]) for each in (there, here))
    if old != new and not (max(new) > max(old) or set(new) > set(old)):
        return ""
    if (new_min or math.inf) < (old_min or math.inf):
        return ""
    evaluations = f"budget {_listed(old)} -> {_listed(new)}" if old != new else ""
    minutes = f"minutes {old_min:g} -> {f'{new_min:g}' if new_min else 'any'}" if old_min != new_min else ""
    return ", ".join(filter(None, (evaluations, minutes)))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
