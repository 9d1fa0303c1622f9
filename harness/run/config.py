"""The experiment YAML as frozen values. Unknown keys, duplicate keys and wrong types are errors.

Every default of an experiment stands here and nowhere else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UserError, nearest

__all__ = [
    "Budget", "Calibration", "Confirmation", "Experiment", "Limits", "ModelSpec", "Objective", "Sampling", "Use",
    "load_experiment", "parse_experiment", "to_yaml",
]  # fmt: skip

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Use(_Frozen):
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


class Calibration(_Frozen):
    """Where activation ranges come from.

    Attributes:
        data: Data set (see `harness.evaluators.datasets`); None: random data, accuracy not to be trusted.
        method: How a range is taken from the observed values.
        percentile: For method "percentile" alone.
        samples: Number of images at most.
    """

    data: dict[str, Any] | None = None
    method: Literal["minmax", "entropy", "percentile"] = "minmax"
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    samples: Annotated[int, Field(ge=1)] = 48


class ModelSpec(_Frozen):
    """One model with the data that belongs to it; a bare string means: random data, latency only."""

    use: str
    label: str | None = None
    shapes: dict[str, str] = {}
    preprocess: Use | None = None
    calibration: Calibration = Calibration()
    evaluator: Use | None = None

    @property
    def name(self) -> str:
        """What tables and folders call it."""
        return self.label or Path(self.use.rpartition(":")[2]).stem

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> ModelSpec:
        if self.calibration.data is not None and self.preprocess is None and self.calibration.data.get("use") != "npz":
            raise ValueError("calibration.data needs 'preprocess', the name of what turns an image into an input")
        return self


class Objective(_Frozen):
    """What a search minimises: latency, alone or with a bound on the loss of accuracy.

    Attributes:
        minimize: The only choice today.
        max_drop: Largest allowed loss of the evaluator's metric against the float model, absolute.
    """

    minimize: Literal["latency"] = "latency"
    max_drop: Annotated[float, Field(ge=0)] | None = None


class Budget(_Frozen):
    """What one search may spend; the seeds count.

    Attributes:
        evaluations: Budgets to report; the search runs to the largest.
        minutes: Wall-clock limit of one search; None: no limit.
    """

    evaluations: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)] = (25, 50)
    minutes: Annotated[float, Field(gt=0)] | None = None


class Sampling(_Frozen):
    """How long one engine is timed during a search.

    Attributes:
        warmup_ms: Run at least so long before the first sample counts.
        min_samples: At least so many samples.
        max_samples: At most so many.
        max_ms: Stop after so long, when min_samples are there.
        target: Stop when the 95 % interval of the median is narrower than this share of it.
    """

    warmup_ms: Annotated[float, Field(ge=0)] = 50.0
    min_samples: Annotated[int, Field(ge=3)] = 11
    max_samples: Annotated[int, Field(ge=3)] = 200
    max_ms: Annotated[float, Field(gt=0)] = 400.0
    target: Annotated[float, Field(gt=0, lt=1)] = 0.01


class Confirmation(_Frozen):
    """How winners and baselines are timed again: fresh processes, fresh builds, interleaved.

    Attributes:
        builds: Fresh builds of each row.
        rounds: Rounds within one build; every row is sampled once a round, in random order.
        samples: Inferences of one row in one round.
        top_k: Best placements of each search that are confirmed.
    """

    builds: Annotated[int, Field(ge=3)] = 5
    rounds: Annotated[int, Field(ge=2)] = 6
    samples: Annotated[int, Field(ge=3)] = 8
    top_k: Annotated[int, Field(ge=1)] = 1


class Limits(_Frozen):
    """What one candidate may take before it counts as failed."""

    build_s: Annotated[float, Field(gt=0)] = 300.0
    measure_s: Annotated[float, Field(gt=0)] = 120.0
    evaluate_s: Annotated[float, Field(gt=0)] = 1800.0


def _not_empty(value: Any) -> Any:
    if isinstance(value, list) and not value:
        raise ValueError("a list here needs at least one entry")
    return value


def _some(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], BeforeValidator(_not_empty), Field(strict=False)]


class Experiment(_Frozen):
    """One experiment file; docs/experiment.md shows every key."""

    experiment: str
    description: str = ""
    models: _some(ModelSpec)  # type: ignore[valid-type]
    backends: _some(Use) = (Use(use="openvino"),)  # type: ignore[valid-type]
    precision: _some(Literal["int8", "fp8"]) = ("int8",)  # type: ignore[valid-type]
    sharing: Literal["pattern", "region"] = "pattern"
    objective: Objective = Objective()
    searchers: _some(Use) = (Use(use="random"),)  # type: ignore[valid-type]
    seeds: _some(Annotated[int, Field(ge=0)]) = (0,)  # type: ignore[valid-type]
    initial: _some(Literal["float", "all", "linear", "modelopt_ptq", "ort_static"]) = (  # type: ignore[valid-type]
        "float", "all", "linear", "modelopt_ptq", "ort_static",
    )  # fmt: skip
    baselines: tuple[Literal["all", "linear", "modelopt_ptq", "ort_static"], ...] = Field(
        default=("all", "linear", "modelopt_ptq", "ort_static"), strict=False
    )
    budget: Budget = Budget()
    sampling: Sampling = Sampling()
    confirmation: Confirmation = Confirmation()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _names(self) -> Experiment:
        for what, names in (("experiment", [self.experiment]), ("models", [m.name for m in self.models])):
            for name in names:
                if not NAME.fullmatch(name):
                    raise ValueError(f"{what}: {name!r} is no folder name; use letters, digits, '.', '_', '-'")
        for what, labels in (
            ("models", [m.name for m in self.models]),
            ("searchers", [s.name for s in self.searchers]),
            ("backends", [b.name for b in self.backends]),
        ):
            twice = {label for label in labels if labels.count(label) > 1}
            if twice:
                raise ValueError(f"{what}: {', '.join(sorted(twice))} appears twice; tell them apart by 'label'")
        return self


def load_experiment(path: Path) -> Experiment:
    """Read and check an experiment file.

    Raises:
        UserError: With file, key, value and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return parse_experiment(text, str(path))


def parse_experiment(text: str, source: str) -> Experiment:
    """Check an experiment given as YAML text; `source` names it in messages."""
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{source}: an experiment is a mapping of keys, but got {type(raw).__name__}")
    try:
        return Experiment.model_validate(_expand(raw, source))
    except ValidationError as error:
        raise UserError("\n".join(_explain(source, dict(e)) for e in error.errors())) from error


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment, every default written out."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and aliases (an alias bomb needs no other ingredient)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed here", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _expand(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Apply `matrix`: for each list entry of `models`, `backends` or `searchers`, one copy per combination.

    A matrix names paths below one of those lists, for instance `backends.params.threads: [1, 2]`.
    """
    body = {key: value for key, value in raw.items() if key != "matrix"}
    matrix = raw.get("matrix", {})
    if not isinstance(matrix, dict):
        raise UserError(f"{source}: matrix: a mapping from a path to a list, but got {type(matrix).__name__}")
    axes: dict[str, dict[str, list[Any]]] = {}
    for path, values in matrix.items():
        head, _, tail = str(path).partition(".")
        if head not in ("models", "backends", "searchers") or not tail:
            raise UserError(
                f"{source}: matrix.{path}: a path below models, backends or searchers, such as backends.params.threads"
            )
        if not isinstance(values, list) or not values:
            raise UserError(f"{source}: matrix.{path}: a list with at least one entry, but got {values!r}")
        axes.setdefault(head, {})[tail] = values
    for head, changes in axes.items():
        entries = body.get(head)
        if not isinstance(entries, list):
            raise UserError(f"{source}: matrix.{head}.*: there is no list {head!r} to vary")
        body[head] = [copy for entry in entries for copy in _copies(entry, changes)]
    return body


def _copies(entry: Any, changes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(*changes.values()):
        copy: dict[str, Any] = {"use": entry} if isinstance(entry, str) else yaml.safe_load(yaml.safe_dump(entry))
        base = copy.get("label") or Path(str(copy.get("use", "")).rpartition(":")[2]).stem
        for path, value in zip(changes, combination, strict=True):
            *parents, last = path.split(".")
            target = copy
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value
        parts = [f"{path.rpartition('.')[2]}-{value}" for path, value in zip(changes, combination, strict=True)]
        copy["label"] = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([base, *parts]))
        yield copy


def _explain(source: str, error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "experiment"
    if error["type"] == "extra_forbidden":
        owner = _fields_at(error["loc"][:-1])
        return f"{source}: {where}: unknown key; {nearest(str(error['loc'][-1]), owner)}"
    if error["type"] == "missing":
        return f"{source}: {where}: this key is required"
    message = str(error["msg"]).removeprefix("Value error, ")
    got = error.get("input")
    shown = "" if isinstance(got, dict) else f", but got {got!r}"
    return f"{source}: {where}: {message}{shown}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    """Names allowed at a place of the experiment, found by walking the model classes."""
    owner: type[BaseModel] = Experiment
    for part in location:
        if isinstance(part, int):
            continue
        annotation = str(owner.model_fields[part].annotation) if part in owner.model_fields else ""
        owner = next((c for c in _sections() if re.search(rf"\b{c.__name__}\b", annotation)), owner)
    return [*owner.model_fields, *(["matrix"] if owner is Experiment else [])]


def _sections() -> tuple[type[BaseModel], ...]:
    return (ModelSpec, Use, Calibration, Objective, Budget, Sampling, Confirmation, Limits)
