"""Delivery of a job's result: final selection, output check, confirmation on fresh builds, files and summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.base.errors import UserError
from harness.base.progress import NullProgress, Observer
from harness.compat.modelopt_autotune.autotuner import QDQAutotuner, Transform
from harness.compat.modelopt_autotune.benchmark import Benchmark
from harness.compat.modelopt_autotune.engine.session import export_model
from harness.compat.modelopt_autotune.settings import Config
from harness.config.sections import Confirmation, Limits
from harness.graph.io.files import move_model
from harness.graph.qdq.qdq_graph import count_pairs
from harness.measure.elimination import TURNS_PER_RACING_ROUND
from harness.measure.provenance import format_options, machine_lacks_vnni
from harness.measure.records import MAIN_BENCHMARKER
from harness.measure.turn_statistics import ConfirmationSummary, summarize_turns
from harness.plugins.api import Candidate
from harness.results.output_check import CHECK_FILE_NAME
from harness.results.turns import FINAL_SELECTION_LOG_NAME
from harness.run.confirm.paired_timing import PairedComparison
from harness.run.confirm.rounds import TimedRow
from harness.run.select.racing import FIRST_SCHEDULE, select_winner
from harness.run.verify.dynamic_delivery import DynamicModel, format_fixed_shapes, write_dynamic_model
from harness.run.verify.runtime_checker import CheckPlan, RuntimeChecker, runs_no_model
from harness.ship.tuned_model import TunedModel, describe_accuracy, ship_tuned_model
from search.space import Placement

__all__ = ["AutotuneJob", "AutotuneResult", "Delivery", "RunContext", "summary_lines"]

FINALISTS = Confirmation().candidates
BUILDS, NOISY_MACHINE_BUILDS = 3, 6  # fresh builds of the result and of the float model
BASELINE, FINAL, NOT_FASTER = "baseline.onnx", "optimized_final.onnx", "not_faster.onnx"
UNPROVED = "unproved.onnx"  # the result until it is confirmed


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneJob:
    """Job of the workflow; attributes without a line are as the arguments of `region_pattern_autotuning_workflow`.

    Attributes:
        whole: Search the whole model at once, instead of region by region.
        max_evals: Maximum number of measured models, including the baseline and earlier runs; None: no limit.
        ship: Write the folder `ship` with the model to deploy.
    """

    output_dir: Path
    schemes_per_region: int = 30
    pattern_cache_file: Path | None = None
    state_file: Path | None = None
    qdq_baseline: Path | None = None
    node_filters: tuple[str, ...] = ()
    config: Config = field(default_factory=Config)
    whole: bool = False
    max_evals: int | None = None
    transform: Transform | None = None
    ship: bool = False
    observer: Observer = field(default_factory=NullProgress)

    @property
    def state(self) -> Path:
        return self.state_file or self.output_dir / "autotuner_state.yaml"


class RunContext:
    """Autotuner, benchmark and files of a running job."""

    def __init__(self, job: AutotuneJob, autotuner: QDQAutotuner, benchmark: Benchmark) -> None:
        self.job = job
        self.autotuner = autotuner
        self.benchmark = benchmark
        self.session = autotuner.session

    @property
    def baseline_ms(self) -> float:
        return self.autotuner.baseline_latency_ms or float("inf")

    def candidate(self, placement: Placement, file: Path | None = None) -> Candidate:
        """Return the candidate of a placement: its model with the transform of the job, or `file` if given."""
        candidate = self.session.task.candidate(placement)
        if file is not None:
            return replace(candidate, source=lambda: file)
        if self.job.transform is None:
            return candidate
        path = self.session.folder / "transformed.onnx"

        def source() -> Path:
            self._export(placement, path)
            return path

        return replace(candidate, source=source)

    def export(self, name: str, placement: Placement) -> Path:
        """Write the model of a placement under a name in the output folder, and return its path."""
        path = self.job.output_dir / name
        self._export(placement, path)
        return path

    def _export(self, placement: Placement, path: Path) -> None:
        proto = self.session.proto(self.session.space.resolve(placement))
        export_model(proto if self.job.transform is None else self.job.transform(proto), path)

    def log(self, name: str) -> Path:
        """Return the path of a log file in the output folder."""
        return self.job.output_dir / f"logs/{name}.log"


class Delivery:
    """Last step of an autotuning job, which chooses the result, confirms it and writes its files.

    Args:
        context: Autotuner, benchmark and files of the job.
        remarks: Lines to print after the summary.
    """

    def __init__(self, context: RunContext, remarks: tuple[str, ...]) -> None:
        self._context = context
        self._job, self._session = context.job, context.session
        self._remarks = remarks
        self._float = self._session.space.float_placement()
        self._float_candidate = context.candidate(self._float, context.job.output_dir / BASELINE)
        self._float_fault = ""

    def deliver(self) -> None:
        """Write the result, compare fresh builds of it and of the float model, and report both."""
        context, session, benchmark = self._context, self._session, self._context.benchmark
        best, rivals, wrong = self._finalists(context.autotuner.placement(best=True))
        chosen = self._select(best, rivals)
        tried = context.export(UNPROVED, chosen)
        benchmark.measure(context.candidate(chosen), context.log("final"))
        builds = NOISY_MACHINE_BUILDS if context.autotuner.interleaved else BUILDS
        events = benchmark.confirm(context.candidate(chosen, tried), self._float_candidate, builds)
        summary = summarize_turns(events, baseline="baseline")
        measurement, pairs = session.measured.get(session.space.digest(chosen)), count_pairs(tried)
        file, kept = self._write(tried, chosen, is_proven_faster(summary))
        result = AutotuneResult(
            file=file,
            kept=kept,
            pairs=pairs,
            read=context.baseline_ms / measurement.latency_ms
            if measurement is not None and measurement.latency_ms
            else None,
            options=format_options(benchmark.describe().get("options", {})),
            calibrated=self._job.config.calibration_data is not None,
        )
        dynamic = self._write_dynamic(file)
        lines = [*summary_lines(summary, result), *([] if dynamic is None else [self._dynamic_line(file, dynamic)])]
        lines += self._remarks
        if self._job.ship:
            tuned = TunedModel(
                file=file,
                float_file=self._job.output_dir / BASELINE,
                dynamic=dynamic,
                pairs=pairs,
                accuracy=describe_accuracy(result.calibrated),
                proven=kept is None and is_proven_faster(summary),
                float_fault=self._float_fault,
            )
            runtime = dict(benchmark.describe())
            confirmed, out = (summary, events), self._job.output_dir
            lines.insert(0, ship_tuned_model(tuned, session.task, runtime, confirmed, out, self._job.observer))
        if wrong:
            lines.append(
                f"{wrong} of the fastest models are left out: {benchmark.describe().get('name')} computes other "
                f"results than their files describe (see {self._job.output_dir / CHECK_FILE_NAME})"
            )
        for line in lines:
            self._job.observer.say(line)
        with context.log("final").open("a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")

    def _finalists(self, best: Placement) -> tuple[Placement, dict[str, Placement], int]:
        """Return the best placement, the finalists by digest (including the best), and the number of wrong placements.

        Placements with wrong outputs are left out; if the best is one, the float model replaces it.
        """
        session, wrong = self._session, set[str]()
        with self._open_checker() as is_wrong:
            while True:
                rivals = session.fastest_by_digest(FINALISTS, self._context.baseline_ms, wrong)
                if any(best.choices):
                    rivals = {session.space.digest(best): best, **rivals}
                wrong_now = {digest for digest, each in rivals.items() if is_wrong(self._context.candidate(each))}
                if not wrong_now:
                    return best, rivals, len(wrong)
                wrong |= wrong_now
                if session.space.digest(best) in wrong:
                    best = self._float

    @contextmanager
    def _open_checker(self) -> Iterator[Callable[[Candidate], bool]]:
        """Yield a function that returns whether the runtime's outputs differ from those of a candidate's file."""
        observer, floating = self._job.observer, self._job.output_dir / BASELINE
        if runs_no_model(self._context.benchmark.backend):
            yield lambda candidate: False
            return
        with self._context.benchmark.open_fresh_engines() as engines:
            plan = CheckPlan(
                float_file=floating,
                floats={MAIN_BENCHMARKER: floating},
                feeds=self._session.task.feeds,
                folder=self._job.output_dir,
                work=self._session.folder / "check",
                limits=Limits(),
                saturates=machine_lacks_vnni(),
            )
            with RuntimeChecker(plan, engines, observer) as checker:
                own = checker.check(self._float_candidate, name="the float model")
                self._float_fault = str(own) if own.is_wrong else ""

                def is_wrong(candidate: Candidate) -> bool:
                    check = checker.check(candidate)
                    if check.verdict == "not checked":
                        observer.say(f"{candidate.digest}: {check}")
                    return check.is_wrong

                yield is_wrong

    def _select(self, best: Placement, rivals: dict[str, Placement]) -> Placement:
        """Return the winner of the final selection; a single rival needs none, as the confirmation judges it."""
        if len(rivals) < 2:
            return next(iter(rivals.values()), best)
        contest = PairedComparison(
            name="final selection",
            path=self._job.output_dir / "logs" / FINAL_SELECTION_LOG_NAME,
            header={"rows": sorted(rivals), "heats": list(TURNS_PER_RACING_ROUND), **self._session.facts},
            baseline=TimedRow(name="baseline", candidate=self._float_candidate),
            rows=tuple(TimedRow(name=name, candidate=self._context.candidate(p)) for name, p in rivals.items()),
            schedule=FIRST_SCHEDULE,
        )
        try:
            won, speedup = select_winner(contest, self._context.benchmark.open_fresh_engines, self._job.observer)
        except UserError as error:  # several engines at once may need more memory than one
            self._job.observer.say(
                f"No final selection of the fastest {len(rivals)}, the model with the lowest reading is used: {error}"
            )
            return best if any(best.choices) else next(iter(rivals.values()))
        return rivals[won] if won and (speedup > 1 or any(best.choices)) else best

    def _write(self, tried: Path, chosen: Placement, is_faster: bool) -> tuple[Path, Path | None]:
        """Deliver the model that was confirmed, or the float model if it is not faster.

        Returns:
            The delivered file, and the file of the confirmed model if that is another one.
        """
        final, slower = (self._job.output_dir / name for name in (FINAL, NOT_FASTER))
        for path in (slower, slower.with_name(f"{slower.name}.data")):  # left by an earlier run
            path.unlink(missing_ok=True)
        if is_faster or not any(chosen.choices):
            self._context.autotuner.delivered = chosen
            move_model(tried, final)
            return final, None
        self._context.autotuner.delivered = self._float
        move_model(tried, slower)
        return self._context.export(FINAL, self._float), slower

    def _write_dynamic(self, file: Path) -> DynamicModel | None:
        """Write the result with the dynamic axes of the original model, if that has some."""
        task, use = self._session.task, self._context.benchmark.backend.use
        return write_dynamic_model(task.model, file, use, data=task.feeds)

    def _dynamic_line(self, file: Path, dynamic: DynamicModel) -> str:
        return f"{file.name} takes {format_fixed_shapes(self._session.task.model)} alone; {dynamic.remark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneResult:
    """Delivered file and the model that was confirmed.

    Attributes:
        file: Path of the delivered model.
        kept: Path of the confirmed model if the float model was delivered instead, else None.
        pairs: Number of Q/DQ pairs of the confirmed model; 0: it is the float model.
        read: Speedup of the confirmed model by its reading in the search; None if unknown.
        options: Options of the runtime, as text.
        calibrated: Whether the scales come from calibration data.
    """

    file: Path
    kept: Path | None
    pairs: int
    read: float | None
    options: str
    calibrated: bool


def is_proven_faster(summary: ConfirmationSummary) -> bool:
    """Return whether fresh builds of the result are faster than the float model beyond noise."""
    return "final" in summary.rows and summary.rows["final"].verdict == "faster"


def summary_lines(summary: ConfirmationSummary, result: AutotuneResult) -> Iterator[str]:
    """Yield the lines that end a run.

    Args:
        summary: Confirmation with the rows "baseline" and "final".
    """
    kept = "" if result.kept is None else f"; the one with Q/DQ pairs is kept as {result.kept.name}"
    fallback = f"so {result.file.name} is that model{kept}"
    if "final" not in summary.rows:
        yield f"Final: could not be timed: {summary.failed['final'].reason}"
        if result.kept is not None:
            yield f"A model that cannot be timed is not delivered, {fallback}"
        return
    row, interval = summary.rows["final"], summary.rows["final"].speedup
    yield f"Baseline: {summary.rows['baseline'].latency_ms.value:.3f} ms, built afresh as the final model is"
    if result.kept is None and not result.pairs:
        yield "Final: the float model, because no placement of Q/DQ pairs proved faster"
        yield f"Written: {result.file}, which is that model"
        return
    yield (
        f"{'Final' if result.kept is None else result.kept.name}: {row.latency_ms.value:.3f} ms ({interval.value:.3f}x "
        f"speedup, 95 % interval {interval.low:.3f} to {interval.high:.3f}, {row.verdict}; {row.builds} fresh builds "
        f"in turns with the baseline, noise floor {100 * summary.noise_floor:.1f} %), {result.pairs} Q/DQ pairs"
    )
    if row.fully_disturbed:
        uncertain = f"All of its turns were disturbed, so {row.verdict!r} is uncertain"
        yield f"{uncertain}: run the same command again on a quiet machine"
    yield f"Written: {result.file}{f' (timed with {result.options}: deploy it so)' if result.options else ''}"
    if result.kept is not None:
        slower = row.verdict == "slower"
        yield f"{'Slower than' if slower else 'Not faster beyond noise than'} the float model, {fallback}"
    elif not result.calibrated:
        yield "Scales are of random data, so its accuracy is unknown: give --calibration_data before you use it"
    else:
        yield "Its accuracy was not measured: qdq run does, with the evaluator fidelity if there are no labels"
    if result.read is not None and result.read > interval.high:
        yield (
            f"The reading of the search was {result.read:.3f}x: the lowest of many readings is low by chance, so only "
            "the fresh builds count"
        )
