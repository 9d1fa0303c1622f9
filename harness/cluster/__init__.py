"""Where an experiment's engines run: on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.measure.site import LocalSite, Site
from harness.run.config import Limits
from harness.run.executing import ExecutorSpec
from harness.run.observe import Observer

__all__ = ["open_site"]


@contextmanager
def open_site(executor: ExecutorSpec, limits: Limits, out: Path, observer: Observer) -> Iterator[Site]:
    """The place that an experiment asks for.

    Args:
        executor: The experiment's.
        limits: Of each candidate.
        out: Results folder: what was begun on one kind of machine goes on there.
        observer: Is told who takes part.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or no worker of it can be used.
    """
    if executor.use == "local":
        yield LocalSite(executor, limits)
        return
    from harness.cluster.site import open_ray_site

    with open_ray_site(executor, limits, out, observer) as site:
        yield site
