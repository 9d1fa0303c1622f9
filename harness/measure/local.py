"""Engines in this process: the worker's own work, and that of benchmarkers with nothing to isolate."""

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness import registry
from harness.api import Accuracy, Array, Artifact, Benchmarker, Candidate, Evaluator, Infer, Probe
from harness.errors import CandidateError, EvaluationFailed, UserError
from harness.measure.conditions import Machine
from harness.measure.engines import MAIN, Built, Watch, WorkerSpec
from harness.measure.paired import Reference, take_beside
from harness.measure.sampling import Samples, take, warm_up
from harness.measure.stats import Interval
from harness.records import Failed
from harness.run.config import Sampling
from harness.run.journal import writing
from search.space import digest_of

__all__ = ["InProcess", "attempt", "tail", "watched"]

T = TypeVar("T")
LOG_LINES = 40
TELL_S = 0.5
"""Between two words on how far a scoring is; one that is over sooner goes without."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True, kw_only=True)
class _Engine:
    benchmarker: Benchmarker
    artifact: Artifact
    workdir: Path
    opened: ExitStack
    probe: Probe | None = None


class InProcess:
    """Builds, times and scores in this process; see `harness.measure.engines.Engines`.

    Raises:
        UserError: A benchmarker cannot be made, or the scratch folder cannot be written.
    """

    def __init__(self, spec: WorkerSpec, first_handle: int = 0) -> None:
        self._benchmarkers: Mapping[str, Benchmarker] = {
            name: registry.create("benchmarker", use.use, use.params) for name, use in spec.benchmarkers.items()
        }
        self._spec = spec
        self._evaluators: dict[str, Evaluator] = {}
        self._engines: dict[int, _Engine] = {}
        self._handles = itertools.count(first_handle)
        self._spare: list[Path] = []
        self._machine = Machine()
        self._beside: int | None = None
        self._warm = False
        with writing(spec.workdir):
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
        return attempt("build", lambda: self._build(candidate, self._benchmarkers[benchmarker]))

    def _build(self, candidate: Candidate, benchmarker: Benchmarker) -> Built:
        handle = next(self._handles)
        workdir = self._spare.pop() if self._spare else self._scratch / str(handle)
        with writing(workdir):
            workdir.mkdir(exist_ok=True)
        started_s = time.perf_counter()
        artifact = benchmarker.build(candidate, workdir)
        build_s = time.perf_counter() - started_s
        if artifact.info.get("recorded"):  # a replay: the real engine's build took so long
            build_s = float(artifact.info["build_s"])
        self._engines[handle] = _Engine(benchmarker=benchmarker, artifact=artifact, workdir=workdir, opened=ExitStack())
        return Built(handle=handle, build_s=build_s, info=_plain(artifact.info))

    def open(self, handle: int, level_ms: float | None = None) -> Failed | None:
        """Make an engine ready to be timed, and where it is timed beside the reference that one too.

        Args:
            level_ms: See `sample`.
        """

        def work() -> None:
            self._probe(handle)
            if level_ms is not None:
                self._reference(level_ms)

        return attempt("measure", work)

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """See `Engines`."""

        def work() -> Samples:
            probe = self._probe(handle)
            made_up = getattr(self._engines[handle].benchmarker, "in_process", False)
            if made_up:
                return take(probe, sampling, rival)
            reference = self._reference(level_ms) if level_ms is not None else None
            if reference is None:
                return take(probe, sampling, rival, machine=self._machine)
            if not self._warm:
                warm_up(reference.probe, Sampling())
                self._warm = True
            return take_beside(probe, reference, sampling, rival, machine=self._machine)

        return attempt("measure", work)

    def _reference(self, level_ms: float) -> Reference | None:
        """The engine that candidates are timed beside, built when first asked for."""
        if self._beside is None and self._spec.reference is not None:
            path = self._spec.reference
            candidate = Candidate(digest=digest_of(()), edges=(), source=lambda: path)
            self._beside = self._build(candidate, self._benchmarkers[MAIN]).handle
        return None if self._beside is None else Reference(self._probe(self._beside), level_ms)

    def evaluate(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Accuracy | Failed:
        """See `Engines`."""
        return attempt("evaluate", lambda: self._evaluate(handle, evaluator, watch))

    def prepare(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Failed | None:
        """See `Engines`."""
        return attempt("evaluate", lambda: self._prepare(handle, evaluator, watch))

    def _prepare(self, handle: int, name: str, watch: Watch | None) -> None:
        evaluator = self._evaluator(name)
        prepare = getattr(evaluator, "prepare", None)
        if prepare is not None:
            prepare(watched(self._probe(handle).infer, evaluator, watch))

    def _evaluator(self, name: str) -> Evaluator:
        if name not in self._evaluators:
            use = self._spec.evaluators[name]
            self._evaluators[name] = registry.create("evaluator", use.use, use.params)
        return self._evaluators[name]

    def _evaluate(self, handle: int, name: str, watch: Watch | None) -> Accuracy:
        evaluator = self._evaluator(name)
        accuracy = evaluator.score(watched(self._probe(handle).infer, evaluator, watch))
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
        return Accuracy(metrics=metrics, per_item=per_item, evidence=accuracy.evidence, note=str(accuracy.note))

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """See `Engines`."""
        return attempt("evaluate", lambda: dict(self._probe(handle).infer(feeds)))

    def release(self, handle: int) -> None:
        """See `Engines`."""
        engine = self._engines.pop(handle, None)
        if engine is not None:
            attempt("release", engine.opened.close)
            self._clear(engine.workdir)

    def _clear(self, workdir: Path) -> None:
        """Let the next engine have a folder that is still empty; removing one waits for the disk, 3 ms and more."""
        with suppress(OSError):
            if not any(workdir.iterdir()):
                self._spare.append(workdir)
                return
        shutil.rmtree(workdir, ignore_errors=True)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._benchmarkers[benchmarker].describe()

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs that engines of its benchmarkers run on."""
        asked = (getattr(benchmarker, "gpu", None) for benchmarker in self._benchmarkers.values())
        return frozenset(gpu() for gpu in asked if gpu is not None)

    def _probe(self, handle: int) -> Probe:
        engine = self._engines[handle]
        if engine.probe is None:
            engine.probe = engine.opened.enter_context(engine.benchmarker.open(engine.artifact))
        return engine.probe


def watched(infer: Infer, evaluator: Evaluator, watch: Watch | None) -> Infer:
    """The same, telling how far a scoring is, where somebody watches and the evaluator has `inferences`."""
    total = getattr(evaluator, "inferences", None)
    if watch is None or not isinstance(total, int):
        return infer
    done, told_s = 0, time.monotonic()

    def telling(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        nonlocal done, told_s
        outputs = infer(feeds)
        done, now_s = min(done + 1, total), time.monotonic()
        if now_s - told_s >= TELL_S:
            told_s = now_s
            watch(done, total)
        return outputs

    return telling


def attempt(stage: str, work: Callable[[], T]) -> T | Failed:
    """The value of some plug-in's work, or its failure as data.

    Raises:
        UserError: As the plug-in raised it, or the disk is full: that says nothing about the candidate.
    """
    started_s = time.perf_counter()
    try:
        return work()
    except UserError:
        raise
    except Exception as error:  # plug-ins and runtimes raise what they like
        if isinstance(error, OSError) and error.errno in _FULL:
            raise UserError(f"{stage}: {error}; make room, then run the same command again to go on") from error
        said, trace = f"{type(error).__name__}: {error}", tail(traceback.format_exc())
        if isinstance(error, CandidateError):
            stage, said, trace = error.stage, str(error), ""
        wall_s = time.perf_counter() - started_s
        return Failed(stage=stage, reason=" ".join(said.split())[:500], log_tail=trace, wall_s=wall_s)


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as JSON holds them, whatever a plug-in put there; what is no number or text becomes text."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(info), default=str), parse_constant=str)
    return plain


def tail(text: str) -> str:
    """The last lines of a log."""
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])
