"""The autotuner that is driven step by step: choose a region, generate a scheme, export, measure, submit.

It keeps the order of the steps; regions, patterns, points, proposals, insertion and calibration are the engine's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.api import Candidate
from harness.compat.modelopt_autotune.benchmark import current_benchmark
from harness.compat.modelopt_autotune.cache import PatternCache
from harness.compat.modelopt_autotune.common import (
    AutotunerError,
    AutotunerNotInitializedError,
    Config,
    InvalidSchemeError,
)
from harness.compat.modelopt_autotune.model_writer import export_model
from harness.compat.modelopt_autotune.pattern_search import PatternSearch
from harness.compat.modelopt_autotune.region_index import RegionIndex
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.schemes import PatternSchemes, ResolvedInsertionPoint
from harness.compat.modelopt_autotune.session import AutotuneSession, Backend
from harness.compat.modelopt_autotune.state import (
    AutotuneState,
    cache_path,
    describe_config_changes,
    read_state,
    write_state,
)
from harness.config.sections import PluginSpec
from harness.graph.conversions import digest_model, to_proto
from harness.graph.load import load_proto
from harness.graph.model import Model
from harness.task_setup.model_loader import MIN_OPSET
from search.space import Placement

__all__ = ["QDQAutotunerBase", "Transform"]

_logger = logging.getLogger(__name__)
Transform = Callable[[Any], Any]


class QDQAutotunerBase:
    """Profiles the patterns of given regions, one after the other; a subclass or its user sets `regions`.

    Args:
        model: An `onnx.ModelProto`, an `onnx_graphsurgeon.Graph`, or a model that `harness.graph.load` made.

    Attributes:
        graph: What the model's regions are; regions have their nodes by the index in `graph.nodes`.
        regions: What is profiled.
        baseline_latency_ms: Of the float model; None until it was submitted.
        profiled_patterns: Patterns that are done, each with its schemes.
        unfinished: Signatures of those among them whose turn a limit has cut short: they get another one later.
        pattern_cache: What was learned, here and before.

    Raises:
        TypeError: Another kind of model.
        UserError: A model that cannot be used.
    """

    def __init__(self, model: Any) -> None:
        if isinstance(model, Model):
            self._model = model
        else:
            proto = to_proto(model)
            self._model = load_proto(proto, source="model", sha256=digest_model(proto), min_opset=MIN_OPSET)
        self.onnx_model = self._model.proto
        self.graph = RegionIndex(self._model)
        self.regions: list[Region] = []
        self.config = Config()
        self.initialized = False
        self.pattern_cache: PatternCache | None = None
        self._reset()

    def _reset(self) -> None:
        self.baseline_latency_ms: float | None = None
        self.beside_float = False
        self.changes: tuple[str, ...] = ()
        self.profiled_patterns: list[PatternSchemes] = []
        self.unfinished: set[str] = set()
        self.delivered: Placement | None = None
        self._made: AutotuneSession | None = None
        self._turn: PatternSearch | None = None

    @property
    def current_profile_region(self) -> Region | None:
        """The region under profile."""
        return None if self._turn is None else self._turn.region

    @property
    def current_profile_pattern_schemes(self) -> PatternSchemes | None:
        """The schemes of its pattern; None where that is done already."""
        return None if self._turn is None else self._turn.schemes

    @property
    def current_insertion_scheme_index(self) -> int | None:
        """Which of them was generated last."""
        return None if self._turn is None else self._turn.index

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """Begin anew with these settings; schemes of the cache are tried first. Regions that are set stay.

        Raises:
            UserError: The backend is not there, or has no such precision.
        """
        self.config = config or self.config
        benchmark = current_benchmark()
        use = PluginSpec(use=self.config.backend or "openvino", params=dict(self.config.backend_params))
        if self.config.backend is None and benchmark is not None:
            use = benchmark.backend
        self._backend = Backend(use)
        precision = self.config.default_quant_type
        opset = self._backend.dialect.opset([precision])
        if opset > MIN_OPSET:
            origin, source = self._model.origin, self._model.source
            upgraded = load_proto(self.onnx_model, source=source, sha256=self._model.sha256, min_opset=opset)
            self._model = dataclasses.replace(upgraded, origin=origin and dataclasses.replace(origin, min_opset=opset))
        self.graph = RegionIndex(self._model, self._backend.dialect, precision, self.config.default_dq_dtype)
        self.pattern_cache = pattern_cache or PatternCache(
            self.config.pattern_cache_minimum_distance, self.config.pattern_cache_max_entries_per_pattern
        )
        self._reset()
        self.initialized = True

    @property
    def session(self) -> AutotuneSession:
        """What is worked on; made when it is first needed, and anew where `regions` are others by then.

        Raises:
            AutotunerNotInitializedError: `initialize` comes first.
        """
        if not self.initialized:
            raise AutotunerNotInitializedError(f"{type(self).__name__}: call initialize() first")
        if self._made is None or self._made.regions != tuple(self.regions):
            self._made = AutotuneSession(self.graph, self.regions, self.config, self._backend)
            self.delivered = None
            if self.pattern_cache is not None:
                self.pattern_cache.origin = self._made.origin
        return self._made

    def set_profile_region(self, region: Region | None, commit: bool = True) -> None:
        """Begin the turn of a region; None: of no other.

        Afterwards `current_profile_pattern_schemes` is None where the region's pattern is done already.

        Args:
            region: One of `regions`, or `session.chart.whole` for the whole model at once.
            commit: Keep what was found for the region before.

        Raises:
            ValueError: A region that is none of these.
        """
        session = self.session
        if commit and self._turn is not None:
            self.profiled_patterns.append(self._turn.schemes)
        self._turn = None
        self.delivered = None
        if region is None:
            return
        if region not in session.chart:
            raise ValueError(f"region {region.id} is none of the autotuner's regions")
        pattern = self.graph.pattern(region)
        if any(known.pattern == pattern for known in self.profiled_patterns):
            return
        around = session.with_schemes(self.profiled_patterns)
        self._turn = session.pattern_search(region, around)
        self._turn.seed([session.chart.encode(region, around)])  # what there is competes, and as a rule is measured
        if self.pattern_cache is not None:
            self._turn.seed(self.pattern_cache.initial_schemes(pattern.signature))

    def generate(self) -> int:
        """Index of the next scheme to measure: those of the cache first, then what the searcher proposes.

        What was measured already is not offered again: its outcome is known.

        Returns:
            Index in `current_profile_pattern_schemes.schemes`; -1 where there is nothing new.

        Raises:
            InvalidSchemeError: No region is under profile.
        """
        if self._turn is None:
            raise InvalidSchemeError("no region is under profile: call set_profile_region() first")
        return self._turn.generate(self.session.measured)

    def submit(self, latency_ms: float, success: bool = True, stderr_ms: float = 0.0) -> None:
        """Say what came of the scheme generated last; the very first latency is that of the float model.

        Args:
            latency_ms: Median latency.
            success: False: it could not be measured.
            stderr_ms: Standard error of the latency, by which searchers tell gains from noise; 0: unknown.

        Raises:
            InvalidSchemeError: No scheme was generated.
            AutotunerError: The float model has no latency, so there is nothing to compare with.
        """
        measured = success and math.isfinite(latency_ms) and latency_ms > 0
        session = self.session
        if self.baseline_latency_ms is None:
            if not measured:
                raise AutotunerError(
                    f"the float model has no latency (got {latency_ms}): was init_benchmark_instance() called, and "
                    "does the backend take the model? The log says why"
                )
            self._set_baseline(latency_ms)
            session.record(session.space.float_placement(), latency_ms)
            return
        turn = self._turn
        if turn is None or turn.generated is None:
            raise InvalidSchemeError(
                "no scheme to submit a latency for: call set_profile_region() and generate() first"
            )
        placement = turn.placement(turn.generated)
        record = session.record(placement, latency_ms if measured else None, turn.signature, stderr_ms=stderr_ms)
        turn.fill(turn.generated, record)
        if measured and self.pattern_cache is not None:
            self.pattern_cache.add_measurements(
                session.measured_schemes(placement, latency_ms, self.baseline_latency_ms)
            )

    def placement(self, best: bool = False) -> Placement:
        """The whole model's choice: profiled patterns at their best, the current one as generated last or its best.

        Args:
            best: At the end of a walk, what was delivered: what won its runoff, or float where that is not faster.
        """
        around = self.session.with_schemes(self.profiled_patterns)
        if self._turn is None:
            return self.delivered if best and self.delivered is not None else around
        scheme = self._turn.schemes.best_scheme if best else self._turn.generated
        return around if scheme is None else self._turn.placement(scheme)

    def candidate(self, best: bool = False) -> Candidate:
        """`placement` as something that a benchmarker builds."""
        return self.session.candidate(self.placement(best))

    def get_resolved_insertion_points(self, best: bool = True, verbose: bool = False) -> set[ResolvedInsertionPoint]:
        """Inputs of nodes that carry a Q/DQ pair in `placement`."""
        session = self.session
        found = session.chart.resolved_points(session.space.resolve(self.placement(best)))
        if verbose:
            _logger.info("%d insertion points: %s", len(found), sorted(map(repr, found)))
        return found

    def export_onnx(
        self,
        output_path: str | None = None,
        insert_qdq: bool = True,
        best: bool = False,
        model_transform: Transform | None = None,
    ) -> bytes:
        """The model with the Q/DQ pairs of `placement`, as bytes and, where a path is given, as a file.

        Args:
            insert_qdq: False: the float model.
            best: See `placement`.
            model_transform: Applied to the `onnx.ModelProto` before it is written.

        Raises:
            UserError: It cannot be written, or is too large for bytes and has no path.
        """
        session = self.session
        resolved = session.space.resolve(self.placement(best)) if insert_qdq else ()
        proto = session.delivery.proto(resolved)
        path = None if output_path is None else Path(output_path)
        return export_model(proto if model_transform is None else model_transform(proto), path)

    def import_insertion_points(self, quantized_tensors: set[str] | list[str]) -> None:
        """Begin with what a Q/DQ model has: its schemes are tried first, and stand until the turn of their pattern.

        Args:
            quantized_tensors: Names of the tensors with a Q/DQ pair.
        """
        session = self.session
        self.delivered = None
        session.base = session.import_placement(set(quantized_tensors))
        if self.pattern_cache is not None:
            for region in self.regions:
                self.pattern_cache.add_pattern_from_region(region, self.graph, set(quantized_tensors))

    def save_state(self, output_path: str) -> None:
        """Write what is known to a state file, and the pattern cache beside it.

        Raises:
            AutotunerError: A file cannot be written.
        """
        state = AutotuneState(
            facts=self.session.facts,
            config={**dataclasses.asdict(self.config), "backend_params": dict(self.config.backend_params)},
            baseline_latency_ms=self.baseline_latency_ms,
            beside_float=self.beside_float,
            current="" if self._turn is None else self._turn.signature,
            measured=self.session.measured,
            patterns=tuple(p for p in self.profiled_patterns if p.pattern_signature not in self.unfinished),
        )
        write_state(state, Path(output_path))
        if self.pattern_cache is not None and self.pattern_cache.num_patterns:
            self.pattern_cache.save(str(cache_path(Path(output_path))))

    def load_state(self, input_path: str) -> None:
        """Go on with what a state file knows.

        Raises:
            FileNotFoundError: There is none.
            UserError: It is damaged, or of another model, runtime, device or precision.
        """
        path = Path(input_path)
        state = read_state(path, self.session.facts)
        if state.baseline_latency_ms is not None:
            self._set_baseline(state.baseline_latency_ms)
        self.beside_float = state.beside_float
        self.delivered = None
        self.changes = tuple(describe_config_changes(state.config, dataclasses.asdict(self.config)))
        self.session.measured.update(state.measured)
        self.profiled_patterns += [each for each in state.patterns if each.schemes]
        if self.pattern_cache is not None and cache_path(path).exists():
            self.pattern_cache.add_measurements(PatternCache.load(str(cache_path(path))).content)

    def _set_baseline(self, latency_ms: float) -> None:
        self.baseline_latency_ms = latency_ms
        if self.pattern_cache is not None:
            self.pattern_cache.baseline_ms = latency_ms
