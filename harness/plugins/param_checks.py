"""Checks of the values of plug-in parameters: their types, their size, and trust in code that they name."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from harness.base.errors import UserError
from harness.base.paths import require_trust

_YAML_TERMS = {"a valid array": "a list", "an object": "a mapping"}


def check_values(label: str, factory: Callable[..., Any], params: Mapping[str, Any], most: int) -> None:
    """Check the values of parameters.

    Args:
        label: Name of the plug-in for messages.
        factory: Class or function that takes the parameters.
        params: Parameters that the user gives.
        most: Largest accepted integer, except for seeds and numbers of bytes.

    Raises:
        UserError: A value has another type than annotated, is too large, or names code that is not trusted.
    """
    _require_trusted_code(label, factory, params)
    annotations = _annotations(factory)
    for name, value in params.items():
        _check_counts(f"{label}: {name}", name, value, most)
        if name in annotations:
            _check_type(f"{label}: {name}", annotations[name], value)


def _require_trusted_code(label: str, factory: object, params: Mapping[str, Any]) -> None:
    """Raise `UserError` for a parameter that names code or a file to write, unless plug-ins are trusted.

    A class lists such parameters in `code_params` (files and arguments) and in `program_params` (programs; the plain
    name of a program on PATH needs no trust).
    """
    programs = [name for name in getattr(factory, "program_params", ()) if "/" in str(params.get(name) or "")]
    for name in (*programs, *(name for name in getattr(factory, "code_params", ()) if params.get(name))):
        require_trust(f"{label}: {name} would run code of {params[name]!r} or write to it")


def _check_counts(path: str, name: str, value: Any, most: int) -> None:
    """Raise `UserError` for a number in parameters above `most`, except for seeds and numbers of bytes."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        _check_counts(f"{path}.{key}", str(key), inner, most)
    if isinstance(value, int) and abs(value) > most and not re.search("seed|bytes", name):
        raise UserError(f"{path}: at most {most:,}, but got {value}")


def _annotations(factory: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(factory, eval_str=True).parameters
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError):  # names imported for type checkers only
        return {}
    return {p.name: p.annotation for p in parameters.values() if p.annotation is not p.empty}


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
