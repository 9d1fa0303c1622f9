"""Arguments for ModelOpt: its interface read without an import, and a spec or command line translated to it."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.compat.tao_specs.presets import DEFAULT_OPERATORS
from harness.compat.tao_specs.selection import (
    DEFAULT_LAYERS_WILDCARD,
    HasNameAndOp,
    assign_layers,
    match_skip_names,
    names_operator,
)
from harness.compat.tao_specs.spec import Dtype, LayerSpec, QuantizeSection
from harness.config.precision_names import normalize_float_precision
from harness.errors import UserError, suggest_names
from harness.timing.provenance import describe_environment

__all__ = [
    "check_arguments",
    "execution_providers",
    "make_modelopt_arguments",
    "modelopt_float_dtype",
    "modelopt_parameters",
    "node_name_patterns",
    "option_remedy",
]  # fmt: skip

logger = logging.getLogger(__name__)

MODELOPT_MODES: Mapping[Dtype, str] = MappingProxyType({"int8": "int8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8"})
MODELOPT_METHODS: Mapping[str, str] = MappingProxyType({"minmax": "max", "max": "max", "entropy": "entropy"})
"""ModelOpt's Q/DQ are symmetric, so the range of minmax is that of max."""
INT4_ARGUMENTS = ("awqlite_alpha_step", "awqclip_alpha_step", "awqclip_alpha_min", "awqclip_bsz_col")
"""Beyond its signature, for mode int4 (its docstring, `kwargs`)."""
ARGUMENTS_SET_BY_SPEC: Mapping[str, str] = MappingProxyType(
    {
        "onnx_path": "model_path",
        "output_path": "results_dir",
        "quantize_mode": "layers (their dtype)",
        "calibration_method": "algorithm",
        "calibration_eps": "device",
        "calibration_data": "dataset.calibration_data",
        "calibration_data_reader": "dataset.calibration_data",
        "nodes_to_exclude": "skip_names",
    }
)
"""Arguments that other keys of a spec set."""
REFUSED_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "autotune": "'qdq autotune' searches placements; its options are those without the prefix autotune_",
        "keep_intermediate_files": "their folder is removed; 'python -m modelopt.onnx.quantization' has it",
        "trust_calibration_data": "pickled data are never read; write them by numpy.savez",
    }
)
"""Arguments that are refused, or the beginnings of their names, and how to get what they do."""


@cache
def modelopt_parameters() -> Mapping[str, Any]:
    """Names and defaults of `modelopt.onnx.quantization.quantize`, by its source; None for what is no literal.

    Importing it would load PyTorch and set up logging.

    Raises:
        UserError: ModelOpt is not installed, or its source is another than this reads.
    """
    found = importlib.util.find_spec("modelopt")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [Path(folder) / "onnx/quantization/quantize.py" for folder in folders]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    if not text:
        raise UserError("ModelOpt is not installed; pip install 'nvidia-modelopt[onnx]', or use backend: qdq")
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "quantize"]
    if not functions:
        raise UserError(
            f"ModelOpt {_modelopt_version()} has no quantize() where it was; use 0.43 to 0.47, or backend: qdq"
        )
    given = functions[0].args
    plain = [ast.Constant(None)] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    return MappingProxyType({a.arg: _eval_literal(default) for a, default in zip(given.args, plain, strict=True)})


def check_arguments(given: Mapping[str, Any], key: str = "backend_kwargs") -> None:
    """Check arguments of the user's own choice against ModelOpt's interface, before it starts.

    Raises:
        UserError: Unknown, set by another key, or of a type that cannot be.
    """
    known = {**modelopt_parameters(), **dict.fromkeys(INT4_ARGUMENTS, 0.0)}
    for name, value in given.items():
        if name in ARGUMENTS_SET_BY_SPEC:
            raise UserError(f"{key}.{name}: set by {ARGUMENTS_SET_BY_SPEC[name]} here")
        if way := _refusal_remedy(name):
            raise UserError(f"{key}.{name}: not taken here: {way}")
        if name not in known:
            raise UserError(
                f"{key}.{name}: ModelOpt {_modelopt_version()} has no such argument; "
                f"{suggest_names(name, known.keys() - ARGUMENTS_SET_BY_SPEC.keys())}"
            )
        default = known[name]
        fits = isinstance(value, float | int) if isinstance(default, float) else isinstance(value, type(default))
        if default is not None and not (fits and isinstance(value, bool) == isinstance(default, bool)):
            raise UserError(f"{key}.{name}: a value like {default!r}, but got {value!r}")


def option_remedy(option: str) -> str:
    """Return how to get what an option of ModelOpt does that `qdq ptq` lacks; "" where ModelOpt lacks it too."""
    name = option.removeprefix("--").partition("=")[0]
    if way := _refusal_remedy(name):
        return way
    if name in ARGUMENTS_SET_BY_SPEC:
        return "--calibration_data FILE, or batches in Python: harness.accuracy.calibration.ptq.modelopt"
    known = name in {*modelopt_parameters(), *INT4_ARGUMENTS}
    return f"'qdq quantize' passes it on: backend: modelopt.onnx, backend_kwargs: {{{name}: ...}}" if known else ""


def _refusal_remedy(name: str) -> str:
    return next((way for start, way in REFUSED_ARGUMENTS.items() if name == start or name.startswith(f"{start}_")), "")


def make_modelopt_arguments(
    section: QuantizeSection, layers: Sequence[LayerSpec], nodes: Sequence[HasNameAndOp]
) -> dict[str, Any]:
    """A spec's section in ModelOpt's words.

    Args:
        section: The section.
        layers: Its layers, or those of its preset.
        nodes: Of the model.

    Raises:
        UserError: Nothing to quantize, or arguments that ModelOpt does not have.
    """
    check_arguments(section.backend_kwargs)
    mode = _quantize_mode(layers)
    found = assign_layers(nodes, layers, DEFAULT_OPERATORS[mode])
    native = [node for node, layer in zip(nodes, found, strict=True) if layer and _is_native(layer)]
    wanted = [node for node, layer in zip(nodes, found, strict=True) if layer and not _is_native(layer)]
    others = {node.op for node, layer in zip(nodes, found, strict=True) if layer is None or not _is_native(layer)}
    whole = {node.op for node in native} - others
    names = {node.name for node in native if node.op not in whole} | match_skip_names(nodes, section.skip_names)
    extra = dict(section.backend_kwargs)
    if isinstance(text := extra.get("high_precision_dtype"), str):
        extra["high_precision_dtype"] = modelopt_float_dtype(text)
    own = extra.pop("op_types_to_exclude", None) or ()
    left_out = whole | ({own} if isinstance(own, str) else set(own))
    arguments: dict[str, Any] = {
        "quantize_mode": mode,
        "calibration_method": MODELOPT_METHODS[section.algorithm],
        "calibration_eps": execution_providers(section.device),
        "log_level": "WARNING",
        **_nodes_to_quantize([layer for layer in layers if not _is_native(layer)], nodes, wanted),
        **({"op_types_to_exclude": sorted(left_out)} if left_out else {}),
        **({"nodes_to_exclude": node_name_patterns(sorted(names - {""}))} if names - {""} else {}),
    }
    return {**arguments, **extra}


def modelopt_float_dtype(text: str) -> str:
    """Return ModelOpt's name of a float type, given in any usual spelling."""
    return {"f32": "fp32", "f16": "fp16"}.get(normalize_float_precision(text), text.lower())


def execution_providers(device: str) -> list[str]:
    """ModelOpt's execution providers for a device; the CPU where there is no GPU, with a warning."""
    if device == "cpu":
        return ["cpu"]
    if not describe_environment().get("gpus"):
        logger.warning("device: %s: there is no NVIDIA GPU here; the calibration runs on the CPU", device)
        return ["cpu"]
    gpu = device if ":" in device else "cuda:0"
    return ["trt", "cuda:0", "cpu"] if device == "trt" else [gpu, "cpu"]


def node_name_patterns(names: Sequence[str]) -> list[str]:
    """Names of nodes as ModelOpt wants them: regular expressions, which it matches at the beginning only."""
    return [f"{re.escape(name)}$" for name in names]


def _quantize_mode(layers: Sequence[LayerSpec]) -> str:
    """The first dtype of all, as documented ("Critical limitation: no mixed-precision support")."""
    dtypes = [t.dtype for layer in layers for t in (layer.weights, layer.activations) if t.dtype != "native"]
    if not dtypes:
        raise UserError("quantize.layers: every dtype is native, so there is nothing to quantize")
    first = dtypes[0]
    lone = [
        layer.module_name for layer in layers if {layer.weights.dtype, layer.activations.dtype} == {first, "native"}
    ]
    if len(set(dtypes)) > 1:
        logger.warning(
            "layers: the backend modelopt.onnx does not mix dtypes (%s): it applies the first, %s, to all of them; "
            "backend: qdq does each as asked", ", ".join(dict.fromkeys(dtypes)), first,
        )  # fmt: skip
    elif lone:
        logger.warning(
            "layers: the backend modelopt.onnx quantizes weights and activations alike, also those of %s; "
            "backend: qdq does each as asked", ", ".join(map(repr, lone)),
        )  # fmt: skip
    if first == "fp8_e5m2":
        logger.warning("layers: ModelOpt writes FP8 as E4M3 whichever is asked; backend: qdq writes E5M2")
    return MODELOPT_MODES[first]


def _nodes_to_quantize(
    layers: Sequence[LayerSpec], nodes: Sequence[HasNameAndOp], chosen: Sequence[HasNameAndOp]
) -> dict[str, Any]:
    """Operators or nodes to quantize; nothing where ModelOpt's defaults are meant."""
    if any(layer.module_name == DEFAULT_LAYERS_WILDCARD for layer in layers):
        return {}
    if not chosen:
        raise UserError("quantize.layers: no entry matches any node of the model, so there is nothing to quantize")
    ops = sorted({node.op for node in chosen})
    if all(names_operator(layer, nodes) for layer in layers):
        return {"op_types_to_quantize": ops}
    return {
        "op_types_to_quantize": ops,
        "nodes_to_quantize": node_name_patterns(sorted({node.name for node in chosen} - {""})),
    }


def _is_native(layer: LayerSpec) -> bool:
    return layer.weights.dtype == layer.activations.dtype == "native"


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
