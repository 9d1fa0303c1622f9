"""Strict reader and writer of YAML 1.2, expansion of `matrix`, and messages for files that pydantic rejects."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from harness.base.errors import UserError, describe_type, suggest_names
from harness.base.files import MAX_BYTES, read_text
from harness.base.paths import replacing
from harness.base.text import shorten

MATRIX_LISTS = ("models", "backends", "searchers")
MAX_FILE_BYTES = 4_000_000
MAX_NESTING_LEVELS = 50
MAX_NODES, MAX_CACHE_NODES = 100_000, 300_000  # values and keys; an error about one takes 1 kB, a model 2 kB
#: Plain scalars that are no text: tag, pattern and possible first characters (YAML 1.2.2, section 10.3.2, core schema).
CORE_SCHEMA = (
    ("null", r"null|Null|NULL|~|", "nN~"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
)


def read_text_file(path: Path, kind: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a YAML file.

    Args:
        kind: Description of the file for messages, such as "an experiment file".
    """
    if path.suffix == ".onnx" and os.path.isfile(path):
        raise UserError(f"{path}: this is an ONNX model, not {kind}; {kind} names the model by a key")
    return read_text(path, kind, max_bytes)


def read_cache_file(path: Path, kind: str) -> dict[str, Any]:
    """Read a YAML mapping that a program wrote, see `read_yaml_mapping`; it may be larger than a user's file."""
    return read_yaml_mapping(read_text_file(path, kind, MAX_BYTES), str(path), kind, MAX_CACHE_NODES)


def read_experiment_yaml(text: str, source: str) -> dict[str, Any]:
    """Read the YAML text of an experiment and expand `matrix`.

    Args:
        source: Name of the file in messages.
    """
    return _expand_matrix(read_yaml_mapping(text, source, "an experiment"), source)


def read_yaml_mapping(text: str, source: str, kind: str, max_nodes: int = MAX_NODES) -> dict[str, Any]:
    """Read YAML text that is a mapping.

    Args:
        source: Name of the file in messages.
        kind: Description of the file for messages, such as "an experiment".
        max_nodes: Largest number of values and keys.
    """
    try:
        raw = parse_yaml(text, max_nodes)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = " ".join(part for part in (error.context and f"{error.context},", error.problem) if part)
        raise UserError(f"{source}: not valid YAML: {place}{problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{source}: {kind} is a mapping of keys, but {describe_type(raw)}")
    return raw


def parse_yaml(text: str, max_nodes: int = MAX_NODES) -> Any:
    """Return the value of YAML 1.2 text in the core schema.

    Values are made from events, because the nodes of PyYAML take 1 kB each. PyYAML itself implements YAML 1.1, in which
    `1:30` is 90, `010` is 8, `no` is false and `1e-3` is text.

    Raises:
        yaml.YAMLError: The text is not YAML, or has an alias (which allows exponential expansion), a tag of another
            type than the core schema has, a duplicate key, a key that is no plain name, or too many values or levels.
        ValueError: A number has too many digits.
    """
    documents: list[Any] = []
    stack: list[Any] = [documents]
    keys: list[Any] = [_NO_KEY]
    nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
            keys.pop()
            continue
        if isinstance(event, yaml.AliasEvent):
            raise _problem("aliases (*name) are not allowed here", event)
        if not isinstance(event, yaml.NodeEvent):
            continue
        nodes += 1
        if nodes > max_nodes:
            raise _problem(f"more than {max_nodes} values and keys", event)
        value, parent = _make_value(event), stack[-1]
        if isinstance(parent, list):
            parent.append(value)
        elif keys[-1] is not _NO_KEY:
            parent[keys[-1]], keys[-1] = value, _NO_KEY
        elif isinstance(value, dict | list):
            raise _problem("a key is a plain name, but this is a list or a mapping", event)
        elif value in parent:
            raise _problem(f"duplicate key {shorten(repr(value))}", event)
        else:
            keys[-1] = value
        if isinstance(value, dict | list):
            stack.append(value)
            keys.append(_NO_KEY)
            if len(stack) > MAX_NESTING_LEVELS + 1:
                raise _problem(f"nested more than {MAX_NESTING_LEVELS} levels deep", event)
    if len(documents) > 1:
        raise yaml.YAMLError("expected a single document")
    return documents[0] if documents else None


def _make_value(event: Any) -> Any:
    """Return the value of a scalar, or an empty list or mapping."""
    tag = None if event.tag == "!" else event.tag
    if isinstance(event, yaml.CollectionStartEvent):
        kind = dict if isinstance(event, yaml.MappingStartEvent) else list
        if tag not in (None, _TAG_PREFIX + ("map" if kind is dict else "seq")):
            raise _problem(f"the tag {shorten(tag)!r} is not allowed here", event)
        return kind()
    text, plain = event.value, event.implicit[0] and event.tag is None
    if tag is None:
        schema = (name for name, pattern, _ in _PLAIN_SCALARS if pattern.fullmatch(text)) if plain else iter(())
        tag = _TAG_PREFIX + next(schema, "str")
    make = _CONSTRUCTORS.get(tag.removeprefix(_TAG_PREFIX) if tag.startswith(_TAG_PREFIX) else "")
    if make is None:
        raise _problem(f"the tag {shorten(tag)!r} is not allowed here", event)
    return make(text)


_NO_KEY = object()
_TAG_PREFIX = "tag:yaml.org,2002:"
_PLAIN_SCALARS = [(name, re.compile(pattern), first) for name, pattern, first in CORE_SCHEMA]
_CONSTRUCTORS: Mapping[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    "float": lambda text: float(text.replace(".", "") if text[-1].isalpha() else text),  # .inf and .nan
    "str": str,
}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a PyYAML that was built without libyaml has none
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def dump_yaml(value: Any) -> str:
    """Return YAML text that both YAML 1.1 and YAML 1.2 read as the value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(_SafeDumper):  # type: ignore[misc]
    """SafeDumper that quotes text which YAML 1.1 or YAML 1.2 would read as another type.

    An object that occurs twice is written twice, because the loader rejects aliases.
    """

    def ignore_aliases(self, _: object) -> bool:
        return True


def quote_core_schema(dumper: Any) -> None:
    """Let a dumper of PyYAML quote text that YAML 1.2 would read as another type."""
    for tag, pattern, first in CORE_SCHEMA:
        dumper.add_implicit_resolver(f"{_TAG_PREFIX}{tag}", re.compile(f"(?:{pattern})\\Z"), [*first, ""])


def write_plain_yaml(body: Mapping[str, Any], path: Path) -> None:
    """Write a YAML file atomically, with lists of plain values on one line each; folders are created.

    Raises:
        OSError: The file cannot be written; an old one is kept.
    """
    text = yaml.dump(dict(body), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=4096)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


quote_core_schema(_Dumper)


def _problem(text: str, event: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, event.start_mark)


def _expand_matrix(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Replace each entry of `models`, `backends` or `searchers` by one copy per combination of `matrix`."""
    body = {key: value for key, value in raw.items() if key != "matrix"}
    matrix = raw.get("matrix", {})
    if not isinstance(matrix, dict):
        raise UserError(f"{source}: matrix: a mapping from a path to a list, but got {type(matrix).__name__}")
    axes: dict[str, dict[str, list[Any]]] = {}
    for path, values in matrix.items():
        head, _, tail = str(path).partition(".")
        if head not in MATRIX_LISTS or not tail or "" in tail.split("."):
            raise UserError(
                f"{source}: matrix.{path}: a path below models, backends or searchers, such as "
                "backends.params.threads ('seeds', 'precision' and 'budget.evaluations' are lists already)"
            )
        if not isinstance(values, list) or not values:
            raise UserError(f"{source}: matrix.{path}: a list with at least one entry, but got {values!r}")
        axes.setdefault(head, {})[tail] = values
    for head, changes in axes.items():
        entries = body.get(head)
        if not isinstance(entries, list):
            raise UserError(f"{source}: matrix.{head}.*: there is no list {head!r} to vary")
        combinations = math.prod(len(values) for values in changes.values())
        largest = _count_values(entries) + sum(
            len(entries) * max(map(_count_values, each)) for each in changes.values()
        )
        if combinations * largest > MAX_NODES:  # a few lines could ask for more than fits into memory
            copies = f"{len(entries) * combinations} {head} with {combinations * largest} values"
            raise UserError(f"{source}: matrix.{head}.*: asks for {copies}, but at most {MAX_NODES}")
        body[head] = [each for entry in entries for each in _expand_entry(entry, changes, f"{source}: matrix.{head}")]
    return body


def _count_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count_values, inner))


def _expand_entry(entry: Any, changes: Mapping[str, list[Any]], where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(entry, str | dict):
        raise UserError(f"{where}: the entries to vary are names or mappings, but one is {entry!r}")
    original = {"use": entry} if isinstance(entry, str) else entry
    name = str(original.get("label") or Path(str(original.get("use", "")).rpartition(":")[2]).stem)
    for combination in itertools.product(*(enumerate(values) for values in changes.values())):
        varied = copy.deepcopy(original)
        parts = [name]
        for path, (index, value) in zip(changes, combination, strict=True):
            _set_path(varied, path, value, where)
            parts.append(f"{path.rpartition('.')[2]}-{index if isinstance(value, list | dict) else value}")
        varied["label"] = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))
        yield varied


def _set_path(entry: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set the value at a dotted path, creating mappings as needed."""
    *parents, last = path.split(".")
    target = entry
    for depth, parent in enumerate(parents):
        below = target.setdefault(parent, {})
        if not isinstance(below, dict):
            prefix = ".".join(parents[: depth + 1])
            raise UserError(f"{where}.{path}: {prefix!r} is {below!r} in {entry.get('use')!r}, not a mapping")
        target = below
    target[last] = value


def parse_params(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return parameters given as NAME=VALUE as a mapping, empty for None; the last VALUE of a NAME counts."""
    params = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        try:
            if not equals:
                raise ValueError("no '='")
            params[name] = parse_yaml(value)
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"--param {text}: NAME=VALUE, for instance --param threads=1 ({error})") from error
    return params


SUGGESTION_PREFIX = "did you mean"
QUOTED_NAME = re.compile(r"'([^']+)'")
MAX_ERRORS_SHOWN = 20
MAX_KEYS_SHOWN = 4


def to_user_error(
    root: type[BaseModel],
    source: str,
    error: ValidationError,
    *,
    extra_keys: Sequence[str] = (),
    arguments: Mapping[str, str] | None = None,
) -> UserError:
    """Return a `UserError` with one line for each mistake in a file.

    Args:
        root: Schema of the whole file.
        source: Name of the file in the message.
        extra_keys: Keys of the top level that are read before the validation.
        arguments: Argument by the key that it sets, which replaces key and source in the message.
    """
    lines = []
    for each in error.errors():
        if each["type"] == "too_short" and each["ctx"]["min_length"] == 1 and each["input"]:
            continue  # its entries have errors of their own
        where = shorten(".".join(map(str, each["loc"])))
        text = ": ".join(filter(None, (where, _describe_error(root, dict(each), extra_keys))))
        key, _, problem = text.partition(": ")
        argument = (arguments or {}).get(key.removesuffix(".0"))
        lines.append(f"{argument}: {problem}" if argument else f"{source}: {text}" if source else text)
    more = len(lines) - MAX_ERRORS_SHOWN
    return UserError("\n".join([*lines[:MAX_ERRORS_SHOWN], *([f"and {more} more"] if more > 0 else [])]))


def _describe_error(root: type[BaseModel], error: Mapping[str, Any], extra_keys: Sequence[str]) -> str:
    """Return the expected value, in terms of YAML instead of Python types, and the one that the file has."""
    kind, loc, value = error["type"], error["loc"], error.get("input")
    shown = "nothing" if value is None else shorten(repr(value))
    if kind == "extra_forbidden":
        return f"unknown key; {_suggest_place(root, loc, extra_keys)}"
    if kind == "missing":
        return "this key is required"
    expected = str(error["msg"]).removeprefix("Value error, ")
    if kind in {"tuple_type", "list_type"}:
        example = "..." if value is None or isinstance(value, dict) else shown.strip("'")
        expected = f"a list, such as [{example}]"
    elif kind == "too_short" and error["ctx"]["min_length"] == 1:
        expected = "a list with at least one entry"
    elif kind == "dict_type":
        expected = "a mapping of keys"
    elif kind == "model_type":
        keys = list(_model_at(root, loc).model_fields)[:MAX_KEYS_SHOWN]
        expected = f"a mapping with keys such as {', '.join(keys)}"
    if isinstance(value, dict | BaseModel) or "but got" in expected:
        return expected
    message = f"{expected}, but got {shown}"
    if kind != "literal_error" or not isinstance(value, str):
        return message
    hint = suggest_names(value, QUOTED_NAME.findall(error["ctx"]["expected"]))
    return f"{message}; {hint}" if hint.startswith(SUGGESTION_PREFIX) else message


def _suggest_place(root: type[BaseModel], loc: tuple[Any, ...], extra_keys: Sequence[str]) -> str:
    """Return where a misplaced key belongs, or else the keys with similar names."""
    name, owner = shorten(str(loc[-1])), _model_at(root, loc[:-1])
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
