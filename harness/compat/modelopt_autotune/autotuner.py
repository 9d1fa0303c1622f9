"""Autotuner for step-by-step use: choose a region, generate a scheme, export, measure, submit."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.base.files import explain_write_errors
from harness.compat.modelopt_autotune.benchmark import current_benchmark
from harness.compat.modelopt_autotune.insertion_points import (
    Region,
    RegionType,
    ResolvedInsertionPoint,
    get_autotuner_quantizable_ops,
)
from harness.compat.modelopt_autotune.region_pattern import PatternSchemes, RegionIndex
from harness.compat.modelopt_autotune.region_search import CombinedRegionSearch
from harness.compat.modelopt_autotune.session import (
    AutotuneSession,
    AutotuneState,
    PatternCache,
    PatternSearch,
    read_state,
)
from harness.compat.modelopt_autotune.settings import (
    AutotunerError,
    AutotunerNotInitializedError,
    Config,
    InvalidSchemeError,
)
from harness.config.sections import PluginSpec
from harness.config.yaml_loader import write_plain_yaml
from harness.graph.io.files import digest_model, serialize_model, to_proto, write_model
from harness.graph.load import load_proto
from harness.graph.model import Model, Node
from harness.graph.pattern_cache import build_cache
from harness.graph.qdq.import_placement import map_to_float_tensors
from harness.graph.rules.operator_sets import ACTIVATION_OPS
from harness.run.prepare.float_baseline import read_runtime
from harness.run.prepare.model_loader import MIN_OPSET
from search.api import Observation, Score
from search.space import Placement

_logger = logging.getLogger(__name__)
Transform = Callable[[Any], Any]
_CONFIG_CHANGES = {
    "calibration_data": "written models have the scales of the new data",
    "calibration_samples": "written models have the scales of the new samples",
    **dict.fromkeys(
        ("calibration_method", "weight_method", "depthwise", "symmetric"),
        "written models have the new scales; earlier measurements are kept",
    ),
    "searcher": "measurements of the other searcher are kept",
}
"""Effect of settings that differ from those in a state file."""


class QDQAutotunerBase:
    """Autotuner of given regions; a subclass or the user sets `regions`.

    Args:
        model: An `onnx.ModelProto`, an `onnx_graphsurgeon.Graph`, or a model of `harness.graph.load`.

    Attributes:
        graph: Index of the model's regions; regions name nodes by their index in `graph.nodes`.
        regions: Regions to profile.
        baseline_latency_ms: Latency of the float model; None until it is submitted.
        interleaved: Whether models are timed in turns with the float model.
        changes: Sentences on settings that differ from those in the loaded state.
        profiled_patterns: Finished patterns with their schemes.
        unfinished: Signatures of patterns whose profiling ended at a limit; a later run continues it.
        delivered: Placement that the workflow delivered.
        pattern_cache: Pattern cache with entries of this and of earlier runs.

    Raises:
        TypeError: The model is of another type.
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
        self.interleaved = False
        self.changes: tuple[str, ...] = ()
        self.profiled_patterns: list[PatternSchemes] = []
        self.unfinished: set[str] = set()
        self.delivered: Placement | None = None
        self._session: AutotuneSession | None = None
        self._search: PatternSearch | None = None

    @property
    def current_profile_region(self) -> Region | None:
        return None if self._search is None else self._search.region

    @property
    def current_profile_pattern_schemes(self) -> PatternSchemes | None:
        """Schemes of the pattern that is being profiled; None if it is finished."""
        return None if self._search is None else self._search.schemes

    @property
    def current_insertion_scheme_index(self) -> int | None:
        """Index of the scheme that was generated last."""
        return None if self._search is None else self._search.index

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """Discard all results and apply these settings; `regions` remain, and schemes of the cache come first."""
        self.config = config or self.config
        benchmark = current_benchmark()
        self._backend = PluginSpec(use=self.config.backend or "openvino", params=dict(self.config.backend_params))
        if self.config.backend is None and benchmark is not None:
            self._backend = benchmark.backend
        self._runtime = read_runtime(self._backend)
        precision = self.config.default_quant_type
        opset = self._runtime.dialect.opset([precision])
        if opset > MIN_OPSET:
            origin, source = self._model.origin, self._model.source
            upgraded = load_proto(self.onnx_model, source=source, sha256=self._model.sha256, min_opset=opset)
            self._model = dataclasses.replace(upgraded, origin=origin and dataclasses.replace(origin, min_opset=opset))
        self.graph = RegionIndex(self._model, self._runtime.dialect, precision, self.config.default_dq_dtype)
        self.pattern_cache = pattern_cache or PatternCache(
            self.config.pattern_cache_minimum_distance, self.config.pattern_cache_max_entries_per_pattern
        )
        self._reset()
        self.initialized = True

    @property
    def session(self) -> AutotuneSession:
        """Session of the present regions, made when it is first needed and again after `regions` changed.

        Raises:
            AutotunerNotInitializedError: `initialize` was not called.
        """
        if not self.initialized:
            raise AutotunerNotInitializedError(f"{type(self).__name__}: call initialize() first")
        if self._session is None or self._session.placement_map.regions != tuple(self.regions):
            self._session = AutotuneSession(self.graph, self.regions, self.config, self._backend, self._runtime)
            self.delivered = None
        if self.pattern_cache is not None:
            self.pattern_cache.origin, self.pattern_cache.baseline_ms = self._session.origin, self.baseline_latency_ms
        return self._session

    def set_profile_region(self, region: Region | None, commit: bool = True) -> None:
        """End the profiling of the current pattern and start that of a region's pattern; None: only end it.

        `current_profile_pattern_schemes` is None afterwards if the pattern is finished already.

        Args:
            region: One of `regions`, or `session.placement_map.whole` for the whole model at once.
            commit: Keep the schemes of the pattern that ends.

        Raises:
            ValueError: The region is not among them.
        """
        session = self.session
        if commit and self._search is not None and self._search.region is session.placement_map.whole:
            session.base = self._search.placement(best=True)
            self.profiled_patterns.clear()
        elif commit and self._search is not None:
            self.profiled_patterns.append(self._search.schemes)
        self._search = None
        self.delivered = None
        if region is None:
            return
        if region not in session.placement_map:
            raise ValueError(f"region {region.id} is none of the autotuner's regions")
        pattern = self.graph.pattern(region)
        if any(finished.pattern == pattern for finished in self.profiled_patterns):
            return
        around = session.with_schemes(self.profiled_patterns)
        self._search = PatternSearch(session, region, around)
        cached = [] if self.pattern_cache is None else self.pattern_cache.initial_schemes(pattern.signature)
        decode = session.placement_map.decode
        # The scheme in the current placement is a candidate too; usually it is measured.
        self._search.seed([around, *(decode(pattern.signature, scheme, around) for scheme in cached)])

    def generate(self) -> int:
        """Return the index in `current_profile_pattern_schemes.schemes` of the next scheme to measure, or -1.

        Schemes of the cache come first, then proposals of the searcher. Schemes with a known result are skipped.

        Raises:
            InvalidSchemeError: No region is being profiled.
        """
        if self._search is None:
            raise InvalidSchemeError("no region is under profile: call set_profile_region() first")
        return self._search.generate()

    def submit(self, latency_ms: float, success: bool = True, stderr_ms: float = 0.0) -> None:
        """Store the result of the scheme that was generated last; the first latency is that of the float model.

        Args:
            latency_ms: Median latency in ms.
            success: Whether the measurement succeeded.
            stderr_ms: Standard error of the latency in ms, by which searchers judge gains; 0: unknown.

        Raises:
            InvalidSchemeError: No scheme was generated.
            AutotunerError: The float model has no latency.
        """
        measured = success and math.isfinite(latency_ms) and latency_ms > 0
        session = self.session
        if self.baseline_latency_ms is None:
            if not measured:
                raise AutotunerError(
                    f"the float model has no latency (got {latency_ms}): was init_benchmark_instance() called, and "
                    "can the backend load the model? The log contains the reason"
                )
            self.baseline_latency_ms = latency_ms
            session.record(session.space.float_placement(), latency_ms)
            return
        search = self._search
        if search is None or search.index is None:
            raise InvalidSchemeError(
                "no scheme to submit a latency for: call set_profile_region() and generate() first"
            )
        placement = search.placement()
        record = session.record(placement, latency_ms if measured else None, search.signature, stderr_ms=stderr_ms)
        search.fill(search.index, record)
        if measured and self.pattern_cache is not None:
            digest, score = session.space.digest(placement), Score(objective=latency_ms)
            scored = Observation(placement=placement, digest=digest, outcome=score)
            sizes, baseline_ms = session.placement_map.sizes, self.baseline_latency_ms
            entries = build_cache([scored], session.space, sizes, baseline_ms, session.origin)
            self.pattern_cache.add_measurements(entries)

    def placement(self, best: bool = False) -> Placement:
        """Return the placement with the best schemes of profiled patterns and the last generated scheme.

        Args:
            best: Use the best scheme of the current pattern, too; after the workflow, return the delivered placement.
        """
        session = self.session
        if self._search is not None:
            return self._search.placement(best)
        return self.delivered if best and self.delivered else session.with_schemes(self.profiled_patterns)

    def get_resolved_insertion_points(self, best: bool = True, verbose: bool = False) -> set[ResolvedInsertionPoint]:
        """Return the inputs of nodes that have a Q/DQ pair in `placement`."""
        session = self.session
        points = session.placement_map.resolved_points(session.space.resolve(self.placement(best)))
        if verbose:
            _logger.info("%d insertion points: %s", len(points), sorted(map(repr, points)))
        return points

    def get_ort_quantization_config(self) -> tuple[list[str], list[str], list[tuple[Node, Node, str]], list[str]]:
        """Return the best placement as parameters of ModelOpt's `quantize`.

        Returns:
            Four lists. `nodes_to_quantize`: names of the nodes with a quantized input, and of the producers of these
            inputs. `op_types_to_quantize`: all operators whose inputs may be quantized. `no_quantize_inputs`:
            (producer, reader, tensor name) for each input of these nodes that stays float.
            `op_types_needing_output_quant`: operators whose output an activation function reads quantized.
        """
        nodes = self._model.nodes
        producer = {name: node for node in nodes for name in node.outputs}
        readers = [(node.index, slot, name) for node in nodes for slot, name in enumerate(node.inputs) if name]
        points = {(p.tensor_name, p.node_index, p.input_index) for p in self.get_resolved_insertion_points(best=True)}
        covered = {(i, slot): name for i, slot, name in readers if {(name, i, slot), (name, None, None)} & points}
        before = {place: producer[name] for place, name in covered.items() if name in producer}
        quantized = {i for i, _ in covered} | {node.index for node in before.values()}
        float_inputs = [
            (producer[name], nodes[i], name)
            for i, slot, name in readers
            if i in quantized and (i, slot) not in covered and name in producer
        ]
        activations = {node.op for (i, _), node in before.items() if nodes[i].op in ACTIVATION_OPS}
        names = [nodes[i].name for i in sorted(quantized)]
        return names, sorted(get_autotuner_quantizable_ops()), float_inputs, sorted(activations)

    def export_onnx(
        self,
        output_path: str | None = None,
        insert_qdq: bool = True,
        best: bool = False,
        model_transform: Transform | None = None,
    ) -> bytes:
        """Return the model of `placement` as bytes, and write it to a file if a path is given; above 2 GB return b"".

        Args:
            insert_qdq: False: the float model.
            best: See `placement`.
            model_transform: Applied to the `onnx.ModelProto` first.
        """
        proto = self.session.proto(self.session.space.resolve(self.placement(best)) if insert_qdq else ())
        if model_transform is not None:
            proto = model_transform(proto)
        if output_path is None:
            return serialize_model(proto)
        path = Path(output_path)
        write_model(proto, path)
        return b"" if path.with_name(f"{path.name}.data").exists() else path.read_bytes()

    def import_insertion_points(self, quantized_tensors: set[str] | list[str]) -> None:
        """Use the schemes of a Q/DQ model as start: they are measured first, and apply until their pattern is profiled.

        Args:
            quantized_tensors: Names of the tensors with a Q/DQ pair.
        """
        session = self.session
        self.delivered = None
        names, choices = map_to_float_tensors(set(quantized_tensors), self._model), []
        for dimension in session.space.dimensions:  # quantized if most of its activations are
            data = [e.tensor in names for e in dimension.edges if e.tensor not in self._model.constants]
            choices.append(int(2 * sum(data) > len(data)))
        session.base = session.without_forbidden(Placement(tuple(choices)))
        if self.pattern_cache is not None:
            for region in self.regions:
                self.pattern_cache.add_pattern_from_region(region, self.graph, set(quantized_tensors))

    def save_state(self, output_path: str) -> None:
        """Write the state file, and the pattern cache next to it."""
        state = AutotuneState(
            facts=self.session.facts,
            config={**dataclasses.asdict(self.config), "backend_params": dict(self.config.backend_params)},
            baseline_latency_ms=self.baseline_latency_ms,
            interleaved=self.interleaved,
            measured=self.session.measured,
            patterns=[p for p in self.profiled_patterns if p.pattern_signature not in self.unfinished],
        )
        path = Path(output_path)
        with explain_write_errors(path):
            write_plain_yaml(state.model_dump(by_alias=True), path)
        if self.pattern_cache is not None and self.pattern_cache.num_patterns:
            self.pattern_cache.save(str(_cache_path(path)))

    def load_state(self, input_path: str) -> None:
        """Resume from a state file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        path, config = Path(input_path), dataclasses.asdict(self.config)
        state = read_state(path, self.session.facts)
        self.baseline_latency_ms = state.baseline_latency_ms or self.baseline_latency_ms
        self.interleaved = state.interleaved
        self.delivered = None
        self.changes = tuple(
            f"{key} was {state.config[key]} and is {config[key]}: {effect}"
            for key, effect in _CONFIG_CHANGES.items()
            if key in state.config and state.config[key] != config[key]
        )
        self.session.measured.update(state.measured)
        self.profiled_patterns += [each for each in state.patterns if each.schemes]
        if self.pattern_cache is not None and _cache_path(path).exists():
            self.pattern_cache.add_measurements(PatternCache.load(str(_cache_path(path))).content)


def _cache_path(state: Path) -> Path:
    """Return the file of the pattern cache that belongs to a state file."""
    return state.with_name(f"{state.stem}_pattern_cache{state.suffix}")


class QDQAutotuner(QDQAutotunerBase):
    """Autotuner of the regions that the partitioner finds, LEAF regions first."""

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """Start over, see `QDQAutotunerBase.initialize`, and find the regions."""
        super().initialize(config, pattern_cache)
        sizes = self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size
        tops = CombinedRegionSearch(self.graph, *sizes).search_regions()
        regions = [region for top in tops for region in top.walk()]
        self.regions = sorted(regions, key=lambda region: region.type is not RegionType.LEAF)
