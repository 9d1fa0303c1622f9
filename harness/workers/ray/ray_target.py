"""Ray cluster as an execution target; see docs/how-to/cluster.md.

Only this process writes results. A trial transfers its edges and its readings: the model and its weights are put into
the object store once, reach each node once, and placements are written on the node that builds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from harness.base.errors import UserError
from harness.base.progress import Observer
from harness.config.sections import ExecutorSpec, Limits, PluginSpec
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Candidate, capabilities_of
from harness.workers.engines import Engines, ScoringCallback, TimingPolicy, WorkerSpec
from harness.workers.execution_target import CandidateWriter, ExecutionTarget, ListFiles, QueueFactory
from harness.workers.in_process import as_outcome
from harness.workers.ray.ray_pool import SEARCH_LOAD, TASK_LOAD, RayPool, RayWorkerHandle
from harness.workers.ray.ray_worker import BuildRequest
from harness.workers.requests import BuiltEngine, EngineRequest, Release, Sample
from harness.workers.trial_pool import ThreadedExecutor, WorkerLost

FILES_LIMIT_S = 1800.0  # of calls that transfer a model, and of opening engines, which starts up to three processes


@contextmanager
def open_ray_target(
    executor: ExecutorSpec, limits: Limits, known: Mapping[str, Any] | None, observer: Observer, list_files: ListFiles
) -> Iterator[RayTarget]:
    """Connect to the cluster and start the workers; end them and disconnect on exit.

    For the arguments see `harness.workers.ray.open_execution_target`.
    """
    with _ray_connection(executor.address):
        pool = RayPool(executor.workers, executor.resources, known, observer, list_files)
        try:
            pool.start()
            yield RayTarget(pool, executor, limits)
        finally:
            pool.close()


@contextmanager
def _ray_connection(address: str) -> Iterator[None]:
    """Hold a connection to the cluster; an existing connection is used and stays open."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(
            address=address, include_dashboard=None if address != "local" else False, log_to_driver=False,
            logging_level=logging.ERROR, configure_logging=False,
        )  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"executor.address: no Ray cluster at {address!r} ({error}); start one with 'ray start --head "
            "--disable-usage-stats', or use address: local"
        ) from error
    try:
        yield
    finally:
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
        request = BuildRequest(digest=candidate.digest, edges=candidate.edges)
        if not self._needs_files or (candidate.edges and self._writer is not None):
            return self._remote("build", limit_s, build, request, benchmarker)  # type: ignore[no-any-return]
        path = as_outcome("build", candidate.source)
        if isinstance(path, Failed):
            return path
        key, files = self._pool.upload_model(path)
        request = BuildRequest(digest=candidate.digest, edges=candidate.edges, files_key=key)
        built = self._remote("build", limit_s, build, request, benchmarker)
        if isinstance(built, KeyError):  # the worker does not have these files, or not any more
            self._pool.call(self._worker, "transfer", FILES_LIMIT_S, self._worker.actor.store_files, key, files)
            built = self._remote("build", limit_s, build, request, benchmarker)
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
