"""Engines in a worker process, so that a crash, a hang or excessive memory use ends a worker and not the search.

`Sandbox` has one worker, to which it sends one request at a time. It replaces a worker that crashed or exceeded a
limit. `InProcess` answers the requests in the worker.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.base.errors import EvaluationFailed, UserError
from harness.base.files import explain_write_errors
from harness.config.sections import Limits, PluginSpec, Sampling
from harness.measure.machine_noise import MachineMonitor
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.measure.sampling import Samples, sample_engine, warm_up
from harness.plugins import registry
from harness.plugins.api import (
    Accuracy,
    Array,
    Artifact,
    Benchmarker,
    Candidate,
    Evaluator,
    Infer,
    NeedsPreparation,
    Probe,
    ReportsParts,
    SharesInputs,
    UsesGpu,
    capabilities_of,
    require_timing,
)
from harness.workers.engines import (
    FIRST_STAGE_EVALUATOR,
    Build,
    BuiltEngine,
    EngineRequest,
    Engines,
    Evaluate,
    Inference,
    Open,
    Prepare,
    Release,
    Request,
    Sample,
    ScoringCallback,
    WorkerHistory,
    WorkerKilled,
    WorkerSpec,
    as_outcome,
    last_lines,
)
from harness.workers.inference import KnownOutputs, open_infer, remember_outputs, with_progress
from harness.workers.locks import device_lock, timing_lock
from harness.workers.process import WorkerProcess, die_with_parent
from search.space import edges_digest

SANDBOX_START_LIMIT_S = 120.0
PROGRESS_MESSAGE = "progress"  # kind of messages with the progress of scoring, which precede an answer
MAX_LOG_BYTES = 65_536
MAX_STARTS = 3  # number of attempts to start a worker that other processes kill
_logger = logging.getLogger(__name__)


def open_engines(
    spec: WorkerSpec, limits: Limits, history: WorkerHistory | None = None
) -> AbstractContextManager[Engines]:
    """Return engines in a worker, or in this process if the main benchmarker is `in_process`.

    Args:
        limits: Limits of each request: seconds and memory; no effect in this process.
        history: Kills and waits of earlier workers, to which those of this one are added; None: none.

    Raises:
        UserError: A benchmarker cannot be constructed.
    """
    plugin = spec.benchmarkers[MAIN_BENCHMARKER]
    in_process = capabilities_of(registry.load_plugin("benchmarker", plugin.use)).in_process
    return InProcess(spec) if in_process else Sandbox(spec, limits, history)


class _Killed(Exception):
    """The worker was killed during a call; `failed` describes it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason)
        self.failed = failed


class Sandbox(Engines):
    """Engines in a worker process.

    A call that exceeds its time or memory limit, or whose worker dies, returns `Failed` with the end of the worker's
    log, and the next call gets a fresh worker. Calls for engines of a dead worker return `Failed` too. If another
    process killed the worker, a start or a build is repeated, and other calls raise `WorkerKilled`. If this happens
    twice in a row, it counts as the candidate's failure, because the kernel kills processes that use too much memory.

    Raises:
        UserError: The worker cannot construct its plug-ins, or the scratch folder cannot be written.
        WorkerKilled: The worker was killed, and its engines are lost; build them again.
    """

    def __init__(self, spec: WorkerSpec, limits: Limits, history: WorkerHistory | None = None) -> None:
        self._spec = spec
        self._limits = limits
        self._history = history or WorkerHistory()
        self._scorer = _Scorer(spec.evaluators)
        self._facts: Mapping[str, Mapping[str, Any]] = {}
        self._worker: WorkerProcess | None = None
        self._next_handle = 0
        self._opened: set[tuple[int, bool]] = set()  # handle, and whether it is timed alone
        self._digests: dict[int, str] = {}  # of the candidates by handle
        self._first_kept_handle = 0  # engines with lower handles were lost with a worker that was killed

    def __enter__(self) -> Sandbox:
        with explain_write_errors(self._spec.workdir):
            self._spec.workdir.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix="worker-", dir=self._spec.workdir))
        self._log = self._scratch / "worker.log"
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._facts[benchmarker]

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Write the candidate's file in the driver, and build its engine in the worker."""
        path = as_outcome("build", candidate.source)
        if isinstance(path, Failed):
            return path
        with explain_write_errors(self._log), suppress(FileNotFoundError):
            os.truncate(self._log, 0)
        with device_lock(self.gpus, waits=self._history.lock_waits_s):
            built: BuiltEngine | Failed = self._send_twice(Build(candidate.digest, candidate.edges, path, benchmarker))
        if isinstance(built, BuiltEngine):
            self._next_handle = built.handle + 1
            self._digests[built.handle] = candidate.digest
        return built

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Return the worker's answer; an evaluator that is a registered object of this process scores here."""
        handle = request.handle
        if isinstance(request, Release):
            self._opened -= {(handle, True), (handle, False)}
            return self._send_twice(request) if self._is_alive(handle) else None
        if isinstance(request, Evaluate | Prepare):
            plugin = self._spec.evaluators[request.evaluator]
            if registry.uses_objects(plugin.use, plugin.params):
                return as_outcome(request.stage, self._score_here, request, on_progress)
        if not isinstance(request, Sample):
            return self._send_to_engine(request, on_progress)
        key = (handle, request.level_ms is None)
        if key not in self._opened or not self._is_alive(handle):
            failed = self._send_to_engine(Open(handle, request.level_ms))  # needs no timing lock
            if isinstance(failed, Failed):
                return failed
            self._opened.add(key)
        # Acquired here, so that waiting for another run counts against no limit.
        with timing_lock(waits=self._history.lock_waits_s):
            return self._send_to_engine(request)

    def _score_here(self, request: Evaluate | Prepare, on_progress: ScoringCallback | None) -> Accuracy | None:
        def infer(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
            outputs = self.infer(request.handle, feeds)
            if isinstance(outputs, Failed):
                raise EvaluationFailed(outputs.reason)
            return outputs

        return self._scorer.score(request, infer, on_progress)

    def _is_alive(self, handle: int) -> bool:
        self._forget_dead_worker()
        return self._worker is not None and handle >= self._worker.first_handle

    def _send_to_engine(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Send a request to an engine; a second kill in a row is the candidate's failure."""
        if not self._is_alive(request.handle):
            reason = f"{request.stage}: the engine ended with an earlier worker; build it again"
            if request.handle < self._first_kept_handle:
                raise WorkerKilled(reason)
            return Failed(stage="crash", reason=reason)
        kills, key = self._history.kills, (self._digests.get(request.handle, ""), type(request))
        with device_lock(self.gpus, waits=self._history.lock_waits_s):
            try:
                answer = self._send(request, on_progress)
            except _Killed as error:
                kills[key] += 1
                if kills[key] > 1:
                    return error.failed
                raise WorkerKilled(error.failed.reason) from error
        del kills[key]
        return answer

    def _send_twice(self, request: Request[Any]) -> Any:
        """Send a request that any worker can answer, a second time if the worker is killed."""
        try:
            return self._send(request)
        except _Killed:
            pass
        try:
            return self._send(request)
        except _Killed as error:
            return error.failed

    def _send(self, request: Request[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Send a request to the worker, and return its answer, or a `Failed` if the worker died or exceeded a limit.

        Raises:
            _Killed: Another process killed the worker.
        """
        started_s = time.perf_counter()
        self._forget_dead_worker()
        worker = self._worker or self._start()
        try:
            worker.send(request)
            answer = self._receive(worker, request.limit_s(self._limits), type(request).__name__.lower(), on_progress)
        except BaseException as error:
            self._stop()
            if isinstance(error, _Killed):
                error.failed = replace(error.failed, wall_s=time.perf_counter() - started_s)
            raise
        if isinstance(answer, Failed):
            log_tail = last_lines(f"{self._read_log()}\n{answer.log_tail}")
            return replace(answer, log_tail=log_tail, wall_s=time.perf_counter() - started_s)
        return answer

    def _receive(
        self, worker: WorkerProcess, limit_s: float, what: str, on_progress: ScoringCallback | None = None
    ) -> Any:
        """Return the worker's answer, or stop the worker and return a `Failed`; `what` names the request."""
        deadline_s = time.monotonic() + limit_s
        memory_gb = self._limits.memory_gb
        try:
            kind, answer = worker.receive(limit_s, memory_gb)
            while kind == PROGRESS_MESSAGE:
                if on_progress is not None:
                    on_progress(*answer)
                kind, answer = worker.receive(deadline_s - time.monotonic(), memory_gb)
        except TimeoutError:
            failed = Failed(stage="timeout", reason=f"{what} took longer than {limit_s:g} s")
        except MemoryError:
            cause = f"{what} used more than {memory_gb:g} GB of memory"
            failed = Failed(stage="crash", reason=f"{cause} (limits.memory_gb, which all engines of a worker share)")
        except (EOFError, OSError):
            failed = Failed(stage="crash", reason=f"the worker {worker.describe_exit()} during {what}")
            _logger.warning("%s; starting a new worker", failed.reason)
            if worker.was_killed and self._worker is worker:  # otherwise `__exit__` did it, in another thread
                self._first_kept_handle = self._next_handle
                raise _Killed(replace(failed, log_tail=last_lines(self._read_log()))) from None
        else:
            if kind == "user_error":
                raise UserError(answer)
            return answer
        self._stop()
        return failed

    def _forget_dead_worker(self) -> None:
        """Forget a worker that ended between two calls."""
        if self._worker is not None and not self._worker.alive:
            if self._worker.was_killed:
                self._first_kept_handle = self._next_handle
            self._stop()

    def _start(self) -> WorkerProcess:
        """Start a worker, and another one if it is killed while it starts."""
        killed: _Killed | None = None
        for _ in range(MAX_STARTS):
            with explain_write_errors(self._log):
                output = self._log.open("ab")
            try:
                with output:
                    worker = self._worker = WorkerProcess(output, self._next_handle)
            except OSError as error:
                raise UserError(f"no worker could be started: {error}") from error
            worker.send((replace(self._spec, workdir=self._scratch), self._next_handle))
            try:
                answer = self._receive(worker, SANDBOX_START_LIMIT_S, "start")
            except _Killed as error:
                self._stop()
                killed = error
                continue
            if isinstance(answer, Failed):
                raise UserError(f"no worker could be started: {answer.reason}\n{last_lines(self._read_log())}")
            self._facts, self.gpus = answer
            return worker
        raise WorkerKilled(f"no worker could be started: {killed}") from killed

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _read_log(self) -> str:
        with suppress(OSError):
            return self._log.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
        return ""


@dataclass(slots=True, kw_only=True)
class _OpenEngine:
    benchmarker: Benchmarker
    artifact: Artifact
    workdir: Path
    build_s: float
    opened: ExitStack = field(default_factory=ExitStack)
    probe: Probe | None = None
    outputs: KnownOutputs = field(default_factory=dict)


class _Scorer:
    """Evaluators by name, each of which is constructed on first use."""

    def __init__(self, plugins: Mapping[str, PluginSpec]) -> None:
        self._plugins = plugins
        self._evaluators: dict[str, Evaluator] = {}
        self._inputs: dict[object, Any] = {}

    def evaluator(self, name: str) -> Evaluator:
        """Return the evaluator with a name; raise `KeyError` for an unknown one."""
        if name not in self._evaluators:
            plugin = self._plugins[name]
            made = self._evaluators[name] = registry.create_plugin("evaluator", plugin.use, plugin.params)
            if isinstance(made, SharesInputs):
                made.share_inputs(self._inputs)
        return self._evaluators[name]

    def score(self, request: Evaluate | Prepare, infer: Infer, on_progress: ScoringCallback | None) -> Accuracy | None:
        """Score an engine, or prepare an evaluator that has `prepare` with the engine of the float model.

        Raises:
            EvaluationFailed: The metric is missing, a figure is not finite, or the evaluator raises it.
        """
        evaluator = self.evaluator(request.evaluator)
        infer = with_progress(infer, evaluator, on_progress)
        if isinstance(request, Prepare):
            if isinstance(evaluator, NeedsPreparation):
                evaluator.prepare(infer)
            return None
        found = evaluator.score(infer)
        metrics = {metric: float(value) for metric, value in found.metrics.items()}
        for metric, value in metrics.items():
            if not math.isfinite(value):
                raise EvaluationFailed(f"{metric} is {value}: the engine's outputs are not finite")
        if evaluator.metric not in metrics:
            raise EvaluationFailed(f"the evaluator gave {', '.join(metrics) or 'nothing'}, but not {evaluator.metric}")
        per_item = tuple(float(value) for value in found.per_item)
        for number, value in enumerate(per_item):
            if not math.isfinite(value):
                raise EvaluationFailed(f"per_item[{number}] is {value}: give a figure for every item, or for none")
        return replace(found, metrics=metrics, per_item=per_item, note=str(found.note))


class InProcess(Engines):
    """Engines that are built, timed and scored in this process.

    Args:
        first_handle: Handle of the first engine.

    Raises:
        UserError: A benchmarker cannot be constructed, or the scratch folder cannot be written.
    """

    def __init__(self, spec: WorkerSpec, first_handle: int = 0) -> None:
        self._benchmarkers: dict[str, Benchmarker] = {}
        gpus = set()
        for name, plugin in spec.benchmarkers.items():
            made: Benchmarker = registry.create_plugin("benchmarker", plugin.use, plugin.params)
            require_timing(plugin.use, made)
            if isinstance(made, UsesGpu):
                gpus.add(made.gpu())
            for adapt in filter(None, (spec.sizes, spec.adapt)):
                made = adapt(made)
            self._benchmarkers[name] = made
        self.gpus = frozenset(gpus)
        self._spec = spec
        self._scorer = _Scorer(spec.evaluators)
        self._engines: dict[int, _OpenEngine] = {}
        self._handles = itertools.count(first_handle)
        self._spare_workdirs: list[Path] = []
        self._machine = MachineMonitor()
        self._reference: int | None = None
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

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._benchmarkers[benchmarker].describe()

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        return as_outcome("build", self._build, candidate, benchmarker)

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
        self._engines[handle] = _OpenEngine(benchmarker=plugin, artifact=artifact, workdir=workdir, build_s=build_s)
        # Facts of a plug-in as JSON values; other objects are converted to text.
        info: dict[str, Any] = json.loads(json.dumps(dict(artifact.info), default=str), parse_constant=str)
        return BuiltEngine(handle=handle, build_s=build_s, info=info)

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        return as_outcome(request.stage, self._answer, request, on_progress)

    def _answer(self, request: EngineRequest[Any], on_progress: ScoringCallback | None) -> Any:
        match request:
            case Open():
                self._probe(request.handle)
                if request.level_ms is not None:
                    self._reference_probe()
            case Sample():
                return self._sample(request)
            case Prepare() | Evaluate():
                return self._score(request, on_progress)
            case Inference():
                return dict(self._probe(request.handle).infer(request.feeds))
            case Release():
                engine = self._engines.pop(request.handle, None)
                if engine is not None:
                    try:
                        engine.opened.close()
                    finally:
                        # An empty folder is kept for the next engine: to remove one takes 3 ms or more.
                        if engine.workdir.is_dir() and not any(engine.workdir.iterdir()):
                            self._spare_workdirs.append(engine.workdir)
                        else:
                            shutil.rmtree(engine.workdir, ignore_errors=True)
        return None

    def _sample(self, request: Sample) -> Samples:
        probe, machine, reference = self._probe(request.handle), None, None
        if not capabilities_of(self._engines[request.handle].benchmarker).in_process:  # else no time of this machine
            machine = self._machine
            other = None if request.level_ms is None else self._reference_probe()
            if other is not None and request.level_ms is not None:
                reference = (other, request.level_ms)
                if not self._reference_warm:
                    warm_up(other, Sampling())
                    self._reference_warm = True
        samples = sample_engine(probe, request.sampling, request.rival, reference=reference, machine=machine)
        if isinstance(probe, ReportsParts):
            return replace(samples, parts_ms=probe.parts_ms(len(samples.latency_ms)))
        return samples

    def _score(self, request: Prepare | Evaluate, on_progress: ScoringCallback | None) -> Accuracy | None:
        engine, probe = self._engines[request.handle], self._probe(request.handle)
        evaluator = self._scorer.evaluator(request.evaluator)
        opened: AbstractContextManager[Infer] = nullcontext(probe.infer)
        if self._spec.concurrent_scoring:
            opened = open_infer(probe, evaluator, engine.build_s)
        with opened as infer:
            keep = isinstance(request, Prepare) or request.evaluator == FIRST_STAGE_EVALUATOR
            if engine.outputs or keep:
                infer = remember_outputs(infer, engine.outputs, keep=keep)
            return self._scorer.score(request, infer, on_progress)

    def _probe(self, handle: int) -> Probe:
        engine = self._engines[handle]
        if engine.probe is None:
            engine.probe = engine.opened.enter_context(engine.benchmarker.open(engine.artifact))
        return engine.probe

    def _reference_probe(self) -> Probe | None:
        """Return the reference engine, built on first use; None if the worker has no reference model."""
        path = self._spec.reference
        if path is None:
            return None
        if self._reference is None:
            candidate = Candidate(digest=edges_digest(()), edges=(), source=lambda: path)
            self._reference = self._build(candidate, MAIN_BENCHMARKER).handle
        return self._probe(self._reference)


def serve(fd: int) -> None:
    """Run a worker: construct the plug-ins, then answer calls until the driver closes the connection `fd`."""
    die_with_parent()
    connection: Connection[Any, Any] = Connection(fd)
    spec, first_handle = connection.recv()

    def report(done: int, total: int) -> None:
        connection.send((PROGRESS_MESSAGE, (done, total)))

    def answer(request: Build | EngineRequest[Any]) -> bytes:
        if isinstance(request, Build):
            candidate = Candidate(digest=request.digest, edges=request.edges, source=lambda: request.path)
            return pickle.dumps(("answer", engines.build(candidate, request.benchmarker)))
        return pickle.dumps(("answer", engines.request(request, report)))

    try:
        with InProcess(spec, first_handle) as engines:
            facts = {name: engines.describe(name) for name in spec.benchmarkers}
            connection.send(("answer", (facts, engines.gpus)))
            while True:
                request = connection.recv()
                try:
                    message = as_outcome(request.stage, answer, request)  # also for a result that cannot be pickled
                except UserError as error:
                    message = pickle.dumps(("user_error", str(error)))
                connection.send_bytes(message if isinstance(message, bytes) else pickle.dumps(("answer", message)))
    except UserError as error:
        connection.send(("user_error", str(error)))
    except EOFError:
        return
