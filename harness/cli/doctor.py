"""`qdq doctor`."""

from __future__ import annotations

from harness.cli.common import print_table

__all__ = ["doctor"]


def doctor() -> None:
    """Say what this machine can run, and what to install for the rest.

    Example: `qdq doctor`
    """
    from harness.cli.environment import examine_machine

    print_table(("what", "state", "detail"), examine_machine())
