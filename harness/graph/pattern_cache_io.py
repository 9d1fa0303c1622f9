"""Reader and writer of pattern caches as YAML, with a complete validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harness.base.errors import UserError
from harness.base.paths import replacing
from harness.base.text import shorten
from harness.config.validation_errors import to_user_error
from harness.config.yaml_loader import quote_core_schema, read_cache_file
from harness.graph.pattern_cache import (
    MAX_SCHEMES,
    MIN_DISTANCE_POINTS,
    CachedPattern,
    CachedPoint,
    CachedScheme,
    MeasurementOrigin,
    PatternCache,
    merge_caches,
    parse_point,
)

_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_FILE_KIND = "qdq pattern cache"


def read_cache(path: Path) -> PatternCache:
    """Read a cache file; schemes beyond its limits are left out.

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
        return _CacheRecord.model_validate(body).to_cache()
    except ValidationError as error:
        raise to_user_error(_CacheRecord, f"{path}: not a pattern cache of qdq-bench", error) from None


def write_cache(cache: PatternCache, path: Path) -> None:
    """Write a cache file atomically; an existing file is replaced.

    Raises:
        OSError: The file cannot be written; an old one is kept.
    """
    limits = {"minimum_distance": cache.minimum_distance, "maximum_schemes": cache.maximum_schemes}
    patterns = [
        {"signature": p.signature, "size": p.size, "schemes": [_scheme_to_dict(scheme) for scheme in p.schemes]}
        for p in cache.patterns.values()
    ]
    write_plain_yaml({"kind": _FILE_KIND, "schema": 1, **limits, "patterns": patterns}, path)


def write_plain_yaml(body: Mapping[str, Any], path: Path) -> None:
    """Write a YAML file atomically, with lists of plain values on one line each; folders are created.

    Raises:
        OSError: The file cannot be written; an old one is kept.
    """
    text = yaml.dump(dict(body), Dumper=_AliasFreeDumper, sort_keys=False, default_flow_style=None, width=4096)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


class _AliasFreeDumper(_SafeDumper):  # type: ignore[misc]
    """YAML dumper without aliases for equal values, which the reader refuses."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


quote_core_schema(_AliasFreeDumper)


def _scheme_to_dict(scheme: CachedScheme) -> dict[str, Any]:
    return {
        "latency_ms": scheme.latency_ms,
        "baseline_ms": scheme.baseline_ms,
        "backend": scheme.origin.backend,
        "precision": scheme.origin.precision,
        "device": scheme.origin.device,
        "points": [str(point) for point in sorted(scheme.points)],
    }


def _parse_point_field(value: Any) -> CachedPoint:
    if not isinstance(value, str):
        raise ValueError(f"a point is a text such as node_input/4.0/int8, but got {shorten(repr(value))}")
    return parse_point(value)


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


_ShortText = Annotated[str, Field(max_length=200)]
_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
_PointField = Annotated[CachedPoint, BeforeValidator(_parse_point_field)]


class _SchemeRecord(_StrictModel):
    latency_ms: _Milliseconds = None
    baseline_ms: _Milliseconds = None
    backend: _ShortText
    precision: _ShortText
    device: _ShortText = ""
    points: Annotated[list[_PointField], Field(max_length=10_000), Field(fail_fast=True)]

    def to_scheme(self) -> CachedScheme:
        return CachedScheme(
            points=frozenset(self.points),
            origin=MeasurementOrigin(backend=self.backend, precision=self.precision, device=self.device),
            latency_ms=self.latency_ms,
            baseline_ms=self.baseline_ms,
        )


class _PatternRecord(_StrictModel):
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]
    schemes: Annotated[list[_SchemeRecord], Field(max_length=1000), Field(fail_fast=True)]


class _CacheRecord(_StrictModel):
    kind: Literal["qdq pattern cache"]
    schema_: Annotated[Literal[1], Field(alias="schema")]
    minimum_distance: Annotated[int, Field(ge=0, le=1000)] = MIN_DISTANCE_POINTS
    maximum_schemes: Annotated[int, Field(ge=0, le=1000)] = MAX_SCHEMES
    patterns: Annotated[list[_PatternRecord], Field(max_length=100_000), Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_distinct_signatures(self) -> _CacheRecord:
        seen: set[str] = set()
        for pattern in self.patterns:
            if pattern.signature in seen:
                raise ValueError(f"pattern {pattern.signature[:12]} appears twice")
            seen.add(pattern.signature)
        return self

    def to_cache(self) -> PatternCache:
        """Return the cache without schemes beyond its limits, which an editor may have added."""
        found = {
            p.signature: CachedPattern(
                signature=p.signature, size=p.size, schemes=tuple(s.to_scheme() for s in p.schemes)
            )
            for p in self.patterns
        }
        limits = PatternCache(minimum_distance=self.minimum_distance, maximum_schemes=self.maximum_schemes)
        return merge_caches(limits, PatternCache(patterns=found))
