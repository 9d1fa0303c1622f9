"""Ray cluster as an execution target: a pool of workers, all of them alike; see docs/how-to/cluster.md.

Lost workers are replaced. Only this process writes results. A trial transfers its edges and its readings: the model and
its weights are put into the object store once, reach each node once, and placements are written on the node that builds
them.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from harness.base.errors import UserError
from harness.base.files import diff_leaves
from harness.base.paths import HOST_VARIABLE, TRUST_VARIABLE, WAIT_VARIABLE
from harness.base.progress import Observer
from harness.config.sections import ExecutorSpec, Limits, PluginSpec
from harness.measure.provenance import comparability_key
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Candidate, capabilities_of
from harness.workers.engines import (
    BuiltEngine,
    EngineRequest,
    Engines,
    Release,
    Sample,
    ScoringCallback,
    TimingPolicy,
    WorkerKilled,
    WorkerLost,
    WorkerSpec,
    as_outcome,
)
from harness.workers.ray.ray_worker import FILE_CACHE_BYTES, LRUByteCache, ModelFiles, RayWorker
from harness.workers.trial_pool import CandidateWriter, ExecutionTarget, ListFiles, QueueFactory, ThreadedExecutor

TASK_LOAD, SEARCH_LOAD = 1, 1000  # loads of the engines of a task, which are mostly idle, and of a search's worker
RAY_START_LIMIT_S = 120.0  # a worker imports the harness, on a machine that may be busy starting others
RAY_SHUTDOWN_LIMIT_S = 5.0  # workers that have not removed their files by then are killed
RAY_POLL_INTERVAL_S = 1.0  # between two checks whether the pool was closed during a call
RAY_ANSWER_LIMIT_S = 60.0  # for the transfer of a call and its result, and for the query of a worker's wait for locks
FILES_LIMIT_S = 1800.0  # of calls that transfer a model, and of opening engines, which starts up to three processes
STATUS_GROUP = "status"  # of calls that a worker answers during other calls
_DRIVER_VARIABLES = (HOST_VARIABLE, TRUST_VARIABLE, WAIT_VARIABLE)
_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RayWorkerHandle:
    """Driver's handle of a worker.

    Attributes:
        environment: See `harness.measure.provenance.describe_environment`.
        load: Sum of `TASK_LOAD` and `SEARCH_LOAD` of the engines that are open on it.
        turn: Held during a call, because the worker handles one at a time and the limit of a call begins with it.
        lock_wait_s: Seconds that it has waited for other runs on its node, as of the last query.
    """

    actor: Any
    node: str
    environment: Mapping[str, Any]
    load: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    lock_wait_s: float = 0.0


class RayPool:
    """Workers on the cluster that Ray is connected to.

    Args:
        resources: Resources that each worker reserves.
        known: Environment of the machine that the results were begun on; None: that of the first worker.
        list_files: Function that returns the files of a model.
    """

    def __init__(
        self,
        count: int,
        resources: Mapping[str, float],
        known: Mapping[str, Any] | None,
        observer: Observer,
        list_files: ListFiles,
    ) -> None:
        own = dict(resources)
        self._count = count
        self._options: Mapping[str, Any] = {
            "num_cpus": own.pop("CPU", 0 if own else 1),
            "num_gpus": own.pop("GPU", 0),
            "resources": own,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",  # use as many nodes as there are
        }
        requested = {"CPU": self._options["num_cpus"], "GPU": self._options["num_gpus"], **own}
        self._requested = {name: amount for name, amount in requested.items() if amount}
        self._known = known
        self._observer = observer
        self._list_files = list_files
        self._lock = threading.RLock()
        self._starting: dict[Any, Any] = {}
        self._workers: list[RayWorkerHandle] = []
        self._rejected: list[Any] = []
        self._facts: dict[str, Mapping[str, Any]] = {}
        self._numbers = itertools.count()
        self._uploaded: LRUByteCache[Any] = LRUByteCache(FILE_CACHE_BYTES, lambda _: None)
        self.closed = False

    def start(self) -> None:
        """Start the workers, and wait for as many as the cluster has resources for now."""
        for _ in range(self._count):
            self._request_worker()
        nodes: Sequence[Mapping[str, Any]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        capacity = sum(
            min((int(node.get(name, 0) // amount) for name, amount in self._requested.items()), default=1)
            for node in nodes
        )
        available = max(1, min(self._count, capacity))
        ray.wait(list(self._starting), num_returns=available, timeout=RAY_START_LIMIT_S)
        with self._lock:
            self._require_worker()
        if len(self._workers) < self._count:
            self._observer.say(
                f"{len(self._workers)} of {self._count} workers: the cluster has no room for more that are like the "
                "first; more join when the cluster has room"
            )

    def environment(self) -> Mapping[str, Any]:
        """Return the environment of the workers, which are all alike."""
        with self._lock:
            return self._known or self._workers[0].environment

    def pick(self, load: int) -> RayWorkerHandle:
        """Add `load` to the worker with the lowest load, and return it; raise `UserError` if none starts in time."""
        with self._lock:
            self._require_worker()
            worker = min(self._workers, key=lambda worker: worker.load)
            worker.load += load
            return worker

    def check_reserved(self, gpus: Set[str]) -> None:
        """Check that each worker has the GPU of its engines to itself.

        Raises:
            UserError: Ray reserves none or a part of one, so that all workers of a node would be timed on its first.
        """
        if gpus and self._options["num_gpus"] < 1:
            raise UserError(
                "executor.resources: engines run on a GPU, and each worker needs one to itself: resources: {GPU: 1}"
            )

    def check_alike(self, worker: RayWorkerHandle, benchmarkers: str, facts: Mapping[str, Any]) -> bool:
        """Return whether benchmarkers give the same facts on this worker as on the others; reject the worker if not."""
        with self._lock:
            different = list(diff_leaves(self._facts.setdefault(benchmarkers, facts), facts))
            if different and worker in self._workers:
                self._workers.remove(worker)
                self._reject(worker.actor, worker.node, different)
        return not different

    def next_session_number(self) -> int:
        """Return a new session number."""
        return next(self._numbers)

    def upload_model(self, path: Path) -> tuple[str, Any]:
        """Return a key to a model's files and their reference in the object store, which sends them once per node."""
        status = path.stat()
        key = repr((str(path), status.st_size, status.st_mtime_ns))
        with self._lock:
            reference = self._uploaded.get(key)
            if reference is None:
                files: ModelFiles = {part.name: part.read_bytes() for part in self._list_files(path)}
                reference = ray.put(files)
                self._uploaded.put(key, reference, sum(map(len, files.values())))
            return key, reference

    def call(self, worker: RayWorkerHandle, what: str, limit_s: float, method: Any, *args: Any) -> Any:
        """Call a method of a worker's actor and wait for its result; waits for other runs on its node do not count.

        `what` names the call in messages.

        Raises:
            WorkerLost: The worker is gone or exceeded the limit, or the pool was closed meanwhile.
            UserError: Raised by the worker; its name is added.
        """
        try:
            with worker.turn:
                reference = method.remote(*args)
                self._wait(worker, reference, limit_s + RAY_ANSWER_LIMIT_S, what)
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, WorkerKilled):  # its process on the node was, not this worker
                raise WorkerKilled(f"{error.cause} (on {worker.node})") from None
            if isinstance(error.cause, UserError):
                raise UserError(f"{error.cause} (on {worker.node})") from None
            raise
        except RayError as error:
            text = _first_line(error)
            with self._lock:
                removed = worker in self._workers
                if removed:
                    self._workers.remove(worker)
                    left = len(self._workers)
                    self._request_worker()
            if removed:
                _kill(worker.actor)
                self._observer.say(f"the worker on {worker.node} was lost ({text}); {left} left")
            raise WorkerLost(f"the worker on {worker.node} was lost: {text}") from error

    def _wait(self, worker: RayWorkerHandle, reference: Any, limit_s: float, what: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while not ray.wait([reference], timeout=RAY_POLL_INTERVAL_S)[0]:
            if self.closed:
                raise WorkerLost("the run is ending")
            if time.monotonic() > deadline_s:
                known_s = worker.lock_wait_s
                with suppress(GetTimeoutError):  # it does not answer
                    answer = worker.actor.lock_wait_s.options(concurrency_group=STATUS_GROUP).remote()
                    worker.lock_wait_s = ray.get(answer, timeout=RAY_ANSWER_LIMIT_S)
                if worker.lock_wait_s == known_s:
                    raise GetTimeoutError(f"{what} took longer than {limit_s:g} s")
                deadline_s += worker.lock_wait_s - known_s

    def release(self, worker: RayWorkerHandle, load: int) -> None:
        """Subtract `load` from the load of a worker."""
        with self._lock:
            worker.load -= load

    def close(self) -> None:
        """End all workers."""
        self.closed = True
        with self._lock:
            actors = [*(worker.actor for worker in self._workers), *self._starting.values(), *self._rejected]
            ending = [worker.actor.end.remote() for worker in self._workers]
            self._workers, self._starting = [], {}
            self._uploaded = LRUByteCache(FILE_CACHE_BYTES, lambda _: None)
        if ending:
            with suppress(RayError):
                ray.wait(ending, num_returns=len(ending), timeout=RAY_SHUTDOWN_LIMIT_S)
        for actor in actors:
            _kill(actor)

    def _require_worker(self) -> None:
        """Admit all workers that are ready; raise `UserError` if there is none, and none starts in time."""
        self._admit_ready(0.0)
        if not self._workers:
            self._admit_ready(RAY_START_LIMIT_S)
        if not self._workers or self.closed:
            resources = ray.cluster_resources()
            requested, offered = (
                ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
                for amounts in (self._requested, {name: resources.get(name, 0) for name in self._requested})
            )
            rejected = f"; {len(self._rejected)} were refused" if self._rejected else ""
            raise UserError(
                f"executor: no worker can be used: each requests {requested}, the cluster has {offered} in all"
                f"{rejected}; all results are saved: add nodes, then run the same command again to resume"
            )

    def _request_worker(self) -> None:
        variables = {name: os.environ[name] for name in _DRIVER_VARIABLES if name in os.environ}
        actor_class = ray.remote(concurrency_groups={STATUS_GROUP: 1})(RayWorker)
        actor = actor_class.options(**self._options).remote(sys.path, variables)
        self._starting[actor.describe.remote(None)] = actor

    def _admit_ready(self, timeout_s: float) -> None:
        """Admit the workers that are ready and whose environment is that of the others, after waiting for the first."""
        while self._starting:
            ready, _ = ray.wait(list(self._starting), num_returns=1, timeout=timeout_s)
            if not ready:
                return
            actor = self._starting.pop(ready[0])
            try:
                facts = ray.get(ready[0])
            except RayError as error:  # it died, cannot be placed, or cannot import the harness
                self._observer.say(f"a worker could not be started: {_first_line(error)}")
                _kill(actor)
                continue
            node, environment = facts["node"], facts["environment"]
            if facts["niceness"] > 0:
                self._observer.say(
                    f"the worker on {node} has a low priority there (niceness {facts['niceness']}): "
                    "start its node with RAY_worker_niceness=0 in the environment"
                )
            if self._known is None:
                self._known = environment
            different = list(diff_leaves(comparability_key(self._known), comparability_key(environment)))
            if different:
                self._reject(actor, node, different)
                continue
            self._workers.append(RayWorkerHandle(actor=actor, node=node, environment=environment))
            timeout_s = 0.0

    def _reject(self, actor: Any, node: str, different: Sequence[str]) -> None:
        """Reject a worker: figures of different devices or libraries are never compared directly."""
        lines = "\n".join(f"  {line}" for line in different)
        self._observer.say(f"the worker on {node} is refused because it differs from the baseline's:\n{lines}")
        self._rejected.append(actor)  # kept alive: it holds its device, so that the next worker starts elsewhere
        self._request_worker()


def _kill(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def open_ray_target(
    executor: ExecutorSpec, limits: Limits, known: Mapping[str, Any] | None, observer: Observer, list_files: ListFiles
) -> Iterator[RayTarget]:
    """Connect to the cluster and start the workers; end them and disconnect on exit.

    For the arguments see `harness.workers.ray.open_execution_target`.
    """
    opened = not ray.is_initialized()  # an existing connection is used and stays open
    if opened:
        try:
            ray.init(
                address=executor.address,
                include_dashboard=None if executor.address != "local" else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"executor.address: no Ray cluster at {executor.address!r} ({error}); start one with 'ray start "
                "--head --disable-usage-stats', or use address: local"
            ) from error
    try:
        pool = RayPool(executor.workers, executor.resources, known, observer, list_files)
        try:
            pool.start()
            yield RayTarget(pool, executor, limits)
        finally:
            pool.close()
    finally:
        if opened:
            ray.shutdown()


class RayTarget(ExecutionTarget):
    """Workers of a Ray cluster."""

    def __init__(self, pool: RayPool, executor: ExecutorSpec, limits: Limits) -> None:
        self._pool = pool
        self._executor = executor
        self._limits = limits

    def environment(self, commit: str | None) -> dict[str, Any]:
        return {**self._pool.environment(), **({} if commit is None else {"git_commit": commit})}

    def describe(self, backend: PluginSpec, workdir: Path) -> Mapping[str, Any]:
        with self.open(WorkerSpec(benchmarkers={MAIN_BENCHMARKER: backend}, workdir=workdir)) as engines:
            return engines.describe()

    def open(self, spec: WorkerSpec) -> RemoteEngines:
        return RemoteEngines(self._pool, spec, self._limits)

    @contextmanager
    def workers(
        self, spec: WorkerSpec, engines: Engines, writer: CandidateWriter, baseline: Candidate
    ) -> Iterator[QueueFactory]:
        """Open a task's share of the workers."""
        stored_writer = ray.put(writer)

        @contextmanager
        def open_worker() -> Iterator[Engines]:
            with RemoteEngines(self._pool, spec, self._limits, stored_writer) as worker:
                if spec.evaluators:
                    prepare_evaluators(worker, spec, baseline)
                yield worker

        share = max(1, self._executor.workers // self._executor.tasks)
        with ThreadedExecutor(open_worker, share, TimingPolicy()) as pool:
            yield pool.open_queue


class RemoteEngines(Engines):
    """Engines on a worker of the cluster; every call raises `WorkerLost` if the worker is gone.

    Scoring progress is not reported.

    Args:
        writer: Reference to the candidate writer in the object store, for a worker of searches; None: candidates are
            sent as files.
    """

    def __init__(self, pool: RayPool, spec: WorkerSpec, limits: Limits, writer: Any = None) -> None:
        self._pool = pool
        self._spec = replace(spec, concurrent_scoring=False)  # other workers may share the machine
        self._limits = limits
        self._writer = writer
        self._load = TASK_LOAD if writer is None else SEARCH_LOAD
        plugin = spec.benchmarkers[MAIN_BENCHMARKER]
        self._needs_files = not capabilities_of(registry.load_plugin("benchmarker", plugin.use)).in_process
        self._number = pool.next_session_number()
        self._facts: Mapping[str, Mapping[str, Any]] = {}

    def __enter__(self) -> RemoteEngines:
        while True:
            self._worker: RayWorkerHandle = self._pool.pick(self._load)
            try:
                self._facts, gpus = self._remote(
                    "open", FILES_LIMIT_S, self._worker.actor.open, self._spec, self._limits, self._writer
                )
                self._pool.check_reserved(gpus)
            except WorkerLost:
                if self._pool.closed:
                    raise
                continue  # the pool picks another worker, or reports that there is none
            except BaseException:
                self._pool.release(self._worker, self._load)
                raise
            if self._pool.check_alike(self._worker, str(self._spec.benchmarkers), self._facts):
                return self

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._worker, self._load)
        self._worker.actor.close.remote(self._number)

    def describe(self, benchmarker: str = MAIN_BENCHMARKER) -> Mapping[str, Any]:
        return self._facts[benchmarker]

    def build(self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER) -> BuiltEngine | Failed:
        """Build an engine; the worker writes the file of a placement, any other model is sent as files.

        Args:
            benchmarker: Name of the benchmarker in the worker's specification.

        Returns:
            The engine, or the failure of its build.
        """
        limit_s, build = 2 * self._limits.build_s, self._worker.actor.build  # the sandbox may repeat a build once
        request = (candidate.digest, candidate.edges, benchmarker)
        if not self._needs_files or (candidate.edges and self._writer is not None):
            return self._remote("build", limit_s, build, *request)  # type: ignore[no-any-return]
        path = as_outcome("build", candidate.source)
        if isinstance(path, Failed):
            return path
        key, files = self._pool.upload_model(path)
        built = self._remote("build", limit_s, build, *request, key)
        if isinstance(built, KeyError):  # the worker does not have these files, or not any more
            self._pool.call(self._worker, "transfer", FILES_LIMIT_S, self._worker.actor.store_files, key, files)
            built = self._remote("build", limit_s, build, *request, key)
        return built  # type: ignore[no-any-return]

    def request(self, request: EngineRequest[Any], on_progress: ScoringCallback | None = None) -> Any:
        """Return the worker's answer; a release is not waited for."""
        answer = self._worker.actor.answer
        if isinstance(request, Release):
            answer.remote(self._number, request)
            return None
        limit_s = request.limit_s(self._limits)
        if isinstance(request, Sample):  # which the sandbox may precede by opening the engine
            limit_s *= 2
        return self._remote(type(request).__name__.lower(), limit_s, answer, request)

    def _remote(self, what: str, limit_s: float, method: Any, *args: Any) -> Any:
        """Call a method of the worker, which may have to release an engine before."""
        return self._pool.call(self._worker, what, limit_s + self._limits.measure_s, method, self._number, *args)


def prepare_evaluators(engines: Engines, spec: WorkerSpec, baseline: Candidate) -> None:
    """Call `prepare` of each evaluator with an engine of the float model, on the worker that will score.

    The files that it writes are not transferred between machines.

    Args:
        baseline: The float model.

    Raises:
        UserError: The float model cannot be built or scored.
    """
    built = engines.build(baseline)
    failed = built if isinstance(built, Failed) else None
    if isinstance(built, BuiltEngine):
        outcomes = [engines.prepare(built.handle, name) for name in spec.evaluators]
        failed = next((outcome for outcome in outcomes if outcome is not None), None)
        engines.release(built.handle)
    if failed is not None:
        raise UserError(f"a worker cannot score the float model; {failed.stage}: {failed.reason}")
