"""Layers of a built engine: kinds, times without disturbances, and fusion of quantized edges."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.config.sections import PluginSpec
from harness.graph.io.digests import digest_file
from harness.graph.model import Model
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Candidate, Layer, SupportsLayers
from harness.results.task_files import EdgeFusion
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from harness.workers.in_process import as_outcome
from search.space import Resolved

Kind = Literal["compute", "qdq", "reformat", "other"]

COMPUTE_PATTERN = re.compile(
    r"(conv(olution|transpose)?$|qlinearconv|gemm|matmul|matrixmultiply|matrixmultiplication|fullyconnected|"
    r"deconvolution|attention|lstm|gru)",
    re.IGNORECASE,
)
QDQ_PATTERN = re.compile(r"(fakequantize|quantizelinear|^de?quantize|^scale$)", re.IGNORECASE)
REFORMAT_PATTERN = re.compile(r"(reorder|reformat|^convert$|^cast$|^transpose$|nopreformat)", re.IGNORECASE)
# Precisions that only Q/DQ pairs cause, in the names of OpenVINO, ONNX Runtime and TensorRT.
LOW_PRECISIONS = frozenset({
    "int8", "uint8", "i8", "u8", "fp8", "f8e4m3", "f8e4m3fn", "f8e5m2", "float8e4m3fn", "float8e5m2", "int4", "uint4",
    "i4", "u4", "fp4",
})  # fmt: skip
MAX_TIMED_ENGINES = 3
MAX_QUIET_STRETCH = 1.1
LAYER_TIMING_RUNS = 50


def is_low_precision(precision: str) -> bool:
    """Return whether a layer computes on quantized data."""
    return precision.lower() in LOW_PRECISIONS


def classify_layer(layer: Layer, pairs: Collection[str], nodes: Collection[str]) -> Kind:
    """Return the kind of a layer.

    A layer whose origin consists of Q/DQ nodes alone is an unfused pair, whatever its type ("Subgraph" in OpenVINO,
    "Scale" in TensorRT). A layer without a node of the model was added by the runtime.

    Args:
        pairs: Names of the model's Q/DQ nodes.
        nodes: Names of its other nodes.
    """
    if QDQ_PATTERN.search(layer.kind) or (layer.origin and all(name in pairs for name in layer.origin)):
        return "qdq"
    if COMPUTE_PATTERN.search(layer.kind):
        return "compute"
    return "reformat" if REFORMAT_PATTERN.search(layer.kind) and _is_added_layer(layer, nodes) else "other"


def _is_added_layer(layer: Layer, nodes: Collection[str]) -> bool:
    """Return whether the runtime added the layer; a Transpose or Cast of the model itself is no reformat."""
    return (
        not any(name in nodes for name in layer.origin)
        or "reorder" in layer.kind.lower()
        or "reformat" in layer.kind.lower()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimings:
    """Layer times of one engine.

    Attributes:
        layers: Layers with mean times.
        readings_ms: Latencies of the averaged inferences.
    """

    layers: tuple[Layer, ...]
    readings_ms: Sequence[float]

    @property
    def whole_ms(self) -> float:
        """Return the median time of an inference."""
        return statistics.median(self.readings_ms)

    @property
    def stretch(self) -> float:
        """Return mean over median time; the excess over 1 is the share of interruptions in the means."""
        return statistics.fmean(self.readings_ms) / self.whole_ms


def time_layers(benchmarker: Any, candidate: Candidate, workdir: Path, runs: int) -> LayerTimings:
    """Build a candidate in this process, run it, and return the time of each layer.

    Runtimes report means, in which an interruption adds to the layer that it falls in. An engine whose mean is 10 %
    above its median is therefore built and timed again, up to three times; the times with the least `stretch` are
    returned. The benchmarker is a `harness.plugins.api.SupportsLayers`.

    Raises:
        CandidateError: The candidate cannot be built or run.
    """
    found: list[LayerTimings] = []
    while len(found) < MAX_TIMED_ENGINES and not any(each.stretch < MAX_QUIET_STRETCH for each in found):
        folder = workdir / str(len(found))
        folder.mkdir(parents=True, exist_ok=True)
        artifact = benchmarker.build(candidate, folder)
        with benchmarker.open(artifact) as probe:
            readings_ms = probe.sample(runs)
            found.append(LayerTimings(layers=tuple(benchmarker.layers(artifact)), readings_ms=readings_ms))
    return min(found, key=lambda each: each.stretch)


def open_profiled(backend: PluginSpec) -> Any:
    """Return the benchmarker of a backend, with per-layer counters switched on if it has that parameter."""
    params = dict(backend.params)
    if "profile" in registry.plugin_signature("benchmarker", backend.use).parameters:
        params.setdefault("profile", True)
    return registry.create_plugin("benchmarker", backend.use, params)


def read_layers(backend: PluginSpec, candidate: Candidate, workdir: Path) -> tuple[Layer, ...] | Failed:
    """Return the layers of a candidate's engine with their times; none if the runtime does not report layers.

    Args:
        backend: Backend with the parameters of the engines that are compared; counters are switched on here.
    """
    params = {name: value for name, value in backend.params.items() if name != "profile"}
    backend = backend.model_copy(update={"params": params})
    if not isinstance(open_profiled(backend), SupportsLayers):
        return ()
    return as_outcome("build", lambda: time_layers_isolated(backend, candidate, workdir, LAYER_TIMING_RUNS)[0].layers)


def time_layers_isolated(
    backend: PluginSpec, candidate: Candidate, workdir: Path, runs: int
) -> tuple[LayerTimings, Mapping[str, Any]]:
    """Return the layer times of a candidate, measured in the helper process, and the facts of the runtime.

    Raises:
        CandidateError: The candidate cannot be built or run.
        UserError: The process crashed or exceeded a limit.
    """
    path = candidate.source()
    what = f"{path.name}: the build and run on {backend.use}"
    return call_in_helper_process(what, _time_layers, backend, path, workdir, runs, factor=RUNTIME_FACTOR)


def _time_layers(backend: PluginSpec, path: Path, workdir: Path, runs: int) -> tuple[LayerTimings, Mapping[str, Any]]:
    made = open_profiled(backend)
    candidate = Candidate(digest=digest_file(path)[:16], edges=(), source=lambda: path)
    return time_layers(made, candidate, workdir, runs), dict(made.describe())


def iter_edge_fusions(resolved: Resolved, model: Model, layers: Sequence[Layer]) -> Iterator[EdgeFusion]:
    """Yield the fusion state of each quantized edge, from the precision of the layer that its consumer became.

    The state is "fused" if that layer runs in a low precision, else "not fused". It is "unknown" if no layer names the
    consumer, or the layer has no precision, and for outputs of the model.

    Args:
        resolved: Quantized edges with their precision.
        model: Model that the edges are of.
        layers: Layers of the quantized engine; those without an origin are ignored.
    """
    owner = {name: layer for layer in layers for name in layer.origin}
    names = {node.name for node in model.nodes}
    for edge, precision in resolved:
        layer = owner.get(edge.consumer) if edge.consumer in names else None
        yield EdgeFusion(
            tensor=edge.tensor,
            consumer=edge.consumer,
            slot=edge.slot,
            precision=precision,
            fusion=_fusion_state(layer),
            layer="" if layer is None else f"{layer.kind} ({layer.precision})",
        )


def _fusion_state(layer: Layer | None) -> str:
    if layer is None or not layer.precision:
        return "unknown"
    return "fused" if is_low_precision(layer.precision) else "not fused"
