"""An Optuna study as a searcher: what `tpe` and `optuna` have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from search.api import Failure, Observation, Placement, Score, Space
from search.archive import Archive
from search.moves import random_neighbour

__all__ = ["OptunaStudySearcher"]

MAX_SAMPLER_DRAWS = 4
UNCHECKED_VIOLATION = 1e-12
"""What a constraint that nobody looked at counts as: behind all that hold it, before all that are known to break it."""
FAILURE_VIOLATION = 1e12
"""What the constraint of a failure counts as where there is one: behind everything that has a value."""


class OptunaStudySearcher:
    """Any Optuna sampler over one parameter per dimension, in an in-memory study.

    Everything told becomes a finished trial, the common seeds as well, as if the sampler had proposed it; a
    failure becomes a pruned trial, and no value is made up. From the first violation on, violations are Optuna's
    constraint, and feasible trials rank before all others, those that nobody looked at (`Score.assumed`) next. Several
    objectives make a study of as many. What waits for its outcome is a running trial. A placement that is known already
    is drawn again, then varied by few flips until it is new.

    Args:
        space: What to search.
        seed: Fixes all draws.
        sampler: Makes the sampler from a seed.
        parameter: Makes the parameter of a dimension from its number of choices; its values are 0, 1 and so on.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        sampler: Callable[[int], BaseSampler],
        parameter: Callable[[int], BaseDistribution],
    ) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._sampler = sampler
        self._distributions: dict[str, BaseDistribution] = {
            dimension.name: parameter(len(dimension.choices)) for dimension in space.dimensions
        }
        self._archive = Archive()
        self._form = (1, False)  # of the study: number of objectives, and whether there is a constraint
        self._running: dict[str, Trial] = {}
        self._finished: dict[str, int] = {}
        with _silence_optuna():
            self._study = self._new_study()

    def ask(self, n: int) -> Sequence[Placement]:
        with _silence_optuna():
            return self._archive.ask(n, self._propose, self._space)

    def tell(self, observation: Observation) -> None:
        digest = observation.digest
        before = self._archive.get(digest) or self._archive.failures.get(digest)
        self._archive.tell(observation)
        entry = self._archive.get(digest)
        outcome = entry.score if entry else self._archive.failures[digest].outcome
        with _silence_optuna():
            if before is None:
                trial = self._running.pop(digest, None) or self._enqueue(observation.placement)
                self._finish(digest, trial, outcome)
            form = _widen_study_shape(self._form, outcome)
            if form != self._form or (before is not None and (entry or before) != before):
                self._form = form
                self._rebuild()

    def _propose(self) -> Placement | None:
        """A new placement, noted in the study as running."""
        placement = self._space.float_placement()
        for _ in range(MAX_SAMPLER_DRAWS):
            trial = self._study.ask(self._distributions)
            placement = self._placement(trial)
            digest = self._space.digest(placement)
            if digest not in self._archive:
                self._running[digest] = trial
                return placement
            self._study.tell(trial, state=TrialState.FAIL)
        nudged = random_neighbour(placement, self._space, self._rng, self._archive)
        if nudged is not None:
            self._running[self._space.digest(nudged)] = self._enqueue(nudged)
        return nudged

    def _placement(self, trial: Trial) -> Placement:
        params = trial.params  # a copy at each access
        return Placement(tuple(params[name] for name in self._distributions))

    def _enqueue(self, placement: Placement) -> Trial:
        """A running trial of a placement that the sampler did not propose."""
        self._study.enqueue_trial(dict(zip(self._distributions, placement.choices, strict=True)))
        return self._study.ask(self._distributions)

    def _finish(self, digest: str, trial: Trial, outcome: Score | Failure) -> None:
        self._finished[digest] = trial.number
        for name, violation in self._constraints(outcome).items():
            trial.set_constraint(name, violation)
        if isinstance(outcome, Failure):
            self._study.tell(trial, state=TrialState.PRUNED)
        elif len(outcome.values) != self._form[0]:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, outcome.values)

    def _constraints(self, outcome: Score | Failure) -> dict[str, float]:
        """Nothing while no violation was told: a sampler that models constraints would take its time over it.

        Optuna ranks trials that break a constraint by that alone, so those that nobody looked at have theirs in the
        order of their objectives.
        """
        if not self._form[1]:
            return {}
        if isinstance(outcome, Failure):
            return {"violation": FAILURE_VIOLATION}
        assumed = UNCHECKED_VIOLATION * (1.0 + max(0.0, outcome.objective)) * outcome.assumed
        return {"violation": max(outcome.violation, assumed)}

    def _rebuild(self) -> None:
        """Optuna never changes a finished trial, so a score that a new tell moved needs a new study."""
        trials = self._study.get_trials(deepcopy=False)
        finished, waiting = self._finished, self._running
        self._study, self._finished, self._running = self._new_study(), {}, {}
        for digest, number in finished.items():
            self._finished[digest] = len(self._finished)
            self._study.add_trial(self._updated_trial(trials[number], digest))
        for digest, trial in waiting.items():
            self._running[digest] = self._enqueue(self._placement(trial))

    def _updated_trial(self, trial: FrozenTrial, digest: str) -> FrozenTrial:
        """A finished trial with the score that its placement has now, and what the sampler noted about it."""
        entry = self._archive.get(digest)
        notes = {key: value for key, value in trial.system_attrs.items() if not key.startswith("constraints")}
        same: dict[str, Any] = {"params": trial.params, "distributions": self._distributions, "system_attrs": notes}
        if entry is None:
            failed = self._constraints(self._archive.failures[digest].outcome)
            return create_trial(state=TrialState.PRUNED, constraints=failed, **same)
        if len(entry.score.values) != self._form[0]:
            return create_trial(state=TrialState.FAIL, **same)
        return create_trial(values=entry.score.values, constraints=self._constraints(entry.score), **same)

    def _new_study(self) -> optuna.Study:
        sampler = self._sampler(int(self._rng.integers(2**31)))
        return optuna.create_study(sampler=sampler, directions=["minimize"] * self._form[0])


def _widen_study_shape(form: tuple[int, bool], outcome: Score | Failure) -> tuple[int, bool]:
    """Number of objectives, and whether there is a constraint, after one more outcome."""
    if isinstance(outcome, Failure):
        return form
    return max(form[0], len(outcome.values)), form[1] or outcome.violation > 0 or outcome.assumed


@contextmanager
def _silence_optuna() -> Iterator[None]:
    """Optuna announces each study on stderr, and offers no switch but this global one; so does its sampling."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
