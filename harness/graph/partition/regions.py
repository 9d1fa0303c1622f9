"""Regions: connected subgraphs with inputs and outputs, as a tree that covers every node exactly once.

The partition is hierarchical and deterministic. A cut depends only on its neighbourhood, so repeated blocks give equal
regions. `post_dominators` finds the structure of the graph, `partitioner` the cuts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.graph.model import Model, Node
from harness.graph.partition.partitioner import RegionDraft, VertexKind, partition_graph
from harness.graph.partition.post_dominators import find_branch_structure
from harness.graph.rules.operator_sets import ACTIVATION_OPS, LINEAR_OPS

_ELEMENTWISE = ACTIVATION_OPS | {"Add", "BatchNormalization", "Div", "Max", "Min", "Mul", "Sub"}
MAX_MAIN_INPUTS = 1024  # number of inputs among which the main input is searched, because each takes a bit per node


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

    Args:
        maximum_sequence_region_size: Largest number of nodes in a LEAF that is a sequence.
        minimum_topdown_search_size: Smallest number of nodes in a convergence that is split into a COMPOSITE.

    Returns:
        The ROOT; each node of the model is in exactly one LEAF below it, and each LEAF is connected.

    Raises:
        ValueError: One of the sizes is below 1.
    """
    for name, value in (
        ("maximum_sequence_region_size", maximum_sequence_region_size),
        ("minimum_topdown_search_size", minimum_topdown_search_size),
    ):
        if value < 1:
            raise ValueError(f"{name}: at least 1, but got {value}")
    readers = find_readers(model)
    drafts: list[RegionDraft] = []
    for nodes, tensor in _split_by_main_input(model):
        shift = len(drafts)
        found = _partition_part(
            model, readers, nodes, tensor, (maximum_sequence_region_size, minimum_topdown_search_size)
        )
        drafts.extend(RegionDraft(d.parent + shift if d.parent >= 0 else -1, d.vertices) for d in found)
    return RegionTreeBuilder(model, readers, drafts).build_root()


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


def _split_by_main_input(model: Model) -> list[tuple[list[int], str | None]]:
    """Divide the nodes into those that depend on the main input, and all others, each with its input or None.

    The main input is the one that most nodes depend on. Nodes that depend only on others (masks, position tables,
    memory) are partitioned separately, because they would hide the structure of the main part.
    """
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
        return [(list(range(len(model.nodes))), None)]
    main = counts.index(max(counts))
    inside = [index for index, mask in enumerate(reached) if mask >> main & 1]
    outside = [index for index, mask in enumerate(reached) if not mask >> main & 1]
    return [(inside, names[main]), (outside, None)]


def _partition_part(
    model: Model, readers: Mapping[str, list[int]], nodes: list[int], tensor: str | None, sizes: tuple[int, int]
) -> list[RegionDraft]:
    """Partition one part. `tensor`, if given, is vertex 0, so that a block at an input is cut like any other block."""
    first = 0 if tensor is None else 1
    vertex = {index: position + first for position, index in enumerate(nodes)}
    ends = set(model.outputs)

    def successors(names: Sequence[str]) -> list[int]:
        found = {vertex[index] for name in names for index in readers.get(name, ()) if index in vertex}
        return sorted(found) if ends.isdisjoint(names) else [*sorted(found), len(nodes) + first]

    edges = [successors((tensor,))] if tensor is not None else []
    edges += [successors(model.nodes[index].outputs) for index in nodes]
    kinds = [VertexKind.VIRTUAL] * first
    kinds += [_vertex_kind(model.nodes[index]) for index in nodes]
    labels = [""] * first + [_repetition_label(model.nodes[index]) for index in nodes]
    drafts = partition_graph(find_branch_structure(edges), kinds, labels, *sizes)
    return [
        d if d.vertices is None else RegionDraft(d.parent, tuple(nodes[v - first] for v in d.vertices)) for d in drafts
    ]


def _vertex_kind(node: Node) -> VertexKind:
    if node.op in LINEAR_OPS:  # a new group of a sequence begins here
        return VertexKind.LINEAR
    return VertexKind.ELEMENTWISE if node.op in _ELEMENTWISE else VertexKind.OTHER


def _repetition_label(node: Node) -> str:
    """Return the label of a node that is equal in repetitions; it has no strides, which may differ between them."""
    attributes = node.attributes
    return f"{node.domain}:{node.op} {attributes.get('kernel_shape')} {int(attributes.get('group', 1)) > 1}"


class RegionTreeBuilder:
    """Builder of the tree of regions from drafts; a composite with one child is replaced by the child.

    Args:
        readers: Result of `find_readers`.
    """

    def __init__(self, model: Model, readers: Mapping[str, list[int]], drafts: Sequence[RegionDraft]) -> None:
        self._model = model
        self._readers = readers
        self._top = len(drafts)
        self._nodes: list[Sequence[int]] = [*(draft.vertices or () for draft in drafts), range(len(model.nodes))]
        self._children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        for number in range(self._top - 1, -1, -1):
            parent = drafts[number].parent if drafts[number].parent >= 0 else self._top
            self._children[parent].append(self._order_children(number))
        self._children[self._top].sort(key=lambda child: self._nodes[child][0])

    def _order_children(self, number: int) -> int:
        """Order the children of a draft; return the draft, or its child if it has only one."""
        children = self._children[number]
        if children:
            children.sort(key=lambda child: self._nodes[child][0])
            self._nodes[number] = sorted(node for child in children for node in self._nodes[child])
        return children[0] if len(children) == 1 else number

    def build_root(self) -> Region:
        order, todo = [], [(self._top, -1)]
        while todo:
            draft, level = todo.pop()
            order.append((draft, level))
            todo.extend((child, level + 1) for child in reversed(self._children[draft]))
        built: dict[int, Region] = {}
        for number in range(len(order) - 1, -1, -1):
            draft, level = order[number]
            children = tuple(built.pop(child) for child in self._children[draft])
            leaf = not children and draft != self._top
            inputs, outputs = find_boundary(self._model, self._readers, self._nodes[draft])
            built[draft] = Region(
                id=number - 1,
                type=RegionType.LEAF if leaf else RegionType.ROOT if draft == self._top else RegionType.COMPOSITE,
                level=level,
                nodes=tuple(self._nodes[draft]) if leaf else (),
                children=children,
                inputs=inputs,
                outputs=outputs,
            )
        return built[self._top]
