"""Kernel Tuner's strategies as searchers.

Van Werkhoven 2019, "Kernel Tuner: A search-optimizing GPU code auto-tuner", Future Generation Computer Systems 90.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from typing import Any

from harness.replay.adapters.ask_tell import AskTellSearcher, require_library
from search.api import Space

__all__ = ["KernelTunerSearcher"]

MAX_CONFIGURATIONS = 2**20  # Kernel Tuner lists the whole space


class KernelTunerSearcher(AskTellSearcher):
    """Searcher that runs a strategy of Kernel Tuner, which calls its objective function.

    The strategy runs in a separate thread that waits for each value. Only one of the two threads runs at a time, so
    proposals are reproducible.

    Args:
        space: Space to search, of at most 1,048,576 placements.
        seed: Seed of all draws.
        strategy: Name of a strategy, for instance "genetic_algorithm" or "simulated_annealing".
        max_fevals: Evaluations that the strategy plans with; it ends after them.
    """

    def __init__(
        self, space: Space, *, seed: int, strategy: str = "genetic_algorithm", max_fevals: int = 100_000
    ) -> None:
        require_library("kernel_tuner")
        from kernel_tuner.interface import strategy_map

        if math.prod(space.sizes) > MAX_CONFIGURATIONS:
            raise ValueError(f"Kernel Tuner lists the space, of at most {MAX_CONFIGURATIONS} placements")
        super().__init__(space, seed)
        self._proposals: queue.Queue[tuple[int, ...] | Exception | None] = queue.Queue()
        self._answers: queue.Queue[float | None] = queue.Queue()
        if strategy not in strategy_map:
            raise ValueError(f"strategy is {', '.join(strategy_map)}, but got {strategy!r}")
        job = (strategy, max_fevals, space.sizes, self._proposals, self._answers)
        self._thread = threading.Thread(target=_run_strategy, args=job, daemon=True)
        self._current: tuple[int, ...] | None = None
        self._answer: float | None = None
        self._has_proposed = False
        weakref.finalize(self, self._answers.put, None)  # ends the thread

    def open(self) -> None:
        self._thread.start()

    def suggest(self) -> tuple[tuple[int, ...], Any] | None:
        if self._answer is not None or not self._has_proposed:
            if self._answer is not None:
                self._answers.put(self._answer)
            self._answer, self._has_proposed = None, True
            proposal = self._proposals.get()
            if isinstance(proposal, Exception):
                raise proposal
            self._current = proposal
        return None if self._current is None else (self._current, True)

    def report(self, choices: tuple[int, ...], handle: Any, value: float) -> None:
        if handle:  # a strategy accepts only values of its own proposals
            self._answer = value


def _run_strategy(
    strategy: str,
    max_fevals: int,
    sizes: tuple[int, ...],
    proposals: queue.Queue[tuple[int, ...] | Exception | None],
    answers: queue.Queue[float | None],
) -> None:
    """Run a strategy whose evaluations are a proposal and its answer; the last proposal is None or an error."""
    from kernel_tuner.interface import Options, strategy_map
    from kernel_tuner.runners.runner import Runner
    from kernel_tuner.searchspace import Searchspace
    from kernel_tuner.util import StopCriterionReached, TuningBudget

    class QueueRunner(Runner):  # type: ignore[misc]
        def get_device_info(self) -> None:
            """Return nothing: there is no device."""

        def get_environment(self, tuning_options: Any) -> dict[str, Any]:
            return {}

        def run(self, parameter_space: Any, tuning_options: Any) -> list[dict[str, Any]]:
            return [self.evaluate(tuple(map(int, configuration))) for configuration in parameter_space]

        def evaluate(self, choices: tuple[int, ...]) -> dict[str, Any]:
            proposals.put(choices)
            value = answers.get()
            if value is None:
                raise StopCriterionReached("the search has ended")
            return dict(zip(parameters, choices, strict=True)) | {"time": value}

    try:
        parameters = {f"d{index:03d}": list(range(size)) for index, size in enumerate(sizes)}
        options = Options(
            objective=["time"], objective_higher_is_better=[False], strategy_options=Options(), verbose=False,
            budget=TuningBudget(None, max_fevals), max_fevals=max_fevals,
        )  # fmt: skip
        strategy_map[strategy].tune(Searchspace(parameters, [], 1024), QueueRunner(), options)
        proposals.put(None)
    except StopCriterionReached:
        proposals.put(None)
    except Exception as error:  # raised again in the thread that asks
        proposals.put(error)
