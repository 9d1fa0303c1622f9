"""A budget ablation as YAML: which searchers, on which recorded tables, at which budgets."""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from harness.config.initial import as_list
from harness.config.sections import PluginSpec
from harness.config.validation_errors import to_user_error
from harness.config.yaml_loader import read_experiment_yaml
from harness.errors import UserError
from harness.registry import installed_plugins

__all__ = ["MOST_EVALUATIONS", "MOST_SEEDS", "BudgetStudy", "Contender", "everybody", "load_study"]

LEFT_OUT = ("exhaustive", "optuna")
"""The one walks a table from end to end and says nothing about searching; the other's Gaussian process takes up to a
second for a proposal. Both run where they are named."""
MAX_BYTES = 2**20


MOST_SEEDS = 10_000
MOST_EVALUATIONS = 5_000
"""Of one search: ten thousand random searches of them take 0.4 GB."""


def _rising(budgets: tuple[int, ...]) -> tuple[int, ...]:
    if list(budgets) != sorted(set(budgets)):
        raise ValueError(f"budgets rise, and none comes twice, but got {list(budgets)}")
    return budgets


class Contender(PluginSpec):
    """A searcher of a study.

    Attributes:
        seeds: Searches on each table, for one that takes its time; None: as many as of all others.
    """

    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] | None = None


class BudgetStudy(BaseModel):
    """What is to be replayed.

    Attributes:
        study: Its name.
        tables: Files of `qdq record`, relative to the study's file; `*` stands for whatever is there.
        searchers: Who takes part; none: all that are installed but `LEFT_OUT`.
        seeds: Searches of each searcher on each table, with seeds from 0.
        budgets: Evaluations at which searches are compared; they run to the largest.
        initial: Placements that every search is told first (float, all, linear); they cost evaluations. "none" is the
            cold start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    study: str
    description: str = ""
    tables: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    searchers: Annotated[tuple[Contender, ...], Field(strict=False)] = ()
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] = 100
    budgets: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MOST_EVALUATIONS)], ...],
        Field(strict=False, min_length=1),
        AfterValidator(_rising),
    ] = (10, 25, 50, 100, 200)
    initial: Annotated[tuple[str, ...], BeforeValidator(as_list), Field(strict=False)] = ("float", "all", "linear")

    @property
    def most(self) -> int:
        """Evaluations of one search."""
        return max(self.budgets)


def everybody() -> tuple[Contender, ...]:
    """Every installed searcher but `LEFT_OUT`."""
    return tuple(Contender(use=plugin.name) for plugin in installed_plugins("searcher") if plugin.name not in LEFT_OUT)


def load_study(path: Path) -> BudgetStudy:
    """Read and check a study's file; its tables become paths of files that are there.

    Raises:
        UserError: With file, key and what is wrong.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: more than {MAX_BYTES} bytes are no study, which is YAML text")
        document = read_experiment_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        study = BudgetStudy.model_validate(document)
    except ValidationError as error:
        raise to_user_error(BudgetStudy, str(path), error) from error
    return study.model_copy(update={"tables": tuple(_files(path, study.tables))})


def _files(path: Path, tables: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for text in tables:
        names = sorted(glob(text, root_dir=path.parent, recursive=True)) if "*" in text else [text]
        there = [path.parent / name for name in names]
        if not there:
            raise UserError(f"{path}: tables: nothing is there for {text!r}; 'qdq record MODEL --out FILE' makes one")
        found += [str(file) for file in there]
    return found
