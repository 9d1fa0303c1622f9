"""The region under profile: its part of the space of placements, and the searcher that proposes schemes for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness import registry
from harness.compat.modelopt_autotune.common import Config
from harness.compat.modelopt_autotune.region_index import PlacementMap
from harness.compat.modelopt_autotune.regions import Region, RegionType
from harness.compat.modelopt_autotune.schemes import UNMEASURED_MS, InsertionScheme, PatternSchemes, RegionPattern
from harness.compat.modelopt_autotune.state import Measurement
from search.api import CONTRACT, Failure, Observation, Score, Searcher
from search.space import Placement, Space

__all__ = ["PatternSearch"]


class PatternSearch:
    """Profiles one pattern, everything else being as it is.

    Args:
        chart: The regions.
        region: The region; that of the whole model stands for all patterns at once.
        allowed: Dimensions that may be quantized.
        around: What all other dimensions have.
        config: Names the searcher and its settings.

    Attributes:
        schemes: What was tried and what is to be tried, in the order in which it came up.
        index: Which scheme was generated last; None before the first.
    """

    def __init__(
        self, chart: PlacementMap, region: Region, allowed: Sequence[int], around: Placement, config: Config
    ) -> None:
        pattern, _ = chart.locate_region(region)
        composite = pattern.type is not RegionType.LEAF
        self.region = region
        self.schemes = PatternSchemes(RegionPattern(pattern.signature, len(pattern.operators), composite=composite))
        self.index: int | None = None
        self._chart = chart
        self._stderr_ms: dict[str, float] = {}  # of the schemes by hash: ModelOpt's have no place for it
        self._around = around
        self._attempts = config.maximum_generation_attempts
        own = set(chart.dimensions(pattern.signature).values())
        whole = pattern.type is RegionType.ROOT
        self._indices = [index for index in allowed if whole or index in own]
        self._space = Space(tuple(chart.space.dimensions[index] for index in self._indices))
        self._searcher = self._create_searcher(config) if self._indices else None

    @property
    def signature(self) -> str:
        """Signature of the pattern."""
        return self.schemes.pattern_signature

    def seed(self, schemes: Iterable[InsertionScheme]) -> None:
        """Schemes to try before all others; what came of them elsewhere does not count."""
        for scheme in schemes:
            fresh = self._chart.encode(self.region, self.placement(scheme))
            if self._indices and all(known.hash != fresh.hash for known in self.schemes.schemes):
                self.schemes.schemes.append(fresh)

    def generate(self, measured: Mapping[str, Measurement]) -> int:
        """Index of the next scheme to measure, -1 where there is none: first the seeds, then the searcher's.

        Args:
            measured: By the digest of a placement. A scheme whose model is among them gets its outcome from there.
        """
        schemes = self.schemes.schemes
        for index, seed in enumerate(schemes):
            if not seed.is_profiled and self._look_up(seed, measured) is None:
                return self._find_scheme(index)
        in_vain = 0
        while in_vain < self._attempts and (scheme := self._ask_searcher()) is not None:
            in_vain += 1
            earlier = next((known for known in schemes if known.hash == scheme.hash), None)
            if earlier is not None:
                self._tell_searcher(earlier)
                continue
            schemes.append(scheme)
            known = self._look_up(scheme, measured)
            if known is None:
                return self._find_scheme(len(schemes) - 1)
            if known.signature == self.signature:  # measured in this turn, before an interruption
                in_vain = 0
        return -1

    def fill(self, scheme: InsertionScheme, measurement: Measurement) -> None:
        """Note what came of a scheme, and let the searcher know."""
        failed = measurement.latency_ms is None
        scheme.error = failed
        scheme.latency_ms = UNMEASURED_MS if measurement.latency_ms is None else measurement.latency_ms
        scheme.profile_timestamp = measurement.timestamp
        self._stderr_ms[scheme.hash] = measurement.stderr_ms
        self._tell_searcher(scheme)

    @property
    def generated(self) -> InsertionScheme | None:
        """The scheme generated last."""
        return None if self.index is None else self.schemes.schemes[self.index]

    def placement(self, scheme: InsertionScheme) -> Placement:
        """The placement of the whole model that has this scheme."""
        decoded = self._chart.decode(self.signature, scheme, self._around)
        return self._update_scheme(self._restrict_placement(decoded))

    def _find_scheme(self, index: int) -> int:
        self.index = index
        return index

    def _look_up(self, scheme: InsertionScheme, measured: Mapping[str, Measurement]) -> Measurement | None:
        known = measured.get(self._chart.space.digest(self.placement(scheme)))
        if known is not None:
            self.fill(scheme, known)
        return known

    def _ask_searcher(self) -> InsertionScheme | None:
        asked = () if self._searcher is None else self._searcher.ask(1)
        return self._chart.encode(self.region, self._update_scheme(asked[0])) if asked else None

    def _tell_searcher(self, scheme: InsertionScheme) -> None:
        if self._searcher is None:
            return
        placement = self._restrict_placement(self.placement(scheme))
        failed = Failure(stage="measure", reason="the model that has this scheme could not be measured")
        stderr_ms = self._stderr_ms.get(scheme.hash, 0.0)
        outcome = failed if scheme.error else Score(objective=scheme.latency_ms, stderr=stderr_ms)
        digest = self._space.digest(placement)
        self._searcher.tell(Observation(placement=placement, digest=digest, outcome=outcome))

    def _restrict_placement(self, placement: Placement) -> Placement:
        return Placement(tuple(placement.choices[index] for index in self._indices))

    def _update_scheme(self, placement: Placement) -> Placement:
        choices = list(self._around.choices)
        for index, choice in zip(self._indices, placement.choices, strict=True):
            choices[index] = choice
        return Placement(tuple(choices))

    def _create_searcher(self, config: Config) -> Searcher:
        """The searcher, seeded for this pattern alone: the order of regions does not matter."""
        make: Any = registry.load_plugin("searcher", config.searcher)
        digest = hashlib.sha256(f"{config.seed} {self.signature}".encode()).digest()
        made: Searcher = make(self._space, seed=int.from_bytes(digest[:4], "big"), **_searcher_params(config))
        registry.require_methods(f"searcher {config.searcher!r}", made, CONTRACT)
        return made


def _searcher_params(config: Config) -> Mapping[str, Any]:
    """The parameters of a searcher that stand in the config: those of ModelOpt's algorithm."""
    if config.searcher != "random_mutation":
        return {}
    return {
        "top_share": config.top_percent_to_mutate,
        "minimum_parents": config.minimum_schemes_to_mutate,
        "maximum_mutations": config.maximum_mutations,
        "maximum_generation_attempts": config.maximum_generation_attempts,
    }
