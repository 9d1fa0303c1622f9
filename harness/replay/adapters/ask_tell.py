"""Common part of the searchers around optimizers of other libraries (extra `bench`)."""

from __future__ import annotations

import importlib
import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from search.api import Observation, Placement, Score, Space
from search.archive import ArchiveSearcher

__all__ = ["AskTellSearcher", "require_library"]

MAX_DRAWS = 20  # successive known placements, after which the last one is changed until it is new


def require_library(module: str) -> None:
    """Raise `ValueError` with the command that installs a library, if it is missing."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"needs a package ({error}): pip install 'qdq-bench[bench]'") from error


class AskTellSearcher(ArchiveSearcher):
    """Searcher that takes its proposals from a library with an unordered choice for each dimension.

    The library receives every placement once, including those that it did not propose. The value is the objective; for
    failures and placements that violate a bound it is the largest so far. If the library repeats a placement, it gets
    the known value without an evaluation. As libraries also use the global random generators of Python and NumPy, these
    have a separate state while a library runs.

    Args:
        space: Space to search.
        seed: Seed of all draws.
    """

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._handles: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._states: list[Any] = [random.Random(seed).getstate(), np.random.RandomState(seed).get_state()]
        self._is_open = False

    @abstractmethod
    def open(self) -> None:
        """Create the library's optimizer; called before the first proposal, unless the space has no dimensions."""

    @abstractmethod
    def suggest(self) -> tuple[tuple[int, ...], Any] | None:
        """Return the choice of each dimension and the library's object of the proposal; None if nothing is left."""

    @abstractmethod
    def report(self, choices: tuple[int, ...], handle: Any, value: float) -> None:
        """Report the value to minimize of a placement; `handle` is from `suggest`, or None if it did not propose it."""

    def tell(self, observation: Observation) -> None:
        """Record the outcome of one placement, and report the first one to the library."""
        super().tell(observation)
        digest, outcome = observation.digest, observation.outcome
        if digest in self._values:
            return
        worst = max(self._values.values(), default=0.0)
        is_valid = isinstance(outcome, Score) and not outcome.violation
        value = outcome.objective if isinstance(outcome, Score) and is_valid else worst
        self._values[digest] = value
        if len(self._space):
            with self._own_random_states():
                self.report(observation.placement.choices, self._handles.pop(digest, None), value)

    def _propose(self) -> Placement | None:
        if not len(self._space):
            whole = self._space.float_placement()
            return None if self._space.digest(whole) in self._archive else whole
        last = self._space.float_placement()
        with self._own_random_states():
            for _ in range(MAX_DRAWS):
                suggestion = self.suggest()
                if suggestion is None:
                    return None
                choices, handle = suggestion
                last = Placement(choices)
                digest = self._space.digest(last)
                if digest not in self._archive:
                    self._handles[digest] = handle
                    return last
                if digest in self._values:
                    self.report(choices, handle, self._values[digest])
            return self._neighbour(last)

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        before = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            if not self._is_open:
                self._is_open = True
                self.open()
            yield
        finally:
            self._states = [random.getstate(), np.random.get_state()]
            random.setstate(before[0])
            np.random.set_state(before[1])
