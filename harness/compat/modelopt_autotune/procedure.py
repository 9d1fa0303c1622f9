"""The whole way from a float model to an optimized one: baseline, starts, region after region, confirmation, files."""

from __future__ import annotations

import fnmatch
import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.compat.modelopt_autotune.autotuner import QDQAutotuner, Transform
from harness.compat.modelopt_autotune.benchmark import Benchmark, current_benchmark
from harness.compat.modelopt_autotune.common import AutotunerError, AutotunerNotInitializedError, Config
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.runoff import FinalSelection, open_checker, select_fastest
from harness.compat.modelopt_autotune.sampling_policy import is_noisy, latency_ms, stderr_ms
from harness.compat.modelopt_autotune.session import export_model
from harness.compat.modelopt_autotune.storage import PatternCache
from harness.compat.modelopt_autotune.summary import AutotuneResult, is_proven_faster, summary_lines
from harness.config.sections import Confirmation
from harness.errors import UserError
from harness.graph.io.files import move_model
from harness.graph.load import load
from harness.graph.pattern_cache import describe_foreign_schemes
from harness.graph.qdq.read_edges import count_pairs
from harness.graph.rules.points import explain_no_points
from harness.progress import NullProgress, Observer, format_incumbent
from harness.records import Failed, Outcome
from harness.selection.paired_timing import SELECTION_LOG_NAME
from harness.task_setup.model_loader import MIN_OPSET
from harness.timing.provenance import format_options
from harness.verification.dynamic_delivery import format_fixed_shapes, write_dynamic_model
from harness.verification.output_comparison import CHECK_FILE_NAME
from search.space import Placement

__all__ = ["AutotuneJob", "run_job"]

_logger = logging.getLogger(__name__)
DEFAULT_FINALISTS = Confirmation().contenders
BUILDS, NOISY_MACHINE_BUILDS = 3, 6
"""Fresh builds of what is delivered and of the float model; more where a machine's readings scatter."""
FINAL, UNPROVED, NOT_FASTER = "optimized_final.onnx", "unproved.onnx", "not_faster.onnx"
"""What is delivered; the choice until it is timed; and where that lies then if it did not prove faster."""
STATE_SAVE_INTERVAL_S = 10.0
"""While a region is under profile, its measurements are saved so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneJob:
    """What to do; see `harness.compat.modelopt_autotune.workflows`.

    Attributes:
        whole: Let the searcher have the whole model at once, instead of region after region.
        max_evals: Measured models at most, the baseline and those of earlier runs included; None: no limit.
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
    observer: Observer = field(default_factory=NullProgress)

    @property
    def state(self) -> Path:
        """The state file."""
        return self.state_file or self.output_dir / "autotuner_state.yaml"


def run_job(model: Any, plan: AutotuneJob) -> QDQAutotuner:
    """Do what a plan says; what was measured is saved even where this is interrupted.

    Args:
        model: File of the model, or an `onnx.ModelProto`.

    Raises:
        AutotunerNotInitializedError: There is no benchmark.
        UserError: Anything given that cannot be used, or a float model that cannot be timed.
    """
    benchmark = current_benchmark()
    if benchmark is None:
        raise AutotunerNotInitializedError("Benchmark instance not initialized: call init_benchmark_instance() first")
    autotuner = _create_autotuner(model, plan)
    run = AutotuneRun(autotuner, benchmark, plan)
    try:
        run.time_initial_placements()
        run.profile_regions()
        run.deliver_and_summarize()
    finally:
        if autotuner.baseline_latency_ms is not None:
            autotuner.save_state(str(plan.state))
        benchmark.time_without_reference()
    return autotuner


def _create_autotuner(model: Any, plan: AutotuneJob) -> QDQAutotuner:
    for folder in ("logs", "region_models"):
        (plan.output_dir / folder).mkdir(parents=True, exist_ok=True)
    cache = None
    if plan.pattern_cache_file is not None:
        if plan.pattern_cache_file.exists():
            cache = PatternCache.load(str(plan.pattern_cache_file))
        else:
            _logger.warning("%s: there is no such pattern cache, so the start is cold", plan.pattern_cache_file)
    loaded = load(Path(model), min_opset=MIN_OPSET) if isinstance(model, str | Path) else model
    autotuner = QDQAutotuner(loaded)
    autotuner.initialize(plan.config, cache)
    if plan.state.exists():
        autotuner.load_state(str(plan.state))
        plan.observer.say(f"going on with {plan.state}: {len(autotuner.session.measured)} models are measured")
        for sentence in autotuner.changes:
            plan.observer.say(sentence)
    return autotuner


class AutotuneRun:
    """One run of the workflow.

    Args:
        autotuner: Initialized, and with its state loaded.
        benchmark: Times its models.
        plan: What to do.
    """

    def __init__(self, autotuner: QDQAutotuner, benchmark: Benchmark, plan: AutotuneJob) -> None:
        self._autotuner = autotuner
        self._session = autotuner.session
        self._benchmark = benchmark
        self._plan = plan
        self._saved_s = time.monotonic()
        self._left_out = 0
        self._warm = autotuner.pattern_cache.seeds if plan.pattern_cache_file and autotuner.pattern_cache else None
        self._elsewhere = describe_foreign_schemes(self._warm, self._session.origin) if self._warm else ()

    def time_initial_placements(self) -> None:
        """Time the float model and the whole placements to begin with; the best of them stands until a turn comes."""
        autotuner, session = self._autotuner, self._session
        for sentence in self._elsewhere:
            _logger.warning(sentence)
        self._export("baseline.onnx", session.space.float_placement())
        session.restrict_to_patterns({autotuner.graph.pattern(region).signature for region in self._selected_regions()})
        self._plan.observer.say(self._describe_workload())
        self._plan.observer.say(f"scales: calibrated on {session.task.calibrated_on}")
        if (precision := self._plan.config.default_quant_type) in session.task.accuracy_only:
            self._plan.observer.say(
                f"this device only emulates {precision}: latencies say nothing of a device that has it"
            )
        self._time_baseline()
        starts = session.initial_placements(self._warm, self._plan.qdq_baseline)
        found = {
            name: self._start(name, placement) for name, placement in starts.items() if self._is_measurable(placement)
        }
        name = min(found, key=lambda each: found[each], default=None)
        if name is not None and found[name] < self._baseline_ms:
            session.base = starts[name]
        told = [f"{each} {self._against_float(value)}" for each, value in found.items()]
        told += [f"{each} left out (max_evals)" for each in starts if each not in found]
        self._plan.observer.say(f"baseline {self._baseline_ms:.3f} ms; starts: {', '.join(told)}")

    def _time_baseline(self) -> None:
        """Time the float model alone; where that tells too little, everything else is timed beside it.

        Raises:
            UserError: It cannot be timed.
        """
        autotuner, session = self._autotuner, self._session
        if autotuner.baseline_latency_ms is None:
            outcome = self._outcome(session.task.candidate(session.space.float_placement()), "baseline")
            if isinstance(outcome, Failed):
                raise UserError(
                    f"{autotuner.graph.model.source}: the float model cannot be timed on "
                    f"{self._benchmark.backend.use}, so there is nothing to compare with: {outcome.stage}: "
                    f"{outcome.reason}"
                )
            autotuner.submit(latency_ms(outcome))
            autotuner.beside_float = is_noisy(outcome)
        if autotuner.beside_float:
            self._benchmark.time_against_reference(self._plan.output_dir / "baseline.onnx", self._baseline_ms)
            self._plan.observer.say(
                "this machine is restless: models are timed in turns with the float model, whose "
                f"{self._baseline_ms:.3f} ms set the scale; --warmup_runs has no effect then"
            )

    def profile_regions(self) -> None:
        """Give each pattern its turn, or the whole model one."""
        turns = [self._session.chart.whole] if self._plan.whole else self._selected_regions()
        with self._plan.observer.work("search" if self._plan.whole else "regions", len(turns)) as step:
            for region in turns:
                if not self._is_evaluation_limit_reached or self._is_profiling_started(region):
                    self._autotuner.set_profile_region(region, commit=True)
                    if self._autotuner.current_profile_pattern_schemes is not None:
                        self._profile_region(region)
                step.advance(self._note())
        self._autotuner.set_profile_region(None, commit=True)

    def deliver_and_summarize(self) -> None:
        """Write the model, build it afresh beside the float model, and say how they compare."""
        chosen = self._select_final(self._final_candidates(self._autotuner.placement(best=True)))
        tried = self._export(UNPROVED, chosen)
        final = replace(self._session.task.candidate(chosen), source=lambda: tried)
        self._outcome(final, "final")
        baseline_path = self._plan.output_dir / "baseline.onnx"
        floating = self._session.task.candidate(self._session.space.float_placement())
        builds = NOISY_MACHINE_BUILDS if self._autotuner.beside_float else BUILDS
        summary = self._benchmark.confirm(final, replace(floating, source=lambda: baseline_path), builds)
        read, pairs = self._session.measured.get(self._session.space.digest(chosen)), count_pairs(tried)
        file, kept = self._deliver(tried, chosen, is_proven_faster(summary))
        delivered = AutotuneResult(
            file=file,
            kept=kept,
            pairs=pairs,
            read=self._baseline_ms / read.latency_ms if read is not None and read.latency_ms else None,
            options=format_options(self._benchmark.describe().get("options", {})),
            calibrated=self._plan.config.calibration_data is not None,
        )
        lines = [
            *summary_lines(summary, delivered),
            *self._with_dynamic_axes(file),
            *self._elsewhere,
        ]
        if self._left_out:
            runtime, record = self._benchmark.describe().get("name"), self._plan.output_dir / CHECK_FILE_NAME
            lines.append(
                f"{self._left_out} of the fastest models are left out: {runtime} computes something else than their "
                f"files say (see {record})"
            )
        for line in lines:
            self._plan.observer.say(line)
        with (self._plan.output_dir / "logs" / "final.log").open("a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")

    def _deliver(self, tried: Path, chosen: Placement, is_faster: bool) -> tuple[Path, Path | None]:
        """Deliver what was timed, or where its Q/DQ pairs have not proved faster the float model, and keep it beside.

        Returns:
            What was delivered, and where the timed model lies if that is another one.
        """
        final, kept = (self._plan.output_dir / name for name in (FINAL, NOT_FASTER))
        for path in (kept, kept.with_name(f"{kept.name}.data")):  # of a run before this one
            path.unlink(missing_ok=True)
        if is_faster or not any(chosen.choices):
            self._autotuner.delivered = chosen
            move_model(tried, final)
            return final, None
        self._autotuner.delivered = self._session.space.float_placement()
        move_model(tried, kept)
        return self._export(FINAL, self._autotuner.delivered), kept

    def _with_dynamic_axes(self, file: Path) -> list[str]:
        """Write what was delivered with the dynamic axes of the original model too; return what to say of it."""
        model = self._autotuner.graph.model
        made = write_dynamic_model(model, file, self._benchmark.backend.use)
        return [] if made is None else [f"{file.name} takes {format_fixed_shapes(model)} alone; {made.remark}"]

    def _final_candidates(self, best: Placement) -> tuple[Placement, dict[str, Placement]]:
        """Return what the walk came to and the fastest by digest, without those that the runtime computes wrongly.

        Where the walk came to such a one, the float model stands in its place.
        """
        session, wrong = self._session, set[str]()
        folder, observer = self._plan.output_dir, self._plan.observer
        with open_checker(self._benchmark, session.task.feeds, folder, observer) as is_wrong:
            while True:
                rivals = session.fastest_by_digest(DEFAULT_FINALISTS, self._baseline_ms, wrong)
                if any(best.choices):
                    rivals = {session.space.digest(best): best, **rivals}
                candidates = {
                    digest: self._transformed(session.task.candidate(each)) for digest, each in rivals.items()
                }
                if not (found := {digest for digest, each in candidates.items() if is_wrong(each)}):
                    return best, rivals
                wrong |= found
                self._left_out = len(wrong)
                if session.space.digest(best) in wrong:
                    best = session.space.float_placement()

    def _select_final(self, found: tuple[Placement, dict[str, Placement]]) -> Placement:
        """What the walk came to, or whichever of the fastest beats it where all are built afresh.

        One rival alone needs no race: the confirmation judges it.

        Args:
            found: See `_final_candidates`.
        """
        space, folder = self._session.space, self._plan.output_dir
        best, rivals = found
        if len(rivals) < 2:
            return next(iter(rivals.values()), best)
        floating = self._session.task.candidate(space.float_placement())
        try:
            won, speedup = select_fastest(
                [self._transformed(self._session.task.candidate(placement)) for placement in rivals.values()],
                replace(floating, source=lambda: folder / "baseline.onnx"),
                FinalSelection(
                    path=folder / "logs" / SELECTION_LOG_NAME,
                    facts=self._session.facts,
                    open_engines=self._benchmark.open_fresh_engines,
                    observer=self._plan.observer,
                ),
            )
        except UserError as error:  # so many engines at once may need more memory than the walk and the final ones
            self._plan.observer.say(f"No runoff of the fastest {len(rivals)}, the lowest reading chooses: {error}")
            return best if any(best.choices) else next(iter(rivals.values()))
        if won and (speedup > 1 or any(best.choices)):
            return rivals[won]
        return best

    def _describe_workload(self) -> str:
        """How much there is to do, or why there is nothing."""
        autotuner, session = self._autotuner, self._session
        if not len(session.space):
            graph = autotuner.graph
            return explain_no_points(graph.model, graph.dialect, graph.precision)
        patterns = {autotuner.graph.pattern(region) for region in autotuner.regions}
        return (
            f"{len(autotuner.regions)} regions of {len(patterns)} patterns, {len(session.space)} insertion points "
            f"(inputs of nodes and of child regions, and outputs), {len(session.allowed)} of them to be searched"
        )

    @property
    def _baseline_ms(self) -> float:
        return self._autotuner.baseline_latency_ms or float("inf")

    def _selected_regions(self) -> list[Region]:
        """The regions to profile: with filters, those that have a node whose name matches."""
        filters, nodes = self._plan.node_filters, self._autotuner.graph.nodes

        def matches(region: Region) -> bool:
            names = (nodes[index].name for index in region.get_region_nodes_and_descendants())
            return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in filters)

        regions = self._autotuner.regions
        found = [region for region in regions if matches(region)] if filters else list(regions)
        if filters and not found:
            raise AutotunerError(f"node filters {', '.join(filters)}: no node of the model has such a name")
        return found

    def _profile_region(self, region: Region) -> None:
        autotuner = self._autotuner
        schemes = autotuner.current_profile_pattern_schemes
        signature = "" if schemes is None else schemes.pattern_signature
        left = not self._is_evaluation_limit_reached or autotuner.generate() >= 0  # which brings back what is known
        while left and not self._is_budget_spent(signature) and (left := (index := autotuner.generate()) >= 0):
            name = f"region_{region.id}_scheme_{index}"
            outcome = self._outcome(autotuner.candidate(), name)
            autotuner.submit(latency_ms(outcome), not isinstance(outcome, Failed), stderr_ms(outcome))
            self._save_periodically()
        if left and self._own(signature) < self._plan.schemes_per_region:
            autotuner.unfinished.add(signature)
        name = f"region_{region.id}_level_{region.level}.onnx"
        self._export(f"region_models/{name}", autotuner.placement(best=True))
        autotuner.save_state(str(self._plan.state))

    def _is_budget_spent(self, signature: str) -> bool:
        """Whether the turn of a pattern is over, counting what was measured in it before an interruption."""
        return self._own(signature) >= self._plan.schemes_per_region or self._is_evaluation_limit_reached

    def _own(self, signature: str) -> int:
        return sum(each.signature == signature for each in self._session.measured.values())

    def _is_profiling_started(self, region: Region) -> bool:
        """Whether something was measured in the turn of a region's pattern."""
        return self._own(self._autotuner.graph.pattern(region).signature) > 0

    @property
    def _is_evaluation_limit_reached(self) -> bool:
        """Whether as many models are measured as may be."""
        limit = self._plan.max_evals
        return limit is not None and len(self._session.measured) >= limit

    def _is_measurable(self, placement: Placement) -> bool:
        """Whether a placement is measured, or still may be."""
        return not self._is_evaluation_limit_reached or self._session.space.digest(placement) in self._session.measured

    def _start(self, name: str, placement: Placement) -> float:
        known = self._session.measured.get(self._session.space.digest(placement))
        if known is None:
            outcome = self._outcome(self._session.task.candidate(placement), f"start_{name}")
            latency = None if isinstance(outcome, Failed) else latency_ms(outcome)
            known = self._session.record(placement, latency, stderr_ms=stderr_ms(outcome))
        return float("inf") if known.latency_ms is None else known.latency_ms

    def _outcome(self, candidate: Candidate, log: str) -> Outcome:
        return self._benchmark.measure(self._transformed(candidate), self._plan.output_dir / f"logs/{log}.log")

    def _transformed(self, candidate: Candidate) -> Candidate:
        transform = self._plan.transform
        if transform is None:
            return candidate
        path = self._session.folder / "transformed.onnx"

        def source() -> Path:
            export_model(transform(self._session.proto(candidate.edges)), path)
            return path

        return replace(candidate, source=source)

    def _export(self, name: str, placement: Placement) -> Path:
        path = self._plan.output_dir / name
        proto = self._session.proto(self._session.space.resolve(placement))
        export_model(proto if self._plan.transform is None else self._plan.transform(proto), path)
        return path

    def _save_periodically(self) -> None:
        if time.monotonic() - self._saved_s > STATE_SAVE_INTERVAL_S:
            self._autotuner.save_state(str(self._plan.state))
            self._saved_s = time.monotonic()

    def _note(self) -> str:
        session = self._session
        known = {digest: each.latency_ms for digest, each in session.measured.items() if each.latency_ms is not None}
        if not known:
            return ""
        best = min(known, key=lambda digest: known[digest])
        is_float = best == session.space.digest(session.space.float_placement())
        return format_incumbent(known[best], self._baseline_ms, beside=self._autotuner.beside_float, is_float=is_float)

    def _against_float(self, latency: float) -> str:
        return "failed" if latency == float("inf") else f"{latency:.3f} ms ({self._baseline_ms / latency:.2f}x)"
