"""Any sampler of Optuna by name: Gaussian process, NSGA-II, NSGA-III, quasi-Monte Carlo and others."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import optuna
from optuna.distributions import IntDistribution

from search.algorithms.optuna_study import OptunaStudySearcher
from search.api import Observation, Score, Space

__all__ = ["OptunaSearcher"]

BATCH_SETTINGS = {"constant_liar": True, "warn_asynchronous_seeding": False}
"""Told to samplers that know these settings: here proposals come in batches."""


class OptunaSearcher(OptunaStudySearcher):
    """Search by any sampler of `optuna.samplers`; `search.algorithms.optuna_study` says how it is told of seeds and
    failures.

    Choices are integers, so that samplers made for numbers serve as well. A Gaussian process takes about a second
    for a proposal at a hundred points. Genetic samplers, NSGAIISampler for one, breed from what they proposed
    themselves: to them the common seeds are no members of a generation. CmaEsSampler knows one objective and no bound.

    Args:
        space: What to search.
        seed: Fixes all draws.
        sampler: Name of the class, for instance "GPSampler" or "NSGAIISampler".
        params: Keyword arguments of that class but its seed, for instance `{population_size: 10}`.
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
    """Those that need nothing but a seed, and do not stop the study themselves."""
    names = [name for name in optuna.samplers.__all__ if name.endswith("Sampler") and name != "BruteForceSampler"]
    return {name: getattr(optuna.samplers, name) for name in names if _needs_only_a_seed(name)}


def _needs_only_a_seed(name: str) -> bool:
    parameters = inspect.signature(getattr(optuna.samplers, name)).parameters
    return "seed" in parameters and all(p.default is not p.empty for p in parameters.values())
