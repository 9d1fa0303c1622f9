"""`qdq ptq`: the options of ModelOpt's command line for post-training quantization, checked before it starts."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from harness.accuracy.data.arrays import array_kind
from harness.base.errors import UserError, suggest_names
from harness.base.paths import resolve_path
from harness.compat.tao_specs.dataset import ShapeOptionNames, name_write_errors, open_feeds, open_onnx_file
from harness.compat.tao_specs.modelopt_arguments import (
    check_arguments,
    modelopt_float_dtype,
    node_name_patterns,
    option_remedy,
)
from harness.compat.tao_specs.quantize import (
    QuantizationResult,
    add_calibration_shapes,
    checked_result,
    quantize_with_modelopt,
    refuse_quantized,
)
from harness.compat.tao_specs.spec import PRESETS, DatasetSection, describe_defaults, match_skip_names
from harness.graph.load import ModelSignature
from harness.graph.passes.static_shapes import parse_dims, parse_named_shapes
from harness.run.verify.runtime_checker import CHECK_SAMPLE_COUNT

logger = logging.getLogger(__name__)
PROGRAM = "qdq ptq"

#: Calibration methods by mode, the default first (docstring of `modelopt.onnx.quantization.quantize`).
CALIBRATION_METHODS: Mapping[str, tuple[str, ...]] = {
    "int8": ("entropy", "max"),
    "fp8": ("entropy", "max"),
    "int4": ("awq_clip", "rtn_dq"),
}
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
LIST_OPTIONS = ("op_types_to_quantize", "op_types_to_exclude", "nodes_to_quantize", "nodes_to_exclude")


def run_ptq(given: Sequence[str]) -> QuantizationResult | list[str]:
    """Quantize as a command line describes; with `--show-defaults` return lines of text instead."""
    options, unknown = get_parser().parse_known_args(given)
    if unknown:
        remedy = option_remedy(unknown[0])
        raise UserError(f"{unknown[0]}: no option of {PROGRAM}; {remedy or f'{PROGRAM} --help shows all'}")
    if options.show_defaults:
        return describe_defaults()
    if options.onnx_path is None:
        raise UserError(f"--onnx_path: the float model is needed; '{PROGRAM} --help' shows all options")
    path, declared = open_onnx_file(options.onnx_path, Path.cwd(), "--onnx_path")
    refuse_quantized(declared, options.onnx_path)
    arguments = _modelopt_arguments(options, declared)
    target = Path(options.output_path) if options.output_path else path.with_name(f"{path.stem}.quant.onnx")
    if target.suffix != ".onnx":
        raise UserError(f"--output_path: a name that ends in .onnx, but got {target.name}")
    if target.resolve() == path.resolve():
        raise UserError(f"--output_path: {target} is the float model itself; choose another name")
    with name_write_errors(f"--output_path {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
    place = options.calibration_data
    if place is not None and Path(place).is_dir():
        remedy = f"'qdq calib-data {place} -o calib.npy --preprocess NAME' writes one from its images"
        if array_kind(Path(place)):
            remedy = "ModelOpt takes samples of one size: pad or cut them, or use qdq insert for others"
        raise UserError(f"--calibration_data: a .npy or an .npz file, but {place} is a folder; {remedy}")
    shapes = _split_lists([options.calibration_shapes or ""])
    sizes = {
        "shapes": parse_named_shapes("--calibration_shapes", shapes, "input0:1x3x256x256,input1:1x3x128x128"),
        "dims": parse_dims(options.dim or ()),
    }
    dataset = DatasetSection(calibration_data=place, samples=None).model_copy(update=sizes)  # all samples
    types, feeds, calibrated_on = open_feeds(dataset, Path.cwd(), declared, "--calibration_data", CLI_OPTION_NAMES)
    quantize_with_modelopt(path, target, feeds, add_calibration_shapes(arguments, declared, types))
    samples = tuple(islice(feeds, CHECK_SAMPLE_COUNT)) if options.run else ()
    return checked_result(target, calibrated_on, path, types, samples)


def get_parser() -> argparse.ArgumentParser:
    """Return the parser; lists take spaces or commas."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Quantize an ONNX model with NVIDIA ModelOpt.",
        epilog=f"Example: {PROGRAM} --onnx_path model.onnx --calibration_data calib.npy --output_path model-int8.onnx",
    )
    add = parser.add_argument
    add("--onnx_path", help="float model (.onnx)")
    add("--output_path", help="Q/DQ model [default: MODEL.quant.onnx in the folder of the model]")
    add("--quantize_mode", default="int8", choices=list(CALIBRATION_METHODS))
    add("--calibration_data", "--calibration_data_path", help=".npy, .npz (qdq calib-data writes one)")
    add("--calibration_method", help="max or entropy; int4: awq_clip or rtn_dq")
    add("--calibration_eps", nargs="+", default=["cpu"], metavar="EP", help=f"any of {', '.join(KNOWN_PROVIDERS)}")
    add("--calibration_shapes", help="input0:1x3x256x256,input1:... [default: those of --calibration_data]")
    add("--dim", action="append", metavar="SYMBOL=128", help="size of a dynamic dimension by its symbol; repeat")
    for name in LIST_OPTIONS:
        add(f"--{name}", nargs="+", metavar="OP" if name.startswith("op_") else "REGEX")
    add("--trt_plugins", nargs="+", metavar="FILE", help="TensorRT plug-in libraries (.so)")
    add("--calibrate_per_node", action="store_true", help="less memory, more time")
    add(
        "--high_precision_dtype", default="fp16", type=modelopt_float_dtype, choices=["fp32", "fp16", "bf16"],
        help="precision of operators that stay float",
    )  # fmt: skip
    add("--use_external_data_format", action="store_true", help="for models above 2 GB")
    for flag in ("--simplify", "--disable_mha_qdq", "--dq_only"):
        add(flag, action="store_true")
    add("--block_size", type=int, help="for int4")
    add("--opset", type=int)
    add("--preset", choices=list(PRESETS), help="a named choice of layers, see --show-defaults")
    add(
        "--no-run", "--no_run", dest="run", action="store_false", help="do not run the result, if TensorRT is installed"
    )
    add("--json", action="store_true", help="print JSON")
    add("--show-defaults", action="store_true", help="show the defaults of ModelOpt and the presets")
    return parser


def _modelopt_arguments(options: argparse.Namespace, declared: ModelSignature) -> dict[str, Any]:
    mode, method = options.quantize_mode, options.calibration_method
    passed = {name: getattr(options, name) for name in FORWARDED_OPTIONS}
    passed = {name: value for name, value in passed.items() if value not in (None, False)}
    passed |= {name: _split_lists(getattr(options, name)) for name in LIST_OPTIONS if getattr(options, name)}
    check_arguments({name: value for name, value in passed.items() if name != "nodes_to_exclude"}, "--")
    for option in LIST_OPTIONS[:2]:
        for op in set(passed.get(option, ())) - declared.operators:
            logger.warning("--%s: the model has no %r; %s", option, op, suggest_names(op, declared.operators))
    if options.trt_plugins:
        passed["trt_plugins"] = [str(resolve_path(file)) for file in _split_lists(options.trt_plugins)]
    methods = CALIBRATION_METHODS[mode]
    if method is not None and method not in methods:
        hint = suggest_names(method, methods)
        raise UserError(f"--calibration_method: {' or '.join(methods)} for {mode}, but got {method!r}; {hint}")
    providers = _split_lists(options.calibration_eps)
    for name in providers:
        kind, _, number = name.partition(":")
        if not (name in ("NvTensorRtRtx", "trt", "cpu") or (kind in ("cuda", "dml") and number.isdecimal())):
            raise UserError(f"--calibration_eps: expected any of {', '.join(KNOWN_PROVIDERS)}, but got {name!r}")
    if options.preset is not None:
        preset, key = PRESETS[options.preset], "op_types_to_quantize"
        if preset.expect:
            logger.warning("preset %s: %s", options.preset, preset.expect)
        if preset.op_types and mode != "int8":
            raise UserError(f"--preset {options.preset} is for --quantize_mode int8, but got {mode}")
        added = [op for op in preset.op_types if op in declared.operators]
        if not preset.op_types:
            key, where = "nodes_to_exclude", f"preset {options.preset}"
            added = node_name_patterns(match_skip_names(declared.nodes, preset.skip_names, where))
        passed[key] = [*passed.get(key, ()), *added]
    return {
        "quantize_mode": mode,
        "calibration_method": method or methods[0],
        "calibration_eps": providers,
        "log_level": "WARNING",
        **passed,
    }


def _split_lists(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in value.split(",") if part]
