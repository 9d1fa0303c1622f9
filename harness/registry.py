"""Plug-ins by name: searchers, benchmarkers, evaluators, preprocessings; built-in or not, one door.

`use: NAME` is looked up among the entry points of the group; `use: package.module:Class` is loaded
as it stands. Both go through `importlib.metadata.EntryPoint`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from harness.errors import CandidateError, UserError, suggest_names

__all__ = [
    "ENTRY_POINT_GROUPS", "Plugin", "check_params", "create_plugin", "find_entry_point", "call_plugin", "plugin_kind", "load_plugin", "installed_plugins", "require_methods",
    "plugin_signature",
]  # fmt: skip

T = TypeVar("T")
ENTRY_POINT_PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

ENTRY_POINT_GROUPS: Mapping[str, str] = {
    "searcher": "qdq.searchers",
    "peer": "qdq.peers",
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


def installed_plugins(kind: str) -> tuple[Plugin, ...]:
    """All installed plug-ins of one kind, sorted by name; none of them is imported."""
    return _installed_plugins(kind, entry_points, tuple(sys.path))


@functools.cache
def _installed_plugins(kind: str, installed: Callable[..., Iterable[EntryPoint]], path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """See `plugins`; a look through the metadata of everything on the path takes some 30 ms."""
    found: dict[tuple[str, str], Plugin] = {}
    for point in sorted(installed(group=ENTRY_POINT_GROUPS[kind]), key=lambda p: p.name):
        dist = point.dist
        origin = f"{dist.name} {dist.version}" if dist else "unknown"
        found[point.name, point.value] = Plugin(name=point.name, kind=kind, origin=origin, entry_point=point)
    return tuple(found.values())


def plugin_kind(use: str, kinds: Sequence[str]) -> str:
    """Of which of several kinds a plug-in is.

    What `package.module:Attribute` names may have an attribute `kind` that says so; it is of the first kind otherwise.

    Raises:
        UserError: Of none of them (the text gives the nearest names of all), or it cannot be loaded.
    """
    if ":" in use:
        kind = getattr(load_plugin(kinds[0], use), "kind", kinds[0])
        return kind if kind in kinds else kinds[0]
    names = {kind: {plugin.name for plugin in installed_plugins(kind)} for kind in kinds}
    for kind, known in names.items():
        if use in known:
            return kind
    raise _unknown_plugin(" or ".join(kinds), use, set().union(*names.values()))


def find_entry_point(kind: str, use: str) -> EntryPoint:
    """The entry point for a name or for a `package.module:Attribute`.

    Raises:
        UserError: Unknown name (the text gives the nearest ones), or two distributions offer it.
    """
    if ":" in use:
        if ENTRY_POINT_PATTERN.fullmatch(use) is None:
            raise UserError(f"{kind} {use!r}: neither a name nor package.module:Class")
        return EntryPoint(name=use, value=use, group=ENTRY_POINT_GROUPS[kind])
    known = installed_plugins(kind)
    found = [plugin for plugin in known if plugin.name == use]
    if not found:
        raise _unknown_plugin(kind, use, {plugin.name for plugin in known})
    if len(found) > 1:
        origins = " and by ".join(plugin.origin for plugin in found)
        raise UserError(f"{kind} {use!r} is offered by {origins}: uninstall all but one of them")
    return found[0].entry_point


def _unknown_plugin(kind: str, use: str, names: Iterable[str]) -> UserError:
    return UserError(
        f"no {kind} is called {use!r}; {suggest_names(use, names)} "
        "(your own: 'use: package.module:Class', or 'pip install -e .' again after adding its entry point)"
    )


def load_plugin(kind: str, use: str) -> Callable[..., Any]:
    """The class or factory behind a name.

    Raises:
        UserError: Unknown name, or the plug-in cannot be imported.
    """
    point = find_entry_point(kind, use)
    try:
        loaded: Callable[..., Any] = call_plugin(f"{kind} {use!r} ({point.value}) cannot be loaded", point.load)
    except UserError as error:
        module = sys.modules.get(point.module)
        if isinstance(error.__cause__, AttributeError) and module is not None:
            raise UserError(f"{error} ({_module_location(module)})") from error
        if not isinstance(error.__cause__, ModuleNotFoundError) or error.__cause__.name != point.module:
            raise
        raise UserError(
            f"{error}; a module is looked for among what is installed, then beside the experiment file, or in the "
            "current folder where a command takes none"
        ) from error
    return loaded


def _module_location(module: Any) -> str:
    return getattr(module, "__file__", None) or ", ".join(getattr(module, "__path__", ())) or "part of Python"


def plugin_signature(kind: str, use: str) -> inspect.Signature:
    """What a plug-in's class or factory takes.

    Raises:
        UserError: See `load`; also where it is nothing that can be called.
    """
    factory = load_plugin(kind, use)
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind} {use!r} is no class or function that can be called: {error}") from error


def require_methods(what: str, made: object, methods: Sequence[str]) -> None:
    """Refuse something without a method that it will be asked for.

    Args:
        what: What messages call it.
        methods: Each with its arguments, for instance "ask(n)".

    Raises:
        UserError: One is not there.
    """
    for method in methods:
        name = method.partition("(")[0]
        if not callable(getattr(made, name, None)):
            raise UserError(f"{what}: has no {name}(), but needs {' and '.join(methods)}")


def call_plugin(what: str, work: Callable[[], T]) -> T:
    """Do something in a plug-in of somebody else; `what` begins the message where it breaks.

    Raises:
        UserError: Whatever else than `UserError` and `CandidateError` was raised.
    """
    try:
        return work()
    except (UserError, CandidateError):
        raise
    except Exception as error:  # a plug-in raises what it likes, and must not take the others along
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error


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
    factory, parameters = load_plugin(kind, use), plugin_signature(kind, use).parameters
    supplied = set(given)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        allowed = [name for name in parameters if name not in supplied and name != "self"]
        for name in params:
            if name not in allowed:
                raise UserError(f"{kind} {use!r} has no parameter {name!r}; {suggest_names(name, allowed)}")
    for name, parameter in parameters.items():
        missing = parameter.default is parameter.empty and name not in params and name not in supplied
        if missing and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise UserError(f"{kind} {use!r} needs the parameter {name!r}")
    return factory


def create_plugin(kind: str, use: str, params: Mapping[str, Any]) -> Any:
    """Check parameters and make the plug-in.

    Raises:
        UserError: See `check_params`; also where the constructor itself refuses a value, or breaks on its type.
    """
    factory = check_params(kind, use, params)
    try:
        bound = plugin_signature(kind, use).bind(**params)
    except TypeError as error:
        raise UserError(f"{kind} {use!r}: {error}") from error
    try:
        return factory(*bound.args, **bound.kwargs)
    except ValueError as error:
        raise UserError(f"{kind} {use!r}: {error}") from error
    except TypeError as error:
        raise UserError(f"{kind} {use!r} broke down in its constructor: TypeError: {error}") from error
