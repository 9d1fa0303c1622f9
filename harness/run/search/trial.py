"""Trial of one placement: build, sample and score it, and measure a new incumbent again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.base.statistics import Interval, median_ci
from harness.config.sections import Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed, Measured, Outcome
from harness.measure.sampling import Samples
from harness.plugins.api import Accuracy, Candidate
from harness.results.search_log import PREDICTED_METRIC, PROXY, Goal
from harness.workers.engines import FIRST_STAGE_EVALUATOR, BuiltEngine, Engines, WorkerKilled


class ScoredPlacement(NamedTuple):
    """Latency, metric and proxy (None if it was not measured) of a placement whose metric was measured."""

    latency_ms: float
    value: float
    proxy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncumbentState(Interval):
    """Latency of the incumbent in milliseconds, with the placements of the search whose metric was measured.

    Attributes:
        scored: These placements in the order of the proposals, which does not depend on the speed of workers.
    """

    scored: tuple[ScoredPlacement, ...] = ()


def incumbent_state(best: Interval | None, scored: Sequence[ScoredPlacement]) -> Interval | None:
    """Return the latency of the incumbent, together with the placements whose metric was measured, if any."""
    if best is None or not scored:
        return best
    return IncumbentState(value=best.value, low=best.low, high=best.high, scored=tuple(scored))


def scored_placement(outcome: Outcome, goal: Goal) -> ScoredPlacement | None:
    """Return latency, metric and proxy of an outcome, or None if its metric was not measured."""
    if goal.metric is None or not isinstance(outcome, Measured) or goal.metric not in outcome.metrics:
        return None
    return ScoredPlacement(
        latency_ms=median_ci(outcome.samples_ms).value,
        value=outcome.metrics[goal.metric],
        proxy=outcome.metrics.get(PROXY),
    )


MIN_WITNESS_PLACEMENTS = 3
"""Number of measured placements with a better proxy from which the loss of a placement is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyGate:
    """Screening of candidates by accuracy: first by the proxy, then by the metric if the candidate may win.

    Attributes:
        evaluator: Name of the evaluator of the search.
        proxy: Name of a fidelity evaluator (`harness.accuracy.metrics.fidelity.Fidelity`); None: no proxy.
        rejected_loss: Function that tests a score on the first images: it returns the loss if the bound is violated
            with high confidence, so that the other images are not scored, or None; None: all images are scored.
        mixable: Function that returns `harness.measure.records.Measured.mixable` of a score; None: always "".
    """

    goal: Goal = field(default_factory=Goal)
    evaluator: str = MAIN_BENCHMARKER
    proxy: str | None = None
    rejected_loss: Callable[[Accuracy], float | None] | None = None
    mixable: Callable[[Accuracy], str] | None = None

    def latency_to_beat(self, incumbent: Interval | None) -> Interval | None:
        """Return `incumbent` if the objective is latency, so that a candidate must be faster to win; otherwise None."""
        return incumbent if self.goal.minimize == "latency" else None

    def is_feasible(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metrics keep the bound; a metric that was not measured does."""
        return self.goal.violation(metrics) == 0.0

    def evaluate_accuracy(
        self, engines: Engines, handle: int, measured: Measured, incumbent: Interval | None
    ) -> Outcome:
        """Score an engine as far as needed, and return the outcome with its metrics, or the evaluator's failure."""
        if self.goal.metric is None:
            return measured
        started_s = time.monotonic()
        metrics: dict[str, float] = {}
        if self.proxy is not None:
            closeness = engines.evaluate(handle, self.proxy)
            if isinstance(closeness, Failed):
                return closeness
            metrics[PROXY] = closeness.metrics["sqnr_db"]
        scored = incumbent.scored if isinstance(incumbent, IncumbentState) else ()
        loss = loss_lower_bound(scored, metrics.get(PROXY), self.goal)
        per_item, mixable = tuple[float, ...](), ""
        can_improve = self._can_improve(median_ci(measured.samples_ms).value, loss, incumbent, scored)
        if can_improve and self.rejected_loss is not None:
            early = engines.evaluate(handle, FIRST_STAGE_EVALUATOR)
            if isinstance(early, Failed):
                return early
            rejected = self.rejected_loss(early)
            can_improve, loss = rejected is None, loss if rejected is None else rejected
        if can_improve:
            accuracy = engines.evaluate(handle, self.evaluator)
            if isinstance(accuracy, Failed):
                return accuracy
            metrics, per_item = {**metrics, **accuracy.metrics}, accuracy.per_item
            try:
                mixable = self.mixable(accuracy) if self.mixable else ""
            except ValueError as error:  # a plug-in may return a damaged record
                return Failed(stage="evaluate", reason=str(error))
        elif loss is not None:
            metrics[PREDICTED_METRIC] = (
                self.goal.reference - loss if self.goal.higher_is_better else self.goal.reference + loss
            )
        spent_s = time.monotonic() - started_s if metrics else 0.0
        return replace(measured, metrics=metrics, per_item=per_item, mixable=mixable, evaluate_s=spent_s)

    def _can_improve(
        self, latency_ms: float, loss: float | None, incumbent: Interval | None, scored: Sequence[ScoredPlacement]
    ) -> bool:
        """Return whether a candidate with at least this loss could become the incumbent or enter the Pareto front."""
        goal = self.goal
        if loss is not None and goal.loss_excess(loss) > 0:
            return False
        if goal.minimize == "latency":
            return incumbent is None or latency_ms < incumbent.value
        best = 0.0 if loss is None else loss
        if goal.minimize == "pareto":
            return not any(s.latency_ms <= latency_ms and goal.loss(s.value) <= best for s in scored)
        if goal.latency_excess_ms(latency_ms):
            return False
        return loss is None or not any(
            goal.loss(s.value) <= loss and not goal.latency_excess_ms(s.latency_ms) for s in scored
        )


def loss_lower_bound(scored: Sequence[ScoredPlacement], proxy: float | None, goal: Goal) -> float | None:
    """Return a lower bound on the loss of a placement from its proxy, or None if there is none.

    The bound is the smallest loss of the `MIN_WITNESS_PLACEMENTS` measured placements whose proxy is next better. There
    is no bound with fewer of them, or if a measured placement with a worse proxy has a smaller loss than they.
    """
    known = [] if proxy is None else [s for s in scored if s.proxy is not None]
    closer = sorted((s.proxy, goal.loss(s.value)) for s in known if s.proxy is not None and s.proxy >= (proxy or 0.0))
    if proxy is None or len(closer) < MIN_WITNESS_PLACEMENTS:
        return None
    least = min(loss for _, loss in closer[:MIN_WITNESS_PLACEMENTS])
    further = [goal.loss(s.value) for s in known if s.proxy is not None and s.proxy < proxy]
    return None if any(loss < least for loss in further) else least


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
    while len(taken) < noise.builds:
        again = build_and_sample(scored=False)
        if isinstance(again, Failed):
            return again
        taken.append(again)
        confirms = _is_clearly_faster(again, rival, noise) and _intervals_are_disjoint(again, rival)
        if again.stable and (confirms or not first.stable):
            break
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
