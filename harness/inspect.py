"""What `qdq regions` shows: the region tree, the patterns and the insertion points of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import registry
from harness.graph.patterns import find_patterns
from harness.graph.regions import RegionType, discover
from harness.graph.space import build_space
from harness.graph.summary import describe_summary, describe_tree, summary, to_json
from harness.run.compose import open_model
from harness.run.config import ModelSpec

__all__ = ["Inspection", "inspect_regions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """How regions are shown.

    Attributes:
        dialect: Whose rules of legality apply.
        max_sequence_size: Longest sequence that stays one region.
        include_all: Also regions without a linear operator.
        verbose: Also the distribution of sizes.
    """

    dialect: str = "openvino"
    max_sequence_size: int = 10
    include_all: bool = False
    verbose: bool = False


def inspect_regions(use: str, shapes: Mapping[str, str], options: Inspection) -> tuple[list[str], dict[str, Any]]:
    """Text lines and JSON-able data about the regions of a model.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`.
        shapes: Static shapes of dynamic inputs, such as {"images": "1x3x224x224"}.
        options: What to look at and how.

    Raises:
        UserError: The model cannot be loaded, or there is no such dialect.
    """
    dialect: Any = registry.load("dialect", options.dialect)
    with tempfile.TemporaryDirectory() as work:
        model = open_model(ModelSpec(use=use, label="model", shapes=dict(shapes)), Path.cwd(), Path(work))
    root = discover(model, maximum_sequence_region_size=options.max_sequence_size)
    patterns = find_patterns(model, root)
    space = build_space(model, dialect, root=root)
    lines = [
        *describe_summary(summary(model, root, patterns), verbose=options.verbose),
        "",
        *describe_tree(root, model, include_all=options.include_all),
        "",
        "Patterns (signature, regions, operators):",
        *(
            f"  {p.signature[:8]}  {len(p.regions):4d}  {', '.join(p.operators)}"
            for p in patterns
            if p.type is not RegionType.ROOT
        ),
        "",
        f"Insertion points: {len(space)} dimensions in dialect {dialect.name} (name, role, edges):",
        *(f"  {d.name}  {d.role}  {len(d.edges)}" for d in space.dimensions),
    ]
    points = [
        {"name": d.name, "role": d.role, "kind": d.kind, "choices": list(d.choices), "edges": len(d.edges)}
        for d in space.dimensions
    ]
    return lines, {**to_json(model, root, patterns), "dialect": dialect.name, "dimensions": points}
