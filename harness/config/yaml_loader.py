"""Strict reader and writer of YAML 1.2, and expansion of `matrix` in experiment files."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, describe_type
from harness.paths import check_path

MATRIX_LISTS = ("models", "backends", "searchers")
MAX_FILE_BYTES = 4_000_000
MAX_NESTING_LEVELS = 50
MAX_MATRIX_ENTRIES = 10_000  # a few lines could ask for more entries than fit into memory
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


def read_text_file(path: Path, kind: str) -> str:
    """Return the text of a file.

    Args:
        kind: Description of the file for messages, such as "an experiment file".

    Raises:
        UserError: The file is missing, no text, an ONNX model, or larger than `MAX_FILE_BYTES`.
    """
    check_path(path)
    try:
        if path.suffix == ".onnx" and path.is_file():
            raise UserError(f"{path}: this is an ONNX model, not {kind}; {kind} names the model by a key")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UserError(f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} for {kind}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file ({path.resolve()})") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: this is a folder, not {kind}; name the file in it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: this is not text, so not {kind}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_experiment_yaml(text: str, source: str) -> dict[str, Any]:
    """Read the YAML text of an experiment and expand `matrix`.

    Args:
        source: Name of the file in messages.

    Raises:
        UserError: The text is rejected by `read_yaml_mapping`, or `matrix` is no mapping from paths below `models`,
            `backends` or `searchers` to lists of values, or asks for too many entries.
    """
    return _expand_matrix(read_yaml_mapping(text, source, "an experiment"), source)


def read_yaml_mapping(text: str, source: str, kind: str) -> dict[str, Any]:
    """Read YAML text that is a mapping.

    Args:
        source: Name of the file in messages.
        kind: Description of the file for messages, such as "an experiment".

    Raises:
        UserError: The text is not YAML, not a mapping, too deeply nested, or has an alias or a duplicate key.
    """
    try:
        raw = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = " ".join(part for part in (error.context and f"{error.context},", error.problem) if part)
        raise UserError(f"{source}: not valid YAML: {place}{problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or tagged number
        raise UserError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{source}: {kind} is a mapping of keys, but {describe_type(raw)}")
    return raw


def parse_yaml(text: str) -> Any:
    """Return the value of YAML 1.2 text.

    Raises:
        yaml.YAMLError: The text is not YAML, or has an alias, a duplicate key or too many levels.
        ValueError: A number has too many digits.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_StrictLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _problem("aliases (*name) are not allowed here", event.start_mark)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_NESTING_LEVELS:
            raise _problem(f"nested more than {MAX_NESTING_LEVELS} levels deep", event.start_mark)
    return yaml.load(text, Loader=_StrictLoader)


def dump_yaml(value: Any) -> str:
    """Return YAML text that both YAML 1.1 and YAML 1.2 read as the value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a PyYAML that was built without libyaml has none


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """SafeLoader for the core schema of YAML 1.2 that rejects duplicate keys and keys that are no scalars.

    The caller rejects aliases (which allow exponential expansion) and deep nesting, before values are constructed.
    PyYAML itself implements YAML 1.1, in which `1:30` is 90, `010` is 8, `no` is false and `1e-3` is text.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # declared so by PyYAML

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _problem(f"a key is a plain name, but got {key!r}", key_node.start_mark)
            if key in seen:
                raise _problem(f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: Any) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 or YAML 1.2 would read as another type.

    An object that occurs twice is written twice, because the loader rejects aliases.
    """

    def ignore_aliases(self, _: object) -> bool:
        return True


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_integer)
for _tag, _pattern, _first in CORE_SCHEMA:
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), [*_first, ""])


def _problem(text: str, mark: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, mark)


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
        copies = len(entries) * math.prod(len(values) for values in changes.values())
        if copies > MAX_MATRIX_ENTRIES:
            raise UserError(f"{source}: matrix.{head}.*: asks for {copies} {head}, but at most {MAX_MATRIX_ENTRIES}")
        body[head] = [each for entry in entries for each in _expand_entry(entry, changes, f"{source}: matrix.{head}")]
    return body


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
    """Return parameters given as NAME=VALUE as a mapping, empty for None; the last VALUE of a NAME counts.

    Raises:
        UserError: A text is not NAME=VALUE, or VALUE is not YAML as in an experiment file.
    """
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
