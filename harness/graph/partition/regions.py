"""Regions: connected subgraphs with inputs and outputs, as a tree that covers every node exactly once.

The partition is hierarchical and deterministic. The position of a cut depends only on its neighbourhood (a convergence,
a linear operator), so that equal blocks are cut equally at every position, and repeated blocks give equal regions.

Vertex p post-dominates v when every path from v to the sink passes p. On an acyclic graph one pass in reverse
topological order finds the immediate post-dominators (Cooper, Harvey, Kennedy 2001, "A Simple, Fast Dominance
Algorithm", section 3, on the reversed graph). Post-dominance, unlike single-entry single-exit regions (Johnson,
Pearson, Pingali 1994, "The Program Structure Tree"), does not break where a mask or a memory enters from the side.

The children of v in that tree are the last vertices of all paths into v. If one of them feeds all the others, it is the
divergence and v the convergence: the two are in *series*, and the other children are the *branches* between them. So
the tree is divided into chains, and each vertex of a chain has the branches that converge on it. Along each chain:

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

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.graph.model import Model
from harness.graph.rules.operator_sets import ACTIVATION_OPS, LINEAR_OPS

_ELEMENTWISE = ACTIVATION_OPS | {"Add", "BatchNormalization", "Div", "Max", "Min", "Mul", "Sub"}
MAX_MAIN_INPUTS = 1024  # number of inputs among which the main input is searched, because each takes a bit per node
_MAX_REGION_DEPTH = 32  # deeper regions become part of their parent, so that trees can be compared and printed
_Draft = tuple[int, Sequence[int] | None]
"""Position of the parent among the drafts of regions (-1: none), and the nodes of a leaf; None for a composite."""


class RegionType(Enum):
    """LEAF: nodes only. COMPOSITE: child regions only. ROOT: the child regions of the whole model."""

    LEAF = "LEAF"
    COMPOSITE = "COMPOSITE"
    ROOT = "ROOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Subgraph with its boundary.

    Attributes:
        id: Number in pre-order over the tree, from 0; -1 for the ROOT.
        type: LEAF, COMPOSITE or ROOT.
        level: Depth below the ROOT: 0 for its children, -1 for the ROOT.
        nodes: Indices of the nodes of a LEAF in topological order; empty for other regions.
        children: Child regions in the order of their first nodes; empty for a LEAF.
        inputs: Tensors from outside, without constants, in the order of their first use.
        outputs: Tensors computed inside that are used outside or are outputs of the model.
    """

    id: int
    type: RegionType
    level: int
    nodes: tuple[int, ...]
    children: tuple[Region, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def walk(self) -> Iterator[Region]:
        """Yield this region and all below it, parents first."""
        todo = [self]
        while todo:
            region = todo.pop()
            yield region
            todo.extend(reversed(region.children))

    def iter_leaves(self) -> Iterator[Region]:
        """Iterate over the LEAF regions at or below this one, in pre-order."""
        return (region for region in self.walk() if region.type is RegionType.LEAF)

    def node_indices(self) -> tuple[int, ...]:
        """Return the indices of all nodes at or below this region, in topological order."""
        return self.nodes if not self.children else tuple(sorted(n for leaf in self.iter_leaves() for n in leaf.nodes))


def discover_regions(
    model: Model, *, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10
) -> Region:
    """Partition a model into regions.

    The main input is the one that most nodes depend on. Nodes that depend only on others (masks, position tables,
    memory) are partitioned separately, because they would hide the structure of the main part.

    Args:
        maximum_sequence_region_size: Largest number of nodes in a LEAF that is a sequence.
        minimum_topdown_search_size: Smallest number of nodes in a convergence that is split into a COMPOSITE.

    Returns:
        The ROOT; each node of the model is in exactly one LEAF below it, and each LEAF is connected.

    Raises:
        ValueError: One of the sizes is below 1.
    """
    longest, smallest = maximum_sequence_region_size, minimum_topdown_search_size
    if longest < 1:
        raise ValueError(f"maximum_sequence_region_size: at least 1, but got {longest}")
    if smallest < 1:
        raise ValueError(f"minimum_topdown_search_size: at least 1, but got {smallest}")
    readers = find_readers(model)
    names = model.inputs[:MAX_MAIN_INPUTS]
    reach = {name: 1 << bit for bit, name in enumerate(names)}
    reached = []
    for node in model.nodes:
        mask = 0
        for name in (*node.inputs, *node.captures):
            mask |= reach.get(name, 0)
        reached.append(mask)
        reach.update((name, mask) for name in node.outputs if name)
    masks = Counter(reached)
    counts = [sum(n for mask, n in masks.items() if mask >> bit & 1) for bit in range(len(names))]
    if not any(counts):
        drafts = _partition_part(model, readers, range(len(model.nodes)), None, longest, smallest)
        return _build_tree(model, readers, drafts)
    main = counts.index(max(counts))
    inside = [index for index, mask in enumerate(reached) if mask >> main & 1]
    outside = [index for index, mask in enumerate(reached) if not mask >> main & 1]
    drafts = _partition_part(model, readers, inside, names[main], longest, smallest)
    shift = len(drafts)
    for parent, nodes in _partition_part(model, readers, outside, None, longest, smallest):
        drafts.append((parent + shift if parent >= 0 else -1, nodes))
    return _build_tree(model, readers, drafts)


def find_readers(model: Model) -> dict[str, list[int]]:
    """Return, by tensor, the indices of the nodes that read it, also in a subgraph, in order without duplicates."""
    found: dict[str, list[int]] = defaultdict(list)
    for node in model.nodes:
        for name in {*node.inputs, *node.captures} - {""}:
            found[name].append(node.index)
    return found


def find_boundary(
    model: Model, readers: Mapping[str, Sequence[int]], nodes: Sequence[int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs and outputs of a set of nodes, as in `Region`.

    Args:
        readers: Result of `find_readers`.
        nodes: Indices of the nodes in topological order.
    """
    inside = set(nodes)
    inputs: dict[str, None] = {}
    outputs: list[str] = []
    for index in nodes:
        node = model.nodes[index]
        for name in (*node.inputs, *node.captures):
            if name and name not in model.constants and model.producer.get(name, -1) not in inside:
                inputs[name] = None
        for name in node.outputs:
            if name in model.output_names or not inside.issuperset(readers.get(name, ())):
                outputs.append(name)
    return tuple(inputs), tuple(outputs)


def _partition_part(
    model: Model,
    readers: Mapping[str, Sequence[int]],
    nodes: Sequence[int],
    tensor: str | None,
    longest: int,
    smallest: int,
) -> list[_Draft]:
    """Partition one part. `tensor`, if given, is vertex 0, so that a block at an input is cut like any other block.

    Args:
        longest: Largest number of vertices in a leaf that is a sequence.
        smallest: Smallest number of vertices in a convergence of branches that is split into a composite.

    Returns:
        Leaves and composites; a parent comes before its children.
    """
    first = 0 if tensor is None else 1
    vertex = {index: position + first for position, index in enumerate(nodes)}
    ends, sink = set(model.outputs), len(nodes) + first
    operators, labels, edges = [""] * first, [""] * first, []
    for names in [(tensor,)] * first + [model.nodes[index].outputs for index in nodes]:
        found = sorted({vertex[index] for name in names for index in readers.get(name or "", ()) if index in vertex})
        edges.append(found if ends.isdisjoint(names) else [*found, sink])
    for node in (model.nodes[index] for index in nodes):
        operators.append(node.op)
        # Repetitions have equal labels: without strides, which may differ between them.
        kernel, grouped = node.attributes.get("kernel_shape"), int(node.attributes.get("group", 1)) > 1
        labels.append(f"{node.domain}:{node.op} {kernel} {grouped}")
    drafts = _Partitioner(BranchStructure(edges), operators, labels, longest, smallest).partition()
    return [(parent, None if leaf is None else [nodes[v - first] for v in leaf]) for parent, leaf in drafts]


def _build_tree(model: Model, readers: Mapping[str, Sequence[int]], drafts: Sequence[_Draft]) -> Region:
    """Return the ROOT of the regions of drafts; a composite with one child is replaced by the child."""
    top = len(drafts)
    nodes: list[Sequence[int]] = [*(leaf or () for _, leaf in drafts), range(len(model.nodes))]
    children: list[list[int]] = [[] for _ in range(top + 1)]
    for number in range(top - 1, -1, -1):
        own = children[number]
        if own:
            own.sort(key=lambda child: nodes[child][0])
            nodes[number] = sorted(node for child in own for node in nodes[child])
        parent = drafts[number][0]
        children[parent if parent >= 0 else top].append(own[0] if len(own) == 1 else number)
    children[top].sort(key=lambda child: nodes[child][0])
    order, todo = [], [(top, -1)]
    while todo:
        draft, level = todo.pop()
        order.append((draft, level))
        todo.extend((child, level + 1) for child in reversed(children[draft]))
    built: dict[int, Region] = {}
    for number, (draft, level) in reversed(list(enumerate(order))):
        parts = tuple(built.pop(child) for child in children[draft])
        leaf = not parts and draft != top
        inputs, outputs = find_boundary(model, readers, nodes[draft])
        built[draft] = Region(
            id=number - 1,
            type=RegionType.LEAF if leaf else RegionType.ROOT if draft == top else RegionType.COMPOSITE,
            level=level,
            nodes=tuple(nodes[draft]) if leaf else (),
            children=parts,
            inputs=inputs,
            outputs=outputs,
        )
    return built[top]


@dataclass(frozen=True, slots=True)
class _ChainItem:
    vertex: int
    size: int
    linear: bool
    elementwise: bool  # its branches too
    block: bool = False


class _Partitioner:
    """Partitioner of a graph.

    Args:
        flow: Chains and branches of the graph.
        operators: Operator of each vertex except the sink; "" for a vertex that is no node.
        labels: Label of each vertex; repetitions have equal labels.
    """

    def __init__(
        self, flow: BranchStructure, operators: Sequence[str], labels: Sequence[Hashable], longest: int, smallest: int
    ) -> None:
        self._flow, self._labels, self._longest, self._smallest = flow, labels, longest, smallest
        self._linear, self._elementwise, self._real = (
            [*marks, False]
            for marks in (
                [operator in LINEAR_OPS for operator in operators],
                [operator in _ELEMENTWISE for operator in operators],
                [bool(operator) for operator in operators],
            )
        )
        self._drafts: list[_Draft] = []
        self._depths: list[int] = []
        self._todo: list[tuple[int, list[_ChainItem]]] = []
        self._counts = [self._cumulative_counts(each) for each in (self._real, self._linear, self._elementwise)]

    def partition(self) -> list[_Draft]:
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
        items = []
        for vertex in self._flow.chain(last):
            if self._real[vertex]:
                before = self._flow.series[vertex]
                size, linears, elementwises = (
                    totals[vertex] - (totals[before] if before >= 0 else 0) for totals in self._counts
                )
                linear = self._linear[vertex]
                block = linears > linear or size >= max(2, self._smallest)
                items.append(_ChainItem(vertex, size, linear, elementwises == size, block))
        return items

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
            self._drafts.append((parent, None))
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
            vertices += self._branch_vertices(item)
        self._drafts.append((parent, sorted(vertices)))
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
        keys = []
        for group in groups:
            key = []
            for item in group:
                below = frozenset(self._labels[v] for v in self._branch_vertices(item))
                key.append((self._labels[item.vertex], below))
            keys.append(key)
        leaves: list[list[_ChainItem]] = []
        rest: list[list[_ChainItem]] = []
        place = 0
        while place < len(groups):
            # The smallest number of consecutive groups that fit into a leaf and repeat directly.
            period, size = 1, _total_size(groups[place])
            while size <= self._longest and place + 2 * period <= len(groups):
                if keys[place : place + period] == keys[place + period : place + 2 * period]:
                    break
                size += _total_size(groups[place + period])
                period += 1
            else:
                rest += self._split_group(groups[place])
                place += 1
                continue
            leaves += _pack_leaves(rest, self._longest)
            rest, unit = [], keys[place : place + period]
            while keys[place : place + period] == unit:
                leaves.append([item for group in groups[place : place + period] for item in group])
                place += period
        return leaves + _pack_leaves(rest, self._longest)

    def _branch_vertices(self, item: _ChainItem) -> list[int]:
        return [v for v in self._flow.branch_vertices(item.vertex) if self._real[v]] if item.size > 1 else []

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


class BranchStructure:
    """Chains and branches of an acyclic graph with vertices numbered in topological order.

    Attributes:
        sink: Number of the virtual vertex at the end of every path, the last one.
        series: For each vertex: the vertex before it in its chain, or -1 at the start of a chain.
        branches: For each vertex: last vertices of the chains that converge on it, in topological order.
    """

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        """Find the chains and branches.

        Args:
            successors: Successors of each vertex, which have greater numbers and no duplicates. The sink has the number
                `len(successors)`; it is the successor of vertices without any, and may be one of other vertices.
        """
        sink = self.sink = len(successors)
        tree = _AncestorTree(sink)
        for vertex in range(sink - 1, -1, -1):
            found = sink
            for position, successor in enumerate(successors[vertex]):
                found = tree.lowest_common_ancestor(found, successor) if position else successor
            tree.attach(vertex, found)
        self.branches: list[list[int]] = [[] for _ in range(sink + 1)]
        fed = [False] * (sink + 1)
        for vertex in range(sink):
            parent = tree.parent[vertex]
            self.branches[parent].append(vertex)
            for successor in successors[vertex]:
                if successor != parent:
                    fed[tree.ancestor_at_depth(successor, tree.depth[vertex])] = True
        self.series = [-1] * (sink + 1)
        for vertex, ends in enumerate(self.branches):
            sources = [end for end in ends if not fed[end]]
            if len(sources) == 1:
                self.series[vertex] = sources[0]
                ends.remove(sources[0])

    def chain(self, last: int) -> list[int]:
        """Return the vertices of the chain that ends in a vertex, in the direction of the data flow."""
        found = []
        while last >= 0:
            found.append(last)
            last = self.series[last]
        return found[::-1]

    def branch_vertices(self, vertex: int) -> Iterator[int]:
        """Yield all vertices of the branches that converge on a vertex, in any order, without the vertex itself."""
        todo = list(self.branches[vertex])
        while todo:
            last = todo.pop()
            while last >= 0:
                yield last
                todo.extend(self.branches[last])
                last = self.series[last]


class _AncestorTree:
    """A growing tree; ancestor queries in O(log n) by jump pointers (Myers 1983, "Applicative Random-Access Stack")."""

    def __init__(self, root: int) -> None:
        self.parent = [root] * (root + 1)
        self.depth = [0] * (root + 1)
        self._jump = [root] * (root + 1)

    def attach(self, vertex: int, parent: int) -> None:
        depth, jump = self.depth, self._jump
        self.parent[vertex] = parent
        depth[vertex] = depth[parent] + 1
        far = jump[parent]
        jump[vertex] = jump[far] if depth[parent] - depth[far] == depth[far] - depth[jump[far]] else parent

    def ancestor_at_depth(self, vertex: int, depth: int) -> int:
        """Return the ancestor of a vertex (or itself) at a depth not below its own."""
        while self.depth[vertex] > depth:
            far = self._jump[vertex]
            vertex = far if self.depth[far] >= depth else self.parent[vertex]
        return vertex

    def lowest_common_ancestor(self, a: int, b: int) -> int:
        """Return the lowest common ancestor of two vertices."""
        a, b = self.ancestor_at_depth(a, self.depth[b]), self.ancestor_at_depth(b, self.depth[a])
        while a != b:
            if self._jump[a] != self._jump[b]:
                a, b = self._jump[a], self._jump[b]
            else:
                a, b = self.parent[a], self.parent[b]
        return a
