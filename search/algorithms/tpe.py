"""Tree-structured Parzen estimator, by Optuna (Bergstra et al. 2011; Watanabe 2023, arXiv 2304.11127)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.api import Observation, Placement, Space, check_range
from search.archive import Archive, Entry
from search.moves import nearby

__all__ = ["TPESearcher"]

DRAWS = 4


class TPESearcher:
    """Optuna's TPE sampler over one categorical parameter per dimension, in an in-memory study.

    Everything told becomes a finished trial, the common seeds as well; a violation becomes Optuna's
    constraint (feasible trials rank before all others); a failure becomes a pruned trial, which TPE
    ranks behind every trial with a value, so that it learns to stay away and no value is made up.
    Proposals without an outcome count as bad ones (constant liar), so that a batch spreads. A
    placement that is known already is drawn again, then varied by few flips until it is new. TPE
    goes by the order of the objectives alone, so that latency and log latency are the same to it.

    Args:
        space: What to search.
        seed: Fixes all draws.
        n_startup_trials: Draw at random until so many trials have a value, those of the seeds included.
        n_ei_candidates: Candidates drawn from the good density for one proposal.
        multivariate: One joint density over all dimensions; False: each dimension on its own. (Optuna's
            `group` has no parameter here: all dimensions always occur together, so it changes nothing.)
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        n_startup_trials: int = 5,
        n_ei_candidates: int = 24,
        multivariate: bool = True,
    ) -> None:
        check_range("n_startup_trials", n_startup_trials, 0)
        check_range("n_ei_candidates", n_ei_candidates, 1)
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._settings: dict[str, Any] = {
            "n_startup_trials": n_startup_trials,
            "n_ei_candidates": n_ei_candidates,
            "multivariate": multivariate,
        }
        self._distributions: dict[str, BaseDistribution] = {
            dimension.name: CategoricalDistribution(tuple(range(len(dimension.choices))))
            for dimension in space.dimensions
        }
        self._archive = Archive()
        self._running: dict[str, int] = {}
        self._study = self._new_study()

    def ask(self, n: int) -> Sequence[Placement]:
        asked: list[Placement] = []
        while len(asked) < n and (placement := self._fresh()) is not None:
            self._archive.ask(self._space.digest(placement))
            asked.append(placement)
        return asked

    def tell(self, observation: Observation) -> None:
        digest = observation.digest
        before = self._archive.get(digest) or self._archive.failures.get(digest)
        self._archive.tell(observation)
        now = self._archive.get(digest) or self._archive.failures[digest]
        running = self._running.pop(digest, None)
        if running is not None:
            self._study.tell(running, state=TrialState.FAIL)
        if before is None:
            self._study.add_trial(self._finished(now))
        elif now != before:
            self._rebuild()

    def _fresh(self) -> Placement | None:
        """A new placement, noted in the study as running."""
        placement = self._space.float_placement()
        for _ in range(DRAWS):
            trial = self._study.ask(self._distributions)
            placement = self._placement(trial.params)
            digest = self._space.digest(placement)
            if digest not in self._archive:
                self._running[digest] = trial.number
                return placement
            self._study.tell(trial, state=TrialState.FAIL)
        nudged = nearby(placement, self._space, self._rng, self._archive)
        if nudged is not None:
            self._run(nudged)
        return nudged

    def _run(self, placement: Placement) -> None:
        self._study.add_trial(self._trial(placement, state=TrialState.RUNNING))
        self._running[self._space.digest(placement)] = len(self._study.get_trials(deepcopy=False)) - 1

    def _finished(self, told: Entry | Observation) -> FrozenTrial:
        if isinstance(told, Observation):
            return self._trial(told.placement, state=TrialState.PRUNED)
        score = told.score
        return self._trial(told.placement, value=score.objective, constraints={"violation": score.violation})

    def _trial(self, placement: Placement, **facts: Any) -> FrozenTrial:
        params = dict(zip(self._distributions, placement.choices, strict=True))
        return create_trial(params=params, distributions=self._distributions, **facts)

    def _rebuild(self) -> None:
        """Optuna never changes a finished trial, so a score that a new tell moved needs a new study."""
        running = {trial.number: trial for trial in self._study.get_trials(deepcopy=False)}
        asked = [self._placement(running[number].params) for number in self._running.values()]
        self._study = self._new_study()
        self._running.clear()
        for told in (*self._archive, *self._archive.failures.values()):
            self._study.add_trial(self._finished(told))
        for placement in asked:
            self._run(placement)

    def _placement(self, params: Mapping[str, Any]) -> Placement:
        return Placement(tuple(params[name] for name in self._distributions))

    def _new_study(self) -> optuna.Study:
        sampler = TPESampler(seed=int(self._rng.integers(2**31)), constant_liar=True, **self._settings)
        verbosity = optuna.logging.get_verbosity()
        # Optuna announces each study on stderr and offers no switch but this global one.
        optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
        try:
            return optuna.create_study(sampler=sampler)
        finally:
            optuna.logging.set_verbosity(verbosity)
