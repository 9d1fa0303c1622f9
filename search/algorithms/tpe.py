"""Tree-structured Parzen estimator, by Optuna (Bergstra et al. 2011; Watanabe 2023, arXiv 2304.11127)."""

from __future__ import annotations

from functools import partial

from optuna.distributions import CategoricalDistribution
from optuna.samplers import TPESampler

from search.algorithms.optuna_study import OptunaStudySearcher
from search.api import Space, check_range

__all__ = ["TPESearcher"]


class TPESearcher(OptunaStudySearcher):
    """Optuna's TPE sampler over categorical parameters.

    See `search.algorithms.optuna_study` for what becomes of seeds, failures and violations. A failure ranks behind
    every trial
    with a value, so that TPE learns to stay away. Proposals without an outcome count as bad ones (constant liar),
    so that a batch spreads. TPE goes by the order of the objectives alone, so that latency and log latency are
    the same to it.

    Args:
        space: What to search.
        seed: Fixes all draws.
        n_startup_trials: Draw at random until so many trials have ended, those of the seeds and failed ones included.
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
