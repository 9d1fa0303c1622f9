"""Trial of one placement: build, sample and score it, and measure a new incumbent again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from harness.base.statistics import Interval, median_ci
from harness.config.sections import Sampling
from harness.measure.records import Failed, Measured, Outcome
from harness.measure.sampling import Samples
from harness.plugins.api import Candidate
from harness.run.search.accuracy_gate import AccuracyGate
from harness.workers.engines import BuiltEngine, Engines, WorkerKilled

MAX_KILLED_WORKERS = 3  # of one trial
MAX_BUILDS = 3
"""A surprise is built again until two readings agree on it, a winner by disturbed readings until one is steady; the
third decides."""
LATENCY_ALONE = AccuracyGate()
"""Gate that checks no accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePolicy:
    """Settings for noise and timeouts of a trial; ablations switch them off.

    Attributes:
        noise_floor: Relative noise floor; a candidate that is better by less is not measured again.
        racing: Whether the timing of an engine stops as soon as it is clearly slower than the incumbent.
        builds: Largest number of builds of a candidate that would become the incumbent; 1: it is never rebuilt.
        reference_latency_ms: Latency of the baseline in ms if candidates are timed in turns with it, or None.
    """

    noise_floor: float = 0.0
    racing: bool = True
    builds: int = MAX_BUILDS
    reference_latency_ms: float | None = None


def measure(
    candidate: Candidate,
    incumbent: Interval | None,
    *,
    engines: Engines,
    sampling: Sampling,
    gate: AccuracyGate = LATENCY_ALONE,
    noise: NoisePolicy = NoisePolicy(),
) -> Outcome:
    """Build, time and score a candidate with these engines, and build it again before it becomes the incumbent.

    A candidate that is faster than the incumbent by more than noise is built and sampled again before it is accepted,
    because the lowest of many noisy readings is low by chance (Helion's autotuner found configurations 7 % faster once
    it confirmed suspicious timings, pytorch/helion pull request 2377). So is a candidate that would become the
    incumbent by readings that other load on the machine disturbed, whatever the width of their interval.

    Args:
        incumbent: Latency of the incumbent in ms; None: there is none yet.
        gate: Decides how far a candidate is scored; by default accuracy is not checked.
        noise: Settings for repeated builds, racing and the reference.
    """
    rival = gate.latency_to_beat(incumbent)

    def build_and_sample(*, scored: bool) -> Outcome:
        for _ in range(MAX_KILLED_WORKERS):
            built = engines.build(candidate)
            if isinstance(built, Failed):
                return built
            with suppress(WorkerKilled):
                return sample_and_release(built, scored)
        raise WorkerKilled(f"{MAX_KILLED_WORKERS} workers in a row were killed during a trial")

    def sample_and_release(built: BuiltEngine, scored: bool) -> Outcome:
        try:
            level_ms = noise.reference_latency_ms
            samples = engines.sample(built.handle, sampling, rival if noise.racing else None, level_ms)
            if isinstance(samples, Failed):
                return samples
            measured = _make_record(built, samples)
            outcome = gate.evaluate_accuracy(engines, built.handle, measured, incumbent) if scored else measured
        finally:
            started_s = time.perf_counter()
            engines.release(built.handle)
            release_s = time.perf_counter() - started_s
        return replace(outcome, release_s=release_s) if isinstance(outcome, Measured) else outcome

    first = build_and_sample(scored=True)
    if isinstance(first, Failed) or rival is None or not gate.is_feasible(first.metrics):
        return first
    if not _is_clearly_faster(first, rival, noise) or (first.stable and not _intervals_are_disjoint(first, rival)):
        return first
    taken = [first]
    while len(taken) < noise.builds and not _is_rebuild_confirmed(taken, rival, noise):
        again = build_and_sample(scored=False)
        if isinstance(again, Failed):
            return again
        taken.append(again)
    return _merge_rebuilds(taken)


def _make_record(built: BuiltEngine, samples: Samples) -> Measured:
    return Measured(
        samples_ms=samples.latency_ms,
        discarded_ms=samples.discarded_ms,
        raw_ms=samples.raw_ms,
        reference_ms=samples.reference_ms,
        disturbance=samples.disturbance,
        warmup=samples.warmup,
        stable=samples.stable,
        saved=samples.saved,
        conditions=samples.conditions,
        build_s=built.build_s,
        measure_s=samples.measure_s,
        info=built.info,
    )


def _is_clearly_faster(measured: Measured, rival: Interval, noise: NoisePolicy) -> bool:
    """Return whether a candidate is faster than the incumbent by more than the noise floor."""
    return median_ci(measured.samples_ms).value * (1 + noise.noise_floor) < rival.value


def _is_rebuild_confirmed(taken: Sequence[Measured], rival: Interval, noise: NoisePolicy) -> bool:
    """Return whether the last build confirms the first one, or is undisturbed after a disturbed one."""
    first, last = taken[0], taken[-1]
    if len(taken) == 1 or not last.stable:
        return False
    return not first.stable or (_is_clearly_faster(last, rival, noise) and _intervals_are_disjoint(last, rival))


def _intervals_are_disjoint(measured: Measured, rival: Interval) -> bool:
    """Return whether the interval of a candidate's latency ends below that of the incumbent."""
    return median_ci(measured.samples_ms).high < rival.low


def _merge_rebuilds(taken: Sequence[Measured]) -> Measured:
    """Return one record of several builds: the second of two, or the one with the median latency of three.

    The samples of disturbed builds move to the discarded ones if two builds are undisturbed, or one is after a
    disturbed first build.
    """
    steady = [measured for measured in taken if measured.stable]
    pool = steady if len(steady) > 1 or (steady and not taken[0].stable) else list(taken)
    order = sorted(pool, key=lambda measured: median_ci(measured.samples_ms).value)
    counted = taken[-1] if len(taken) == 2 else order[len(order) // 2]
    others = [measured for measured in taken if measured is not counted]
    left_out = [measured for measured in others if measured not in pool]
    return replace(
        counted,
        rebuilt_ms=tuple(measured.samples_ms for measured in others if measured in pool),
        discarded_ms=(*counted.discarded_ms, *(ms for measured in left_out for ms in measured.samples_ms)),
        disturbance=counted.disturbance or taken[0].disturbance,
        saved=sum(measured.saved for measured in taken),
        build_s=sum(measured.build_s for measured in taken),
        measure_s=sum(measured.measure_s for measured in taken),
        release_s=sum(measured.release_s for measured in taken),
        metrics=taken[0].metrics,
        per_item=taken[0].per_item,
        mixable=taken[0].mixable,
        evaluate_s=taken[0].evaluate_s,
    )
