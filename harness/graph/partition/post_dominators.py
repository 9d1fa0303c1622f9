"""Series and branches of a data-flow graph, from its post-dominator tree, in O(n log n) without recursion.

Vertex p post-dominates v when every path from v to the sink passes p. On an acyclic graph one pass in reverse
topological order finds the immediate post-dominators (Cooper, Harvey, Kennedy 2001, "A Simple, Fast Dominance
Algorithm", section 3, on the reversed graph). Post-dominance, unlike single-entry single-exit regions (Johnson,
Pearson, Pingali 1994, "The Program Structure Tree"), does not break where a mask or a memory enters from the side.

The children of v in that tree are the last vertices of all paths into v. If one of them feeds all the others, it is the
divergence and v the convergence: the two are in *series*, and the other children are the *branches* between them. So
the tree is divided into chains, and each vertex of a chain has the branches that converge on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchStructure:
    """Chains and branches of a graph with vertices numbered in topological order; the sink has the last number.

    Attributes:
        series: For each vertex: the vertex before it in its chain, or -1 at the start of a chain.
        branches: For each vertex: last vertices of the chains that converge on it, in topological order.
    """

    series: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]

    @property
    def sink(self) -> int:
        """Number of the virtual vertex at the end of every path."""
        return len(self.series) - 1

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


def find_branch_structure(successors: Sequence[Sequence[int]]) -> BranchStructure:
    """Find the chains and branches of an acyclic graph.

    Args:
        successors: Successors of each vertex, which have greater numbers and no duplicates. The sink has the number
            `len(successors)`; it is the successor of vertices without any, and may be one of other vertices.
    """
    sink = len(successors)
    tree = _AncestorTree(sink)
    for vertex in range(sink - 1, -1, -1):
        found = sink
        for position, successor in enumerate(successors[vertex]):
            found = tree.lowest_common_ancestor(found, successor) if position else successor
        tree.attach(vertex, found)
    children: list[list[int]] = [[] for _ in range(sink + 1)]
    fed = [False] * (sink + 1)
    for vertex in range(sink):
        parent = tree.parent[vertex]
        children[parent].append(vertex)
        for successor in successors[vertex]:
            if successor != parent:
                fed[tree.ancestor_at_depth(successor, tree.depth[vertex])] = True
    series = [-1] * (sink + 1)
    for vertex, ends in enumerate(children):
        sources = [end for end in ends if not fed[end]]
        if len(sources) == 1:
            series[vertex] = sources[0]
            ends.remove(sources[0])
    return BranchStructure(series=tuple(series), branches=tuple(tuple(ends) for ends in children))


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
