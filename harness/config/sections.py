"""Sections of an experiment file as frozen values, with the objective; unknown keys and wrong types are errors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from harness.base.errors import MAX_COUNT, UserError
from harness.plugins import registry

# Further limits, see MAX_COUNT.
MAX_DIMENSION = 2**31 - 1
MAX_ROUNDS = 10_000
MAX_PENDING = 100_000
MAX_SAMPLING_MS = 3_600_000.0
MAX_MEMORY_GB = 1e6
SmallCount = Annotated[int, Field(ge=1, le=1_000)]
SampleCount = Annotated[int, Field(ge=3, le=100_000)]
LimitSeconds = Annotated[float, Field(gt=0, le=604_800.0)]  # a week
Minutes = Annotated[float, Field(gt=0, le=525_600.0)]  # a year
AblatedPart = Literal["initial", "sharing", "racing", "rebuilds"]


class ConfigSection(BaseModel):
    """Mapping of a configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    _later_keys: ClassVar[frozenset[str]] = frozenset()
    _base_dir: Path | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        self._base_dir = (context or {}).get("base_dir")

    @property
    def base_dir(self) -> Path:
        """Folder that relative paths start from: `base_dir` of the validation context, or the working folder."""
        return self._base_dir or Path.cwd()

    @model_serializer(mode="wrap")
    def _without_absent_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later keys that are None, so that digests of settings are equal to those of earlier versions."""
        return {key: value for key, value in handler(self).items() if key not in self._later_keys or value is not None}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__  # wherever the file is

    __hash__ = BaseModel.__hash__


def duplicates(values: Iterable[Any]) -> list[Any]:
    """Return the values that appear more than once."""
    return [value for value, number in Counter(values).items() if number > 1]


def require_distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values; raise ValueError if one appears twice."""
    for value in duplicates(values):
        raise ValueError(f"{value!r} appears twice")
    return values


class PluginSpec(ConfigSection):
    """Plug-in (the name of an entry point, or `package.module:Class`) with the arguments of its constructor.

    A bare string means no arguments. `label` is its name in tables if several entries use one plug-in.
    """

    use: str
    params: dict[str, Any] = {}
    label: str | None = None

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.label or self.use.rpartition(":")[2]

    @property
    def mapping(self) -> dict[str, Any]:
        """The plug-in as `{use: ..., params: ...}`, for parameters of other plug-ins."""
        return {"use": self.use, "params": self.params}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


class PreprocessSpec(PluginSpec):
    """Preprocessing of images.

    Attributes:
        layout: Order of the axes of the model's input; None: found by the axis that has three channels.
    """

    _later_keys = frozenset({"layout"})

    layout: Literal["nchw", "nhwc"] | None = None

    @property
    def mapping(self) -> dict[str, Any]:
        """The preprocessing as a mapping, for parameters of evaluators."""
        return super().mapping | ({} if self.layout is None else {"layout": self.layout})


class SearcherSpec(PluginSpec):
    """Searcher or external searcher.

    Attributes:
        without: Components that this method lacks, for ablations. "initial": the initial design. "sharing": one choice
            for all regions of a pattern. "racing": early elimination of slow engines. "rebuilds": further builds of a
            candidate that beats the incumbent.
    """

    without: Annotated[tuple[AblatedPart, ...], Field(strict=False), AfterValidator(require_distinct)] = ()


def _require_mapping(value: Any) -> Any:
    """Reject a plain file name, which does not state whether the data are inputs or images."""
    if isinstance(value, str):
        key = {".npz": "use: npz, path", ".npy": "use: npy, path"}.get(Path(value).suffix, "use: images, images")
        raise ValueError(f"a mapping, such as {{{key}: {value}}}")
    return value


def _require_plugin(kind: str, name: str) -> str:
    """Reject a name that no plug-in of a kind has; `module:Class` is imported later, after the check for trust."""
    if ":" not in name:
        try:
            registry.find_entry_point(kind, name)
        except UserError as error:
            raise ValueError(str(error)) from error
    return name


class Calibration(ConfigSection):
    """Source of activation ranges.

    Attributes:
        data: Data set (see `harness.accuracy.data.datasets`); None: random data, for which accuracy is meaningless.
        method: Range estimator of activations (an entry point of `qdq.range_estimators`).
        percentile: Only for method "percentile"; usually 99.9 to 99.999.
        samples: Maximum number of samples.
        weights: Range estimator of weights (an entry point of `qdq.weight_estimators`).
        depthwise: Scales of the INT8 data of depthwise convolutions: one, or one for each channel.
        symmetric: Whether INT8 activations have zero point 0; None: the dialect decides.
    """

    data: Annotated[dict[str, Any] | None, BeforeValidator(_require_mapping)] = None
    method: Annotated[str, AfterValidator(partial(_require_plugin, "range estimator"))] = "minmax"
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    samples: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 48
    weights: Annotated[str, AfterValidator(partial(_require_plugin, "weight estimator"))] = "max"
    depthwise: Literal["tensor", "channel"] = "tensor"
    symmetric: bool | None = None


def _shape_text(shape: Any) -> Any:
    return "x".join(map(str, shape)) if isinstance(shape, list) else shape


class _InputSizes(ConfigSection):
    shapes: dict[str, Annotated[str, BeforeValidator(_shape_text)]] = {}
    dims: dict[str, Annotated[int, Field(ge=0, le=MAX_DIMENSION)]] = {}


class ShapeEntry(_InputSizes):
    """Input sizes of one kind of request; sizes that are not given are those of the model.

    Attributes:
        weight: Relative number of such requests, for the objective "weighted".
    """

    weight: Annotated[float, Field(gt=0, le=MAX_COUNT, allow_inf_nan=False)] = 1.0

    @property
    def label(self) -> str:
        """Name in tables, such as "batch=8"."""
        sizes = [f"{name}={size}" for name, size in self.dims.items()]
        return ", ".join([*sizes, *(f"{name}:{shape}" for name, shape in self.shapes.items())])


class ShapeSetSpec(ConfigSection):
    """Shapes that one placement is timed at.

    Attributes:
        objective: "weighted": weighted mean latency of a request. "worst": latency relative to the float model's at the
            shape where that is largest.
    """

    objective: Literal["weighted", "worst"] = "weighted"
    shapes: Annotated[tuple[ShapeEntry, ...], Field(min_length=2, strict=False)]

    @model_validator(mode="after")
    def _check_shapes(self) -> ShapeSetSpec:
        if repeated := duplicates(entry.label for entry in self.shapes):
            raise ValueError(f"shapes: {repeated[0]!r} appears twice")
        if self.objective == "worst" and any(entry.weight != 1 for entry in self.shapes):
            raise ValueError("shapes.weight: only for the objective 'weighted'")
        return self


class ModelSpec(_InputSizes):
    """Model with its data; a bare string means random data and latency only.

    Attributes:
        use: ONNX file, `zoo:NAME` or `assets:PATH`.
        label: Name in tables and folders; None: the name of the file or of the zoo's model.
        preprocess: Preprocessing of images; needed if the calibration data are images.
        evaluator: Evaluator of the accuracy; None: only latency is measured.
        shapes: Static shape of dynamic inputs, by input name.
        dims: Size of dynamic dimensions, by symbol.
        shape_set: Shapes that placements are timed at; None: the one of `shapes` and `dims`.
        expect: Known score of the float model by the evaluator, in the metric's unit; None: unknown, 0: unchecked.
    """

    _later_keys = frozenset({"shape_set", "expect"})

    use: str
    label: str | None = None
    shape_set: ShapeSetSpec | None = None
    preprocess: PreprocessSpec | None = None
    calibration: Calibration = Calibration()
    evaluator: PluginSpec | None = None
    expect: Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT, allow_inf_nan=False)] | None = None

    def at(self, entry: ShapeEntry) -> ModelSpec:
        """Return the model with the sizes of an entry."""
        return self.model_copy(
            update={"dims": {**self.dims, **entry.dims}, "shapes": {**self.shapes, **entry.shapes}, "shape_set": None}
        )

    @property
    def name(self) -> str:
        """Name in tables and folders."""
        return self.label or Path(self.use.rpartition(":")[2]).stem

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_companions(self) -> ModelSpec:
        data = self.calibration.data
        if data is not None and self.preprocess is None and data.get("use") not in ("npz", "npy"):
            raise ValueError("calibration.data needs 'preprocess', the name of the preprocessing of an image")
        if self.expect is not None and self.evaluator is None:
            raise ValueError("expect needs an 'evaluator', whose metric the float model is known to reach")
        return self


class Budget(ConfigSection):
    """Budget of one search; the initial design counts.

    Attributes:
        evaluations: Budgets to report; the search runs to the largest.
        minutes: Wall-clock limit of one search; None: no limit.
        stop_at: Probability that no gain above 0.5 % remains, at which a search ends early; None: never. See
            `search.gain_forecast`.
        task_minutes: Wall-clock limit of a task, recovery and confirmation included; None: no limit.
    """

    evaluations: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_COUNT)], ...],
        Field(min_length=1, strict=False),
        AfterValidator(require_distinct),
    ] = (25, 50)
    minutes: Minutes | None = None
    stop_at: Annotated[float, Field(gt=0, lt=1)] | None = None
    task_minutes: Minutes | None = None


class Sampling(ConfigSection):
    """Timing of one engine during a search; racing ends it early for engines clearly slower than the incumbent.

    Attributes:
        warmup_ms: Minimum time before the first sample.
        min_samples: Minimum number of samples.
        max_samples: Maximum number of samples.
        max_ms: Time limit in ms, applied after `min_samples` samples.
        target: Stop when the 95 % interval of the median is narrower than this fraction of it.
        interleave: Whether a candidate is interleaved with the float model, which removes drift of the machine and
            doubles the time; "auto": if turns of the float model before the searches scatter by more than 2 %.
    """

    warmup_ms: Annotated[float, Field(ge=0, le=MAX_SAMPLING_MS)] = 50.0
    min_samples: SampleCount = 11
    max_samples: SampleCount = 200
    max_ms: Annotated[float, Field(gt=0, le=MAX_SAMPLING_MS)] = 400.0
    target: Annotated[float, Field(gt=0, lt=1)] = 0.01
    interleave: Literal["auto", "always", "never"] = "auto"


class TurnSchedule(ConfigSection):
    """Repetitions of an interleaved comparison.

    Attributes:
        builds: Fresh builds of each row.
        rounds: Rounds within one build; each row has one turn per round, in random order.
        samples: Minimum inferences per turn; short ones continue for 50 ms.
    """

    builds: SmallCount = 1
    rounds: Annotated[int, Field(ge=2, le=MAX_ROUNDS)] = 8
    samples: SampleCount = 3


class Confirmation(TurnSchedule):
    """Confirmation of winners and baselines: fresh processes, fresh builds, interleaved turns.

    Attributes:
        top_k: Best placements of each search that are confirmed.
        candidates: Best placements of each search in the final selection, which picks the `top_k`; 1: no selection, the
            lowest reading of the search wins.
    """

    builds: Annotated[int, Field(ge=3, le=1_000)] = 5
    rounds: Annotated[int, Field(ge=2, le=MAX_ROUNDS)] = 20
    top_k: SmallCount = 1
    candidates: SmallCount = 4


class Limits(ConfigSection):
    """Limits of one candidate and of its worker, beyond which it counts as failed; 1 GB is 10^9 bytes."""

    build_s: LimitSeconds = 300.0
    measure_s: LimitSeconds = 120.0
    evaluate_s: LimitSeconds = 1800.0
    memory_gb: Annotated[float, Field(gt=0, le=MAX_MEMORY_GB)] = 16.0


class ExecutorSpec(ConfigSection):
    """Machines that build and time engines, and the degree of parallelism.

    Attributes:
        use: "local": processes of this machine; "ray": a Ray cluster, one device per worker.
        workers: Maximum number of candidates in progress.
        window: Maximum number of pending proposals of one search; None: 1.5 times its workers, or 1 for one worker.
            With a larger window, searchers know fewer results at each proposal.
        searches: Concurrent searches of a task, which share the workers.
        tasks: Concurrent tasks; only for Ray.
        timing: "exclusive": nothing is built while an engine of this machine is timed; "concurrent": builds continue.
        address: Address of the Ray cluster; "auto": the cluster of this machine, "local": a new one.
        resources: Resources of each Ray worker, for instance {GPU: 1} or {CPU: 8}; default one CPU.
    """

    use: Literal["local", "ray"] = "local"
    workers: Annotated[int, Field(ge=1, le=10_000)] = 1
    window: Annotated[int, Field(ge=1, le=MAX_PENDING)] | None = None
    searches: SmallCount = 1
    tasks: SmallCount = 1
    timing: Literal["exclusive", "concurrent"] = "exclusive"
    address: str = "auto"
    resources: dict[str, Annotated[float, Field(ge=0, le=MAX_COUNT, strict=False)]] = {}

    @property
    def max_pending(self) -> int:
        """Maximum number of pending proposals of one search."""
        return self.window or max(1, 3 * self.workers // (2 * self.searches * self.tasks))

    @model_validator(mode="after")
    def _check_target(self) -> ExecutorSpec:
        if self.use == "local":
            for name in ("tasks", "address", "resources"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: only for the executor 'ray', but use is 'local'")
        elif self.timing == "concurrent":
            raise ValueError("timing: only for the executor 'local'; a Ray worker has a device of its own")
        return self


FLOAT_PRECISION_NAMES = {
    "f32": "f32", "fp32": "f32", "float32": "f32", "float": "f32", "single": "f32",
    "tf32": "tf32", "tensorfloat32": "tf32",
    "f16": "f16", "fp16": "f16", "float16": "f16", "half": "f16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip


def normalize_float_precision(value: Any) -> Any:
    """Return the name of a float precision in any usual spelling ("FP16", "half"); other values unchanged."""
    return FLOAT_PRECISION_NAMES.get(value.lower(), value) if isinstance(value, str) else value


Minimize = Literal["latency", "pareto", "accuracy"]
PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?) ?%")
DROP_SUFFIX = "_drop"


def validate_bound(value: Any) -> float | str:
    """Return a bound that is a number from 0, or a percentage.

    Raises:
        ValueError: It is neither.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and value >= 0:
        return float(value)
    if isinstance(value, str) and PERCENTAGE.fullmatch(value):
        return value
    raise ValueError("a number from 0, or a percentage of the float model's such as '1%'")


def parse_bound(text: str) -> float | str:
    """Return a bound from the command line: a number, or a percentage such as "1%".

    Raises:
        ValueError: The text is neither.
    """
    try:
        return validate_bound(float(text))
    except ValueError:
        return validate_bound(text)


Bound = Annotated[float | str, BeforeValidator(validate_bound)]


def absolute_bound(bound: float | str, reference: float) -> float:
    """Return a bound as a number; a percentage is relative to the reference."""
    percentage = PERCENTAGE.fullmatch(bound) if isinstance(bound, str) else None
    return abs(reference) * float(percentage[1]) / 100 if percentage is not None else float(bound)


class Objective(ConfigSection):
    """Objective of a search: latency, loss of accuracy, or both.

    Attributes:
        minimize: "latency": with or without `max_drop`. "pareto": latency and loss of accuracy, as a front. "accuracy":
            loss of accuracy among the placements within `max_latency`.
        max_drop: Largest allowed loss of the metric against the float model, absolute (0.01) or as a percentage of the
            float model's score ("1%"). `map_drop: 0.01` sets the metric as well.
        metric: Name of the metric; None: that of the evaluator.
        max_latency: For "accuracy": in milliseconds (4.5), or as a percentage of the float model's latency ("50%").
        halves: Score searches on one half of the evaluator's data, and finalists on the other half.
        proxy: Number of calibration samples for a proxy metric, the deviation of a candidate's outputs from the float
            model's; the evaluator scores only candidates that may win by the proxy. 0: it scores all fast candidates.
        recover: Under a bound, apply recovery steps and other scales to the fastest placements near it. Files that keep
            the bound are finalists; among equally fast ones, the estimated loss decides.
    """

    minimize: Minimize = "latency"
    max_drop: Bound | None = None
    metric: str | None = None
    max_latency: Bound | None = None
    halves: bool = False
    proxy: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    recover: bool = True

    @model_validator(mode="before")
    @classmethod
    def _split_metric_drop(cls, value: Any) -> Any:
        """Replace `map_drop: 0.01` by `max_drop: 0.01` and `metric: map`."""
        if not isinstance(value, dict):
            return value
        drops = [key for key in value if isinstance(key, str) and key.endswith(DROP_SUFFIX) and key != "max_drop"]
        if not drops:
            return value
        if len(drops) > 1 or {"max_drop", "metric"} & value.keys():
            raise ValueError(f"one bound on one metric, but got {', '.join(k for k in value if 'drop' in str(k))}")
        others = {key: entry for key, entry in value.items() if key != drops[0]}
        return {**others, "max_drop": value[drops[0]], "metric": drops[0].removesuffix(DROP_SUFFIX)}

    @model_validator(mode="after")
    def _check_max_latency(self) -> Objective:
        if (self.minimize == "accuracy") != (self.max_latency is not None):
            raise ValueError("'minimize: accuracy' and 'max_latency' must be given together")
        return self

    @property
    def uses_accuracy(self) -> bool:
        """Return whether searches need scores."""
        return self.minimize != "latency" or self.max_drop is not None

    @property
    def drop_key(self) -> str:
        """Key of the bound in messages, such as "map_drop"."""
        return "max_drop" if self.metric is None else f"{self.metric}{DROP_SUFFIX}"


def check_objective(objective: Objective, metric: str | None, model: str) -> None:
    """Raise `UserError` if a model's evaluator does not fit the objective.

    Args:
        metric: Metric of the evaluator; None: there is no evaluator.
    """
    key = objective.drop_key
    if metric is None and objective.uses_accuracy:
        place = f"objective.{key}" if objective.minimize == "latency" else f"objective.minimize: {objective.minimize}"
        raise UserError(f"{place}: model {model!r} has no evaluator whose metric could drop")
    if metric is None and objective.halves:
        raise UserError(f"objective.halves: model {model!r} has no evaluator whose data could be halved")
    if None not in (objective.metric, metric) and objective.metric != metric:
        raise UserError(
            f"objective.{key}: the evaluator of model {model!r} gives {metric!r}; write {metric}_drop, or max_drop for "
            "the metric of each model"
        )
