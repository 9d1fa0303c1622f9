"""Q/DQ models that the PTQ tools make: fixed baselines, and seeds of the searches. Each is made once and then kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from harness.api import Array
from harness.calibrate.ptq import PtqOptions, modelopt_ptq, ort_static, ptq_fingerprint
from harness.errors import BuildFailed
from harness.graph.dialects import ONNXRUNTIME_S8, ONNXRUNTIME_S8_7BIT, Dialect
from harness.graph.diff import pairs_in
from harness.graph.insert import Inserter
from harness.graph.model import Model
from harness.graph.spoken import dialect_called
from harness.paths import cache_folder
from harness.run.journal import writing
from harness.run.observe import Observer
from harness.run.starts import EXTREME
from search.space import Space

__all__ = ["PTQ", "Foreign", "Order", "extreme_form", "quantize_with"]

SIGNED = "ort_static_s8"
PTQ = {"modelopt_ptq": modelopt_ptq, "ort_static": ort_static, SIGNED: ort_static}
PACKAGES = ("nvidia-modelopt", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A Q/DQ model that another tool made, or the reason why it could not."""

    name: str
    path: Path | None
    pairs: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every tool is given.

    Attributes:
        source: The model, for people.
        data: Calibration batches; gone through only where a model is made.
        data_key: Changes with the model, the data, and what is done to them.
    """

    model_file: Path
    source: str
    data: Iterable[Mapping[str, Array]]
    data_key: str
    options: PtqOptions


def quantize_with(name: str, order: Order, observer: Observer) -> Foreign:
    """Quantize with another tool, or take what it gave for the same model, data and options before.

    Raises:
        UserError: The disk is full.
    """
    options = order.options
    if name == SIGNED:
        options = {**options, "dialect_name": _signed(options["dialect_name"])}
    path = cache_folder() / "ptq" / _key(name, options, order.data_key) / f"{name}.onnx"
    if not path.exists():
        with observer.work(f"{order.source}: quantize with {name}", 1) as step, writing(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                PTQ[name](order.model_file, path, order.data, **options)
            except BuildFailed as error:
                observer.say(f"{order.source}: {name} failed: {error}")
                return Foreign(name=name, path=None, reason=str(error))
            step.advance()
    return Foreign(name=name, path=path, pairs=pairs_in(path))


def extreme_form(
    model: Model, dialect: Dialect, ranges: Mapping[str, tuple[float, float]], work: Path, space: Space
) -> Foreign:
    """Every point quantized in the plainest form, as the simplest tools do it: symmetric INT8.

    What a dialect does to keep accuracy or speed (UINT8 data, zero points) is left out. A stress test: a model that
    survives it needs no search for accuracy.
    """
    plain = replace(
        dialect, activation="int8", symmetric_activation=True, unsigned_positive=False, affine_ops=frozenset()
    )
    resolved, path = space.resolve(space.everywhere()), work / "extreme.onnx"
    inserter = Inserter(model, plain, ranges)
    with writing(path):
        inserter.export(resolved, path)
    return Foreign(name=EXTREME, path=path, pairs=inserter.pairs(resolved))


def _signed(dialect_name: str) -> str:
    """ONNX Runtime's dialect with INT8 activations, and weights of as many bits as another's."""
    limit = dialect_called(dialect_name).weight_limit
    kinds = (ONNXRUNTIME_S8, ONNXRUNTIME_S8_7BIT)
    return next((kind.name for kind in kinds if kind.weight_limit == limit), ONNXRUNTIME_S8.name)


def _key(name: str, options: PtqOptions, data_key: str) -> str:
    tools = sorted(f"{d.name} {d.version}" for d in distributions() if d.name and d.name.startswith(PACKAGES))
    text = json.dumps([name, ptq_fingerprint(options), data_key, tools])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
