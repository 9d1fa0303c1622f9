"""`qdq list`."""

from __future__ import annotations

from harness.commands.terminal import table

__all__ = ["listing"]


def listing() -> None:
    """List searchers, benchmarkers, evaluators, preprocessings, decoders, dialects and zoo models with their origin.

    Example: `qdq list | grep searcher`
    """
    from harness import zoo
    from harness.registry import GROUPS, plugins

    rows = [(kind, plugin.name, plugin.origin) for kind in GROUPS for plugin in plugins(kind)]
    rows += [("zoo model", name, what) for name, what in zoo.names().items()]
    table(("kind", "name", "origin"), rows)
