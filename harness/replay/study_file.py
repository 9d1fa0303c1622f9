"""Budget ablation as a YAML file: searchers, recorded tables and budgets."""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from harness.base.errors import UserError
from harness.config.initial import as_list
from harness.config.sections import PluginSpec
from harness.config.validation_errors import to_user_error
from harness.config.yaml_loader import read_experiment_yaml, read_text_file
from harness.plugins.registry import installed_plugins

# Replayed only if a study names them: the first enumerates a table, the Gaussian process of the second takes up to a
# second per proposal, the others need further packages.
EXCLUDED_SEARCHERS = ("exhaustive", "optuna", "smac", "nevergrad", "syne_tune", "kernel_tuner")
MAX_SEEDS = 10_000
MAX_EVALUATIONS_PER_SEARCH = 5_000  # ten thousand random searches of this length take 0.4 GB


def _check_rising(budgets: tuple[int, ...]) -> tuple[int, ...]:
    if list(budgets) != sorted(set(budgets)):
        raise ValueError(f"budgets must increase, but got {list(budgets)}")
    return budgets


class ReplayedSearcher(PluginSpec):
    """A searcher of a study.

    Attributes:
        seeds: Number of searches on each table, fewer for a slow searcher; None: that of the study.
    """

    seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)] | None = None


class BudgetStudy(BaseModel):
    """Settings of a comparison of searchers at several budgets, on recorded tables.

    Attributes:
        study: Name of the study.
        tables: Files of `qdq bench record`, relative to the study's file; `*` matches existing files.
        searchers: Searchers to replay; empty: all installed ones but `EXCLUDED_SEARCHERS`.
        seeds: Number of searches of each searcher on each table, with seeds 0, 1, ...
        budgets: Evaluations at which searches are compared; searches run to the largest.
        initial: Initial placements of every search (float, all, linear), which count as evaluations; "none" is the
            cold start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    study: str
    description: str = ""
    tables: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    searchers: Annotated[tuple[ReplayedSearcher, ...], Field(strict=False)] = ()
    seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)] = 100
    budgets: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_EVALUATIONS_PER_SEARCH)], ...],
        Field(strict=False, min_length=1),
        AfterValidator(_check_rising),
    ] = (10, 25, 50, 100, 200)
    initial: Annotated[tuple[str, ...], BeforeValidator(as_list), Field(strict=False)] = ("float", "all", "linear")


def all_searchers() -> tuple[ReplayedSearcher, ...]:
    """Return every installed searcher but `EXCLUDED_SEARCHERS`."""
    return tuple(
        ReplayedSearcher(use=plugin.name)
        for plugin in installed_plugins("searcher")
        if plugin.name not in EXCLUDED_SEARCHERS
    )


def load_study(path: Path) -> BudgetStudy:
    """Read and check a study's file; its tables become paths of existing files."""
    document = read_experiment_yaml(read_text_file(path, "a study file"), str(path))
    try:
        study = BudgetStudy.model_validate(document)
    except ValidationError as error:
        raise to_user_error(BudgetStudy, str(path), error) from None
    return study.model_copy(update={"tables": tuple(_resolve_table_files(path, study.tables))})


def _resolve_table_files(path: Path, tables: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for text in tables:
        names = sorted(glob(text, root_dir=path.parent, recursive=True)) if "*" in text else [text]
        files = [path.parent / name for name in names]
        if not files:
            raise UserError(f"{path}: tables: no file matches {text!r}; 'qdq bench record MODEL --out FILE' makes one")
        found += [str(file) for file in files]
    return found
