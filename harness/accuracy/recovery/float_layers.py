"""Groups of nodes, ranked by the accuracy that their quantization costs, and placements with some groups left float."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from harness.accuracy.recovery.pipeline import Feeds, PlacedModel, measure_sqnr_db
from harness.base.progress import Observer
from harness.graph.constant_edits import is_private, replace_constants
from harness.graph.quantize.weights import bias_place
from harness.plugins.api import Array

MAX_SAMPLES = 2
"""Number of samples on which each group is measured; few, because each group needs a model of its own."""

FLOAT_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of groups of nodes that are left float if a recovered placement still misses the bound. With more groups a
file is rarely faster than the float model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatGroup:
    """Nodes that are left float together.

    Attributes:
        nodes: Names of the nodes in topological order; "" for the outputs of the model.
        alone_db: SQNR of the outputs of the model, in dB, if only these nodes are quantized.
        at_outputs: Whether the nodes are last linear operators or lie between these and the outputs of the model.
    """

    nodes: tuple[str, ...]
    alone_db: float
    at_outputs: bool


def rank_groups(placed: PlacedModel, held: Sequence[Feeds], observer: Observer) -> list[FloatGroup]:
    """Return groups of the quantized nodes in ascending order of the SQNR with only that group quantized.

    The errors of groups add up, so this order is valid for any number of groups. The gain of leaving one group float is
    no criterion: if two groups cause the loss, the error of each hides the gain of the other.

    Args:
        placed: The placement with its scales and weights.
        held: Held-out samples by input name; the first two are used.
        observer: Receiver of the progress.

    Raises:
        UserError: ONNX Runtime does not run a model.
    """
    last = _last_nodes(placed)
    groups = _group_nodes(placed, last)
    names = {name for group in groups for name in group}
    with observer.work("quantize each group alone", len(groups)) as progress:
        figures = measure_sqnr_db(
            (leave_float(placed, names.difference(group)) for group in groups),
            held[:MAX_SAMPLES],
            lambda _: progress.advance(),
        )
    ranked = [
        FloatGroup(nodes=group, alone_db=sqnr_db, at_outputs=group[0] in last)
        for group, sqnr_db in zip(groups, figures, strict=True)
    ]
    return sorted(ranked, key=lambda group: group.alone_db)


def iter_float_sets(groups: Sequence[FloatGroup]) -> Iterator[tuple[FloatGroup, ...]]:
    """Yield sets to leave float: all groups at the outputs, then the first 1, 2, 4, ... others, without and with these.

    Neither the empty set, the set of all groups nor a set twice is yielded. Groups at the outputs are separate because
    their errors are not attenuated, and a metric may lose more by them than the SQNR shows: the boxes and scores of a
    detector share a scale there.

    Args:
        groups: Groups in the order of `rank_groups`, the one that costs most accuracy first.
    """
    last = tuple(group for group in groups if group.at_outputs)
    others = tuple(group for group in groups if not group.at_outputs)
    sets = [last, *chain.from_iterable((others[:count], last + others[:count]) for count in FLOAT_COUNTS)]
    yield from (chosen for chosen in dict.fromkeys(sets) if 0 < len(chosen) < len(groups))


def _group_nodes(placed: PlacedModel, last: Collection[str]) -> list[tuple[str, ...]]:
    """Return the quantized nodes in groups of a linear operator and the quantized nodes up to the next one.

    Args:
        placed: The placement.
        last: Nodes that form a separate group.
    """
    inputs: dict[str, list[str]] = {}
    for edge, _ in placed.resolved:
        inputs.setdefault(edge.consumer, []).append(edge.tensor)
    nodes = {node.name: node for node in placed.model.nodes}
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}  # for each node, the first node of its group
    for name in sorted(inputs, key=lambda name: nodes[name].index if name else len(nodes)):
        if name in last:
            groups.setdefault("", []).append(name)
            continue
        producers = [placed.model.producer_node(tensor) for tensor in inputs[name]]
        before = [first[node.name] for node in producers if node is not None and node.name in first]
        starts = not before or nodes[name].op in placed.dialect.linear_ops
        first[name] = name if starts else max(before, key=lambda each: nodes[each].index)
        groups.setdefault(first[name], []).append(name)
    return [tuple(group) for group in groups.values()]


def _last_nodes(placed: PlacedModel) -> set[str]:
    """Return the nodes from the last linear operators to the outputs of the model, and "" for the outputs."""
    found, tensors = {""}, list(placed.model.output_names)
    while tensors:
        node = placed.model.producer_node(tensors.pop())
        if node is None or node.name in found:
            continue
        found.add(node.name)
        if node.op not in placed.dialect.linear_ops:
            tensors += filter(None, node.inputs)
    return found


def leave_float(placed: PlacedModel, names: Collection[str]) -> PlacedModel:
    """Return the placement without the pairs of some nodes, which get the constants of `placed.reference` again.

    Args:
        names: Names of the nodes; "" for the outputs of the model. Names of no node are ignored.
    """
    model, reference = placed.model, placed.reference
    arrays: dict[str, Array] = {}
    for node in model.nodes:
        if node.name not in names:
            continue
        place = bias_place(model, node)
        bias = [place[0].inputs[place[1]]] if place is not None and len(place[0].inputs) > place[1] else []
        for constant in filter(lambda name: is_private(model, name), [*node.inputs, *bias]):
            original = reference.constant_array(constant) if constant in reference.constants else None
            corrected = model.constant_array(constant)
            if corrected is not None:  # a bias that only the correction added is 0
                arrays[constant] = np.zeros_like(corrected) if original is None else original
    kept = tuple((edge, precision) for edge, precision in placed.resolved if edge.consumer not in names)
    return replace(placed, model=replace_constants(model, arrays), resolved=kept)
