"""Workflow from a float model to an optimized one, under ModelOpt's names.

`AutotuneRun` measures the initial design, then the schemes of one pattern after the other, with the best schemes of
earlier patterns. Then it selects and confirms the result with the functions of `harness.run`, and writes the files.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.progress import NullProgress, Observer, format_incumbent
from harness.base.statistics import median_ci, stderr_from_interval
from harness.compat.modelopt_autotune.autotuner import QDQAutotuner, Transform
from harness.compat.modelopt_autotune.benchmark import (
    Benchmark,
    benchmark_onnx_model,
    current_benchmark,
    init_benchmark_instance,
    is_noisy,
)
from harness.compat.modelopt_autotune.insertion_points import Region
from harness.compat.modelopt_autotune.region_search import select_regions
from harness.compat.modelopt_autotune.session import AutotuneSession, PatternCache
from harness.compat.modelopt_autotune.settings import AutotunerError, AutotunerNotInitializedError, Config
from harness.config.sections import Confirmation, Limits
from harness.graph.io.files import move_model, write_model
from harness.graph.load import load
from harness.graph.qdq.qdq_graph import count_pairs
from harness.graph.rules.points import explain_no_points
from harness.measure.elimination import TURNS_PER_RACING_ROUND
from harness.measure.provenance import format_options, machine_lacks_vnni
from harness.measure.records import Failed
from harness.measure.turn_log import ConfirmationSummary, summarize_turns
from harness.plugins.api import Candidate
from harness.results.artifacts import FLOAT_ROW
from harness.results.output_check import CHECK_FILE_NAME
from harness.results.turns import FINAL_SELECTION_LOG_NAME
from harness.run.confirm.confirmation import PairedComparison, TimedRow, run_comparison
from harness.run.early_answer import EarlyAnswer
from harness.run.prepare.model_loader import MIN_OPSET
from harness.run.select.final_selection import FIRST_SCHEDULE, select_winner
from harness.run.verify.dynamic_check import format_fixed_shapes, write_dynamic_model
from harness.run.verify.runtime_checker import RuntimeChecker, make_check_plan, runs_no_model
from harness.ship.results_bundle import ship_confirmed
from search.space import Placement

__all__ = ["benchmark_onnx_model", "init_benchmark_instance", "region_pattern_autotuning_workflow"]

_logger = logging.getLogger(__name__)
STATE_SAVE_INTERVAL_S = 10.0
FINALISTS = Confirmation().candidates
BUILDS, NOISY_MACHINE_BUILDS = 3, 6  # fresh builds of the result and of the float model
ROUNDS = 4  # of a build
BASELINE, FINAL, NOT_FASTER = "baseline.onnx", "optimized_final.onnx", "not_faster.onnx"
UNPROVED = "unproved.onnx"  # the result until it is confirmed


def region_pattern_autotuning_workflow(
    model_path: Any = None,
    output_dir: Path | None = None,
    num_schemes_per_region: int = 30,
    pattern_cache_file: str | None = None,
    state_file: str | None = None,
    quant_type: str = "int8",
    default_dq_dtype: str = "float32",
    qdq_baseline_model: str | None = None,
    node_filter_list: Sequence[str] | None = None,
    verbose: bool = False,
    model_transform: Transform | None = None,
    *,
    model_or_path: Any = None,
    calibration_data: str | None = None,
    calibration_samples: int | None = None,
) -> QDQAutotuner:
    """Optimize a model region by region; call `init_benchmark_instance` first.

    Args:
        model_path: File of the model, or an `onnx.ModelProto`.
        output_dir: Folder for all files; None: they are deleted.
        num_schemes_per_region: Maximum number of schemes that are measured for one pattern.
        pattern_cache_file: Pattern cache of an earlier run; a missing file causes a warning.
        state_file: State to resume from, if it exists; by default `autotuner_state.yaml` in the output folder.
        quant_type: "int8" or "fp8".
        default_dq_dtype: Type of tensors whose type cannot be inferred.
        qdq_baseline_model: Q/DQ model made from this model, for the initial design.
        node_filter_list: Wildcards; regions without a node whose name matches one of them stay float.
        model_transform: Applied to each `onnx.ModelProto` before it is built or written.
        model_or_path: Name of `model_path` in later versions of ModelOpt.

    Raises:
        AutotunerNotInitializedError: There is no benchmark.
    """
    model = model_or_path if model_path is None else model_path
    if model is None:
        raise AutotunerError("region_pattern_autotuning_workflow needs model_path: a file or an onnx.ModelProto")
    with contextlib.ExitStack() as stack:
        folder = output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qdq-autotune-")))
        config = Config(
            default_quant_type=quant_type,
            default_dq_dtype=default_dq_dtype,
            verbose=verbose,
            calibration_data=calibration_data,
            calibration_samples=calibration_samples,
        )
        run = AutotuneRun(
            output_dir=Path(folder),
            schemes_per_region=num_schemes_per_region,
            pattern_cache_file=None if pattern_cache_file is None else Path(pattern_cache_file),
            state_file=None if state_file is None else Path(state_file),
            qdq_baseline=None if qdq_baseline_model is None else Path(qdq_baseline_model),
            node_filters=tuple(node_filter_list or ()),
            config=config,
            transform=model_transform,
        )
        return run.run(model)


@dataclass(kw_only=True)
class AutotuneRun:
    """Search of placements, region by region or of the whole model, and delivery of the result.

    Attributes without a line are as the arguments of `region_pattern_autotuning_workflow`.

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
    _autotuner: QDQAutotuner = field(init=False)
    _session: AutotuneSession = field(init=False)
    _benchmark: Benchmark = field(init=False)
    _float: Placement = field(init=False)
    _saved_s: float = field(default_factory=time.monotonic)
    _remarks: tuple[str, ...] = ()

    @property
    def state(self) -> Path:
        return self.state_file or self.output_dir / "autotuner_state.yaml"

    def run(self, model: Any) -> QDQAutotuner:
        """Search and deliver; measurements are saved even if the run is interrupted.

        Args:
            model: File of the model, or an `onnx.ModelProto`.

        Raises:
            AutotunerNotInitializedError: There is no benchmark.
        """
        benchmark = current_benchmark()
        if benchmark is None:
            message = "Benchmark instance not initialized: call init_benchmark_instance() first"
            raise AutotunerNotInitializedError(message)
        for folder in ("logs", "region_models"):
            (self.output_dir / folder).mkdir(parents=True, exist_ok=True)
        cache, cache_file = None, self.pattern_cache_file
        if cache_file is not None and not cache_file.exists():
            _logger.warning("%s: there is no such pattern cache, so the start is cold", cache_file)
        elif cache_file is not None:
            cache = PatternCache.load(str(cache_file))
        autotuner = QDQAutotuner(load(Path(model), min_opset=MIN_OPSET) if isinstance(model, str | Path) else model)
        autotuner.initialize(self.config, cache)
        if self.state.exists():
            autotuner.load_state(str(self.state))
            self.observer.say(f"resuming from {self.state}: {len(autotuner.session.measured)} models are measured")
            for sentence in autotuner.changes:
                self.observer.say(sentence)
        try:
            self._autotuner, self._session, self._benchmark = autotuner, autotuner.session, benchmark
            self._float = self._session.space.float_placement()
            self._search(None if cache is None else cache_file)
            self._deliver()
        finally:
            if autotuner.baseline_latency_ms is not None:
                autotuner.save_state(str(self.state))
            benchmark.time_against_reference(None, None)
        return autotuner

    def _search(self, cache_file: Path | None) -> None:
        """Time the float model, the initial design and the schemes of all patterns.

        Args:
            cache_file: Pattern cache of an earlier run; None: there is none.
        """
        autotuner, session = self._autotuner, self._session
        self._export(self._float, self.output_dir / BASELINE)
        graph, regions = autotuner.graph, select_regions(autotuner.regions, autotuner.graph.nodes, self.node_filters)
        signatures = {graph.pattern(region).signature for region in regions}
        searched = {i for each in signatures for i in session.placement_map.dimensions(each).values()}
        session.allowed = tuple(sorted(searched))
        if len(session.space):
            patterns = {graph.pattern(region) for region in autotuner.regions}
            self.observer.say(
                f"{len(autotuner.regions)} regions of {len(patterns)} patterns, {len(session.space)} insertion points "
                f"(inputs of nodes and of child regions, and outputs), {len(session.allowed)} of them to be searched"
            )
        else:
            self.observer.say(explain_no_points(graph.model, graph.dialect, graph.precision))
        self.observer.say(f"scales: calibrated on {session.task.calibrated_on}")
        for precision in session.task.accuracy_only:
            self.observer.say(
                f"this device only emulates {precision}: latencies do not transfer to a device that supports it"
            )
        if autotuner.baseline_latency_ms is None:
            outcome = self._benchmark.measure(self._candidate(self._float), self._log("baseline"))
            if isinstance(outcome, Failed):
                raise UserError(
                    f"{graph.model.source}: the float model cannot be timed on {self._benchmark.backend.use}, so "
                    f"there is nothing to compare with: {outcome.stage}: {outcome.reason}"
                )
            autotuner.submit(median_ci(outcome.samples_ms).value)
            autotuner.interleaved = is_noisy(outcome)
        if autotuner.interleaved:
            self._benchmark.time_against_reference(self.output_dir / BASELINE, self._baseline_ms)
            self.observer.say(
                "timing noise is high on this machine: models are timed in turns with the float model, whose "
                f"{self._baseline_ms:.3f} ms set the scale; --warmup_runs has no effect then"
            )
        turns = [session.placement_map.whole] if self.whole else regions
        with self.observer.work("search" if self.whole else "regions", len(turns)) as step:
            self._time_initial(cache_file)
            for region in turns:
                if not self._is_limit_reached or self._count_measured(graph.pattern(region).signature):
                    autotuner.set_profile_region(region, commit=True)
                    if autotuner.current_profile_pattern_schemes is not None:
                        self._search_region(region)
                step.advance(self._describe_best())
            autotuner.set_profile_region(None, commit=True)

    def _time_initial(self, cache_file: Path | None) -> None:
        """Time the initial design; its best placement applies to each pattern until the pattern is profiled."""
        session, baseline_ms = self._session, self._baseline_ms
        design, self._remarks = session.initial_placements(cache_file, self.qdq_baseline)
        latency_by_name, parts = {}, []
        for name, placement in design.items():
            measurement = session.measured.get(session.space.digest(placement))
            if measurement is None and self._is_limit_reached:
                parts.append(f"{name} left out (max_evals)")
                continue
            if measurement is None:
                latency_ms, stderr_ms = self._measure(placement, f"start_{name}")
                measurement = session.record(placement, latency_ms, stderr_ms=stderr_ms)
            if measurement.latency_ms is None:
                parts.append(f"{name} failed")
                continue
            latency_by_name[name] = measurement.latency_ms
            parts.append(f"{name} {measurement.latency_ms:.3f} ms ({baseline_ms / measurement.latency_ms:.2f}x)")
        best = min(latency_by_name, key=lambda name: latency_by_name[name], default=None)
        if best is not None and latency_by_name[best] < baseline_ms:
            session.base = design[best]
        self.observer.say(f"baseline {baseline_ms:.3f} ms; starts: {', '.join(parts)}")

    def _search_region(self, region: Region) -> None:
        """Measure the schemes of a region's pattern, counting those measured before an interruption."""
        autotuner = self._autotuner
        signature = autotuner.graph.pattern(region).signature
        if self._count_measured(signature) >= self.schemes_per_region:
            autotuner.generate()  # which restores the known results
        while self._count_measured(signature) < self.schemes_per_region and (index := autotuner.generate()) >= 0:
            if self._is_limit_reached:
                autotuner.unfinished.add(signature)
                break
            latency_ms, stderr_ms = self._measure(autotuner.placement(), f"region_{region.id}_scheme_{index}")
            autotuner.submit(latency_ms or float("inf"), latency_ms is not None, stderr_ms)
            if time.monotonic() - self._saved_s > STATE_SAVE_INTERVAL_S:
                autotuner.save_state(str(self.state))
                self._saved_s = time.monotonic()
        model_file = self.output_dir / "region_models" / f"region_{region.id}_level_{region.level}.onnx"
        self._export(autotuner.placement(best=True), model_file)
        autotuner.save_state(str(self.state))

    def _measure(self, placement: Placement, log_name: str) -> tuple[float | None, float]:
        """Return latency and standard error of a placement in ms; None and 0 if it failed."""
        outcome = self._benchmark.measure(self._candidate(placement), self._log(log_name))
        if isinstance(outcome, Failed):
            return None, 0.0
        interval = median_ci(outcome.samples_ms)
        return interval.value, stderr_from_interval(interval)

    def _candidate(self, placement: Placement, file: Path | None = None) -> Candidate:
        """Return the candidate of a placement: its model with the transform of the job, or `file` if given."""
        candidate = self._session.task.candidate(placement)
        if file is None and self.transform is None:
            return candidate
        path = self._session.folder / "transformed.onnx"
        return replace(candidate, source=lambda: file or self._export(placement, path))

    def _export(self, placement: Placement, path: Path) -> Path:
        """Write the model of a placement to a file, and return its path."""
        proto = self._session.proto(self._session.space.resolve(placement))
        write_model(proto if self.transform is None else self.transform(proto), path)
        return path

    def _log(self, name: str) -> Path:
        return self.output_dir / "logs" / f"{name}.log"

    def _count_measured(self, signature: str) -> int:
        """Return the number of models that were measured for a pattern."""
        return sum(each.signature == signature for each in self._session.measured.values())

    @property
    def _is_limit_reached(self) -> bool:
        return self.max_evals is not None and len(self._session.measured) >= self.max_evals

    @property
    def _baseline_ms(self) -> float:
        return self._autotuner.baseline_latency_ms or float("inf")

    def _describe_best(self) -> str:
        latencies = {digest: each.latency_ms for digest, each in self._session.measured.items() if each.latency_ms}
        if not latencies:
            return ""
        best = min(latencies, key=lambda digest: latencies[digest])
        is_float, interleaved = best == self._session.space.digest(self._float), self._autotuner.interleaved
        return format_incumbent(latencies[best], self._baseline_ms, interleaved=interleaved, is_float=is_float)

    def _deliver(self) -> None:
        """Select and confirm the result, write it or the float model if that is not slower, and report both."""
        session, benchmark, out = self._session, self._benchmark, self.output_dir
        task, float_candidate = session.task, self._candidate(self._float, out / BASELINE)
        best, rivals, wrong, float_fault = self._find_finalists(float_candidate)
        chosen = self._select(float_candidate, best, rivals)
        tried = self._export(chosen, out / UNPROVED)
        benchmark.measure(self._candidate(chosen), self._log("final"))
        confirmation = PairedComparison(
            name="confirmation",
            baseline=TimedRow(name=FLOAT_ROW, candidate=float_candidate),
            rows=(TimedRow(name="final", candidate=self._candidate(chosen, tried)),),
            schedule=Confirmation(
                builds=NOISY_MACHINE_BUILDS if self._autotuner.interleaved else BUILDS,
                rounds=ROUNDS,
                samples=max(3, min(20, benchmark.timing_runs // 5)),
            ),
        )
        events = run_comparison(confirmation, benchmark.open_fresh_engines, self.observer)
        summary = summarize_turns(events, baseline=FLOAT_ROW)
        pairs, proven = count_pairs(tried), is_proven_faster(summary)
        file, slower = out / FINAL, out / NOT_FASTER
        for path in (slower, slower.with_name(f"{slower.name}.data")):  # left by an earlier run
            path.unlink(missing_ok=True)
        kept = slower if any(chosen.choices) and not proven else None
        self._autotuner.delivered = chosen if kept is None else self._float
        move_model(tried, kept or file)
        if kept is not None:
            self._export(self._float, file)
        measurement = session.measured.get(session.space.digest(chosen))
        read_ms, runtime = None if measurement is None else measurement.latency_ms, dict(benchmark.describe())
        answer = EarlyAnswer(
            task=task, file=file, runtime=runtime, method="autotune", digest="final", pairs=pairs, summary=summary,
            events=events, evaluations=len(session.measured), metric=None,
        )  # fmt: skip
        calibrated = self.config.calibration_data is not None
        lines = list(summary_lines(answer, kept, self._baseline_ms / read_ms if read_ms else None, calibrated))
        dynamic = write_dynamic_model(task.model, file, benchmark.backend.use, data=task.feeds)
        if dynamic is not None:
            lines.append(f"{file.name} takes {format_fixed_shapes(task.model)} alone; {dynamic.remark}")
        lines += self._remarks
        if self.ship:
            proven = proven and kept is None
            shipped = ship_confirmed(answer, dynamic, out, self.observer, proven=proven, float_fault=float_fault)
            lines.insert(0, shipped)
        if wrong:
            lines.append(
                f"{wrong} of the fastest models are left out: {runtime.get('name')} computes other results than their "
                f"files describe (see {out / CHECK_FILE_NAME})"
            )
        for line in lines:
            self.observer.say(line)
        with self._log("final").open("a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")

    def _find_finalists(self, float_candidate: Candidate) -> tuple[Placement, dict[str, Placement], int, str]:
        """Return the best placement, the finalists by digest (including the best), and what the check found.

        Placements with wrong outputs are left out; if the best is one, the float model replaces it.

        Returns:
            After best and finalists the number of wrong placements, and the fault of the float model as text or "".
        """
        session, best, wrong = self._session, self._autotuner.placement(best=True), set[str]()
        with contextlib.ExitStack() as stack:
            checker = None
            if not runs_no_model(self._benchmark.backend):
                plan = make_check_plan(session.task, self.output_dir, Limits(), machine_lacks_vnni())
                engines = stack.enter_context(self._benchmark.open_fresh_engines())
                checker = stack.enter_context(RuntimeChecker(plan, engines, self.observer))

            def find_fault(candidate: Candidate, name: str) -> str:
                check = None if checker is None else checker.check(candidate, name=name)
                if check is not None and check.verdict == "not checked":
                    self.observer.say(f"{name}: {check}")
                return str(check) if check is not None and check.is_wrong else ""

            float_fault = find_fault(float_candidate, "the float model")
            while True:
                rivals = session.fastest_by_digest(FINALISTS, self._baseline_ms, wrong)
                if any(best.choices):
                    rivals = {session.space.digest(best): best, **rivals}
                wrong_now = {digest for digest, each in rivals.items() if find_fault(self._candidate(each), digest)}
                if not wrong_now:
                    return best, rivals, len(wrong), float_fault
                wrong |= wrong_now
                if session.space.digest(best) in wrong:
                    best = self._float

    def _select(self, float_candidate: Candidate, best: Placement, rivals: dict[str, Placement]) -> Placement:
        """Return the winner of the final selection; a single rival needs none, as the confirmation judges it."""
        if len(rivals) < 2:
            return next(iter(rivals.values()), best)
        contest = PairedComparison(
            name="final selection",
            path=self._log("").with_name(FINAL_SELECTION_LOG_NAME),
            header={"rows": sorted(rivals), "heats": list(TURNS_PER_RACING_ROUND), **self._session.facts},
            baseline=TimedRow(name="baseline", candidate=float_candidate),
            rows=tuple(TimedRow(name=name, candidate=self._candidate(each)) for name, each in rivals.items()),
            schedule=FIRST_SCHEDULE,
        )
        try:
            won, speedup = select_winner(contest, self._benchmark.open_fresh_engines, self.observer)
        except UserError as error:  # several engines at once may need more memory than one
            self.observer.say(
                f"No final selection of the fastest {len(rivals)}, the model with the lowest reading is used: {error}"
            )
            return best if any(best.choices) else next(iter(rivals.values()))
        return rivals[won] if won and (speedup > 1 or any(best.choices)) else best


def is_proven_faster(summary: ConfirmationSummary) -> bool:
    """Return whether fresh builds of the result are faster than the float model beyond noise."""
    return "final" in summary.rows and summary.rows["final"].verdict == "faster"


def summary_lines(answer: EarlyAnswer, kept: Path | None, read: float | None, calibrated: bool) -> Iterator[str]:
    """Yield the lines that end a run.

    Args:
        answer: The delivered file with the confirmation of the row "final"; without pairs that is the float model.
        kept: Path of the confirmed model if the float model was delivered instead, else None.
        read: Speedup of the confirmed model by its reading in the search; None if unknown.
        calibrated: Whether the scales come from calibration data.
    """
    summary, file, pairs = answer.summary, answer.file, answer.pairs
    options = format_options(answer.runtime.get("options", {}))
    fallback = f"so {file.name} is that model"
    if kept is not None:
        fallback += f"; the one with Q/DQ pairs is kept as {kept.name}"
    if "final" not in summary.rows:
        yield f"Final: could not be timed: {summary.failed['final'].reason}"
        if kept is not None:
            yield f"A model that cannot be timed is not delivered, {fallback}"
        return
    row, interval = summary.rows["final"], summary.rows["final"].speedup
    yield f"Baseline: {summary.rows[FLOAT_ROW].latency_ms.value:.3f} ms, built afresh as the final model is"
    if kept is None and not pairs:
        yield "Final: the float model, because no placement of Q/DQ pairs proved faster"
        yield f"Written: {file}, which is that model"
        return
    yield (
        f"{'Final' if kept is None else kept.name}: {row.latency_ms.value:.3f} ms ({interval.value:.3f}x "
        f"speedup, 95 % interval {interval.low:.3f} to {interval.high:.3f}, {row.verdict}; {row.builds} fresh builds "
        f"in turns with the baseline, noise floor {100 * summary.noise_floor:.1f} %), {pairs} Q/DQ pairs"
    )
    if row.fully_disturbed:
        uncertain = f"All of its turns were disturbed, so {row.verdict!r} is uncertain"
        yield f"{uncertain}: run the same command again on a quiet machine"
    yield f"Written: {file}{f' (timed with {options}: deploy it so)' if options else ''}"
    if kept is not None:
        slower = row.verdict == "slower"
        yield f"{'Slower than' if slower else 'Not faster beyond noise than'} the float model, {fallback}"
    elif not calibrated:
        yield "Scales are of random data, so its accuracy is unknown: give --calibration_data before you use it"
    else:
        yield "Its accuracy was not measured: qdq run does, with the evaluator fidelity if there are no labels"
    if read is not None and read > interval.high:
        yield (
            f"The reading of the search was {read:.3f}x: the lowest of many readings is low by chance, so only "
            "the fresh builds count"
        )
