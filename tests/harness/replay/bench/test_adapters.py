"""Optimizers of other libraries keep the contract of a searcher, where they are installed."""

from __future__ import annotations

import importlib.util
import math
import random
from typing import Any

import pytest

from harness.replay.adapters.ask_tell import AskTellSearcher, require_library
from harness.replay.adapters.kernel_tuner import KernelTunerSearcher
from harness.replay.adapters.nevergrad import NevergradSearcher
from harness.replay.adapters.smac import SMACSearcher
from harness.replay.adapters.syne_tune import SyneTuneSearcher
from search.api import Searcher, Space
from search.synthetic_problem import SyntheticObjective, synthetic_space
from search.testing import SearcherContract


def needs(library: str) -> pytest.MarkDecorator:
    """Skip a class of tests where a library of the extra `bench` is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"needs the extra bench ({library})")


@needs("nevergrad")
class TestNevergrad(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        return NevergradSearcher(space, seed=seed)


@needs("smac")
class TestSMAC(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        return SMACSearcher(space, seed=seed, n_initial=5)


@needs("syne_tune")
class TestSyneTune(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        return SyneTuneSearcher(space, seed=seed, method="REA")


@needs("kernel_tuner")
class TestKernelTuner(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        if math.prod(space.sizes) > 2**20:
            pytest.skip("Kernel Tuner lists the whole space")
        return KernelTunerSearcher(space, seed=seed)


class HillClimbing(AskTellSearcher):
    """Searcher around a library of a few lines, which draws from the global generator and proposes what it knows."""

    def open(self) -> None:
        self.reported: list[tuple[float, tuple[int, ...]]] = []

    def suggest(self) -> tuple[tuple[int, ...], Any] | None:
        _, best = min(self.reported, default=(0.0, (0,) * len(self._space)))
        sizes = self._space.sizes
        return tuple(c if random.random() < 0.8 else random.randrange(n) for c, n in zip(best, sizes, strict=True)), 1

    def report(self, choices: tuple[int, ...], handle: Any, value: float) -> None:
        self.reported.append((value, choices))


class TestAskTellSearcher(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        return HillClimbing(space, seed)


def test_a_library_receives_each_placement_once_and_known_values_again():
    space = synthetic_space(2)
    objective, searcher = SyntheticObjective(space, seed=0), HillClimbing(space, 0)
    while asked := searcher.ask(1):
        searcher.tell(objective.observe(*asked))
        searcher.tell(objective.observe(*asked))
    values = dict(map(reversed, searcher.reported))
    assert len(values) == math.prod(space.sizes)
    assert len(set(searcher.reported)) == len(values) < len(searcher.reported)


def test_a_missing_library_is_named_with_the_command_that_installs_it():
    with pytest.raises(ValueError, match=r"no_such_library.*pip install 'qdq-bench\[bench\]'"):
        require_library("no_such_library")
