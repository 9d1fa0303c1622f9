"""What `qdq regions` shows of regions and patterns: figures, text lines and JSON. Nothing here prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.graph.model import Model
from harness.graph.operators import LINEAR
from harness.graph.patterns import Pattern
from harness.graph.regions import Region, RegionType

__all__ = ["Summary", "describe_summary", "describe_tree", "summary", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one discovery; the ROOT is not counted among the regions.

    Attributes:
        nodes: Nodes of the model.
        covered: Nodes that are in some LEAF.
        top: Regions right below the ROOT.
        refined: Of these, how many were split further.
        leaves: LEAF regions.
        composites: COMPOSITE regions.
        patterns: Distinct patterns of LEAF and COMPOSITE regions.
        leaf_patterns: Distinct patterns of LEAF regions.
        histogram: Number of LEAF regions by their number of nodes, ascending.
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
        """Share of the nodes that are in some LEAF; 1 for a model without nodes."""
        return self.covered / self.nodes if self.nodes else 1.0


def summary(model: Model, root: Region, patterns: Sequence[Pattern]) -> Summary:
    """Figures of a discovery."""
    types = Counter(region.type for region in root.walk())
    sizes = Counter(len(leaf.nodes) for leaf in root.leaves())
    kinds = Counter(pattern.type for pattern in patterns)
    return Summary(
        nodes=len(model.nodes),
        covered=len({node for leaf in root.leaves() for node in leaf.nodes}),
        top=len(root.children),
        refined=sum(child.type is RegionType.COMPOSITE for child in root.children),
        leaves=types[RegionType.LEAF],
        composites=types[RegionType.COMPOSITE],
        patterns=kinds[RegionType.LEAF] + kinds[RegionType.COMPOSITE],
        leaf_patterns=kinds[RegionType.LEAF],
        histogram=tuple(sorted(sizes.items())),
    )


def describe_summary(figures: Summary, *, verbose: bool = False) -> list[str]:
    """Phases, totals and sizes as lines; `verbose` adds the histogram."""
    f = figures
    covered = f"{f.covered}/{f.nodes} nodes ({f.coverage:.1%})"
    count = sum(n for _, n in f.histogram)
    lines = [
        f"Phase 1 complete: {f.top} regions, {covered}",
        f"Phase 2 complete: refined {f.refined} regions, skipped {f.top - f.refined}",
        f"Summary: {f.leaves + f.composites} regions ({f.leaves} LEAF, {f.composites} COMPOSITE), {covered}",
    ]
    if count:
        mean = sum(size * n for size, n in f.histogram) / count
        least, most = f.histogram[0][0], f.histogram[-1][0]
        lines.append(f"LEAF region sizes: min={least}, max={most}, avg={mean:.1f}")
    lines.append(f"Patterns: {f.patterns} ({f.leaf_patterns} of LEAF regions)")
    if verbose:
        lines.append("Size distribution:")
        lines += [f"  {size:4d} nodes: {'█' * min(n, 50)} ({n} regions)" for size, n in f.histogram]
    return lines


def describe_tree(root: Region, model: Model, *, include_all: bool = True) -> list[str]:
    """The regions below the ROOT as lines of a tree.

    Args:
        root: The ROOT.
        model: Its model.
        include_all: Also regions without a linear operator.
    """
    lines: list[str] = []
    for region in root.walk():
        members = region.members()
        if region is root or not (include_all or any(model.nodes[index].op in LINEAR for index in members)):
            continue
        indent = "│    " * region.level
        lines.append(f"{indent}├─ Region {region.id} (Level {region.level}, Type: {region.type.value})")
        lines.append(f"{indent}│  ├─ Direct nodes: {len(region.nodes)}")
        if region.children:
            lines.append(f"{indent}│  ├─ Total nodes (recursive): {len(members)}")
            lines.append(f"{indent}│  ├─ Children: {len(region.children)}")
        else:
            lines.append(f"{indent}│  ├─ Nodes: {', '.join(model.nodes[index].op for index in region.nodes)}")
        lines.append(f"{indent}│  ├─ Inputs: {len(region.inputs)} tensors")
        lines.append(f"{indent}│  └─ Outputs: {len(region.outputs)} tensors")
    return lines


def to_json(model: Model, root: Region, patterns: Sequence[Pattern]) -> dict[str, Any]:
    """Everything as plain values: regions in pre-order with the id of their parent, and patterns."""
    signature = {region.id: pattern.signature for pattern in patterns for region in pattern.regions}
    parent = {child.id: region.id for region in root.walk() for child in region.children}
    figures = summary(model, root, patterns)
    return {
        "model": model.source,
        "summary": {name: getattr(figures, name) for name in Summary.__dataclass_fields__ if name != "histogram"},
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
