"""Space of the placements of a model: the insertion points of its patterns, resolved to edges.

There are three kinds of points, in pattern coordinates: inputs of nodes (of a LEAF), inputs of child regions (of a
COMPOSITE), and outputs (of a LEAF, to all their consumers). No two dimensions have the same edges: a child input or an
output with the edges of an earlier dimension is left out.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Literal

from harness.graph.model import Model
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.partition.regions import Region, RegionType, discover_regions
from harness.graph.qdq.import_placement import require_float_model
from harness.graph.rules.agreements import find_agreements
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import QUANTIZABLE_FLOAT_TYPES
from harness.graph.rules.points import QuantizationPoint, add_required_edges, find_points, weighted_ops_without_points
from harness.graph.rules.precision_sensitive import find_cache_nodes, find_unquantizable_constants
from search.space import FLOAT, Dimension, Edge, PointKind, Space

logger = logging.getLogger(__name__)

Sharing = Literal["pattern", "region"]
_KINDS: tuple[PointKind, ...] = ("node_input", "child_input", "output")
_Place = tuple[int, int]
"""Position in a pattern: number of the node, child or output, and number of its input."""
_Draft = tuple[int, list[QuantizationPoint], list[Edge]]
"""Draft of a dimension: index of the first node of its first region, its points, and its edges to model outputs."""


def build_space(
    model: Model,
    dialect: Dialect,
    *,
    precisions: Sequence[str] = ("int8",),
    sharing: Sharing = "pattern",
    root: Region | None = None,
    kinds: Iterable[PointKind] | None = None,
) -> Space:
    """Build the space of all placements of a model in a dialect.

    Args:
        model: Float model.
        dialect: Dialect of the runtime.
        precisions: Quantized precisions; a point has those of them that the dialect allows there.
        sharing: "pattern": regions of one pattern share a scheme; "region": each region has a scheme.
        root: Tree of regions; None: that of `harness.graph.partition.regions.discover_regions`.
        kinds: Kinds of points; None: node inputs, and outputs if the dialect quantizes them.

    Raises:
        ValueError: `sharing` or a kind is unknown.
    """
    require_float_model(model)
    usual: Iterable[PointKind] = ("node_input", "output") if dialect.quantize_outputs else ("node_input",)
    wanted = frozenset(usual if kinds is None else kinds)
    if not wanted <= set(_KINDS):
        raise ValueError(f"kinds: among {', '.join(_KINDS)}, but got {', '.join(sorted(wanted - set(_KINDS)))}")
    if sharing not in ("pattern", "region"):
        raise ValueError(f"sharing: 'pattern' or 'region', but got {sharing!r}")
    _log_weighted_ops_without_points(model, dialect)
    precisions = [precision for precision in precisions if precision in dialect.precisions]
    patterns = find_patterns(model, discover_regions(model) if root is None else root)
    points = find_points(model, dialect, precisions)
    macs = sum(point.macs for found in points for point in found)
    drafts = _draft_dimensions(model, dialect, points, patterns, wanted, sharing)
    dimensions: list[tuple[tuple[int, int, _Place], Dimension]] = []
    known: set[frozenset[Edge]] = set()
    # Sorted by name first, because the order of patterns depends on the file.
    for (kind, group, place), (start, own, ends) in sorted(drafts.items(), key=itemgetter(0)):
        legal = tuple(p for p in precisions if all(p in point.precisions for point in own))
        asked = {edge for point in own for edge in point.edges} | set(ends)
        edges = sorted(add_required_edges(model, dialect, points, asked))
        if not legal or frozenset(edges) in known:
            continue
        known.add(frozenset(edges))
        roles = {point.role for point in own}
        dimension = Dimension(
            name=f"{group}/{_KINDS[kind]}/{place[0]}.{place[1]}",
            group=group,
            kind=_KINDS[kind],
            choices=(FLOAT, *legal),
            edges=tuple(edges),
            role=roles.pop() if len(roles) == 1 else "other",
            cost=sum(point.macs for point in own) / macs if macs else 0.0,
        )
        dimensions.append(((start, kind, place), dimension))
    dimensions.sort(key=itemgetter(0))
    agreements = find_agreements(model, dialect) if dialect.operands_agree and len(precisions) > 1 else ()
    return Space(tuple(dimension for _, dimension in dimensions), agreements)


def _log_weighted_ops_without_points(model: Model, dialect: Dialect) -> None:
    read = {name for node in model.nodes if node.op in dialect.linear_ops for name in node.inputs}
    if damaged := sorted(read & model.cached_analysis(find_unquantizable_constants)):
        logger.warning(
            "%s: weights or biases with NaN, infinite or huge values stay float: %s", model.source, ", ".join(damaged)
        )
    if without := weighted_ops_without_points(model, dialect):
        logger.warning(
            "%s: dialect %s has no point at %s: they stay float", model.source, dialect.name, ", ".join(without)
        )
    if not dialect.float16 and any(kind.dtype == "float16" for kind in model.types.values()):
        logger.warning(
            "%s: its tensors in float16 stay as they are in dialect %s; to quantize them, export the model in float32",
            model.source, dialect.name,
        )  # fmt: skip


def _draft_dimensions(
    model: Model,
    dialect: Dialect,
    points: Sequence[tuple[QuantizationPoint, ...]],
    patterns: Sequence[Pattern],
    kinds: frozenset[PointKind],
    sharing: Sharing,
) -> dict[tuple[int, str, _Place], _Draft]:
    """Return the drafts by index of the kind, name of the pattern or of a region of it, and position there."""
    finder = _PointFinder(model, dialect, points)
    signatures = {pattern.signature for pattern in patterns}
    digits = next(n for n in itertools.count(8) if len({s[:n] for s in signatures}) == len(signatures))
    drafts: dict[tuple[int, str, _Place], _Draft] = {}
    for kind, pattern in itertools.product(_KINDS, patterns):
        level = RegionType.COMPOSITE if kind == "child_input" else RegionType.LEAF
        for number in range(len(pattern.regions)) if kind in kinds and pattern.type is level else ():
            first, suffix = (0, "") if sharing == "pattern" else (number, f".{number}")
            group, start = pattern.signature[:digits] + suffix, pattern.regions[first].node_indices()[0]
            for place, found, ends in finder.region_points(kind, pattern, number):
                if found or ends:
                    _, own, outputs = drafts.setdefault((_KINDS.index(kind), group, place), (start, [], []))
                    own += found
                    outputs += ends
    return drafts


class _PointFinder:
    def __init__(self, model: Model, dialect: Dialect, points: Sequence[tuple[QuantizationPoint, ...]]) -> None:
        self._model = model
        self._points = points
        # A subgraph would read the quantized value, where the model asks for the output alone.
        cached = {name for i in model.cached_analysis(find_cache_nodes) for name in model.nodes[i].outputs}
        types = QUANTIZABLE_FLOAT_TYPES if dialect.float16 else QUANTIZABLE_FLOAT_TYPES - {"float16"}
        ends = model.output_names - model.captured - cached if dialect.quantize_outputs else ()
        kinds = {name: model.types[name] for name in ends if name in model.types}
        self._ends = {name for name, kind in kinds.items() if kind.dtype in types and kind.shape}
        self._by_edge = {(p.node, e.slot): p for found in points for p in found for e in p.edges}

    def region_points(
        self, kind: PointKind, pattern: Pattern, number: int
    ) -> Iterator[tuple[_Place, list[QuantizationPoint], list[Edge]]]:
        """Yield position in the pattern, quantization points and edges to model outputs of each point of a region."""
        model, order = self._model, pattern.order[number]
        if kind == "node_input":
            for place, index in enumerate(order):
                for point in self._points[index]:
                    yield (place, point.slot), [point], []
        elif kind == "child_input":
            children = pattern.children[number]
            owner = {node: place for place, child in enumerate(children) for node in child.node_indices()}
            inputs: list[dict[str, None]] = [{} for _ in children]  # in the canonical order of their readers
            for index in order:
                wanted = children[owner[index]].inputs
                inputs[owner[index]] |= dict.fromkeys(name for name in model.nodes[index].inputs if name in wanted)
            for place, child in enumerate(children):
                inside = frozenset(child.node_indices())
                for slot, tensor in enumerate(inputs[place]):
                    yield (place, slot), self._consumer_points(tensor, inside), []
        else:
            leaving = frozenset(pattern.regions[number].outputs)
            for place, index in enumerate(order):
                for slot, tensor in enumerate(model.nodes[index].outputs):
                    if tensor in leaving:
                        ends = [Edge(tensor, "", 0)] if tensor in self._ends else []
                        yield (place, slot), self._consumer_points(tensor), ends

    def _consumer_points(self, tensor: str, inside: frozenset[int] | None = None) -> list[QuantizationPoint]:
        """Return the points that read a tensor, each once."""
        found: dict[tuple[int, int], QuantizationPoint] = {}
        for index, slot in self._model.consumers.get(tensor, ()):
            point = self._by_edge.get((index, slot))
            if point is not None and (inside is None or index in inside):
                found[point.node, point.slot] = point
        return list(found.values())
