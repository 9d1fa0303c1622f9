"""The experiment YAML as frozen values. Unknown keys, duplicate keys and wrong types are errors.

Every default of an experiment stands here, or with the sections `objective`, `executing`, `measuring` and `starts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UserError
from harness.config.validation_errors import to_user_error
from harness.config.yaml_loader import MAX_FILE_BYTES, read_experiment_yaml
from harness.config.executor import ExecutorSpec
from harness.config.sampling import Confirmation, Limits, TurnSchedule, Sampling
from harness.config.objective import Objective
from harness.config.initial import DEFAULT_BASELINES, DEFAULT_INITIAL, check_baselines, check_initial, as_list, initial_count
from harness.graph.rules.precision_names import FLOAT_PRECISION_NAMES, normalize_float_precision

__all__ = [
    "Budget", "Calibration", "Confirmation", "Experiment", "Limits", "SearcherSpec", "ModelSpec", "Objective", "TurnSchedule",
    "Sampling", "PluginSpec", "load_experiment", "parse_experiment", "to_yaml",
]  # fmt: skip

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names become files and folders."""


def _require_distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in _duplicates(values):
        raise ValueError(f"{value!r} appears twice")
    return values


def _duplicates(values: Iterable[Any]) -> list[Any]:
    listed = list(values)
    return [value for value in dict.fromkeys(listed) if listed.count(value) > 1]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PluginSpec(_Section):
    """A plug-in by name with its parameters; a bare string means: no parameters."""

    use: str
    params: dict[str, Any] = {}
    label: str | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.use.rpartition(":")[2]

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


AblatedPart = Literal["seeds", "sharing", "racing", "retakes"]


class SearcherSpec(PluginSpec):
    """A searcher or a peer.

    Attributes:
        without: Parts of the harness that this method has to do without, for ablations. "seeds": it is told nothing
            first. "sharing": every region has choices of its own. "racing": engines that have lost are timed to the
            end. "retakes": a reading that beats the incumbent is believed at once.
    """

    without: Annotated[tuple[AblatedPart, ...], Field(strict=False), AfterValidator(_require_distinct)] = ()


def _shape_text(shape: Any) -> Any:
    """[1, 3, 224, 224] as 1x3x224x224."""
    return "x".join(map(str, shape)) if isinstance(shape, list) else shape


def _require_mapping(value: Any) -> Any:
    """A bare name is no data set: the same file may hold inputs, or images that are to be prepared."""
    if isinstance(value, str):
        key = {".npz": "use: npz, path", ".npy": "use: npy, path"}.get(Path(value).suffix, "use: images, images")
        raise ValueError(f"a mapping, such as {{{key}: {value}}}")
    return value


class Calibration(_Section):
    """Where activation ranges come from.

    Attributes:
        data: Data set (see `harness.accuracy.data.datasets`); None: random data, accuracy not to be trusted.
        method: How a range is taken from the observed values (see `harness.accuracy.calibration.ranges`).
        percentile: For method "percentile" alone; 99.9 to 99.999 as a rule.
        samples: Number of images at most.
    """

    data: Annotated[dict[str, Any] | None, BeforeValidator(_require_mapping)] = None
    method: Literal["minmax", "max", "entropy", "percentile", "mse"] = "minmax"
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    samples: Annotated[int, Field(ge=1)] = 48


class ModelSpec(_Section):
    """One model with the data that belongs to it; a bare string means: random data, latency only.

    Attributes:
        shapes: Static shape of dynamic inputs, by input name.
        dims: Size of dynamic dimensions, by symbol.
    """

    use: str
    label: str | None = None
    shapes: dict[str, Annotated[str, BeforeValidator(_shape_text)]] = {}
    dims: dict[str, Annotated[int, Field(ge=1)]] = {}
    preprocess: PluginSpec | None = None
    calibration: Calibration = Calibration()
    evaluator: PluginSpec | None = None

    @property
    def name(self) -> str:
        """What tables and folders call it."""
        return self.label or Path(self.use.rpartition(":")[2]).stem

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_preprocess(self) -> ModelSpec:
        data = self.calibration.data
        if data is not None and self.preprocess is None and data.get("use") not in ("npz", "npy"):
            raise ValueError("calibration.data needs 'preprocess', the name of what turns an image into an input")
        return self


class Budget(_Section):
    """What one search may spend; the seeds count.

    Attributes:
        evaluations: Budgets to report; the search runs to the largest.
        minutes: Wall-clock limit of one search; None: no limit.
    """

    evaluations: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False), AfterValidator(_require_distinct)
    ] = (25, 50)
    minutes: Annotated[float, Field(gt=0)] | None = None


def _require_entries(value: Any) -> Any:
    if isinstance(value, list) and not value:
        raise ValueError("a list here needs at least one entry")
    return value


def _non_empty(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], BeforeValidator(_require_entries), Field(strict=False)]


def _non_empty_distinct(kind: Any) -> Any:
    return Annotated[_non_empty(kind), AfterValidator(_require_distinct)]


def _require_quantized_precision(value: Any) -> Any:
    """Refuse a float precision where one to quantize to belongs."""
    found = normalize_float_precision(value) if isinstance(value, str) else None
    if found in FLOAT_PRECISION_NAMES:
        raise ValueError(
            f"int8, fp8, fp8e5m2 or mixed, but got {value!r}, a float precision; what stays float has that of the "
            f"backend: {{use: ..., params: {{precision: {found}}}}}"
        )
    return value


QuantizedPrecision = Annotated[Literal["int8", "fp8", "fp8e5m2", "mixed"], BeforeValidator(_require_quantized_precision)]


class Experiment(_Section):
    """One experiment file; docs/experiment.md shows every key."""

    experiment: str
    description: str = ""
    models: _non_empty(ModelSpec)  # type: ignore[valid-type]
    backends: _non_empty(PluginSpec) = (PluginSpec(use="openvino"),)  # type: ignore[valid-type]
    precision: _non_empty_distinct(QuantizedPrecision) = ("int8",)  # type: ignore[valid-type]
    sharing: Literal["pattern", "region"] = "pattern"
    objective: Objective = Objective()
    searchers: _non_empty(SearcherSpec) = (SearcherSpec(use="auto"),)  # type: ignore[valid-type]
    seeds: _non_empty_distinct(Annotated[int, Field(ge=0)]) = (0,)  # type: ignore[valid-type]
    initial: Annotated[tuple[PluginSpec, ...], BeforeValidator(as_list), Field(strict=False)] = tuple(
        PluginSpec(use=name) for name in DEFAULT_INITIAL
    )
    baselines: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_require_distinct)] = DEFAULT_BASELINES
    transfer: Annotated[tuple[Literal["backends", "models"], ...], Field(strict=False), AfterValidator(_require_distinct)] = ()
    budget: Budget = Budget()
    sampling: Sampling = Sampling()
    confirmation: Confirmation = Confirmation()
    limits: Limits = Limits()
    executor: ExecutorSpec = ExecutorSpec()

    @model_validator(mode="after")
    def _check_names(self) -> Experiment:
        lists: tuple[tuple[str, tuple[ModelSpec | PluginSpec, ...]], ...] = (
            ("models", self.models),
            ("searchers", self.searchers),
            ("backends", self.backends),
            ("initial", self.initial),
        )
        _check_name("experiment", self.experiment)
        for what, entries in lists:
            for entry in entries:
                _check_name(what, entry.name)
            if twice := _duplicates(entry.name for entry in entries):
                raise ValueError(f"{what}: {', '.join(twice)} appears twice; tell them apart by 'label'")
        return self

    @model_validator(mode="after")
    def _check_initial(self) -> Experiment:
        check_initial(self.initial)
        check_baselines(self.baselines, self.initial)
        seeds, most = sum(map(initial_count, self.initial)), max(self.budget.evaluations)
        if most <= seeds:
            raise ValueError(
                f"budget.evaluations: initial has {seeds} starts, which count: ask for more, but got {most}; "
                "no searcher would have a turn"
            )
        return self


def _check_name(what: str, name: str) -> None:
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(
            f"{what}: {name!r} is no folder name; use at most 100 letters, digits, '.', '_', '-', "
            f"a letter or digit first{'' if what == 'experiment' else ' (set by label)'}"
        )


def load_experiment(path: Path) -> Experiment:
    """Read and check an experiment file.

    Raises:
        UserError: With file, key, value and what is allowed.
    """
    return parse_experiment(_read_experiment_file(path), str(path))


def _read_experiment_file(path: Path) -> str:
    try:
        if path.suffix == ".onnx" and path.is_file():
            raise UserError(
                f"{path}: this is a model by its name, not an experiment file; name it below 'models' of one"
            )
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UserError(f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} for an experiment")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file ({path.resolve()})") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: this is a folder; name the experiment file in it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: this is no text, so not an experiment file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_experiment(text: str, source: str) -> Experiment:
    """Check an experiment given as YAML text; `source` names it in messages."""
    try:
        return Experiment.model_validate(read_experiment_yaml(text, source))
    except ValidationError as error:
        raise to_user_error(Experiment, source, error, beside=["matrix"]) from error


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment, every default written out."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
