"""Partition of a data-flow graph into leaves and composites; private to `harness.graph.partition.regions`.

The position of a cut depends only on its neighbourhood (a convergence, a linear operator), so that equal blocks are cut
equally at every position. The rules, along each chain of `harness.graph.partition.post_dominators`:

- A vertex and the branches that converge on it are one *item*. Without a linear operator among its branches and with
  fewer than `smallest` vertices it is *plain* (x * sigmoid(x), a normalization); else it is a *block* (a residual
  block, attention, inception branches, squeeze-and-excite).
- Elementwise items directly after a block are its epilogue.
- A block of fewer than `smallest` vertices is a leaf; a larger one a composite. A composite with one branch continues
  that branch through the convergence; with several, the convergence begins a leaf of its own.
- Runs of plain items are divided into groups: a linear operator, or other operators, with the elementwise items after
  it. Leaves contain whole groups, up to `longest` vertices; in a longer run, each repetition of consecutive groups
  (depthwise, pointwise, depthwise, ...) is a leaf.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.graph.partition.post_dominators import BranchStructure

_MAX_REGION_DEPTH = 32  # deeper regions become part of their parent, so that trees can be compared and printed


class VertexKind(Enum):
    """Kind of a vertex: VIRTUAL is no node; LINEAR starts a group of a sequence, ELEMENTWISE may end one."""

    VIRTUAL = 0
    LINEAR = 1
    ELEMENTWISE = 2
    OTHER = 3


@dataclass(frozen=True, slots=True)
class RegionDraft:
    """Draft of a region.

    Attributes:
        parent: Position of the parent's draft in the list of drafts; -1: none.
        vertices: Vertices of a leaf; None for a composite.
    """

    parent: int
    vertices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _ChainItem:
    vertex: int
    size: int
    linear: bool
    elementwise: bool  # its branches too
    block: bool = False


def partition_graph(
    flow: BranchStructure, kinds: Sequence[VertexKind], labels: Sequence[Hashable], longest: int, smallest: int
) -> list[RegionDraft]:
    """Return the leaves and composites of a graph; a parent comes before its children.

    Args:
        flow: Chains and branches of the graph.
        kinds: Kind of each vertex except the sink.
        labels: Label of each vertex; repetitions have equal labels.
        longest: Largest number of vertices in a leaf that is a sequence.
        smallest: Smallest number of vertices in a convergence of branches that is split into a composite.
    """
    return _Partitioner(flow, kinds, labels, longest, smallest).partition()


class _Partitioner:
    def __init__(
        self,
        flow: BranchStructure,
        kinds: Sequence[VertexKind],
        labels: Sequence[Hashable],
        longest: int,
        smallest: int,
    ) -> None:
        self._flow = flow
        self._labels = labels
        self._linear = [*(kind is VertexKind.LINEAR for kind in kinds), False]
        self._elementwise = [*(kind is VertexKind.ELEMENTWISE for kind in kinds), False]
        self._real = [*(kind is not VertexKind.VIRTUAL for kind in kinds), False]
        self._longest = longest
        self._smallest = smallest
        self._drafts: list[RegionDraft] = []
        self._depths: list[int] = []
        self._todo: list[tuple[int, list[_ChainItem]]] = []
        self._sizes = self._cumulative_counts(self._real)
        self._linears = self._cumulative_counts(self._linear)
        self._elementwises = self._cumulative_counts(self._elementwise)

    def partition(self) -> list[RegionDraft]:
        flow = self._flow
        for last in (flow.series[flow.sink], *flow.branches[flow.sink]):
            if last >= 0:
                self._todo.append((-1, self._chain_items(last)))
        while self._todo:
            self._split_chain(*self._todo.pop())
        return self._drafts

    def _cumulative_counts(self, marked: Sequence[bool]) -> list[int]:
        """Count the marked vertices of the chain up to each vertex, branches included."""
        flow, totals = self._flow, [int(mark) for mark in marked]
        for vertex, before in enumerate(flow.series):
            totals[vertex] += sum(totals[last] for last in flow.branches[vertex])
            totals[vertex] += totals[before] if before >= 0 else 0
        return totals

    def _chain_items(self, last: int) -> list[_ChainItem]:
        return [self._make_item(vertex) for vertex in self._flow.chain(last) if self._real[vertex]]

    def _make_item(self, vertex: int) -> _ChainItem:
        before = self._flow.series[vertex]
        size, linears, elementwises = (
            totals[vertex] - (totals[before] if before >= 0 else 0)
            for totals in (self._sizes, self._linears, self._elementwises)
        )
        linear = self._linear[vertex]
        block = linears > linear or size >= max(2, self._smallest)
        return _ChainItem(vertex, size, linear, elementwises == size, block)

    def _split_chain(self, parent: int, items: list[_ChainItem]) -> None:
        """Cut a chain into blocks with their epilogues, and runs of plain items between them."""
        run: list[_ChainItem] = []
        position = 0
        while position < len(items):
            item = items[position]
            position += 1
            if not item.block:
                run.append(item)
                continue
            self._emit_run(parent, run)
            run = []
            end, room = position, self._longest
            while end < len(items) and items[end].elementwise and not items[end].block:
                room -= items[end].size
                end += 1
            epilogue = items[position:end]
            if item.size >= self._smallest:
                self._emit_composite(parent, item, epilogue if room >= 0 else [])
                run = [] if room >= 0 else epilogue
            elif item.size <= room:
                self._emit_leaf(parent, [item, *epilogue])
            else:
                self._emit_leaf(parent, [item])
                run = epilogue
            position = end
        self._emit_run(parent, run)

    def _emit_composite(self, parent: int, item: _ChainItem, epilogue: list[_ChainItem]) -> None:
        depth = self._depths[parent] + 1 if parent >= 0 else 0
        if depth < _MAX_REGION_DEPTH:
            self._drafts.append(RegionDraft(parent))
            self._depths.append(depth)
            parent = len(self._drafts) - 1
        tail = [_ChainItem(item.vertex, 1, item.linear, self._elementwise[item.vertex]), *epilogue]
        branches = self._flow.branches[item.vertex]
        if len(branches) == 1:
            self._todo.append((parent, self._chain_items(branches[0]) + tail))
            return
        self._todo.append((parent, tail))
        self._todo.extend((parent, self._chain_items(last)) for last in branches)

    def _emit_leaf(self, parent: int, items: Sequence[_ChainItem]) -> None:
        vertices = [item.vertex for item in items]
        for item in items:
            if item.size > 1:
                vertices.extend(v for v in self._flow.branch_vertices(item.vertex) if self._real[v])
        self._drafts.append(RegionDraft(parent, tuple(sorted(vertices))))
        self._depths.append(0)

    def _emit_run(self, parent: int, run: list[_ChainItem]) -> None:
        if not run:
            return
        groups: list[list[_ChainItem]] = []
        for item in run:
            last = groups[-1][-1] if groups else item
            if not groups or item.linear or (not item.elementwise and (last.elementwise or last.linear)):
                groups.append([])
            groups[-1].append(item)
        for leaf in [run] if _total_size(run) <= self._longest else self._emit_repetitions(groups):
            self._emit_leaf(parent, leaf)

    def _emit_repetitions(self, groups: list[list[_ChainItem]]) -> list[list[_ChainItem]]:
        """Return the leaves of a long run: one per repetition of groups, and others of the groups in between."""
        keys = [tuple(self._repetition_key(item) for item in group) for group in groups]
        leaves: list[list[_ChainItem]] = []
        rest: list[list[_ChainItem]] = []
        place = 0
        while place < len(groups):
            period = self._find_period(groups, keys, place)
            if not period:
                rest += self._split_group(groups[place])
                place += 1
                continue
            leaves += _pack_leaves(rest, self._longest)
            rest, unit = [], keys[place : place + period]
            while keys[place : place + period] == unit:
                leaves.append([item for group in groups[place : place + period] for item in group])
                place += period
        return leaves + _pack_leaves(rest, self._longest)

    def _find_period(self, groups: list[list[_ChainItem]], keys: list[tuple[Hashable, ...]], place: int) -> int:
        """Return the smallest number of consecutive groups that fit into a leaf and repeat directly, or 0."""
        period, size = 0, 0
        while place + 2 * period < len(groups):
            size += _total_size(groups[place + period])
            period += 1
            if size > self._longest:
                return 0
            if keys[place : place + period] == keys[place + period : place + 2 * period]:
                return period
        return 0

    def _repetition_key(self, item: _ChainItem) -> Hashable:
        label = self._labels[item.vertex]
        if item.size == 1:
            return label
        return label, frozenset(self._labels[v] for v in self._flow.branch_vertices(item.vertex) if self._real[v])

    def _split_group(self, group: list[_ChainItem]) -> list[list[_ChainItem]]:
        """Return a group that fits into a leaf, or its parts, cut at divergences and then by length."""
        if _total_size(group) <= self._longest:
            return [group]
        parts: list[list[_ChainItem]] = []
        for item in group:
            if item.size > 1 or not parts or _total_size(parts[-1]) + item.size > self._longest:
                parts.append([])
            parts[-1].append(item)
        return _pack_leaves(parts, self._longest)


def _pack_leaves(parts: list[list[_ChainItem]], longest: int) -> list[list[_ChainItem]]:
    packed: list[list[_ChainItem]] = []
    for part in reversed(parts):
        if packed and _total_size(packed[-1]) + _total_size(part) <= longest:
            packed[-1] = part + packed[-1]
        else:
            packed.append(part)
    return packed[::-1]


def _total_size(items: Sequence[_ChainItem]) -> int:
    return sum(item.size for item in items)
