"""What is wrong with a file that pydantic checked, in words: the place, what is allowed there, where a key belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from harness.errors import UserError, suggest_names

__all__ = ["to_user_error"]

SUGGESTION_PREFIX = "did you mean"
QUOTED_NAME = re.compile(r"'([^']+)'")
MAX_ERRORS_SHOWN = 20
"""Mistakes that are named; a file with more of them is another file than was meant."""
MAX_VALUE_CHARS = 200
"""Characters that are shown of a place, and of what stands where something else belongs."""
MAX_KEYS_SHOWN = 4
"""Keys of a mapping that are named as its likes."""


def to_user_error(root: type[BaseModel], source: str, error: ValidationError, *, extra_keys: Sequence[str] = ()) -> UserError:
    """All mistakes of a file, a line each.

    Args:
        root: What the whole file is checked against.
        source: Name of the file.
        error: What pydantic found.
        beside: Keys of the top level that are read before the file is checked.

    Returns:
        What to raise from `error`.
    """
    found = error.errors()
    lines = [_format_error(root, source, dict(each), extra_keys) for each in found[:MAX_ERRORS_SHOWN]]
    return UserError("\n".join([*lines, *([f"and {len(found) - MAX_ERRORS_SHOWN} more"] if len(found) > MAX_ERRORS_SHOWN else [])]))


def _format_error(root: type[BaseModel], source: str, error: Mapping[str, Any], beside: Sequence[str]) -> str:
    where = _truncate(".".join(str(part) for part in error["loc"]))
    return ": ".join(part for part in (source, where, _describe_error(root, error, beside)) if part)


def _describe_error(root: type[BaseModel], error: Mapping[str, Any], beside: Sequence[str]) -> str:
    kind, loc, got = error["type"], error["loc"], error.get("input")
    if kind == "extra_forbidden":
        return f"unknown key; {_suggest_place(root, loc, beside)}"
    if kind == "missing":
        return "this key is required"
    wanted = _describe_expected(root, error, got)
    if isinstance(got, dict | BaseModel) or "but got" in wanted:
        return wanted
    said = f"{wanted}, but got {_format_value(got)}"
    if kind != "literal_error" or not isinstance(got, str):
        return said
    like = suggest_names(got, QUOTED_NAME.findall(error["ctx"]["expected"]))
    return f"{said}; {like}" if like.startswith(SUGGESTION_PREFIX) else said


def _describe_expected(root: type[BaseModel], error: Mapping[str, Any], got: Any) -> str:
    """What belongs there, in words of YAML."""
    if error["type"] in {"tuple_type", "list_type"}:
        return f"a list, such as [{'...' if got is None or isinstance(got, dict) else _format_value(got).strip(chr(39))}]"
    if error["type"] == "too_short" and error["ctx"]["min_length"] == 1:
        return "a list with at least one entry that may stand there" if got else "a list with at least one entry"
    if error["type"] == "dict_type":
        return "a mapping of keys"
    if error["type"] == "model_type":
        return f"a mapping with keys such as {', '.join(list(_model_at(root, error['loc']).model_fields)[:MAX_KEYS_SHOWN])}"
    return str(error["msg"]).removeprefix("Value error, ")


def _format_value(got: Any) -> str:
    return "nothing" if got is None else _truncate(repr(got))


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _suggest_place(root: type[BaseModel], loc: tuple[Any, ...], beside: Sequence[str]) -> str:
    """Where a key belongs that stands where it does not; else the names that are like it."""
    name, owner = _truncate(str(loc[-1])), _model_at(root, loc[:-1])
    like = suggest_names(name, [*owner.model_fields, *(beside if owner is root else ())])
    if "params" in owner.model_fields and not like.startswith(SUGGESTION_PREFIX):  # its names may be those of keys elsewhere
        return f"a setting of the plug-in stands below params: {{params: {{{name}: ...}}}}; {like}"
    homes = ["at the top level"] if name in root.model_fields else []
    homes += [f"below {path}" for path in _paths_of_key(root, name)]
    return f"it belongs {' or '.join(homes)} (look at the indentation)" if homes else like


def _paths_of_key(owner: type[BaseModel], name: str, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted paths of the mappings that have a key of this name."""
    if path and name in owner.model_fields:
        yield ".".join(path)
    for field, info in owner.model_fields.items():
        inner = _model_in(info.annotation)
        if inner is not None:
            yield from _paths_of_key(inner, name, (*path, field))


def _model_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """What checks the mapping at a place, found by walking the classes."""
    owner = root
    for part in loc:
        if part in owner.model_fields:
            owner = _model_in(owner.model_fields[part].annotation) or owner
    return owner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner)) is not None), None)
