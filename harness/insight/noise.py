"""Components of latency noise: within a run, between builds, between processes.

The design is nested: processes, in each process fresh builds of the same model, from each build readings. The model is
log y = mu + P + B(P) + e with independent effects. The components of its variance are estimated by analysis of
variance, that is by equating mean squares with their expectations (Searle, Casella and McCulloch, "Variance
Components", 1992, chapter 3 and section 5.4). The levels are those of Kalibera and Jones, "Rigorous benchmarking in
reasonable time", ISMM 2013. Logarithms are used because noise is proportional to latency and skewed. Outliers belong to
the component within a run; reported latencies are medians, on which outliers have little effect.

Builds of one process take turns, so a change of the machine's speed does not contribute to the component between
builds. Processes run one after the other, so it contributes to the component between processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.base.errors import UserError
from harness.base.progress import Observer, ProgressTask
from harness.base.statistics import Interval
from harness.config.sections import Sampling
from harness.measure.records import Failed
from harness.plugins.api import Candidate
from harness.workers.engines import Engines

Floats = npt.NDArray[np.float64]
TARGET_HALF_WIDTH = 0.01  # relative; `processes_needed` is the number of processes that reach it
NORMAL_QUANTILE_95 = 1.96
TAIL = (1 - 0.95) / 2  # of the intervals
READINGS_PER_TURN = 3
COLD_SAMPLING = Sampling(min_samples=READINGS_PER_TURN, max_samples=READINGS_PER_TURN)  # first turn, a warm-up
WARM_SAMPLING = COLD_SAMPLING.model_copy(update={"warmup_ms": 1.0})  # two inferences reload the caches


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedDesign:
    """Number of repetitions at each level.

    Attributes:
        processes: Fresh worker processes.
        builds: Fresh builds in each process.
        readings: Inferences of each build, after its warm-up.
    """

    processes: int = 6
    builds: int = 4
    readings: int = 30

    @property
    def turns(self) -> int:
        """Return the number of turns of each build."""
        return math.ceil(self.readings / READINGS_PER_TURN)

    def __post_init__(self) -> None:
        for name in ("processes", "builds", "readings"):
            if getattr(self, name) < 2:
                raise UserError(
                    f"--{name}: at least 2, because a variance needs two values, but got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReadings:
    """Readings of a nested design.

    Attributes:
        latency_ms: Latencies as [process, build, reading], or for one process as [build, reading].
        disturbed: Share of the turns that other processes disturbed.
    """

    latency_ms: Floats
    disturbed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseComponent:
    """Source of noise.

    Attributes:
        sd: Standard deviation of log latency from this source alone, so as a share of the latency, with its 95 %
            interval; 0 if the source is too small to be detected (the estimate of its variance is negative).
        share: Share of the sum of all variances.
    """

    name: str
    sd: Interval
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseComponents:
    """Sources of noise of one model's latency.

    Attributes:
        latency_ms: Geometric mean of all readings.
        components: Within a run, between builds, between processes.
        one_build: Relative half-width of the 95 % interval of the latency for one process with one build, whose latency
            is the median of the same number of readings, as in a run.
        processes_needed: Number of fresh processes with one build each that reduce this half-width to 1 %.
    """

    latency_ms: float
    components: tuple[NoiseComponent, ...]
    one_build: float
    processes_needed: int


def measure_noise(
    open_engines: Callable[[], AbstractContextManager[Engines]],
    candidate: Candidate,
    design: NestedDesign,
    observer: Observer,
) -> NoiseReadings:
    """Time a model in a nested design, and return the readings of the processes without failures.

    Args:
        design: Numbers of processes, builds and readings.

    Raises:
        UserError: Fewer than two processes finished; the message has the first failure.
    """
    found: list[NoiseReadings] = []
    failed: list[Failed] = []
    with observer.work("noise", design.processes * design.turns) as step:
        for process in range(design.processes):
            with open_engines() as engines:
                outcome = _measure_process(engines, candidate, design, np.random.default_rng(process), step)
            if isinstance(outcome, Failed):
                failed.append(outcome)
                observer.say(f"a process is left out; {outcome.stage}: {outcome.reason}")
            else:
                found.append(outcome)
    if len(found) < 2:
        raise UserError(f"{len(found)} of {design.processes} processes finished; {failed[0].stage}: {failed[0].reason}")
    return NoiseReadings(
        latency_ms=np.array([each.latency_ms for each in found]),
        disturbed=float(np.mean([each.disturbed for each in found])),
    )


def _measure_process(
    engines: Engines, candidate: Candidate, design: NestedDesign, rng: np.random.Generator, step: ProgressTask
) -> NoiseReadings | Failed:
    """Return the readings of one process as [build, reading], or its failure.

    All builds are made first and then take turns in random order, so that a change of the machine's speed affects all
    builds equally.
    """
    handles = []
    for _ in range(design.builds):
        built = engines.build(candidate)
        if isinstance(built, Failed):
            return built
        handles.append(built.handle)
    readings: list[list[float]] = [[] for _ in handles]
    disturbed = 0
    for turn in range(-1, design.turns):
        for build in rng.permutation(design.builds):
            samples = engines.sample(handles[build], WARM_SAMPLING if turn >= 0 else COLD_SAMPLING)
            if isinstance(samples, Failed):
                return samples
            if turn >= 0:
                readings[build] += samples.latency_ms
                disturbed += bool(samples.disturbed)
        if turn >= 0:
            step.advance(f"{np.median(readings):.3f} ms")
    return NoiseReadings(
        latency_ms=np.array(readings)[:, : design.readings], disturbed=disturbed / (design.turns * design.builds)
    )


def estimate_components(latency_ms: Floats) -> NoiseComponents:
    """Estimate the components of variance of log latency in a balanced nested design, with 95 % intervals.

    With p processes (variance s2_P), b builds (s2_B) and r readings (s2_e) the expected mean squares are s2_e, s2_e + r
    s2_B and s2_e + r s2_B + b r s2_P. A negative estimate counts as 0; `NoiseComponent` has square roots.

    Args:
        latency_ms: Positive latencies as [process, build, reading], each axis of size 2 or more.

    Raises:
        ValueError: The array has another shape, or a reading is not positive.
    """
    if latency_ms.ndim != 3 or min(latency_ms.shape) < 2 or not (latency_ms > 0).all():
        raise ValueError(f"positive readings of 2 or more of each level, but got the shape {latency_ms.shape}")
    logs = np.log(latency_ms)
    p, b, r = logs.shape
    of_build, of_process = logs.mean(axis=2), logs.mean(axis=(1, 2))
    run = _MeanSquare(float(((logs - of_build[..., None]) ** 2).sum()), p * b * (r - 1))
    build = _MeanSquare(r * float(((of_build - of_process[:, None]) ** 2).sum()), p * (b - 1))
    process = _MeanSquare(b * r * float(((of_process - logs.mean()) ** 2).sum()), p - 1)
    variances = [
        ("within a run", _variance_from_one_square(run)),
        ("between builds", _variance_from_difference(build, run, r)),
        ("between processes", _variance_from_difference(process, build, b * r)),
    ]
    total = sum(v.value for _, v in variances)
    outside = _one_build_component(np.median(logs, axis=2))
    return NoiseComponents(
        latency_ms=float(np.exp(logs.mean())),
        components=tuple(
            NoiseComponent(name=name, sd=_to_sd(v), share=v.value / total if total else 0.0) for name, v in variances
        ),
        one_build=math.expm1(NORMAL_QUANTILE_95 * math.sqrt(outside)),
        processes_needed=max(1, math.ceil(outside * (NORMAL_QUANTILE_95 / math.log1p(TARGET_HALF_WIDTH)) ** 2)),
    )


def _one_build_component(medians: Floats) -> float:
    """Return the variance of the median of one build in a fresh process, from medians [process, build]."""
    b = medians.shape[1]
    within = float(medians.var(axis=1, ddof=1).mean())
    between = b * float(medians.mean(axis=1).var(ddof=1))
    return float(within + max(0.0, (between - within) / b))


@dataclass(frozen=True, slots=True)
class _MeanSquare:
    """Sum of squares with its degrees of freedom."""

    total: float
    degrees_of_freedom: int

    @property
    def mean(self) -> float:
        return self.total / self.degrees_of_freedom


def _variance_from_one_square(square: _MeanSquare) -> Interval:
    """Return a mean square as a variance, with its chi-squared interval (F with an infinite denominator)."""
    return Interval(
        value=square.mean,
        low=square.mean / _upper_f_quantile(TAIL, square.degrees_of_freedom, math.inf),
        high=square.mean / _upper_f_quantile(1 - TAIL, square.degrees_of_freedom, math.inf),
    )


def _variance_from_difference(above: _MeanSquare, below: _MeanSquare, times: int) -> Interval:
    """Return (MS above - MS below) / times with the interval of Ting et al., cut at 0.

    Modified large samples: Ting, Burdick, Graybill, Jeyaratnam and Lu, "Confidence intervals on linear combinations of
    variance components that are unrestricted in sign", J. Statistical Computation and Simulation 35, 1990; Burdick and
    Graybill, "Confidence Intervals on Variance Components", 1992, section 3.3.
    """
    n1, n2 = above.degrees_of_freedom, below.degrees_of_freedom
    ms1, ms2 = above.mean, below.mean
    g1, g2 = (1 - 1 / _upper_f_quantile(TAIL, n, math.inf) for n in (n1, n2))
    h1, h2 = (1 / _upper_f_quantile(1 - TAIL, n, math.inf) - 1 for n in (n1, n2))
    wide, narrow = _upper_f_quantile(TAIL, n1, n2), _upper_f_quantile(1 - TAIL, n1, n2)
    g12 = ((wide - 1) ** 2 - g1**2 * wide**2 - h2**2) / wide
    h12 = ((1 - narrow) ** 2 - h1**2 * narrow**2 - g2**2) / narrow
    under = g1**2 * ms1**2 + h2**2 * ms2**2 + g12 * ms1 * ms2
    over = h1**2 * ms1**2 + g2**2 * ms2**2 + h12 * ms1 * ms2
    value = ms1 - ms2
    low, high = value - math.sqrt(max(0.0, under)), value + math.sqrt(max(0.0, over))
    return Interval(**{name: max(0.0, x) / times for name, x in (("value", value), ("low", low), ("high", high))})


def _upper_f_quantile(tail: float, n1: float, n2: float) -> float:
    """Return the F quantile that is exceeded with probability `tail`; an infinite n2 is replaced by a billion."""
    return float(special.fdtri(n1, min(n2, 1e9), 1 - tail))


def _to_sd(variance: Interval) -> Interval:
    return Interval(value=math.sqrt(variance.value), low=math.sqrt(variance.low), high=math.sqrt(variance.high))
