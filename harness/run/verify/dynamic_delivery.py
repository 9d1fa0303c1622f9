"""Writer of quantized models with the dynamic axes of the original model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.accuracy.calibration.ranges import data_batches
from harness.base.errors import UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.graph.dynamic_axes import write_dynamic
from harness.graph.io.digests import IR_SUFFIX
from harness.graph.io.files import move_model
from harness.graph.model import Model
from harness.graph.protos import find_random_outputs
from harness.results.artifacts import (
    DYNAMIC_AXES_FILE,
    DYNAMIC_MODEL_SUFFIX,
    ExportedModel,
    FinalistSet,
    read_dynamic_axes,
)
from harness.results.manifest import write_record
from harness.run.verify.dynamic_check import (
    CHECK_INPUT_COUNT,
    DynamicCheckFiles,
    DynamicCheckTarget,
    Feeds,
    Shapes,
    check_dynamic_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicModel:
    """Result of writing a file with dynamic axes.

    Attributes:
        file: Path of the file; None if it was not written.
        remark: Sentence with the result of the check, or the reason why it was not written.
    """

    file: Path | None
    remark: str


def dynamic_model_path(file: Path) -> Path:
    """Return the path of the dynamic form of a model file: `NAME.dynamic.onnx` in the same folder."""
    return file.with_name(f"{file.stem}{DYNAMIC_MODEL_SUFFIX}")


def remove_dynamic_model(file: Path) -> Path:
    """Remove the dynamic form of a model file, if there is one, and return the path of that form."""
    target = dynamic_model_path(file)
    for stale in (target, target.with_name(f"{target.name}.data")):
        stale.unlink(missing_ok=True)
    return target


def format_fixed_shapes(model: Model) -> str:
    """Return the shapes that a model with fixed inputs takes, as text: "ids 1x128"."""
    return ", ".join(f"{name} {'x'.join(map(str, model.types[name].shape))}" for name in model.inputs)


def write_dynamic_model(
    model: Model, file: Path, backend: str, shapes: Sequence[Shapes] = (), data: Iterable[Feeds] = ()
) -> DynamicModel | None:
    """Write a quantized model with the dynamic axes of its original to the same folder.

    Args:
        model: The float model at fixed sizes.
        file: The model with Q/DQ pairs that was made from it.
        backend: Runtime of the search; the file is not written if its outputs differ there.
        shapes: Input shapes to check at; other shapes are tried if there are fewer than two.
        data: Calibration batches, of which the first are the inputs of the check; random inputs are drawn without any.

    Returns:
        Path and remark of the file; None if the original has no dynamic axes.
    """
    target = remove_dynamic_model(file)
    if model.origin is None:
        return None
    with tempfile.TemporaryDirectory(prefix="qdq-dynamic-") as scratch:
        tried = Path(scratch) / target.name
        try:
            floating, axes = write_dynamic(model, file, tried)
            types = {name: model.types[name] for name in model.inputs}
            files = DynamicCheckFiles(floating=floating, fixed=file, dynamic=tried)
            samples = data_batches(data, CHECK_INPUT_COUNT)
            random = frozenset(map(model.outputs.index, find_random_outputs(model.proto)))
            subject = DynamicCheckTarget(
                axes=axes, types=types, files=files, requested=tuple(shapes), random=random, samples=samples
            )
            remark = check_dynamic_model(subject, backend)
        except (UserError, OSError, ValueError) as error:
            return DynamicModel(file=None, remark=f"{target.name} is not written: {error}")
        move_model(tried, target)
    symbols = dict.fromkeys(str(axis) for each in axes.values() for axis in each or () if isinstance(axis, str))
    names = f" ({', '.join(symbols)})" if symbols else ""
    return DynamicModel(file=target, remark=f"{target.name} keeps the dynamic axes{names}: {remark}")


def write_dynamic_rows(
    model: Model,
    table: FinalistSet,
    backend: str,
    observer: Observer,
    shapes: Sequence[Shapes] = (),
    data: Iterable[Feeds] = (),
) -> None:
    """Write each quantized row of a task also with the dynamic axes of the original model.

    The results are recorded in `dynamic.json`; rows with an unchanged record are not written again.

    Args:
        model: The float model at fixed sizes; nothing is written if its original has static inputs.
        backend: Runtime of the search.
        observer: Receives the number of written files, and why a row was not written.
        shapes: Input shapes to check at, as in `write_dynamic_model`.
        data: Calibration batches, as in `write_dynamic_model`.
    """
    if model.origin is None:
        return
    records: dict[str, dict[str, Any]] = {**read_dynamic_axes(table.folder)}
    rows = [row for row in table.rows if row.pairs and not row.file.endswith(IR_SUFFIX)]
    models = table.folder / "models"
    outdated = {row.id for row in rows if not _is_current(records.get(row.id, {}), row, models)}
    samples = data_batches(data, CHECK_INPUT_COUNT) if outdated else ()
    with observer.work("dynamic axes", len(rows)) as step:
        for row in rows:
            if row.id in outdated:
                file = models / row.file
                with explain_write_errors(file):
                    result = write_dynamic_model(model, file, backend, shapes, samples)
                records[row.id] = {
                    "sha256": row.sha256,
                    "file": result and result.file and result.file.name,
                    "remark": result and result.remark,
                }
            step.advance()
    write_record(table.folder / DYNAMIC_AXES_FILE, records)
    written = sum(records[row.id]["file"] is not None for row in rows)
    observer.say(
        f"{written} of {len(rows)} quantized models are written with their dynamic axes too: {DYNAMIC_AXES_FILE}"
    )
    for row in rows:
        if records[row.id]["file"] is None and row.choices is not None:
            observer.say(str(records[row.id]["remark"]))


def _is_current(record: Mapping[str, Any], row: ExportedModel, models: Path) -> bool:
    """Return whether a record of `dynamic.json` is of this row, has all keys, and its file exists."""
    if not {"file", "remark"} <= record.keys() or record.get("sha256") != row.sha256:
        return False
    return record["file"] is None or (models / record["file"]).exists()
