"""Copy of all trials of a run as an Optuna journal, for optuna-dashboard.

The search does not use the copy, and continues if it cannot be written. A trial has one parameter per pattern, the
number of its quantized insertion points, because a placement has hundreds of points.

This module writes the lines of `optuna.storages.JournalStorage` (Optuna 5.0, storages/journal/_storage.py) itself. The
classes of Optuna take half a second to import, a millisecond for each trial, and read the trials of all other searches
at the start of each. The tests read the file with Optuna.
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

from harness.base.errors import UserError
from harness.base.files import append_line, parse_json, truncate_partial_line
from harness.base.statistics import median_ci
from harness.measure.records import Measured
from harness.results.search_log import Goal
from harness.run.search.loop import TrialEvent
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
    """Return a function that writes each new trial of a search to an Optuna study.

    Args:
        path: Optuna journal, which all searches of a task share.
        name: Name of the study: task, searcher and seed.
        goal: Objective of the search, with the bound that trials may violate.
        fresh: Whether the search starts from the beginning, so that an older study of this name is replaced.

    Returns:
        Function to call with every trial in order, including those of a resumed search; it never raises.
    """
    try:
        return _OptunaMirror(path, name, space, goal, fresh).watch
    except (UserError, OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s: no live view of %s: %s", path, name, error)
        return lambda _: None


class _OptunaMirror:
    """Study of one search in the journal; it is created if it is missing."""

    def __init__(self, path: Path, name: str, space: Space, goal: Goal, fresh: bool) -> None:
        self._path, self._name, self._space, self._goal = path, name, space, goal
        with _locked_file(path) as file:
            truncate_partial_line(path)
            names: list[str] = []  # by number, "" for deleted ones
            trials: Counter[int] = Counter()
            with path.open("rb") as lines:
                for raw in lines:
                    if (trial := _TRIAL.match(raw)) is not None:
                        trials[int(trial[1])] += 1
                        continue
                    log = parse_json(raw)
                    if log["op_code"] == _CREATE_STUDY and log["study_name"] not in names:
                        names.append(log["study_name"])
                    elif log["op_code"] == _DELETE_STUDY:
                        names[log["study_id"]] = ""
            if fresh and name in names:
                _append_operation(path, file, _DELETE_STUDY, {"study_id": names.index(name)})
                names[names.index(name)] = ""
            if name not in names:
                _append_operation(path, file, _CREATE_STUDY, {"study_name": name, "directions": [_MINIMIZE]})
                names.append(name)
        self._number, self._written = names.index(name), trials[names.index(name)]
        self._distributions = {
            group: json.dumps(
                {"name": "IntDistribution", "attributes": {"log": False, "step": 1, "low": 0, "high": len(indices)}}
            )
            for group, indices in space.groups.items()
        }
        self._spent = 0
        self._broken = False

    def watch(self, trial: TrialEvent) -> None:
        """Write a trial, unless it is a duplicate or already in the study."""
        if self._broken or trial.evaluations <= self._spent:
            return
        self._spent = trial.evaluations
        if self._spent <= self._written:
            return
        try:
            outcome, now = trial.outcome, datetime.now(UTC).isoformat(timespec="microseconds")
            state, value, limits = _FAIL, None, {}
            facts: dict[str, Any] = {"digest": trial.proposal.digest, "origin": trial.proposal.origin}
            if isinstance(outcome, Measured):
                state, value = _COMPLETE, median_ci(outcome.samples_ms).value
                facts |= {**outcome.metrics, "build_s": outcome.build_s, "stable": outcome.stable}
                if self._goal.metric is not None:
                    limits = {"constraints": [self._goal.violation(outcome.metrics)]}
            else:
                facts |= {"failed": outcome.stage, "reason": outcome.reason}
            fields = {
                "study_id": self._number,
                "datetime_start": now,
                "datetime_complete": now,
                "state": state,
                "value": value,
                "values": None,
                "distributions": self._distributions,
                "params": {
                    group: float(sum(trial.proposal.choices[index] > 0 for index in indices))
                    for group, indices in self._space.groups.items()
                },
                "user_attrs": facts,
                "system_attrs": limits,
                "intermediate_values": {},
            }
            with _locked_file(self._path) as file:
                _append_operation(self._path, file, _CREATE_TRIAL, fields)
        except (UserError, OSError, ValueError, TypeError) as error:
            self._broken = True
            logger.warning("no further live view of %s: %s", self._name, error)


def _append_operation(path: Path, file: FileIO, operation: int, fields: dict[str, Any]) -> None:
    """Append a line without waiting for the disk, which would take 30 ms for each trial."""
    log = {"op_code": operation, "worker_id": "qdq-bench", **fields}
    append_line(file, json.dumps(log, separators=(",", ":")), path, sync=False)


@contextmanager
def _locked_file(path: Path) -> Iterator[FileIO]:
    """Open a file for appending, locked against other writers; the kernel releases the lock of a process that ends."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
