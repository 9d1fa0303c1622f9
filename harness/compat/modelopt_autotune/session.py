"""Session of an autotuner: the task of one model and a set of regions, its measured models, and pattern searches."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from harness.accuracy.calibration.ranges import ALL_SAMPLES, CalibrationBatches
from harness.base.errors import UserError
from harness.base.files import explain_write_errors, first_problem
from harness.base.progress import NullProgress
from harness.compat.modelopt_autotune.insertion_points import Region, RegionType
from harness.compat.modelopt_autotune.region_pattern import (
    UNMEASURED_MS,
    InsertionScheme,
    PatternSchemes,
    PlacementMap,
    RegionIndex,
    RegionPattern,
)
from harness.compat.modelopt_autotune.settings import AutotunerError, Config, InvalidSchemeError
from harness.config.experiment import TaskSpec
from harness.config.sections import Calibration, ModelSpec, PluginSpec
from harness.config.yaml_loader import read_cache_file
from harness.graph import pattern_cache
from harness.graph import pattern_cache as engine
from harness.graph.load import save_to_folder
from harness.graph.model import Model
from harness.graph.pattern_cache import read_cache, write_cache
from harness.graph.qdq.import_placement import map_to_float_tensors, read_placement
from harness.measure.records import MAIN_BENCHMARKER
from harness.plugins import registry
from harness.results.journal import require_same_fingerprint
from harness.run.prepare.float_baseline import BackendProperties
from harness.run.prepare.initial_design import InitialDesign, load_imported_models
from harness.run.prepare.model_loader import input_types
from harness.run.prepare.study_task import model_label
from harness.run.prepare.task import calibrate_task
from harness.run.search.loop import SearcherGuard
from harness.workers.engines import as_outcome
from search.api import CONTRACT, Failure, Observation, Score, Searcher
from search.space import Placement, Resolved, Space
from search.subspace import SubspaceSearcher


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
        return next((each for each in self.pattern_schemes if each.pattern_signature == pattern_signature), None)

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
        logger.info("%s: %d patterns, %d schemes", output_path, self.num_patterns, self.total_schemes)

    @classmethod
    def load(cls, input_path: str) -> Self:
        """Read a cache from a YAML file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        if not Path(input_path).exists():
            raise FileNotFoundError(input_path)
        return cls(content=read_cache(Path(input_path)))

    def __repr__(self) -> str:
        return f"PatternCache(patterns={self.num_patterns}, schemes={self.total_schemes})"

    def _add(self, pattern: RegionPattern, schemes: Iterable[InsertionScheme]) -> None:
        precision, origin = self.origin.precision, self.origin
        entries = tuple(
            engine.CachedScheme(
                points=frozenset(engine.CachedPoint(kind, place, precision) for kind, place in scheme.addresses),
                origin=origin,
                latency_ms=scheme.latency_ms if math.isfinite(scheme.latency_ms) else None,
                baseline_ms=self.baseline_ms,
            )
            for scheme in schemes
        )
        entry = engine.CachedPattern(signature=pattern.signature, size=pattern.size, schemes=entries)
        self._add_seeds(engine.PatternCache(patterns={pattern.signature: entry}))

    def _add_seeds(self, content: engine.PatternCache) -> None:
        self.add_measurements(content)
        self.seeds = engine.merge_caches(self.seeds, content)


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


logger = logging.getLogger(__name__)
RANDOM_SAMPLES = 8  # more random samples do not change the ranges much
MAX_CACHED_STARTS = 4


class AutotuneSession:
    """Session of a model: its regions and the models that were measured.

    Attributes:
        task: Model, space, scales and writer of candidates.
        origin: Origin of the measurements, as stored in pattern caches.
        allowed: Dimensions that may be quantized; all others stay float.
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
        self.config = config
        self.placement_map: PlacementMap = index.placement_map(regions)
        self._scratch = tempfile.TemporaryDirectory(prefix="qdq-autotune-")
        self.folder = Path(self._scratch.name)
        model, feeds = index.model, calibration_batches(index.model, config)
        if feeds.is_random:
            logger.info("%s: calibrated on random data: do not trust any accuracy", model.source)
        self.task = calibrate_task(
            TaskSpec(
                model=ModelSpec(use=model.source, label=model_label(model.source), calibration=feeds.settings),
                backend=backend,
                precision=config.default_quant_type,
                runs=(),
            ),
            model,
            save_to_folder(model, self.folder),
            self.placement_map.space,
            runtime=runtime,
            feeds=feeds,
            observer=_LoggingProgress(),
            uncalibrated_abs_max=127 * config.default_q_scale,
        ).with_benchmarkers({MAIN_BENCHMARKER: backend})
        self.space = self.task.space
        self.placement_map.space = self.space
        self.origin = pattern_cache.MeasurementOrigin.of_backend(self.task.facts, config.default_quant_type)
        self.allowed: tuple[int, ...] = tuple(range(len(self.space)))
        self.base = self.space.float_placement()
        self.measured: dict[str, Measurement] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """Properties that must equal those of a state file to reuse its measurements."""
        dimensions = hashlib.sha256(repr(self.space.dimensions).encode()).hexdigest()
        return {
            "model_sha256": self.task.model.sha256,
            "inputs": {name: list(shape) for name, (_, shape) in input_types(self.task.model).items()},
            "quant_type": self.config.default_quant_type,
            **{key: self.task.facts.get(key) for key in ("name", "version", "device", "options")},
            "space": dimensions[:16],  # a difference here usually results from one in another fact
        }

    def with_schemes(self, profiled: Iterable[PatternSchemes]) -> Placement:
        """Return `base` with the best scheme of each pattern in `profiled`; points outside of `allowed` stay float.

        A pattern without a measured scheme stays as in `base`.
        """
        placement = self.base
        for schemes in profiled:
            if schemes.best_scheme is not None:
                placement = self.placement_map.decode(schemes.pattern_signature, schemes.best_scheme, placement)
        return self.without_forbidden(placement)

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

        A placement of an earlier run is left out if the space lacks it or it has points outside of `allowed`.

        Args:
            without: Digests to leave out.
        """
        read = [(each.latency_ms, digest, each.choices) for digest, each in self.measured.items() if each.latency_ms]
        found: dict[str, Placement] = {}
        for latency_ms, digest, choices in sorted(read, key=lambda each: each[0]):
            if len(found) == count or latency_ms >= below_ms:
                break
            placement = Placement(tuple(map(int, choices)))
            if digest in without or len(choices) != len(self.space) or self.without_forbidden(placement) != placement:
                continue
            if self.space.digest(placement) == digest:
                found[digest] = placement
        return found

    def initial_placements(
        self, cache_file: Path | None, qdq_baseline: Path | None
    ) -> tuple[dict[str, Placement], tuple[str, ...]]:
        """Return the initial design by name, and remarks on schemes that were measured on another machine.

        Args:
            cache_file: Pattern cache of an earlier run; None: none.
            qdq_baseline: Q/DQ model made from this model; None: none.
        """
        starts = [PluginSpec(use="linear"), PluginSpec(use="all")]
        if qdq_baseline is not None:
            starts.append(PluginSpec(use="import", label="qdq_baseline", params={"path": str(qdq_baseline)}))
        if cache_file is not None:
            limits = {"path": str(cache_file), "limit": MAX_CACHED_STARTS}
            starts.append(PluginSpec(use="pattern_cache", params=limits))
        design = InitialDesign(
            spec=self.task.spec,
            space=self.space,
            model=self.task.model,
            external_models=load_imported_models(starts),
            read=cache(partial(read_placement, model=self.task.model)),
            observer=_LoggingProgress(),
            facts=self.task.facts,
        )
        placements = design.placements(starts)
        for note in design.import_notes(starts, placements, self.task.inserter, self.task.dialect):
            logger.warning("--%s", note)
        found = {name: self.without_forbidden(each) for named in placements.values() for name, each in named.items()}
        return found, design.foreign_origin_notes(starts)

    def without_forbidden(self, placement: Placement) -> Placement:
        """Return a placement without the points outside of `allowed`."""
        allowed = frozenset(self.allowed)
        return Placement(tuple(c if index in allowed else 0 for index, c in enumerate(placement.choices)))


class PatternSearch:
    """Search of one pattern with all others fixed.

    Args:
        session: Session of the model.
        region: Region of the pattern; the region of the whole model includes all patterns.
        around: Placement of all other patterns.

    Attributes:
        schemes: Measured schemes and those to be measured, in the order of their proposal; those of the whole model
            have no points.
        index: Index of the scheme that was generated last; None before the first.
    """

    def __init__(self, session: AutotuneSession, region: Region, around: Placement) -> None:
        self.region = region
        self.schemes = PatternSchemes(session.placement_map.pattern(region))
        self.signature = self.schemes.pattern_signature
        self.index: int | None = None
        self._session, self._around = session, around
        own = set(session.placement_map.dimensions(self.signature).values())
        self._indices = [i for i in session.allowed if region.type is RegionType.ROOT or i in own]
        self._placements: list[Placement] = []  # of the schemes
        make = partial(_make_searcher, config=session.config, signature=self.signature)
        part = as_outcome("search", lambda: SubspaceSearcher(session.space, self._indices, around, make))
        self._searcher = SearcherGuard(part, session.space)

    def seed(self, placements: Iterable[Placement]) -> None:
        """Add schemes to measure before all others: those that placements have for the pattern."""
        for placement in placements if self._indices else ():
            choices = list(self._around.choices)
            for index in self._indices:
                choices[index] = placement.choices[index]
            self._add(Placement(tuple(choices)))

    def generate(self) -> int:
        """Return the index of the next scheme to measure, or -1: first the seeds, then proposals of the searcher.

        Schemes that the session has a result of are filled with it, and not measured again.
        """
        for index, seed in enumerate(self.schemes.schemes):
            if not seed.is_profiled and self._recall(index) is None:
                self.index = index
                return index
        config, repeats = self._session.config, 0
        while self._indices and repeats < config.maximum_generation_attempts:
            repeats += 1
            proposals = self._searcher.ask(1)
            if failure := self._searcher.failure:
                raise UserError(
                    f"searcher {config.searcher!r}: {failure.reason}; fix it, then run the same command "
                    f"again\n{failure.log_tail}"
                )
            if not proposals:
                break
            is_new = proposals[0] not in self._placements
            index = self._add(proposals[0])
            measurement = self._recall(index)
            if measurement is None:
                self.index = index
                return index
            if is_new and measurement.signature == self.signature:  # of this search, before an interruption
                repeats = 0
        return -1

    def fill(self, index: int, measurement: Measurement) -> None:
        """Store the result of a scheme and tell the searcher."""
        scheme, placement, latency_ms = self.schemes.schemes[index], self._placements[index], measurement.latency_ms
        scheme.error = latency_ms is None
        scheme.latency_ms = UNMEASURED_MS if latency_ms is None else latency_ms
        scheme.profile_timestamp = measurement.timestamp
        outcome = (
            Failure(stage="measure", reason="the model that has this scheme could not be measured")
            if latency_ms is None
            else Score(objective=latency_ms, stderr=measurement.stderr_ms)
        )
        digest = self._session.space.digest(placement)
        self._searcher.tell(Observation(placement=placement, digest=digest, outcome=outcome))

    def placement(self, best: bool = False) -> Placement:
        """Return the placement of the whole model with the scheme that was generated last, or with the best one."""
        index = self.index
        if best:
            scheme = self.schemes.best_scheme
            index = None if scheme is None else [each is scheme for each in self.schemes.schemes].index(True)
        return self._around if index is None else self._placements[index]

    def _add(self, placement: Placement) -> int:
        """Return the index of a placement's scheme, which is added if it is missing."""
        if placement not in self._placements:
            self._placements.append(placement)
            self.schemes.schemes.append(self._session.placement_map.encode(self.signature, placement))
        return self._placements.index(placement)

    def _recall(self, index: int) -> Measurement | None:
        """Fill a scheme with its known result, and return that, or None."""
        measurement = self._session.measured.get(self._session.space.digest(self._placements[index]))
        if measurement is not None:
            self.fill(index, measurement)
        return measurement


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


class _LoggingProgress(NullProgress):
    def say(self, text: str) -> None:
        logger.warning(text)


def calibration_batches(model: Model, config: Config) -> CalibrationBatches:
    """Open the calibration data of a configuration.

    Raises:
        AutotunerError: The file is neither `.npz` nor `.npy`, or a setting has an unknown value.
    """
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
    settings = {
        "data": data,
        "samples": RANDOM_SAMPLES if data is None else config.calibration_samples or ALL_SAMPLES,
        "method": config.calibration_method,
        "weights": config.weight_method,
        "depthwise": config.depthwise,
        "symmetric": config.symmetric,
    }
    try:
        calibration = Calibration.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        raise AutotunerError(f"calibration {problem['loc'][0]}: {problem['msg']}") from error
    spec = ModelSpec(use=model.source, calibration=calibration)
    return CalibrationBatches(spec, model, input_types(model), spread=True)
