"""Series and branches against post-dominators found by trying every path."""

from hypothesis import given
from hypothesis import strategies as st

from harness.graph.partition.post_dominators import find_branch_structure

graphs = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*[st.frozensets(st.integers(vertex + 1, size), max_size=4) for vertex in range(size)])
)


def reached(successors: list[list[int]], start: int, without: int) -> set[int]:
    found, todo = set(), [start]
    while todo:
        vertex = todo.pop()
        if vertex not in found and vertex != without:
            found.add(vertex)
            todo += successors[vertex]
    return found


def post_dominators(successors: list[list[int]], vertex: int) -> list[int]:
    """Vertices without which a vertex cannot reach the sink, nearest first."""
    sink = len(successors) - 1
    return [v for v in range(vertex + 1, sink + 1) if v == sink or sink not in reached(successors, vertex, v)]


@given(graphs)
def test_parent_of_a_vertex_is_its_immediate_post_dominator(drawn):
    sink = len(drawn)
    flow = find_branch_structure([sorted(found) for found in drawn])
    whole = [sorted(found) or [sink] for found in drawn] + [[]]
    parents = {}
    for vertex in range(sink + 1):
        ends = [*flow.branches[vertex], *([flow.series[vertex]] if flow.series[vertex] >= 0 else [])]
        for end in ends:
            assert end not in parents
            parents[end] = vertex
    assert parents == {vertex: post_dominators(whole, vertex)[0] for vertex in range(sink)}


@given(graphs)
def test_series_vertex_reaches_all_branches_and_none_reach_it(drawn):
    sink = len(drawn)
    flow = find_branch_structure([sorted(found) for found in drawn])
    whole = [sorted(found) or [sink] for found in drawn] + [[]]
    for vertex, before in enumerate(flow.series):
        if before >= 0:
            after = reached(whole, before, vertex)
            for last in flow.branches[vertex]:
                assert last in after
                assert before not in reached(whole, last, vertex)


def test_residual_block_is_one_branch():
    flow = find_branch_structure([[1, 3], [2], [3], [4]])  # 0 diverges, 1 and 2 are the branch, 3 converges
    assert flow.chain(flow.series[flow.sink]) == [0, 3]
    assert flow.branches[3] == (2,)
    assert sorted(flow.branch_vertices(3)) == [1, 2]
    assert flow.branches[flow.sink] == ()


def test_deep_nesting_needs_no_recursion():
    depth = 20_000  # vertex i skips to its mirror image: as many convergences inside each other
    flow = find_branch_structure(
        [sorted({i + 1, 2 * depth - 1 - i}) if i < depth else [i + 1] for i in range(2 * depth)]
    )
    assert flow.series[flow.sink] == 2 * depth - 1
    assert flow.branches[2 * depth - 1] == (2 * depth - 2,)
