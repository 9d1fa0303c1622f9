import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from harness.base.errors import BuildFailed, EvaluationFailed, UserError
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.runtimes.simulated import SimulatedBenchmarker
from search.space import Edge, Resolved, edges_digest

EDGES = tuple(Edge(f"t{number}", f"n{number}", 0) for number in range(9))


def resolved(edges: tuple[Edge, ...]) -> Resolved:
    return tuple((edge, "int8") for edge in edges)


def candidate(edges: Resolved) -> Candidate:
    def source() -> Path:
        raise AssertionError("a simulation never asks for a file")

    return Candidate(digest=edges_digest(edges), edges=edges, source=source)


def sample(benchmarker: SimulatedBenchmarker, edges: Resolved, n: int) -> list[float]:
    artifact = benchmarker.build(candidate(edges), Path("unused"))
    with benchmarker.open(artifact) as probe:
        return list(probe.sample(n))


@pytest.mark.parametrize("seed", range(5))
def test_the_planted_optimum_is_the_best_of_all_placements(seed):
    simulated = SimulatedBenchmarker(seed=seed)
    subsets = [subset for size in range(len(EDGES) + 1) for subset in itertools.combinations(EDGES, size)]
    best = min(subsets, key=lambda subset: simulated.truth_ms(resolved(subset)))
    assert set(best) == {edge for edge in EDGES if simulated.wanted(edge, "int8")}
    assert simulated.truth_ms(()) == pytest.approx(10.0)
    assert 2.5 < simulated.truth_ms(resolved(best)) <= 10.0


def test_pair_effects_change_the_latency():
    simulated = SimulatedBenchmarker(seed=1, effect=0.2)
    log = {
        subset: np.log(simulated.truth_ms(resolved(subset)))
        for size in (0, 1, 2)
        for subset in itertools.combinations(EDGES, size)
    }
    limit = np.log(4.0)
    shift = {subset: limit * x / (limit - abs(x)) for subset, x in ((s, v - log[()]) for s, v in log.items())}
    gaps = [shift[(a, b)] - shift[(a,)] - shift[(b,)] for a, b in itertools.combinations(EDGES, 2)]
    assert 0 < sum(abs(gap) > 1e-6 for gap in gaps) < len(gaps)


def test_landscape_depends_on_seed_and_precision():
    edges = resolved(EDGES)
    assert SimulatedBenchmarker(seed=3).truth_ms(edges) == SimulatedBenchmarker(seed=3).truth_ms(edges)
    assert SimulatedBenchmarker(seed=3).truth_ms(edges) != SimulatedBenchmarker(seed=4).truth_ms(edges)
    other = tuple((edge, "fp8") for edge in EDGES)
    assert SimulatedBenchmarker(seed=3).truth_ms(edges) != SimulatedBenchmarker(seed=3).truth_ms(other)
    flat = SimulatedBenchmarker(effect=0.0)
    assert flat.truth_ms(edges) == flat.truth_ms(()) == 10.0


def test_readings_have_the_configured_noise():
    simulated = SimulatedBenchmarker(noise=0.02, noise_seed=1)
    readings = np.log(sample(simulated, (), 4000))
    assert np.median(readings) == pytest.approx(np.log(10.0), abs=0.002)
    assert readings.std() == pytest.approx(0.02, rel=0.1)


def test_build_noise_and_drift_change_the_latency():
    rebuilt = SimulatedBenchmarker(noise=0.0, build_noise=0.05)
    assert len({sample(rebuilt, (), 1)[0] for _ in range(20)}) == 20
    drifting = sample(SimulatedBenchmarker(noise=0.0, drift=0.01), (), 3)
    assert drifting == pytest.approx([10.0, 10.1, 10.2])


def test_process_noise_is_shared_within_a_process():
    factors = []
    for noise_seed in range(400):
        simulated = SimulatedBenchmarker(noise=0.0, process_noise=0.1, noise_seed=noise_seed)
        one, two = (sample(simulated, edges, 1)[0] / simulated.truth_ms(edges) for edges in ((), resolved(EDGES)))
        assert one == pytest.approx(two)
        factors.append(np.log(one))
    assert np.std(factors) == pytest.approx(0.1, rel=0.15)


def test_wander_changes_all_engines_slowly():
    simulated = SimulatedBenchmarker(noise=0.0, wander=0.1, wander_readings=50, noise_seed=3)
    artifacts = [simulated.build(candidate(()), Path("unused")) for _ in range(2)]
    with simulated.open(artifacts[0]) as first, simulated.open(artifacts[1]) as second:
        turns = np.log([(first.sample(1)[0], second.sample(1)[0]) for _ in range(5000)])
    assert turns.std() == pytest.approx(0.1, rel=0.25)
    assert np.diff(turns, axis=1).std() < 0.03  # side by side, most of it cancels
    apart = turns[50:, 0] - turns[:-50, 0]
    assert apart.std() > 0.1  # far apart, nothing does


def test_outlier_rate_and_warm_up_decay():
    readings = np.array(sample(SimulatedBenchmarker(noise=0.0, outliers=0.1, noise_seed=1), (), 5000))
    assert (readings > 10.0).mean() == pytest.approx(0.1, abs=0.02)
    assert readings[readings > 10.0].mean() == pytest.approx(20.0, rel=0.1)
    assert np.median(readings) == 10.0
    warm = sample(SimulatedBenchmarker(noise=0.0, warmup=0.5), (), 60)
    assert warm[0] == pytest.approx(15.0)
    assert warm == sorted(warm, reverse=True)
    assert warm[-1] == pytest.approx(10.0, rel=0.01)


def test_a_noise_seed_repeats_a_run():
    one, two = (
        [sample(simulated, (), 3) for _ in range(2)]
        for simulated in (SimulatedBenchmarker(noise_seed=5), SimulatedBenchmarker(noise_seed=5))
    )
    assert one == two
    assert one[0] != one[1]
    assert sample(SimulatedBenchmarker(), (), 3) != sample(SimulatedBenchmarker(), (), 3)


def test_failure_rate_fails_the_same_placements_always():
    simulated = SimulatedBenchmarker(failure_rate=0.3)
    fails = 0
    for size in (1, 2, 3):
        for subset in itertools.combinations(EDGES, size):
            outcomes = set()
            for _ in range(2):
                try:
                    simulated.build(candidate(resolved(subset)), Path("unused"))
                    outcomes.add("built")
                except BuildFailed as error:
                    outcomes.add(str(error))
            assert len(outcomes) == 1
            fails += outcomes != {"built"}
    assert 0.15 < fails / 129 < 0.45
    simulated.build(candidate(()), Path("unused"))
    everything = SimulatedBenchmarker(failure_rate=1.0)
    with pytest.raises(BuildFailed, match="the simulated runtime refuses placement"):
        everything.build(candidate(resolved(EDGES)), Path("unused"))


def test_infer_is_refused():
    simulated = SimulatedBenchmarker()
    artifact = simulated.build(candidate(()), Path("unused"))
    with simulated.open(artifact) as probe, pytest.raises(EvaluationFailed, match="only latencies, no outputs"):
        probe.infer({})


def test_description_holds_every_option():
    facts = SimulatedBenchmarker(seed=7, noise=0.5).describe()
    assert facts["options"]["seed"] == 7
    assert facts["options"]["noise"] == 0.5
    assert not any(name.startswith("_") for name in facts["options"])
    assert "fp32_params" not in facts


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"noise": -0.1}, "noise: greater than or equal to 0, but got -0.1"),
        ({"outliers": 1.5}, "outliers: less than or equal to 1, but got 1.5"),
        ({"base_ms": math.nan}, "base_ms: a finite number"),
        ({"wander_readings": 0.0}, "wander_readings: greater than 0, but got 0.0"),
    ],
)
def test_parameters_out_of_range_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        registry.create_plugin("benchmarker", "simulated", params)
