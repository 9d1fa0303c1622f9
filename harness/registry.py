"""Plug-ins by name: searchers, benchmarkers, evaluators, preprocessings; built-in or not, one door.

`use: NAME` is looked up among the entry points of the group; `use: package.module:Class` is loaded
as it stands. Both go through `importlib.metadata.EntryPoint`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from harness.errors import UserError, nearest

__all__ = ["GROUPS", "Plugin", "check_params", "create", "find", "load", "plugins"]

GROUPS: Mapping[str, str] = {
    "searcher": "qdq.searchers",
    "benchmarker": "qdq.benchmarkers",
    "evaluator": "qdq.evaluators",
    "preprocessing": "qdq.preprocessings",
    "decoder": "qdq.decoders",
    "dialect": "qdq.dialects",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One installed plug-in and where it comes from."""

    name: str
    kind: str
    origin: str
    entry_point: EntryPoint


def plugins(kind: str) -> tuple[Plugin, ...]:
    """All installed plug-ins of one kind, sorted by name.

    Raises:
        UserError: Two distributions offer the same name.
    """
    found: dict[str, Plugin] = {}
    for point in sorted(entry_points(group=GROUPS[kind]), key=lambda p: p.name):
        dist = point.dist
        origin = f"{dist.name} {dist.version}" if dist else "unknown"
        other = found.get(point.name)
        if other is not None and other.entry_point.value != point.value:
            raise UserError(
                f"{kind} {point.name!r} is offered by {other.origin} and by {origin}: uninstall one of the two"
            )
        found[point.name] = Plugin(name=point.name, kind=kind, origin=origin, entry_point=point)
    return tuple(found.values())


def find(kind: str, use: str) -> EntryPoint:
    """The entry point for a name or for a `package.module:Attribute`.

    Raises:
        UserError: Unknown name; the text gives the nearest ones.
    """
    if ":" in use:
        return EntryPoint(name=use, value=use, group=GROUPS[kind])
    known = {plugin.name: plugin.entry_point for plugin in plugins(kind)}
    if use not in known:
        raise UserError(
            f"no {kind} is called {use!r}; {nearest(use, known)} "
            "(your own: 'use: package.module:Class', or 'pip install -e .' again after adding its entry point)"
        )
    return known[use]


def load(kind: str, use: str) -> Callable[..., Any]:
    """The class or factory behind a name.

    Raises:
        UserError: Unknown name, or the plug-in cannot be imported.
    """
    point = find(kind, use)
    try:
        return point.load()  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{kind} {use!r} ({point.value}) cannot be loaded: {error}") from error


def check_params(kind: str, use: str, params: Mapping[str, Any], given: Iterable[str] = ()) -> Callable[..., Any]:
    """Load a plug-in and check parameters against its signature, without calling it.

    Args:
        kind: A key of `GROUPS`.
        use: Name or `package.module:Attribute`.
        params: What the experiment gives.
        given: Names that the harness supplies itself.

    Raises:
        UserError: An unknown parameter, or a required one is missing.
    """
    factory = load(kind, use)
    signature = inspect.signature(factory).parameters
    supplied = set(given)
    if not any(p.kind is p.VAR_KEYWORD for p in signature.values()):
        allowed = [name for name in signature if name not in supplied and name != "self"]
        for name in params:
            if name not in allowed:
                raise UserError(f"{kind} {use!r} has no parameter {name!r}; {nearest(name, allowed)}")
    for name, parameter in signature.items():
        missing = parameter.default is parameter.empty and name not in params and name not in supplied
        if missing and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise UserError(f"{kind} {use!r} needs the parameter {name!r}")
    return factory


def create(kind: str, use: str, params: Mapping[str, Any]) -> Any:
    """Check parameters and make the plug-in.

    Raises:
        UserError: See `check_params`; also where the constructor itself refuses a value.
    """
    factory = check_params(kind, use, params)
    try:
        return factory(**params)
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind} {use!r}: {error}") from error
