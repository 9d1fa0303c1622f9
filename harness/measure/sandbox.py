"""Engines behind a process boundary: what crashes, hangs or eats the memory is a worker, never the search.

`Sandbox` keeps one worker and gives it one call at a time; it is replaced when a call kills it or runs
out of time. `InProcess` does the work itself, in the worker or, for benchmarkers that touch no runtime,
in the driver.
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
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from harness import registry
from harness.api import Accuracy, Artifact, Benchmarker, Candidate, Evaluator, Probe
from harness.errors import CandidateError, EvaluationFailed, UserError
from harness.measure.engines import MAIN, Built, Engines, WorkerSpec
from harness.measure.sampling import Samples, take
from harness.measure.worker import Worker, end_with_driver
from harness.records import Failed
from harness.run.config import Limits, Sampling
from search.space import Resolved

__all__ = ["InProcess", "Sandbox", "open_engines", "serve"]

T = TypeVar("T")
LOG_LINES = 40
START_S = 120.0
_logger = logging.getLogger(__name__)


def open_engines(spec: WorkerSpec, limits: Limits) -> AbstractContextManager[Engines]:
    """Engines of these plug-ins: in a worker, or here where the main benchmarker says `in_process = True`.

    Raises:
        UserError: A benchmarker cannot be made.
    """
    use = spec.benchmarkers[MAIN]
    here = getattr(registry.load("benchmarker", use.use), "in_process", False)
    return InProcess(spec) if here else Sandbox(spec, limits)


@dataclass(slots=True, kw_only=True)
class _Engine:
    benchmarker: Benchmarker
    artifact: Artifact
    workdir: Path
    opened: ExitStack
    probe: Probe | None = None


class InProcess:
    """Builds, times and scores in this process; see `harness.measure.engines.Engines`."""

    def __init__(self, spec: WorkerSpec, first_handle: int = 0) -> None:
        self._benchmarkers: Mapping[str, Benchmarker] = {
            name: registry.create("benchmarker", use.use, use.params) for name, use in spec.benchmarkers.items()
        }
        self._spec = spec
        self._evaluators: dict[str, Evaluator] = {}
        self._engines: dict[int, _Engine] = {}
        self._handles = itertools.count(first_handle)
        spec.workdir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="engines-", dir=spec.workdir))

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in list(self._engines):
            self.release(handle)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        """See `Engines`."""
        return _attempt("build", lambda: self._build(candidate, self._benchmarkers[benchmarker]))

    def _build(self, candidate: Candidate, benchmarker: Benchmarker) -> Built:
        handle = next(self._handles)
        workdir = self._scratch / str(handle)
        workdir.mkdir()
        started_s = time.perf_counter()
        artifact = benchmarker.build(candidate, workdir)
        build_s = time.perf_counter() - started_s
        self._engines[handle] = _Engine(benchmarker=benchmarker, artifact=artifact, workdir=workdir, opened=ExitStack())
        return Built(handle=handle, build_s=build_s, info=_plain(artifact.info))

    def sample(self, handle: int, sampling: Sampling) -> Samples | Failed:
        """See `Engines`."""
        return _attempt("measure", lambda: take(self._probe(handle), sampling))

    def evaluate(self, handle: int, evaluator: str = MAIN) -> Accuracy | Failed:
        """See `Engines`."""
        return _attempt("evaluate", lambda: self._evaluate(handle, evaluator))

    def prepare(self, handle: int, evaluator: str = MAIN) -> Failed | None:
        """See `Engines`."""
        return _attempt("evaluate", lambda: self._prepare(handle, evaluator))

    def _prepare(self, handle: int, name: str) -> None:
        prepare = getattr(self._evaluator(name), "prepare", None)
        if prepare is not None:
            prepare(self._probe(handle).infer)

    def _evaluator(self, name: str) -> Evaluator:
        if name not in self._evaluators:
            use = self._spec.evaluators[name]
            self._evaluators[name] = registry.create("evaluator", use.use, use.params)
        return self._evaluators[name]

    def _evaluate(self, handle: int, name: str) -> Accuracy:
        evaluator = self._evaluator(name)
        accuracy = evaluator.score(self._probe(handle).infer)
        metrics = {metric: float(value) for metric, value in accuracy.metrics.items()}
        for metric, value in metrics.items():
            if not math.isfinite(value):
                raise EvaluationFailed(f"{metric} is {value}: the engine's outputs are not finite")
        if evaluator.metric not in metrics:
            raise EvaluationFailed(f"the evaluator gave {', '.join(metrics) or 'nothing'}, but not {evaluator.metric}")
        return Accuracy(metrics=metrics, per_item=tuple(float(value) for value in accuracy.per_item))

    def release(self, handle: int) -> None:
        """See `Engines`."""
        engine = self._engines.pop(handle, None)
        if engine is not None:
            _attempt("release", engine.opened.close)
            shutil.rmtree(engine.workdir, ignore_errors=True)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._benchmarkers[benchmarker].describe()

    def _probe(self, handle: int) -> Probe:
        engine = self._engines[handle]
        if engine.probe is None:
            engine.probe = engine.opened.enter_context(engine.benchmarker.open(engine.artifact))
        return engine.probe


class Sandbox:
    """Engines in a worker process; see `harness.measure.engines.Engines`.

    A call that outlasts its limit, or a worker that dies, gives `Failed` with the end of the worker's
    log, and the next call finds a fresh worker. Engines that died with theirs give `Failed` too.

    Raises:
        UserError: On entering the context: the worker cannot make its plug-ins.
    """

    def __init__(self, spec: WorkerSpec, limits: Limits) -> None:
        self._spec = spec
        self._limits = limits
        self._facts: Mapping[str, Mapping[str, Any]] = {}
        self._worker: Worker | None = None
        self._next_handle = 0

    def __enter__(self) -> Sandbox:
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

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        """See `Engines`; the file is made here, by the driver, and only its path goes to the worker."""
        path = _attempt("build", candidate.source)
        if isinstance(path, Failed):
            return path
        with suppress(FileNotFoundError):
            os.truncate(self._log, 0)
        built = self._call("build", self._limits.build_s, candidate.digest, candidate.edges, path, benchmarker)
        if isinstance(built, Built):
            self._next_handle = built.handle + 1
        return built  # type: ignore[no-any-return]

    def sample(self, handle: int, sampling: Sampling) -> Samples | Failed:
        """See `Engines`."""
        return self._lost(handle, "measure") or self._call("sample", self._limits.measure_s, handle, sampling)

    def evaluate(self, handle: int, evaluator: str = MAIN) -> Accuracy | Failed:
        """See `Engines`."""
        return self._lost(handle, "evaluate") or self._call("evaluate", self._limits.evaluate_s, handle, evaluator)

    def prepare(self, handle: int, evaluator: str = MAIN) -> Failed | None:
        """See `Engines`."""
        return self._lost(handle, "evaluate") or self._call("prepare", self._limits.evaluate_s, handle, evaluator)

    def release(self, handle: int) -> None:
        """See `Engines`."""
        if self._lost(handle, "release") is None:
            self._call("release", self._limits.measure_s, handle)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._facts[benchmarker]

    def _lost(self, handle: int, during: str) -> Failed | None:
        if self._worker is not None and handle >= self._worker.first_handle:
            return None
        return Failed(stage="crash", reason=f"{during}: the engine died with an earlier worker; build it again")

    def _call(self, method: str, limit_s: float, *args: Any) -> Any:
        """One round trip; every way in which it can end is a value, apart from mistakes of the user."""
        started_s = time.perf_counter()
        worker = self._worker or self._start()
        try:
            worker.send((method, args))
            answer = self._receive(worker, limit_s, method)
        except BaseException:
            self._stop()
            raise
        if isinstance(answer, Failed):
            tail = _tail(f"{self._read_log()}\n{answer.log_tail}")
            return replace(answer, log_tail=tail, wall_s=time.perf_counter() - started_s)
        return answer

    def _receive(self, worker: Worker, limit_s: float, method: str) -> Any:
        """The worker's answer, or a `Failed` that says how it died; then there is no worker any more."""
        try:
            kind, answer = worker.receive(limit_s)
        except TimeoutError:
            self._stop()
            return Failed(stage="timeout", reason=f"{method} took longer than {limit_s:g} s")
        except (EOFError, OSError):
            reason = f"the worker {worker.ending()} during {method}"
            _logger.warning("%s; a fresh one takes over", reason)
            self._stop()
            return Failed(stage="crash", reason=reason)
        if kind == "user_error":
            raise UserError(answer)
        return answer

    def _start(self) -> Worker:
        worker = self._worker = Worker(self._log, self._next_handle)
        worker.send((replace(self._spec, workdir=self._scratch), self._next_handle))
        facts = self._receive(worker, START_S, "start")
        if isinstance(facts, Failed):
            raise UserError(f"no worker could be started: {facts.reason}\n{_tail(self._read_log())}")
        self._facts = facts
        return worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _read_log(self) -> str:
        return self._log.read_bytes()[-65536:].decode(errors="replace") if self._log.exists() else ""


def serve(fd: int) -> None:
    """Body of a worker: make the plug-ins, then answer calls until the driver hangs up."""
    end_with_driver()
    connection: Connection[Any, Any] = Connection(fd)
    spec, first_handle = connection.recv()
    try:
        with InProcess(spec, first_handle) as engines:
            connection.send(("answer", {name: engines.describe(name) for name in spec.benchmarkers}))
            while True:
                connection.send_bytes(_answer(engines, *connection.recv()))
    except UserError as error:
        connection.send(("user_error", str(error)))
    except EOFError:
        return


def _answer(engines: InProcess, method: str, args: tuple[Any, ...]) -> bytes:
    def work() -> bytes:
        if method == "build":
            return pickle.dumps(("answer", engines.build(_candidate(*args[:3]), args[3])))
        return pickle.dumps(("answer", getattr(engines, method)(*args)))

    try:
        answer = _attempt(method, work)
    except UserError as error:
        return pickle.dumps(("user_error", str(error)))
    return answer if isinstance(answer, bytes) else pickle.dumps(("answer", answer))


def _candidate(digest: str, edges: Resolved, path: Path) -> Candidate:
    return Candidate(digest=digest, edges=edges, source=lambda: path)


def _attempt(stage: str, work: Callable[[], T]) -> T | Failed:
    """The value of some plug-in's work, or its failure as data."""
    started_s = time.perf_counter()
    try:
        return work()
    except UserError:
        raise
    except Exception as error:  # plug-ins and runtimes raise what they like
        said, trace = f"{type(error).__name__}: {error}", _tail(traceback.format_exc())
        if isinstance(error, CandidateError):
            stage, said, trace = error.stage, str(error), ""
        wall_s = time.perf_counter() - started_s
        return Failed(stage=stage, reason=" ".join(said.split())[:500], log_tail=trace, wall_s=wall_s)


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as JSON holds them, whatever a plug-in put there; what is no number or text becomes text."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(info), default=str), parse_constant=str)
    return plain


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])
