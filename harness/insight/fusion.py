"""Fusion of a model: operators that run quantized, Q/DQ nodes that were not fused, added layers, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.graph.qdq.qdq_graph import QUANTIZE, QDQGraph
from harness.insight.layers import classify_layer, is_low_precision
from harness.plugins.api import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionFinding:
    """Deviation of an engine from the Q/DQ pairs of its model.

    Attributes:
        kind: "float operator" (quantized in the file, computed in float), "unfused node" (a Q or DQ node that is a
            separate layer), or "reformat" (a layer that only changes layout or type).
        name: Name of the model's node, or of the layer if no node became it.
        reason: Probable reason, inferred from model and engine.
        time_ms: Time of its layer; None if it was not measured.
    """

    kind: str
    name: str
    reason: str
    time_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionReport:
    """Precision and fusion of the operators of a model in an engine.

    Attributes:
        runtime: Name, version and options of the runtime.
        layers: Layers of the engine, in order.
        fused: Number of Q and DQ nodes of the file that a layer absorbed, by name of the layer.
        precision: Precision of the layer that computes a linear operator, by name of the operator; "" if unknown.
        quantized_in_file: Number of linear operators whose data and weight are quantized in the file.
        findings: Deviations, the slowest first.
        whole_ms: Median time of one inference of the profiled engine in ms.
    """

    runtime: str
    layers: tuple[Layer, ...]
    fused: dict[str, int]
    precision: dict[str, str]
    quantized_in_file: int
    findings: tuple[FusionFinding, ...]
    whole_ms: float

    @property
    def low(self) -> int:
        """Return the number of linear operators that run quantized."""
        return sum(map(is_low_precision, self.precision.values()))


def explain_layers(
    layers: Sequence[Layer], graph: QDQGraph, *, runtime: str, quantize_outputs: bool, whole_ms: float
) -> FusionReport:
    """Return the report on the operators of a file in an engine, with deviations and their reasons.

    Args:
        graph: Q/DQ structure of the file.
        runtime: Name, version and options, as text.
        quantize_outputs: Whether the runtime fuses a linear operator only if its output is quantized.
        whole_ms: Median time of one inference in ms.
    """
    layer_of = _layer_of_operator(layers, graph)
    precision = {name: layer_of[name].precision if name in layer_of else "" for name in graph.linear}
    findings = [
        *(
            FusionFinding(
                kind="float operator",
                name=name,
                reason=_float_reason(name, graph, quantize_outputs, precision),
                time_ms=layer_of[name].time_ms,
            )
            for name, (data, weight) in graph.linear.items()
            if name in layer_of and (data or weight) and not is_low_precision(precision[name])
        ),
        *_unfused_pairs(layers, graph, precision),
    ]
    return FusionReport(
        runtime=runtime,
        layers=tuple(layers),
        fused=_fused_pair_counts(layers, graph),
        precision=precision,
        quantized_in_file=sum(data is not None and weight is not None for data, weight in graph.linear.values()),
        findings=tuple(sorted(findings, key=lambda finding: -(finding.time_ms or 0.0))),
        whole_ms=whole_ms,
    )


def _fused_pair_counts(layers: Sequence[Layer], graph: QDQGraph) -> dict[str, int]:
    counts = {
        layer.name: sum(name in graph.pairs for name in layer.origin)
        for layer in layers
        if classify_layer(layer, graph.pairs, graph.operators) != "qdq"
    }
    return {name: count for name, count in counts.items() if count}


def _layer_of_operator(layers: Sequence[Layer], graph: QDQGraph) -> dict[str, Layer]:
    """Return the layer of each linear operator by name; if several name it, one that computes."""
    layer_of: dict[str, Layer] = {}
    for layer in layers:
        computes = classify_layer(layer, graph.pairs, graph.operators) == "compute"
        for origin in (*layer.origin, layer.name):
            name = _original_node(origin, graph) if computes else origin
            if name in graph.linear and (computes or name not in layer_of):
                layer_of[name] = layer
    return layer_of | _match_renamed_layers(
        [layer for layer in layers if layer not in layer_of.values()], graph, layer_of
    )


def _match_renamed_layers(layers: Sequence[Layer], graph: QDQGraph, matched: Mapping[str, Layer]) -> dict[str, Layer]:
    """Return the layers of linear operators that no layer names, found by names of nodes folded into the operators."""
    renamed: dict[str, Layer] = {}
    before = -1
    while len(renamed) > before:  # a match may leave a single candidate for another layer
        before = len(renamed)
        for layer in layers:
            named = [name for origin in (*layer.origin, layer.name) for name in graph.folded_into.get(origin, ())]
            unmatched = [name for name in dict.fromkeys(named) if name not in matched and name not in renamed]
            computes = classify_layer(layer, graph.pairs, graph.operators) == "compute"
            if computes and len(unmatched) == 1 and layer not in renamed.values():  # two candidates are ambiguous
                renamed[unmatched[0]] = layer
    return renamed


def _original_node(origin: str, graph: QDQGraph) -> str:
    """Return the model's node of a name: runtimes add suffixes, as in "MatMul_7/DequantizationMultiply"."""
    name = origin
    while name and name not in graph.operators:
        name = name.rpartition("/")[0]
    return name or origin


def _float_reason(name: str, graph: QDQGraph, quantize_outputs: bool, precision: dict[str, str]) -> str:
    """Return the most reliable reason why a linear operator does not run quantized."""
    data, weight = graph.linear[name]
    if data is None or weight is None:
        return f"only its {'weight' if data is None else 'data'} is quantized in the file"
    for pair, text in graph.unfusable_reasons.items():
        if name in graph.pair_neighbours[pair][1]:
            return f"{pair}: {text}"
    readers_of_output = graph.linear_readers.get(name, ())
    if quantize_outputs and QUANTIZE not in readers_of_output:
        readers = ", ".join(dict.fromkeys(readers_of_output)) or "the model's output"
        return f"its output is not quantized (read by {readers}), and this runtime fuses only where it is"
    operator = graph.operators[name]
    alike = [
        other for other, op in graph.operators.items() if op == operator and is_low_precision(precision.get(other, ""))
    ]
    if alike:
        return f"its neighbors match no fusion pattern of the runtime; those of {len(alike)} other {operator} do"
    return f"the runtime has no quantized kernel for {operator} with {data} data and {weight} weight"


def _unfused_pairs(layers: Sequence[Layer], graph: QDQGraph, precision: dict[str, str]) -> list[FusionFinding]:
    findings = []
    for layer in layers:
        kind = classify_layer(layer, graph.pairs, graph.operators)
        if kind == "qdq":
            name = next((origin for origin in (*layer.origin, layer.name) if origin in graph.pairs), layer.name)
            reason = _unfused_reason(name, graph, precision)
            if reason:
                findings.append(FusionFinding(kind="unfused node", name=name, reason=reason, time_ms=layer.time_ms))
        elif kind == "reformat":
            reason = f"{layer.kind} added by the runtime"
            findings.append(FusionFinding(kind="reformat", name=layer.name, reason=reason, time_ms=layer.time_ms))
    return findings


def _unfused_reason(name: str, graph: QDQGraph, precision: dict[str, str]) -> str:
    """Return the reason why a Q or DQ node runs as a separate layer, or ""."""
    if name in graph.unfusable_reasons:
        return graph.unfusable_reasons[name]
    if name not in graph.pair_neighbours:
        return "added by the runtime between a quantized layer and a float one"
    source, users = graph.pair_neighbours[name]
    in_float = [user for user in users if precision.get(user) and not is_low_precision(precision[user])]
    if in_float:
        return f"its consumer {in_float[0]} runs in {precision[in_float[0]]}"
    if source.startswith("input "):
        return f"{source} is float, so a separate layer quantizes it"
    unknown = [user for user in users if not precision.get(user)]
    if unknown:
        operators = ", ".join(dict.fromkeys(graph.operators.get(user, user) for user in unknown))
        return f"no quantized kernel includes it; it is read by {operators}"
    return f"the kernel of its producer {source} does not write a quantized output"
