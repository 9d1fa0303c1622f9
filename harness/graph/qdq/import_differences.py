"""Differences between the Q/DQ file of another tool and the placement that a space has for it, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from harness.graph.model import Model, Node
from harness.graph.qdq.import_placement import ImportDifference, ImportedPlacement
from harness.graph.qdq.qdq_graph import PairForm, QDQGraph
from harness.graph.rules.agreements import jointly_quantized_inputs
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.placement_rules import first_violated_rule
from search.space import Edge, Resolved, Space


def find_differences(
    theirs: ImportedPlacement, space: Space, dialect: Dialect, resolved: Resolved, written: QDQGraph, *, ranges: bool
) -> tuple[ImportDifference, ...]:
    """Return the differences between the placement of a file and the nearest one of a space.

    Args:
        theirs: Placement of the file.
        space: Space with the points that have a range.
        dialect: Dialect of the space.
        resolved: Quantized edges of the nearest placement.
        written: Model with these edges.
        ranges: Whether the pairs were written with the ranges of the file.
    """
    ours, found = dict(resolved), list(theirs.unmatched)
    offered = {edge for dimension in space.dimensions for edge in dimension.edges}
    for edge, precision in sorted(theirs.edges.items()):
        if ours.get(edge) == precision:
            forms = theirs.forms[edge], written.edge_form(edge)
            weight = edge.tensor in theirs.model.constants
            reasons = _compare_weights(*forms) if weight else _compare_activations(*forms, ranges=ranges)
            found += (ImportDifference("different", edge, precision, reason) for reason in reasons)
        else:
            reason = _precision_reason(space, dialect, precision)
            reason = reason or _float_reason(theirs, dialect, edge, precision, offered=edge in offered)
            found.append(ImportDifference("not expressed", edge, precision, reason))
    for edge, precision in resolved:
        if theirs.edges.get(edge) != precision:
            joint = [other for other in _joint_edges(theirs, dialect, edge) if other in theirs.edges]
            reason = f"it goes with input {joint[0].slot}" if joint else "most inputs of its pattern are quantized"
            found.append(ImportDifference("added", edge, precision, reason))
    return tuple(found)


def summarize_differences(theirs: ImportedPlacement, found: Sequence[ImportDifference], file: object) -> str:
    """Return the number of differences by kind as a sentence without a full stop; "" without any.

    Args:
        theirs: Placement of the file.
        found: Result of `find_differences`.
        file: Name of the file.
    """
    counts = Counter(each.kind for each in found)
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    total = len(theirs.edges) + len(theirs.unmatched)
    advice = f"'qdq import {file} {theirs.model.source} -o start.onnx' lists each with its reason"
    return f"differences from the {total} quantized inputs of {file}: {text}; {advice}" if counts else ""


def summarize_reasons(theirs: ImportedPlacement, space: Space, dialect: Dialect) -> str:
    """Return the first difference, and the number of the others, of a file of which nothing is expressed."""
    first, *others = find_differences(theirs, space, dialect, (), QDQGraph(theirs.model.proto), ranges=False)
    return f" ({first}; and {len(others)} others)"


def _precision_reason(space: Space, dialect: Dialect, precision: str) -> str:
    """Return the reason why nothing has a precision here; "" if points have it."""
    searched = {choice for dimension in space.dimensions for choice in dimension.choices[1:]}
    if precision not in dialect.precisions:
        return f"dialect {dialect.name} has {', '.join(sorted(dialect.precisions))}"
    return "" if precision in searched else f"{', '.join(sorted(searched))} is asked for"


def _float_reason(theirs: ImportedPlacement, dialect: Dialect, edge: Edge, precision: str, *, offered: bool) -> str:
    """Return the reason why an edge of a file has another precision here; `offered`: whether the space has the edge."""
    if not edge.consumer:
        return "most outputs of its pattern differ" if offered else f"dialect {dialect.name} has no point there"
    node, joint = _consumer(theirs, edge), _joint_edges(theirs, dialect, edge)
    for each in (edge, *joint):
        rule = first_violated_rule(theirs.model, dialect, node, each.slot, precision)
        if rule is not None and rule.name not in ("one scale", "together"):
            return f"rule {rule.name!r}: {rule.text.removesuffix('.')}"
    alone = [each for each in joint if theirs.edges.get(each) != precision]
    if alone:
        return f"it goes with input {alone[0].slot} ({alone[0].tensor}), which is not {precision} in the file"
    return "most inputs of its pattern differ" if offered else "the tensor has no range that gives a scale"


def _consumer(theirs: ImportedPlacement, edge: Edge) -> Node:
    return theirs.model.cached_analysis(_nodes_by_name)[edge.consumer]


def _nodes_by_name(model: Model) -> Mapping[str, Node]:
    return {node.name: node for node in model.nodes}


def _joint_edges(theirs: ImportedPlacement, dialect: Dialect, edge: Edge) -> list[Edge]:
    """Return the other edges of the same operator that are quantized together with an edge."""
    if not edge.consumer:
        return []
    node = _consumer(theirs, edge)
    slots = jointly_quantized_inputs(theirs.model, dialect, node, edge.slot)
    return [Edge(node.inputs[slot], node.name, slot) for slot in slots if slot != edge.slot]


def _compare_weights(theirs: PairForm, ours: PairForm) -> Iterator[str]:
    """Yield the differences in the scales of a constant; several in place of one are none, because they are finer."""
    if theirs.block:
        yield f"one scale for each block of {theirs.block} becomes {_granularity(ours)}"
    elif np.size(theirs.scale) > 1 and ours.scale.size == 1:
        yield "one scale for each channel becomes one scale"
    if np.any(theirs.zero_point) and not ours.zero_point.any():
        yield "its zero point becomes 0"


def _compare_activations(theirs: PairForm, ours: PairForm, *, ranges: bool) -> Iterator[str]:
    """Yield the differences in the scales of an activation."""
    if theirs.scale is None or theirs.zero_point is None:
        yield "its scale is computed when the model runs; here it is constant"
        return
    if theirs.bounds is None:
        yield "its scale is not positive and finite, so its range is calibrated"
        return
    if theirs.scale.size != ours.scale.size:
        yield f"{_granularity(theirs)} becomes {_granularity(ours)}"
    (low, high), (our_low, our_high) = (
        (float(lows.min()), float(highs.max())) for lows, highs in filter(None, (theirs.bounds, ours.bounds))
    )
    step, our_step = float(theirs.scale.max()), float(ours.scale.max())
    if abs(low + high) > 1.5 * step and abs(our_low + our_high) <= 1.5 * our_step:
        yield "its asymmetric range becomes a symmetric one, with zero point 0"
    elif ranges and max(abs(low - our_low), abs(high - our_high)) > 1.5 * step:
        yield f"its range {low:.4g} to {high:.4g} becomes {our_low:.4g} to {our_high:.4g}"


def _granularity(form: PairForm) -> str:
    return "one scale" if form.scale.size == 1 else "one scale for each channel"
