"""`qdq list`."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.common import JsonOption, print_table
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.registry import Plugin


def list_plugins(as_json: JsonOption = False) -> None:
    """List searchers, runtimes (benchmarkers), evaluators, preprocessings, estimators, dialects and zoo models.

    Example: `qdq list | grep searcher`
    """
    from harness import zoo
    from harness.registry import ENTRY_POINT_GROUPS, installed_plugins

    rows = [
        (kind, plugin.name, plugin.origin, plugin_purpose(plugin))
        for kind in ENTRY_POINT_GROUPS
        for plugin in installed_plugins(kind)
    ]
    rows += [("zoo model", name, "", purpose) for name, purpose in zoo.model_names().items()]
    print_table(("kind", "name", "origin", "what it does"), rows, as_json=as_json)


def plugin_purpose(plugin: Plugin) -> str:
    """Return the first line of a plug-in's docstring, the form of a dialect, or "" without a docstring.

    The source is parsed, not imported, so that a slow or broken plug-in does not affect the others.
    """
    if plugin.kind == "dialect":
        return _dialect_form(plugin.name)
    point = plugin.entry_point
    try:
        spec = importlib.util.find_spec(point.module)
        tree = ast.parse(Path(spec.origin or "").read_text(encoding="utf-8")) if spec else ast.Module([], [])
    except (ImportError, OSError, SyntaxError, ValueError):
        return "cannot be read: its module is missing or is not valid Python"
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == point.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return (ast.get_docstring(tree) or "").partition("\n")[0]  # the attribute is assigned or imported


def _dialect_form(name: str) -> str:
    from harness.graph.rules.dialects import INT8_MAX_LEVEL, load_dialect

    try:
        dialect = load_dialect(name)
    except UserError as error:
        return f"cannot be used: {error}"
    zero = "symmetric" if dialect.symmetric_activation else "with zero points"
    bits = 8 if dialect.weight_limit >= INT8_MAX_LEVEL else 7
    precisions = ", ".join(sorted(dialect.precisions))
    return f"Q/DQ pairs for {precisions}: {dialect.activation.upper()} activations {zero}, weights of {bits} bits"
