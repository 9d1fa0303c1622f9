"""Names in an experiment's keys `initial` and `baselines`: placements that searches start from or are compared with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.base.errors import suggest_names
from harness.config.sections import PluginSpec
from search.fixed_placements import FIXED_PLACEMENTS

_COMMON_TOOLS = ("modelopt_ptq", "ort_static")
#: PTQ tools whose placements can be initial; the last one has INT8 activations in every dialect of the backend.
PTQ_TOOLS = (*_COMMON_TOOLS, "ort_static_s8")
#: Tools whose models can only be baselines, as they are not Q/DQ placements of the dialect.
BASELINE_TOOLS = ("ort_dynamic", "nncf_ptq", "nncf_ptq_onnx", "nncf_accuracy_control", "quark_ptq", "quark_adaquant")
TOOL_NAMES = (*PTQ_TOOLS, *BASELINE_TOOLS)
MAX_FILE_PLACEMENTS = 32

DEFAULT_INITIAL = ("float", "all", "linear", "linear_add", "movers", *_COMMON_TOOLS)
DEFAULT_BASELINES = ("all", "linear", *_COMMON_TOOLS)
#: The fixed placement of TensorRT's guide, which depends on the order of the nodes.
TENSORRT_GUIDE = "trt_guide"
#: Stress test: everything quantized symmetrically; see `harness.run.prepare.external_tools`.
FULLY_QUANTIZED = "extreme"
LAST_VERSION_WITH_REMOVED_KEYS = "qdq-bench 0.1.0 at commit f7c262ac"
_REMOVED = ("predicted",)
_FP8_SUFFIX = "-fp8"
_FLOAT_ROW_NAME = re.compile(r"float-(f|bf|fp|tf)\d+")
FIXED_NAMES = (
    *FIXED_PLACEMENTS, TENSORRT_GUIDE, FULLY_QUANTIZED,
    *(f"{name}{_FP8_SUFFIX}" for name in FIXED_PLACEMENTS if name != "float"),
)  # fmt: skip


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_limit(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_FILE_PLACEMENTS


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_PARAM_HINTS = {"path": "the name of a file", "limit": f"1 to {MAX_FILE_PLACEMENTS}", "ranges": "true or false"}
_MODEL_FILE: Mapping[str, Callable[[Any], bool]] = {"path": _is_path, "ranges": _is_flag}
_RANKED_FILE: Mapping[str, Callable[[Any], bool]] = {"path": _is_path, "limit": _is_limit}
#: Parameters of placements from a file: a Q/DQ model of any tool, an exported model of the same structure, a pattern
#: cache, or the output of `qdq inspect sensitivity`. The first two give their ranges too if `ranges` is true.
FILE_SOURCES: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "import": _MODEL_FILE,
    "placement": _MODEL_FILE,
    "pattern_cache": _RANKED_FILE,
    "sensitivity": _RANKED_FILE,
}


def is_placement_plugin(entry: PluginSpec) -> bool:
    """Return whether an entry of `initial` is a fixed placement of the user, `package.module:function`."""
    return ":" in entry.use


def as_list(value: Any) -> Any:
    """Return an empty list for the value "none" of the key `initial` (cold start), and any other value as it is."""
    return [] if value == "none" else value


def check_initial(initial: Sequence[PluginSpec]) -> None:
    """Raise ValueError for an unknown name, an ambiguous label or a wrong parameter in the key `initial`."""
    allowed = (*FIXED_NAMES, *PTQ_TOOLS, *FILE_SOURCES)
    for entry in initial:
        if entry.use in _REMOVED:
            raise ValueError(f"initial: {entry.use!r} was removed; {LAST_VERSION_WITH_REMOVED_KEYS} reads it")
        if entry.use not in allowed and not is_placement_plugin(entry):
            raise ValueError(
                f"initial: no placement is called {entry.use!r}; {suggest_names(entry.use, allowed)}; for none: 'none'"
            )
        own_name = entry.use in FILE_SOURCES or is_placement_plugin(entry)
        if entry.name != entry.use and (not own_name or entry.name in allowed):
            raise ValueError(f"initial: {entry.use!r} keeps its own name, but got the label {entry.name!r}")
        _check_initial_params(entry)
    names = [entry.name for entry in initial]
    numbered = {f"{entry.name}-{rank}" for entry in initial for rank in range(2, initial_count(entry) + 1)}
    for name in names:
        if _FLOAT_ROW_NAME.fullmatch(name) or name in numbered:
            raise ValueError(f"initial: the label {name!r} is the name of another row in tables; choose another label")


def _check_initial_params(entry: PluginSpec) -> None:
    allowed = FILE_SOURCES.get(entry.use, {})
    for name, value in entry.params.items():
        if name not in allowed:
            raise ValueError(f"initial: {entry.use!r} has no parameter {name!r}; {suggest_names(name, allowed)}")
        if not allowed[name](value):
            raise ValueError(f"initial: {entry.use!r}: {name} is {_PARAM_HINTS[name]}, but got {value!r}")
    if "path" in allowed and "path" not in entry.params:
        raise ValueError(f"initial: {entry.use!r} needs a file: {{use: {entry.use}, params: {{path: ...}}}}")


def check_baselines(names: Sequence[str], initial: Sequence[PluginSpec]) -> None:
    """Raise ValueError for a baseline that is neither a known name nor an entry of `initial` from a file or a plug-in.

    "float" is not allowed, as the float model always has a row.
    """
    labels = (entry.name for entry in initial if entry.use in FILE_SOURCES or is_placement_plugin(entry))
    known = (*(name for name in FIXED_NAMES if name != "float"), *TOOL_NAMES, *labels)
    for name in names:
        if name not in known:
            raise ValueError(f"baselines: no baseline is called {name!r}; {suggest_names(name, known)}")


def split_precision(name: str) -> tuple[str, str | None]:
    """Return the parts of a fixed placement's name: "linear-fp8" is "linear" at "fp8"; None: the task's first one."""
    return (name.removesuffix(_FP8_SUFFIX), _FP8_SUFFIX[1:]) if name.endswith(_FP8_SUFFIX) else (name, None)


def initial_count(entry: PluginSpec) -> int:
    """Return the maximum number of placements of an entry of an experiment's key `initial`."""
    return int(entry.params.get("limit", 1))
