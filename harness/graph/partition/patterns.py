"""Patterns: classes of isomorphic regions, with the correspondence of their nodes.

Two regions have one pattern if their canonical codes are equal: operators, relevant attributes, connections input by
input, kinds of inputs (constant, omitted, type), and outputs of the region. Names, shapes of activations and the order
of nodes in the file are ignored. A pattern has the nodes of each region in canonical order, so a point in pattern
coordinates (node, input) is found by indexing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.graph.model import Model, Node
from harness.graph.partition.canonical import CanonicalForm, NodeLabels, RegionGraph, canonical_form, describe_code
from harness.graph.partition.regions import Region, RegionType
from harness.graph.rules.operator_sets import CONVOLUTION_OPS, LINEAR_OPS, QUANTIZABLE_FLOAT_TYPES

# Attributes that change neither the valid positions of Q/DQ pairs nor the kernel of a runtime.
_IGNORED_ATTRIBUTES = frozenset({
    "alpha", "auto_pad", "beta", "ceil_mode", "coordinate_transformation_mode", "count_include_pad", "cubic_coeff_a",
    "epsilon", "exclude_outside", "extrapolation_value", "gamma", "max", "min", "momentum", "nearest_mode",
    "output_padding", "output_shape", "pads", "ratio", "seed", "spatial", "storage_order", "training_mode", "value",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Structure that isomorphic regions of one model have in common.

    Attributes:
        signature: SHA-256 of the canonical code in hexadecimal, equal in all models and processes.
        operators: Operator type of each node in canonical order.
        regions: Regions in graph order.
        order: Node indices of each region in canonical order; nodes at equal positions correspond.
        children: Child regions of each region in canonical order.
    """

    signature: str
    type: RegionType
    operators: tuple[str, ...]
    regions: tuple[Region, ...]
    order: tuple[tuple[int, ...], ...]
    children: tuple[tuple[Region, ...], ...]


def find_patterns(model: Model, root: Region) -> tuple[Pattern, ...]:
    """Return the patterns of all regions of a tree, in graph order of their first regions, parents first."""
    wiring = _label_nodes(model)
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


def _label_nodes(model: Model) -> NodeLabels:
    """Assign numbers to the nodes and activations of a model."""
    number: dict[str, int] = {}
    producer: list[int] = []
    position: list[int] = []

    def numbered(name: str) -> int:
        known = number.setdefault(name, len(number))
        if known == len(producer):
            producer.append(-1)
            position.append(-1)
        return known

    reads = []
    for node in model.nodes:
        names = (*node.inputs, *node.captures)
        reads.append(tuple(numbered(name) for name in names if name and name not in model.constants))
        for place, name in enumerate(node.outputs):
            if name:
                made = numbered(name)
                producer[made], position[made] = node.index, place
    texts = [_node_label(model, node) for node in model.nodes]
    labels = sorted(set(texts))
    rank = {text: place for place, text in enumerate(labels)}
    return NodeLabels(
        labels=tuple(labels),
        label=tuple(rank[text] for text in texts),
        digest=tuple(int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) for text in labels),
        reads=tuple(reads),
        producer=tuple(producer),
        position=tuple(position),
        number=number,
    )


def _node_label(model: Model, node: Node) -> str:
    """Return a text that is equal for corresponding nodes: operator, attributes, kinds of inputs and outputs."""
    parts = [f"{node.domain}:{node.op}", *_relevant_attributes(model, node)]
    kinds = [_input_kind(model, node, slot, name) for slot, name in enumerate(node.inputs)]
    while kinds and kinds[-1] == "_":
        kinds.pop()
    outputs = "".join("o" if name else "_" for name in node.outputs).rstrip("_")
    captured = f" captures {len(node.captures)}" if node.captures else ""
    body = f" body {node.body[:16]}" if node.body else ""
    return f"{' '.join(parts)} ({','.join(kinds)}) -> {outputs}{captured}{body}{' opaque' if node.opaque else ''}"


def _input_kind(model: Model, node: Node, slot: int, name: str) -> str:
    if not name:
        return "_"
    known = model.types.get(name)
    if name in model.constants:
        shape = model.constants[name].dims
        return f"constant{len(shape)}" if node.op in LINEAR_OPS and slot < 2 else "constant"
    if known is None:
        return "untyped"
    kind = "float" if known.dtype in QUANTIZABLE_FLOAT_TYPES else known.dtype
    return kind if known.shape else f"{kind} scalar"


def _relevant_attributes(model: Model, node: Node) -> list[str]:
    values = {name: _stable_value(value) for name, value in node.attributes.items() if name not in _IGNORED_ATTRIBUTES}
    if node.op in CONVOLUTION_OPS:
        for name in ("strides", "dilations"):
            if all(value == 1 for value in values.get(name, ())):
                values.pop(name, None)
        known = model.types.get(node.inputs[1])
        values.pop("group", None)
        values["class"] = _classify_groups(node, known.shape if known else ())
        if known:
            values["kernel_shape"] = known.shape[2:]
    return [f"{name}={value}" for name, value in sorted(values.items())]


def _classify_groups(node: Node, weight: Sequence[int]) -> str:
    """Return "dense", "depthwise" or "grouped", because the number of groups does not decide the kernel."""
    groups = int(node.attributes.get("group", 1))
    if groups <= 1:  # damaged files have 0
        return "dense"
    channels = (weight[0] // groups, weight[1]) if len(weight) > 1 else (0, 0)
    return "depthwise" if channels == (1, 1) else "grouped"


def _stable_value(value: Any) -> Any:
    """Return a value whose text is the same in every process: lists as tuples, arrays as a digest."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, list | tuple):
        return tuple(_stable_value(item) for item in value)
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return value
