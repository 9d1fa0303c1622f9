"""Components of noise come back from noise that is known, with intervals that cover it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.sections import PluginSpec, Sampling
from harness.insight.noise import NestedDesign, NoiseComponents, estimate_components, measure_noise
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples
from harness.plugins.api import Candidate
from harness.workers.engines import BuiltEngine, Engines, WorkerSpec
from harness.workers.sandbox import InProcess
from search.space import edges_digest


def drawn(
    rng: np.random.Generator, run: float, build: float, process: float, shape: tuple[int, int, int]
) -> NoiseComponents:
    p, b, r = shape
    noise = process * rng.standard_normal((p, 1, 1)) + build * rng.standard_normal((p, b, 1))
    return estimate_components(10.0 * np.exp(noise + run * rng.standard_normal((p, b, r))))


@pytest.mark.parametrize("truth", [(0.01, 0.02, 0.03), (0.05, 0.01, 0.01), (0.02, 0.05, 0.0)])
def test_intervals_cover_the_truth_and_estimates_are_unbiased(truth):
    rng = np.random.default_rng(0)
    runs = [drawn(rng, *truth, (6, 4, 20)) for _ in range(600)]
    for place, sd in enumerate(truth):
        found = [run.components[place].sd for run in runs]
        covered = np.mean([i.low <= sd <= i.high for i in found])
        assert 0.92 <= covered <= (1.0 if sd <= 0.01 else 0.98)
        if sd >= 0.02:
            assert np.sqrt(np.mean([i.value**2 for i in found])) == pytest.approx(sd, rel=0.1)


def test_components_match_manual_computation():
    """Two processes of two builds of two readings; sums of squares worked out by hand."""
    logs = np.array([[[0.0, 0.2], [0.4, 0.6]], [[1.0, 1.2], [1.4, 1.6]]])
    run, build, process = (component.sd.value**2 for component in estimate_components(np.exp(logs)).components)
    assert run == pytest.approx(0.02)  # 4 builds of 2 x 0.01 over 4 degrees of freedom
    assert build == pytest.approx((0.16 - 0.02) / 2)  # 2 x 4 x 0.04 over 2
    assert process == pytest.approx((2.0 - 0.16) / 4)  # 4 x 2 x 0.25 over 1


def test_component_shares_sum_to_one_without_negative_values():
    found = estimate_components(np.exp(np.random.default_rng(1).standard_normal((3, 3, 10)) * 0.1))
    assert sum(component.share for component in found.components) == pytest.approx(1)
    assert all(0 <= c.sd.low <= c.sd.value <= c.sd.high for c in found.components)
    still = estimate_components(np.full((2, 2, 2), 5.0))
    assert still.latency_ms == pytest.approx(5.0)
    assert still.processes_needed == 1
    assert still.one_build == 0


def test_one_build_precision_and_processes_needed():
    rng = np.random.default_rng(2)
    runs = [drawn(rng, 0.001, 0.03, 0.04, (6, 4, 10)) for _ in range(200)]
    assert np.median([run.one_build for run in runs]) == pytest.approx(np.exp(1.96 * 0.05) - 1, rel=0.1)
    assert np.median([run.processes_needed for run in runs]) == pytest.approx((1.96 * 0.05 / 0.00995) ** 2, rel=0.2)


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 1, 3), (3, 3, 1), (9,)])
def test_a_design_without_repeats_is_refused(shape):
    with pytest.raises(ValueError, match="2 or more of each level"):
        estimate_components(np.ones(shape))


CANDIDATE = Candidate(digest=edges_digest(()), edges=(), source=lambda: Path("never asked for"))


def opener(tmp_path: Path, **params: object):  # type: ignore[no-untyped-def]
    """A fresh process is a fresh instance with other noise."""
    seeds = itertools.count(100)

    @contextmanager
    def open_engines() -> Iterator[Engines]:
        use = PluginSpec(use="simulated", params={**params, "noise_seed": next(seeds)})
        with InProcess(WorkerSpec(benchmarkers={MAIN_BENCHMARKER: use}, workdir=tmp_path)) as engines:
            yield engines

    return open_engines


def test_simulated_noise_is_measured_level_by_level(tmp_path):
    opened = opener(tmp_path, noise=0.01, build_noise=0.05, process_noise=0.2)
    design = NestedDesign(processes=12, builds=6, readings=10)
    latency_ms, _ = measure_noise(opened, CANDIDATE, design, NullProgress())
    assert latency_ms.shape == (12, 6, 10)
    for component, truth in zip(estimate_components(latency_ms).components, (0.01, 0.05, 0.2), strict=True):
        assert component.sd.low <= truth <= component.sd.high


def slowing() -> SimpleNamespace:
    """A process on a machine whose pace falls with every inference; its builds are all alike."""
    built, taken = itertools.count(1), itertools.count(1)

    def sample(handle: int, sampling: Sampling) -> Samples:
        latency_ms = (10.0 * 1.01 ** next(taken),) * sampling.min_samples
        disturbed = "waited for a core" if handle == 1 else ""
        return Samples(latency_ms=latency_ms, warmup=0, measure_s=0.0, stable=True, disturbed=disturbed)

    return SimpleNamespace(build=lambda *_: BuiltEngine(handle=next(built), build_s=0.1), sample=sample)


def test_drift_is_not_attributed_to_builds():
    design = NestedDesign(processes=6, builds=4, readings=29)
    latency_ms, disturbed = measure_noise(lambda: nullcontext(slowing()), CANDIDATE, design, NullProgress())  # type: ignore[arg-type]
    assert latency_ms.shape == (6, 4, 29)
    assert disturbed == 0.25, "one build of four"
    run, build, _ = estimate_components(latency_ms).components
    assert run.sd.value > 0.1, "the pace fell by a third"
    assert build.share < 0.02


def test_failed_builds_raise_user_error_with_reason():
    refusing = SimpleNamespace(build=lambda *_: Failed(stage="build", reason="unsupported"))
    with pytest.raises(UserError, match="0 of 3 processes finished; build: unsupported"):
        measure_noise(
            lambda: nullcontext(refusing),  # type: ignore[arg-type]
            CANDIDATE,
            NestedDesign(processes=3, builds=2, readings=3),
            NullProgress(),
        )
