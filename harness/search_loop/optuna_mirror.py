"""Copy of a run as an Optuna journal, for optuna-dashboard: every trial of every search.

It is a copy for people to look at: nothing is read back from it but how far it has come, and where it cannot be written
the search continues. A trial's parameters are how many insertion points of each pattern are quantized: a placement has
hundreds of points, and no plot would be legible with a parameter for each.

Lines are written here, in the form of `optuna.storages.JournalStorage` (Optuna 5.0, storages/journal/_storage.py).
Optuna's own classes read every line again and keep an object of each: a millisecond a trial, an import of half a
second, and at the begin of each search all trials of the others. The tests read the file with Optuna.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records import Measured
from harness.results_dir.io import append_line, truncate_partial_line
from harness.search_loop.loop import TrialEvent
from harness.search_loop.objective import Goal
from harness.statistics import median_ci
from search.space import Space

OPTUNA_JOURNAL_NAME = "optuna.journal"
"""Name in a task's folder; one per task, because readers always read the whole file."""
_CREATE_STUDY, _DELETE_STUDY, _CREATE_TRIAL = 0, 1, 4
"""Of Optuna's `JournalOperation`."""
_COMPLETE, _FAIL = 1, 3
"""Of its `TrialState`."""
_MINIMIZE = 1
"""Of its `StudyDirection`."""
_TRIAL = re.compile(rb'\{"op_code":4,"worker_id":"[^"]*","study_id":(\d+),')
logger = logging.getLogger(__name__)


def mirror_to_optuna(path: Path, name: str, space: Space, goal: Goal, *, fresh: bool) -> Callable[[TrialEvent], None]:
    """Return an observer that writes each new trial of a search to an Optuna study.

    Args:
        path: The Optuna journal; several searches share it.
        name: Of the study: task, searcher and seed.
        goal: Says by how much a trial breaks the bound.
        fresh: The search begins: a study of this name is left over from earlier results and is replaced.

    Returns:
        To be called with every trial in order, those of a resumed search too; never raises.
    """
    try:
        return _OptunaMirror(path, name, space, goal, fresh).watch
    except (UserError, OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s: no live view of %s: %s", path, name, error)
        return lambda _: None


def _open_study(path: Path, name: str, fresh: bool) -> tuple[int, int]:
    """Return the number of the study, created if missing, and its number of trials."""
    with _locked_file(path) as file:
        truncate_partial_line(path)
        names, trials = _read_studies(path)
        if fresh and name in names:
            _append_operation(path, file, _DELETE_STUDY, {"study_id": names.index(name)})
            names[names.index(name)] = ""
        if name not in names:
            _append_operation(path, file, _CREATE_STUDY, {"study_name": name, "directions": [_MINIMIZE]})
            names.append(name)
    return names.index(name), trials[names.index(name)]


def _read_studies(path: Path) -> tuple[list[str], Counter[int]]:
    """Return the names of the studies by number, "" for deleted ones, and the number of trials of each."""
    names: list[str] = []
    trials: Counter[int] = Counter()
    with path.open("rb") as file:
        for raw in file:
            if (trial := _TRIAL.match(raw)) is not None:
                trials[int(trial[1])] += 1
                continue
            log = json.loads(raw)
            if log["op_code"] == _CREATE_STUDY and log["study_name"] not in names:
                names.append(log["study_name"])
            elif log["op_code"] == _DELETE_STUDY:
                names[log["study_id"]] = ""
    return names, trials


class _OptunaMirror:
    def __init__(self, path: Path, name: str, space: Space, goal: Goal, fresh: bool) -> None:
        self._path, self._name, self._space, self._goal = path, name, space, goal
        self._number, self._written = _open_study(path, name, fresh)
        self._distributions = {group: _int_distribution_json(len(indices)) for group, indices in space.groups.items()}
        self._spent = 0
        self._broken = False

    def watch(self, trial: TrialEvent) -> None:
        """Write a trial, unless it was a duplicate or is in the study."""
        if self._broken or trial.evaluations <= self._spent:
            return
        self._spent = trial.evaluations
        if self._spent <= self._written:
            return
        try:
            with _locked_file(self._path) as file:
                _append_operation(self._path, file, _CREATE_TRIAL, self._trial_fields(trial))
        except (UserError, OSError, ValueError, TypeError) as error:
            self._broken = True
            logger.warning("no further live view of %s: %s", self._name, error)

    def _trial_fields(self, trial: TrialEvent) -> dict[str, Any]:
        outcome, now = trial.outcome, datetime.now(UTC).isoformat(timespec="microseconds")
        state, value, limits = _FAIL, None, {}
        facts: dict[str, Any] = {"digest": trial.asked.digest, "origin": trial.asked.origin}
        if isinstance(outcome, Measured):
            state, value = _COMPLETE, median_ci(outcome.samples_ms).value
            facts |= {**outcome.metrics, "build_s": outcome.build_s, "stable": outcome.stable}
            if self._goal.metric is not None:
                limits = {"constraints": [self._goal.violation(outcome.metrics)]}
        else:
            facts |= {"failed": outcome.stage, "reason": outcome.reason}
        return {
            "study_id": self._number,
            "datetime_start": now,
            "datetime_complete": now,
            "state": state,
            "value": value,
            "values": None,
            "distributions": self._distributions,
            "params": {
                group: float(sum(trial.asked.choices[index] > 0 for index in indices))
                for group, indices in self._space.groups.items()
            },
            "user_attrs": facts,
            "system_attrs": limits,
            "intermediate_values": {},
        }


def _int_distribution_json(most: int) -> str:
    """Return Optuna's JSON of an `IntDistribution`, which is nested as text."""
    return json.dumps({"name": "IntDistribution", "attributes": {"log": False, "step": 1, "low": 0, "high": most}})


def _append_operation(path: Path, file: FileIO, operation: int, fields: dict[str, Any]) -> None:
    """Write a line without waiting for the disk: 30 ms a trial that a copy need not cost."""
    log = {"op_code": operation, "worker_id": "qdq-bench", **fields}
    append_line(file, json.dumps(log, separators=(",", ":")), path, sync=False)


@contextmanager
def _locked_file(path: Path) -> Iterator[FileIO]:
    """Open the file for one writer at a time; the kernel releases the lock when the process ends."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
