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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.base.errors import UserError, suggest_names
from harness.base.files import explain_write_errors, write_json
from harness.base.progress import Observer, ProgressTask
from harness.base.statistics import Interval
from harness.config.sections import Sampling
from harness.measure.provenance import describe_environment
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.turn_log import disturbance_note
from harness.plugins.api import Candidate
from harness.plugins.registry import create_plugin
from harness.report.plots.figures import COLOURS, figure_file
from harness.run.confirm.confirmation import EngineFactory
from harness.run.prepare.study_task import StudyTask, prepare_study
from harness.workers.engines import Engines
from harness.workers.sandbox import open_engines

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
    open_engines: EngineFactory, candidate: Candidate, design: NestedDesign, observer: Observer
) -> tuple[Floats, float]:
    """Time a model in a nested design; return readings [process, build, reading] and the share of disturbed turns.

    Processes that fail are left out.

    Raises:
        UserError: Fewer than two processes finished; the message has the first failure.
    """
    found: list[tuple[Floats, int]] = []
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
    disturbed = float(np.mean([turns / (design.turns * design.builds) for _, turns in found]))
    return np.array([readings for readings, _ in found]), disturbed


def _measure_process(
    engines: Engines, candidate: Candidate, design: NestedDesign, rng: np.random.Generator, step: ProgressTask
) -> tuple[Floats, int] | Failed:
    """Return the readings of one process as [build, reading] and its number of disturbed turns, or its failure.

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
    return np.array(readings)[:, : design.readings], disturbed


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
    squares = (
        (float(((logs - of_build[..., None]) ** 2).sum()), p * b * (r - 1)),
        (r * float(((of_build - of_process[:, None]) ** 2).sum()), p * (b - 1)),
        (b * r * float(((of_process - logs.mean()) ** 2).sum()), p - 1),
    )
    run, build, process = ((total / degrees, degrees) for total, degrees in squares)
    variances = {
        "within a run": _variance_of_difference(run, (0.0, 1), 1),
        "between builds": _variance_of_difference(build, run, r),
        "between processes": _variance_of_difference(process, build, b * r),
    }
    total = sum(variance.value for variance in variances.values())
    components = tuple(
        NoiseComponent(
            name=name,
            sd=Interval(value=math.sqrt(each.value), low=math.sqrt(each.low), high=math.sqrt(each.high)),
            share=each.value / total if total else 0.0,
        )
        for name, each in variances.items()
    )
    medians = np.median(logs, axis=2)
    within, between = float(medians.var(axis=1, ddof=1).mean()), b * float(medians.mean(axis=1).var(ddof=1))
    one_build = within + max(0.0, (between - within) / b)  # variance of the median of one build in a fresh process
    return NoiseComponents(
        latency_ms=float(np.exp(logs.mean())),
        components=components,
        one_build=math.expm1(NORMAL_QUANTILE_95 * math.sqrt(one_build)),
        processes_needed=max(1, math.ceil(one_build * (NORMAL_QUANTILE_95 / math.log1p(TARGET_HALF_WIDTH)) ** 2)),
    )


def _variance_of_difference(above: tuple[float, int], below: tuple[float, int], times: int) -> Interval:
    """Return (MS above - MS below) / times, of mean squares with their degrees of freedom, with an interval cut at 0.

    Modified large samples: Ting, Burdick, Graybill, Jeyaratnam and Lu, "Confidence intervals on linear combinations of
    variance components that are unrestricted in sign", J. Statistical Computation and Simulation 35, 1990; Burdick and
    Graybill, "Confidence Intervals on Variance Components", 1992, section 3.3. With nothing below (0.0), it is the
    chi-squared interval of one mean square.
    """
    (ms1, n1), (ms2, n2) = above, below
    g1, g2 = (1 - 1 / _upper_f_quantile(TAIL, n, math.inf) for n in (n1, n2))
    h1, h2 = (1 / _upper_f_quantile(1 - TAIL, n, math.inf) - 1 for n in (n1, n2))
    wide, narrow = _upper_f_quantile(TAIL, n1, n2), _upper_f_quantile(1 - TAIL, n1, n2)
    g12 = ((wide - 1) ** 2 - g1**2 * wide**2 - h2**2) / wide
    h12 = ((1 - narrow) ** 2 - h1**2 * narrow**2 - g2**2) / narrow
    under = g1**2 * ms1**2 + h2**2 * ms2**2 + g12 * ms1 * ms2
    over = h1**2 * ms1**2 + g2**2 * ms2**2 + h12 * ms1 * ms2
    value = ms1 - ms2
    low, high = value - math.sqrt(max(0.0, under)), value + math.sqrt(max(0.0, over))
    return Interval(value=max(0.0, value) / times, low=max(0.0, low) / times, high=max(0.0, high) / times)


def _upper_f_quantile(tail: float, n1: float, n2: float) -> float:
    """Return the F quantile that is exceeded with probability `tail`; an infinite n2 is replaced by a billion."""
    return float(special.fdtri(n1, min(n2, 1e9), 1 - tail))


def noise_report(
    study: StudyTask, placement: str, design: NestedDesign, out: Path, observer: Observer
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Measure the components of noise; write `noise.json` (raw readings, components, machine) and `noise.png`.

    Args:
        placement: Placement to measure: "float", "all" or "linear".
        out: Folder of the two files.

    Returns:
        Header and rows of a table, and the lines below it.
    """
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    task, worker = prepare_study(study, out, observer)
    if placement not in task.placements:
        raise UserError(f"--placement: unknown placement {placement!r}; {suggest_names(placement, task.placements)}")
    candidate = task.candidate(task.placements[placement])
    open_worker = partial(open_engines, worker, study.experiment.limits)
    latency_ms, disturbed = measure_noise(open_worker, candidate, design, observer)
    found = estimate_components(latency_ms)
    use = worker.benchmarkers[MAIN_BENCHMARKER]
    backend = dict(create_plugin("benchmarker", use.use, use.params).describe())
    title = f"{study.spec.model.name}, {placement}, {backend['name']}, {backend['float_precision']}"
    record = {
        "model": study.spec.model.use,
        "model_sha256": task.model.sha256,
        "placement": placement,
        "digest": candidate.digest,
        "backend": backend,
        "design": asdict(design),
        "components": asdict(found),
        "disturbed": disturbed,
        "latency_ms": latency_ms.tolist(),
        "environment": describe_environment(),
    }
    with explain_write_errors(out):
        write_json(out / "noise.json", record)
        draw_noise(latency_ms, found, title, out / "noise.png")
    processes, builds, readings = latency_ms.shape
    notes = [
        f"{title}: {found.latency_ms:.3f} ms; {processes} processes of {builds} builds of {readings} readings",
        f"one fresh process with one build is known within {100 * found.one_build:.1f} % (95 %); "
        f"{found.processes_needed} of them within 1 %",
    ]
    if note := disturbance_note(disturbed):
        notes.append(f"{note}: close other work and repeat")
    notes.append(f"{out / 'noise.png'}, raw readings in {out / 'noise.json'}")
    rows: list[tuple[str, ...]] = []
    for component in found.components:
        value, low, high = (100 * each for each in (component.sd.value, component.sd.low, component.sd.high))
        rows.append((component.name, f"{value:.2f} % [{low:.2f}, {high:.2f}]", f"{100 * component.share:.0f} %"))
    return ("component", "standard deviation [95 %]", "share of variance"), rows, notes


def draw_noise(latency_ms: Floats, found: NoiseComponents, title: str, path: Path) -> None:
    """Plot all readings [process, build, reading], with one colour for each process, and the components of noise."""
    processes, builds, readings = latency_ms.shape
    with figure_file(path, columns=(2, 1)) as (left, right):
        for process, build in np.ndindex(processes, builds):
            place = (process * builds + build) * (readings + readings // 5) + np.arange(readings)
            left.plot(place, latency_ms[process, build], ".", ms=2, color=COLOURS[process % len(COLOURS)])
            median = np.median(latency_ms[process, build])
            left.plot(place[[0, -1]], [median, median], color="black", linewidth=1)
        label = "readings of each build, which took turns; a colour is a process, a line a build's median"
        left.set(title=title, xticks=[], xlabel=label, ylabel="latency, ms")
        sd = [100 * component.sd.value for component in found.components]
        errors = [[100 * abs(getattr(c.sd, end) - c.sd.value) for c in found.components] for end in ("low", "high")]
        right.bar(range(len(sd)), sd, yerr=errors, capsize=4, color="#56B4E9")
        right.set_xticks(range(len(sd)), [component.name.replace(" ", "\n", 1) for component in found.components])
        right.set_ylabel("standard deviation, % of latency")
        right.grid(alpha=0.25, axis="y")
