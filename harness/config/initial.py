"""Where searches start from: the names that `initial` and `baselines` know, and what goes with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from harness.errors import nearest
from search.heuristics import RULES

__all__ = [
    "BASELINES", "EXTREME", "FILES", "INITIAL", "TOOLS", "Start", "check_baselines", "check_starts", "listed", "placed",
    "seeds_of",
]  # fmt: skip

_USUAL = ("modelopt_ptq", "ort_static")
TOOLS = (*_USUAL, "ort_static_s8")
"""Placements of PTQ tools, made for each model; the last one has INT8 activations whatever the backend's dialect."""

FILES = ("import", "pattern_cache", "sensitivity")
"""Placements from a file, `params: {path: ...}`: a Q/DQ model of one's own, what earlier searches learned, and what
`qdq sensitivity` measured."""

MOST = 32
"""Placements that one file may give."""


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_limit(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


INITIAL = ("float", "all", "linear", "linear_add", "movers", *_USUAL)
BASELINES = ("all", "linear", *_USUAL)
EXTREME = "extreme"
"""Everything quantized in the plainest form, a stress test; see `harness.pipeline.external_tools.extreme_form`."""
_FP8 = "-fp8"
_FLOAT = re.compile(r"float-(f|bf|fp|tf)\d+")
"""Rows of the float model at other precisions."""
_PLACED = ("float", "all", EXTREME, *RULES, "trt_guide", *(f"{name}{_FP8}" for name in ("all", *RULES)))
_MEANT = {"path": "the name of a file", "limit": f"1 to {MOST}"}
_PARAMS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "import": {"path": _is_path},
    "pattern_cache": {"path": _is_path, "limit": _is_limit},
    "sensitivity": {"path": _is_path, "limit": _is_limit},
}


class Start(Protocol):
    """An entry of `initial`."""

    @property
    def use(self) -> str: ...

    @property
    def params(self) -> Mapping[str, Any]: ...

    @property
    def name(self) -> str: ...


def listed(value: Any) -> Any:
    """What stands in the file as a list: "none" is an empty one, the cold start."""
    return [] if value == "none" else value


def check_starts(starts: Sequence[Start]) -> None:
    """Refuse what nobody can start from.

    Raises:
        ValueError: An unknown name, a label that means something else, or parameters that do not belong to it.
    """
    known = (*_PLACED, *TOOLS, *FILES)
    for start in starts:
        if start.use not in known:
            raise ValueError(
                f"initial: no start is called {start.use!r}; {nearest(start.use, known)}; none of all: 'none'"
            )
        if start.name != start.use and (start.use not in FILES or start.name in known):
            raise ValueError(f"initial: {start.use!r} keeps its own name, but got the label {start.name!r}")
        _check_params(start)
    names = [start.name for start in starts]
    numbered = {f"{start.name}-{rank}" for start in starts for rank in range(2, seeds_of(start) + 1)}
    for name in names:
        if _FLOAT.fullmatch(name) or name in numbered:
            raise ValueError(f"initial: the label {name!r} is what tables call another row; take another label")


def _check_params(start: Start) -> None:
    allowed = _PARAMS.get(start.use, {})
    for name, value in start.params.items():
        if name not in allowed:
            raise ValueError(f"initial: {start.use!r} has no parameter {name!r}; {nearest(name, allowed)}")
        if not allowed[name](value):
            raise ValueError(f"initial: {start.use!r}: {name} is {_MEANT[name]}, but got {value!r}")
    if "path" in allowed and "path" not in start.params:
        raise ValueError(f"initial: {start.use!r} needs a file: {{use: {start.use}, params: {{path: ...}}}}")


def check_baselines(names: Sequence[str], starts: Sequence[Start]) -> None:
    """Refuse baselines that are no placement: those known by name, and those that `initial` takes from a file.

    Raises:
        ValueError: An unknown name; the float model always has its row.
    """
    known = (*_PLACED[1:], *TOOLS, *(start.name for start in starts if start.use in FILES))
    for name in names:
        if name not in known:
            raise ValueError(f"baselines: no baseline is called {name!r}; {nearest(name, known)}")


def placed(name: str) -> tuple[str, str | None]:
    """The rule of a placement and its precision: "linear-fp8" is "linear" at "fp8"; None is the cell's first one."""
    return (name.removesuffix(_FP8), _FP8[1:]) if name.endswith(_FP8) else (name, None)


def seeds_of(start: Start) -> int:
    """How many placements an entry may give."""
    return int(start.params.get("limit", 1))
