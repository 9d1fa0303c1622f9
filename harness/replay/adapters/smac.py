"""SMAC3 as a searcher: Lindauer et al. 2022, "SMAC3: A versatile Bayesian optimization package", JMLR 23."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from typing import Any

from harness.replay.adapters.ask_tell import AskTellSearcher, require_library
from search.api import Space

__all__ = ["SMACSearcher"]


class SMACSearcher(AskTellSearcher):
    """SMAC3's facade for hyperparameters: a random forest over categorical parameters, with expected improvement.

    SMAC gives up on a small space when it draws known configurations alone; from there on the draws are random.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        n_trials: Evaluations that SMAC plans with; its initial design takes a quarter of them at most.
        n_initial: Evaluations of the initial design; 0: as SMAC chooses.
    """

    def __init__(self, space: Space, *, seed: int, n_trials: int = 100, n_initial: int = 0) -> None:
        require_library("smac")
        super().__init__(space, seed)
        self._seed, self._n_trials, self._n_initial = seed, n_trials, n_initial
        self._names = [f"d{index:03d}" for index in range(len(space))]
        self._is_exhausted = False

    def open(self) -> None:
        from ConfigSpace import Categorical, ConfigurationSpace
        from smac import HyperparameterOptimizationFacade as Facade
        from smac import Scenario

        sizes = zip(self._names, self._space.sizes, strict=True)
        parameters = [Categorical(name, list(range(size))) for name, size in sizes]
        self._configurations = ConfigurationSpace(space=parameters, seed=self._seed)
        scenario = Scenario(
            self._configurations,
            deterministic=True,
            n_trials=self._n_trials,
            seed=self._seed,
            output_directory=Path(gettempdir()) / "qdq-bench-smac",  # nothing is written there: see `report`
        )
        design = Facade.get_initial_design(scenario, n_configs=self._n_initial) if self._n_initial else None
        maximizer = Facade.get_acquisition_maximizer(scenario)
        # The start points of the local search are a set, whose order differs from process to process.
        local = maximizer._local_search
        found = local._get_init_points_from_previous_configs
        local._get_init_points_from_previous_configs = lambda *given: sorted(
            found(*given), key=lambda configuration: tuple(configuration.get_array())
        )
        self._smac: Any = Facade(
            scenario, None, initial_design=design, acquisition_maximizer=maximizer, logging_level=False, overwrite=True
        )

    def suggest(self) -> tuple[tuple[int, ...], Any] | None:
        from joblib import parallel_config
        from smac.main.exceptions import ConfigurationSpaceExhaustedException

        trial = None
        if not self._is_exhausted:
            try:
                with parallel_config(backend="sequential"):  # threads make a small forest many times as slow
                    trial = self._smac.ask()
            except StopIteration:
                return None
            except ConfigurationSpaceExhaustedException:  # 16 random draws were known, so it gives up
                self._is_exhausted = True
        config = self._configurations.sample_configuration() if trial is None else trial.config
        return tuple(int(config[name]) for name in self._names), trial

    def report(self, choices: tuple[int, ...], handle: Any, value: float) -> None:
        if self._is_exhausted:
            return
        from ConfigSpace import Configuration
        from smac.runhistory.dataclasses import TrialInfo, TrialValue

        values = dict(zip(self._names, choices, strict=True))
        trial = TrialInfo(Configuration(self._configurations, values=values), seed=0) if handle is None else handle
        self._smac.optimizer.tell(trial, TrialValue(cost=value), save=False)
