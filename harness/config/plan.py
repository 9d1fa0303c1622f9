"""Plan of an experiment: tasks (model x backend x precision), and the searches to compare in each."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass

from harness.base.errors import UserError
from harness.config.experiment import Experiment
from harness.config.sections import ModelSpec, PluginSpec, SearcherSpec
from harness.plugins import registry

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

    Raises:
        UserError: Two tasks would share a folder.
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
