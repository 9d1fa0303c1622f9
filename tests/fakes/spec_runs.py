"""Runs of spec files given as text, in the process of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.base.progress import Observer
from harness.compat.tao_specs.engine import EngineFacts, build_engine
from harness.compat.tao_specs.evaluate import EvaluationResult, evaluate
from harness.compat.tao_specs.quantize import QuantizationResult, quantize
from harness.compat.tao_specs.spec import parse_spec, require_section
from harness.config.sections import PluginSpec

__all__ = ["E4M3", "E5M2", "INT8", "NATIVE", "build_spec", "evaluate_spec", "layer", "quantize_model", "quantize_spec"]


def _both(dtype: str) -> str:
    return f"weights: {{dtype: {dtype}}}, activations: {{dtype: {dtype}}}"


INT8, E4M3, E5M2, NATIVE = map(_both, ("int8", "fp8_e4m3fn", "fp8_e5m2", "native"))


def layer(name: str, dtypes: str = INT8) -> str:
    """Return an entry of `layers`."""
    return f"{{module_name: {name!r}, {dtypes}}}"


def quantize_spec(text: str, folder: Path, loader: Any = None) -> QuantizationResult:
    """Run section `quantize`; relative paths start from the folder, and results go to `folder/results`."""
    spec = parse_spec(text, "spec.yaml")
    section = require_section(spec.quantize, "quantize", "spec.yaml")
    return quantize(section, spec.dataset, folder, folder / "results", loader)


def quantize_model(
    model: Path, folder: Path, layers: str, extra: str = "", dataset: str = "", loader: Any = None
) -> QuantizationResult:
    """Quantize a model by backend `qdq`.

    Args:
        model: The model.
        folder: Folder of the results.
        layers: Entries of `layers`.
        extra: Further keys of the section, for instance "preset: rtdetr".
        dataset: Keys of section `dataset`.
        loader: Calibration batches.
    """
    text = f"quantize:\n  model_path: {model}\n  backend: qdq\n  layers: [{layers}]\n  {extra}\n"
    return quantize_spec(f"{text}dataset: {{{dataset}}}\n", folder, loader)


def build_spec(text: str, folder: Path, backend: str, **params: Any) -> EngineFacts:
    """Run section `gen_trt_engine`."""
    spec = parse_spec(text, "spec.yaml")
    section = require_section(spec.gen_trt_engine, "gen_trt_engine", "spec.yaml")
    return build_engine(section, spec.dataset, folder, PluginSpec(use=backend, params=params))


def evaluate_spec(text: str, folder: Path, name: str = "spec", observer: Observer | None = None) -> EvaluationResult:
    """Write the spec file into the folder and run its section `evaluate`."""
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return evaluate(parse_spec(text, str(path)), path, observer)
