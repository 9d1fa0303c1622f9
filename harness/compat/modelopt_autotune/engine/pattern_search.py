"""Search of the schemes of one pattern, with all other patterns fixed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from harness.compat.modelopt_autotune.engine.placement_map import PlacementMap
from harness.compat.modelopt_autotune.engine.storage import Measurement
from harness.compat.modelopt_autotune.region_pattern import UNMEASURED_MS, InsertionScheme, PatternSchemes
from harness.compat.modelopt_autotune.regions import Region, RegionType
from harness.compat.modelopt_autotune.settings import Config
from harness.plugins import registry
from search.api import CONTRACT, Failure, Observation, Score, Searcher
from search.space import Placement, Space
from search.subspace import SubspaceSearcher


class PatternSearch:
    """Search of one pattern with all others fixed.

    Args:
        placement_map: Patterns of the model and the space of placements.
        region: Region of the pattern; the region of the whole model includes all patterns.
        allowed: Dimensions that may be quantized.
        around: Placement of all other patterns.
        config: Name and settings of the searcher.

    Attributes:
        schemes: Measured schemes and those to be measured, in the order of their proposal.
        index: Index of the scheme that was generated last; None before the first.
    """

    def __init__(
        self, placement_map: PlacementMap, region: Region, allowed: Sequence[int], around: Placement, config: Config
    ) -> None:
        self.region = region
        self.schemes = PatternSchemes(placement_map.pattern(region))
        self.index: int | None = None
        self._map = placement_map
        self._around = around
        self._attempts = config.maximum_generation_attempts
        self._stderr_ms: dict[str, float] = {}  # by the hash of the scheme: ModelOpt's schemes have no such field
        pattern_dimensions = set(placement_map.dimensions(self.signature).values())
        indices = [index for index in allowed if region.type is RegionType.ROOT or index in pattern_dimensions]
        make = partial(_make_searcher, config=config, signature=self.signature)
        self._part = SubspaceSearcher(placement_map.space, indices, around, make) if indices else None

    @property
    def signature(self) -> str:
        return self.schemes.pattern_signature

    def seed(self, schemes: Iterable[InsertionScheme]) -> None:
        """Add schemes to measure before all others; results that they contain are ignored."""
        for scheme in schemes:
            added = self._map.encode(self.region, self.placement(scheme))
            if self._part is not None and all(existing.hash != added.hash for existing in self.schemes.schemes):
                self.schemes.schemes.append(added)

    def generate(self, measured: Mapping[str, Measurement]) -> int:
        """Return the index of the next scheme to measure, or -1: first the seeds, then proposals of the searcher.

        Args:
            measured: Results by digest of the placement; a scheme with a result here is not measured again.
        """
        schemes = self.schemes.schemes
        for index, seed in enumerate(schemes):
            if not seed.is_profiled and self._look_up(seed, measured) is None:
                self.index = index
                return index
        repeats = 0
        while repeats < self._attempts and self._part is not None and (proposals := self._part.ask(1)):
            repeats += 1
            scheme = self._map.encode(self.region, proposals[0])
            earlier = next((measurement for measurement in schemes if measurement.hash == scheme.hash), None)
            if earlier is not None:
                self._tell_searcher(earlier)
                continue
            schemes.append(scheme)
            measurement = self._look_up(scheme, measured)
            if measurement is None:
                self.index = len(schemes) - 1
                return self.index
            if measurement.signature == self.signature:  # measured in this search, before an interruption
                repeats = 0
        return -1

    def fill(self, scheme: InsertionScheme, measurement: Measurement) -> None:
        """Store the result of a scheme and tell the searcher."""
        failed = measurement.latency_ms is None
        scheme.error = failed
        scheme.latency_ms = UNMEASURED_MS if measurement.latency_ms is None else measurement.latency_ms
        scheme.profile_timestamp = measurement.timestamp
        self._stderr_ms[scheme.hash] = measurement.stderr_ms
        self._tell_searcher(scheme)

    @property
    def generated(self) -> InsertionScheme | None:
        """Scheme that was generated last."""
        return None if self.index is None else self.schemes.schemes[self.index]

    def placement(self, scheme: InsertionScheme) -> Placement:
        """Return the placement of the whole model with this scheme."""
        if self._part is None:
            return self._around
        return self._part.embed(self._map.decode(self.signature, scheme, self._around))

    def _look_up(self, scheme: InsertionScheme, measured: Mapping[str, Measurement]) -> Measurement | None:
        measurement = measured.get(self._map.space.digest(self.placement(scheme)))
        if measurement is not None:
            self.fill(scheme, measurement)
        return measurement

    def _tell_searcher(self, scheme: InsertionScheme) -> None:
        if self._part is not None:
            failed = Failure(stage="measure", reason="the model that has this scheme could not be measured")
            stderr_ms = self._stderr_ms.get(scheme.hash, 0.0)
            outcome = failed if scheme.error else Score(objective=scheme.latency_ms, stderr=stderr_ms)
            self._part.tell(scored_observation(self._map.space, self.placement(scheme), outcome))


def scored_observation(space: Space, placement: Placement, outcome: Score | Failure) -> Observation:
    """Return the observation of a placement with its digest."""
    return Observation(placement=placement, digest=space.digest(placement), outcome=outcome)


def _make_searcher(space: Space, config: Config, signature: str) -> Searcher:
    """Return the searcher of a pattern; its seed depends on the pattern, not on the order of the regions."""
    make: Any = registry.load_plugin("searcher", config.searcher)
    digest = hashlib.sha256(f"{config.seed} {signature}".encode()).digest()
    params = {}
    if config.searcher == "random_mutation":
        params = {
            "top_share": config.top_percent_to_mutate,
            "minimum_parents": config.minimum_schemes_to_mutate,
            "maximum_mutations": config.maximum_mutations,
            "maximum_generation_attempts": config.maximum_generation_attempts,
        }
    made: Searcher = make(space, seed=int.from_bytes(digest[:4], "big"), **params)
    registry.require_methods(f"searcher {config.searcher!r}", made, CONTRACT)
    return made
