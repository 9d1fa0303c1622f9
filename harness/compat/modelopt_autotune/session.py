"""Session of an autotuner: one model, one set of its regions, and every measured model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from harness import registry
from harness.api import Candidate, capabilities_of
from harness.compat.modelopt_autotune.common import Config
from harness.compat.modelopt_autotune.model_writer import ModelWriter
from harness.compat.modelopt_autotune.pattern_search import PatternSearch
from harness.compat.modelopt_autotune.region_index import PlacementMap, RegionIndex
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.schemes import PatternSchemes
from harness.compat.modelopt_autotune.state import Measurement
from harness.config.sections import PluginSpec
from harness.graph import pattern_cache as engine
from harness.graph.conversions import map_to_float_tensors
from harness.graph.qdq.import_placement import import_placement
from harness.graph.rules.dialect_lookup import dialect_name_for, load_dialect
from harness.task_setup.model_loader import input_types
from search.api import Observation, Score
from search.space import Placement

__all__ = ["AutotuneSession", "Backend"]


class Backend:
    """A benchmarker as far as writing models for it needs it.

    Attributes:
        use: Its name and parameters.
        dialect: How it wants its Q/DQ pairs.
        facts: Its own words about itself.
        emulated: Precisions that the device only emulates.

    Raises:
        UserError: There is no such benchmarker or dialect.
    """

    def __init__(self, use: PluginSpec) -> None:
        benchmarker = registry.create_plugin("benchmarker", use.use, use.params)
        self.use = use
        self.facts: Mapping[str, Any] = benchmarker.describe()
        self.emulated = capabilities_of(benchmarker).emulated
        self.dialect = load_dialect(dialect_name_for(benchmarker, use.use, self.facts))


class AutotuneSession:
    """One model with its regions, and what was measured of it.

    Args:
        atlas: The model.
        regions: What it is made of.
        config: The settings.
        backend: What it is made for.

    Attributes:
        allowed: Dimensions that may be quantized; `restrict_to_patterns` makes them fewer.
        base: What patterns have whose turn has not come.
        measured: By digest.
    """

    def __init__(self, atlas: RegionIndex, regions: Sequence[Region], config: Config, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._model = atlas.model
        self.regions = tuple(regions)
        self.chart: PlacementMap = atlas.chart(regions)
        self.delivery = ModelWriter(atlas, self.chart.space, config, backend.use)
        self.chart.narrow(self.delivery.space)
        self.space = self.chart.space
        self.allowed: tuple[int, ...] = tuple(range(len(self.space)))
        self.base = self.space.float_placement()
        self.measured: dict[str, Measurement] = {}

    @property
    def emulated(self) -> frozenset[str]:
        """See `Backend`."""
        return self._backend.emulated

    @property
    def origin(self) -> engine.MeasurementOrigin:
        """Where its measurements are made."""
        device = str(self._backend.facts.get("device", ""))[:200]
        return engine.MeasurementOrigin(
            backend=self._backend.use.use, precision=self._config.default_quant_type, device=device
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same to go on with earlier measurements."""
        dimensions = hashlib.sha256(repr(self.space.dimensions).encode()).hexdigest()
        return {
            "model_sha256": self._model.sha256,
            "inputs": {name: list(shape) for name, (_, shape) in input_types(self._model).items()},
            "quant_type": self._config.default_quant_type,
            **{key: self._backend.facts.get(key) for key in ("name", "version", "device", "options")},
            "space": dimensions[:16],  # what differs here follows from one of the others as a rule
        }

    def restrict_to_patterns(self, signatures: Iterable[str]) -> None:
        """Leave all patterns but these float."""
        kept = {index for signature in signatures for index in self.chart.dimensions(signature).values()}
        self.allowed = tuple(sorted(kept))

    def pattern_search(self, region: Region, around: Placement) -> PatternSearch:
        """The turn of a region."""
        return PatternSearch(self.chart, region, self.allowed, around, self._config)

    def with_schemes(self, profiled: Iterable[PatternSchemes]) -> Placement:
        """The best scheme of each profiled pattern; the others as the base has them, and float what is not allowed."""
        placement = self.base
        for schemes in profiled:
            if schemes.best_scheme is not None:
                placement = self.chart.decode(schemes.pattern_signature, schemes.best_scheme, placement)
        return self._drop_illegal_points(placement)

    def candidate(self, placement: Placement) -> Candidate:
        """The candidate of a placement."""
        resolved, digest = self.space.resolve(placement), self.space.digest(placement)
        return Candidate(digest=digest, edges=resolved, source=lambda: self.delivery.candidate_file(resolved, digest))

    def record(
        self, placement: Placement, latency_ms: float | None, signature: str = "", *, stderr_ms: float = 0.0
    ) -> Measurement:
        """Remember what came of a placement."""
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        made = Measurement(
            latency_ms=latency_ms,
            stderr_ms=stderr_ms,
            signature=signature,
            timestamp=stamp,
            choices="".join(map(str, placement.choices)),
        )
        self.measured[self.space.digest(placement)] = made
        return made

    def fastest_by_digest(self, count: int, below_ms: float, without: Collection[str] = ()) -> dict[str, Placement]:
        """The fastest of what was measured, by digest, as far as it is faster than that and may be delivered.

        Args:
            without: Digests that are left out.
        """
        read = [(each.latency_ms, digest, each.choices) for digest, each in self.measured.items() if each.latency_ms]
        found: dict[str, Placement] = {}
        for latency_ms, digest, choices in sorted(read, key=lambda each: each[0]):
            placement = None if digest in without else self._restore_placement(choices)
            if len(found) < count and latency_ms < below_ms and placement and self.space.digest(placement) == digest:
                found[digest] = placement
        return found

    def _restore_placement(self, choices: str) -> Placement | None:
        """A placement from a state file; None where it is none of this space, or has what may not be quantized now."""
        if not (choices.isascii() and choices.isdigit()):
            return None
        try:
            placement = self.space.validate(Placement(tuple(map(int, choices))))
        except ValueError:
            return None
        return placement if self._drop_illegal_points(placement) == placement else None

    def measured_schemes(self, placement: Placement, latency_ms: float, baseline_ms: float) -> engine.PatternCache:
        """What a measurement tells the pattern cache."""
        observation = Observation(
            placement=placement, digest=self.space.digest(placement), outcome=Score(objective=latency_ms)
        )
        return engine.build_cache([observation], self.space, self.chart.sizes, baseline_ms, self.origin)

    def initial_placements(self, cache: engine.PatternCache | None, qdq_baseline: Any) -> dict[str, Placement]:
        """Whole placements to begin with, by name: simple ones, and what was found elsewhere.

        Args:
            cache: The pattern cache given.
            qdq_baseline: File of a Q/DQ model that was made from this model; None: none.

        Raises:
            UserError: The Q/DQ model cannot be read back.
        """
        found = {"linear": self.space.quantize_roles({"linear"}), "all": self.space.quantize_all()}
        if qdq_baseline is not None:
            found["qdq_baseline"] = self.space.nearest(import_placement(qdq_baseline, self._model))
        if cache is not None:
            for rank, placement in enumerate(engine.propose_placements(cache, self.space, self.origin)):
                found[f"pattern_cache_{rank}"] = placement
        return {name: self._drop_illegal_points(placement) for name, placement in found.items()}

    def import_placement(self, tensors: set[str]) -> Placement:
        """The placement that quantizes where most of a point's activations are among these tensors."""
        names = map_to_float_tensors(tensors, self._model)
        choices = []
        for dimension in self.space.dimensions:
            data = [e.tensor in names for e in dimension.edges if e.tensor not in self._model.constants]
            choices.append(int(2 * sum(data) > len(data)))
        return self._drop_illegal_points(Placement(tuple(choices)))

    def _drop_illegal_points(self, placement: Placement) -> Placement:
        allowed = frozenset(self.allowed)
        return Placement(tuple(c if index in allowed else 0 for index, c in enumerate(placement.choices)))
