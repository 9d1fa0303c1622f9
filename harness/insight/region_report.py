"""Report of `qdq inspect regions`: the region tree, the patterns and the insertion points of a model."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.config.sections import ModelSpec
from harness.graph.model import Model
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.partition.regions import Region, RegionType, discover_regions
from harness.graph.partition.summary import (
    TreeOptions,
    describe_phases,
    describe_summary,
    describe_tree,
    summarize_discovery,
    to_json,
)
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.graph.rules.points import float_inputs_with_rule
from harness.run.prepare.model_loader import open_model
from search.space import Edge, Space


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def lines(self, view: TreeOptions) -> list[str]:
        """Return the report as text lines: phases, hierarchy, coverage, sizes, patterns, insertion points."""
        model, figures = self.model, summarize_discovery(self.model, self.root, self.patterns)
        refusals = []
        for rule, count in Counter(rule for _, rule in self.refused).most_common():
            refusals.append(f"  {rule}  {count}")
            edges = [edge for edge, name in self.refused if name == rule] if view.verbose else []
            refusals += [f"    - {edge.tensor} -> input {edge.slot} of {edge.consumer}" for edge in edges]
        return [
            f"Loaded graph: {len(model.nodes)} nodes, {len(model.inputs)} inputs, {len(model.outputs)} outputs",
            *describe_phases(figures),
            "",
            *describe_tree(self.root, model, self.patterns, view),
            "",
            *describe_summary(figures),
            "",
            "Patterns (signature, regions, operators):",
            *(
                f"  {p.signature[:8]}  {len(p.regions):4d}  {', '.join(p.operators)}"
                for p in self.patterns
                if p.type is not RegionType.ROOT
            ),
            "",
            f"Insertion points: {len(self.space)} dimensions in dialect {self.dialect} (name, role, edges):",
            *(f"  {d.name}  {d.role}  {len(d.edges)}" for d in self.space.dimensions),
            "",
            f"Inputs that stay float in dialect {self.dialect} (rule, inputs):",
            *refusals,
        ]

    def data(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        points = [
            {"name": d.name, "role": d.role, "kind": d.kind, "choices": list(d.choices), "edges": len(d.edges)}
            for d in self.space.dimensions
        ]
        stay = [{"node": e.consumer, "input": e.slot, "tensor": e.tensor, "rule": rule} for e, rule in self.refused]
        found = to_json(self.model, self.root, self.patterns)
        return {**found, "dialect": self.dialect, "dimensions": points, "stay_float": stay}

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
