"""Engines on a host of the cluster, as the driver sees them; and how evaluators come to know the float model there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import registry
from harness.api import Accuracy, Array, Candidate
from harness.cluster.fleet import WAITING, WORKING, Fleet, Member
from harness.cluster.host import Order
from harness.errors import UserError
from harness.measure.engines import MAIN, Built, Engines, Watch, WorkerSpec
from harness.measure.executor import WorkerLost
from harness.measure.local import attempt
from harness.measure.sampling import Samples
from harness.measure.stats import Interval
from harness.records import Failed
from harness.run.config import Limits, Sampling

__all__ = ["RemoteEngines", "prepare"]


class RemoteEngines:
    """Engines on a host; see `harness.measure.engines.Engines`. Every call raises `WorkerLost` where the host is gone.

    Args:
        maker: In the object store, for a worker of searches; None: candidates are sent as files.
    """

    def __init__(self, fleet: Fleet, spec: WorkerSpec, limits: Limits, maker: Any = None) -> None:
        self._fleet = fleet
        self._spec = spec
        self._limits = limits
        self._maker = maker
        self._load = WAITING if maker is None else WORKING
        use = spec.benchmarkers[MAIN]
        self._without_files = bool(getattr(registry.load("benchmarker", use.use), "in_process", False))
        self._number = fleet.number()
        self._facts: Mapping[str, Mapping[str, Any]] = {}

    def __enter__(self) -> RemoteEngines:
        while True:
            self._member: Member = self._fleet.pick(self._load)
            try:
                self._facts, gpus = self._call("open", self._spec, self._limits, self._maker)
                self._fleet.check_reserved(gpus)
            except WorkerLost:
                if self._fleet.closed:
                    raise
                continue  # the fleet has one less; where it has none left, it says so
            except BaseException:
                self._fleet.forget(self._member, self._load)
                raise
            if self._fleet.alike(self._member, str(self._spec.benchmarkers), self._facts):
                return self

    def __exit__(self, *_: object) -> None:
        self._fleet.forget(self._member, self._load)
        self._member.actor.close.remote(self._number)

    def build(self, candidate: Candidate, benchmarker: str = MAIN) -> Built | Failed:
        """See `Engines`; a placement is written on the host, any other model is sent there."""
        order = Order(digest=candidate.digest, edges=candidate.edges)
        if self._without_files or (candidate.edges and self._maker is not None):
            return self._call("build", order, benchmarker)  # type: ignore[no-any-return]
        path = attempt("build", candidate.source)
        if isinstance(path, Failed):
            return path
        key, files = self._fleet.send(path)
        order = Order(digest=candidate.digest, edges=candidate.edges, files=key)
        built = self._call("build", order, benchmarker)
        if isinstance(built, KeyError):
            self._fleet.call(self._member, self._member.actor.keep.remote(key, files))
            built = self._call("build", order, benchmarker)
        return built  # type: ignore[no-any-return]

    def sample(
        self, handle: int, sampling: Sampling, rival: Interval | None = None, level_ms: float | None = None
    ) -> Samples | Failed:
        """See `Engines`."""
        return self._call("call", "sample", handle, sampling, rival, level_ms)  # type: ignore[no-any-return]

    def evaluate(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Accuracy | Failed:
        """See `Engines`; nobody is told on the way."""
        return self._call("call", "evaluate", handle, evaluator)  # type: ignore[no-any-return]

    def prepare(self, handle: int, evaluator: str = MAIN, watch: Watch | None = None) -> Failed | None:
        """See `Engines`; nobody is told on the way."""
        return self._call("call", "prepare", handle, evaluator)  # type: ignore[no-any-return]

    def infer(self, handle: int, feeds: Mapping[str, Array]) -> Mapping[str, Array] | Failed:
        """See `Engines`."""
        return self._call("call", "infer", handle, feeds)  # type: ignore[no-any-return]

    def release(self, handle: int) -> None:
        """See `Engines`; nobody waits for it."""
        self._member.actor.call.remote(self._number, "release", handle)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._facts[benchmarker]

    def _call(self, method: str, *args: Any) -> Any:
        reference = getattr(self._member.actor, method).remote(self._number, *args)
        return self._fleet.call(self._member, reference)


def prepare(engines: Engines, spec: WorkerSpec, baseline: Candidate) -> None:
    """Show evaluators the float model where they run; files that they write do not travel.

    Raises:
        UserError: It cannot be built or scored there.
    """
    built = engines.build(baseline)
    failed = built if isinstance(built, Failed) else None
    if isinstance(built, Built):
        found = [engines.prepare(built.handle, name) for name in spec.evaluators]
        failed = next((each for each in found if each is not None), None)
        engines.release(built.handle)
    if failed is not None:
        raise UserError(f"a worker cannot score the float model; {failed.stage}: {failed.reason}")
