"""Schemas of the JSON files of a task that a report reads; they may come from a stranger, with right checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.records import first_problem


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
    calibration_remarks: list[str] = []
    cache_remarks: list[str] = []
    tool_methods: dict[str, str] = {}


class _Processor(_ReportedRecord):
    model: str | None = None
    flags: list[str] = []


class Environment(_ReportedRecord):
    """Environment of a task, `env.json`."""

    cpu: _Processor = _Processor()
    packages: dict[str, str | None] = {}
    limits: dict[str, Any] = {}
    gpus: list[dict[str, Any]] = []
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
    nodes: list[str] = Field(min_length=1)
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
    steps: list[_Step] = []
    left_float: list[_FloatGroup | _FloatNode] = []
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
    """Check a decoded JSON object.

    Raises:
        ValueError: A key that reports read is missing, or has another type.
    """
    try:
        schema.model_validate(dict(body))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
