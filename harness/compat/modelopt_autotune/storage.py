"""Files of an autotuner: the pattern cache under ModelOpt's names, and the state with every measured model.

A resumed run repeats the search: the searchers make the same proposals, and those in the state are not measured again.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from harness.base.files import explain_write_errors
from harness.compat.modelopt_autotune.placement_map import RegionIndex
from harness.compat.modelopt_autotune.region_pattern import InsertionScheme, PatternSchemes, RegionPattern
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.settings import AutotunerError, InvalidSchemeError
from harness.config.yaml_loader import read_cache_file
from harness.graph import pattern_cache as engine
from harness.graph.pattern_cache import read_cache, write_cache
from harness.graph.qdq.import_placement import map_to_float_tensors
from harness.measure.records import first_problem
from harness.results.journal import require_same_fingerprint

_logger = logging.getLogger(__name__)


class PatternCache:
    """Best schemes of each pattern.

    Args:
        minimum_distance: Minimum number of points in which two schemes of a pattern differ.
        max_entries_per_pattern: Maximum number of schemes of one pattern; 0: no limit.
        origin: Runtime and device of the measurements; None: unknown.
        content: Initial entries.

    Attributes:
        baseline_ms: Latency of the float model in the run that adds schemes; None if unknown.
        seeds: Entries that were read or added by the user, without measurements of an autotuner; they are tried first.
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
        return self.content.minimum_distance

    @property
    def max_entries_per_pattern(self) -> int:
        return self.content.maximum_schemes

    @property
    def pattern_schemes(self) -> list[PatternSchemes]:
        """Copy of the schemes by pattern, best first; add schemes with `add_pattern_schemes`."""
        return [_to_schemes(pattern) for pattern in self.content.patterns.values()]

    @property
    def num_patterns(self) -> int:
        return len(self.content.patterns)

    @property
    def total_schemes(self) -> int:
        return sum(len(pattern.schemes) for pattern in self.content.patterns.values())

    def has_pattern(self, pattern_signature: str) -> bool:
        return pattern_signature in self.content.patterns

    def get_pattern_schemes(self, pattern_signature: str) -> PatternSchemes | None:
        """Return the schemes of a pattern, best first; None if there are none."""
        pattern = self.content.patterns.get(pattern_signature)
        return None if pattern is None else _to_schemes(pattern)

    def add_pattern_schemes(self, pattern_schemes: PatternSchemes | None) -> None:
        """Add the schemes of a pattern that did not fail, subject to the limits on distance and number."""
        if pattern_schemes is not None and pattern_schemes.pattern is not None:
            self._add(pattern_schemes.pattern, (scheme for scheme in pattern_schemes.schemes if not scheme.error))

    def add_pattern_from_region(self, region: Region, graph: RegionIndex, quantized_tensors: set[str]) -> None:
        """Add the schemes that a Q/DQ model has in a region and in the regions below it.

        Args:
            quantized_tensors: Names of the tensors with a Q/DQ pair.
        """
        names = map_to_float_tensors(set(quantized_tensors), graph.model)
        for each in region.walk():
            addresses = [
                address
                for address in graph.addresses(each)
                if names & {p.tensor_name for p in graph.resolve(each, address)}
            ]
            self._add(graph.pattern(each), [InsertionScheme.of(addresses)])

    def merge(self, other: PatternCache, prefer_existing: bool = True) -> None:
        """Add the entries of another cache; for patterns that are in both only if `prefer_existing` is False."""
        added = {
            signature: pattern
            for signature, pattern in other.content.patterns.items()
            if not (prefer_existing and self.has_pattern(signature))
        }
        self._add_seeds(engine.PatternCache(patterns=added))

    def add_measurements(self, content: engine.PatternCache) -> None:
        """Add entries of an autotuner's measurements, which do not become `seeds`."""
        self.content = engine.merge_caches(self.content, content)

    def initial_schemes(self, pattern_signature: str) -> list[InsertionScheme]:
        """Return the schemes of a pattern to try first, best first."""
        pattern = self.seeds.patterns.get(pattern_signature)
        return [] if pattern is None else _to_schemes(pattern).schemes

    def to_dict(self) -> dict[str, Any]:
        return {
            "minimum_distance": self.minimum_distance,
            "max_entries_per_pattern": self.max_entries_per_pattern,
            "pattern_schemes": [each.to_dict() for each in self.pattern_schemes],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the cache that `to_dict` wrote.

        Raises:
            InvalidSchemeError: The values do not describe schemes.
        """
        cache = cls(int(data.get("minimum_distance", 4)), int(data.get("max_entries_per_pattern", 32)))
        for each in data.get("pattern_schemes", []):
            cache.add_pattern_schemes(PatternSchemes.from_dict(each))
        return cache

    def save(self, output_path: str) -> None:
        """Write the cache to a YAML file."""
        with explain_write_errors(Path(output_path)):
            write_cache(self.content, Path(output_path))
        _logger.info("%s: %d patterns, %d schemes", output_path, self.num_patterns, self.total_schemes)

    @classmethod
    def load(cls, input_path: str) -> Self:
        """Read a cache from a YAML file.

        Raises:
            FileNotFoundError: The file does not exist.
            UserError: The file is not a pattern cache.
        """
        if not Path(input_path).exists():
            raise FileNotFoundError(input_path)
        return cls(content=read_cache(Path(input_path)))

    def __repr__(self) -> str:
        return f"PatternCache(patterns={self.num_patterns}, schemes={self.total_schemes})"

    def _add(self, pattern: RegionPattern, schemes: Iterable[InsertionScheme]) -> None:
        entries = tuple(self._to_entry(scheme) for scheme in schemes)
        entry = engine.CachedPattern(signature=pattern.signature, size=pattern.size, schemes=entries)
        self._add_seeds(engine.PatternCache(patterns={pattern.signature: entry}))

    def _add_seeds(self, content: engine.PatternCache) -> None:
        self.add_measurements(content)
        self.seeds = engine.merge_caches(self.seeds, content)

    def _to_entry(self, scheme: InsertionScheme) -> engine.CachedScheme:
        return engine.CachedScheme(
            points=frozenset(
                engine.CachedPoint(kind, place, self.origin.precision) for kind, place in scheme.addresses
            ),
            origin=self.origin,
            latency_ms=scheme.latency_ms if math.isfinite(scheme.latency_ms) else None,
            baseline_ms=self.baseline_ms,
        )


def _to_schemes(pattern: engine.CachedPattern) -> PatternSchemes:
    schemes = []
    for entry in pattern.schemes:
        scheme = InsertionScheme.of((point.kind, point.place) for point in sorted(entry.points))
        if entry.latency_ms is not None:
            scheme.latency_ms = entry.latency_ms
        schemes.append(scheme)
    return PatternSchemes(pattern=RegionPattern(pattern.signature, pattern.size), schemes=schemes)


_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
_Schemes = Annotated[
    PatternSchemes,
    BeforeValidator(lambda value: value if isinstance(value, PatternSchemes) else PatternSchemes.from_dict(value)),
    PlainSerializer(PatternSchemes.to_dict),
]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, populate_by_name=True)


class Measurement(_Record):
    """Result of one model.

    Attributes:
        latency_ms: Median latency; None if the measurement failed.
        stderr_ms: Standard error of the median; 0 if unknown.
        signature: Signature of the pattern that was profiled; "" for the baseline and initial placements.
        timestamp: Time of the measurement, in ISO 8601.
        choices: Choices of the placement, one digit each; "" if unknown.
    """

    latency_ms: _Milliseconds
    stderr_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    signature: str = ""
    timestamp: str | None = None
    choices: Annotated[str, Field(pattern="^[01]*$")] = ""


class AutotuneState(_Record):
    """Content of a state file.

    Attributes:
        facts: Properties of model, runtime and settings that must be equal to resume.
        interleaved: Whether models are timed in turns with the float model; their readings then have another scale.
        config: Settings, for readers and for messages about changes.
        measured: Results by the digest of the placement, in the order of measurement.
    """

    kind: Literal["qdq autotuner state"] = "qdq autotuner state"
    format_version: Annotated[Literal[1], Field(alias="schema")] = 1
    facts: dict[str, Any]
    baseline_latency_ms: _Milliseconds
    interleaved: bool = False
    config: dict[str, Any]
    measured: dict[str, Measurement]
    patterns: list[_Schemes]


def read_state(path: Path, facts: Mapping[str, Any]) -> AutotuneState:
    """Read a state file.

    Args:
        facts: Properties that must be equal to those in the file.

    Raises:
        FileNotFoundError: The file does not exist.
        AutotunerError: The file is not a state file, or is damaged.
        FingerprintMismatch: The facts differ; the text lists them.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    body = read_cache_file(path, "a state of the autotuner")
    remedy = "remove the file to start over, or use another --output_dir"
    if body.get("kind") != "qdq autotuner state" or body.get("schema") != 1:
        raise AutotunerError(f"{path}: no state of this autotuner (ModelOpt's cannot be read); {remedy}")
    try:
        state = AutotuneState.model_validate(body)
    except ValidationError as error:
        raise AutotunerError(f"{path}: damaged ({first_problem(error)}); {remedy}") from error
    except (AttributeError, TypeError, InvalidSchemeError) as error:  # a scheme is malformed
        raise AutotunerError(f"{path}: damaged ({error}); {remedy}") from error
    require_same_fingerprint(path, {key: state.facts.get(key) for key in facts}, facts)
    return state
