"""Where searches start from: the names that `initial` and `baselines` know, and what goes with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from harness.errors import suggest_names
from search.heuristics import RULES

__all__ = [
    "DEFAULT_BASELINES", "FULLY_QUANTIZED", "FILE_SOURCES", "DEFAULT_INITIAL", "PTQ_TOOLS", "InitialSpec", "check_baselines", "check_initial", "as_list", "split_rule_precision",
    "initial_count",
]  # fmt: skip

_COMMON_TOOLS = ("modelopt_ptq", "ort_static")
PTQ_TOOLS = (*_COMMON_TOOLS, "ort_static_s8")
"""Placements of PTQ tools, made for each model; the last one has INT8 activations whatever the backend's dialect."""

FILE_SOURCES = ("import", "pattern_cache", "sensitivity")
"""Placements from a file, `params: {path: ...}`: a Q/DQ model of one's own, what earlier searches learned, and what
`qdq sensitivity` measured."""

MAX_FILE_PLACEMENTS = 32
"""Placements that one file may give."""


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_limit(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_FILE_PLACEMENTS


DEFAULT_INITIAL = ("float", "all", "linear", "linear_add", "movers", *_COMMON_TOOLS)
DEFAULT_BASELINES = ("all", "linear", *_COMMON_TOOLS)
FULLY_QUANTIZED = "extreme"
"""Everything quantized in the plainest form, a stress test; see `harness.pipeline.external_tools.extreme_form`."""
_FP8_SUFFIX = "-fp8"
_FLOAT_ROW_NAME = re.compile(r"float-(f|bf|fp|tf)\d+")
"""Rows of the float model at other precisions."""
_RULE_PLACEMENTS = ("float", "all", FULLY_QUANTIZED, *RULES, "trt_guide", *(f"{name}{_FP8_SUFFIX}" for name in ("all", *RULES)))
_PARAM_HINTS = {"path": "the name of a file", "limit": f"1 to {MAX_FILE_PLACEMENTS}"}
_PARAM_CHECKS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "import": {"path": _is_path},
    "pattern_cache": {"path": _is_path, "limit": _is_limit},
    "sensitivity": {"path": _is_path, "limit": _is_limit},
}


class InitialSpec(Protocol):
    """An entry of `initial`."""

    @property
    def use(self) -> str: ...

    @property
    def params(self) -> Mapping[str, Any]: ...

    @property
    def name(self) -> str: ...


def as_list(value: Any) -> Any:
    """What stands in the file as a list: "none" is an empty one, the cold start."""
    return [] if value == "none" else value


def check_initial(initial: Sequence[InitialSpec]) -> None:
    """Refuse what nobody can start from.

    Raises:
        ValueError: An unknown name, a label that means something else, or parameters that do not belong to it.
    """
    known = (*_RULE_PLACEMENTS, *PTQ_TOOLS, *FILE_SOURCES)
    for start in initial:
        if start.use not in known:
            raise ValueError(
                f"initial: no start is called {start.use!r}; {suggest_names(start.use, known)}; none of all: 'none'"
            )
        if start.name != start.use and (start.use not in FILE_SOURCES or start.name in known):
            raise ValueError(f"initial: {start.use!r} keeps its own name, but got the label {start.name!r}")
        _check_initial_params(start)
    names = [start.name for start in initial]
    numbered = {f"{start.name}-{rank}" for start in initial for rank in range(2, initial_count(start) + 1)}
    for name in names:
        if _FLOAT_ROW_NAME.fullmatch(name) or name in numbered:
            raise ValueError(f"initial: the label {name!r} is what tables call another row; take another label")


def _check_initial_params(start: InitialSpec) -> None:
    allowed = _PARAM_CHECKS.get(start.use, {})
    for name, value in start.params.items():
        if name not in allowed:
            raise ValueError(f"initial: {start.use!r} has no parameter {name!r}; {suggest_names(name, allowed)}")
        if not allowed[name](value):
            raise ValueError(f"initial: {start.use!r}: {name} is {_PARAM_HINTS[name]}, but got {value!r}")
    if "path" in allowed and "path" not in start.params:
        raise ValueError(f"initial: {start.use!r} needs a file: {{use: {start.use}, params: {{path: ...}}}}")


def check_baselines(names: Sequence[str], starts: Sequence[InitialSpec]) -> None:
    """Refuse baselines that are no placement: those known by name, and those that `initial` takes from a file.

    Raises:
        ValueError: An unknown name; the float model always has its row.
    """
    known = (*_RULE_PLACEMENTS[1:], *PTQ_TOOLS, *(start.name for start in starts if start.use in FILE_SOURCES))
    for name in names:
        if name not in known:
            raise ValueError(f"baselines: no baseline is called {name!r}; {suggest_names(name, known)}")


def split_rule_precision(name: str) -> tuple[str, str | None]:
    """The rule of a placement and its precision: "linear-fp8" is "linear" at "fp8"; None is the cell's first one."""
    return (name.removesuffix(_FP8_SUFFIX), _FP8_SUFFIX[1:]) if name.endswith(_FP8_SUFFIX) else (name, None)


def initial_count(start: InitialSpec) -> int:
    """How many placements an entry may give."""
    return int(start.params.get("limit", 1))
