"""What `qdq regions` shows: the region tree, the patterns and the insertion points of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import registry
from harness.graph.patterns import find_patterns
from harness.graph.regions import discover
from harness.graph.space import build_space
from harness.graph.summary import describe_tree, to_json
from harness.run.compose import open_model
from harness.run.config import ModelSpec

__all__ = ["inspect_regions"]


def inspect_regions(
    use: str, shapes: Mapping[str, str], dialect_name: str, max_sequence_size: int
) -> tuple[list[str], dict[str, Any]]:
    """Text lines and JSON-able data about the regions of a model.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`.
        shapes: Static shapes of dynamic inputs, such as {"images": "1x3x224x224"}.
        dialect_name: Whose rules of legality apply.
        max_sequence_size: Longest sequence that stays one region.

    Raises:
        UserError: The model cannot be loaded, or there is no such dialect.
    """
    dialect: Any = registry.load("dialect", dialect_name)
    with tempfile.TemporaryDirectory() as work:
        model = open_model(ModelSpec(use=use, label="model", shapes=dict(shapes)), Path.cwd(), Path(work))
    root = discover(model, maximum_sequence_region_size=max_sequence_size)
    patterns = find_patterns(model, root)
    space = build_space(model, dialect, root=root)
    lines = [*describe_tree(root, model), "", f"Patterns: {len(patterns)}"]
    lines += [f"  {p.signature[:8]}  {len(p.regions)} regions" for p in patterns]
    lines += ["", f"Insertion points (dialect {dialect.name}): {len(space)} dimensions"]
    lines += [f"  {d.name}  {d.role}  {len(d.edges)} edges" for d in space.dimensions]
    data = {
        "regions": to_json(root, model),
        "patterns": [{"signature": p.signature, "regions": [r.id for r in p.regions]} for p in patterns],
        "dimensions": [
            {"name": d.name, "role": d.role, "kind": d.kind, "choices": list(d.choices), "edges": len(d.edges)}
            for d in space.dimensions
        ],
    }
    return lines, data
