"""Choice of the execution target: this machine, or a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.base.errors import UserError
from harness.base.paths import require_trust
from harness.base.progress import Observer
from harness.config.sections import ExecutorSpec, Limits
from harness.workers.trial_pool import ExecutionTarget, ListFiles, LocalTarget

# Variables that Ray reads when it is imported; those that are already set keep their value.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_worker_niceness": "0",  # of a cluster that is started here; Ray's default of 15 makes timings useless
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers without a GPU keep the GPUs that they see
}
OWN_ADDRESSES = ("auto", "local")  # a cluster that the user started, or one of this process


def require_trusted_address(executor: ExecutorSpec) -> None:
    """Raise `UserError` for a cluster that the user did not start, unless plug-ins are trusted."""
    if executor.address not in OWN_ADDRESSES:
        require_trust(f"executor.address: the cluster at {executor.address!r} could run code on this machine")


@contextmanager
def open_execution_target(
    executor: ExecutorSpec, limits: Limits, known: Mapping[str, Any] | None, observer: Observer, list_files: ListFiles
) -> Iterator[ExecutionTarget]:
    """Open the execution target of an experiment.

    Args:
        known: Environment of the machine that resumed results were begun on; workers of another kind are rejected.
            None: the first worker's environment is used.
        list_files: Function that returns the files of a model, which are sent to other machines.

    Raises:
        UserError: Ray is not installed or has no cluster there, or the address is a file's and is not trusted.
    """
    if executor.use == "local":
        yield LocalTarget(executor, limits)
        return
    require_trusted_address(executor)
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from harness.workers.ray.ray_pool import open_ray_target
    except ModuleNotFoundError as error:
        raise UserError(f"executor: 'ray' needs Ray ({error}); install it: pip install 'qdq-bench[ray]'") from error
    with open_ray_target(executor, limits, known, observer, list_files) as target:
        yield target
