"""Optimizers of other libraries keep the contract of a searcher, where they are installed."""

from __future__ import annotations

import importlib.util
import math

import pytest

from harness.bench.kernel_tuner import KernelTunerSearcher
from harness.bench.nevergrad import NevergradSearcher
from harness.bench.smac import SMACSearcher
from harness.bench.syne_tune import SyneTuneSearcher
from search.api import Searcher, Space
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
