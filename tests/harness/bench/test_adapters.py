"""Optimizers of other libraries keep the contract of a searcher, where they are installed."""

from __future__ import annotations

import math

import pytest

from harness.bench.kernel_tuner import KernelTunerSearcher
from harness.bench.nevergrad import NevergradSearcher
from harness.bench.smac import SMACSearcher
from harness.bench.syne_tune import SyneTuneSearcher
from search.api import Searcher, Space
from search.testing import SearcherContract


class TestNevergrad(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        pytest.importorskip("nevergrad")
        return NevergradSearcher(space, seed=seed)


class TestSMAC(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        pytest.importorskip("smac")
        return SMACSearcher(space, seed=seed, n_initial=5)


class TestSyneTune(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        pytest.importorskip("syne_tune")
        return SyneTuneSearcher(space, seed=seed, method="REA")


class TestKernelTuner(SearcherContract):
    def make(self, space: Space, seed: int) -> Searcher:
        pytest.importorskip("kernel_tuner")
        if math.prod(space.sizes) > 2**20:
            pytest.skip("Kernel Tuner lists the whole space")
        return KernelTunerSearcher(space, seed=seed)
