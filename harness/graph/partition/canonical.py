"""Exact canonical form of a region; private to `harness.graph.partition.patterns`.

The inputs of a node are ordered, so a depth-first walk against the data flow from a *sink* (a node whose results no
node inside the region reads) numbers all nodes that it reaches in a unique way. For a region with one sink, the usual
case, one walk gives the canonical order. For several sinks the order is searched: first by colours refined over the
graph (Weisfeiler, Leman 1968), then by the smallest code, with one of several branches that give equal codes
(automorphisms), as in McKay 1981, "Practical Graph Isomorphism".

The code of a region describes it completely, so two regions have equal codes only if they are isomorphic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MAX_SEARCH_STEPS = (
    40_000  # limit of numbered nodes while sinks of one colour are compared; beyond it the first sink is used
)
_MAX_REFINEMENT_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLabels:
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

    labels: tuple[str, ...]
    label: tuple[int, ...]
    digest: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    position: tuple[int, ...]
    number: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """Region whose canonical form is computed.

    Attributes:
        nodes: Nodes of the region in topological order.
        outputs: Bit mask of the outputs of each node that leave the region.
        child: Number of the child region of each node; empty for a LEAF.
    """

    nodes: Sequence[int]
    outputs: Mapping[int, int]
    child: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalForm:
    """Canonical form of a region; isomorphic regions have equal codes, and their nodes match by position in `order`.

    Attributes:
        order: Node indices in canonical order.
        code: For each node in order: label, number of reads, a pair per read, bit mask of outputs, child. The pair is
            (position of the producer, its output) or (-1 - number of the outside tensor, 0).
        children: Numbers of the child regions in the order in which their nodes first appear.
    """

    order: tuple[int, ...]
    code: tuple[int, ...]
    children: tuple[int, ...]


def canonical_form(wiring: NodeLabels, subject: RegionGraph) -> CanonicalForm:
    """Return the canonical form of a region.

    Args:
        wiring: Labels of the nodes and their connections in the whole graph.
        subject: The region: its nodes, its outputs, and the children that they belong to.
    """
    walk = _Numbering(wiring, subject)
    sinks = walk.sinks()
    if len(sinks) > 1:
        sinks = CanonicalSearch(walk, sinks, _refine_colours(wiring, subject), len(subject.nodes)).find_smallest_form()
    for sink in sinks:
        walk.number_dependencies(sink)
    return walk.to_canonical_form()


def describe_code(wiring: NodeLabels, code: Sequence[int]) -> str:
    """Return the canonical code of a region as text, for comparison between models.

    It has a line for each node, with the label from `wiring`, which the code was made with, in place of its position.
    """
    lines, place = [], 0
    while place < len(code):
        end = place + 4 + 2 * code[place + 1]
        lines.append(f"{wiring.labels[code[place]]} {' '.join(map(str, code[place + 1 : end]))}")
        place = end
    return "\n".join(lines)


class _Numbering:
    """Numbering in progress, which can be rolled back to an earlier mark."""

    def __init__(self, wiring: NodeLabels, subject: RegionGraph) -> None:
        self._wiring = wiring
        self._subject = subject
        self._inside = frozenset(subject.nodes)
        self._place: dict[int, int] = {}
        self._outside: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self.code: list[int] = []

    def sinks(self) -> list[int]:
        """Return the nodes whose results no node inside reads, in file order."""
        wiring = self._wiring
        read = {wiring.producer[tensor] for node in self._subject.nodes for tensor in wiring.reads[node]}
        return [node for node in self._subject.nodes if node not in read]

    def number_dependencies(self, sink: int) -> None:
        """Assign numbers to a sink and the nodes that it depends on, inputs first; numbered nodes are skipped."""
        producer, reads, place, inside = self._wiring.producer, self._wiring.reads, self._place, self._inside
        stack = [sink]
        while stack:
            node = stack[-1]
            if node in place:
                stack.pop()
                continue
            pending = [maker for tensor in reads[node] if (maker := producer[tensor]) not in place and maker in inside]
            if pending:
                stack.extend(reversed(pending))
                continue
            stack.pop()
            self._append_node(node)

    def _append_node(self, node: int) -> None:
        wiring, place, code = self._wiring, self._place, self.code
        reads = wiring.reads[node]
        code.append(wiring.label[node])
        code.append(len(reads))
        for tensor in reads:
            maker = place.get(wiring.producer[tensor])
            if maker is None:
                code += (-1 - self._outside.setdefault(tensor, len(self._outside)), 0)
            else:
                code += (maker, wiring.position[tensor])
        child = self._subject.child.get(node, -1)
        if child >= 0:
            child = self._children.setdefault(child, len(self._children))
        code += (self._subject.outputs.get(node, 0), child)
        place[node] = len(place)

    def mark(self) -> tuple[int, int, int, int]:
        return len(self._place), len(self._outside), len(self._children), len(self.code)

    def rollback(self, mark: tuple[int, int, int, int]) -> None:
        for numbers, size in zip((self._place, self._outside, self._children), mark, strict=False):
            while len(numbers) > size:
                numbers.popitem()
        del self.code[mark[3] :]

    def to_canonical_form(self) -> CanonicalForm:
        return CanonicalForm(order=tuple(self._place), code=tuple(self.code), children=tuple(self._children))


class CanonicalSearch:
    """Search for the order of sinks that gives the smallest code.

    Args:
        walk: Numbering of the region without numbered nodes; rolled back after the search.
        sinks: Nodes whose results no other node of the region reads.
        colours: Colour of each node; sinks are ordered by colour first.
        size: Number of nodes of the region; the effort grows with it.
    """

    def __init__(self, walk: _Numbering, sinks: Sequence[int], colours: Mapping[int, int], size: int) -> None:
        self._walk = walk
        self._budget = max(_MAX_SEARCH_STEPS, 4 * size)
        cells: dict[int, list[int]] = defaultdict(list)
        for sink in sinks:
            cells[colours[sink]].append(sink)
        self._cells = [cells[colour] for colour in sorted(cells)]

    def find_smallest_form(self) -> list[int]:
        return self._complete_numbering(self._cells, search=True)[1]

    def _complete_numbering(self, cells: Sequence[list[int]], search: bool) -> tuple[tuple[int, ...], list[int]]:
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
        code, _ = self._complete_numbering([[other for other in left if other != sink], *rest], search)
        self._walk.rollback(mark)
        return code


def _refine_colours(wiring: NodeLabels, subject: RegionGraph) -> dict[int, int]:
    """Return colours that isomorphic nodes share, refined along and against the data flow until none splits."""
    producer, position, reads = wiring.producer, wiring.position, wiring.reads
    colour = {n: hash((wiring.digest[wiring.label[n]], subject.outputs.get(n, 0))) for n in subject.nodes}
    outside = {t: 0 for n in subject.nodes for t in reads[n] if producer[t] not in colour}
    for _ in range(_MAX_REFINEMENT_ROUNDS):
        known = len(set(colour.values()))
        for node in subject.nodes:
            seen = [outside[t] if t in outside else hash((colour[producer[t]], position[t])) for t in reads[node]]
            colour[node] = hash((colour[node], *seen))
        readers: dict[int, list[int]] = defaultdict(list)
        for node in reversed(subject.nodes):
            colour[node] = hash((colour[node], *sorted(readers[~node])))
            for slot, tensor in enumerate(reads[node]):
                key = tensor if tensor in outside else ~producer[tensor]
                readers[key].append(hash((colour[node], slot, position[tensor])))
        outside = {t: hash((outside[t], *sorted(readers[t]))) for t in outside}
        if len(set(colour.values())) == known:
            break
    return colour
