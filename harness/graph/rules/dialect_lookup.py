"""Dialects by name: one that is asked for, and the one that a benchmarker speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import registry
from harness.api import capabilities_of
from harness.errors import UserError
from harness.graph.rules.dialects import Dialect

__all__ = ["dialect_name_for", "load_dialect"]


def load_dialect(use: str) -> Dialect:
    """The dialect behind a name, or behind a `package.module:Attribute`.

    Raises:
        UserError: There is none, or it is something else.
    """
    found: object = registry.load_plugin("dialect", use)
    if not isinstance(found, Dialect):
        raise UserError(f"dialect {use!r}: a harness.graph.rules.dialects.Dialect, but got {found!r}")
    return found


def dialect_name_for(benchmarker: object, use: str, facts: Mapping[str, Any]) -> str:
    """The name of the dialect that a benchmarker speaks.

    Args:
        benchmarker: One that names a dialect, as `dialect`, or that is called like its own.
        use: What the benchmarker is called.
        facts: What it says of itself on the device that times; another device may ask for another dialect.
    """
    return str(facts.get("dialect", capabilities_of(benchmarker).dialect or use))
