"""Patterns: classes of isomorphic regions, with the correspondence of their nodes.

Two regions have one pattern if their canonical codes are equal: operators, relevant attributes, connections input by
input, kinds of inputs (constant, omitted, type), and outputs of the region. Names, shapes of activations and the order
of nodes in the file are ignored. A pattern has the nodes of each region in canonical order, so a point in pattern
coordinates (node, input) is found by indexing.

The inputs of a node are ordered, so a depth-first walk against the data flow from a *sink* (a node whose results no
node inside the region reads) numbers all nodes that it reaches in a unique way. For a region with one sink, the usual
case, one walk gives the canonical order. For several sinks the order is searched: first by colours refined over the
graph (Weisfeiler, Leman 1968), then by the smallest code, with one of several branches that give equal codes
(automorphisms), as in McKay 1981, "Practical Graph Isomorphism". The code of a region describes it completely, so two
regions have equal codes only if they are isomorphic.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.graph.model import Model, Node
from harness.graph.partition.regions import Region, RegionType
from harness.graph.rules.operator_sets import CONVOLUTION_OPS, LINEAR_OPS, QUANTIZABLE_FLOAT_TYPES

# Attributes that change neither the valid positions of Q/DQ pairs nor the kernel of a runtime.
_IGNORED_ATTRIBUTES = frozenset({
    "alpha", "auto_pad", "beta", "ceil_mode", "coordinate_transformation_mode", "count_include_pad", "cubic_coeff_a",
    "epsilon", "exclude_outside", "extrapolation_value", "gamma", "max", "min", "momentum", "nearest_mode",
    "output_padding", "output_shape", "pads", "ratio", "seed", "spatial", "storage_order", "training_mode", "value",
})  # fmt: skip
_MAX_SEARCH_STEPS = 40_000
"""Limit of numbered nodes while sinks of one colour are compared; beyond it the first sink is used."""
_MAX_REFINEMENT_ROUNDS = 8


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
    wiring = _NodeLabels(model)
    found: dict[tuple[RegionType, tuple[int, ...]], list[tuple[Region, _Numbering]]] = defaultdict(list)
    for region in root.walk():
        form = _canonical_form(wiring, region)
        found[region.type, tuple(form.code)].append((region, form))
    patterns = []
    for (kind, code), members in found.items():
        # A line for each node, with its label in place of the position of the label, for comparison between models.
        lines, place = [f"qdq pattern 1 {kind.value}"], 0
        while place < len(code):
            end = place + 4 + 2 * code[place + 1]
            lines.append(f"{wiring.labels[code[place]]} {' '.join(map(str, code[place + 1 : end]))}")
            place = end
        pattern = Pattern(
            signature=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            type=kind,
            operators=tuple(model.nodes[index].op for index in members[0][1].order),
            regions=tuple(region for region, _ in members),
            order=tuple(tuple(form.order) for _, form in members),
            children=tuple(tuple(region.children[place] for place in form.children) for region, form in members),
        )
        patterns.append(pattern)
    return tuple(patterns)


class _NodeLabels:
    """Nodes and activations of a model by number.

    Attributes:
        labels: All distinct node labels, sorted; a label has operator, relevant attributes and the kind of each input.
        label: Position of the label of each node.
        digest: 60 bits of the SHA-256 of each label, equal in all models and processes.
        reads: Activations that each node reads, in the order of its inputs; its label describes the other inputs.
        producer: Node that computes each activation, or -1.
        position: Position of each activation among the outputs of that node, or -1.
        number: Number of each activation by tensor name.
    """

    def __init__(self, model: Model) -> None:
        self.number: dict[str, int] = {}
        self.reads: list[list[int]] = []
        made: dict[int, tuple[int, int]] = {}
        for node in model.nodes:
            read = (name for name in (*node.inputs, *node.captures) if name and name not in model.constants)
            self.reads.append([self.number.setdefault(name, len(self.number)) for name in read])
            for place, name in enumerate(node.outputs):
                if name:
                    made[self.number.setdefault(name, len(self.number))] = node.index, place
        makers = [made.get(number, (-1, -1)) for number in range(len(self.number))]
        self.producer, self.position = [node for node, _ in makers], [place for _, place in makers]
        texts = [_node_label(model, node) for node in model.nodes]
        self.labels = sorted(set(texts))
        rank = {text: place for place, text in enumerate(self.labels)}
        self.label = [rank[text] for text in texts]
        self.digest = [int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) for text in self.labels]


def _node_label(model: Model, node: Node) -> str:
    """Return a text that is equal for corresponding nodes: operator, attributes, kinds of inputs and outputs."""
    values = {name: _stable_value(value) for name, value in node.attributes.items() if name not in _IGNORED_ATTRIBUTES}
    if node.op in CONVOLUTION_OPS:
        for name in ("strides", "dilations"):
            if all(value == 1 for value in values.get(name, ())):
                values.pop(name, None)
        known = model.types.get(node.inputs[1])
        weight, groups = known.shape if known else (), int(values.pop("group", 1))
        # The number of groups does not decide the kernel; damaged files have 0.
        channels = (weight[0] // groups, weight[1]) if len(weight) > 1 and groups > 1 else (0, 0)
        values["class"] = "dense" if groups <= 1 else "depthwise" if channels == (1, 1) else "grouped"
        if known:
            values["kernel_shape"] = weight[2:]
    parts = [f"{node.domain}:{node.op}", *(f"{name}={value}" for name, value in sorted(values.items()))]
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


def _stable_value(value: Any) -> Any:
    """Return a value whose text is the same in every process: lists as tuples, arrays as a digest."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, list | tuple):
        return tuple(_stable_value(item) for item in value)
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return value


def _canonical_form(wiring: _NodeLabels, region: Region) -> _Numbering:
    """Return the canonical numbering of a region; isomorphic regions have equal codes."""
    walk = _Numbering(wiring, region)
    nodes = walk.nodes
    read = {wiring.producer[tensor] for node in nodes for tensor in wiring.reads[node]}
    sinks = [node for node in nodes if node not in read]
    if len(sinks) > 1:
        colours = _refine_colours(wiring, nodes, walk.outputs)
        cells: dict[int, list[int]] = defaultdict(list)
        for sink in sinks:
            cells[colours[sink]].append(sink)
        search = _CanonicalSearch(walk, max(_MAX_SEARCH_STEPS, 4 * len(nodes)))
        sinks = search.complete_numbering([cells[colour] for colour in sorted(cells)], search=True)[1]
    for sink in sinks:
        walk.number_dependencies(sink)
    return walk


class _Numbering:
    """Numbering of a region in progress, which can be rolled back to an earlier mark.

    Attributes:
        nodes: Nodes of the region in topological order.
        outputs: Bit mask of the outputs of each node that leave the region.
        order: Numbers of the nodes so far, in canonical order.
        code: For each node in order: label, number of reads, a pair per read, bit mask of outputs, child. The pair is
            (position of the producer, its output) or (-1 - number of the outside tensor, 0).
        children: Numbers of the child regions in the order in which their nodes first appear.
    """

    def __init__(self, wiring: _NodeLabels, region: Region) -> None:
        self._wiring = wiring
        self.nodes, self.outputs = region.node_indices(), defaultdict[int, int](int)
        for name in region.outputs:
            tensor = wiring.number[name]
            self.outputs[wiring.producer[tensor]] |= 1 << wiring.position[tensor]
        self._child = {node: place for place, part in enumerate(region.children) for node in part.node_indices()}
        self._inside = frozenset(self.nodes)
        self.order: dict[int, int] = {}
        self._outside: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.code: list[int] = []

    def number_dependencies(self, sink: int) -> None:
        """Assign numbers to a sink and the nodes that it depends on, inputs first; numbered nodes are skipped."""
        wiring, order, inside, code = self._wiring, self.order, self._inside, self.code
        producer, reads = wiring.producer, wiring.reads
        stack = [sink]
        while stack:
            node = stack[-1]
            if node in order:
                stack.pop()
                continue
            pending = [maker for tensor in reads[node] if (maker := producer[tensor]) not in order and maker in inside]
            if pending:
                stack.extend(reversed(pending))
                continue
            stack.pop()
            code += (wiring.label[node], len(reads[node]))
            for tensor in reads[node]:
                maker = order.get(producer[tensor], -1)
                if maker < 0:
                    code += (-1 - self._outside.setdefault(tensor, len(self._outside)), 0)
                else:
                    code += (maker, wiring.position[tensor])
            child = self._child.get(node, -1)
            if child >= 0:
                child = self.children.setdefault(child, len(self.children))
            code += (self.outputs.get(node, 0), child)
            order[node] = len(order)

    def mark(self) -> tuple[int, int, int, int]:
        return len(self.order), len(self._outside), len(self.children), len(self.code)

    def rollback(self, mark: tuple[int, int, int, int]) -> None:
        for numbers, size in zip((self.order, self._outside, self.children), mark, strict=False):
            while len(numbers) > size:
                numbers.popitem()
        del self.code[mark[3] :]


class _CanonicalSearch:
    """Search for the order of sinks that gives the smallest code.

    Args:
        walk: Numbering of the region without numbered nodes; rolled back after the search.
        budget: Number of nodes that may be numbered in the search.
    """

    def __init__(self, walk: _Numbering, budget: int) -> None:
        self._walk, self._budget = walk, budget

    def complete_numbering(self, cells: Sequence[list[int]], search: bool) -> tuple[tuple[int, ...], list[int]]:
        """Return the code with all sinks of the cells numbered, and their order, and roll the numbering back.

        Among tied sinks, `search` selects the one that leads to the smallest code; otherwise the first one is used.
        """
        walk, mark, order = self._walk, self._walk.mark(), []
        for place, cell in enumerate(cells):
            left = list(cell)
            while left:
                if self._budget <= 0:
                    for sink in left:
                        walk.number_dependencies(sink)
                    order += left
                    break
                tied = self._sinks_of_smallest_code(left)
                rest = cells[place + 1 :]
                pick = self._break_tie(tied, left, rest) if search and len(tied) > 1 else tied[0]
                walk.number_dependencies(pick)
                order.append(pick)
                left.remove(pick)
        code = tuple(walk.code)
        walk.rollback(mark)
        return code, order

    def _sinks_of_smallest_code(self, sinks: list[int]) -> list[int]:
        """Return the sinks whose numbering adds the smallest code."""
        if len(sinks) == 1:
            return sinks
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for sink in sinks:
            mark = self._walk.mark()
            self._walk.number_dependencies(sink)
            found[tuple(self._walk.code[mark[3] :])].append(sink)
            self._budget -= self._walk.mark()[0] - mark[0]
            self._walk.rollback(mark)
        return found[min(found)]

    def _break_tie(self, tied: list[int], left: list[int], rest: Sequence[list[int]]) -> int:
        orbits: dict[tuple[int, ...], int] = {}
        for sink in tied:
            if self._budget <= 0:
                return tied[0]
            orbits.setdefault(self._explore_sink(sink, left, rest, search=False), sink)
        if len(orbits) == 1:
            return tied[0]
        return min(orbits.values(), key=lambda sink: self._explore_sink(sink, left, rest, search=True))

    def _explore_sink(self, sink: int, left: list[int], rest: Sequence[list[int]], search: bool) -> tuple[int, ...]:
        mark = self._walk.mark()
        self._walk.number_dependencies(sink)
        code, _ = self.complete_numbering([[other for other in left if other != sink], *rest], search)
        self._walk.rollback(mark)
        return code


def _refine_colours(wiring: _NodeLabels, nodes: Sequence[int], outputs: Mapping[int, int]) -> dict[int, int]:
    """Return colours that isomorphic nodes share, refined along and against the data flow until none splits."""
    producer, position, reads = wiring.producer, wiring.position, wiring.reads
    colour = {n: hash((wiring.digest[wiring.label[n]], outputs.get(n, 0))) for n in nodes}
    outside = {t: 0 for n in nodes for t in reads[n] if producer[t] not in colour}
    for _ in range(_MAX_REFINEMENT_ROUNDS):
        known = len(set(colour.values()))
        for node in nodes:
            seen = [outside[t] if t in outside else hash((colour[producer[t]], position[t])) for t in reads[node]]
            colour[node] = hash((colour[node], *seen))
        readers: dict[int, list[int]] = defaultdict(list)
        for node in reversed(nodes):
            colour[node] = hash((colour[node], *sorted(readers[~node])))
            for slot, tensor in enumerate(reads[node]):
                key = tensor if tensor in outside else ~producer[tensor]
                readers[key].append(hash((colour[node], slot, position[tensor])))
        outside = {t: hash((outside[t], *sorted(readers[t]))) for t in outside}
        if len(set(colour.values())) == known:
            break
    return colour
