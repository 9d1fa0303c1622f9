"""What an experiment runs: cells (model x backend x precision), and in each the searches to compare."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UserError
from harness.run.config import Experiment, Method, ModelSpec, Use

__all__ = ["CellSpec", "RunSpec", "plan", "precisions_of"]

MIXED = ("int8", "fp8")
"""What "mixed" offers at each point beside float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One search: a searcher or a peer with a seed."""

    searcher: Method
    seed: int

    @property
    def name(self) -> str:
        """Folder name of the search."""
        return f"{self.searcher.name}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """Everything that is compared with each other: one model, one backend, one precision setting."""

    model: ModelSpec
    backend: Use
    precision: str
    runs: tuple[RunSpec, ...]

    @property
    def name(self) -> str:
        """Folder name of the cell."""
        return f"{self.model.name}-{self.backend.name}-{self.precision}"

    @property
    def precisions(self) -> tuple[str, ...]:
        """What its points may take beside float."""
        return precisions_of(self.precision)


def precisions_of(precision: str) -> tuple[str, ...]:
    """What a precision setting of an experiment offers at each point beside float."""
    return MIXED if precision == "mixed" else (precision,)


def plan(experiment: Experiment) -> tuple[CellSpec, ...]:
    """The cells of an experiment, in the order of its lists; seeds outermost within a cell.

    A run that is cut short then has every searcher at the first seeds, not one searcher at all.

    Raises:
        UserError: Two cells would share a folder.
    """
    runs = tuple(RunSpec(searcher=s, seed=seed) for seed in experiment.seeds for s in experiment.searchers)
    cells = tuple(
        CellSpec(model=model, backend=backend, precision=precision, runs=runs)
        for model in experiment.models
        for backend in experiment.backends
        for precision in experiment.precision
    )
    names: set[str] = set()
    for cell in cells:
        if cell.name in names:
            raise UserError(f"models and backends: two cells would be called {cell.name!r}; choose other labels")
        names.add(cell.name)
    return cells
