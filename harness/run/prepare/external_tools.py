"""Q/DQ models of PTQ tools for baselines and initial placements, which are created once and cached."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

from harness.accuracy.tools.ptq import (
    TOOLS,
    MetricRequest,
    PtqOptions,
    method_substitute,
    ptq_fingerprint,
    quantize,
    unavailable_reason,
)
from harness.base.errors import BuildFailed
from harness.base.files import explain_write_errors
from harness.base.paths import cache_dir
from harness.base.progress import Observer
from harness.config.experiment import FULLY_QUANTIZED, Experiment, quantized_precisions
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.qdq_graph import count_pairs
from harness.graph.rules.dialects import ONNXRUNTIME_S8, ONNXRUNTIME_S8_7BIT, Dialect, load_dialect
from harness.plugins.api import Array
from harness.plugins.registry import uses_objects
from search.space import Space

SIGNED_ORT_TOOL = "ort_static_s8"
PTQ_FUNCTIONS = {name: partial(quantize, name) for name in TOOLS}
PTQ_PACKAGES = ("nvidia-modelopt", "onnxruntime", "nncf", "openvino")
_IR_TOOLS = frozenset({"nncf_ptq", "nncf_accuracy_control"})
"""Tools that write an OpenVINO IR for OpenVINO, as their guides recommend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """Q/DQ model of another tool, or the reason for its failure.

    Attributes:
        path: File of the model; None if the tool failed.
        pairs: Number of Q/DQ pairs.
        reason: Reason for the failure, or "".
        method: Calibration method of the tool if it lacks that of the experiment; otherwise "".
        seconds: Wall-clock seconds of the tool; None for an imported model.
    """

    name: str
    path: Path | None
    pairs: int = 0
    reason: str = ""
    method: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRequest:
    """Model, data and options for PTQ tools.

    Attributes:
        source: Name of the model in messages.
        data: Calibration batches, which are read only if no cached model exists.
        data_key: Text that differs if the model, the data or the preprocessing differ; part of the key of the cache.
        options: Keyword arguments of the tool besides `metric`.
        own_sizes: Whether batches differ in shape from the inputs of the model, which no tool accepts.
        metric: Evaluator and bound of the search, for tools that keep a bound; None without a bound.
    """

    model_file: Path
    source: str
    data: Iterable[Mapping[str, Array]]
    data_key: str
    options: PtqOptions
    own_sizes: bool = False
    metric: MetricRequest | None = None


def run_external_tool(name: str, request: QuantizationRequest, observer: Observer) -> ExternalModel:
    """Quantize with another tool, or return its cached result for the same model, data and options.

    A tool without the calibration method of the experiment uses its nearest method. If the tool cannot run or fails,
    the observer receives the reason, which is also `reason` of the result.

    Args:
        name: Name of the tool in `harness.accuracy.tools.ptq`.
        request: Model, data and options.
        observer: Receiver of progress and failures.

    Raises:
        UserError: The disk is full.
    """
    options, tool = request.options, TOOLS[name]
    metric = request.metric if tool.controls_accuracy else None
    reason = unavailable_reason(name, options.get("precision", "int8"))
    if request.own_sizes:
        reason = reason or "it takes samples of one size; pad or cut the calibration samples, or leave the tool out"
    if tool.controls_accuracy and metric is None:
        reason = reason or "keeps a bound on accuracy, but the objective has none"
    elif metric is not None and uses_objects(metric.evaluator.use, metric.evaluator.params):
        reason = reason or "its process cannot call a metric of this program; put it into a module, named module:NAME"
    if reason:
        observer.say(f"{request.source}: {name} cannot run: {reason}")
        return ExternalModel(name=name, path=None, reason=reason)
    requested = options.get("method", "minmax")
    method = tool.nearest_method(requested)
    options = {**options, "method": method}
    if name == SIGNED_ORT_TOOL:
        limit = load_dialect(options["dialect_name"]).weight_limit
        signed = ONNXRUNTIME_S8_7BIT if limit == ONNXRUNTIME_S8_7BIT.weight_limit else ONNXRUNTIME_S8
        options = {**options, "dialect_name": signed.name}
    substitute = method if (remark := method_substitute(name, requested)) else ""
    if remark:
        observer.say(f"{request.source}: {remark}")
    is_ir = name in _IR_TOOLS and options["dialect_name"].startswith("openvino")
    parts = [
        name,
        ptq_fingerprint(options, name),
        f"{request.data_key}{metric or ''}",
        _installed_tools(tuple(sys.path)),
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
    path = cache_dir() / "ptq" / key / f"{name}{IR_SUFFIX if is_ir else '.onnx'}"
    seconds_file = path.with_suffix(".seconds")
    if not path.exists():
        with observer.work(f"{request.source}: quantize with {name}", 1) as step, explain_write_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                seconds = PTQ_FUNCTIONS[name](request.model_file, path, request.data, metric=metric, **options)
            except BuildFailed as error:
                observer.say(f"{request.source}: {name} failed: {error}")
                return ExternalModel(name=name, path=None, reason=str(error), method=substitute)
            seconds_file.write_text(f"{seconds:.2f}", encoding="ascii")
            step.advance()
    taken_s = float(seconds_file.read_text(encoding="ascii")) if seconds_file.exists() else None
    return ExternalModel(name=name, path=path, pairs=count_pairs(path), method=substitute, seconds=taken_s)


def tool_remarks(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each setting that a PTQ tool in the experiment's `initial` or `baselines` does not support."""
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
    """Write the model with every point quantized in symmetric INT8, as the simplest tools do, and return it.

    The features of a dialect for accuracy or speed (UINT8 data, zero points) are not used. If the model keeps its
    accuracy even so, a bound on accuracy excludes no placement.

    Args:
        model: The float model.
        dialect: Dialect of the runtime.
        ranges: Smallest and largest value of each activation of `space` by tensor name.
        work: Existing folder for the new file, `extreme.onnx`.
        space: Space of the model without points that lack a range.

    Raises:
        UserError: The disk is full.
    """
    plain = replace(
        dialect, activation="int8", symmetric_activation=True, unsigned_positive=False, affine_ops=frozenset()
    )
    resolved, path = space.resolve(space.quantize_all()), work / "extreme.onnx"
    inserter = Inserter(model, plain, ranges)
    with explain_write_errors(path):
        inserter.export(resolved, path)
    return ExternalModel(name=FULLY_QUANTIZED, path=path, pairs=inserter.count_pairs(resolved))


@functools.cache  # reading the name of everything on the path takes about 30 ms
def _installed_tools(path: tuple[str, ...]) -> tuple[str, ...]:
    found = (dist for dist in distributions(path=list(path)) if dist.name and dist.name.startswith(PTQ_PACKAGES))
    return tuple(sorted(f"{dist.name} {dist.version}" for dist in found))
