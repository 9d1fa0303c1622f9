"""`qdq ptq`: ModelOpt's command line for post-training quantization, with its names, checked before it starts."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compat.tao_specs.calibration_feeds import open_calibration_feeds, sample_shapes
from harness.compat.tao_specs.model_file import ShapeOptionNames, open_onnx_file, static_shapes, static_types
from harness.compat.tao_specs.modelopt_arguments import (
    check_arguments,
    modelopt_float_dtype,
    node_name_patterns,
    option_remedy,
)
from harness.compat.tao_specs.presets import PRESETS, describe_defaults, describe_presets
from harness.compat.tao_specs.quantize import (
    QuantizationResult,
    add_calibration_shapes,
    count_precisions,
    quantize_with_modelopt,
    refuse_quantized,
)
from harness.compat.tao_specs.selection import match_skip_names
from harness.compat.tao_specs.spec import DatasetSection
from harness.errors import UserError, suggest_names
from harness.graph.passes.dimension_errors import parse_dims
from harness.graph.signature import ModelSignature, read_signature
from harness.paths import resolve_path

__all__ = ["get_parser", "run_ptq"]

logger = logging.getLogger(__name__)

CALIBRATION_METHODS: Mapping[str, tuple[str, ...]] = {
    "int8": ("entropy", "max"),
    "fp8": ("entropy", "max"),
    "int4": ("awq_clip", "rtn_dq"),
}
"""Calibration methods by mode, the default first (`modelopt.onnx.quantization.quantize`, its docstring)."""
CLI_OPTION_NAMES = ShapeOptionNames(
    key="--calibration_shapes NAME",
    remedy="--calibration_shapes NAME:SHAPE",
    dim_remedy="SIZES",
    dim_form=("--dim SYMBOL=SIZE", " "),
)
KNOWN_PROVIDERS = ("NvTensorRtRtx", "trt", "cuda:x", "dml:x", "cpu")
FORWARDED_OPTIONS = (
    "calibrate_per_node", "calibration_shapes", "high_precision_dtype", "use_external_data_format", "simplify",
    "disable_mha_qdq", "dq_only", "block_size", "opset",
)  # fmt: skip


def run_ptq(given: Sequence[str], prog: str = "qdq ptq") -> QuantizationResult | list[str]:
    """Do what a command line says.

    Returns:
        The quantized model, or lines to show where only those were asked for (`--show-defaults`).

    Raises:
        UserError: Anything in it that cannot be used, and ModelOpt's own words where it fails.
    """
    options, unknown = get_parser(prog).parse_known_args(given)
    if unknown:
        way = option_remedy(unknown[0])
        raise UserError(f"{unknown[0]}: no option of {prog}; {way or f'{prog} --help shows all'}")
    if options.show_defaults:
        return describe_defaults() + describe_presets()
    if options.onnx_path is None:
        raise UserError(f"--onnx_path: the float model is needed; '{prog} --help' shows all options")
    path, declared = open_onnx_file(options.onnx_path, Path.cwd(), "--onnx_path")
    refuse_quantized(declared, options.onnx_path)
    arguments = _modelopt_arguments(options, declared)
    target = _output_path(options, path)
    dataset = DatasetSection(
        calibration_data=_check_data(options.calibration_data), samples=None
    )  # all, as ModelOpt's command
    samples = sample_shapes(dataset, tuple(declared.inputs), Path.cwd(), "--calibration_data")
    shapes = static_shapes(
        declared, 1, _parse_shapes(options.calibration_shapes), CLI_OPTION_NAMES, samples, parse_dims(options.dim or ())
    )
    feeds = open_calibration_feeds(dataset, static_types(declared, shapes), Path.cwd(), "--calibration_data")
    quantize_with_modelopt(path, target, feeds.batches, add_calibration_shapes(arguments, declared, shapes))
    return QuantizationResult(
        path=target, layers=count_precisions(read_signature(target)), calibrated_on=feeds.description
    )


def get_parser(prog: str = "qdq ptq") -> argparse.ArgumentParser:
    """The parser; lists take spaces or commas."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Quantize an ONNX model with NVIDIA ModelOpt.",
        epilog=f"Example: {prog} --onnx_path model.onnx --calibration_data calib.npy --output_path model-int8.onnx",
    )
    add = parser.add_argument
    add("--onnx_path", help="float model (.onnx)")
    add("--output_path", help="Q/DQ model [default: MODEL.quant.onnx beside the model]")
    add("--quantize_mode", default="int8", choices=list(CALIBRATION_METHODS))
    add("--calibration_data", "--calibration_data_path", help=".npy, .npz (qdq calib-data makes one)")
    add("--calibration_method", help="max or entropy; int4: awq_clip or rtn_dq")
    add("--calibration_eps", nargs="+", default=["cpu"], metavar="EP", help=f"any of {', '.join(KNOWN_PROVIDERS)}")
    add("--calibration_shapes", help="input0:1x3x256x256,input1:... [default: those of --calibration_data]")
    add("--dim", action="append", metavar="SYMBOL=128", help="size of a dynamic dimension by its symbol; repeat")
    add("--op_types_to_quantize", nargs="+", metavar="OP")
    add("--op_types_to_exclude", nargs="+", metavar="OP")
    add("--nodes_to_quantize", nargs="+", metavar="REGEX")
    add("--nodes_to_exclude", nargs="+", metavar="REGEX")
    add("--trt_plugins", nargs="+", metavar="FILE", help="TensorRT plug-in libraries (.so)")
    add("--calibrate_per_node", action="store_true", help="less memory, more time")
    add(
        "--high_precision_dtype", default="fp16", type=modelopt_float_dtype, choices=["fp32", "fp16", "bf16"],
        help="of what stays float",
    )  # fmt: skip
    add("--use_external_data_format", action="store_true", help="for models above 2 GB")
    add("--simplify", action="store_true")
    add("--disable_mha_qdq", action="store_true")
    add("--dq_only", action="store_true")
    add("--block_size", type=int, help="for int4")
    add("--opset", type=int)
    add("--preset", choices=list(PRESETS), help="a named choice of layers, see --show-defaults")
    add("--show-defaults", action="store_true", help="what is quantized and left out by default, and the presets")
    return parser


def _modelopt_arguments(options: argparse.Namespace, declared: ModelSignature) -> dict[str, Any]:
    """The options in ModelOpt's words."""
    mode = options.quantize_mode
    found: dict[str, Any] = {
        "quantize_mode": mode,
        "calibration_method": _calibration_method(options.calibration_method, mode),
        "calibration_eps": _calibration_providers(options),
        "log_level": "WARNING",
    }
    passed = {name: getattr(options, name) for name in FORWARDED_OPTIONS}
    passed = {name: value for name, value in passed.items() if value not in (None, False)}
    lists = ("op_types_to_quantize", "op_types_to_exclude", "nodes_to_quantize", "nodes_to_exclude")
    passed |= {name: _split_lists(getattr(options, name)) for name in lists if getattr(options, name)}
    check_arguments({name: value for name, value in passed.items() if name != "nodes_to_exclude"}, "--")
    for name in lists[:2]:
        _warn_unknown_operators(passed.get(name, ()), declared, f"--{name}")
    if options.trt_plugins:
        passed["trt_plugins"] = [str(resolve_path(file)) for file in _split_lists(options.trt_plugins)]
    return {**found, **_apply_preset(options, declared, passed)}


def _apply_preset(options: argparse.Namespace, declared: ModelSignature, passed: dict[str, Any]) -> dict[str, Any]:
    """What a preset adds."""
    if options.preset is None:
        return passed
    preset = PRESETS[options.preset]
    if preset.expect:
        logger.warning("preset %s: %s", options.preset, preset.expect)
    if preset.op_types:
        if options.quantize_mode != "int8":
            raise UserError(f"--preset {options.preset} is for --quantize_mode int8, but got {options.quantize_mode}")
        ops = [op for op in preset.op_types if op in declared.operators]
        return {**passed, "op_types_to_quantize": [*passed.get("op_types_to_quantize", ()), *ops]}
    names = node_name_patterns(sorted(match_skip_names(declared.nodes, preset.skip_names, f"preset {options.preset}")))
    return {**passed, "nodes_to_exclude": [*passed.get("nodes_to_exclude", ()), *names]}


def _calibration_method(given: str | None, mode: str) -> str:
    known = CALIBRATION_METHODS[mode]
    if given is not None and given not in known:
        raise UserError(f"--calibration_method: {' or '.join(known)} for {mode}, but got {given!r}; "
                        f"{suggest_names(given, known)}")  # fmt: skip
    return given or known[0]


def _calibration_providers(options: argparse.Namespace) -> list[str]:
    found = _split_lists(options.calibration_eps)
    for name in found:
        kind, _, number = name.partition(":")
        if not (name in ("NvTensorRtRtx", "trt", "cpu") or (kind in ("cuda", "dml") and number.isdecimal())):
            raise UserError(f"--calibration_eps: any of {', '.join(KNOWN_PROVIDERS)}, but got {name!r}")
    return found


def _split_lists(values: Sequence[str] | None) -> list[str]:
    """`A B` and `A,B` alike."""
    return [part for value in values or () for part in value.split(",") if part]


def _warn_unknown_operators(names: Sequence[str], declared: ModelSignature, option: str) -> None:
    for name in names:
        if name not in declared.operators:
            logger.warning("%s: the model has no %r; %s", option, name, suggest_names(name, declared.operators))


def _parse_shapes(text: str | None) -> dict[str, str]:
    found = {}
    for part in (text or "").split(","):
        name, colon, shape = part.rpartition(":")
        if part and not colon:
            raise UserError(f"--calibration_shapes: NAME:1x3x256x256, with commas between inputs, but got {part!r}")
        if part:
            found[name] = shape
    return found


def _check_data(given: str | None) -> str | None:
    if given is not None and Path(given).is_dir():
        raise UserError(
            f"--calibration_data: a .npy or an .npz file, but {given} is a folder; "
            f"'qdq calib-data {given} -o calib.npy --preprocess NAME' makes one of it"
        )
    return given


def _output_path(options: argparse.Namespace, path: Path) -> Path:
    target = Path(options.output_path) if options.output_path else path.with_name(f"{path.stem}.quant.onnx")
    if target.suffix != ".onnx":
        raise UserError(f"--output_path: a name that ends in .onnx, but got {target.name}")
    if target.resolve() == path.resolve():
        raise UserError(f"--output_path: {target} is the float model itself; choose another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_path {target}: its folder cannot be made: {error.strerror or error}") from error
    return target
