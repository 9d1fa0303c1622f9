"""Pattern cache: the best schemes of each pattern, across runs and models, and its YAML file.

A scheme is a set of points in pattern coordinates with the names of a space's dimensions, so it fits every region with
that pattern in any model. Schemes are ranked by the ratio of their latency to the baseline's, which is comparable
between models. The defaults 4 and 32 are those of ModelOpt's autotune (user guide "Autotune (ONNX)").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from harness.base.errors import UserError
from harness.base.files import first_problem
from harness.base.text import shorten
from harness.config.sections import duplicates
from harness.config.yaml_loader import read_cache_file, write_plain_yaml
from harness.measure.records import Count, LatencyMs, field_values
from search.api import Observation, Score
from search.space import FLOAT, Dimension, Placement, PointKind, Space

MIN_DISTANCE_POINTS = 4
MAX_SCHEMES = 32
_ShortText = Annotated[str, Field(max_length=200, strict=True)]
_Limit = Annotated[int, Field(ge=0, le=1000, strict=True)]
_CONFIG = ConfigDict(extra="forbid")
_POINT = re.compile(r"(node_input|child_input|output)/([0-9]{1,6})\.([0-9]{1,6})/([a-z][a-z0-9]{0,15})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MeasurementOrigin:
    """Backend, precision and device on which a scheme was measured.

    Attributes:
        precision: Quantized precision of the points, for instance "int8".
        device: Device in the benchmarker's description; "" if unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    backend: _ShortText
    precision: _ShortText
    device: _ShortText = ""

    @classmethod
    def of_backend(cls, facts: Mapping[str, Any], precision: str) -> MeasurementOrigin:
        """Return the origin of measurements; `facts` is a benchmarker's description, with `name`, perhaps `device`."""
        return cls(backend=facts["name"], precision=precision, device=str(facts.get("device", "")))


class CachedPoint(NamedTuple):
    """Quantized insertion point of a pattern.

    Attributes:
        kind: "node_input", "child_input" or "output".
        place: Number of the node or child region in the pattern's canonical order, and number of its input or output.
    """

    kind: PointKind
    place: tuple[int, int]
    precision: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.place[0]}.{self.place[1]}/{self.precision}"


def parse_point(text: Any) -> CachedPoint:
    """Return the point of a text such as "node_input/4.0/int8".

    Raises:
        ValueError: The value is no text of a point.
    """
    match = _POINT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"a point is KIND/PLACE.INPUT/PRECISION, such as node_input/4.0/int8, but got {shorten(repr(text))}"
        )
    kind, place, slot, precision = match.groups()
    return CachedPoint(cast(PointKind, kind), (int(place), int(slot)), precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedScheme:
    """Quantized points of a pattern, with the latency of the fastest model that has exactly these points.

    Attributes:
        latency_ms: Latency in ms of the whole model; None for a scheme from a Q/DQ model that was not measured.
        baseline_ms: Latency in ms of the float model in the same run.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    points: Annotated[
        frozenset[Annotated[CachedPoint, BeforeValidator(parse_point)]],
        Field(max_length=10_000, fail_fast=True),
    ]
    origin: MeasurementOrigin
    latency_ms: LatencyMs | None = None
    baseline_ms: LatencyMs | None = None

    @property
    def latency_ratio(self) -> float:
        """Ratio of the latency to the baseline's; infinite if one of them is unknown."""
        if self.latency_ms is None or self.baseline_ms is None:
            return float("inf")
        return self.latency_ms / self.baseline_ms


def _nest_origin(scheme: Any) -> Any:
    """Return the body of a scheme in a file with its origin as one value."""
    if not isinstance(scheme, dict):
        return scheme
    origin = {key: scheme[key] for key in ("backend", "precision", "device") if key in scheme}
    return {**{key: value for key, value in scheme.items() if key not in origin}, "origin": origin}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPattern:
    """Schemes of one pattern, best first.

    Attributes:
        signature: SHA-256 of the pattern in hexadecimal, see `harness.graph.partition.patterns.Pattern`.
        size: Number of its nodes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", strict=True)]
    size: Count
    schemes: Annotated[
        tuple[Annotated[CachedScheme, BeforeValidator(_nest_origin)], ...],
        Field(max_length=1000, fail_fast=True),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCache:
    """Best schemes of each pattern.

    Attributes:
        minimum_distance: Smallest number of points in which two schemes of one pattern and origin differ.
        maximum_schemes: Largest number of schemes of one pattern; 0: no limit.
        patterns: Patterns with their schemes, by signature.
    """

    minimum_distance: int = MIN_DISTANCE_POINTS
    maximum_schemes: int = MAX_SCHEMES
    patterns: Mapping[str, CachedPattern] = field(default_factory=dict)

    @property
    def origins(self) -> tuple[MeasurementOrigin, ...]:
        """Origins of its schemes, sorted."""
        return tuple(sorted({scheme.origin for pattern in self.patterns.values() for scheme in pattern.schemes}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CacheFile:
    """Content of a cache file; the limits are those of `PatternCache`."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    kind: Literal["qdq pattern cache"]
    schema: Literal[1]
    minimum_distance: _Limit = MIN_DISTANCE_POINTS
    maximum_schemes: _Limit = MAX_SCHEMES
    patterns: Annotated[list[CachedPattern], Field(max_length=100_000, fail_fast=True)]


_FILE: TypeAdapter[_CacheFile] = TypeAdapter(_CacheFile)


def read_cache(path: Path) -> PatternCache:
    """Read a cache file; schemes beyond its limits, which an editor may have added, are left out."""
    body = read_cache_file(path, "a pattern cache")
    if "pattern_schemes" in body:
        raise UserError(
            f"{path}: a pattern cache of ModelOpt; its signatures name other patterns than ours, so nothing in it "
            "would match. Give the Q/DQ model that it led to as --qdq_baseline instead"
        )
    try:
        file = _FILE.validate_python(body)
    except ValidationError as error:
        raise UserError(f"{path}: not a pattern cache of qdq-bench: {first_problem(error)}") from None
    if repeated := duplicates(pattern.signature for pattern in file.patterns):
        raise UserError(f"{path}: not a pattern cache of qdq-bench: pattern {repeated[0][:12]} appears twice")
    limits = PatternCache(minimum_distance=file.minimum_distance, maximum_schemes=file.maximum_schemes)
    return merge_caches(limits, PatternCache(patterns={pattern.signature: pattern for pattern in file.patterns}))


def write_cache(cache: PatternCache, path: Path) -> None:
    """Write a cache file atomically; an existing file is replaced.

    Raises:
        OSError: The file cannot be written; an old one is kept.
    """
    patterns = [
        {
            "signature": pattern.signature,
            "size": pattern.size,
            "schemes": [
                {
                    "latency_ms": scheme.latency_ms,
                    "baseline_ms": scheme.baseline_ms,
                    **field_values(scheme.origin),
                    "points": [str(point) for point in sorted(scheme.points)],
                }
                for scheme in pattern.schemes
            ],
        }
        for pattern in cache.patterns.values()
    ]
    limits = {"minimum_distance": cache.minimum_distance, "maximum_schemes": cache.maximum_schemes}
    write_plain_yaml({"kind": "qdq pattern cache", "schema": 1, **limits, "patterns": patterns}, path)


def merge_caches(cache: PatternCache, *others: PatternCache) -> PatternCache:
    """Return a cache with the best schemes of all caches, within the limits of the first; merging is idempotent.

    Schemes that differ in fewer than `minimum_distance` points from a better one of the same origin are left out. Each
    origin gives schemes in turn, because devices differ in speed.
    """
    found: dict[str, list[CachedScheme]] = {}
    sizes: dict[str, int] = {}
    for each in (cache, *others):
        for signature, pattern in each.patterns.items():
            found.setdefault(signature, []).extend(pattern.schemes)
            sizes.setdefault(signature, pattern.size)

    def rank(scheme: CachedScheme) -> tuple[float, float, int, list[CachedPoint], MeasurementOrigin]:
        latency_ms = float("inf") if scheme.latency_ms is None else scheme.latency_ms
        return scheme.latency_ratio, latency_ms, len(scheme.points), sorted(scheme.points), scheme.origin

    patterns, maximum, distance = dict[str, CachedPattern](), cache.maximum_schemes, max(1, cache.minimum_distance)
    for signature, schemes in found.items():
        kept: dict[MeasurementOrigin, list[CachedScheme]] = {}
        for scheme in sorted(schemes, key=rank):
            known = kept.setdefault(scheme.origin, [])
            is_full = maximum and len(known) == maximum
            if not is_full and all(len(scheme.points ^ other.points) >= distance for other in known):
                known.append(scheme)
        ranked = [
            (place, scheme.latency_ratio, origin, scheme)
            for origin, own in kept.items()
            for place, scheme in enumerate(own)
        ]
        ranked.sort(key=itemgetter(0, 1, 2))
        chosen = tuple(scheme for *_, scheme in (ranked[:maximum] if maximum else ranked))
        patterns[signature] = CachedPattern(signature=signature, size=sizes[signature], schemes=chosen)
    return replace(cache, patterns=patterns)


def build_cache(
    observations: Iterable[Observation],
    space: Space,
    sizes: Mapping[str, int],
    baseline_ms: float | None,
    origin: MeasurementOrigin,
) -> PatternCache:
    """Return a cache with the schemes of a search, ranked by the fastest placement that contains each of them.

    Failures and placements that violate a constraint are left out.

    Args:
        observations: Observations of placements of `space` whose objective is a latency; they are iterated once.
        space: Space of the search.
        sizes: Number of nodes of each pattern of the model, by all 64 digits of its signature.
        baseline_ms: Latency in ms of the float model in the same search; None: its lowest latency among the
            observations; if it was not observed, the cache is empty.
        origin: Backend, precision and device of the search.
    """
    first: dict[str, tuple[int, ...]] = {}
    for group, indices in space.groups.items():  # without sharing, the dimensions of a pattern's first region
        first.setdefault(group.partition(".")[0], indices)
    patterns = {next(s for s in sizes if s.startswith(group)): indices for group, indices in first.items()}
    best: dict[tuple[str, tuple[int, ...]], float] = {}
    floats_ms: list[float] = []
    for observation in observations:
        score, choices = observation.outcome, observation.placement.choices
        if isinstance(score, Score) and not any(choices):
            floats_ms.append(score.objective)
        if isinstance(score, Score) and score.rank[:2] == (0.0, False):
            for signature, indices in patterns.items():
                key = signature, tuple([choices[i] for i in indices])
                best[key] = min(score.objective, best.get(key, score.objective))
    float_ms = min(floats_ms, default=None) if baseline_ms is None else baseline_ms
    if float_ms is None:
        return PatternCache()
    points = [
        [_point_of_dimension(dimension, precision) for precision in dimension.choices] for dimension in space.dimensions
    ]
    found: dict[str, list[CachedScheme]] = {}
    for (signature, chosen), latency_ms in best.items():
        own = frozenset(points[i][choice] for i, choice in zip(patterns[signature], chosen, strict=True) if choice)
        scheme = CachedScheme(points=own, origin=origin, latency_ms=latency_ms, baseline_ms=float_ms)
        found.setdefault(signature, []).append(scheme)
    raw = {s: CachedPattern(signature=s, size=sizes[s], schemes=tuple(schemes)) for s, schemes in found.items()}
    return merge_caches(PatternCache(patterns=raw))


def _point_of_dimension(dimension: Dimension, precision: str) -> CachedPoint:
    return parse_point(f"{dimension.name.removeprefix(f'{dimension.group}/')}/{precision}")


def propose_placements(
    cache: PatternCache, space: Space, origin: MeasurementOrigin | None = None, limit: int = 4
) -> list[Placement]:
    """Return placements for an initial design: with the best scheme of every pattern, the second best, and so on.

    Patterns that the cache does not contain stay float. A point that the space lacks is left out; a precision that the
    space lacks at a point is replaced by the first one that it offers there.

    Args:
        origin: Origin whose schemes precede all others.
        limit: Largest number of placements.

    Returns:
        At most `limit` different placements, without the float model; empty if no pattern of the space is in the cache.
    """
    schemes: dict[str, list[CachedScheme]] = {}
    for group in space.groups:  # its name begins the signature of its pattern
        known = [each for signature, each in cache.patterns.items() if signature.startswith(group.partition(".")[0])]
        if len(known) == 1 and known[0].schemes:
            schemes[group] = sorted(known[0].schemes, key=lambda scheme: scheme.origin != origin)
    points = [_point_of_dimension(dimension, FLOAT) for dimension in space.dimensions]
    found: dict[str, Placement] = {}
    for rank in range(max(map(len, schemes.values()), default=0)):
        ranked = {group: each[min(rank, len(each) - 1)].points for group, each in schemes.items()}
        wanted = {(group, p.kind, p.place): p.precision for group, each in ranked.items() for p in each}
        choices = []
        for dimension, point in zip(space.dimensions, points, strict=True):
            precision = wanted.get((dimension.group, point.kind, point.place))
            offered = dimension.choices.index(precision) if precision in dimension.choices else 1
            choices.append(0 if precision is None else offered)
        if any(choices):
            placement = Placement(tuple(choices))
            found.setdefault(space.digest(placement), placement)
        if len(found) == limit:
            break
    return list(found.values())


def describe_foreign_schemes(cache: PatternCache, origin: MeasurementOrigin) -> tuple[str, ...]:
    """Return warnings about schemes that were measured with another backend, precision or device; empty without any.

    Args:
        origin: Origin of the search that uses the cache; an unknown device on either side is no difference.
    """
    said = []
    for other in cache.origins:
        pairs = (("backend", other.backend, origin.backend), ("precision", other.precision, origin.precision))
        unlike = [f"{what} {there!r} instead of {here!r}" for what, there, here in pairs if there != here]
        if other.device and origin.device and other.device != origin.device:
            unlike.append(f"device {other.device!r} instead of {origin.device!r}")
        if unlike:
            said.append(f"the pattern cache has schemes measured with {', '.join(unlike)}, so they may be slow here")
    return tuple(said)
