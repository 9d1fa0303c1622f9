"""What is wrong with a spec file, in words: the place, what is allowed there, and where a misplaced key belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from pydantic import BaseModel

from harness.errors import UserError, nearest

__all__ = ["explain", "respelled"]

QUOTED = re.compile(r"'([^']+)'")
DATA_KEY = re.compile(r"(?<![\w/])data\.(\w+)(?![\w./])")
"""A key of an experiment's `data` mapping, which the evaluators' messages name."""


def explain(root: type[BaseModel], source: str, error: Mapping[str, Any]) -> str:
    """One mistake as a sentence.

    Args:
        root: What the whole file is checked against.
        source: Name of the file.
        error: Pydantic's record of the mistake.
    """
    where = ".".join(str(part) for part in error["loc"])
    return ": ".join(part for part in (source, where, _said(root, error)) if part)


@contextmanager
def respelled(words: Mapping[str, str], where: str = "") -> Iterator[None]:
    """Let messages about the keys of a `data` mapping name those of the spec that it was made from.

    Args:
        words: Key of the spec by key of the mapping.
        where: What every message begins with.

    Raises:
        UserError: The one that is raised inside, in these words.
    """
    try:
        yield
    except UserError as error:
        said = DATA_KEY.sub(lambda key: words.get(key[1], key[0]), str(error))
        raise UserError(f"{where}: {said}" if where else said) from error


def _said(root: type[BaseModel], error: Mapping[str, Any]) -> str:
    kind, loc, got = error["type"], error["loc"], error.get("input")
    if kind == "extra_forbidden":
        return f"unknown key; {_place(root, loc)}"
    if kind == "missing":
        return "this key is required"
    if kind == "model_type":
        keys = ", ".join(_class_at(root, loc).model_fields)
        return f"a mapping with keys such as {keys}, but got {'nothing' if got is None else repr(got)}"
    message = str(error["msg"]).removeprefix("Value error, ").replace("valid tuple", "valid list")
    if isinstance(got, dict | BaseModel) or "but got" in message:
        return message
    said = f"{message}, but got {got!r}"
    if kind == "literal_error" and isinstance(got, str):
        return f"{said}; {nearest(got, QUOTED.findall(error['ctx']['expected']))}"
    return said


def _place(root: type[BaseModel], loc: tuple[Any, ...]) -> str:
    """Where a key belongs that stands where it does not; else the names that are like it."""
    name = str(loc[-1])
    homes = ["at the top level"] if name in root.model_fields else []
    homes += [f"below {path}" for path in _homes(root, name)]
    if homes:
        return f"it belongs {' or '.join(homes)} (look at the indentation)"
    return nearest(name, _class_at(root, loc[:-1]).model_fields)


def _homes(owner: type[BaseModel], name: str, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted paths of the mappings that have a key of this name."""
    if path and name in owner.model_fields:
        yield ".".join(path)
    for field, info in owner.model_fields.items():
        inner = _class_in(info.annotation)
        if inner is not None:
            yield from _homes(inner, name, (*path, field))


def _class_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """What checks the mapping at a place, found by walking the classes."""
    owner = root
    for part in loc:
        if part in owner.model_fields:
            owner = _class_in(owner.model_fields[part].annotation) or owner
    return owner


def _class_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _class_in(inner)) is not None), None)
