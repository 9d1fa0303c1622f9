"""Reader of the stored experiment, and of the facts and scores of its tasks.

Keys of the experiment are not validated: results stay readable after one was renamed or dropped. Those of the tasks'
JSON files that a report reads are, as the files may come from a stranger, with valid checksums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.accuracy.metrics.intervals import check_consistency, decode_accuracy
from harness.base.errors import UserError, prefix_file
from harness.base.files import parse_json, read_bounded, read_json
from harness.base.text import shorten
from harness.config.experiment import TaskSpec, require_countable
from harness.config.sections import ModelSpec, PluginSpec
from harness.config.yaml_loader import read_experiment_yaml, read_text_file
from harness.measure.records import SCHEMA_VERSION, Texts, first_problem
from harness.plugins.registry import is_program_object
from harness.results.lines import first_line, read_lines
from harness.results.scores import read_scores


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


def validate_record(schema: type[BaseModel], body: Mapping[str, Any]) -> None:
    """Check a decoded JSON object against a schema.

    Raises:
        ValueError: A key that reports read is missing or has the wrong type.
    """
    try:
        schema.model_validate(dict(body))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error


T = TypeVar("T")
REPAIR_HINT = "move it away and repeat qdq run, which makes it again, or restore it"
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
    """Read a stored `experiment.yaml`.

    Raises:
        UserError: The file cannot be read, or is no YAML mapping.
    """
    text = read_text_file(path, "an experiment file")
    body = read_experiment_yaml(text, str(path))
    precisions = [str(precision) for precision in _list_at(body, "precision")] or ["int8"]
    uses = dict(_searcher_params(body))
    with prefix_file(path):
        require_countable(
            "models, backends, precision", _list_at(body, "models"), _list_at(body, "backends"), precisions
        )
    tasks = tuple(
        TaskSpec(
            model=ModelSpec.model_construct(use=model["use"], label=model["label"]),
            backend=PluginSpec.model_construct(use=backend["use"], label=backend["label"]),
            precision=precision,
            runs=(),
        )
        for model in _named_entries(body, "models")
        for backend in _named_entries(body, "backends")
        for precision in precisions
    )
    for task in tasks:
        if not FOLDER_NAME.fullmatch(task.name):  # the file may come from a stranger
            raise UserError(f"{path}: a task is called {shorten(task.name)!r}, which is no folder name")
    return StoredExperiment(
        name=str(body.get("experiment", path.parent.name)),
        description=str(body.get("description") or ""),
        text=text,
        tasks=tasks,
        baselines=tuple(str(name) for name in _list_at(body, "baselines")),
        searchers=tuple(uses),
        uses=uses,
        builds=_confirmation_builds(body),
        minutes=_time_limits(body),
        from_program=any(map(is_program_object, _texts([body.get("models"), body.get("backends")]))),
    )


def read_metric_scores(task: Path, metric: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the record of the evaluator by row id.

    Args:
        metric: Metric that is checked against the record of single images.

    Raises:
        ValueError: A score contradicts its own record of single images.
    """
    scores = read_scores(task)
    for row, score in scores.items():
        if metric in score.get("metrics", {}) and (error := _score_error(score, metric)):
            raise ValueError(f"{row}: {error}")
    return scores


def _score_error(score: Mapping[str, Any], metric: str) -> str:
    try:
        return check_consistency(decode_accuracy(score), metric)
    except ValueError as error:
        return str(error)


def _searcher_params(body: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    for entry, named in zip(_list_at(body, "searchers"), _named_entries(body, "searchers"), strict=True):
        fields = entry if isinstance(entry, dict) else {}
        params, without = fields.get("params"), fields.get("without")
        name = PluginSpec.model_construct(use=named["use"], label=named["label"]).name
        fixed = params if isinstance(params, dict) else {}
        removed = {"without": " and ".join(map(str, without))} if isinstance(without, list) and without else {}
        yield name, (str(named["use"]), {**fixed, **removed})


def _confirmation_builds(body: Mapping[str, Any]) -> int | None:
    confirmation = body.get("confirmation")
    builds = confirmation.get("builds") if isinstance(confirmation, dict) else None
    return builds if isinstance(builds, int) else None


def _time_limits(body: Mapping[str, Any]) -> Mapping[str, float]:
    budget = body.get("budget")
    found = budget if isinstance(budget, dict) else {}
    return {key: found[key] for key in ("minutes", "task_minutes") if isinstance(found.get(key), int | float)}


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of YAML."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _list_at(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    return value if isinstance(value, list) else []


def _named_entries(body: Mapping[str, Any], key: str) -> Iterator[dict[str, str | None]]:
    for entry in _list_at(body, key):
        fields = entry if isinstance(entry, dict) else {"use": entry}
        label = fields.get("label")
        yield {"use": str(fields.get("use", "")), "label": None if label is None else str(label)}


def read_task_facts(folder: Path) -> Mapping[str, Any]:
    """Return the facts of a task.

    Raises:
        UserError: The file is damaged or has another schema.
    """
    path = folder / "task.json"
    schema = _read_schema(path)
    if schema != SCHEMA_VERSION:
        raise UserError(
            f"{path}: written with schema {shorten(schema)}, this version reads schema {SCHEMA_VERSION}; "
            "render it with the version that wrote it, or run the experiment again into another folder"
        )
    facts = read_json(path)
    read_or_explain(path, lambda: validate_record(TaskFacts, facts))
    return facts


def _read_schema(path: Path) -> Any:
    """Return the schema number without a comparison of the checksum, which files of other schemas lack."""
    facts = read_or_explain(path, lambda: parse_json(read_bounded(path)))
    return facts.get("schema", "unknown") if isinstance(facts, dict) else "unknown"


def read_environment(path: Path) -> Mapping[str, Any]:
    """Return the stored versions and facts of the machine (`env.json`); empty if there is no file.

    Raises:
        UserError: The file is damaged.
    """
    environment = read_json(path, {})
    read_or_explain(path, lambda: validate_record(Environment, environment))
    return environment


def read_builds(path: Path) -> int | None:
    """Return the planned builds of a confirmation log, or None if it has no header with them."""
    if not first_line(path):
        return None
    header = read_or_explain(path, lambda: parse_json(next(read_lines(path))[1]))
    plan = header.get("plan") if isinstance(header, dict) else None
    builds = plan.get("builds") if isinstance(plan, dict) else None
    return builds if isinstance(builds, int) else None


def read_or_explain(path: Path, reader: Callable[[], T]) -> T:
    """Return the result of `reader`; raise its errors as a `UserError` that names the damaged file."""
    try:
        return reader()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); {REPAIR_HINT}") from error
