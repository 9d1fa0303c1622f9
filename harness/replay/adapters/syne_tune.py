"""Syne Tune's single-fidelity methods as searchers: Salinas et al. 2022, "Syne Tune", AutoML-Conf."""

from __future__ import annotations

from typing import Any

from harness.replay.adapters.ask_tell import AskTellSearcher, require_library
from search.api import Space

__all__ = ["SyneTuneSearcher"]

METRIC = "objective"
METHODS = ("REA", "TPE", "BORE", "CQR", "RandomSearch")


class SyneTuneSearcher(AskTellSearcher):
    """A method of `syne_tune.optimizer.baselines` over one unordered choice per dimension.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        method: REA (regularized evolution), TPE, BORE (density ratio), CQR (conformal quantile regression; seconds a
            proposal) or RandomSearch.
    """

    def __init__(self, space: Space, *, seed: int, method: str = "REA") -> None:
        require_library("syne_tune")
        if method not in METHODS:
            raise ValueError(f"method is {', '.join(METHODS)}, but got {method!r}")
        super().__init__(space, seed)
        self._seed, self._method = seed, method
        self._names = [f"d{index:03d}" for index in range(len(space))]

    def open(self) -> None:
        from syne_tune.config_space import choice
        from syne_tune.optimizer import baselines
        from syne_tune.optimizer.schedulers.ask_tell_scheduler import AskTellScheduler

        sizes = zip(self._names, self._space.sizes, strict=True)
        choices = {name: choice(list(range(size))) for name, size in sizes}
        metric: dict[str, Any] = {"metrics": [METRIC]} if self._method == "RandomSearch" else {"metric": METRIC}
        made = getattr(baselines, self._method)(choices, random_seed=self._seed, **metric)
        self._scheduler: Any = AskTellScheduler(base_scheduler=made)

    def suggest(self) -> tuple[tuple[int, ...], Any] | None:
        try:
            trial = self._scheduler.ask()
        except AttributeError:  # no configuration is left that was not suggested
            return None
        return tuple(int(trial.config[name]) for name in self._names), trial

    def report(self, choices: tuple[int, ...], handle: Any, value: float) -> None:
        from datetime import datetime

        from syne_tune.backend.trial_status import Trial

        config = dict(zip(self._names, choices, strict=True))
        trial = Trial(-1 - len(self._values), config, datetime.now()) if handle is None else handle
        self._scheduler.tell(trial, {METRIC: value})
