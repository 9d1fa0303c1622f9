"""A run as it goes, for optuna-dashboard: every trial of every search in an Optuna journal, whatever the searcher.

It is a copy for people to look at: nothing is read back from it, and where it cannot be written the search goes on. A
trial's parameters are how many insertion points of each pattern are quantized: a placement has hundreds of points, and
no plot would be legible with a parameter for each.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from harness.measure.stats import median_ci
from harness.records import Measured
from harness.run.engine import Trial
from harness.run.goal import Goal
from harness.run.journal import cut_torn_line
from search.space import Space

__all__ = ["LIVE", "live_study"]

LIVE = "optuna.journal"
"""Name in a cell's folder: Optuna reads such a file from its beginning whenever a study in it is opened."""
logger = logging.getLogger(__name__)


def live_study(path: Path, name: str, space: Space, goal: Goal, *, fresh: bool) -> Callable[[Trial], None]:
    """Something that writes each new trial of a search into a study.

    Args:
        path: The Optuna journal; several searches share it.
        name: Of the study: cell, searcher and seed.
        space: What the search proposes from.
        goal: Says by how much a trial breaks the bound.
        fresh: The search begins: a study of this name is left over from earlier results and is replaced.

    Returns:
        To be called with every trial in order, those of a resumed search too; never raises.
    """
    try:
        return _Study(path, name, space, goal, fresh).watch
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning("%s: no live view of %s: %s", path, name, error)
        return lambda _: None


class _Study:
    def __init__(self, path: Path, name: str, space: Space, goal: Goal, fresh: bool) -> None:
        import optuna

        self._space, self._goal, self._name = space, goal, name
        self._distributions: dict[str, Any] = {
            group: optuna.distributions.IntDistribution(0, len(indices)) for group, indices in space.groups.items()
        }
        with _held(path):
            cut_torn_line(path)
        with _quiet():
            storage = optuna.storages.JournalStorage(_backend(path))
            if fresh and name in optuna.get_all_study_names(storage):
                optuna.delete_study(study_name=name, storage=storage)
            self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            self._written = len(self._study.get_trials(deepcopy=False))
        self._spent = 0
        self._broken = False

    def watch(self, trial: Trial) -> None:
        """Write a trial, unless it cost nothing or stands there already."""
        if self._broken or trial.evaluations <= self._spent:
            return
        self._spent = trial.evaluations
        if self._spent <= self._written:
            return
        try:
            with _quiet():
                self._study.add_trial(self._trial(trial))
        except (OSError, ValueError, RuntimeError) as error:
            self._broken = True
            logger.warning("no further live view of %s: %s", self._name, error)

    def _trial(self, trial: Trial) -> Any:
        from optuna.trial import TrialState, create_trial

        params = {
            group: sum(trial.asked.choices[index] > 0 for index in indices)
            for group, indices in self._space.groups.items()
        }
        outcome, limits = trial.outcome, {}
        facts: dict[str, Any] = {"digest": trial.asked.digest, "origin": trial.asked.origin}
        if not isinstance(outcome, Measured):
            facts |= {"failed": outcome.stage, "reason": outcome.reason}
            state, value = TrialState.FAIL, None
        else:
            facts |= {**outcome.metrics, "build_s": outcome.build_s, "stable": outcome.stable}
            state, value = TrialState.COMPLETE, median_ci(outcome.samples_ms).value
            if self._goal.metric is not None:
                limits = {"constraints": [self._goal.violation(outcome.metrics)]}
        return create_trial(
            state=state,
            value=value,
            params=params,
            distributions=self._distributions,
            user_attrs=facts,
            system_attrs=limits,
        )


def _backend(path: Path) -> Any:
    """Optuna's file, without its wait for the disk: 30 ms a trial that a copy need not cost."""
    from optuna.storages.journal import JournalFileBackend

    class _Backend(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with _held(path) as file:
                file.write("".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs).encode())

    return _Backend(str(path))


@contextmanager
def _held(path: Path) -> Iterator[FileIO]:
    """The file, for one writer at a time; the kernel lets go of it when a process ends, however it ends."""
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna announces every study on standard error."""
    root = logging.getLogger("optuna")
    level = root.level
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.setLevel(level)
