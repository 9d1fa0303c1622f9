"""Backend `qdq`: quantize each layer to its own precision, in the dialect of a runtime."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.ranges import calibrate
from harness.accuracy.calibration.usable_ranges import Ranges, finite_ranges, range_warnings
from harness.base.errors import UserError, suggest_names
from harness.compat.tao_specs.layers import assign_layers, match_skip_names
from harness.compat.tao_specs.spec import Dtype, LayerSpec
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model, Node
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialects import Dialect, load_dialect
from harness.graph.rules.operator_sets import LINEAR_OPS
from harness.graph.rules.placement_rules import first_violated_rule
from harness.graph.rules.points import QuantizationPoint, add_required_edges, find_points
from harness.plugins import registry
from harness.plugins.api import Array

logger = logging.getLogger(__name__)

MIN_OPSET = 17
DEFAULT_DIALECT = "tensorrt"
#: Precision of `harness.graph` by dtype of a spec.
DTYPE_PRECISIONS: Mapping[Dtype, str] = {"int8": "int8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8e5m2", "native": "float"}
EMULATED_PRECISION = "fp8e5m2"  # in ONNX and OpenVINO; in no dialect, because no kernel of TensorRT takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseRequest:
    """Model and layers to quantize.

    Attributes:
        shapes: Static shape of each input.
        layers: Entries of `layers`; the first one that matches a node applies.
        skip_names: Node names, wildcards or modules that stay native.
        method: Range estimator of activations.
        dialect: Name of the dialect of the Q/DQ pairs.
    """

    model_path: Path
    source: str
    shapes: Mapping[str, tuple[int, ...]]
    layers: Sequence[LayerSpec]
    skip_names: Sequence[str]
    method: str
    dialect: str = DEFAULT_DIALECT


def parse_builtin_arguments(given: Mapping[str, Any]) -> str:
    """Return the dialect in `backend_kwargs`, or raise `UserError` for another key or an unknown dialect."""
    for name in given:
        if name != "dialect":
            raise UserError(
                f"backend_kwargs.{name}: backend 'qdq' takes only 'dialect'; {suggest_names(name, ('dialect',))} "
                "(for ModelOpt's arguments set backend: modelopt.onnx)"
            )
    name = str(given.get("dialect", DEFAULT_DIALECT))
    registry.find_entry_point("dialect", name)
    return name


def quantize_builtin(
    request: LayerwiseRequest, output_path: Path, batches: Iterable[Mapping[str, Array]], work: Path
) -> Path:
    """Quantize a model layer by layer.

    Args:
        output_path: Path of the Q/DQ model; the return value.
        batches: Calibration data, input arrays by name; read once.

    Raises:
        UserError: The dialect lacks a dtype, a layer has two dtypes, or nothing can be quantized.
    """
    precisions = _requested_precisions(request.layers)
    dialect = _load_dialect(request.dialect, precisions)
    min_opset = max(MIN_OPSET, dialect.opset(precisions))
    model = load(request.model_path, source=request.source, shapes=request.shapes, min_opset=min_opset)
    selected = _LayerSelector(model, dialect, precisions).select_edges(request)
    tensors = {edge.tensor for edge in selected if edge.tensor not in model.constants}
    float_file = save_to_folder(model, work)
    ranges: Ranges = calibrate(float_file, tensors, batches, method=request.method, source=request.source)
    for remark in range_warnings(ranges):
        logger.warning("%s: %s", request.source, remark)
    usable = finite_ranges(ranges)
    float_nodes = {e.consumer for e in selected if e.tensor not in model.constants and e.tensor not in usable}
    edges = {e: p for e, p in selected.items() if e.consumer not in float_nodes or e.tensor in usable}
    return Inserter(model, dialect, usable).export(tuple(sorted(edges.items())), output_path)


def _requested_precisions(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the precisions of all layers in order of appearance."""
    for i, layer in enumerate(layers):
        if len(set(layer.dtypes)) > 1:
            weights, activations = layer.dtypes
            raise UserError(
                f"layers.{i}: weights in {weights} and activations in {activations}: no runtime multiplies the two; "
                "use one dtype for both, or native for one"
            )
    precisions = dict.fromkeys(DTYPE_PRECISIONS[dtype] for layer in layers for dtype in layer.dtypes)
    if not precisions:
        raise UserError("quantize.layers: every dtype is native, so there is nothing to quantize")
    return tuple(precisions)


def _load_dialect(name: str, precisions: Sequence[str]) -> Dialect:
    dialect = load_dialect(name)
    names = {precision: dtype for dtype, precision in DTYPE_PRECISIONS.items()}
    for precision in precisions:
        base = "fp8" if precision == EMULATED_PRECISION else precision
        if base not in dialect.precisions:
            offered = ", ".join(names[p] for p in sorted(dialect.precisions) if p in names)
            raise UserError(f"layers: dialect {name!r} has {offered}, but got {names[precision]}")
    if EMULATED_PRECISION in precisions:
        if name == DEFAULT_DIALECT:
            logger.warning("layers: TensorRT takes FP8 only as E4M3: it rejects models with fp8_e5m2")
        return replace(dialect, precisions=dialect.precisions | {EMULATED_PRECISION})
    return dialect


class _LayerSelector:
    """Selection of the edges of `layers`."""

    def __init__(self, model: Model, dialect: Dialect, precisions: Sequence[str]) -> None:
        self._model = model
        self._dialect = dialect
        self._points = find_points(model, dialect, precisions)

    def select_edges(self, request: LayerwiseRequest) -> dict[Any, str]:
        """Return the precision of each quantized edge; raise `UserError` if there is none."""
        nodes = self._model.nodes
        skipped = match_skip_names(nodes, request.skip_names)
        layers = assign_layers(nodes, request.layers, LINEAR_OPS)
        assigned = {n.index: layer for n, layer in zip(nodes, layers, strict=True) if layer and n.name not in skipped}
        selected: dict[Any, str] = {}
        for index, layer in assigned.items():
            for point in self._points[index]:
                selected.update(self._point_edges(point, layer))
        if self._dialect.quantize_outputs:
            for edge, precision in self._output_edges(assigned, selected, skipped):
                selected.setdefault(edge, precision)
        required = add_required_edges(self._model, self._dialect, self._points, selected)
        selected |= dict.fromkeys(required - selected.keys(), "int8")
        self._warn_forbidden(request.layers, assigned, {edge.consumer for edge in selected})
        if not selected:
            raise UserError(f"{request.source}: nothing is left to quantize; check layers and skip_names")
        return selected

    def _point_edges(self, point: QuantizationPoint, layer: LayerSpec) -> Iterator[tuple[Any, str]]:
        linear = self._model.nodes[point.node].op in self._dialect.linear_ops
        for edge in point.edges:
            constant = edge.tensor in self._model.constants
            precision = DTYPE_PRECISIONS[(layer.weights if constant and linear else layer.activations).dtype]
            if precision in point.precisions:
                yield edge, precision

    def _output_edges(
        self, assigned: Mapping[int, LayerSpec], selected: Mapping[Any, str], skipped: frozenset[str]
    ) -> Iterator[tuple[Any, str]]:
        """Yield edges from quantized linear operators to their consumers, for dialects that fuse only then."""
        quantized = {edge.consumer for edge in selected}
        for index, layer in assigned.items():
            node = self._model.nodes[index]
            if node.op not in self._dialect.linear_ops or node.name not in quantized:
                continue
            for reader, slot in self._model.consumers.get(node.outputs[0], ()):
                points = [p for p in self._points[reader] if any(e.slot == slot for e in p.edges)]
                if self._model.nodes[reader].name not in skipped:
                    yield from (pair for point in points for pair in self._point_edges(point, layer))

    def _warn_forbidden(
        self, layers: Sequence[LayerSpec], assigned: Mapping[int, LayerSpec], quantized: set[str]
    ) -> None:
        """Log each entry of `layers` none of whose nodes the placement rules allow to quantize."""
        for i, layer in enumerate(layers):
            nodes = [self._model.nodes[index] for index, entry in assigned.items() if entry is layer]
            if layer.dtypes and nodes and not any(node.name in quantized for node in nodes):
                logger.warning(
                    "layers.%d: none of the %d nodes of %r may be quantized for %s; %s", i, len(nodes),
                    layer.module_name, self._dialect.name, self._forbidden_reason(nodes, layer),
                )  # fmt: skip

    def _forbidden_reason(self, nodes: Sequence[Node], layer: LayerSpec) -> str:
        precision = DTYPE_PRECISIONS[layer.dtypes[-1]]
        rules = (first_violated_rule(self._model, self._dialect, node, 0, precision) for node in nodes)
        counts = Counter(rule.text for rule in rules if rule is not None)
        return " ".join(text for text, _ in counts.most_common(1)) or "their only quantizable inputs are constants"
