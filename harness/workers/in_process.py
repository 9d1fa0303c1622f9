"""Engines in this process: for worker processes, and for benchmarkers that execute no model and need no isolation."""

from __future__ import annotations

import errno
import itertools
import json
import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from harness.base.errors import CandidateError, EvaluationFailed, UserError, WorkerUnusable
from harness.base.files import explain_write_errors
from harness.config.sections import PluginSpec, Sampling
from harness.measure.machine_noise import MachineMonitor
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.reference_sampling import ReferenceEngine, sample_against_reference
from harness.measure.sampling import Samples, sample_engine, warm_up
from harness.plugins import registry
from harness.plugins.api import (
    Accuracy,
    Artifact,
    Benchmarker,
    Candidate,
    Evaluator,
    Infer,
    NeedsPreparation,
    Probe,
    ReportsParts,
    UsesGpu,
    capabilities_of,
    require_timing,
)
from harness.workers import requests
from harness.workers.engines import FIRST_STAGE_EVALUATOR, Engines, ScoringCallback, WorkerSpec
from harness.workers.inference import KnownOutputs, open_infer, remember_outputs, with_progress
from harness.workers.requests import BuiltEngine, EngineRequest, Evaluate, Open, Prepare, Release, Sample
from search.space import edges_digest

T = TypeVar("T")
MAX_LOG_LINES = 40
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True, kw_only=True)
class _OpenEngine:
    benchmarker: Benchmarker
    artifact: Artifact
    workdir: Path
    opened: ExitStack
    build_s: float
    probe: Probe | None = None
    outputs: KnownOutputs = field(default_factory=dict)


class Scorer:
    """Evaluators by name, each of which is constructed on first use."""

    def __init__(self, plugins: Mapping[str, PluginSpec]) -> None:
        self._plugins = plugins
        self._evaluators: dict[str, Evaluator] = {}

    def evaluator(self, name: str) -> Evaluator:
        """Return the evaluator with a name; raise `KeyError` for an unknown one."""
        if name not in self._evaluators:
            plugin = self._plugins[name]
            self._evaluators[name] = registry.create_plugin("evaluator", plugin.use, plugin.params)
        return self._evaluators[name]

    def prepare(self, infer: Infer, name: str, on_progress: ScoringCallback | None) -> None:
        """Run the `prepare` of an evaluator that has one; `infer` is that of the float model's engine."""
        evaluator = self.evaluator(name)
        if isinstance(evaluator, NeedsPreparation):
            evaluator.prepare(with_progress(infer, evaluator, on_progress))

    def evaluate(self, infer: Infer, name: str, on_progress: ScoringCallback | None) -> Accuracy:
        """Score an engine; raise `EvaluationFailed` if a figure is not finite or the evaluator raises it."""
        evaluator = self.evaluator(name)
        return _checked(evaluator.score(with_progress(infer, evaluator, on_progress)), evaluator)


class InProcess(Engines):
    """Engines that are built, timed and scored in this process.

    Args:
        first_handle: Handle of the first engine.

    Raises:
        UserError: A benchmarker cannot be constructed, or the scratch folder cannot be written.
    """

    def __init__(self, spec: WorkerSpec, first_handle: int = 0) -> None:
        self._plain: Mapping[str, Benchmarker] = {
            name: registry.create_plugin("benchmarker", plugin.use, plugin.params)
            for name, plugin in spec.benchmarkers.items()
        }
        for name, plugin in spec.benchmarkers.items():
            require_timing(plugin.use, self._plain[name])
        self._benchmarkers = self._plain
        for adapt in filter(None, (spec.sizes, spec.adapt)):
            self._benchmarkers = {name: adapt(each) for name, each in self._benchmarkers.items()}
        self._spec = spec
        self._scorer = Scorer(spec.evaluators)
        self._engines: dict[int, _OpenEngine] = {}
        self._handles = itertools.count(first_handle)
        self._spare_workdirs: list[Path] = []
        self._machine = MachineMonitor()
        self._reference_handle: int | None = None
        self._reference_warm = False
        with explain_write_errors(spec.workdir):
            spec.workdir.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix="engines-", dir=spec.workdir))

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in list(self._engines):
            self.release(handle)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        return as_outcome("build", self._build, candidate, benchmarker)

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        return as_outcome(request.stage, self._answer, request, on_progress)

    def _answer(self, request: EngineRequest[Any], on_progress: ScoringCallback | None) -> Any:
        match request:
            case Open():
                self._probe(request.handle)
                if request.level_ms is not None:
                    self._reference(request.level_ms)
            case Sample():
                return self._sample(request)
            case Prepare():
                with self._open_infer(request.handle, request.evaluator) as infer:
                    infer = remember_outputs(infer, self._engines[request.handle].outputs, keep=True)
                    self._scorer.prepare(infer, request.evaluator, on_progress)
            case Evaluate():
                return self._evaluate(request, on_progress)
            case requests.Infer():
                return dict(self._probe(request.handle).infer(request.feeds))
            case Release():
                self._release(request.handle)
        return None

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._benchmarkers[benchmarker].describe()

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(each.gpu() for each in self._plain.values() if isinstance(each, UsesGpu))

    def _build(self, candidate: Candidate, benchmarker: str) -> BuiltEngine:
        handle = next(self._handles)
        workdir = self._spare_workdirs.pop() if self._spare_workdirs else self._scratch / str(handle)
        with explain_write_errors(workdir):
            workdir.mkdir(exist_ok=True)
        plugin = self._benchmarkers[benchmarker]
        started_s = time.perf_counter()
        artifact = plugin.build(candidate, workdir)
        build_s = time.perf_counter() - started_s
        if artifact.info.get("recorded"):  # a replay reports the build time of the recorded engine
            build_s = float(artifact.info["build_s"])
        self._engines[handle] = _OpenEngine(
            benchmarker=plugin, artifact=artifact, workdir=workdir, opened=ExitStack(), build_s=build_s
        )
        return BuiltEngine(handle=handle, build_s=build_s, info=_to_json_values(artifact.info))

    def _sample(self, request: Sample) -> Samples:
        probe = self._probe(request.handle)
        samples = self._sample_probe(probe, request)
        if isinstance(probe, ReportsParts):
            return replace(samples, parts_ms=probe.parts_ms(len(samples.latency_ms)))
        return samples

    def _sample_probe(self, probe: Probe, request: Sample) -> Samples:
        if capabilities_of(self._engines[request.handle].benchmarker).in_process:  # no time of this machine
            return sample_engine(probe, request.sampling, request.rival)
        reference = None if request.level_ms is None else self._reference(request.level_ms)
        if reference is None:
            return sample_engine(probe, request.sampling, request.rival, machine=self._machine)
        if not self._reference_warm:
            warm_up(reference.probe, Sampling())
            self._reference_warm = True
        return sample_against_reference(probe, reference, request.sampling, request.rival, machine=self._machine)

    def _reference(self, level_ms: float) -> ReferenceEngine | None:
        """Return the reference engine, built on first use; None if the worker has no reference model."""
        path = self._spec.reference
        if self._reference_handle is None and path is not None:
            candidate = Candidate(digest=edges_digest(()), edges=(), source=lambda: path)
            self._reference_handle = self._build(candidate, MAIN_BENCHMARKER).handle
        handle = self._reference_handle
        return None if handle is None else ReferenceEngine(self._probe(handle), level_ms)

    def _probe(self, handle: int) -> Probe:
        engine = self._engines[handle]
        if engine.probe is None:
            engine.probe = engine.opened.enter_context(engine.benchmarker.open(engine.artifact))
        return engine.probe

    def _evaluate(self, request: Evaluate, on_progress: ScoringCallback | None) -> Accuracy:
        outputs, first_stage = self._engines[request.handle].outputs, request.evaluator == FIRST_STAGE_EVALUATOR
        with self._open_infer(request.handle, request.evaluator) as infer:
            if outputs or first_stage:
                infer = remember_outputs(infer, outputs, keep=first_stage)
            return self._scorer.evaluate(infer, request.evaluator, on_progress)

    def _open_infer(self, handle: int, name: str) -> AbstractContextManager[Infer]:
        probe, evaluator = self._probe(handle), self._scorer.evaluator(name)
        if self._spec.concurrent_scoring:
            return open_infer(probe, evaluator, self._engines[handle].build_s)
        return nullcontext(probe.infer)

    def _release(self, handle: int) -> None:
        engine = self._engines.pop(handle, None)
        if engine is not None:
            try:
                engine.opened.close()
            finally:
                self._recycle_workdir(engine.workdir)

    def _recycle_workdir(self, workdir: Path) -> None:
        """Keep an empty folder for the next engine, because the removal of a folder takes 3 ms or more."""
        with suppress(OSError):
            if not any(workdir.iterdir()):
                self._spare_workdirs.append(workdir)
                return
        shutil.rmtree(workdir, ignore_errors=True)


def _checked(accuracy: Accuracy, evaluator: Evaluator) -> Accuracy:
    """Return a result with Python floats; raise `EvaluationFailed` if one is not finite or the metric is missing."""
    metrics = {metric: float(value) for metric, value in accuracy.metrics.items()}
    for metric, value in metrics.items():
        if not math.isfinite(value):
            raise EvaluationFailed(f"{metric} is {value}: the engine's outputs are not finite")
    if evaluator.metric not in metrics:
        raise EvaluationFailed(f"the evaluator gave {', '.join(metrics) or 'nothing'}, but not {evaluator.metric}")
    per_item = tuple(float(value) for value in accuracy.per_item)
    for number, value in enumerate(per_item):
        if not math.isfinite(value):
            raise EvaluationFailed(f"per_item[{number}] is {value}: give a figure for every item, or for none")
    return replace(accuracy, metrics=metrics, per_item=per_item, note=str(accuracy.note))


def as_outcome(stage: str, work: Callable[..., T], *args: Any) -> T | Failed:
    """Return the result of a plug-in call, or its exception as a `Failed`.

    Args:
        stage: Stage of the failure for exceptions other than `CandidateError`.
        work: The call.
        *args: Its arguments.

    Raises:
        UserError: The plug-in raised it, or the disk is full; neither depends on the candidate.
        WorkerUnusable: The plug-in raised it; the worker ends.
    """
    started_s = time.perf_counter()
    try:
        return work(*args)
    except (UserError, WorkerUnusable):  # neither depends on the candidate
        raise
    except (Exception, SystemExit) as error:  # plug-ins and runtimes may raise anything
        if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS:
            raise UserError(f"{stage}: {error}; free disk space, then run the same command again to resume") from error
        reason, trace = f"{type(error).__name__}: {error}", last_lines(traceback.format_exc())
        if isinstance(error, CandidateError):
            stage, reason, trace = error.stage, str(error), ""
        wall_s = time.perf_counter() - started_s
        return Failed(stage=stage, reason=" ".join(reason.split())[:500], log_tail=trace, wall_s=wall_s)


def _to_json_values(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a plug-in as JSON values; other objects are converted to text."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(info), default=str), parse_constant=str)
    return plain


def last_lines(text: str) -> str:
    """Return the last 40 lines of a log."""
    return "\n".join(text.strip().splitlines()[-MAX_LOG_LINES:])
