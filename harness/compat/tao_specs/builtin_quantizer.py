"""Backend `qdq`: each layer in the precision that the spec asks for it, in the dialect of a runtime."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import registry
from harness.accuracy.calibration.ranges import Method, Ranges, calibrate, finite_ranges, range_warnings
from harness.api import Array
from harness.compat.tao_specs.selection import assign_layers, match_skip_names
from harness.compat.tao_specs.spec import Dtype, LayerSpec
from harness.errors import UserError, suggest_names
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model, Node
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialect_lookup import load_dialect
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import LINEAR_OPS
from harness.graph.rules.placement_rules import first_violated_rule
from harness.graph.rules.points import QuantizationPoint, find_points

__all__ = ["DTYPE_PRECISIONS", "LayerwiseRequest", "parse_builtin_arguments", "quantize_builtin"]

logger = logging.getLogger(__name__)

MIN_OPSET = 17
DTYPE_PRECISIONS: Mapping[Dtype, str] = MappingProxyType(
    {"int8": "int8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8e5m2", "native": "float"}
)
"""Dtypes of a spec as the graph room calls them."""
EMULATED_PRECISION = "fp8e5m2"
"""ONNX and OpenVINO have it; no dialect offers it to a search, because no kernel of TensorRT takes it."""
DEFAULT_DIALECT = "tensorrt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseRequest:
    """What is to be quantized, and how.

    Attributes:
        model_path: Float model.
        source: What messages call it.
        shapes: Static shape of each input.
        layers: First match counts.
        skip_names: Names, wildcards or modules that stay native.
        method: How ranges are taken from the data.
        dialect: Name of the form of Q/DQ.
    """

    model_path: Path
    source: str
    shapes: Mapping[str, tuple[int, ...]]
    layers: Sequence[LayerSpec]
    skip_names: Sequence[str]
    method: Method
    dialect: str = DEFAULT_DIALECT


def parse_builtin_arguments(given: Mapping[str, Any]) -> str:
    """The dialect that `backend_kwargs` of this backend names.

    Raises:
        UserError: Another key, or no dialect of that name.
    """
    for name in given:
        if name != "dialect":
            raise UserError(
                f"backend_kwargs.{name}: backend 'qdq' takes 'dialect' alone; {suggest_names(name, ('dialect',))} "
                "(ModelOpt's arguments go with backend: modelopt.onnx)"
            )
    name = given.get("dialect", DEFAULT_DIALECT)
    registry.find_entry_point("dialect", str(name))
    return str(name)


def quantize_builtin(
    order: LayerwiseRequest, output_path: Path, batches: Iterable[Mapping[str, Array]], work: Path
) -> Path:
    """Quantize as the layers say.

    Args:
        order: What and how.
        output_path: Where the Q/DQ model goes.
        batches: Calibration data, input arrays by name; read once.
        work: Scratch folder.

    Returns:
        `output_path`.

    Raises:
        UserError: A dtype that the dialect does not have, two dtypes in one layer, or nothing that may be quantized.
    """
    precisions = _requested_precisions(order.layers)
    dialect = _load_dialect(order.dialect, precisions)
    model = load(
        order.model_path, source=order.source, shapes=order.shapes, min_opset=max(MIN_OPSET, dialect.opset(precisions))
    )
    chosen = _LayerSelector(model, dialect, precisions).select_edges(order)
    tensors = {edge.tensor for edge in chosen if edge.tensor not in model.constants}
    ranges: Ranges = calibrate(save_to_folder(model, work), tensors, batches, method=order.method, source=order.source)
    for remark in range_warnings(ranges):
        logger.warning("%s: %s", order.source, remark)
    known = finite_ranges(ranges)
    float_nodes = {e.consumer for e in chosen if e.tensor not in model.constants and e.tensor not in known}
    kept = {e: p for e, p in chosen.items() if e.consumer not in float_nodes or e.tensor in known}
    return Inserter(model, dialect, known).export(tuple(sorted(kept.items())), output_path)


def _requested_precisions(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """What is asked for, in order of appearance."""
    found: dict[str, None] = {}
    for i, layer in enumerate(layers):
        dtypes = [t.dtype for t in (layer.weights, layer.activations) if t.dtype != "native"]
        if len(set(dtypes)) > 1:
            raise UserError(
                f"layers.{i}: weights in {dtypes[0]} and activations in {dtypes[1]}: no runtime multiplies the two; "
                "use one dtype for both, or native for one"
            )
        found.update(dict.fromkeys(DTYPE_PRECISIONS[dtype] for dtype in dtypes))
    if not found:
        raise UserError("quantize.layers: every dtype is native, so there is nothing to quantize")
    return tuple(found)


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
            logger.warning("layers: TensorRT takes FP8 as E4M3 alone: it will refuse to build a model with fp8_e5m2")
        return replace(dialect, precisions=dialect.precisions | {EMULATED_PRECISION})
    return dialect


class _LayerSelector:
    """Turns entries of `layers` into edges."""

    def __init__(self, model: Model, dialect: Dialect, precisions: Sequence[str]) -> None:
        self._model = model
        self._dialect = dialect
        self._points = find_points(model, dialect, precisions)

    def select_edges(self, order: LayerwiseRequest) -> dict[Any, str]:
        """Precision by edge.

        Raises:
            UserError: Nothing may be quantized.
        """
        nodes = self._model.nodes
        out = match_skip_names(nodes, order.skip_names)
        layers = assign_layers(nodes, order.layers, LINEAR_OPS)
        wanted = {
            node.index: layer for node, layer in zip(nodes, layers, strict=True) if layer and node.name not in out
        }
        chosen: dict[Any, str] = {}
        for index, layer in wanted.items():
            for point in self._points[index]:
                chosen.update(self._point_edges(point, layer))
        if self._dialect.quantize_outputs:
            for edge, precision in self._output_edges(wanted, chosen, out):
                chosen.setdefault(edge, precision)
        self._warn_forbidden(order.layers, wanted, {edge.consumer for edge in chosen})
        if not chosen:
            raise UserError(f"{order.source}: nothing is left to quantize; look at layers and skip_names")
        return chosen

    def _point_edges(self, point: QuantizationPoint, layer: LayerSpec) -> Iterator[tuple[Any, str]]:
        linear = self._model.nodes[point.node].op in self._dialect.linear_ops
        for edge in point.edges:
            constant = edge.tensor in self._model.constants
            precision = DTYPE_PRECISIONS[(layer.weights if constant and linear else layer.activations).dtype]
            if precision in point.precisions:
                yield edge, precision

    def _output_edges(
        self, wanted: Mapping[int, LayerSpec], chosen: Mapping[Any, str], out: frozenset[str]
    ) -> Iterator[tuple[Any, str]]:
        """What reads the result of a quantized linear operator, where the dialect fuses it only then."""
        quantized = {edge.consumer for edge in chosen}
        for index, layer in wanted.items():
            node = self._model.nodes[index]
            if node.op not in self._dialect.linear_ops or node.name not in quantized:
                continue
            for reader, slot in self._model.consumers.get(node.outputs[0], ()):
                points = [p for p in self._points[reader] if any(e.slot == slot for e in p.edges)]
                if self._model.nodes[reader].name not in out:
                    yield from (pair for point in points for pair in self._point_edges(point, layer))

    def _warn_forbidden(
        self, layers: Sequence[LayerSpec], wanted: Mapping[int, LayerSpec], quantized: set[str]
    ) -> None:
        """Name the entries that ask for what the rules forbid everywhere."""
        for i, layer in enumerate(layers):
            meant = [self._model.nodes[index] for index, found in wanted.items() if found is layer]
            asked = {layer.weights.dtype, layer.activations.dtype} != {"native"}
            if asked and meant and not any(node.name in quantized for node in meant):
                logger.warning(
                    "layers.%d: none of the %d nodes of %r may be quantized for %s; %s", i, len(meant),
                    layer.module_name, self._dialect.name, self._forbidden_reason(meant, layer),
                )  # fmt: skip

    def _forbidden_reason(self, nodes: Sequence[Node], layer: LayerSpec) -> str:
        precision = DTYPE_PRECISIONS[
            (layer.activations if layer.activations.dtype != "native" else layer.weights).dtype
        ]
        rules = (first_violated_rule(self._model, self._dialect, node, 0, precision) for node in nodes)
        counts = Counter(rule.text for rule in rules if rule is not None)
        return " ".join(text for text, _ in counts.most_common(1)) or "constants alone are not quantized there"
