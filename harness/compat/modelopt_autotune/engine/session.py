"""Session of an autotuner: the task of one model and a set of regions, its measured models, and pattern searches."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.accuracy.calibration.calibration_batches import ALL_SAMPLES, CalibrationBatches
from harness.base.progress import NullProgress
from harness.compat.modelopt_autotune.engine.pattern_search import PatternSearch, scored_observation
from harness.compat.modelopt_autotune.engine.placement_map import PlacementMap, RegionIndex
from harness.compat.modelopt_autotune.engine.storage import Measurement
from harness.compat.modelopt_autotune.region_pattern import PatternSchemes
from harness.compat.modelopt_autotune.regions import Region
from harness.compat.modelopt_autotune.settings import AutotunerError, Config
from harness.config.plan import TaskSpec
from harness.config.sections import Calibration, ModelSpec, PluginSpec
from harness.graph import pattern_cache as engine
from harness.graph.io.files import serialize_model, write_model
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.import_differences import find_differences, summarize_differences
from harness.graph.qdq.import_placement import map_to_float_tensors, read_placement
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.measure.records import MAIN_BENCHMARKER
from harness.run.prepare.float_baseline import BackendProperties
from harness.run.prepare.model_loader import input_types
from harness.run.prepare.task import Task, calibrate_task
from search.api import Score
from search.space import Placement, Resolved, Space

_logger = logging.getLogger(__name__)
RANDOM_SAMPLES = 8  # more random samples do not change the ranges much


class AutotuneSession:
    """Session of a model: its regions and the models that were measured.

    Attributes:
        task: Model, space, scales and writer of candidates.
        allowed: Dimensions that may be quantized; reduced by `restrict_to_patterns`.
        base: Placement of the patterns that are not profiled yet.
        measured: Results by digest.
    """

    def __init__(
        self,
        index: RegionIndex,
        regions: Sequence[Region],
        config: Config,
        backend: PluginSpec,
        runtime: BackendProperties,
    ) -> None:
        self._config = config
        self.regions = tuple(regions)
        self.placement_map: PlacementMap = index.placement_map(regions)
        self._scratch = tempfile.TemporaryDirectory(prefix="qdq-autotune-")
        self.folder = Path(self._scratch.name)
        self.task = _make_task(index.model, self.placement_map.space, config, backend, runtime, self.folder)
        self.placement_map.narrow(self.task.space)
        self.space = self.task.space
        self.allowed: tuple[int, ...] = tuple(range(len(self.space)))
        self.base = self.space.float_placement()
        self.measured: dict[str, Measurement] = {}

    @property
    def origin(self) -> engine.MeasurementOrigin:
        """Origin of the session's measurements, as stored in pattern caches."""
        device = str(self.task.facts.get("device", ""))[:200]
        return engine.MeasurementOrigin(
            backend=self.task.spec.backend.use, precision=self._config.default_quant_type, device=device
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Properties that must equal those of a state file to reuse its measurements."""
        dimensions = hashlib.sha256(repr(self.space.dimensions).encode()).hexdigest()
        return {
            "model_sha256": self.task.model.sha256,
            "inputs": {name: list(shape) for name, (_, shape) in input_types(self.task.model).items()},
            "quant_type": self._config.default_quant_type,
            **{key: self.task.facts.get(key) for key in ("name", "version", "device", "options")},
            "space": dimensions[:16],  # a difference here usually results from one in another fact
        }

    def restrict_to_patterns(self, signatures: Iterable[str]) -> None:
        """Restrict the search to these patterns; all others stay float."""
        searched = {index for signature in signatures for index in self.placement_map.dimensions(signature).values()}
        self.allowed = tuple(sorted(searched))

    def pattern_search(self, region: Region, around: Placement) -> PatternSearch:
        """Return a search of a region's pattern with all other patterns as in `around`."""
        return PatternSearch(self.placement_map, region, self.allowed, around, self._config)

    def with_schemes(self, profiled: Iterable[PatternSchemes]) -> Placement:
        """Return `base` with the best scheme of each pattern in `profiled`; points outside of `allowed` stay float.

        A pattern without a measured scheme stays as in `base`.
        """
        placement = self.base
        for schemes in profiled:
            if schemes.best_scheme is not None:
                placement = self.placement_map.decode(schemes.pattern_signature, schemes.best_scheme, placement)
        return self._without_forbidden(placement)

    def proto(self, resolved: Resolved) -> Any:
        """Return the model with these quantized edges as an `onnx.ModelProto`; without edges, the float model."""
        return self.task.inserter.insert(resolved) if resolved else (self.task.cast or self.task.model).proto

    def record(
        self, placement: Placement, latency_ms: float | None, signature: str = "", *, stderr_ms: float = 0.0
    ) -> Measurement:
        """Store the result of a placement; see `Measurement`."""
        measurement = Measurement(
            latency_ms=latency_ms,
            stderr_ms=stderr_ms,
            signature=signature,
            timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
            choices="".join(map(str, placement.choices)),
        )
        self.measured[self.space.digest(placement)] = measurement
        return measurement

    def fastest_by_digest(self, count: int, below_ms: float, without: Collection[str] = ()) -> dict[str, Placement]:
        """Return the fastest placements by digest that are below a latency and may be delivered.

        Args:
            without: Digests to leave out.
        """
        read = [(each.latency_ms, digest, each.choices) for digest, each in self.measured.items() if each.latency_ms]
        found: dict[str, Placement] = {}
        for latency_ms, digest, choices in sorted(read, key=lambda each: each[0]):
            placement = None if digest in without else self._restore_placement(choices)
            if len(found) < count and latency_ms < below_ms and placement and self.space.digest(placement) == digest:
                found[digest] = placement
        return found

    def _restore_placement(self, choices: str) -> Placement | None:
        """Return the placement of choices in a state file; None if the space does not contain or allow it."""
        if not (choices.isascii() and choices.isdigit()):
            return None
        try:
            placement = self.space.validate(Placement(tuple(map(int, choices))))
        except ValueError:
            return None
        return placement if self._without_forbidden(placement) == placement else None

    def cache_entries(self, placement: Placement, latency_ms: float, baseline_ms: float) -> engine.PatternCache:
        """Return the entries of the pattern cache that a measurement gives."""
        observation = scored_observation(self.space, placement, Score(objective=latency_ms))
        return engine.build_cache([observation], self.space, self.placement_map.sizes, baseline_ms, self.origin)

    def initial_placements(self, cache: engine.PatternCache | None, qdq_baseline: Any) -> dict[str, Placement]:
        """Return the initial design by name: simple placements, and those of earlier results.

        Args:
            qdq_baseline: Q/DQ model made from this model, as a file; None: none.

        Raises:
            UserError: The Q/DQ model cannot be read back.
        """
        placements = {"linear": self.space.quantize_roles({"linear"}), "all": self.space.quantize_all()}
        if qdq_baseline is not None:
            theirs = read_placement(qdq_baseline, self.task.model)
            nearest = placements["qdq_baseline"] = self.space.nearest(theirs.edges)
            resolved = self.space.resolve(nearest)
            written = QDQGraph(self.proto(resolved))
            found = find_differences(theirs, self.space, self.task.dialect, resolved, written, ranges=False)
            if text := summarize_differences(theirs, found, qdq_baseline):
                _logger.warning("--qdq_baseline: %s", text)
        if cache is not None:
            for rank, placement in enumerate(engine.propose_placements(cache, self.space, self.origin)):
                placements[f"pattern_cache_{rank}"] = placement
        return {name: self._without_forbidden(placement) for name, placement in placements.items()}

    def import_placement(self, tensors: set[str]) -> Placement:
        """Return the placement that quantizes points with most of their activations among these tensors."""
        names = map_to_float_tensors(tensors, self.task.model)
        choices = []
        for dimension in self.space.dimensions:
            data = [e.tensor in names for e in dimension.edges if e.tensor not in self.task.model.constants]
            choices.append(int(2 * sum(data) > len(data)))
        return self._without_forbidden(Placement(tuple(choices)))

    def _without_forbidden(self, placement: Placement) -> Placement:
        allowed = frozenset(self.allowed)
        return Placement(tuple(c if index in allowed else 0 for index, c in enumerate(placement.choices)))


class _LoggingProgress(NullProgress):
    def say(self, text: str) -> None:
        _logger.warning(text)


def _make_task(
    model: Model, space: Space, config: Config, backend: PluginSpec, runtime: BackendProperties, folder: Path
) -> Task:
    """Calibrate a model and cast it to the float precision of the backend.

    Raises:
        UserError: The calibration fails, or leaves nothing to quantize.
    """
    feeds = calibration_batches(model, config)
    if feeds.is_random:
        _logger.info("%s: calibrated on random data: do not trust any accuracy", model.source)
    task = calibrate_task(
        TaskSpec(
            model=ModelSpec(use=model.source, calibration=feeds.settings),
            backend=backend,
            precision=config.default_quant_type,
            runs=(),
        ),
        model,
        save_to_folder(model, folder),
        space,
        runtime=runtime,
        feeds=feeds,
        observer=_LoggingProgress(),
        uncalibrated_abs_max=127 * config.default_q_scale,
    )
    return task.with_benchmarkers({MAIN_BENCHMARKER: backend})


def calibration_batches(model: Model, config: Config) -> CalibrationBatches:
    """Open the calibration data of a configuration.

    Raises:
        AutotunerError: The file is neither `.npz` nor `.npy`, or a setting has an unknown value.
        UserError: The file cannot be read, or does not fit the inputs of the model.
    """
    choices = {
        "method": config.calibration_method,
        "weights": config.weight_method,
        "depthwise": config.depthwise,
        "symmetric": config.symmetric,
    }
    path = config.calibration_data
    data: dict[str, Any] | None = None
    if path is not None:
        kind = Path(path).suffix.removeprefix(".")
        if kind not in ("npz", "npy"):
            raise AutotunerError(
                f"calibration_data {path}: an .npz file with an array for each input of the model, samples first; "
                "images are for 'qdq run', which knows how to turn them into inputs"
            )
        data = {"use": kind, "path": path}
    samples = RANDOM_SAMPLES if data is None else config.calibration_samples or ALL_SAMPLES
    try:
        calibration = Calibration.model_validate({"data": data, "samples": samples, **choices})
    except ValidationError as error:
        problem = error.errors()[0]
        raise AutotunerError(f"calibration {problem['loc'][0]}: {problem['msg']}") from error
    spec = ModelSpec(use=model.source, calibration=calibration)
    return CalibrationBatches(spec, model, input_types(model), spread=True)


def export_model(proto: Any, path: Path | None) -> bytes:
    """Return an `onnx.ModelProto` as bytes and write it to a file if one is given; above 2 GB return b"".

    Raises:
        UserError: The model is too large for bytes, and there is no file.
    """
    if path is None:
        return serialize_model(proto)
    write_model(proto, path)
    return b"" if path.with_name(f"{path.name}.data").exists() else path.read_bytes()
