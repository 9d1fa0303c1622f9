"""Patterns: classes of isomorphic regions, with the isomorphism.

Two regions have one pattern exactly when their canonical codes are equal: operators, the attributes that matter, the
wiring input by input, which inputs are constants, omitted or of which kind of type, and which results leave the region.
Names, shapes of activations and the order of nodes in the file do not count. The pattern keeps each region's nodes in
canonical order, so a point in pattern coordinates (node, input) resolves by indexing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass

from harness.graph.model import Model
from harness.graph.partition.canonical import CanonicalForm, RegionGraph, canonical_form, describe_code
from harness.graph.partition.node_labels import NodeLabels, label_nodes
from harness.graph.partition.regions import Region, RegionType

__all__ = ["Pattern", "find_patterns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A class of isomorphic regions of one model.

    Attributes:
        signature: SHA-256 of the canonical code, in hexadecimal; the same in every model and process.
        type: Type of the regions.
        operators: Operator of each node, in canonical order.
        regions: The regions, in graph order.
        order: For each region its node indices in canonical order: equal positions match each other.
        children: For each region its child regions in canonical order.
    """

    signature: str
    type: RegionType
    operators: tuple[str, ...]
    regions: tuple[Region, ...]
    order: tuple[tuple[int, ...], ...]
    children: tuple[tuple[Region, ...], ...]


def find_patterns(model: Model, root: Region) -> tuple[Pattern, ...]:
    """Return the patterns of all regions of a tree, in graph order of their first regions, parents first."""
    wiring = label_nodes(model)
    found: dict[tuple[RegionType, tuple[int, ...]], list[tuple[Region, CanonicalForm]]] = defaultdict(list)
    for region in root.walk():
        form = canonical_form(wiring, _region_graph(wiring, region))
        found[region.type, form.code].append((region, form))
    return tuple(_make_pattern(model, wiring, members) for members in found.values())


def _region_graph(wiring: NodeLabels, region: Region) -> RegionGraph:
    outputs: dict[int, int] = defaultdict(int)
    for name in region.outputs:
        tensor = wiring.number[name]
        outputs[wiring.producer[tensor]] |= 1 << wiring.position[tensor]
    child = {node: place for place, part in enumerate(region.children) for node in part.node_indices()}
    return RegionGraph(nodes=region.node_indices(), outputs=outputs, child=child)


def _make_pattern(model: Model, wiring: NodeLabels, members: list[tuple[Region, CanonicalForm]]) -> Pattern:
    region, form = members[0]
    text = f"qdq pattern 1 {region.type.value}\n{describe_code(wiring, form.code)}"
    return Pattern(
        signature=hashlib.sha256(text.encode()).hexdigest(),
        type=region.type,
        operators=tuple(model.nodes[index].op for index in form.order),
        regions=tuple(region for region, _ in members),
        order=tuple(form.order for _, form in members),
        children=tuple(tuple(region.children[place] for place in form.children) for region, form in members),
    )
