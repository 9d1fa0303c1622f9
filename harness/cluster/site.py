"""A Ray cluster as the place where engines run; see docs/cluster.md.

Only this process writes results. Of a trial nothing travels but its edges and its readings: the model and its weights
are put into the object store once, come to each node once, and placements are written where they are built.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Accuracy, Candidate
from harness.cluster.host import Order
from harness.errors import UserError
from harness.measure.engines import MAIN, Built, Engines, WorkerSpec
from harness.measure.executor import Pool, WorkerLost
from harness.measure.gate import Open
from harness.measure.local import attempt
from harness.measure.sampling import Samples
from harness.measure.site import Maker, Workers
from harness.measure.stats import Interval
from harness.records import Failed
from harness.run.config import Limits, Sampling
from harness.run.executing import ExecutorSpec
from harness.run.observe import Observer
from harness.run.rows import read_json

__all__ = ["RaySite", "open_ray_site"]

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported: nothing is sent anywhere
os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that is started here; Ray's own default is 15
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers without a GPU keep what they see
try:
    import ray

    from harness.cluster.fleet import Fleet, Member
except ImportError as error:
    raise UserError("executor: 'ray' needs Ray; install it: pip install 'qdq-bench[ray]'") from error


@contextmanager
def open_ray_site(executor: ExecutorSpec, limits: Limits, out: Path, observer: Observer) -> Iterator[RaySite]:
    """Connect to the cluster and start the hosts; all is ended and let go of at the end.

    Raises:
        UserError: There is no such cluster, or no host can be used.
    """
    connected = _connect(executor.address)
    begun = min(out.glob("*/env.json"), default=None)
    fleet = Fleet(executor.workers, executor.resources, None if begun is None else read_json(begun), observer)
    try:
        fleet.start()
        yield RaySite(fleet, executor, limits)
    finally:
        fleet.close()
        if connected:
            ray.shutdown()


def _connect(address: str) -> bool:
    """Whether this call made the connection; where somebody did before, it is used and left as it is."""
    if ray.is_initialized():
        return False
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
    return True


class RaySite:
    """See `harness.measure.site.Site`."""

    def __init__(self, fleet: Fleet, executor: ExecutorSpec, limits: Limits) -> None:
        self._fleet = fleet
        self._executor = executor
        self._limits = limits

    def environment(self, commit: str | None) -> dict[str, Any]:
        """See `Site`."""
        return {**self._fleet.environment(), **({} if commit is None else {"git_commit": commit})}

    @contextmanager
    def open(self, spec: WorkerSpec) -> Iterator[Engines]:
        """See `Site`."""
        with RemoteEngines(self._fleet, spec, self._limits) as engines:
            yield engines

    @contextmanager
    def workers(self, spec: WorkerSpec, engines: Engines, maker: Maker, baseline: Candidate) -> Iterator[Workers]:
        """See `Site`."""
        sent = ray.put(maker)

        @contextmanager
        def opened() -> Iterator[Engines]:
            with RemoteEngines(self._fleet, spec, self._limits, sent) as worker:
                if spec.evaluators:
                    _prepare(worker, spec, baseline)
                yield worker

        each = max(1, self._executor.workers // self._executor.cells)
        with Pool(opened, each, Open()) as pool:
            yield pool


def _prepare(engines: Engines, spec: WorkerSpec, baseline: Candidate) -> None:
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


class RemoteEngines:
    """Engines on a host; see `harness.measure.engines.Engines`. Every call raises `WorkerLost` where the host is gone.

    Args:
        maker: In the object store; None: candidates are sent as files.
    """

    def __init__(self, fleet: Fleet, spec: WorkerSpec, limits: Limits, maker: Any = None) -> None:
        self._fleet = fleet
        self._spec = spec
        self._limits = limits
        self._maker = maker
        use = spec.benchmarkers[MAIN]
        self._without_files = bool(getattr(registry.load("benchmarker", use.use), "in_process", False))
        self._number = fleet.number()
        self._facts: Mapping[str, Mapping[str, Any]] = {}

    def __enter__(self) -> RemoteEngines:
        while True:
            self._member: Member = self._fleet.pick()
            try:
                self._facts = self._call("open", self._spec, self._limits, self._maker)
            except WorkerLost:
                if self._fleet.closed:
                    raise
                continue  # the fleet has one less; where it has none left, it says so
            except BaseException:
                self._fleet.forget(self._member)
                raise
            return self

    def __exit__(self, *_: object) -> None:
        self._fleet.forget(self._member)
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

    def evaluate(self, handle: int, evaluator: str = MAIN) -> Accuracy | Failed:
        """See `Engines`."""
        return self._call("call", "evaluate", handle, evaluator)  # type: ignore[no-any-return]

    def prepare(self, handle: int, evaluator: str = MAIN) -> Failed | None:
        """See `Engines`."""
        return self._call("call", "prepare", handle, evaluator)  # type: ignore[no-any-return]

    def release(self, handle: int) -> None:
        """See `Engines`; nobody waits for it."""
        self._member.actor.call.remote(self._number, "release", handle)

    def describe(self, benchmarker: str = MAIN) -> Mapping[str, Any]:
        """See `Engines`."""
        return self._facts[benchmarker]

    def _call(self, method: str, *args: Any) -> Any:
        reference = getattr(self._member.actor, method).remote(self._number, *args)
        return self._fleet.call(self._member, reference)
