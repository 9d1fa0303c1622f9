"""A Ray cluster as the place where engines run; see docs/cluster.md.

Only this process writes results. Of a trial nothing travels but its edges and its readings: the model and its weights
are put into the object store once, come to each node once, and placements are written where they are built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from harness.api import Candidate
from harness.cluster.fleet import Fleet
from harness.cluster.remote import RemoteEngines, prepare
from harness.errors import UserError
from harness.measure.engines import MAIN, Engines, WorkerSpec
from harness.measure.executor import Pool
from harness.measure.gate import Open
from harness.measure.site import Maker, Workers
from harness.run.config import Limits, Use
from harness.run.executing import ExecutorSpec
from harness.run.observe import Observer

__all__ = ["RaySite", "open_ray_site"]


@contextmanager
def open_ray_site(
    executor: ExecutorSpec, limits: Limits, known: Mapping[str, Any] | None, observer: Observer
) -> Iterator[RaySite]:
    """Connect to the cluster and start the hosts; all is ended and let go of at the end.

    Args:
        known: See `harness.cluster.open_site`.

    Raises:
        UserError: There is no such cluster, or no host can be used.
    """
    with _connected(executor.address):
        fleet = Fleet(executor.workers, executor.resources, known, observer)
        try:
            fleet.start()
            yield RaySite(fleet, executor, limits)
        finally:
            fleet.close()


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """A connection to the cluster; where somebody made one before, it is used and left as it is."""
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


class RaySite:
    """See `harness.measure.site.Site`."""

    def __init__(self, fleet: Fleet, executor: ExecutorSpec, limits: Limits) -> None:
        self._fleet = fleet
        self._executor = executor
        self._limits = limits

    def environment(self, commit: str | None) -> dict[str, Any]:
        """See `Site`."""
        return {**self._fleet.environment(), **({} if commit is None else {"git_commit": commit})}

    def describe(self, backend: Use, workdir: Path) -> Mapping[str, Any]:
        """See `Site`."""
        with self.open(WorkerSpec(benchmarkers={MAIN: backend}, workdir=workdir)) as engines:
            return engines.describe()

    def open(self, spec: WorkerSpec) -> RemoteEngines:
        """See `Site`."""
        return RemoteEngines(self._fleet, spec, self._limits)

    @contextmanager
    def workers(self, spec: WorkerSpec, engines: Engines, maker: Maker, baseline: Candidate) -> Iterator[Workers]:
        """See `Site`; each cell has its share of the workers."""
        sent = ray.put(maker)

        @contextmanager
        def opened() -> Iterator[Engines]:
            with RemoteEngines(self._fleet, spec, self._limits, sent) as worker:
                if spec.evaluators:
                    prepare(worker, spec, baseline)
                yield worker

        each = max(1, self._executor.workers // self._executor.cells)
        with Pool(opened, each, Open()) as pool:
            yield pool
