"""Loading of the model that a specification names, and completion of its evaluator from the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from harness import registry, zoo
from harness.accuracy.metrics.base import evaluator_params, image_input_params
from harness.config.sections import ModelSpec, PluginSpec
from harness.errors import UserError
from harness.graph.load import load
from harness.graph.model import Model
from harness.paths import resolve_path
from harness.random_inputs import check_types

__all__ = ["MIN_OPSET", "evaluator_spec", "input_types", "open_model", "safe_file_name"]

MIN_OPSET = 17
"""Per-channel Q/DQ needs 13; runtimes read 17 best today, and a dialect may ask for more."""


def open_model(spec: ModelSpec, work: Path, min_opset: int = MIN_OPSET) -> Model:
    """Load the model that a specification names (`zoo:NAME`, `assets:PATH` or a path).

    Args:
        spec: The specification.
        work: Scratch folder, for zoo models.
        min_opset: Older models are upgraded.

    Raises:
        UserError: Unknown zoo name, no such file, or not a model that can be used.
    """
    if spec.use.startswith("zoo:"):
        name = spec.use.removeprefix("zoo:")
        path = zoo.write_model(name, work / f"{safe_file_name(name)}.onnx")
    else:
        path = resolve_path(spec.use, spec.base_dir)
    return load(path, source=spec.use, shapes=spec.shapes, dims=spec.dims, min_opset=min_opset)


def evaluator_spec(spec: ModelSpec, model: Model, work: Path, half: str | None = None) -> PluginSpec | None:
    """Return the evaluator of a model with the parameters that the harness supplies.

    Args:
        spec: The specification.
        model: Its model.
        work: Scratch folder, for outputs of the float model.
        half: "search" or "report": only that half of the evaluator's data; None: all of it.

    Raises:
        UserError: Unknown or missing parameters, or there is nothing that could be halved.
    """
    if spec.evaluator is None:
        return None
    use, params = spec.evaluator.use, dict(spec.evaluator.params)
    if half is not None:
        if not isinstance(params.get("data"), Mapping):
            raise UserError(f"evaluator {use!r} has no 'data' of which one half could be set aside")
        params["data"] = {**params["data"], "half": half}
    inputs = input_types(model)
    reference = work / f"reference{'' if half is None else f'-{half}'}.npz"
    supplied = {"inputs": inputs, "reference": reference, "base": spec.base_dir}
    wanted = inspect.signature(registry.load_plugin("evaluator", use)).parameters
    if wanted.keys() & {"input_name", "input_shape"}:
        supplied |= image_input_params(params.get("data"), inputs)
    if spec.preprocess is not None and "preprocess" in wanted:
        params.setdefault("preprocess", {"use": spec.preprocess.use, "params": spec.preprocess.params})
    return PluginSpec(use=use, params=evaluator_params(use, params, supplied), label=spec.evaluator.label)


def input_types(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return element type and shape of each input.

    Raises:
        UserError: An input that no engine can be timed with.
    """
    for name in model.inputs:
        if name not in model.types:
            raise UserError(f"{model.source}: input {name!r} is no tensor, so this model cannot be timed")
    types = {name: (model.types[name].dtype, model.types[name].shape) for name in model.inputs}
    try:
        check_types(types)
    except UserError as error:
        raise UserError(f"{model.source}: {error}") from error
    return types


def safe_file_name(text: str) -> str:
    """Return a name with characters that are valid in file names only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
