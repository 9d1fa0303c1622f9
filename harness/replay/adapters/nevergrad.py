"""Nevergrad's optimizers as searchers: Rapin and Teytaud 2018, "Nevergrad - A gradient-free optimization platform"."""

from __future__ import annotations

from typing import Any

from harness.replay.adapters.ask_tell import AskTellSearcher, require_library
from search.api import Space

__all__ = ["NevergradSearcher"]


class NevergradSearcher(AskTellSearcher):
    """Any optimizer of Nevergrad's registry by its name, over one unordered choice per dimension.

    Args:
        space: Space to search.
        seed: Seed of all draws.
        optimizer: Name in `nevergrad.optimizers.registry`, for instance "NGOpt" or "DiscreteOnePlusOne".
        budget: Evaluations that the optimizer plans with.
    """

    def __init__(self, space: Space, *, seed: int, optimizer: str = "NGOpt", budget: int = 100) -> None:
        require_library("nevergrad")
        import nevergrad as ng

        if optimizer not in ng.optimizers.registry:
            raise ValueError(f"optimizer is a name of nevergrad.optimizers.registry, but got {optimizer!r}")
        super().__init__(space, seed)
        self._seed, self._made, self._budget = seed, ng.optimizers.registry[optimizer], budget

    def open(self) -> None:
        import nevergrad as ng

        parameters = ng.p.Tuple(*(ng.p.Choice(list(range(size))) for size in self._space.sizes))
        parameters.random_state.seed(self._seed)
        self._optimizer: Any = self._made(parametrization=parameters, budget=self._budget)

    def suggest(self) -> tuple[tuple[int, ...], Any]:
        candidate = self._optimizer.ask()
        return tuple(int(choice) for choice in candidate.value), candidate

    def report(self, choices: tuple[int, ...], handle: Any, value: float) -> None:
        candidate = self._optimizer.parametrization.spawn_child(new_value=choices) if handle is None else handle
        self._optimizer.tell(candidate, value)
