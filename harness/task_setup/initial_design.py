"""Initial placements of the searches and fixed baselines, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.initial import split_rule_precision
from harness.config.plan import TaskSpec
from harness.config.sections import PluginSpec
from harness.errors import UserError
from harness.graph.model import Model
from harness.graph.pattern_cache import Origin, PatternCache, placements, strangers
from harness.graph.pattern_cache_io import read_cache
from harness.graph.qdq.import_placement import import_qdq
from harness.graph.qdq.read_edges import pairs_in
from harness.paths import resolve_path
from harness.progress import Observer
from harness.task_setup.external_tools import Foreign
from harness.task_setup.prior import ladder, read_prior
from search.heuristics import RULES
from search.space import Edge, Placement, Space

__all__ = ["Seeding", "check_files", "imported", "trt_guide"]


def imported(starts: Sequence[PluginSpec]) -> dict[str, Foreign]:
    """The Q/DQ models that `initial` names.

    Raises:
        UserError: A file is not there or cannot be read.
    """
    paths = {
        start.name: resolve_path(start.params["path"], start.base_dir) for start in starts if start.use == "import"
    }
    return {name: Foreign(name=name, path=path, pairs=pairs_in(path)) for name, path in paths.items()}


def check_files(starts: Sequence[PluginSpec]) -> None:
    """Look at every file that `initial` names.

    Raises:
        UserError: It is not there, or is not what it is taken for.
    """
    imported(starts)
    for start in starts:
        if start.use == "sensitivity":
            read_prior(resolve_path(start.params["path"], start.base_dir))
        elif start.use == "pattern_cache":
            read_cache(resolve_path(start.params["path"], start.base_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeding:
    """What placements are made from.

    Attributes:
        foreign: Models of PTQ tools, and imported ones, by name.
    """

    spec: TaskSpec
    space: Space
    model: Model
    foreign: Mapping[str, Foreign]
    observer: Observer
    facts: Mapping[str, Any]

    def placements(self, starts: Sequence[PluginSpec]) -> dict[str, dict[str, Placement]]:
        """For each entry its placements by name; none where a tool failed or its model has nothing in common with ours.

        Raises:
            UserError: A pattern cache cannot be read.
        """
        return {start.name: dict(self._of(start)) for start in starts}

    def _of(self, start: PluginSpec) -> Iterator[tuple[str, Placement]]:
        rule, precision = split_rule_precision(start.use)
        if rule in RULES:
            yield start.name, RULES[rule](self.space, precision)
        elif start.use == "trt_guide":
            yield start.name, trt_guide(self.space, self.model)
        elif start.use == "pattern_cache":
            yield from self._cached(start)
        elif start.use == "sensitivity":
            yield from self._ladder(start)
        elif start.name in self.foreign:
            yield from self._read_back(start.name, self.foreign[start.name].path)
        else:
            yield start.name, self.space.everywhere(precision) if rule == "all" else self.space.float_placement()

    def _read_back(self, name: str, path: Path | None) -> Iterator[tuple[str, Placement]]:
        if path is None:
            return
        try:
            yield name, self.space.nearest(import_qdq(path, self.model))
        except UserError as error:
            self.observer.say(f"{self.model.source}: the placement of {name} cannot be read back: {error}")

    def strangers(self, starts: Sequence[PluginSpec]) -> tuple[str, ...]:
        """Which schemes of the pattern caches among the entries were measured elsewhere.

        Raises:
            UserError: A pattern cache cannot be read.
        """
        caches = {start.name: self._cache(start) for start in starts if start.use == "pattern_cache"}
        return tuple(f"{name}: {text}" for name, cache in caches.items() for text in strangers(cache, self._origin()))

    def _cache(self, start: PluginSpec) -> PatternCache:
        return read_cache(resolve_path(start.params["path"], start.base_dir))

    def _origin(self) -> Origin:
        facts = self.facts
        return Origin(backend=facts["name"], precision=self.spec.precision, device=str(facts.get("device", "")))

    def _cached(self, start: PluginSpec) -> Iterator[tuple[str, Placement]]:
        for sentence in self.strangers((start,)):
            self.observer.say(f"{self.model.source}: {sentence}")
        found = placements(self._cache(start), self.space, self._origin(), int(start.params.get("limit", 1)))
        if not found:
            self.observer.say(f"{self.model.source}: {start.name}: the pattern cache knows none of its patterns")
        yield from _numbered(start, found)

    def _ladder(self, start: PluginSpec) -> Iterator[tuple[str, Placement]]:
        units = read_prior(resolve_path(start.params["path"], start.base_dir))
        found = ladder(units, self.space, int(start.params.get("limit", 1)))
        if not found:
            self.observer.say(f"{self.model.source}: {start.name}: nothing in it gained that this model has")
        yield from _numbered(start, found)


def _numbered(start: PluginSpec, found: Sequence[Placement]) -> Iterator[tuple[str, Placement]]:
    for rank, placement in enumerate(found, start=1):
        yield (start.name if rank == 1 else f"{start.name}-{rank}"), placement


def trt_guide(space: Space, model: Model) -> Placement:
    """The placement that TensorRT's guide recommends ("Working with Quantized Types", Q/DQ placement).

    All inputs of linear operators; of a residual Add the operand that skips, not the one whose convolution it is fused
    with; inputs of pooling. Where the dialect offers both operands, the one that is computed first skips.
    """
    operands: dict[str, list[Edge]] = defaultdict(list)
    for dimension in space.dimensions:
        for edge in dimension.edges if dimension.role == "add" else ():
            operands[edge.consumer].append(edge)
    skips = {min(edges, key=lambda edge: model.producer.get(edge.tensor, -1)) for edges in operands.values()}
    choices = []
    for dimension in space.dimensions:
        residual = dimension.role == "add" and 2 * len(skips.intersection(dimension.edges)) > len(dimension.edges)
        choices.append(int(residual or dimension.role in ("linear", "pool")))
    return Placement(tuple(choices))
