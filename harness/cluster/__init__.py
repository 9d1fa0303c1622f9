"""Where an experiment's engines run: on this machine, or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.errors import UserError
from harness.measure.site import LocalSite, Site
from harness.run.config import Limits
from harness.run.executing import ExecutorSpec
from harness.run.observe import Observer

__all__ = ["SETTINGS", "open_site"]

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_worker_niceness": "0",  # of a cluster that is started here; Ray's own default is 15, which no timing survives
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers without a GPU keep what they see
}
"""What Ray is told by the environment, which it reads when it is imported; what somebody set before stays."""


@contextmanager
def open_site(
    executor: ExecutorSpec, limits: Limits, known: Mapping[str, Any] | None, observer: Observer
) -> Iterator[Site]:
    """The place that an experiment asks for.

    Args:
        executor: The experiment's.
        limits: Of each candidate.
        known: Environment of the machine that the results were begun on, where they are to go on: workers of another
            kind are refused. None: the first worker decides.
        observer: Is told who takes part.

    Raises:
        UserError: Ray is not installed, there is no such cluster, or no worker of it can be used.
    """
    if executor.use == "local":
        yield LocalSite(executor, limits)
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from harness.cluster.site import open_ray_site
    except ModuleNotFoundError as error:
        raise UserError(f"executor: 'ray' needs Ray ({error}); install it: pip install 'qdq-bench[ray]'") from error
    with open_ray_site(executor, limits, known, observer) as site:
        yield site
