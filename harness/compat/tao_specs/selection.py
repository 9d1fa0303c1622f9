"""Selection of nodes by the entries of `layers` and `skip_names`."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from harness.compat.tao_specs.spec import LayerSpec

__all__ = ["DEFAULT_LAYERS_WILDCARD", "HasNameAndOp", "assign_layers", "match_skip_names", "names_operator"]

logger = logging.getLogger(__name__)

DEFAULT_LAYERS_WILDCARD = "*"
"""As `module_name`: what the backend quantizes by default."""


class HasNameAndOp(Protocol):
    """A node, of whichever representation."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _NodeNames:
    """Names of nodes and of the modules that they are in ("/model.0" for "/model.0/conv/Conv")."""

    nodes: tuple[str, ...]

    def suggest(self, pattern: str) -> str:
        """A half-sentence that helps with a pattern that matches nothing."""
        if not any(self.nodes):
            return "the nodes of this model have no names"
        known = sorted({name for node in self.nodes for name in (node, *_parent_modules(node))} - {""})
        close = difflib.get_close_matches(pattern.rstrip("*").rstrip("/"), known, n=3, cutoff=0.5)
        if close:
            return f"did you mean {' or '.join(map(repr, close))}?"
        return f"names begin with {', '.join(map(repr, _top_modules(self.nodes)))}"


def match_skip_names(nodes: Sequence[HasNameAndOp], patterns: Iterable[str], key: str = "skip_names") -> frozenset[str]:
    """Names of the nodes that some pattern matches; a pattern without any is warned about.

    Args:
        nodes: Of the model.
        patterns: A node's name, a wildcard over names, or a module, which means all nodes below it.
        key: What messages call the list.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = {node.name for node in nodes if _matches_name(pattern, node.name)}
        if not matched:
            near = _NodeNames(tuple(node.name for node in nodes)).suggest(pattern)
            logger.warning("%s: %r matches no node; %s", key, pattern, near)
        found |= matched
    return frozenset(found)


def names_operator(layer: LayerSpec, nodes: Iterable[HasNameAndOp]) -> bool:
    """Whether an entry means operator types: it matches one of the model's."""
    return any(fnmatchcase(node.op, layer.module_name) for node in nodes)


def assign_layers(
    nodes: Sequence[HasNameAndOp], layers: Sequence[LayerSpec], everything: Iterable[str]
) -> tuple[LayerSpec | None, ...]:
    """The first entry of `layers` that matches each node; None where none does.

    An entry that matches nothing, or only what earlier ones have taken, is warned about.

    Args:
        nodes: Of the model.
        layers: In the order of the file.
        everything: Operators that "*" stands for.
    """
    defaults = frozenset(everything)
    found: list[LayerSpec | None] = []
    taken: Counter[int] = Counter()
    hits: Counter[int] = Counter()
    for node in nodes:
        matching = [i for i, layer in enumerate(layers) if _matches(layer.module_name, node, defaults)]
        hits.update(matching)
        taken.update(matching[:1])
        found.append(layers[matching[0]] if matching else None)
    for i, layer in enumerate(layers):
        where = f"layers.{i}.module_name"
        if not hits[i]:
            logger.warning(
                "%s: %r matches no node; %s", where, layer.module_name, _suggest_operators(layer.module_name, nodes)
            )
        elif not taken[i]:
            logger.warning(
                "%s: all nodes of %r belong to entries above it; the first that matches counts, so put it first",
                where, layer.module_name,
            )  # fmt: skip
    return tuple(found)


def _matches(pattern: str, node: HasNameAndOp, defaults: frozenset[str]) -> bool:
    if pattern == DEFAULT_LAYERS_WILDCARD:
        return node.op in defaults
    return fnmatchcase(node.op, pattern) or _matches_name(pattern, node.name)


def _matches_name(pattern: str, name: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/"))


def _suggest_operators(pattern: str, nodes: Sequence[HasNameAndOp]) -> str:
    operators = sorted({node.op for node in nodes})
    close = difflib.get_close_matches(pattern, operators, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if "/" in pattern:
        return _NodeNames(tuple(node.name for node in nodes)).suggest(pattern)
    return f"operators of this model: {', '.join(operators)}"


def _parent_modules(name: str) -> list[str]:
    """The modules that a node is in, innermost last."""
    return [name[:i] for i, letter in enumerate(name) if letter == "/" and i]


def _top_modules(names: Iterable[str]) -> list[str]:
    """Modules before nodes that are in none: exporters make many of these, named after a running number."""
    ordered = sorted(filter(None, names), key=lambda name: not _parent_modules(name))
    return list(dict.fromkeys((_parent_modules(name) or [name])[0] for name in ordered))[:8]
