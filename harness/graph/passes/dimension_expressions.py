"""Expressions of symbolic dimensions, as exporters write them into `dim_param`: "past_length + 1"."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["evaluate_expression", "expression_symbols"]

_OPERATORS = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
)
MAX_EXPRESSION_CHARS = 200  # a longer text is a name


def expression_symbols(text: str) -> tuple[str, ...]:
    """Return the symbols in an expression of integers and symbols with +, -, * and //; () if it is no such."""
    if len(text) > MAX_EXPRESSION_CHARS:
        return ()
    try:
        tree = ast.parse(text, mode="eval").body
        _evaluate_tree(tree, None)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def evaluate_expression(text: str, values: Mapping[str, int]) -> int | None:
    """Return the value of an expression that `expression_symbols` accepts; None if it is no size."""
    try:
        size = _evaluate_tree(ast.parse(text, mode="eval").body, values)
    except ZeroDivisionError:
        return None
    return size if size > 0 else None


def _evaluate_tree(node: ast.expr, values: Mapping[str, int] | None) -> int:
    """Return the value of a tree; with `values=None` only check that it has no other nodes (`ValueError`)."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return 1 if values is None else values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate_tree(node.left, values), _evaluate_tree(node.right, values)
        return 1 if values is None else int(_OPERATORS[type(node.op)](left, right))
    raise ValueError(f"no dimension: {ast.dump(node)}")
