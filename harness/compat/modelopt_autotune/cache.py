"""The pattern cache with the handles that ModelOpt's users know; `harness.graph.pattern_cache` holds what it keeps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from harness.compat.modelopt_autotune.common import AutotunerError
from harness.compat.modelopt_autotune.points import make_insertion_point
from harness.compat.modelopt_autotune.region_index import RegionIndex
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.schemes import InsertionScheme, PatternSchemes, RegionPattern
from harness.graph import pattern_cache as engine
from harness.graph.conversions import map_to_float_tensors
from harness.graph.pattern_cache_io import read_cache, write_cache

__all__ = ["PatternCache"]

_logger = logging.getLogger(__name__)


class PatternCache:
    """The best schemes of each pattern.

    Args:
        minimum_distance: Schemes of one pattern differ in at least so many points.
        max_entries_per_pattern: Most schemes of one pattern; 0: no limit.
        origin: Where schemes that are added come from.
        content: What is in it already.

    Attributes:
        baseline_ms: Latency of the float model that added schemes were measured beside; None where it is not known.
        content: All of it, as the engine keeps it.
        seeds: What was read or put in, without what autotuners learned since: schemes to begin with.
    """

    def __init__(
        self,
        minimum_distance: int = engine.MIN_DISTANCE_POINTS,
        max_entries_per_pattern: int = engine.MAX_SCHEMES,
        *,
        origin: engine.MeasurementOrigin | None = None,
        content: engine.PatternCache | None = None,
    ) -> None:
        self.baseline_ms: float | None = None
        self.origin = origin or engine.MeasurementOrigin(backend="unknown", precision="int8")
        self.content = content or engine.PatternCache(
            minimum_distance=minimum_distance, maximum_schemes=max_entries_per_pattern
        )
        self.seeds = self.content

    @property
    def minimum_distance(self) -> int:
        """Fewest points in which schemes of one pattern differ."""
        return self.content.minimum_distance

    @property
    def max_entries_per_pattern(self) -> int:
        """Most schemes of one pattern."""
        return self.content.maximum_schemes

    @property
    def pattern_schemes(self) -> list[PatternSchemes]:
        """The schemes, pattern by pattern, best first; adding to this list changes nothing."""
        return [_schemes(pattern) for pattern in self.content.patterns.values()]

    @property
    def num_patterns(self) -> int:
        """Number of patterns."""
        return len(self.content.patterns)

    @property
    def total_schemes(self) -> int:
        """Number of schemes of all patterns."""
        return sum(len(pattern.schemes) for pattern in self.content.patterns.values())

    def has_pattern(self, pattern_signature: str) -> bool:
        """Whether there are schemes of a pattern."""
        return pattern_signature in self.content.patterns

    def get_pattern_schemes(self, pattern_signature: str) -> PatternSchemes | None:
        """The schemes of a pattern, best first."""
        found = self.content.patterns.get(pattern_signature)
        return None if found is None else _schemes(found)

    def add_pattern_schemes(self, pattern_schemes: PatternSchemes | None) -> None:
        """Take over the schemes of a pattern, as far as they are good and different enough; failures never."""
        if pattern_schemes is not None and pattern_schemes.pattern is not None:
            usable = (scheme for scheme in pattern_schemes.schemes if not scheme.error)
            self._put(self._pattern(pattern_schemes.pattern, usable))

    def add_pattern_from_region(self, region: Region, graph: RegionIndex, quantized_tensors: set[str]) -> None:
        """Take over what a Q/DQ model has in a region, and in the regions below it.

        Args:
            quantized_tensors: Names of the tensors with a Q/DQ pair.
        """
        names = map_to_float_tensors(set(quantized_tensors), graph.model)
        for each in region.walk():
            found = [p for p in graph.full_scheme(each).points if _point_tensors(each, graph, p) & names]
            self._put(self._pattern(graph.pattern(each), [InsertionScheme.of(found)]))

    def merge(self, other: PatternCache, prefer_existing: bool = True) -> None:
        """Take over the patterns of another cache; of those that are here too, only where `prefer_existing` is off."""
        found = {
            signature: pattern
            for signature, pattern in other.content.patterns.items()
            if not (prefer_existing and self.has_pattern(signature))
        }
        self._put(engine.PatternCache(patterns=found))

    def add_measurements(self, content: engine.PatternCache) -> None:
        """Take over what was measured; nobody begins with that again."""
        self.content = engine.merge_caches(self.content, content)

    def initial_schemes(self, pattern_signature: str) -> list[InsertionScheme]:
        """Schemes of a pattern to begin with, best first."""
        found = self.seeds.patterns.get(pattern_signature)
        return [] if found is None else _schemes(found).schemes

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "minimum_distance": self.minimum_distance,
            "max_entries_per_pattern": self.max_entries_per_pattern,
            "pattern_schemes": [each.to_dict() for each in self.pattern_schemes],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From plain values.

        Raises:
            InvalidSchemeError: They are none of a cache.
        """
        made = cls(int(data.get("minimum_distance", 4)), int(data.get("max_entries_per_pattern", 32)))
        for each in data.get("pattern_schemes", []):
            made.add_pattern_schemes(PatternSchemes.from_dict(each))
        return made

    def save(self, output_path: str) -> None:
        """Write it to a YAML file.

        Raises:
            AutotunerError: The file cannot be written.
        """
        try:
            write_cache(self.content, Path(output_path))
        except OSError as error:
            raise AutotunerError(f"{output_path}: cannot be written: {error.strerror or error}") from error
        _logger.info("%s: %d patterns, %d schemes", output_path, self.num_patterns, self.total_schemes)

    @classmethod
    def load(cls, input_path: str) -> Self:
        """Read it from a YAML file.

        Raises:
            FileNotFoundError: There is no such file.
            UserError: It is no pattern cache.
        """
        if not Path(input_path).exists():
            raise FileNotFoundError(input_path)
        return cls(content=read_cache(Path(input_path)))

    def __repr__(self) -> str:
        return f"PatternCache(patterns={self.num_patterns}, schemes={self.total_schemes})"

    def _put(self, content: engine.PatternCache) -> None:
        self.add_measurements(content)
        self.seeds = engine.merge_caches(self.seeds, content)

    def _pattern(self, pattern: RegionPattern, schemes: Iterable[InsertionScheme]) -> engine.PatternCache:
        kept = tuple(self._scheme(scheme) for scheme in schemes)
        made = engine.CachedPattern(signature=pattern.signature, size=pattern.size, schemes=kept)
        return engine.PatternCache(patterns={pattern.signature: made})

    def _scheme(self, scheme: InsertionScheme) -> engine.CachedScheme:
        addresses = (point.address for point in scheme.points)
        points = (engine.CachedPoint(a[0], a[1], self.origin.precision) for a in addresses if a is not None)
        known = math.isfinite(scheme.latency_ms)
        return engine.CachedScheme(
            points=frozenset(points),
            origin=self.origin,
            latency_ms=scheme.latency_ms if known else None,
            baseline_ms=self.baseline_ms,
        )


def _point_tensors(region: Region, graph: RegionIndex, point: Any) -> set[str]:
    return {resolved.tensor_name for resolved in point.resolve(region, graph)}


def _schemes(pattern: engine.CachedPattern) -> PatternSchemes:
    schemes = []
    for cached in pattern.schemes:
        scheme = InsertionScheme.of(make_insertion_point(point.kind, point.place) for point in sorted(cached.points))
        if cached.latency_ms is not None:
            scheme.latency_ms = cached.latency_ms
        schemes.append(scheme)
    return PatternSchemes(pattern=RegionPattern(pattern.signature, pattern.size), schemes=schemes)
