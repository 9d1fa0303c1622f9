"""Layers of a built engine with their times, and the fusion of each quantized edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import registry
from harness.api import Candidate, Layer, SupportsLayers
from harness.config.sections import PluginSpec
from harness.explain.layer_kinds import is_low_precision
from harness.explain.layer_timing import time_layers
from harness.graph.model import Model
from harness.records import Failed
from harness.report.load.cell_files import EdgeFusion
from harness.timing.workers.in_process import as_outcome
from search.space import Resolved

__all__ = ["iter_edge_fusions", "read_layers"]

LAYER_TIMING_RUNS = 50


def read_layers(backend: PluginSpec, candidate: Candidate, workdir: Path) -> tuple[Layer, ...] | Failed:
    """The layers of a candidate's engine with their times, where the runtime tells; none where it does not.

    Args:
        backend: With the parameters of the engines that are compared; counting is switched on here.
        candidate: What is built, in this process.
        workdir: A scratch folder.
    """
    counting = (
        {"profile": True} if "profile" in registry.plugin_signature("benchmarker", backend.use).parameters else {}
    )
    benchmarker = registry.create_plugin("benchmarker", backend.use, {**backend.params, **counting})
    if not isinstance(benchmarker, SupportsLayers):
        return ()
    return as_outcome("build", lambda: time_layers(benchmarker, candidate, workdir, LAYER_TIMING_RUNS).layers)


def iter_edge_fusions(resolved: Resolved, model: Model, layers: Sequence[Layer]) -> Iterator[EdgeFusion]:
    """Whether each quantized edge was fused into its consumer, by the precision that the consumer's layer computes in.

    Args:
        resolved: The quantized edges.
        model: The float model.
        layers: Of the quantized engine; those that tell no origin say nothing.
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
            fate=_fusion_state(layer),
            layer="" if layer is None else f"{layer.kind} ({layer.precision})",
        )


def _fusion_state(layer: Layer | None) -> str:
    if layer is None or not layer.precision:
        return "unknown"
    return "fused" if is_low_precision(layer.precision) else "alone"
