"""Space of the placements of a model: the insertion points of its patterns, resolved to edges.

There are three kinds of points, in pattern coordinates: inputs of nodes (of a LEAF), inputs of child regions (of a
COMPOSITE), and outputs (of a LEAF, to all their consumers). No two dimensions have the same edges: a child input or an
output with the edges of an earlier dimension is left out.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(slots=True)
class DimensionDraft:
    """Draft of a dimension.

    Attributes:
        group: Name of its pattern, or of a region of the pattern.
        place: Position in the pattern: number of the node, child or output, and number of its input.
        start: Index of the first node of its first region, by which dimensions are sorted.
        points: Quantization points of the dimension, region by region.
        ends: Edges to outputs of the model.
    """

    group: str
    kind: PointKind
    place: tuple[int, int]
    start: int
    points: list[QuantizationPoint] = field(default_factory=list)
    ends: list[Edge] = field(default_factory=list)


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
        UserError: The model is already quantized.
    """
    require_float_model(model)
    wanted = _supported_kinds(kinds, dialect)
    if sharing not in ("pattern", "region"):
        raise ValueError(f"sharing: 'pattern' or 'region', but got {sharing!r}")
    _log_weighted_ops_without_points(model, dialect)
    precisions = [precision for precision in precisions if precision in dialect.precisions]
    patterns = find_patterns(model, discover_regions(model) if root is None else root)
    drafter = _SpaceBuilder(model, dialect, find_points(model, dialect, precisions), sharing)
    drafts: list[DimensionDraft] = []
    for kind in _KINDS:
        if kind in wanted:
            drafts += drafter.draft_dimensions(kind, patterns)
    macs = sum(point.macs for points in drafter.points for point in points)
    found = _distinct_dimensions(drafts, precisions, macs, partial(add_required_edges, model, dialect, drafter.points))
    found.sort(key=lambda pair: (pair[0].start, _KINDS.index(pair[0].kind), pair[0].place))
    agreements = find_agreements(model, dialect) if dialect.operands_agree and len(precisions) > 1 else ()
    return Space(tuple(dimension for _, dimension in found), agreements)


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


def _supported_kinds(kinds: Iterable[PointKind] | None, dialect: Dialect) -> frozenset[PointKind]:
    usual: Iterable[PointKind] = ("node_input", "output") if dialect.quantize_outputs else ("node_input",)
    wanted = frozenset(usual if kinds is None else kinds)
    if not wanted <= set(_KINDS):
        raise ValueError(f"kinds: among {', '.join(_KINDS)}, but got {', '.join(sorted(wanted - set(_KINDS)))}")
    return wanted


class _SpaceBuilder:
    def __init__(
        self, model: Model, dialect: Dialect, points: Sequence[tuple[QuantizationPoint, ...]], sharing: Sharing
    ) -> None:
        self.points = points
        self._model = model
        self._sharing = sharing
        # A subgraph would read the quantized value, where the model asks for the output alone.
        cached = {name for i in model.cached_analysis(find_cache_nodes) for name in model.nodes[i].outputs}
        ends = model.output_names - model.captured - cached
        self._ends = ends if dialect.quantize_outputs else frozenset()
        self._types = QUANTIZABLE_FLOAT_TYPES if dialect.float16 else QUANTIZABLE_FLOAT_TYPES - {"float16"}
        self._by_edge = {(p.node, e.slot): p for found in points for p in found for e in p.edges}

    def draft_dimensions(self, kind: PointKind, patterns: Sequence[Pattern]) -> Iterator[DimensionDraft]:
        """Yield the dimensions of one kind, pattern by pattern."""
        short = _shortest_prefix_length({pattern.signature for pattern in patterns})
        for pattern in patterns:
            if pattern.type is (RegionType.COMPOSITE if kind == "child_input" else RegionType.LEAF):
                yield from self._draft_pattern(kind, pattern, pattern.signature[:short])

    def _draft_pattern(self, kind: PointKind, pattern: Pattern, name: str) -> Iterable[DimensionDraft]:
        drafts: dict[tuple[str, tuple[int, int]], DimensionDraft] = {}
        for number, region in enumerate(pattern.regions):
            group = name if self._sharing == "pattern" else f"{name}.{number}"
            start = pattern.regions[0 if self._sharing == "pattern" else number].node_indices()[0]
            for place, points, ends in self._region_points(kind, pattern, number, region):
                if points or ends:
                    draft = drafts.setdefault((group, place), DimensionDraft(group, kind, place, start))
                    draft.points += points
                    draft.ends += ends
        return drafts.values()

    def _region_points(
        self, kind: PointKind, pattern: Pattern, number: int, region: Region
    ) -> Iterator[tuple[tuple[int, int], list[QuantizationPoint], list[Edge]]]:
        """Yield position in the pattern, quantization points and edges to model outputs of each point of a region."""
        if kind == "node_input":
            for place, index in enumerate(pattern.order[number]):
                for point in self.points[index]:
                    yield (place, point.slot), [point], []
        elif kind == "child_input":
            for place, (inside, inputs) in enumerate(self._child_inputs(pattern, number)):
                for slot, tensor in enumerate(inputs):
                    yield (place, slot), self._consumer_points(tensor, inside), []
        else:
            leaving = frozenset(region.outputs)
            for place, index in enumerate(pattern.order[number]):
                for slot, tensor in enumerate(self._model.nodes[index].outputs):
                    if tensor in leaving:
                        yield (place, slot), self._consumer_points(tensor), self._output_edge(tensor)

    def _child_inputs(self, pattern: Pattern, number: int) -> list[tuple[frozenset[int], Iterable[str]]]:
        """Return nodes and inputs of each child region; inputs in the canonical order of their readers."""
        children = pattern.children[number]
        owner = {node: place for place, child in enumerate(children) for node in child.node_indices()}
        inputs: list[dict[str, None]] = [{} for _ in children]
        for index in pattern.order[number]:
            wanted = children[owner[index]].inputs
            inputs[owner[index]].update((name, None) for name in self._model.nodes[index].inputs if name in wanted)
        return [(frozenset(child.node_indices()), names) for child, names in zip(children, inputs, strict=True)]

    def _consumer_points(self, tensor: str, inside: frozenset[int] | None = None) -> list[QuantizationPoint]:
        """Return the points that read a tensor."""
        found: dict[tuple[int, int], QuantizationPoint] = {}
        for index, slot in self._model.consumers.get(tensor, ()):
            point = self._by_edge.get((index, slot))
            if point is not None and (inside is None or index in inside):
                found[point.node, point.slot] = point
        return list(found.values())

    def _output_edge(self, tensor: str) -> list[Edge]:
        known = self._model.types.get(tensor)
        legal = tensor in self._ends and known is not None and known.dtype in self._types and known.shape
        return [Edge(tensor, "", 0)] if legal else []


def _distinct_dimensions(
    drafts: Iterable[DimensionDraft],
    precisions: Sequence[str],
    macs: int,
    complete: Callable[[Iterable[Edge]], set[Edge]],
) -> list[tuple[DimensionDraft, Dimension]]:
    """Return the dimensions without those that have the same set of edges as an earlier one.

    Patterns are sorted by name first, because their order depends on the file.

    Args:
        complete: Function that adds the edges that must be quantized with the given ones.
    """
    found: list[tuple[DimensionDraft, Dimension]] = []
    known: set[frozenset[Edge]] = set()
    for draft in sorted(drafts, key=lambda draft: (_KINDS.index(draft.kind), draft.group, draft.place)):
        legal = tuple(p for p in precisions if all(p in point.precisions for point in draft.points))
        edges = sorted(complete({edge for point in draft.points for edge in point.edges} | set(draft.ends)))
        if not legal or frozenset(edges) in known:
            continue
        known.add(frozenset(edges))
        roles = {point.role for point in draft.points}
        dimension = Dimension(
            name=f"{draft.group}/{draft.kind}/{draft.place[0]}.{draft.place[1]}",
            group=draft.group,
            kind=draft.kind,
            choices=(FLOAT, *legal),
            edges=tuple(edges),
            role=roles.pop() if len(roles) == 1 else "other",
            cost=sum(point.macs for point in draft.points) / macs if macs else 0.0,
        )
        found.append((draft, dimension))
    return found


def _shortest_prefix_length(signatures: set[str]) -> int:
    """Return the number of digits that distinguish signatures, at least 8."""
    return next(n for n in itertools.count(8) if len({s[:n] for s in signatures}) == len(signatures))
