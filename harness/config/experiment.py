"""Experiment file as a frozen value, with its tasks and searches; unknown keys and wrong types are errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from harness.base.errors import UserError, suggest_names
from harness.config.sections import (
    FLOAT_PRECISION_NAMES,
    Budget,
    ConfigSection,
    Confirmation,
    ExecutorSpec,
    Limits,
    ModelSpec,
    Objective,
    PluginSpec,
    Sampling,
    SearcherSpec,
    duplicates,
    normalize_float_precision,
    require_distinct,
)
from harness.config.yaml_loader import dump_yaml, read_experiment_yaml, read_text_file, to_user_error
from harness.plugins import registry
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
#: Stress test: everything quantized symmetrically; see `harness.run.prepare.initial_design`.
FULLY_QUANTIZED = "extreme"
LAST_VERSION_WITH_REMOVED_KEYS = "qdq-bench 0.1.0 at commit f7c262ac"
_REMOVED = ("predicted",)
_FP8_SUFFIX = "-fp8"
_FLOAT_ROW_NAME = re.compile(r"float-(f|bf|fp|tf)\d+")
FIXED_NAMES = (
    *FIXED_PLACEMENTS, TENSORRT_GUIDE, FULLY_QUANTIZED,
    *(f"{name}{_FP8_SUFFIX}" for name in FIXED_PLACEMENTS if name != "float"),
)  # fmt: skip


#: Parameters of placements from a file, by their check and the hint to them.
_PARAM_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "path": (lambda value: isinstance(value, str) and bool(value), "the name of a file"),
    "limit": (lambda value: type(value) is int and 1 <= value <= MAX_FILE_PLACEMENTS, f"1 to {MAX_FILE_PLACEMENTS}"),
    "ranges": (lambda value: isinstance(value, bool), "true or false"),
}
#: Placements from a file with their parameters: a Q/DQ model of any tool, an exported model of the same structure, a
#: pattern cache, or the output of `qdq inspect sensitivity`. The first two give their ranges too if `ranges` is true.
FILE_SOURCES: Mapping[str, tuple[str, ...]] = {
    "import": ("path", "ranges"),
    "placement": ("path", "ranges"),
    "pattern_cache": ("path", "limit"),
    "sensitivity": ("path", "limit"),
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
        params = FILE_SOURCES.get(entry.use, ())
        for name, value in entry.params.items():
            if name not in params:
                raise ValueError(f"initial: {entry.use!r} has no parameter {name!r}; {suggest_names(name, params)}")
            is_valid, hint = _PARAM_CHECKS[name]
            if not is_valid(value):
                raise ValueError(f"initial: {entry.use!r}: {name} is {hint}, but got {value!r}")
        if params and "path" not in entry.params:
            raise ValueError(f"initial: {entry.use!r} needs a file: {{use: {entry.use}, params: {{path: ...}}}}")
    numbered = {f"{entry.name}-{rank}" for entry in initial for rank in range(2, initial_count(entry) + 1)}
    for name in (entry.name for entry in initial):
        if _FLOAT_ROW_NAME.fullmatch(name) or name in numbered:
            raise ValueError(f"initial: the label {name!r} is the name of another row in tables; choose another label")


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


FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _non_empty(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], Field(strict=False, min_length=1)]


def _non_empty_distinct(kind: Any) -> Any:
    return Annotated[_non_empty(kind), AfterValidator(require_distinct)]


def _require_quantized_precision(value: Any) -> Any:
    float_name = normalize_float_precision(value) if isinstance(value, str) else None
    if float_name in FLOAT_PRECISION_NAMES:
        raise ValueError(
            f"int8, fp8, fp8e5m2 or mixed, but got {value!r}, a float precision; float operations have that of the "
            f"backend: {{use: ..., params: {{precision: {float_name}}}}}"
        )
    return value


QuantizedPrecision = Annotated[
    Literal["int8", "fp8", "fp8e5m2", "mixed"], BeforeValidator(_require_quantized_precision)
]


class Experiment(ConfigSection):
    """Content of an experiment file; docs/reference/experiment.md describes every key."""

    experiment: str
    description: str = ""
    models: _non_empty(ModelSpec)  # type: ignore[valid-type]
    backends: _non_empty(PluginSpec) = (PluginSpec(use="openvino"),)  # type: ignore[valid-type]
    precision: _non_empty_distinct(QuantizedPrecision) = ("int8",)  # type: ignore[valid-type]
    sharing: Literal["pattern", "region"] = "pattern"
    objective: Objective = Objective()
    searchers: Annotated[tuple[SearcherSpec, ...], Field(strict=False)] = (SearcherSpec(use="auto"),)
    seeds: _non_empty_distinct(Annotated[int, Field(ge=0)]) = (0,)  # type: ignore[valid-type]
    initial: Annotated[tuple[PluginSpec, ...], BeforeValidator(as_list), Field(strict=False)] = tuple(
        PluginSpec(use=name) for name in DEFAULT_INITIAL
    )
    baselines: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(require_distinct)] = DEFAULT_BASELINES
    transfer: Annotated[
        tuple[Literal["backends", "models"], ...], Field(strict=False), AfterValidator(require_distinct)
    ] = ()
    budget: Budget = Budget()
    sampling: Sampling = Sampling()
    confirmation: Confirmation = Confirmation()
    limits: Limits = Limits()
    executor: ExecutorSpec = ExecutorSpec()

    @model_validator(mode="before")
    @classmethod
    def _check_removed_keys(cls, body: Any) -> Any:
        """Accept `prescreening: null` of stored experiments, and refuse the removed key with any other value."""
        if not isinstance(body, dict) or "prescreening" not in body:
            return body
        if body["prescreening"] is not None:
            raise ValueError(f"prescreening: this key was removed; {LAST_VERSION_WITH_REMOVED_KEYS} reads it")
        return {key: value for key, value in body.items() if key != "prescreening"}

    @model_validator(mode="after")
    def _check_names(self) -> Experiment:
        _check_name("experiment", self.experiment)
        lists: dict[str, tuple[ModelSpec | PluginSpec, ...]] = {
            "models": self.models,
            "searchers": self.searchers,
            "backends": self.backends,
            "initial": self.initial,
        }
        for key, entries in lists.items():
            for entry in entries:
                _check_name(key, entry.name)
            if repeated := duplicates(entry.name for entry in entries):
                raise ValueError(f"{key}: {', '.join(repeated)} appears twice; distinguish them by 'label'")
        if self.executor.use != "local" and any(model.shape_set for model in self.models):
            raise ValueError("models.shape_set: only for the executor 'local'")
        return self

    @model_validator(mode="after")
    def _check_initial(self) -> Experiment:
        check_initial(self.initial)
        check_baselines(self.baselines, self.initial)
        if not (self.searchers or self.baselines):
            raise ValueError(
                "searchers: with an empty list, 'baselines' needs an entry, as there is nothing to compare"
            )
        initial, budget = sum(map(initial_count, self.initial)), max(self.budget.evaluations)
        if budget <= initial:
            raise ValueError(
                f"budget.evaluations: at least {initial + 1}, because the {initial} placements of 'initial' count as "
                f"evaluations, but got {budget}"
            )
        return self


def _check_name(key: str, name: str) -> None:
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(
            f"{key}: {name!r} is no folder name; use at most 100 letters, digits, '.', '_', '-', "
            f"a letter or digit first{'' if key == 'experiment' else ' (set by label)'}"
        )


def load_experiment(path: Path, base_dir: Path | None = None) -> Experiment:
    """Read and check an experiment file.

    Args:
        base_dir: Folder that relative paths in it start from; None: the folder of the file.
    """
    return parse_experiment(read_text_file(path, "an experiment file"), str(path), base_dir or path.resolve().parent)


def parse_experiment(
    text: str, source: str, base_dir: Path | None = None, arguments: Mapping[str, str] | None = None
) -> Experiment:
    """Read and check an experiment given as YAML text.

    Args:
        source: Name of the text in messages.
        base_dir: Folder that relative paths start from; None: the working folder.
        arguments: Argument by the key that it sets, for messages.
    """
    try:
        return Experiment.model_validate(read_experiment_yaml(text, source), context={"base_dir": base_dir})
    except ValidationError as error:
        raise to_user_error(Experiment, source, error, extra_keys=["matrix"], arguments=arguments) from None


def to_yaml(experiment: Experiment) -> str:
    """Return the experiment as YAML, with every default written out."""
    return dump_yaml(experiment.model_dump(mode="json"))


MIXED_PRECISIONS = ("int8", "fp8")
MAX_COMBINATIONS = 10_000  # of models, backends and precisions, or of searchers and seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """Search of a task: a searcher or an external searcher with an RNG seed."""

    searcher: SearcherSpec
    seed: int

    @property
    def name(self) -> str:
        """Folder name of the search."""
        return f"{self.searcher.name}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """Task with its searches: one model, one backend, one precision setting."""

    model: ModelSpec
    backend: PluginSpec
    precision: str
    runs: tuple[SearchSpec, ...]

    @property
    def name(self) -> str:
        """Folder name of the task."""
        return f"{self.model.name}-{self.backend.name}-{self.precision}"

    @property
    def precisions(self) -> tuple[str, ...]:
        """Quantized precisions of its insertion points."""
        return quantized_precisions(self.precision)


def quantized_precisions(precision: str) -> tuple[str, ...]:
    """Return the quantized precisions of an experiment's precision setting: INT8 and FP8 for "mixed", else that one."""
    return MIXED_PRECISIONS if precision == "mixed" else (precision,)


def plan_tasks(experiment: Experiment) -> tuple[TaskSpec, ...]:
    """Return the tasks of an experiment in the order of its lists.

    Within a task seeds are the outer loop, so that an interrupted run has all searchers at the first seeds.
    """
    backends = tuple(map(with_base_dir, experiment.backends))
    require_countable("models, backends, precision", experiment.models, backends, experiment.precision)
    require_countable("searchers, seeds", experiment.searchers, experiment.seeds)
    runs = tuple(SearchSpec(searcher=s, seed=seed) for seed in experiment.seeds for s in experiment.searchers)
    tasks = tuple(
        TaskSpec(model=model, backend=backend, precision=precision, runs=runs)
        for model in experiment.models
        for backend in backends
        for precision in experiment.precision
    )
    names: set[str] = set()
    for task in tasks:
        if task.name in names:
            raise UserError(f"models and backends: two tasks would be called {task.name!r}; choose other labels")
        names.add(task.name)
    return tasks


def require_countable(keys: str, *lists: Sized) -> None:
    """Raise `UserError` if lists have more than `MAX_COMBINATIONS` combinations, which would not fit into memory."""
    if (count := math.prod(map(len, lists))) > MAX_COMBINATIONS:
        raise UserError(f"{keys}: {count} combinations, but at most {MAX_COMBINATIONS}; divide the experiment")


def with_base_dir(backend: PluginSpec) -> PluginSpec:
    """Add the parameter `base`, the folder that relative paths start from, if the backend's constructor accepts it."""
    try:
        parameters = registry.plugin_signature("benchmarker", backend.use).parameters
    except UserError:  # reported when the task starts, so that other tasks can run
        return backend
    if "base" not in parameters or "base" in backend.params:
        return backend
    return backend.model_copy(update={"params": {**backend.params, "base": str(backend.base_dir)}})
