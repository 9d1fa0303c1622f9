"""Experiment file as a frozen value; unknown keys, duplicate keys and wrong types are errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from harness.config.initial import (
    DEFAULT_BASELINES,
    DEFAULT_INITIAL,
    LAST_VERSION_WITH_REMOVED_KEYS,
    as_list,
    check_baselines,
    check_initial,
    initial_count,
)
from harness.config.objective import Objective
from harness.config.precision_names import FLOAT_PRECISION_NAMES, normalize_float_precision
from harness.config.sections import (
    Budget,
    ConfigSection,
    Confirmation,
    ExecutorSpec,
    Limits,
    ModelSpec,
    PluginSpec,
    Sampling,
    SearcherSpec,
    duplicates,
    require_distinct,
)
from harness.config.validation_errors import to_user_error
from harness.config.yaml_loader import dump_yaml, read_experiment_yaml, read_text_file

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _require_entries(value: Any) -> Any:
    if isinstance(value, list) and not value:
        raise ValueError("a list here needs at least one entry")
    return value


def _non_empty(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], BeforeValidator(_require_entries), Field(strict=False)]


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

    Raises:
        UserError: The message has file, key, value and the allowed values.
    """
    return parse_experiment(read_text_file(path, "an experiment file"), str(path), base_dir or path.resolve().parent)


def parse_experiment(text: str, source: str, base_dir: Path | None = None) -> Experiment:
    """Read and check an experiment given as YAML text.

    Args:
        source: Name of the text in messages.
        base_dir: Folder that relative paths start from; None: the working folder.

    Raises:
        UserError: The message has `source`, key, value and the allowed values.
    """
    try:
        return Experiment.model_validate(read_experiment_yaml(text, source), context={"base_dir": base_dir})
    except ValidationError as error:
        raise to_user_error(Experiment, source, error, extra_keys=["matrix"]) from None


def to_yaml(experiment: Experiment) -> str:
    """Return the experiment as YAML, with every default written out."""
    return dump_yaml(experiment.model_dump(mode="json"))
