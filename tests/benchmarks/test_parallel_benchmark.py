"""Trials a minute of a search with builds ahead, and whether its timings are those of a serial one.

Run with `pytest tests/benchmarks/test_parallel_benchmark.py --benchmark-enable -s` on a machine that does nothing else
(two cores or more, about five minutes); it prints the table of docs/explanation/measurement.md: ResNet-18 on OpenVINO.
The same placements are timed one after the other, again so, with two workers whose builds wait while an engine is
timed, and with two whose builds run at the same time. Figure to reach: 1.3 times the trials a minute, and timings that
differ by no more than two serial runs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness.base.files import read_json
from harness.base.progress import NullProgress
from harness.base.statistics import median_ci
from harness.config.experiment import parse_experiment
from harness.measure.provenance import count_cores
from harness.measure.records import Measured
from harness.results.journal import read_journal
from harness.run.runner import run_experiment

pytestmark = [pytest.mark.slow, pytest.mark.study]
EVALUATIONS = 41
EXPERIMENT = """
experiment: parallel
models: [{use: zoo:resnet18, calibration: {samples: 4}}]
backends: [{use: openvino, params: {threads: 1, precision: f32}}]
searchers: [random]
initial: [float]
baselines: [all]
budget: {evaluations: [%d]}
confirmation: {builds: 3, rounds: 2}
executor: %s
"""
WAYS = {
    "one after the other": "{}",
    "one after the other, again": "{}",
    "two workers, timing alone": "{workers: 2}",
    "two workers, builds during the timing": "{workers: 2, timing: concurrent}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a search came to.

    Attributes:
        latency_ms: By digest.
    """

    trials_a_minute: float
    latency_ms: dict[str, float]
    noise_floor: float


def pace(executor: str, out: Path) -> Pace:
    experiment = parse_experiment(EXPERIMENT % (EVALUATIONS, executor), "parallel", out)
    run_experiment(experiment, out=out, observer=NullProgress())
    task = out / "resnet18-openvino-int8"
    entries = [entry for entry in read_journal(task / "runs/random-0.jsonl") if entry.result is not None]
    elapsed_s = [entry.result.elapsed_s for entry in entries if entry.result is not None]
    measured = {
        e.proposal.digest: e.result.outcome for e in entries if e.result and isinstance(e.result.outcome, Measured)
    }
    return Pace(
        trials_a_minute=60 * (len(elapsed_s) - 1) / (max(elapsed_s) - min(elapsed_s)),
        latency_ms={digest: median_ci(outcome.samples_ms).value for digest, outcome in measured.items()},
        noise_floor=read_json(task / "noise_floor.json")["noise_floor"],
    )


def test_parallel_build_throughput_and_latency(benchmark, tmp_path):
    if benchmark.disabled:
        pytest.skip("tests/harness/run/test_proposal_window.py has the behaviour; enable benchmarks to take the time")
    pytest.importorskip("openvino")
    if count_cores() < 2:
        pytest.skip("builds ahead need a second core")
    found = benchmark.pedantic(
        lambda: {name: pace(way, tmp_path / str(number)) for number, (name, way) in enumerate(WAYS.items())}, rounds=1
    )
    serial = next(iter(found.values()))
    print(
        f"\n| {EVALUATIONS - 1} placements, ResNet-18 | trials a minute | latency against serial, median [quartiles] |"
    )
    print("|---|---|---|")
    for name, each in found.items():
        both = sorted(each.latency_ms.keys() & serial.latency_ms.keys())
        assert len(both) > EVALUATIONS / 2, "the same placements by all workers"
        changes = [100 * (each.latency_ms[digest] / serial.latency_ms[digest] - 1) for digest in both]
        low, middle, high = np.quantile(changes, [0.25, 0.5, 0.75])
        print(f"| {name} | {each.trials_a_minute:.0f} | {middle:+.1f} % [{low:+.1f}, {high:+.1f}] |")
    print(f"Noise floor: {', '.join(f'{each.noise_floor:.1%}' for each in found.values())}")
