"""Report of `qdq inspect regions`: the region tree, the patterns and the insertion points of a model."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.config.sections import ModelSpec
from harness.graph.model import Model
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.partition.regions import Region, RegionType, discover_regions
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.graph.rules.operator_sets import QUANTIZABLE_OPS
from harness.graph.rules.points import float_inputs_with_rule
from harness.run.prepare.model_loader import open_model
from search.space import Edge, Space


@dataclass(frozen=True, kw_only=True)
class RegionReport:
    """Regions, patterns and insertion points of a model.

    Attributes:
        dialect: Name of the dialect whose placement rules apply.
        refused: Inputs without an insertion point, with the name of the rule that excludes them.
    """

    model: Model
    root: Region
    patterns: tuple[Pattern, ...]
    space: Space
    dialect: str
    refused: tuple[tuple[Edge, str], ...]

    @cached_property
    def figures(self) -> Mapping[str, int]:
        """Numbers of nodes, of those that are in a LEAF, of regions without the ROOT, and of patterns.

        "top" is the number of regions directly below the ROOT, "refined" of those that were split further.
        """
        types = Counter(region.type for region in self.root.walk())
        kinds = Counter(pattern.type for pattern in self.patterns)
        return {
            "nodes": len(self.model.nodes),
            "covered": len({node for leaf in self.root.iter_leaves() for node in leaf.nodes}),
            "top": len(self.root.children),
            "refined": sum(child.type is RegionType.COMPOSITE for child in self.root.children),
            "leaves": types[RegionType.LEAF],
            "composites": types[RegionType.COMPOSITE],
            "patterns": kinds[RegionType.LEAF] + kinds[RegionType.COMPOSITE],
            "leaf_patterns": kinds[RegionType.LEAF],
        }

    @cached_property
    def histogram(self) -> Mapping[int, int]:
        """Number of LEAF regions by number of nodes, in ascending order."""
        return dict(sorted(Counter(len(leaf.nodes) for leaf in self.root.iter_leaves()).items()))

    def lines(self, *, include_all: bool, verbose: bool) -> Iterator[str]:
        """Yield the report as text lines: phases, hierarchy, coverage, sizes, patterns, insertion points.

        Args:
            include_all: Whether LEAF regions without quantizable operators are printed.
            verbose: Whether the names of nodes and tensors are printed.
        """
        model, f = self.model, self.figures
        coverage = f"{f['covered']}/{f['nodes']} nodes ({f['covered'] / f['nodes'] if f['nodes'] else 1.0:.1%})"
        yield f"Loaded graph: {len(model.nodes)} nodes, {len(model.inputs)} inputs, {len(model.outputs)} outputs"
        yield f"Phase 1 complete: {f['top']} regions, {coverage}"
        yield f"Phase 2 complete: refined {f['refined']} regions, skipped {f['top'] - f['refined']}"
        yield from ("", *self._tree(include_all=include_all, verbose=verbose), "")
        leaves, composites = f["leaves"], f["composites"]
        yield f"Summary: {leaves + composites} regions ({leaves} LEAF, {composites} COMPOSITE), {coverage}"
        yield f"Patterns: {f['patterns']} ({f['leaf_patterns']} of LEAF regions)"
        if leaves:
            sizes = self.histogram
            mean = sum(size * n for size, n in sizes.items()) / leaves
            yield f"LEAF region sizes: min={min(sizes)}, max={max(sizes)}, avg={mean:.1f}"
            yield "Size distribution:"
            yield from (f"  {size:4d} nodes: {'█' * min(n, 50)} ({n} regions)" for size, n in sizes.items())
        yield from ("", "Patterns (signature, regions, operators):")
        for pattern in self.patterns:
            if pattern.type is not RegionType.ROOT:
                yield f"  {pattern.signature[:8]}  {len(pattern.regions):4d}  {', '.join(pattern.operators)}"
        yield ""
        yield f"Insertion points: {len(self.space)} dimensions in dialect {self.dialect} (name, role, edges):"
        yield from (f"  {d.name}  {d.role}  {len(d.edges)}" for d in self.space.dimensions)
        yield from ("", f"Inputs that stay float in dialect {self.dialect} (rule, inputs):")
        for rule, count in Counter(rule for _, rule in self.refused).most_common():
            yield f"  {rule}  {count}"
            edges = [edge for edge, name in self.refused if name == rule] if verbose else []
            yield from (f"    - {edge.tensor} -> input {edge.slot} of {edge.consumer}" for edge in edges)

    def _tree(self, *, include_all: bool, verbose: bool) -> Iterator[str]:
        """Yield the regions below the ROOT as lines of a tree.

        By default a LEAF without an operator of `QUANTIZABLE_OPS` is left out, the rule of ModelOpt's
        `has_quantizable_operations` (nvidia-modelopt 0.47, autotune/insertion_points.py).
        """
        shared = {region.id: pattern for pattern in self.patterns for region in pattern.regions}
        skipped = 0
        for region in self.root.walk():
            nodes = [self.model.nodes[index] for index in region.nodes]
            if region is self.root:
                continue
            if not (include_all or region.children or any(node.op in QUANTIZABLE_OPS for node in nodes)):
                skipped += 1
                continue
            indent, pattern = "│    " * region.level, shared[region.id]
            yield f"{indent}├─ Region {region.id} (Level {region.level}, Type: {region.type.value})"
            indent += "│  "
            yield f"{indent}├─ Pattern: {pattern.signature[:8]} (in {len(pattern.regions)} regions)"
            yield f"{indent}├─ Direct nodes: {len(nodes)}"
            if region.children:
                yield f"{indent}├─ Total nodes (recursive): {len(region.node_indices())}"
                yield f"{indent}├─ Children: {len(region.children)}"
            else:
                made = {name for node in nodes for name in node.outputs if name}
                fed = max((len(made.intersection(node.inputs)) for node in nodes), default=0)
                shape = "convergence of branches" if fed > 1 else "sequence"
                yield f"{indent}├─ Nodes, a {shape}: {', '.join(node.op for node in nodes)}"
                if verbose:
                    yield from (f"{indent}│    - Node {node.index}: {node.op} ({node.name})" for node in nodes)
            for mark, what, names in (("├─", "Inputs", region.inputs), ("└─", "Outputs", region.outputs)):
                yield f"{indent}{mark} {what}: {len(names)} tensors"
                if verbose:
                    yield from (f"{indent}│    - {name}" for name in names)
        if skipped:
            yield f"{skipped} LEAF regions without quantizable operators are left out: --include-all-regions"

    def data(self) -> dict[str, Any]:
        """Return the report as JSON values: regions in pre-order with the id of their parent, and the patterns."""
        signature = {region.id: pattern.signature for pattern in self.patterns for region in pattern.regions}
        parent = {child.id: region.id for region in self.root.walk() for child in region.children}
        return {
            "model": self.model.source,
            "summary": self.figures,
            "histogram": {str(size): count for size, count in self.histogram.items()},
            "regions": [
                {
                    "id": region.id,
                    "type": region.type.value,
                    "level": region.level,
                    "parent": parent.get(region.id),
                    "pattern": signature.get(region.id),
                    "nodes": [self.model.nodes[index].name for index in region.nodes],
                    "inputs": list(region.inputs),
                    "outputs": list(region.outputs),
                }
                for region in self.root.walk()
            ],
            "patterns": [
                {
                    "signature": pattern.signature,
                    "type": pattern.type.value,
                    "operators": list(pattern.operators),
                    "regions": [region.id for region in pattern.regions],
                }
                for pattern in self.patterns
            ],
            "dialect": self.dialect,
            "dimensions": [
                {"name": d.name, "role": d.role, "kind": d.kind, "choices": list(d.choices), "edges": len(d.edges)}
                for d in self.space.dimensions
            ],
            "stay_float": [
                {"node": edge.consumer, "input": edge.slot, "tensor": edge.tensor, "rule": rule}
                for edge, rule in self.refused
            ],
        }

    def html(self) -> str:
        """Return an HTML page with the graph that needs no server and no network."""
        from harness.report.page.graph_layout import build_scene, render_graph_page

        return render_graph_page(
            build_scene(self.model, self.root, self.patterns, self.space.dimensions), self.model.source
        )


def inspect_regions(
    use: str,
    shapes: Mapping[str, str],
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    dialect: str = "openvino",
    max_sequence_size: int = 10,
) -> RegionReport:
    """Load a model and partition it into regions.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`.
        shapes: Static shapes of dynamic inputs, such as {"images": "1x3x224x224"}.
        dims: Sizes of dynamic dimensions by symbol, such as {"time": 128}.
        dialect: Name of the dialect whose placement rules apply.
        max_sequence_size: Longest sequence that stays one region.
    """
    rules = load_dialect(dialect)
    with tempfile.TemporaryDirectory() as work:
        model = open_model(ModelSpec(use=use, label="model", shapes=dict(shapes), dims=dict(dims)), Path(work))
    root = discover_regions(model, maximum_sequence_region_size=max_sequence_size)
    patterns = find_patterns(model, root)
    space = build_space(model, rules, root=root)
    refused = tuple((edge, rule.name) for edge, rule in float_inputs_with_rule(model, rules))
    return RegionReport(model=model, root=root, patterns=patterns, space=space, dialect=rules.name, refused=refused)
