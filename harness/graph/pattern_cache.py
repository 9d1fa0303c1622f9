"""Pattern cache: the best schemes of each pattern, across runs and models, and its YAML file.

A scheme is a set of points in pattern coordinates with the names of a space's dimensions, so it fits every region with
that pattern in any model. Schemes are ranked by the ratio of their latency to the baseline's, which is comparable
between models. The defaults 4 and 32 are those of ModelOpt's autotune (user guide "Autotune (ONNX)").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from harness.base.errors import UserError
from harness.base.text import shorten
from harness.config.sections import duplicates
from harness.config.yaml_loader import read_cache_file, write_plain_yaml
from harness.measure.records import Count, LatencyMs, field_values, first_problem
from search.api import Observation, Score
from search.space import FLOAT, Placement, PointKind, Space

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


@dataclass(frozen=True, slots=True, order=True)
class CachedPoint:
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
    """Read a cache file; schemes beyond its limits, which an editor may have added, are left out.

    Raises:
        UserError: The file cannot be read, is too large, or is not a pattern cache of qdq-bench.
    """
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


def count_differing_points(first: CachedScheme, second: CachedScheme) -> int:
    """Return the number of points that only one of two schemes has."""
    return len(first.points ^ second.points)


def merge_caches(cache: PatternCache, *others: PatternCache) -> PatternCache:
    """Return a cache with the best schemes of all caches, within the limits of the first; merging is idempotent.

    Schemes that differ in fewer than `minimum_distance` points from a better one of the same origin are left out.
    """
    found: dict[str, list[CachedScheme]] = {}
    sizes: dict[str, int] = {}
    for each in (cache, *others):
        for signature, pattern in each.patterns.items():
            found.setdefault(signature, []).extend(pattern.schemes)
            sizes.setdefault(signature, pattern.size)
    limits = cache.minimum_distance, cache.maximum_schemes
    return PatternCache(
        minimum_distance=cache.minimum_distance,
        maximum_schemes=cache.maximum_schemes,
        patterns={
            signature: CachedPattern(
                signature=signature, size=sizes[signature], schemes=_select_schemes(schemes, *limits)
            )
            for signature, schemes in found.items()
        },
    )


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
    patterns = _dimensions_by_signature(space, sizes)
    best, own_ms = _lowest_latencies(observations, patterns)
    float_ms = own_ms if baseline_ms is None else baseline_ms
    if float_ms is None:
        return PatternCache()
    points = [[_point_of_dimension(d.name, d.group, precision) for precision in d.choices] for d in space.dimensions]
    found: dict[str, list[CachedScheme]] = {}
    for (signature, chosen), latency_ms in best.items():
        own = frozenset(points[i][choice] for i, choice in zip(patterns[signature], chosen, strict=True) if choice)
        scheme = CachedScheme(points=own, origin=origin, latency_ms=latency_ms, baseline_ms=float_ms)
        found.setdefault(signature, []).append(scheme)
    raw = {s: CachedPattern(signature=s, size=sizes[s], schemes=tuple(schemes)) for s, schemes in found.items()}
    return merge_caches(PatternCache(patterns=raw))


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
    schemes = {group: _schemes_for_group(cache, group, origin) for group in space.groups}
    found: dict[str, Placement] = {}
    for rank in range(max(map(len, schemes.values()), default=0)):
        chosen = {group: each[min(rank, len(each) - 1)].points for group, each in schemes.items() if each}
        placement = _quantized_points(space, chosen)
        if any(placement.choices):
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


def _select_schemes(schemes: Iterable[CachedScheme], minimum_distance: int, maximum: int) -> tuple[CachedScheme, ...]:
    """Return the best schemes with the minimum distance, from each origin in turn, because devices differ in speed."""
    kept: dict[MeasurementOrigin, list[CachedScheme]] = {}
    for scheme in sorted(schemes, key=_scheme_sort_key):
        known = kept.setdefault(scheme.origin, [])
        if maximum and len(known) == maximum:
            continue
        if all(count_differing_points(scheme, other) >= max(1, minimum_distance) for other in known):
            known.append(scheme)
    ranked = [
        (rank, scheme.latency_ratio, origin, scheme) for origin, own in kept.items() for rank, scheme in enumerate(own)
    ]
    ranked.sort(key=lambda entry: entry[:3])
    return tuple(scheme for *_, scheme in (ranked[:maximum] if maximum else ranked))


def _scheme_sort_key(
    scheme: CachedScheme,
) -> tuple[float, float, int, list[tuple[PointKind, tuple[int, int], str]], MeasurementOrigin]:
    latency_ms = float("inf") if scheme.latency_ms is None else scheme.latency_ms
    points = sorted((point.kind, point.place, point.precision) for point in scheme.points)  # plain ones sort faster
    return scheme.latency_ratio, latency_ms, len(points), points, scheme.origin


def _schemes_for_group(cache: PatternCache, group: str, origin: MeasurementOrigin | None) -> Sequence[CachedScheme]:
    """Return the schemes of the pattern of a group, whose name begins the signature."""
    found = [pattern for signature, pattern in cache.patterns.items() if signature.startswith(group.partition(".")[0])]
    return sorted(found[0].schemes, key=lambda scheme: scheme.origin != origin) if len(found) == 1 else ()


def _point_of_dimension(name: str, group: str, precision: str) -> CachedPoint:
    return parse_point(f"{name.removeprefix(f'{group}/')}/{precision}")


def _lowest_latencies(
    observations: Iterable[Observation], patterns: Mapping[str, Sequence[int]]
) -> tuple[dict[tuple[str, tuple[int, ...]], float], float | None]:
    """Return the lowest latency of each pattern's choices, and that of the float model, or None if not measured."""
    best: dict[tuple[str, tuple[int, ...]], float] = {}
    floats_ms: list[float] = []
    for observation in observations:
        score, choices = observation.outcome, observation.placement.choices
        if not isinstance(score, Score):
            continue
        if not any(choices):
            floats_ms.append(score.objective)
        if score.rank[:2] == (0.0, False):
            for signature, indices in patterns.items():
                key = signature, tuple([choices[i] for i in indices])
                best[key] = min(score.objective, best.get(key, score.objective))
    return best, min(floats_ms, default=None)


def _dimensions_by_signature(space: Space, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of each pattern by signature; without sharing, those of the pattern's first region."""
    first: dict[str, tuple[int, ...]] = {}
    for group, indices in space.groups.items():
        first.setdefault(group.partition(".")[0], indices)
    return {next(s for s in sizes if s.startswith(group)): indices for group, indices in first.items()}


def _quantized_points(space: Space, chosen: Mapping[str, frozenset[CachedPoint]]) -> Placement:
    wanted = {group: {(p.kind, p.place): p.precision for p in points} for group, points in chosen.items()}
    choices = []
    for dimension in space.dimensions:
        point = _point_of_dimension(dimension.name, dimension.group, FLOAT)
        precision = wanted.get(dimension.group, {}).get((point.kind, point.place))
        known = dimension.choices.index(precision) if precision in dimension.choices else 1
        choices.append(0 if precision is None else known)
    return Placement(tuple(choices))
