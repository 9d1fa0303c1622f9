"""Tasks of QDQ-Bench: recorded tables as search problems, each with its start, split and tier."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, get_args
from zipfile import BadZipFile, ZipFile

import numpy as np
from pydantic import Field, ValidationError

from harness.base.errors import UserError, suggest_names
from harness.base.files import explain_write_errors
from harness.base.paths import cache_dir, replacing
from harness.base.text import short_version
from harness.config.sections import ConfigSection
from harness.config.yaml_loader import read_experiment_yaml, read_text_file, to_user_error
from harness.replay.bench.accuracy import ACCURACY_FILE, join_accuracy, read_accuracy
from harness.replay.replay import Floats, Landscape, reading_rng
from harness.replay.simulated_selection import Searches, recorded_duration_s
from harness.runtimes.replay import (
    MAX_TABLE_BYTES,
    BenchmarkTable,
    read_table,
    read_table_metadata,
)
from search.api import Failure
from search.space import Placement, Space

#: Environment variable of a folder with other tables and their tasks.yaml.
DATA_VARIABLE = "QDQ_BENCH_DATA"
TierName = Literal["lite", "full", "extended"]
TIERS: tuple[TierName, ...] = get_args(TierName)
"""Tiers by size; each contains the tasks of the smaller ones."""
ARCHIVE_FILE = "extended.zip"
"""Archive in the data folder with the tables of the tier `extended`, which are unpacked into the cache when used."""


class BenchTier(ConfigSection):
    """Seeds of each searcher on each task, and budgets at which searchers are compared."""

    seeds: Annotated[int, Field(ge=1)]
    budgets: Annotated[tuple[int, ...], Field(strict=False, min_length=1)]


class TaskSettings(ConfigSection):
    """Settings of a task.

    Attributes:
        family: Kind of model.
        split: "development" if searchers of this project were developed on the model, else "test".
        tier: The smallest tier that has the task.
        initial: Placements that every search evaluates first (float, all, linear); empty is the cold start.
        solved_by: Name of the initial placement that is within 1 % of the optimum, or "".
        source: Origin, version, digest and licence of a model that is neither in the zoo nor in the assets.
    """

    family: str
    split: Literal["development", "test"]
    tier: TierName
    initial: Annotated[tuple[str, ...], Field(strict=False)] = ()
    solved_by: str = ""
    source: str = ""


class TaskCatalogue(ConfigSection):
    """Catalogue of the tasks: settings of each tier and of each task by name, as `tasks.yaml` has them."""

    tiers: dict[TierName, BenchTier]
    tasks: dict[str, TaskSettings]

    def tasks_of_tier(self, tier: TierName) -> dict[str, TaskSettings]:
        """Return the tasks of a tier that can distinguish searchers, by name."""
        return {
            name: task
            for name, task in self.tasks.items()
            if task.solved_by not in task.initial and TIERS.index(task.tier) <= TIERS.index(tier)
        }


def data_folder() -> Path:
    """Return the folder of tasks.yaml and the tables: that of `DATA_VARIABLE`, or the one of the package."""
    return Path(os.environ.get(DATA_VARIABLE) or Path(__file__).parent / "tables")


def table_path(name: str) -> Path:
    """Return the file of a task's table: that of the data folder, or one unpacked from its archive."""
    file, archive = data_folder() / f"{name}.parquet", data_folder() / ARCHIVE_FILE
    if os.path.isfile(file) or not archive.is_file():  # Path.is_file raises if the name is too long
        return file
    return _unpack_table(archive, file, cache_dir() / "tables", archive.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _unpack_table(archive: Path, own: Path, cache: Path, _changed_ns: int) -> Path:
    """Return the file of an archive's table in a cache folder, or `file` if the archive does not have it."""
    try:
        with ZipFile(archive) as file:
            if own.name not in file.namelist():
                return own
            if file.getinfo(own.name).file_size > MAX_TABLE_BYTES:
                raise UserError(f"{archive}: {own.name} is larger than a table can be")
            content = file.read(own.name)
    except (OSError, BadZipFile) as error:
        raise UserError(f"{archive}: cannot be read: {error}") from error
    unpacked = cache / hashlib.sha256(content).hexdigest()[:16] / own.name
    if not unpacked.is_file():
        with explain_write_errors(unpacked):
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            with replacing(unpacked) as part:
                part.write_bytes(content)
    return unpacked


def read_catalogue() -> TaskCatalogue:
    """Read and check the catalogue of `data_folder`."""
    path = data_folder() / "tasks.yaml"
    document = read_experiment_yaml(read_text_file(path, "a catalogue of tasks"), str(path))
    try:
        return TaskCatalogue.model_validate(document)
    except ValidationError as error:
        raise to_user_error(TaskCatalogue, str(path), error) from error


def describe_task(name: str) -> dict[str, str]:
    """Return the facts of a task from its table and the catalogue, as text by name.

    Raises:
        KeyError: There is no such task.
    """
    settings, metadata = read_catalogue().tasks[name], read_table_metadata(table_path(name))
    backend = metadata.backend
    return {
        "task": name,
        "family": settings.family,
        "runtime": f"{backend['name']} {short_version(backend['version'])}",
        "processor": str(backend["device"]),
        "threads": str(backend.get("options", {}).get("threads", "")),
        "precision": metadata.precision,
        "dimensions": str(len(metadata.varied)),
        "split": settings.split,
        "tier": settings.tier,
        "start": ", ".join(settings.initial) or "cold",
        "solved by": settings.solved_by,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReading:
    """Result of one evaluation.

    Attributes:
        latency_ms: One noisy reading, as a search on the machine would get it; None for a failure.
        failure: Stage and reason of a failure, or "".
        metrics: Accuracy of the placement and recorded metrics, by name; without noise.
        cost_s: Recorded time of build and measurement; 0 for a model that was evaluated before.
    """

    latency_ms: float | None
    failure: str
    metrics: Mapping[str, float]
    cost_s: float


class BenchTask:
    """Search problem of a recorded table.

    Readings follow from the seed and the order of evaluations, as in `qdq bench run`.

    Args:
        name: Name of the task.
        settings: Its settings.
        landscape: Its table.
        seed: Seed of the noise.

    Attributes:
        history: Indices of the evaluated placements on the landscape, in order, without repeated models.
    """

    def __init__(self, name: str, settings: TaskSettings, landscape: Landscape, *, seed: int) -> None:
        self.name, self.settings, self.landscape, self.seed = name, settings, landscape, seed
        self.history: list[int] = []
        self._readings: dict[int, BenchReading] = {}
        self._rng = reading_rng(seed)

    @property
    def space(self) -> Space:
        """Return the space of the table: its dimensions with names, roles and choices."""
        return self.landscape.table.subspace.space

    def evaluate(self, placement: Placement | Sequence[int]) -> BenchReading:
        """Return one reading of a placement; a model that was evaluated before gives the same one at no cost.

        Args:
            placement: A placement, or the choice of each dimension of `space` (0 is float).

        Raises:
            ValueError: The argument is no placement of the space.
        """
        chosen = placement if isinstance(placement, Placement) else Placement(tuple(placement))
        index = self.landscape.index(self.space.validate(chosen))
        model = int(self.landscape.identity[index])
        if model in self._readings:
            return replace(self._readings[model], cost_s=0.0)
        outcome, cost_s = self.landscape.observe(index, self._rng), recorded_duration_s(self.landscape.outcomes[index])
        reading = BenchReading(latency_ms=None, failure="", metrics={}, cost_s=cost_s)
        if isinstance(outcome, Failure):
            reading = replace(reading, failure=f"{outcome.stage}: {outcome.reason}")
        else:
            reading = replace(reading, latency_ms=outcome.objective, metrics=outcome.metrics)
        self._readings[model] = reading
        self.history.append(index)
        return reading

    @property
    def optimum_ms(self) -> float:
        """Return the lowest recorded latency of the table; for scoring, not for a searcher."""
        return float(self.landscape.latency_ms[self.landscape.optimum])

    def latency_curve_ms(self) -> Floats:
        """Return the recorded latency in ms of the final choice after each evaluation; see `Searches.latency_ms`."""
        path = np.array(self.history, dtype=np.int32)
        found: Floats = Searches(self.landscape, {self.seed: path}, len(path)).latency_ms[0]
        return found


def load(name: str, *, seed: int = 0) -> BenchTask:
    """Return a task by its name; `seed` determines its noise, and its readings include the placement's accuracy."""
    tasks = read_catalogue().tasks
    if name not in tasks:
        raise UserError(f"no task is called {name!r}; {suggest_names(name, tasks)}")
    return BenchTask(name, tasks[name], Landscape(read_scored_table(Path(name))), seed=seed)


def table_file(given: Path) -> Path:
    """Return the file of a table that is given as a Parquet file or as the name of a task."""
    return given if given.suffix == ".parquet" else table_path(str(given))


def scores_file(given: Path) -> Path:
    """Return the file of the accuracies of a table, in the folder of its Parquet file or of the tasks."""
    return (given.parent if given.suffix == ".parquet" else data_folder()) / ACCURACY_FILE


def read_scored_table(given: Path) -> BenchmarkTable:
    """Read a table, given as a Parquet file or as the name of a task, with the accuracy of its placements."""
    return join_accuracy(read_table(table_file(given)), read_accuracy(scores_file(given)))
