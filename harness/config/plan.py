"""What an experiment runs: cells (model x backend x precision), and in each the searches to compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness import registry
from harness.errors import UserError
from harness.config.experiment import Experiment, SearcherSpec, ModelSpec, PluginSpec

__all__ = ["TaskSpec", "SearchSpec", "with_base_dir", "plan_tasks", "quantized_precisions"]

MIXED_PRECISIONS = ("int8", "fp8")
"""What "mixed" offers at each point beside float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """One search: a searcher or a peer with a seed."""

    searcher: SearcherSpec
    seed: int

    @property
    def name(self) -> str:
        """Folder name of the search."""
        return f"{self.searcher.name}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """Everything that is compared with each other: one model, one backend, one precision setting."""

    model: ModelSpec
    backend: PluginSpec
    precision: str
    runs: tuple[SearchSpec, ...]

    @property
    def name(self) -> str:
        """Folder name of the cell."""
        return f"{self.model.name}-{self.backend.name}-{self.precision}"

    @property
    def precisions(self) -> tuple[str, ...]:
        """What its points may take beside float."""
        return quantized_precisions(self.precision)


def quantized_precisions(precision: str) -> tuple[str, ...]:
    """What a precision setting of an experiment offers at each point beside float."""
    return MIXED_PRECISIONS if precision == "mixed" else (precision,)


def plan_tasks(experiment: Experiment, base: Path | None = None) -> tuple[TaskSpec, ...]:
    """The cells of an experiment, in the order of its lists; seeds outermost within a cell.

    A run that is cut short then has every searcher at the first seeds, not one searcher at all.

    Args:
        base: Folder that relative paths of the experiment start from; None: nothing is to be run.

    Raises:
        UserError: Two cells would share a folder.
    """
    backends = tuple(with_base_dir(backend, base) for backend in experiment.backends)
    runs = tuple(SearchSpec(searcher=s, seed=seed) for seed in experiment.seeds for s in experiment.searchers)
    cells = tuple(
        TaskSpec(model=model, backend=backend, precision=precision, runs=runs)
        for model in experiment.models
        for backend in backends
        for precision in experiment.precision
    )
    names: set[str] = set()
    for cell in cells:
        if cell.name in names:
            raise UserError(f"models and backends: two cells would be called {cell.name!r}; choose other labels")
        names.add(cell.name)
    return cells


def with_base_dir(backend: PluginSpec, base: Path | None) -> PluginSpec:
    """A backend that is told where relative paths among its parameters start from, if its constructor asks (`base`)."""
    if base is None:
        return backend
    try:
        wanted = registry.plugin_signature("benchmarker", backend.use).parameters
    except UserError:  # said where the cell is run, and stops no other
        return backend
    if "base" not in wanted or "base" in backend.params:
        return backend
    return backend.model_copy(update={"params": {**backend.params, "base": str(base)}})
