"""Optuna's samplers as searchers: TPE as `tpe`, any other as `optuna` with its name.

TPE: Bergstra et al. 2011, "Algorithms for hyper-parameter optimization"; Watanabe 2023, arXiv 2304.11127.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import Trial, TrialState, create_trial

from search.api import Failure, Observation, Placement, Score, Space, check_range
from search.archive import ArchiveSearcher

MAX_SAMPLER_DRAWS = 4
"""Number of draws for a new placement before a known one is varied."""
BATCH_SETTINGS = {"constant_liar": True, "warn_asynchronous_seeding": False}
"""Settings for samplers that accept them, because proposals come in batches."""
UNCHECKED_VIOLATION = 1e-12
"""Violation of an unchecked constraint, which ranks after all feasible trials and before all violating ones."""
FAILURE_VIOLATION = 1e12
"""Violation of a failure if there is a constraint, so that it ranks after all trials with a value."""


class _OptunaStudySearcher(ArchiveSearcher):
    """Any Optuna sampler over one parameter per dimension, in an in-memory study.

    Every outcome, also of an initial placement, becomes a finished trial, as if the sampler had proposed it. A failure
    becomes a pruned trial without a value. From the first violation on, violations are Optuna's constraint: feasible
    trials rank first, then those with an unchecked constraint (`Score.assumed`). Several objectives make a
    multi-objective study. A pending placement is a running trial. If the sampler proposes a known placement, it is
    asked again up to three times, then the placement is varied by a few flips until it is new.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        sampler: Function that returns the sampler for a seed.
        parameter: Function that returns the distribution of a dimension with a number of choices: 0, 1 and so on.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        sampler: Callable[[int], BaseSampler],
        parameter: Callable[[int], BaseDistribution],
    ) -> None:
        super().__init__(space, seed)
        self._sampler = sampler
        self._distributions: dict[str, BaseDistribution] = {
            dimension.name: parameter(len(dimension.choices)) for dimension in space.dimensions
        }
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
            form = self._form
            if isinstance(outcome, Score):
                is_bounded = form[1] or outcome.violation > 0 or outcome.assumed
                form = max(form[0], len(outcome.values)), is_bounded
            if form != self._form or (before is not None and (entry or before) != before):
                self._form = form
                self._rebuild()

    def _propose(self) -> Placement | None:
        """Return a new placement and register it in the study as a running trial."""
        placement = self._space.float_placement()
        for _ in range(MAX_SAMPLER_DRAWS):
            trial = self._study.ask(self._distributions)
            placement = self._placement(trial)
            if self._is_new(placement):
                self._running[self._space.digest(placement)] = trial
                return placement
            self._study.tell(trial, state=TrialState.FAIL)
        nudged = self._neighbour(placement)
        if nudged is not None:
            self._running[self._space.digest(nudged)] = self._enqueue(nudged)
        return nudged

    def _placement(self, trial: Trial) -> Placement:
        params = trial.params  # a copy at each access
        return Placement(tuple(params[name] for name in self._distributions))

    def _enqueue(self, placement: Placement) -> Trial:
        """Return a running trial of a placement that the sampler did not propose."""
        self._study.enqueue_trial(dict(zip(self._distributions, placement.choices, strict=True)))
        return self._study.ask(self._distributions)

    def _finish(self, digest: str, trial: Trial, outcome: Score | Failure) -> None:
        self._finished[digest] = trial.number
        for name, violation in self._constraints(outcome).items():
            trial.set_constraint(name, violation)
        self._study.tell(trial, *self._result(outcome))

    def _result(self, outcome: Score | Failure) -> tuple[Sequence[float] | None, TrialState]:
        """Return the values and the state of a finished trial; scores with fewer objectives than others count less."""
        if isinstance(outcome, Failure):
            return None, TrialState.PRUNED
        is_complete = len(outcome.values) == self._form[0]
        return (outcome.values, TrialState.COMPLETE) if is_complete else (None, TrialState.FAIL)

    def _constraints(self, outcome: Score | Failure) -> dict[str, float]:
        """Return the constraint values of a trial; none before the first violation, because sampling is faster then.

        Optuna ranks violating trials by the violation alone, so unchecked ones get tiny violations in the order of
        their objectives.
        """
        if not self._form[1]:
            return {}
        if isinstance(outcome, Failure):
            return {"violation": FAILURE_VIOLATION}
        assumed = UNCHECKED_VIOLATION * (1.0 + max(0.0, outcome.objective)) * outcome.assumed
        return {"violation": max(outcome.violation, assumed)}

    def _rebuild(self) -> None:
        """Create the study anew, because Optuna cannot change a finished trial when its pooled score changes."""
        trials = self._study.get_trials(deepcopy=False)
        finished, waiting = self._finished, self._running
        self._study, self._finished, self._running = self._new_study(), {}, {}
        for digest, number in finished.items():
            self._finished[digest] = len(self._finished)
            old, entry = trials[number], self._archive.get(digest)
            outcome = entry.score if entry else self._archive.failures[digest].outcome
            values, state = self._result(outcome)
            notes = {key: value for key, value in old.system_attrs.items() if not key.startswith("constraints")}
            self._study.add_trial(
                create_trial(
                    state=state,
                    values=values,
                    params=old.params,
                    distributions=self._distributions,
                    system_attrs=notes,
                    constraints={} if state == TrialState.FAIL else self._constraints(outcome),
                )
            )
        for digest, trial in waiting.items():
            self._running[digest] = self._enqueue(self._placement(trial))

    def _new_study(self) -> optuna.Study:
        sampler = self._sampler(int(self._rng.integers(2**31)))
        return optuna.create_study(sampler=sampler, directions=["minimize"] * self._form[0])


class TPESearcher(_OptunaStudySearcher):
    """Searcher by Optuna's TPE sampler over categorical parameters.

    Failures rank after every trial with a value, so that TPE avoids them. Pending proposals count as bad ones (constant
    liar), so that those of a batch differ. TPE uses only the order of the objectives, so a logarithm has no effect.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        n_startup_trials: Number of finished trials, initial and failed ones included, before TPE replaces random draws.
        n_ei_candidates: Number of candidates drawn from the density of good trials for one proposal.
        multivariate: Whether the density is a joint one of all dimensions; if not, each dimension has its own.
            (Optuna's `group` would have no effect, because every trial has all dimensions.)
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
        sampler = partial(
            TPESampler,
            constant_liar=True,
            n_startup_trials=n_startup_trials,
            n_ei_candidates=n_ei_candidates,
            multivariate=multivariate,
        )
        super().__init__(
            space,
            seed=seed,
            sampler=lambda fresh: sampler(seed=fresh),
            parameter=lambda size: CategoricalDistribution(tuple(range(size))),
        )


class OptunaSearcher(_OptunaStudySearcher):
    """Searcher by any sampler of `optuna.samplers`, given by its class name.

    Choices are integers, so that samplers for numeric parameters work as well. GPSampler takes about a second per
    proposal for a space of a hundred points. Genetic samplers such as NSGAIISampler use only their own proposals as
    parents, not initial placements. CmaEsSampler supports one objective and no constraint.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        sampler: Name of the class, for instance "GPSampler" or "NSGAIISampler".
        params: Keyword arguments of that class except its seed, for instance `{population_size: 10}`.
    """

    def __init__(
        self, space: Space, *, seed: int, sampler: str = "GPSampler", params: Mapping[str, Any] | None = None
    ) -> None:
        known = _available_samplers()
        if sampler not in known:
            close = difflib.get_close_matches(sampler, known, n=1) or sorted(known)
            raise ValueError(f"sampler is a class of optuna.samplers ({', '.join(close)}), but got {sampler!r}")
        if sampler == "CmaEsSampler" and find_spec("cmaes") is None:
            raise ValueError("sampler CmaEsSampler needs a package: pip install cmaes")
        made, given = known[sampler], dict(params or {})
        allowed = set(inspect.signature(made).parameters) - {"seed"}
        if unknown := sorted(set(given) - allowed):
            raise ValueError(f"params of {sampler} are {', '.join(sorted(allowed))}, but got {', '.join(unknown)}")
        settings = {**{name: value for name, value in BATCH_SETTINGS.items() if name in allowed}, **given}
        self._unbounded = sampler == "CmaEsSampler"
        super().__init__(
            space,
            seed=seed,
            sampler=lambda fresh: made(seed=fresh, **settings),
            parameter=lambda size: IntDistribution(0, size - 1),
        )

    def tell(self, observation: Observation) -> None:
        outcome = observation.outcome
        if self._unbounded and isinstance(outcome, Score) and (outcome.violation > 0 or len(outcome.values) > 1):
            raise ValueError("sampler CmaEsSampler knows one objective and no bound: take GPSampler, which knows both")
        super().tell(observation)


def _available_samplers() -> dict[str, Any]:
    """Return the samplers, by name, that can be made from a seed alone and do not stop the study themselves."""
    names = [name for name in optuna.samplers.__all__ if name.endswith("Sampler") and name != "BruteForceSampler"]
    found = {name: getattr(optuna.samplers, name) for name in names}
    parameters = {name: inspect.signature(made).parameters for name, made in found.items()}
    return {
        name: made
        for name, made in found.items()
        if "seed" in parameters[name] and all(p.default is not p.empty for p in parameters[name].values())
    }


@contextmanager
def _silence_optuna() -> Iterator[None]:
    """Silence Optuna's experimental warnings and its log on stderr, which has only a global switch."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
