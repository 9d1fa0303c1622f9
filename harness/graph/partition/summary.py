"""Summary of regions and patterns for `qdq inspect regions`: figures, lines of text, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.graph.model import Model
from harness.graph.partition.patterns import Pattern
from harness.graph.partition.regions import Region, RegionType
from harness.graph.rules.operator_sets import LINEAR_OPS

QUANTIZABLE_OPS = LINEAR_OPS | {
    "Add", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "Mul", "Relu", "Resize", "Sum",
}  # fmt: skip
"""Operators that ModelOpt's region inspection looks for (`get_autotuner_quantizable_ops`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Options of the printed region tree.

    Attributes:
        include_all: Whether LEAF regions without quantizable operators are printed.
        verbose: Whether the names of nodes and boundary tensors are printed.
    """

    include_all: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySummary:
    """Numbers of nodes, regions (without the ROOT) and patterns of a model.

    Attributes:
        covered: Number of nodes that are in a LEAF.
        top: Number of regions directly below the ROOT.
        refined: Number of these regions that were split further.
        patterns: Number of patterns of LEAF and COMPOSITE regions.
        leaf_patterns: Number of patterns of LEAF regions.
        histogram: Pairs (number of nodes, number of LEAF regions with it) in ascending order.
        leaves: Number of LEAF regions.
        composites: Number of COMPOSITE regions.
    """

    nodes: int
    covered: int
    top: int
    refined: int
    leaves: int
    composites: int
    patterns: int
    leaf_patterns: int
    histogram: tuple[tuple[int, int], ...]

    @property
    def coverage(self) -> float:
        """Share (0 to 1) of the nodes that are in some LEAF; 1 for a model without nodes."""
        return self.covered / self.nodes if self.nodes else 1.0


def summarize_discovery(model: Model, root: Region, patterns: Sequence[Pattern]) -> DiscoverySummary:
    """Return the counts of regions below a root, of nodes in them, of LEAF regions by size, and of patterns."""
    types = Counter(region.type for region in root.walk())
    sizes = Counter(len(leaf.nodes) for leaf in root.iter_leaves())
    kinds = Counter(pattern.type for pattern in patterns)
    return DiscoverySummary(
        nodes=len(model.nodes),
        covered=len({node for leaf in root.iter_leaves() for node in leaf.nodes}),
        top=len(root.children),
        refined=sum(child.type is RegionType.COMPOSITE for child in root.children),
        leaves=types[RegionType.LEAF],
        composites=types[RegionType.COMPOSITE],
        patterns=kinds[RegionType.LEAF] + kinds[RegionType.COMPOSITE],
        leaf_patterns=kinds[RegionType.LEAF],
        histogram=tuple(sorted(sizes.items())),
    )


def describe_phases(figures: DiscoverySummary) -> list[str]:
    """Describe the two phases of a region discovery as two lines: regions found, and regions refined."""
    f = figures
    return [
        f"Phase 1 complete: {f.top} regions, {_coverage_line(f)}",
        f"Phase 2 complete: refined {f.refined} regions, skipped {f.top - f.refined}",
    ]


def describe_summary(figures: DiscoverySummary) -> list[str]:
    """Describe totals, patterns, and the sizes of LEAF regions with their histogram, as lines."""
    f = figures
    lines = [
        f"Summary: {f.leaves + f.composites} regions ({f.leaves} LEAF, {f.composites} COMPOSITE), {_coverage_line(f)}",
        f"Patterns: {f.patterns} ({f.leaf_patterns} of LEAF regions)",
    ]
    count = sum(n for _, n in f.histogram)
    if count:
        mean = sum(size * n for size, n in f.histogram) / count
        least, most = f.histogram[0][0], f.histogram[-1][0]
        lines += [f"LEAF region sizes: min={least}, max={most}, avg={mean:.1f}", "Size distribution:"]
        lines += [f"  {size:4d} nodes: {'█' * min(n, 50)} ({n} regions)" for size, n in f.histogram]
    return lines


def _coverage_line(figures: DiscoverySummary) -> str:
    return f"{figures.covered}/{figures.nodes} nodes ({figures.coverage:.1%})"


def is_quantizable(region: Region, model: Model) -> bool:
    """Return whether a region is no LEAF or has an operator of `QUANTIZABLE_OPS`.

    This is the rule of ModelOpt's `has_quantizable_operations` (nvidia-modelopt 0.47, autotune/insertion_points.py).
    """
    return region.type is not RegionType.LEAF or any(model.nodes[index].op in QUANTIZABLE_OPS for index in region.nodes)


def describe_tree(root: Region, model: Model, patterns: Sequence[Pattern], view: TreeOptions) -> list[str]:
    """Describe the regions below the ROOT as lines of a tree."""
    shared = {region.id: pattern for pattern in patterns for region in pattern.regions}
    lines: list[str] = []
    skipped = 0
    for region in root.walk():
        if region is root:
            continue
        if not (view.include_all or is_quantizable(region, model)):
            skipped += 1
            continue
        indent = "│    " * region.level
        lines.append(f"{indent}├─ Region {region.id} (Level {region.level}, Type: {region.type.value})")
        lines += (f"{indent}│  {line}" for line in _region_details(region, model, shared[region.id], view))
    if skipped:
        lines.append(f"{skipped} LEAF regions without quantizable operators are left out: --include-all-regions")
    return lines


def _region_details(region: Region, model: Model, pattern: Pattern, view: TreeOptions) -> Iterator[str]:
    members = region.node_indices()
    yield f"├─ Pattern: {pattern.signature[:8]} (in {len(pattern.regions)} regions)"
    yield f"├─ Direct nodes: {len(region.nodes)}"
    if region.children:
        yield f"├─ Total nodes (recursive): {len(members)}"
        yield f"├─ Children: {len(region.children)}"
    else:
        yield f"├─ Nodes, a {_leaf_shape(region, model)}: {', '.join(model.nodes[index].op for index in region.nodes)}"
        if view.verbose:
            yield from (f"│    - Node {i}: {model.nodes[i].op} ({model.nodes[i].name})" for i in region.nodes)
    for mark, what, names in (("├─", "Inputs", region.inputs), ("└─", "Outputs", region.outputs)):
        yield f"{mark} {what}: {len(names)} tensors"
        if view.verbose:
            yield from (f"│    - {name}" for name in names)


def _leaf_shape(region: Region, model: Model) -> str:
    inside = {name for index in region.nodes for name in model.nodes[index].outputs if name}
    fed = [len(inside.intersection(model.nodes[index].inputs)) for index in region.nodes]
    return "convergence of branches" if max(fed, default=0) > 1 else "sequence"


def to_json(model: Model, root: Region, patterns: Sequence[Pattern]) -> dict[str, Any]:
    """Return the summary, the regions in pre-order with the id of their parent, and the patterns, as a JSON object."""
    signature = {region.id: pattern.signature for pattern in patterns for region in pattern.regions}
    parent = {child.id: region.id for region in root.walk() for child in region.children}
    figures = summarize_discovery(model, root, patterns)
    return {
        "model": model.source,
        "summary": {
            name: getattr(figures, name) for name in DiscoverySummary.__dataclass_fields__ if name != "histogram"
        },
        "histogram": {str(size): count for size, count in figures.histogram},
        "regions": [
            {
                "id": region.id,
                "type": region.type.value,
                "level": region.level,
                "parent": parent.get(region.id),
                "pattern": signature.get(region.id),
                "nodes": [model.nodes[index].name for index in region.nodes],
                "inputs": list(region.inputs),
                "outputs": list(region.outputs),
            }
            for region in root.walk()
        ],
        "patterns": [
            {
                "signature": pattern.signature,
                "type": pattern.type.value,
                "operators": list(pattern.operators),
                "regions": [region.id for region in pattern.regions],
            }
            for pattern in patterns
        ],
    }
