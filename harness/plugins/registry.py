"""Plug-ins by name: searchers, benchmarkers, evaluators and the like, built-in or third-party.

`use: NAME` names an entry point of an installed package. `use: package.module:Class` imports any module, so it is
refused unless the user trusts plug-ins (docs/explanation/security.md), and the class must have the methods of its kind.
A program that calls the harness can register objects under a name (`register_object`), which is valid in its process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from harness.base.errors import MAX_COUNT, CandidateError, UserError, suggest_names
from harness.base.paths import require_trust

_YAML_TERMS = {"a valid array": "a list", "an object": "a mapping"}


def _check_counts(path: str, name: str, value: Any, most: int) -> None:
    """Raise `UserError` for a number in parameters above `most`, except for seeds and numbers of bytes."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        _check_counts(f"{path}.{key}", str(key), inner, most)
    if isinstance(value, int) and abs(value) > most and not re.search("seed|bytes", name):
        raise UserError(f"{path}: at most {most:,}, but got {value}")


def _check_type(path: str, annotation: Any, value: Any) -> None:
    """Check a value as JSON, so that a list is accepted for any sequence, but text for no number."""
    try:
        _type_adapter(annotation).validate_json(json.dumps(value, default=str, skipkeys=True), strict=True)
    except PydanticUserError:  # pydantic has no check for this annotation
        return
    except ValidationError as error:
        first = error.errors()[0]
        for part in first["loc"]:  # besides keys, these are names of the alternatives of a union
            inner = dict(enumerate(value)) if isinstance(value, list) else value
            if isinstance(inner, dict) and part in inner:
                path, value = f"{path}.{part}", inner[part]
        expected = str(first["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
        expected = _YAML_TERMS.get(expected, expected)
        raise UserError(f"{path}: {expected}, but got {value!r}") from error


@functools.cache  # an adapter takes longer to create than most plug-ins
def _type_adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


T = TypeVar("T")
MAX_SEARCHER_COUNT = 100_000  # limit of integers in parameters of searchers, on which the time of a proposal may depend
ENTRY_POINT_PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

ENTRY_POINT_GROUPS: Mapping[str, str] = {
    "searcher": "qdq.searchers",
    "external searcher": "qdq.external_searchers",
    "benchmarker": "qdq.benchmarkers",
    "evaluator": "qdq.evaluators",
    "preprocessing": "qdq.preprocessings",
    "decoder": "qdq.decoders",
    "dialect": "qdq.dialects",
    "range estimator": "qdq.range_estimators",
    "weight estimator": "qdq.weight_estimators",
    "recovery step": "qdq.recovery_steps",
    "table": "qdq.tables",
}

#: Methods that a class `package.module:Class` must have, by the kind of plug-in.
CONTRACT_METHODS: Mapping[str, tuple[str, ...]] = {
    "searcher": ("ask", "tell"),
    "external searcher": ("ask", "tell"),
    "benchmarker": ("build", "open", "describe"),
    "evaluator": ("score",),
    "preprocessing": ("prepare",),
    "range estimator": ("collect", "ranges"),
    "recovery step": ("apply",),
}
#: Parameters that a function `package.module:function` must have, by the kind of plug-in.
CONTRACT_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "decoder": ("outputs", "prepared", "size"),
    "fixed placement": ("space", "precision"),
    "function": (),
    "weight estimator": ("rows", "quantize"),
}


_OBJECTS: dict[str, Callable[..., Any]] = {}


def register_object(value: Any) -> str:
    """Register a function or a class of this process, and return the name under which `use` finds it."""
    name = f"{value.__module__}:{value.__qualname__.rpartition('.')[2]}"
    _OBJECTS[name] = value
    return name


def uses_objects(use: str, params: Mapping[str, Any]) -> bool:
    """Return whether a plug-in or one of its parameters is a registered object, which no worker process can load."""
    return any(isinstance(text, str) and text in _OBJECTS for text in (use, *params.values()))


def is_program_object(name: str) -> bool:
    """Return whether a plug-in is a registered object, or one that another program registered from its main file."""
    return name in _OBJECTS or name.startswith("__main__:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """Entry point of an installed plug-in; `origin` is the name and version of its distribution."""

    name: str
    kind: str
    origin: str
    entry_point: EntryPoint


def installed_plugins(kind: str) -> tuple[Plugin, ...]:
    """Return the installed plug-ins of one kind, sorted by name, without importing any."""
    return _installed_plugins(entry_points, tuple(sys.path)).get(kind, ())


@functools.cache  # reading the metadata of everything on the path takes about 30 ms
def _installed_plugins(installed: Callable[[], EntryPoints], path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:
    everything = installed()
    points = {kind: everything.select(group=group) for kind, group in ENTRY_POINT_GROUPS.items()}
    dists = {point.dist for own in points.values() for point in own if point.dist}
    origins = {dist: f"{dist.name} {dist.version}" for dist in dists}  # each parses the metadata of a distribution
    found: dict[str, tuple[Plugin, ...]] = {}
    for kind, own in points.items():
        unique = {(point.name, point.value): point for point in sorted(own, key=lambda point: point.name)}
        found[kind] = tuple(
            Plugin(
                name=point.name,
                kind=kind,
                origin=origins[point.dist] if point.dist else "unknown",
                entry_point=point,
            )
            for point in unique.values()
        )
    return found


def plugin_kind(use: str, kinds: Sequence[str]) -> str:
    """Return the kind of a plug-in among several possible ones.

    The object behind `package.module:Attribute` may have an attribute `kind`; without it, the first kind is assumed.
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
    """Return the entry point of `use`, a name or `package.module:Attribute`, of a kind in `ENTRY_POINT_GROUPS`."""
    if ":" in use:
        if ENTRY_POINT_PATTERN.fullmatch(use) is None:
            raise UserError(f"{kind} {use!r}: neither a name nor package.module:Class")
        module, _, attribute = use.partition(":")
        if module == "__main__" and not hasattr(sys.modules[module], attribute.partition(".")[0]):
            raise UserError(
                f"{kind} {use!r} is part of a Python program, which no other process can load: make the same call in "
                f"that program, or put it into a module and name it module:{attribute}"
            )
        require_trust(f"{kind} {use!r} would run code of the module {module}")
        return EntryPoint(name=use, value=use, group=ENTRY_POINT_GROUPS.get(kind, ""))
    known = installed_plugins(kind)
    found = [plugin for plugin in known if plugin.name == use]
    if not found:
        raise _unknown_plugin(kind, use, {plugin.name for plugin in known})
    if len(found) > 1:
        origins = " and by ".join(plugin.origin for plugin in found)
        raise UserError(f"{kind} {use!r} is offered by {origins}: uninstall all but one of them")
    return found[0].entry_point


def check_trust(kind: str, use: str) -> None:
    """Raise `UserError` if `use` is a `package.module:Attribute` that is neither registered nor trusted."""
    if ":" in use and use not in _OBJECTS:
        find_entry_point(kind, use)


def _unknown_plugin(kind: str, use: str, names: Iterable[str]) -> UserError:
    return UserError(
        f"no {kind} is called {use!r}; {suggest_names(use, names)} "
        "(your own: 'use: package.module:Class', or 'pip install -e .' again after adding its entry point)"
    )


def load_plugin(kind: str, use: str) -> Callable[..., Any]:
    """Return the class or factory of a plug-in, or a registered object; for the arguments see `find_entry_point`."""
    if use in _OBJECTS:
        return _OBJECTS[use]
    point = find_entry_point(kind, use)
    try:
        loaded: Callable[..., Any] = call_plugin(f"{kind} {use!r} ({point.value}) cannot be loaded", point.load)
    except UserError as error:
        module = sys.modules.get(point.module)
        if isinstance(error.__cause__, AttributeError) and module is not None:
            place = getattr(module, "__file__", None) or ", ".join(getattr(module, "__path__", ())) or "part of Python"
            raise UserError(f"{error} ({place})") from error
        if not isinstance(error.__cause__, ModuleNotFoundError) or error.__cause__.name != point.module:
            raise
        raise UserError(
            f"{error}; modules are looked up among installed packages, then next to the experiment file, or in the "
            "current folder for commands without one"
        ) from error
    if ":" in use and kind in CONTRACT_METHODS:
        if not inspect.isclass(loaded):
            raise UserError(f"{kind} {use!r} is no class, but {type(loaded).__name__}")
        require_methods(f"{kind} {use!r}", loaded, [f"{name}()" for name in CONTRACT_METHODS[kind]])
    elif ":" in use and kind in CONTRACT_PARAMETERS:
        parameters = inspect.signature(loaded).parameters if inspect.isfunction(loaded) else None
        if parameters is None or not {*CONTRACT_PARAMETERS[kind]} <= parameters.keys():
            names = ", ".join(CONTRACT_PARAMETERS[kind])
            raise UserError(f"{kind} {use!r} is no function with the parameters {names}")
    return loaded


def plugin_signature(kind: str, use: str) -> inspect.Signature:
    """Return the signature of the class or factory of a plug-in; for the arguments see `load_plugin`."""
    factory = load_plugin(kind, use)
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind} {use!r} is no class or function that can be called: {error}") from error


def require_methods(label: str, made: object, methods: Sequence[str]) -> None:
    """Raise `UserError` if an object lacks a method.

    Args:
        label: Name of the object in the message.
        methods: Each with its arguments, for instance "ask(n)".
    """
    for method in methods:
        name = method.partition("(")[0]
        if not callable(getattr(made, name, None)):
            raise UserError(f"{label}: has no {name}(), but needs {' and '.join(methods)}")


def call_plugin(label: str, call: Callable[[], T]) -> T:
    """Call a function of a plug-in, and turn unexpected exceptions into a `UserError`.

    Args:
        label: Start of the error message.
        call: Function without arguments.
    """
    try:
        return call()
    except (UserError, CandidateError):
        raise
    except (Exception, SystemExit) as error:  # plug-ins raise anything, and must not end other searches
        raise UserError(f"{label}: {type(error).__name__}: {error}") from error


def check_params(kind: str, use: str, params: Mapping[str, Any], supplied: Collection[str] = ()) -> Callable[..., Any]:
    """Return the factory of a plug-in after checking names and types of parameters against its signature.

    Args:
        kind: A key of `ENTRY_POINT_GROUPS`.
        use: Name or `package.module:Attribute`.
        params: Parameters that the user gives.
        supplied: Names of arguments that the harness adds.
    """
    label, parameters = f"{kind} {use!r}", plugin_signature(kind, use).parameters
    for name in supplied:
        if name in params:
            raise UserError(f"{label}: {name!r} is set by the harness, not by the experiment")
    supplied = {*supplied, "self"}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        allowed = [name for name in parameters if name not in supplied]
        for name in params:
            if name not in allowed:
                raise UserError(f"{label} has no parameter {name!r}; {suggest_names(name, allowed)}")
    for name, parameter in parameters.items():
        missing = parameter.default is parameter.empty and name not in params and name not in supplied
        if missing and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise UserError(f"{label} needs the parameter {name!r}")
    factory = load_plugin(kind, use)
    # A class lists parameters that name code or a file to write in `code_params` (files and arguments) and in
    # `program_params` (programs; the plain name of a program on PATH needs no trust).
    programs = [name for name in getattr(factory, "program_params", ()) if "/" in str(params.get(name) or "")]
    for name in (*programs, *(name for name in getattr(factory, "code_params", ()) if params.get(name))):
        require_trust(f"{label}: {name} would run code of {params[name]!r} or write to it")
    try:
        annotated = {**inspect.signature(factory, eval_str=True).parameters}
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError):  # names imported for type checkers only
        annotated = {}
    for name, value in params.items():
        _check_counts(f"{label}: {name}", name, value, MAX_SEARCHER_COUNT if kind == "searcher" else MAX_COUNT)
        if name in annotated and annotated[name].annotation is not inspect.Parameter.empty:
            _check_type(f"{label}: {name}", annotated[name].annotation, value)
    return factory


def create_plugin(kind: str, use: str, params: Mapping[str, Any], supplied: Mapping[str, Any] | None = None) -> Any:
    """Check parameters and create the plug-in.

    Args:
        kind: A key of `ENTRY_POINT_GROUPS`.
        use: Name or `package.module:Attribute`.
        params: Parameters that the user gives.
        supplied: Further arguments, from the harness.
    """
    supplied = supplied or {}
    factory = check_params(kind, use, params, supplied)

    def create() -> Any:
        try:
            return factory(**supplied, **params)
        except ValueError as error:
            raise UserError(f"{kind} {use!r}: {error}") from error

    return call_plugin(f"{kind} {use!r} failed in its constructor", create)


@contextlib.contextmanager
def without_module(name: str) -> Iterator[None]:
    """Let imports of a module fail in the body, unless it is imported already, for packages that use it optionally."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
