"""Arguments of ModelOpt: parameters of its function `quantize`, read from the source, and their values for a spec."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.base.errors import UserError, install_hint, suggest_names
from harness.base.paths import require_trust
from harness.compat.tao_specs.spec import (
    DEFAULT_LAYERS_WILDCARD,
    DEFAULT_OPERATORS,
    Dtype,
    HasNameAndOp,
    LayerSpec,
    QuantizeSection,
    assign_layers,
    match_skip_names,
)
from harness.config.sections import normalize_float_precision
from harness.measure.provenance import describe_environment

logger = logging.getLogger(__name__)

MODELOPT_MODES: Mapping[Dtype, str] = {"int8": "int8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8"}
#: ModelOpt's Q/DQ pairs are symmetric, so minmax gives the same range as max.
MODELOPT_METHODS: Mapping[str, str] = {"minmax": "max", "max": "max", "entropy": "entropy"}
#: Keyword arguments of mode int4 (docstring of ModelOpt's `quantize`, `kwargs`).
INT4_ARGUMENTS = ("awqlite_alpha_step", "awqclip_alpha_step", "awqclip_alpha_min", "awqclip_bsz_col")
ARGUMENTS_SET_BY_SPEC: Mapping[str, str] = {
    "onnx_path": "model_path",
    "output_path": "results_dir",
    "quantize_mode": "layers (their dtype)",
    "calibration_method": "algorithm",
    "calibration_eps": "device",
    "calibration_data": "dataset.calibration_data",
    "calibration_data_reader": "dataset.calibration_data",
    "nodes_to_exclude": "skip_names",
}
#: Alternative to each rejected argument, by its name or its prefix before "_".
REFUSED_ARGUMENTS: Mapping[str, str] = {
    "autotune": "'qdq autotune' searches placements; its options are those without the prefix autotune_",
    "keep_intermediate_files": "their folder is removed; use 'python -m modelopt.onnx.quantization'",
    "trust_calibration_data": "pickled data are never read; write them by numpy.savez",
}
#: Arguments that make ModelOpt run foreign code: plug-in libraries, and code of a model's repository.
CODE_ARGUMENTS = ("trt_plugins", "trust_remote_code")


@cache
def modelopt_parameters() -> Mapping[str, Any]:
    """Return the defaults of `modelopt.onnx.quantization.quantize` by parameter; None for those that are no literals.

    They are read from the source, as an import would load PyTorch, which takes seconds before a misspelled argument
    could be reported.
    """
    spec = importlib.util.find_spec("modelopt")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [Path(folder) / "onnx/quantization/quantize.py" for folder in folders]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    if not text:
        raise UserError(f"ModelOpt is not installed; {install_hint('modelopt')}, or use backend: qdq")
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "quantize"]
    if not functions:
        raise UserError(f"ModelOpt {_modelopt_version()} has another interface; use 0.43 to 0.47, or backend: qdq")
    parameters = functions[0].args
    defaults = [ast.Constant(None)] * (len(parameters.args) - len(parameters.defaults)) + list(parameters.defaults)
    return MappingProxyType(
        {a.arg: _eval_literal(default) for a, default in zip(parameters.args, defaults, strict=True)}
    )


def _eval_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _modelopt_version() -> str:
    try:
        return version("nvidia-modelopt")
    except PackageNotFoundError:
        return ""


def check_arguments(given: Mapping[str, Any], key: str = "backend_kwargs") -> None:
    """Raise `UserError` for arguments that ModelOpt lacks, that have the wrong type, or that other keys set.

    Args:
        given: Values of arguments by name.
        key: Start of the message, before the name of the argument.
    """
    defaults = {**modelopt_parameters(), **dict.fromkeys(INT4_ARGUMENTS, 0.0)}
    for name, value in given.items():
        if name in ARGUMENTS_SET_BY_SPEC:
            raise UserError(f"{key}.{name}: set by {ARGUMENTS_SET_BY_SPEC[name]} here")
        if remedy := _refusal_remedy(name):
            raise UserError(f"{key}.{name}: not accepted; {remedy}")
        if name in CODE_ARGUMENTS and value:
            require_trust(f"{key}.{name}: would run code")
        if name not in defaults:
            raise UserError(
                f"{key}.{name}: ModelOpt {_modelopt_version()} has no such argument; "
                f"{suggest_names(name, defaults.keys() - ARGUMENTS_SET_BY_SPEC.keys())}"
            )
        default = defaults[name]
        fits = isinstance(value, float | int) if isinstance(default, float) else isinstance(value, type(default))
        if default is not None and not (fits and isinstance(value, bool) == isinstance(default, bool)):
            raise UserError(f"{key}.{name}: expected the type of {default!r}, but got {value!r}")


def option_remedy(option: str) -> str:
    """Return the alternative to an option "--NAME" of ModelOpt that `qdq ptq` lacks; "" if ModelOpt lacks it too."""
    name = option.removeprefix("--").partition("=")[0]
    if remedy := _refusal_remedy(name):
        return remedy
    if name in ARGUMENTS_SET_BY_SPEC:
        return "--calibration_data FILE, or batches in Python: harness.accuracy.tools.ptq.modelopt"
    is_argument = name in {*modelopt_parameters(), *INT4_ARGUMENTS}
    return (
        f"'qdq quantize' passes it on: backend: modelopt.onnx, backend_kwargs: {{{name}: ...}}" if is_argument else ""
    )


def _refusal_remedy(name: str) -> str:
    return next((text for start, text in REFUSED_ARGUMENTS.items() if f"{name}_".startswith(f"{start}_")), "")


def make_modelopt_arguments(
    section: QuantizeSection, layers: Sequence[LayerSpec], nodes: Sequence[HasNameAndOp]
) -> dict[str, Any]:
    """Return the arguments of ModelOpt's `quantize` for a section `quantize`.

    Args:
        layers: Layers of the section, or of its preset.
        nodes: Nodes of the model.
    """
    check_arguments(section.backend_kwargs)
    dtypes = [dtype for layer in layers for dtype in layer.dtypes]
    if not dtypes:
        raise UserError("quantize.layers: every dtype is native, so there is nothing to quantize")
    partial = [layer.module_name for layer in layers if len(layer.dtypes) == 1]
    if len(set(dtypes)) > 1:  # TAO: "Critical limitation: no mixed-precision support"
        logger.warning(
            "layers: the backend modelopt.onnx does not mix dtypes (%s): it applies the first, %s, to all of them; "
            "backend: qdq applies each", ", ".join(dict.fromkeys(dtypes)), dtypes[0],
        )  # fmt: skip
    elif partial:
        logger.warning(
            "layers: the backend modelopt.onnx quantizes weights and activations alike, also those of %s; "
            "backend: qdq treats them separately", ", ".join(map(repr, partial)),
        )  # fmt: skip
    if dtypes[0] == "fp8_e5m2":
        logger.warning("layers: ModelOpt writes FP8 only as E4M3; backend: qdq writes E5M2")
    mode = MODELOPT_MODES[dtypes[0]]
    assigned = list(zip(nodes, assign_layers(nodes, layers, DEFAULT_OPERATORS[mode]), strict=True))
    native = [node for node, layer in assigned if layer and not layer.dtypes]
    to_quantize = [node for node, layer in assigned if layer and layer.dtypes]
    excluded_ops = {node.op for node in native} - {node.op for node, layer in assigned if not layer or layer.dtypes}
    names = {node.name for node in native if node.op not in excluded_ops} | match_skip_names(nodes, section.skip_names)
    wanted: dict[str, Any] = {}  # for "*" ModelOpt's defaults
    quantized = [layer for layer in layers if layer.dtypes]
    if not any(layer.module_name == DEFAULT_LAYERS_WILDCARD for layer in quantized):
        if not to_quantize:
            raise UserError("quantize.layers: no entry matches any node of the model, so there is nothing to quantize")
        wanted = {"op_types_to_quantize": sorted({node.op for node in to_quantize})}
        if not all(any(fnmatchcase(node.op, layer.module_name) for node in nodes) for layer in quantized):
            wanted["nodes_to_quantize"] = node_name_patterns({node.name for node in to_quantize})
    extra = dict(section.backend_kwargs)
    if isinstance(text := extra.get("high_precision_dtype"), str):
        extra["high_precision_dtype"] = modelopt_float_dtype(text)
    user_excluded = extra.pop("op_types_to_exclude", None) or ()
    excluded_ops |= {user_excluded} if isinstance(user_excluded, str) else set(user_excluded)
    return {
        "quantize_mode": mode,
        "calibration_method": MODELOPT_METHODS[section.algorithm],
        "calibration_eps": execution_providers(section.device),
        "log_level": "WARNING",
        **wanted,
        **({"op_types_to_exclude": sorted(excluded_ops)} if excluded_ops else {}),
        **({"nodes_to_exclude": node_name_patterns(names)} if names - {""} else {}),
        **extra,
    }


def modelopt_float_dtype(text: str) -> str:
    """Return ModelOpt's name of a float type in any usual spelling."""
    return {"f32": "fp32", "f16": "fp16"}.get(normalize_float_precision(text), text.lower())


def execution_providers(device: str) -> list[str]:
    """Return ModelOpt's execution providers for a device; without a GPU return the CPU and log a warning."""
    if device == "cpu":
        return ["cpu"]
    if not describe_environment().get("gpus"):
        logger.warning("device: %s: there is no NVIDIA GPU here; the calibration runs on the CPU", device)
        return ["cpu"]
    gpu = device if ":" in device else "cuda:0"
    return ["trt", "cuda:0", "cpu"] if device == "trt" else [gpu, "cpu"]


def node_name_patterns(names: Iterable[str]) -> list[str]:
    """Return regular expressions for names of nodes; ModelOpt matches them at the beginning only."""
    return [f"{re.escape(name)}$" for name in sorted(names) if name]
