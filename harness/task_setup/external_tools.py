"""Q/DQ models made by PTQ tools: fixed baselines and initial placements, each made once and stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from harness.accuracy.calibration.ptq import PtqOptions, modelopt_ptq, ort_static, ptq_fingerprint
from harness.api import Array
from harness.config.experiment import Experiment
from harness.config.initial import FULLY_QUANTIZED
from harness.config.plan import quantized_precisions
from harness.errors import BuildFailed, install_hint
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import count_pairs
from harness.graph.rules.dialects import ONNXRUNTIME_S8, ONNXRUNTIME_S8_7BIT, Dialect, load_dialect
from harness.paths import cache_dir
from harness.progress import Observer
from harness.results_dir.io import explain_write_errors
from search.space import Space

__all__ = [
    "PTQ_FUNCTIONS", "ExternalModel", "QuantizationRequest", "fully_quantized_symmetric", "method_substitute",
    "run_external_tool", "tool_remarks", "unavailable_reason",
]  # fmt: skip

SIGNED_ORT_TOOL = "ort_static_s8"
PTQ_FUNCTIONS = {"modelopt_ptq": modelopt_ptq, "ort_static": ort_static, SIGNED_ORT_TOOL: ort_static}
PTQ_PACKAGES = ("nvidia-modelopt", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqTool:
    """Options of an experiment that a PTQ tool supports.

    Attributes:
        modules: What must be installed, by the name that is imported.
        precisions: Precisions that it quantizes to.
        methods: Its calibration methods, by our names.
    """

    modules: tuple[str, ...]
    precisions: tuple[str, ...]
    methods: tuple[str, ...]

    def nearest_method(self, method: str) -> str:
        """Return a method, or the nearest one that the tool has: entropy clips, as all but the mean of extremes do."""
        return method if method in self.methods else "minmax" if method == "mean" else "entropy"


_ORT_TOOL = PtqTool(modules=("onnxruntime",), precisions=("int8",), methods=("minmax", "max", "entropy", "percentile"))
PTQ_TOOLS: Mapping[str, PtqTool] = {
    "modelopt_ptq": PtqTool(
        modules=("modelopt", "torch", "onnx_graphsurgeon"),
        precisions=("int8", "fp8"),
        methods=("minmax", "max", "entropy"),
    ),
    "ort_static": _ORT_TOOL,
    SIGNED_ORT_TOOL: _ORT_TOOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """A Q/DQ model that another tool made, or the reason why it could not.

    Attributes:
        method: How the tool calibrated, where it lacks the method of the experiment; "" otherwise.
    """

    name: str
    path: Path | None
    pairs: int = 0
    reason: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRequest:
    """Input that every tool is given.

    Attributes:
        source: The model, for people.
        data: Calibration batches; gone through only where a model is made.
        data_key: Changes with the model, the data, and what is done to them.
    """

    model_file: Path
    source: str
    data: Iterable[Mapping[str, Array]]
    data_key: str
    options: PtqOptions


def run_external_tool(name: str, order: QuantizationRequest, observer: Observer) -> ExternalModel:
    """Quantize with another tool, or return its cached result for the same model, data and options.

    A tool without the calibration method of the experiment uses its nearest method.

    Raises:
        UserError: The disk is full.
    """
    options = order.options
    if reason := unavailable_reason(name, options.get("precision", "int8")):
        observer.say(f"{order.source}: {name} cannot run: {reason}")
        return ExternalModel(name=name, path=None, reason=reason)
    asked = options.get("method", "minmax")
    method = PTQ_TOOLS[name].nearest_method(asked)
    options = {**options, "method": method}
    if name == SIGNED_ORT_TOOL:
        options = {**options, "dialect_name": _signed_dialect_name(options["dialect_name"])}
    instead = method if method != asked else ""
    if instead:
        observer.say(f"{order.source}: {method_substitute(name, asked)}")
    path = cache_dir() / "ptq" / _cache_key(name, options, order.data_key) / f"{name}.onnx"
    if not path.exists():
        with observer.work(f"{order.source}: quantize with {name}", 1) as step, explain_write_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                PTQ_FUNCTIONS[name](order.model_file, path, order.data, **options)
            except BuildFailed as error:
                observer.say(f"{order.source}: {name} failed: {error}")
                return ExternalModel(name=name, path=None, reason=str(error), method=instead)
            step.advance()
    return ExternalModel(name=name, path=path, pairs=count_pairs(path), method=instead)


def unavailable_reason(name: str, precision: str) -> str:
    """Return why a tool cannot run here or at a precision; "" where it can."""
    tool = PTQ_TOOLS[name]
    if missing := [module for module in tool.modules if find_spec(module) is None]:
        return f"{', '.join(missing)} not installed: {install_hint('modelopt')}"
    if precision not in tool.precisions:
        return f"quantizes to {' or '.join(tool.precisions)}, not to {precision}"
    return ""


def method_substitute(name: str, method: str) -> str:
    """Return the method that a tool uses instead of one that it lacks, or "" if it supports the method."""
    instead = PTQ_TOOLS[name].nearest_method(method)
    return "" if instead == method else f"{name} has no calibration method {method} and calibrates by {instead}"


def tool_remarks(experiment: Experiment) -> Iterator[str]:
    """Yield deviations of the PTQ tools among initial placements and baselines from the experiment, one line each."""
    named = (*(start.use for start in experiment.initial), *experiment.baselines)
    for name in dict.fromkeys(each for each in named if each in PTQ_FUNCTIONS):
        for setting in experiment.precision:
            if reason := unavailable_reason(name, quantized_precisions(setting)[0]):
                yield f"{name}: cannot run at precision {setting}, so its row will be empty: {reason}"
            elif setting == "mixed":
                yield f"{name}: at precision mixed it quantizes to {quantized_precisions(setting)[0]} alone"
        for method in dict.fromkeys(model.calibration.method for model in experiment.models):
            if note := method_substitute(name, method):
                yield note


def fully_quantized_symmetric(
    model: Model, dialect: Dialect, ranges: Mapping[str, tuple[float, float]], work: Path, space: Space
) -> ExternalModel:
    """Quantize every point as the simplest tools do: symmetric INT8.

    The measures of a dialect that preserve accuracy or speed (UINT8 data, zero points) are omitted. A stress test: a
    model whose accuracy survives it needs no search for accuracy.
    """
    plain = replace(
        dialect, activation="int8", symmetric_activation=True, unsigned_positive=False, affine_ops=frozenset()
    )
    resolved, path = space.resolve(space.quantize_all()), work / "extreme.onnx"
    inserter = Inserter(model, plain, ranges)
    with explain_write_errors(path):
        inserter.export(resolved, path)
    return ExternalModel(name=FULLY_QUANTIZED, path=path, pairs=inserter.count_pairs(resolved))


def _signed_dialect_name(dialect_name: str) -> str:
    """Return the variant of ONNX Runtime's dialect with INT8 activations and the other dialect's weight width."""
    limit = load_dialect(dialect_name).weight_limit
    kinds = (ONNXRUNTIME_S8, ONNXRUNTIME_S8_7BIT)
    return next((kind.name for kind in kinds if kind.weight_limit == limit), ONNXRUNTIME_S8.name)


def _cache_key(name: str, options: PtqOptions, data_key: str) -> str:
    tools = sorted(f"{d.name} {d.version}" for d in distributions() if d.name and d.name.startswith(PTQ_PACKAGES))
    text = json.dumps([name, ptq_fingerprint(options), data_key, tools])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
