"""Search for the regions of a model, and their selection by names of nodes, under ModelOpt's names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from harness.base.errors import UserError, prefix_file
from harness.base.files import read_text
from harness.compat.modelopt_autotune.insertion_points import Region, RegionType, from_graph
from harness.compat.modelopt_autotune.region_pattern import RegionIndex
from harness.compat.modelopt_autotune.settings import AutotunerError
from harness.graph.io.files import to_proto
from harness.graph.model import Model, Node, read_nodes
from harness.graph.partition.regions import discover_regions, find_boundary, find_readers


class RegionSearchBase:
    """Graph whose regions are searched.

    Args:
        graph: The `graph` of an autotuner, an `onnx.ModelProto` or an `onnx_graphsurgeon.Graph` in topological order.
            Regions name nodes by their index in it.
        root: Region to search in; None: one with all nodes.
    """

    def __init__(self, graph: Any, root: Region | None = None) -> None:
        self.graph = graph
        if isinstance(graph, RegionIndex):
            self._model = graph.model
        else:
            proto = to_proto(graph)
            self._model = Model(proto=proto, source="graph", sha256="", nodes=read_nodes(proto), types={})
        self._readers = find_readers(self._model)
        if root is None:
            root = Region(0, 0, RegionType.ROOT)
            root.nodes.update(range(len(self._model.nodes)))
            self.compute_region_boundaries(root)
        self.root = root

    def compute_region_boundaries(self, region: Region, include_constant: bool = False) -> None:
        """Set `inputs` and `outputs` of a region to the names of the tensors at its boundary.

        Args:
            include_constant: Count constants as inputs.
        """
        nodes = sorted(region.get_region_nodes_and_descendants())
        inputs, outputs = find_boundary(self._model, self._readers, nodes)
        used = {name for index in nodes for name in self._model.nodes[index].inputs} if include_constant else set()
        region.inputs, region.outputs = [*inputs, *sorted(used & self._model.constants.keys())], list(outputs)

    def print_tree(
        self, region: Region | None = None, indent: int = 0, max_items: int = 20, file: IO[str] | None = None
    ) -> None:
        """Print a region and those below it; None: the whole graph.

        Args:
            max_items: Maximum number of tensors and nodes in each list.
            file: Text file; None: standard output.
        """
        for line in self._describe(region or self.root, max_items):
            print(f"{'  ' * indent}{line}", file=file)

    def _describe(self, region: Region, limit: int) -> Iterator[str]:
        nodes = [self._model.nodes[index] for index in region.get_nodes(sort=True)]
        lists = {
            "Direct nodes": [f"{node.index} {node.op} {node.name}" for node in nodes],
            "Inputs": region.inputs,
            "Outputs": region.outputs,
        }
        yield f"Region {region.id} (Level {region.level}, Type: {region.type.value})"
        yield f"  Total nodes: {region.get_size_of_region_and_descendants()}"
        for title, items in lists.items():
            yield f"  {title}: {len(items)}"
            yield from (f"    {item}" for item in islice(items, limit))
            if len(items) > limit:
                yield f"    and {len(items) - limit} more"
        yield f"  Children: {len(region.children)}"
        for child in region.children:
            yield from (f"    {line}" for line in self._describe(child, limit))

    def _discover(
        self, longest: int = 10, smallest: int = 10, *, within: Iterable[int] = (), first_id: int = 0
    ) -> list[Region]:
        """Return the topmost regions of the nodes with these indices, or of all."""
        nodes, part = sorted(within), self._model
        if nodes:
            part = replace(part, nodes=tuple(replace(part.nodes[index], index=n) for n, index in enumerate(nodes)))
        root = discover_regions(part, maximum_sequence_region_size=longest, minimum_topdown_search_size=smallest)
        tops = [from_graph(child) for child in root.children]
        for region in [region for top in tops for region in top.walk()] if nodes else ():
            region.id += first_id
            region.nodes = {nodes[place] for place in region.nodes}
            self.compute_region_boundaries(region)
        return tops


class RegionPartitioner(RegionSearchBase):
    """Search for the LEAF regions of a graph."""

    def partition_graph(self) -> list[Region]:
        """Return the LEAF regions; each node is in exactly one of them."""
        leaves = [region for top in self._discover() for region in top.walk() if region.type is RegionType.LEAF]
        for leaf in leaves:
            leaf.parent, leaf.level = None, 0
        return leaves


class TopDownRegionBuilder(RegionSearchBase):
    """Search for the regions within a region.

    Args:
        graph: Graph as for `RegionSearchBase`.
        root: Region to search in.
        next_region_id: Identifier of the first region that is found.
        maximum_sequence_region_size: Maximum number of nodes of a LEAF that is a sequence.
        minimum_topdown_search_size: Number of nodes from which branches and the node that joins them are split.
    """

    def __init__(
        self,
        graph: Any,
        root: Region,
        next_region_id: int = 0,
        maximum_sequence_region_size: int = 10,
        minimum_topdown_search_size: int = 10,
    ) -> None:
        super().__init__(graph, root)
        self.next_region_id = next_region_id
        self._sizes = maximum_sequence_region_size, minimum_topdown_search_size

    def build_composite_region(self) -> Region:
        """Return the region as a COMPOSITE of what was found, or as a LEAF if it is not split."""
        nodes = self.root.get_region_nodes_and_descendants()
        regions = self._discover(*self._sizes, within=nodes, first_id=self.next_region_id)
        if len(regions) == 1:
            return regions[0]
        self.next_region_id += sum(1 for top in regions for _ in top.walk())
        built = Region(self.next_region_id, self.root.level, RegionType.COMPOSITE)
        for top in regions:
            built.add_child(top)
        self.compute_region_boundaries(built)
        self.next_region_id += 1
        return built


class CombinedRegionSearch(RegionSearchBase):
    """Search for the regions of a model.

    Args:
        graph: Graph as for `RegionSearchBase`.
        maximum_sequence_region_size: Maximum number of nodes of a LEAF that is a sequence.
        minimum_topdown_search_size: Number of nodes from which branches and the node that joins them are split.
    """

    def __init__(
        self, graph: Any, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10
    ) -> None:
        super().__init__(graph)
        self.maximum_sequence_region_size = maximum_sequence_region_size
        self.minimum_topdown_search_size = minimum_topdown_search_size
        self.regions: list[Region] = []

    def search_regions(self) -> list[Region]:
        """Return the regions directly below the whole model; each node is in one LEAF at or below one of them."""
        self.regions = self._discover(self.maximum_sequence_region_size, self.minimum_topdown_search_size)
        return self.regions


MAX_FILTER_BYTES = 1 << 20


def get_node_filter_list(node_filter_list_path: str | None) -> list[str] | None:
    """Return the wildcards in a file, one per line; empty lines and lines that start with "#" are skipped."""
    if not node_filter_list_path:
        return None
    path = Path(node_filter_list_path)
    with prefix_file("--node_filter_list"):
        lines = [line.strip() for line in read_text(path, "a list of wildcards", MAX_FILTER_BYTES).splitlines()]
    wildcards = [line for line in lines if line and not line.startswith("#")]
    if not wildcards:
        raise UserError(f"--node_filter_list {path}: there is no wildcard in it; one a line, such as *conv*")
    return wildcards


def select_regions(regions: Sequence[Region], nodes: Sequence[Node], filters: Sequence[str]) -> list[Region]:
    """Return the regions with a node whose name matches a wildcard; without wildcards all.

    Raises:
        AutotunerError: No node matches.
    """

    def matches(region: Region) -> bool:
        names = (nodes[index].name for index in region.get_region_nodes_and_descendants())
        return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in filters)

    selected = [region for region in regions if not filters or matches(region)]
    if filters and not selected:
        raise AutotunerError(f"node filters {', '.join(filters)}: no node of the model has such a name")
    return selected
