"""Reader of the stored experiment, and of the facts and scores of its tasks.

Keys of the experiment are not validated: results stay readable after one was renamed or dropped. Those of the tasks'
JSON files that a report reads are, as the files may come from a stranger, with valid checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.accuracy.metrics.intervals import check_consistency, decode_accuracy
from harness.base.errors import UserError, prefix_file
from harness.base.files import DamagedFile, parse_json, read_bounded, read_json
from harness.base.text import shorten
from harness.config.experiment import TaskSpec, require_countable
from harness.config.sections import ModelSpec, PluginSpec
from harness.config.yaml_loader import read_experiment_yaml, read_text_file
from harness.measure.records import SCHEMA_VERSION, Texts
from harness.plugins.registry import is_program_object
from harness.results.lines import log_header
from harness.results.scores import ACCURACY_FILE_NAME, read_scores


class _ReportedRecord(BaseModel):
    """JSON object; keys that no report reads are not checked."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Backend(_ReportedRecord):
    name: str
    device: str | None = None
    dialect: str = ""
    options: dict[str, Any] = {}
    float_params: dict[str, dict[str, Any]] = {}
    note: str = ""


class TaskFacts(_ReportedRecord):
    """Facts of a task, `task.json`."""

    model: str
    precision: str
    calibrated_on: str
    backend: _Backend
    goal: dict[str, Any]
    metric: str | None = None
    higher_is_better: bool = True
    inputs: dict[str, list[Any]] = {}
    calibration: dict[str, Any] = {}
    calibration_remarks: Texts = []
    cache_remarks: Texts = []
    tool_methods: dict[str, str] = {}


class _Processor(_ReportedRecord):
    model: str | None = None
    flags: Texts = []


class Environment(_ReportedRecord):
    """Environment of a task, `env.json`."""

    cpu: _Processor = _Processor()
    packages: dict[str, str | None] = {}
    limits: dict[str, Any] = {}
    gpus: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = []
    git_commit: str | None = None


class _Step(_ReportedRecord):
    step: str
    before_db: float
    after_db: float | None
    kept: bool

    @model_validator(mode="after")
    def _require_gain(self) -> Self:
        if self.kept and self.after_db is None:
            raise ValueError("a step that is kept without after_db")
        return self


class _FloatGroup(_ReportedRecord):
    nodes: Annotated[Texts, Field(min_length=1)]
    alone_db: float
    at_outputs: bool = False


class _FloatNode(_ReportedRecord):
    """Node of a record before groups of nodes were left float."""

    node: str
    gain_db: float


class _RecoveredPlacement(_ReportedRecord):
    within: bool
    label: str = ""
    sha256: str = ""
    seconds: float = 0.0
    steps: Annotated[list[_Step], Field(fail_fast=True)] = []
    left_float: Annotated[list[_FloatGroup | _FloatNode], Field(fail_fast=True)] = []
    loss: float | None = None
    loss_before: float | None = None

    @model_validator(mode="after")
    def _require_description(self) -> Self:
        if self.loss is not None and not {"label", "sha256", "steps"} <= self.model_fields_set:
            raise ValueError("label, sha256 or steps is missing")
        return self


class RecoveryRecord(_ReportedRecord):
    """Recovered placements of a task by digest, `recovery.json`."""

    placements: dict[str, _RecoveredPlacement]
    estimated_losses: dict[str, float | None] = {}


FOLDER_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperiment:
    """Experiment of a results folder.

    Attributes:
        tasks: Its tasks in order; empty if the file does not define them.
        baselines: Fixed placements and PTQ tools that each task compares with.
        searchers: Names of the searchers in journals and tables.
        uses: Plug-in and parameters of each searcher, with its `without` as a parameter.
        builds: Fresh builds of a confirmation; None if the file does not define them.
        minutes: Time limits by key: `minutes` of a search, `task_minutes` of a task.
        from_program: Whether models or backends use objects of a Python program, which no command can load.
    """

    name: str
    description: str
    text: str
    tasks: tuple[TaskSpec, ...]
    baselines: tuple[str, ...]
    searchers: tuple[str, ...]
    uses: Mapping[str, tuple[str, Mapping[str, Any]]]
    builds: int | None
    from_program: bool
    minutes: Mapping[str, float] = field(default_factory=dict)


def read_stored_experiment(path: Path) -> StoredExperiment:
    """Read a stored `experiment.yaml`."""
    text = read_text_file(path, "an experiment file")
    body = read_experiment_yaml(text, str(path))

    def list_at(key: str) -> list[Any]:
        return body[key] if isinstance(body.get(key), list) else []

    def section(key: str) -> dict[str, Any]:
        return body[key] if isinstance(body.get(key), dict) else {}

    precisions = [str(precision) for precision in list_at("precision")] or ["int8"]
    with prefix_file(path):
        require_countable("models, backends, precision", list_at("models"), list_at("backends"), precisions)
    tasks = tuple(
        TaskSpec(
            model=ModelSpec.model_construct(**_entry_name(model)),
            backend=PluginSpec.model_construct(**_entry_name(backend)),
            precision=precision,
            runs=(),
        )
        for model in list_at("models")
        for backend in list_at("backends")
        for precision in precisions
    )
    for task in tasks:
        if not FOLDER_NAME.fullmatch(task.name):  # the file may come from a stranger
            raise UserError(f"{path}: a task is called {shorten(task.name)!r}, which is no folder name")
    uses: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for entry in list_at("searchers"):
        fields = entry if isinstance(entry, dict) else {}
        params, without, named = fields.get("params"), fields.get("without"), _entry_name(entry)
        removed = {"without": " and ".join(map(str, without))} if isinstance(without, list) and without else {}
        settings = {**(params if isinstance(params, dict) else {}), **removed}
        uses[PluginSpec.model_construct(**named).name] = (str(named["use"]), settings)
    builds, budget = section("confirmation").get("builds"), section("budget")
    limits = {key: budget.get(key) for key in ("minutes", "task_minutes")}
    return StoredExperiment(
        name=str(body.get("experiment", path.parent.name)),
        description=str(body.get("description") or ""),
        text=text,
        tasks=tasks,
        baselines=tuple(str(name) for name in list_at("baselines")),
        searchers=tuple(uses),
        uses=uses,
        builds=builds if isinstance(builds, int) else None,
        minutes={key: limit for key, limit in limits.items() if isinstance(limit, int | float)},
        from_program=any(map(is_program_object, _texts([body.get("models"), body.get("backends")]))),
    )


def _entry_name(entry: Any) -> dict[str, Any]:
    """Return the plug-in and the label of an entry of a list."""
    fields = entry if isinstance(entry, dict) else {"use": entry}
    label = fields.get("label")
    return {"use": str(fields.get("use", "")), "label": None if label is None else str(label)}


def read_metric_scores(task: Path, metric: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the record of the evaluator by row id.

    Args:
        metric: Metric that is checked against the record of single images.
    """
    scores = read_scores(task)
    for row, score in scores.items():
        if metric in score.get("metrics", {}):
            try:
                problem = check_consistency(decode_accuracy(score), metric)
            except ValueError as error:
                problem = str(error)
            if problem:
                raise DamagedFile(task / ACCURACY_FILE_NAME, f"damaged ({row}: {problem})")
    return scores


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of YAML."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def read_task_facts(folder: Path) -> Mapping[str, Any]:
    """Return the facts of a task."""
    path = folder / "task.json"
    try:
        facts = parse_json(read_bounded(path))  # files of other schemas may lack the checksum
    except ValueError as error:
        raise DamagedFile(path, f"damaged ({error})") from error
    schema = facts.get("schema", "unknown") if isinstance(facts, dict) else "unknown"
    if schema != SCHEMA_VERSION:
        raise UserError(
            f"{path}: written with schema {shorten(schema)}, this version reads schema {SCHEMA_VERSION}; "
            "render it with the version that wrote it, or run the experiment again into another folder"
        )
    return read_json(path, schema=TaskFacts)


def read_builds(path: Path) -> int | None:
    """Return the planned builds of a confirmation log, or None if it has no header with them."""
    plan = log_header(path).get("plan")
    builds = plan.get("builds") if isinstance(plan, dict) else None
    return builds if isinstance(builds, int) else None
