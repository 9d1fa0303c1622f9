"""Workflow from a float model to an optimized one, under ModelOpt's names.

`AutotuneRun` is a searcher for `harness.run.search`. It proposes the initial design, then the schemes of one pattern
after the other, with the best schemes of earlier patterns. The loop builds and times the models.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.base.errors import UserError
from harness.base.progress import ProgressTask, format_incumbent
from harness.base.statistics import Interval, median_ci
from harness.compat.modelopt_autotune.autotuner import QDQAutotuner, Transform
from harness.compat.modelopt_autotune.benchmark import (
    benchmark_onnx_model,
    current_benchmark,
    init_benchmark_instance,
    is_noisy,
)
from harness.compat.modelopt_autotune.delivery import BASELINE, AutotuneJob, Delivery, RunContext
from harness.compat.modelopt_autotune.engine.storage import PatternCache
from harness.compat.modelopt_autotune.region_search import select_regions
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.settings import AutotunerError, AutotunerNotInitializedError, Config
from harness.graph.load import load
from harness.graph.pattern_cache import describe_foreign_schemes
from harness.graph.rules.points import explain_no_points
from harness.measure.records import Failed, Outcome
from harness.plugins.api import Candidate
from harness.results.journal import Journal
from harness.run.prepare.model_loader import MIN_OPSET
from harness.run.search.loop import SearchTask, run_search
from harness.workers.trial_pool import SyncExecutor
from search.api import Failure, Observation, Score
from search.space import Placement

__all__ = ["benchmark_onnx_model", "init_benchmark_instance", "region_pattern_autotuning_workflow", "run_job"]

_logger = logging.getLogger(__name__)
STATE_SAVE_INTERVAL_S = 10.0


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
        UserError: An argument cannot be used, or the float model cannot be timed.
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
        job = AutotuneJob(
            output_dir=Path(folder),
            schemes_per_region=num_schemes_per_region,
            pattern_cache_file=None if pattern_cache_file is None else Path(pattern_cache_file),
            state_file=None if state_file is None else Path(state_file),
            qdq_baseline=None if qdq_baseline_model is None else Path(qdq_baseline_model),
            node_filters=tuple(node_filter_list or ()),
            config=config,
            transform=model_transform,
        )
        return run_job(model, job)


def run_job(model: Any, job: AutotuneJob) -> QDQAutotuner:
    """Run a job; measurements are saved even if it is interrupted.

    Args:
        model: File of the model, or an `onnx.ModelProto`.

    Raises:
        AutotunerNotInitializedError: There is no benchmark.
        UserError: A setting cannot be used, the float model cannot be timed, or the searcher failed.
    """
    benchmark = current_benchmark()
    if benchmark is None:
        raise AutotunerNotInitializedError("Benchmark instance not initialized: call init_benchmark_instance() first")
    autotuner = _create_autotuner(model, job)
    try:
        run = AutotuneRun(RunContext(job, autotuner, benchmark))
        run.search()
        Delivery(run.context, run.remarks).deliver()
    finally:
        if autotuner.baseline_latency_ms is not None:
            autotuner.save_state(str(job.state))
        benchmark.time_against_reference(None, None)
    return autotuner


def _create_autotuner(model: Any, job: AutotuneJob) -> QDQAutotuner:
    for folder in ("logs", "region_models"):
        (job.output_dir / folder).mkdir(parents=True, exist_ok=True)
    cache = None
    if job.pattern_cache_file is not None:
        if job.pattern_cache_file.exists():
            cache = PatternCache.load(str(job.pattern_cache_file))
        else:
            _logger.warning("%s: there is no such pattern cache, so the start is cold", job.pattern_cache_file)
    loaded = load(Path(model), min_opset=MIN_OPSET) if isinstance(model, str | Path) else model
    autotuner = QDQAutotuner(loaded)
    autotuner.initialize(job.config, cache)
    if job.state.exists():
        autotuner.load_state(str(job.state))
        job.observer.say(f"resuming from {job.state}: {len(autotuner.session.measured)} models are measured")
        for sentence in autotuner.changes:
            job.observer.say(sentence)
    return autotuner


class AutotuneRun:
    """Searcher of the search loop that searches the placements of one job, region by region or as a whole.

    Args:
        context: Autotuner, benchmark and files of the job.

    Attributes:
        remarks: Lines about schemes of the pattern cache that were measured on another runtime or device.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._autotuner, self._session, self._job = context.autotuner, context.session, context.job
        self._outcome: Score | Failure | None = None
        self._log_name = "baseline"
        self._saved_s = time.monotonic()
        self._warm = (
            self._autotuner.pattern_cache.seeds
            if self._job.pattern_cache_file and self._autotuner.pattern_cache
            else None
        )
        self.remarks = describe_foreign_schemes(self._warm, self._session.origin) if self._warm else ()

    def search(self) -> None:
        """Time the float model, the initial design and the schemes of all patterns."""
        autotuner, session, say = self._autotuner, self._session, self._job.observer.say
        for sentence in self.remarks:
            _logger.warning(sentence)
        self.context.export(BASELINE, session.space.float_placement())
        regions = select_regions(autotuner.regions, autotuner.graph.nodes, self._job.node_filters)
        session.restrict_to_patterns({autotuner.graph.pattern(region).signature for region in regions})
        say(self._describe_workload())
        say(f"scales: calibrated on {session.task.calibrated_on}")
        for precision in session.task.accuracy_only:
            say(f"this device only emulates {precision}: latencies do not transfer to a device that supports it")
        self._time_baseline()
        turns = [session.placement_map.whole] if self._job.whole else regions
        with self._job.observer.work("search" if self._job.whole else "regions", len(turns)) as step:
            self._proposals = self._propose(turns, step)
            self._run_loop()
            for _ in self._proposals:  # patterns whose profiling ended at a limit
                raise AssertionError("a proposal beyond the limit")

    def ask(self, n: int) -> Sequence[Placement]:
        """Return a list of the next placement to measure, empty after the last."""
        placement = next(self._proposals, None)
        return [] if placement is None else [placement]

    def tell(self, observation: Observation) -> None:
        """Receive the outcome of the last proposal."""
        self._outcome = observation.outcome

    def _run_loop(self) -> None:
        """Run the search loop; its journal is temporary, as the state file is the record to resume from."""
        limit = self._job.max_evals
        task = SearchTask(
            space=self._session.space,
            searcher=self,
            initial_design=(),
            candidate=self.context.candidate,
            evaluations=sys.maxsize if limit is None else max(0, limit - len(self._session.measured)),
            patience=sys.maxsize,
        )
        with Journal(self._session.folder / "journal.jsonl", {}) as journal:
            ended = run_search(task, SyncExecutor(self._measure), journal, lambda event: None)
        if ended.failure is not None:
            raise UserError(
                f"searcher {self._job.config.searcher!r}: {ended.failure.reason}; fix it, then run the same "
                f"command again\n{ended.failure.log_tail}"
            )

    def _measure(self, candidate: Candidate, _: Interval | None = None) -> Outcome:
        return self.context.benchmark.measure(candidate, self.context.log(self._log_name))

    def _time_baseline(self) -> None:
        """Time the float model alone; if that is too uncertain, time everything else in turns with it.

        Raises:
            UserError: It cannot be timed.
        """
        autotuner, benchmark = self._autotuner, self.context.benchmark
        if autotuner.baseline_latency_ms is None:
            outcome = self._measure(self.context.candidate(self._session.space.float_placement()))
            if isinstance(outcome, Failed):
                raise UserError(
                    f"{autotuner.graph.model.source}: the float model cannot be timed on {benchmark.backend.use}, so "
                    f"there is nothing to compare with: {outcome.stage}: {outcome.reason}"
                )
            autotuner.submit(median_ci(outcome.samples_ms).value)
            autotuner.interleaved = is_noisy(outcome)
        if autotuner.interleaved:
            benchmark.time_against_reference(self._job.output_dir / BASELINE, self.context.baseline_ms)
            self._job.observer.say(
                "timing noise is high on this machine: models are timed in turns with the float model, whose "
                f"{self.context.baseline_ms:.3f} ms set the scale; --warmup_runs has no effect then"
            )

    def _propose(self, regions: Sequence[Region], step: ProgressTask) -> Iterator[Placement]:
        """Yield the placements to measure, and store the outcome of each."""
        yield from self._propose_initial()
        for region in regions:
            if not self._is_limit_reached or self._count_measured(self._autotuner.graph.pattern(region).signature):
                self._autotuner.set_profile_region(region, commit=True)
                if self._autotuner.current_profile_pattern_schemes is not None:
                    yield from self._propose_schemes(region)
            step.advance(self._describe_best())
        self._autotuner.set_profile_region(None, commit=True)

    def _propose_initial(self) -> Iterator[Placement]:
        """Yield the initial design; its best placement applies to each pattern until the pattern is profiled."""
        session, baseline_ms = self._session, self.context.baseline_ms
        design = session.initial_placements(self._warm, self._job.qdq_baseline)
        latency_by_name = {}
        for name, placement in design.items():
            measurement = session.measured.get(session.space.digest(placement))
            if measurement is None and not self._is_limit_reached:
                self._log_name = f"start_{name}"
                yield placement
                latency_ms, stderr_ms = self._last_result()
                measurement = session.record(placement, latency_ms, stderr_ms=stderr_ms)
            if measurement is not None:
                latency_by_name[name] = measurement.latency_ms or float("inf")
        best = min(latency_by_name, key=lambda name: latency_by_name[name], default=None)
        if best is not None and latency_by_name[best] < baseline_ms:
            session.base = design[best]
        parts = [
            f"{name} {'failed' if value == float('inf') else f'{value:.3f} ms ({baseline_ms / value:.2f}x)'}"
            for name, value in latency_by_name.items()
        ]
        parts += [f"{name} left out (max_evals)" for name in design if name not in latency_by_name]
        self._job.observer.say(f"baseline {baseline_ms:.3f} ms; starts: {', '.join(parts)}")

    def _propose_schemes(self, region: Region) -> Iterator[Placement]:
        """Yield the schemes of a region's pattern, counting those measured before an interruption."""
        autotuner, limit = self._autotuner, self._job.schemes_per_region
        signature = autotuner.graph.pattern(region).signature
        has_more = not self._is_limit_reached or autotuner.generate() >= 0  # which restores the known results
        while (
            has_more
            and self._count_measured(signature) < limit
            and not self._is_limit_reached
            and (has_more := (index := autotuner.generate()) >= 0)
        ):
            self._log_name = f"region_{region.id}_scheme_{index}"
            yield autotuner.placement()
            latency_ms, stderr_ms = self._last_result()
            autotuner.submit(latency_ms or float("inf"), latency_ms is not None, stderr_ms)
            if time.monotonic() - self._saved_s > STATE_SAVE_INTERVAL_S:
                autotuner.save_state(str(self._job.state))
                self._saved_s = time.monotonic()
        if has_more and self._count_measured(signature) < limit:
            autotuner.unfinished.add(signature)
        name = f"region_{region.id}_level_{region.level}.onnx"
        self.context.export(f"region_models/{name}", autotuner.placement(best=True))
        autotuner.save_state(str(self._job.state))

    def _last_result(self) -> tuple[float | None, float]:
        """Return latency and standard error of the last proposal in ms; None and 0 if it failed."""
        outcome = self._outcome
        return (outcome.objective, outcome.stderr) if isinstance(outcome, Score) else (None, 0.0)

    def _describe_workload(self) -> str:
        """Return the size of the search, or why there is nothing to search."""
        graph, regions, session = self._autotuner.graph, self._autotuner.regions, self._session
        if not len(session.space):
            return explain_no_points(graph.model, graph.dialect, graph.precision)
        patterns = {graph.pattern(region) for region in regions}
        return (
            f"{len(regions)} regions of {len(patterns)} patterns, {len(session.space)} insertion points "
            f"(inputs of nodes and of child regions, and outputs), {len(session.allowed)} of them to be searched"
        )

    def _count_measured(self, signature: str) -> int:
        """Return the number of models that were measured for a pattern."""
        return sum(each.signature == signature for each in self._session.measured.values())

    @property
    def _is_limit_reached(self) -> bool:
        return self._job.max_evals is not None and len(self._session.measured) >= self._job.max_evals

    def _describe_best(self) -> str:
        space = self._session.space
        latencies = {digest: each.latency_ms for digest, each in self._session.measured.items() if each.latency_ms}
        if not latencies:
            return ""
        best = min(latencies, key=lambda digest: latencies[digest])
        is_float = best == space.digest(space.float_placement())
        interleaved = self._autotuner.interleaved
        return format_incumbent(latencies[best], self.context.baseline_ms, interleaved=interleaved, is_float=is_float)
