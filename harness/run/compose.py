"""From a cell of the plan to the things that its searches need: model, space, scales, seeds, baselines."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from harness import registry, zoo
from harness.api import Array, Candidate
from harness.calibrate.ptq import PtqOptions, modelopt_ptq, ort_static
from harness.calibrate.ranges import CalibrationKey, cached_ranges, random_batches
from harness.errors import BuildFailed, UserError
from harness.evaluators.datasets import batches, open_data
from harness.evaluators.inputs import evaluator_params, image_size
from harness.graph.dialects import Dialect
from harness.graph.diff import pairs_in
from harness.graph.importer import import_qdq
from harness.graph.insert import Inserter
from harness.graph.load import load, save
from harness.graph.model import Model
from harness.graph.space import build_space
from harness.paths import cache_folder, locate
from harness.run.config import Experiment, ModelSpec, Use
from harness.run.engine import Seed
from harness.run.observe import Observer
from harness.run.plan import CellSpec
from search.space import Placement, Space

__all__ = ["Cell", "Foreign", "compose", "evaluator_use", "open_model"]

OPSET = 17
"""Per-channel Q/DQ needs 13; runtimes read 17 best today, and a dialect may ask for more."""
PTQ_PACKAGES = ("nvidia-modelopt", "onnxruntime")
Say = Callable[[str], None]
PTQ = {"modelopt_ptq": modelopt_ptq, "ort_static": ort_static}


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A Q/DQ model that another tool made, or the reason why it could not."""

    name: str
    path: Path | None
    pairs: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Everything that the searches of one cell share.

    Attributes:
        model_file: The cleaned float model: the baseline, and what other tools quantize.
        seeds: What every searcher is told first.
        placements: By name, those of the seeds and of the fixed baselines.
        calibrated_on: What the ranges were taken from, for the tables.
        foreign: Models of the PTQ tools.
        work: Scratch folder for candidates.
    """

    spec: CellSpec
    model: Model
    model_file: Path
    space: Space
    inserter: Inserter
    seeds: tuple[Seed, ...]
    placements: Mapping[str, Placement]
    foreign: Mapping[str, Foreign]
    calibrated_on: str
    work: Path

    def candidate(self, placement: Placement) -> Candidate:
        """The candidate of a placement; its file is written when it is built."""
        resolved, digest = self.space.resolve(placement), self.space.digest(placement)
        if not resolved:
            return Candidate(digest=digest, edges=(), source=lambda: self.model_file)
        folder = self.work / "candidates"
        return Candidate(
            digest=digest, edges=resolved, source=lambda: self.inserter.write(resolved, folder, name=digest)
        )


def open_model(spec: ModelSpec, base: Path, work: Path, min_opset: int = OPSET) -> Model:
    """Load the model that a specification names (`zoo:NAME`, `assets:PATH` or a path).

    Args:
        spec: The specification.
        base: Folder that relative paths start from.
        work: Scratch folder, for zoo models.
        min_opset: Older models are upgraded.

    Raises:
        UserError: Unknown zoo name, no such file, or not a model that can be used.
    """
    if spec.use.startswith("zoo:"):
        name = spec.use.removeprefix("zoo:")
        path = zoo.write(name, work / f"{_file_name(name)}.onnx")
    else:
        path = locate(spec.use, base)
    return load(path, source=spec.use, shapes=spec.shapes, min_opset=min_opset)


def evaluator_use(spec: ModelSpec, model: Model, base: Path, work: Path) -> Use | None:
    """The evaluator of a model with what the harness knows filled in.

    Raises:
        UserError: Unknown or missing parameters.
    """
    if spec.evaluator is None:
        return None
    use, params = spec.evaluator.use, dict(spec.evaluator.params)
    name = model.inputs[0]
    inputs = {n: (model.types[n].dtype, model.types[n].shape) for n in model.inputs}
    supplied = {
        "input_name": name,
        "input_shape": model.types[name].shape,
        "inputs": inputs,
        "reference": work / "reference.npz",
        "base": base,
    }
    wanted = inspect.signature(registry.load("evaluator", use)).parameters
    if spec.preprocess is not None and "preprocess" in wanted:
        params.setdefault("preprocess", {"use": spec.preprocess.use, "params": spec.preprocess.params})
    return Use(use=use, params=evaluator_params(use, params, supplied), label=spec.evaluator.label)


def compose(experiment: Experiment, spec: CellSpec, base: Path, work: Path, observer: Observer) -> Cell:
    """Load, calibrate, and prepare the space, the seeds and the baselines of one cell.

    Args:
        base: Folder of the experiment file, for relative paths.
        work: Scratch folder of the cell.

    Raises:
        UserError: Anything in the specification that cannot be used.
    """
    work.mkdir(parents=True, exist_ok=True)
    dialect = _dialect(spec.backend)
    if spec.precision not in dialect.precisions:
        raise UserError(
            f"precision {spec.precision!r}: backend {spec.backend.use!r} runs {', '.join(sorted(dialect.precisions))}"
        )
    model = open_model(spec.model, base, work, max(OPSET, dialect.opset([spec.precision])))
    model_file = save(model, work)
    space = build_space(model, dialect, precisions=(spec.precision,), sharing=experiment.sharing)
    if not len(space):
        raise UserError(f"{spec.model.use}: no insertion point that dialect {dialect.name!r} allows")
    feeds = _Feeds(spec.model, model, base)
    ranges = _ranges(space, model, model_file, feeds, observer)
    names = dict.fromkeys([*experiment.initial, *experiment.baselines])
    options = feeds.ptq_options(dialect, spec.precision)
    foreign = {name: _foreign(name, model, model_file, feeds, options, observer.say) for name in names if name in PTQ}
    placements = dict(_placements(list(names), space, model, foreign, observer))
    return Cell(
        spec=spec,
        model=model,
        model_file=model_file,
        space=space,
        inserter=Inserter(model, dialect, ranges),
        seeds=tuple(Seed(name=n, placement=placements[n]) for n in experiment.initial if n in placements),
        placements=placements,
        foreign=foreign,
        calibrated_on=feeds.description,
        work=work,
    )


class _Feeds:
    """Calibration batches of one model, as often as they are needed."""

    def __init__(self, spec: ModelSpec, model: Model, base: Path) -> None:
        self._spec = spec
        self._model = model
        self.settings = spec.calibration
        if spec.calibration.data is None:
            self._dataset = None
            self.description = "random data"
            self.fingerprint = "random"
        else:
            self._dataset = open_data(spec.calibration.data, base)
            self.description = f"{min(len(self._dataset), self.settings.samples)} samples"
            self.fingerprint = self._dataset.fingerprint

    @property
    def count(self) -> int:
        """Number of batches."""
        return self.settings.samples if self._dataset is None else min(self.settings.samples, len(self._dataset))

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        types = {name: self._model.types[name] for name in self._model.inputs}
        if self._dataset is None:
            yield from random_batches({n: (t.dtype, t.shape) for n, t in types.items()}, self.settings.samples, 0)
            return
        name = self._model.inputs[0]
        used = self._spec.preprocess
        preprocess = None if used is None else registry.create("preprocessing", used.use, used.params)
        size = (0, 0) if preprocess is None else image_size(name, types[name].shape)
        yield from batches(self._dataset, preprocess, name, size, self.count)

    def ptq_options(self, dialect: Dialect, precision: str) -> PtqOptions:
        """What the PTQ tools are told."""
        return {
            "dialect_name": dialect.name,
            "method": self.settings.method,
            "percentile": self.settings.percentile,
            "precision": precision,
        }

    @property
    def key(self) -> CalibrationKey:
        """What a cache of anything made from these batches goes by."""
        return CalibrationKey(
            model_sha256=self._model.sha256,
            data=self.fingerprint,
            preprocess=f"{self._spec.preprocess!r} {sorted(self._spec.shapes.items())}",
            method=self.settings.method,
            percentile=self.settings.percentile,
            samples=self.settings.samples,
        )


def _dialect(backend: Use) -> Dialect:
    """The dialect that a benchmarker's class names, else the one that is called like it."""
    factory = registry.load("benchmarker", backend.use)
    dialect: Any = registry.load("dialect", getattr(factory, "dialect", backend.use))
    if not isinstance(dialect, Dialect):
        raise UserError(f"dialect of backend {backend.use!r}: a harness.graph.dialects.Dialect, but got {dialect!r}")
    return dialect


def _ranges(
    space: Space, model: Model, model_file: Path, feeds: _Feeds, observer: Observer
) -> Mapping[str, tuple[float, float]]:
    tensors = {e.tensor for d in space.dimensions for e in d.edges if e.tensor not in model.constants}
    if feeds.description == "random data":
        observer.say(f"{model.source}: no calibration data given, random data is used: do not trust any accuracy")
    with observer.work(f"calibrate {model.source}", feeds.count) as step:
        return cached_ranges(feeds.key, model_file, sorted(tensors), feeds, progress=lambda _: step.advance())


def _foreign(name: str, model: Model, model_file: Path, feeds: _Feeds, options: PtqOptions, say: Say) -> Foreign:
    """Quantize with another tool, or take what it gave for the same model, data and options before."""
    tools = sorted(f"{d.name} {d.version}" for d in distributions() if d.name.startswith(PTQ_PACKAGES))
    key = hashlib.sha256(json.dumps([name, dict(options), repr(feeds.key), tools]).encode()).hexdigest()[:24]
    path = cache_folder() / "ptq" / key / f"{name}.onnx"
    if not path.exists():
        say(f"{model.source}: quantizing with {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            PTQ[name](model_file, path, list(feeds), **options)
        except BuildFailed as error:
            say(f"{model.source}: {name} failed: {error}")
            return Foreign(name=name, path=None, reason=str(error))
    return Foreign(name=name, path=path, pairs=pairs_in(path))


def _placements(
    names: list[str], space: Space, model: Model, foreign: Mapping[str, Foreign], observer: Observer
) -> Iterator[tuple[str, Placement]]:
    simple: dict[str, Callable[[], Placement]] = {
        "float": space.float_placement,
        "all": space.everywhere,
        "linear": lambda: space.only({"linear"}),
    }
    for name in names:
        if name in simple:
            yield name, simple[name]()
        elif (path := foreign[name].path) is not None:
            try:
                yield name, space.nearest(import_qdq(path, model))
            except UserError as error:
                observer.say(f"{model.source}: the placement of {name} cannot be read back: {error}")


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
