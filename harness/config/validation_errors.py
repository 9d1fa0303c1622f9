"""Messages for files that pydantic rejects: the place, the allowed values, and where a misplaced key belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from harness.base.errors import UserError, suggest_names

SUGGESTION_PREFIX = "did you mean"
QUOTED_NAME = re.compile(r"'([^']+)'")
MAX_ERRORS_SHOWN = 20
MAX_VALUE_CHARS = 200
MAX_KEYS_SHOWN = 4


def to_user_error(
    root: type[BaseModel], source: str, error: ValidationError, *, extra_keys: Sequence[str] = ()
) -> UserError:
    """Return a `UserError` with one line for each mistake in a file.

    Args:
        root: Schema of the whole file.
        source: Name of the file in the message.
        extra_keys: Keys of the top level that are read before the validation.
    """
    problems = [each for each in error.errors() if not _is_consequence(each)]
    lines = [_format_error(root, source, dict(each), extra_keys) for each in problems[:MAX_ERRORS_SHOWN]]
    more = len(problems) - MAX_ERRORS_SHOWN
    return UserError("\n".join([*lines, *([f"and {more} more"] if more > 0 else [])]))


def _is_consequence(error: Mapping[str, Any]) -> bool:
    """Return whether an error only says that a list is too short because its entries have errors of their own."""
    return bool(error["type"] == "too_short" and error["ctx"]["min_length"] == 1 and error["input"])


def _format_error(root: type[BaseModel], source: str, error: Mapping[str, Any], extra_keys: Sequence[str]) -> str:
    where = _truncate(".".join(str(part) for part in error["loc"]))
    return ": ".join(part for part in (source, where, _describe_error(root, error, extra_keys)) if part)


def _describe_error(root: type[BaseModel], error: Mapping[str, Any], extra_keys: Sequence[str]) -> str:
    kind, loc, value = error["type"], error["loc"], error.get("input")
    if kind == "extra_forbidden":
        return f"unknown key; {_suggest_place(root, loc, extra_keys)}"
    if kind == "missing":
        return "this key is required"
    expected = _describe_expected(root, error, value)
    if isinstance(value, dict | BaseModel) or "but got" in expected:
        return expected
    message = f"{expected}, but got {_format_value(value)}"
    if kind != "literal_error" or not isinstance(value, str):
        return message
    hint = suggest_names(value, QUOTED_NAME.findall(error["ctx"]["expected"]))
    return f"{message}; {hint}" if hint.startswith(SUGGESTION_PREFIX) else message


def _describe_expected(root: type[BaseModel], error: Mapping[str, Any], value: Any) -> str:
    """Return the expected value in terms of YAML instead of Python types."""
    if error["type"] in {"tuple_type", "list_type"}:
        example = "..." if value is None or isinstance(value, dict) else _format_value(value).strip("'")
        return f"a list, such as [{example}]"
    if error["type"] == "too_short" and error["ctx"]["min_length"] == 1:
        return "a list with at least one entry"
    if error["type"] == "dict_type":
        return "a mapping of keys"
    if error["type"] == "model_type":
        keys = list(_model_at(root, error["loc"]).model_fields)[:MAX_KEYS_SHOWN]
        return f"a mapping with keys such as {', '.join(keys)}"
    return str(error["msg"]).removeprefix("Value error, ")


def _format_value(value: Any) -> str:
    return "nothing" if value is None else _truncate(repr(value))


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _suggest_place(root: type[BaseModel], loc: tuple[Any, ...], extra_keys: Sequence[str]) -> str:
    """Return where a misplaced key belongs, or else the keys with similar names."""
    name, owner = _truncate(str(loc[-1])), _model_at(root, loc[:-1])
    hint = suggest_names(name, [*owner.model_fields, *(extra_keys if owner is root else ())])
    if "params" in owner.model_fields and not hint.startswith(SUGGESTION_PREFIX):  # plug-ins may have keys of any name
        return f"a setting of the plug-in belongs below params: {{params: {{{name}: ...}}}}; {hint}"
    places = ["at the top level"] if name in root.model_fields else []
    places += [f"below {path}" for path in _paths_of_key(root, name)]
    return f"it belongs {' or '.join(places)} (check the indentation)" if places else hint


def _paths_of_key(owner: type[BaseModel], name: str, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted paths of the mappings that have a key of this name."""
    if path and name in owner.model_fields:
        yield ".".join(path)
    for field, info in owner.model_fields.items():
        inner = _model_in(info.annotation)
        if inner is not None:
            yield from _paths_of_key(inner, name, (*path, field))


def _model_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    owner = root
    for part in loc:
        if part in owner.model_fields:
            owner = _model_in(owner.model_fields[part].annotation) or owner
    return owner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner)) is not None), None)
