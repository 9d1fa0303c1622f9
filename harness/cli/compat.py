"""Commands with ModelOpt's options (`autotune`, `ptq`) or spec files (`quantize`, `evaluate`, `gen-trt-engine`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.errors import ErrorCollector, UserError, prefix_file, prefix_key
from harness.cli.common import (
    ExitStatus,
    JsonOption,
    ParamOption,
    RunOption,
    add_to_sys_path,
    backend_spec,
    count_option,
    echo,
    print_json,
    print_remarks,
    print_table,
    replace_change_advice,
    report_check,
    short_path,
)
from harness.cli.run import run_and_report

if TYPE_CHECKING:
    from harness.compat.tao_specs.quantize import QuantizationResult

HELP_OPTIONS = frozenset({"-h", "--help"})
STATE_FILE = "autotuner_state.yaml"


def autotune(context: typer.Context) -> None:
    """Search the fastest placement for one model, and write the file to `OUTPUT_DIR/ship`; Ctrl-C keeps the best file.

    No GPU is needed. The flags are those of ModelOpt's autotune. Flags of its procedure (`--mode`,
    `--schemes_per_region`, ...) select that procedure, region by region, with its files. Without them the command does
    the same as `qdq run` for one model.

    Example: `qdq autotune --onnx_path model.onnx --output_dir out/model`

    With a loss of at most half a point:
    `qdq autotune --onnx_path model.onnx --max_drop 0.5 --test_data test.npz --calibration_data c.npz`
    """
    from harness.base.paths import WAIT_VARIABLE, resolve_path
    from harness.base.terminal_progress import TerminalProgress
    from harness.compat.autotune_experiment import command_experiment, region_flags
    from harness.compat.modelopt_autotune.__main__ import autotune as run_regions
    from harness.compat.modelopt_autotune.settings import check_counts, get_parser, parse_arguments
    from harness.run.prepare.preflight import check_experiment

    prog = "qdq autotune"
    if not HELP_OPTIONS.isdisjoint(context.args):
        get_parser(prog).print_help()
        return
    _require_option(context.args)
    options = parse_arguments(context.args, prog)
    if not region_flags(context.args):
        check_counts(options)
        if (Path(options.output_dir) / STATE_FILE).exists():
            raise UserError(
                f"--output_dir {options.output_dir}: contains output of ModelOpt's procedure ({STATE_FILE}); continue "
                "it with --mode default, or choose another folder"
            )
        if options.wait is not None:
            os.environ[WAIT_VARIABLE] = f"{options.wait}"
        errors = ErrorCollector()
        for option in ("test_data", "calibration_data"):
            if (given := getattr(options, option)) is not None:
                with errors.collect(), prefix_key(f"--{option}"):
                    resolve_path(given, None)
        with errors.collect():
            config = command_experiment(options)
        errors.raise_all()
        print_remarks(check_experiment(config, Path(options.output_dir)))
        with replace_change_advice("--output_dir"):
            run_and_report(config, Path(options.output_dir), anytime=True, as_json=options.json)
        return
    with TerminalProgress() as terminal:
        try:
            run_regions(context.args, prog, terminal)
        except KeyboardInterrupt as stop:  # it has printed what is kept
            raise typer.Exit(ExitStatus.INTERRUPTED) from stop


def _require_option(arguments: Sequence[str]) -> None:
    """Raise `UserError` if a command line begins with a file instead of an option."""
    if arguments and not arguments[0].startswith("-"):
        raise UserError(f"{arguments[0]}: the model needs its option; did you mean --onnx_path {arguments[0]}?")


def quantize(
    spec: Annotated[Path, typer.Argument(help="Spec file with a section 'quantize'.")],
    run: RunOption = True,
    as_json: JsonOption = False,
) -> None:
    """Quantize a model by a spec file of TAO's static PTQ, with ModelOpt or with a precision for each layer.

    The file is run as by `qdq insert`, if the runtime of its dialect is installed.

    Example: `qdq quantize experiments/specs/quantize.yaml`
    """
    from harness.compat.tao_specs.quantize import quantize as quantize_model
    from harness.compat.tao_specs.spec import read_spec, require_section

    found, base = read_spec(spec), spec.resolve().parent
    add_to_sys_path(base)
    section = require_section(found.quantize, "quantize", str(spec))
    with prefix_file(spec):
        folder = base / (section.results_dir or found.results_dir)
        result = quantize_model(section, found.dataset, base, folder, run=run)
    path = short_path(result.path)
    _print_quantized(path, result, "other layers or skip_names in the spec file", as_json=as_json)
    if as_json:
        return
    building = f"trtexec --onnx={path} --stronglyTyped --saveEngine={path.with_suffix('.engine')}"
    _print_hand_over(result.path, f"qdq gen-trt-engine {spec}" if found.gen_trt_engine else building)


def _print_hand_over(model: Path, command: str, shapes: Mapping[str, str] | None = None) -> None:
    """Print on a machine without a GPU the results of the compiler, and the command for a machine with one."""
    from harness.insight.compiled import hand_over_lines
    from harness.measure.provenance import describe_environment

    if not describe_environment().get("gpus"):
        for line in hand_over_lines(model, command, shapes or {}):
            echo(line)


def ptq(context: typer.Context) -> None:
    """Quantize a model by ModelOpt's PTQ with the options of its command line, without a search or timing.

    Example: `qdq ptq --onnx_path model.onnx --calibration_data calib.npy --output_path model-int8.onnx`
    """
    from harness.compat.tao_specs.ptq import get_parser, run_ptq

    if not HELP_OPTIONS.isdisjoint(context.args):
        get_parser().print_help()
        return
    _require_option(context.args)
    result = run_ptq([re.sub("^--calibration(?==|$)", "--calibration_data", given) for given in context.args])
    if isinstance(result, list):
        echo("\n".join(result))
        return
    other = "--nodes_to_exclude, --op_types_to_exclude"
    _print_quantized(result.path, result, other, as_json="--json" in context.args)


def _print_quantized(path: Path, done: QuantizationResult, remedy: str, *, as_json: bool) -> None:
    """Print the number of quantized operators of each type, the path of the file, and its check.

    Raises:
        typer.Exit: The file is not usable; `remedy` may make another one.
    """
    if as_json:
        print_json({**asdict(done), "path": str(path)})
    else:
        for op, counts in done.layers.items():
            echo(f"{op}\t{', '.join(f'{count} {precision}' for precision, count in counts.items())}")
        echo(f"{path}: calibrated on {done.calibrated_on}")
    report_check(done.check, path, [remedy], as_json=as_json)


def calib_data(
    images: Annotated[Path, typer.Argument(help="Folder of images.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npy file to write.")],
    preprocess: Annotated[str, typer.Option(help="Preprocessing of the deployed model; see qdq list.")],
    samples: Annotated[int, count_option("Maximum number of images; use 500 or more.")] = 512,
    size: Annotated[
        str | None,
        typer.Option(help="Height and width of the model's input, such as 640x640 [default: that of --preprocess]."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="ONNX file whose input has the height and width, instead of --size.")
    ] = None,
) -> None:
    """Preprocess a folder of images and write them to a calibration file.

    Example: `qdq calib-data coco/train2017 -o calib.npy --preprocess ultralytics --samples 500`
    """
    from harness.compat.tao_specs.dataset import ADVISED_SAMPLE_COUNT, sample_shape, write_calibration

    shape = sample_shape(preprocess, size, model)
    count, total = write_calibration(images, output, {"use": preprocess, "params": {}}, shape, samples)
    echo(f"{output}: {count} of {total} images, {count} x {' x '.join(map(str, shape))} float32, {preprocess}")
    if count < ADVISED_SAMPLE_COUNT:
        echo(f"{count} samples are few: {ADVISED_SAMPLE_COUNT} or more are advised for CNNs and ViTs", err=True)


def gen_trt_engine(
    spec: Annotated[Path, typer.Argument(help="Spec file with a section 'gen_trt_engine'.")],
    backend: Annotated[
        str, typer.Option(help="Runtime of the engine: tensorrt, or without TensorRT openvino or onnxruntime.")
    ] = "tensorrt",
    param: ParamOption = None,
) -> None:
    """Build an engine from an ONNX file, in float or with Q/DQ pairs, by a spec file, and write it to a file.

    If the spec file has a file name for TensorRT, the engine of another runtime gets another suffix (model.openvino).

    Example: `qdq gen-trt-engine experiments/specs/gen_trt_engine.yaml --backend openvino`
    """
    from harness.compat.tao_specs.engine import TENSORRT, TensorRTMissing, build_engine, engine_path
    from harness.compat.tao_specs.spec import read_spec, require_section

    found, base = read_spec(spec), spec.resolve().parent
    add_to_sys_path(base)
    section = require_section(found.gen_trt_engine, "gen_trt_engine", str(spec))
    with prefix_file(spec):
        try:
            facts = build_engine(section, found.dataset, base, backend_spec(backend, param))
        except TensorRTMissing as missing:
            _print_hand_over(missing.model, f"qdq gen-trt-engine {spec}", missing.shapes)
            raise
    kind = f"Q/DQ found ({', '.join(facts.precisions)})" if facts.precisions else "float"
    typed = ": strongly typed" if facts.precisions and facts.backend == TENSORRT else ""
    requested = base / section.trt_engine
    path = engine_path(requested, backend)
    echo(f"{short_path(path)}: {facts.backend} {facts.describe.get('version', '')}, {kind}{typed}")
    if path != requested:
        echo(
            f"written as {path.name}, because TensorRT cannot load it; qdq evaluate uses it if a spec file names "
            f"{requested.name} and that file is missing"
        )


def evaluate(
    specs: Annotated[
        list[Path], typer.Argument(help="Spec files with a section 'evaluate'; the first is the baseline.")
    ],
    suggest: Annotated[bool, typer.Option(help="Suggest layers to leave in float if the drop is above 0.01.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Score an engine or a model on labelled images; with several spec files, print the losses relative to the first.

    The metric is mAP for labels of boxes (.json in COCO format), top-1 for labels of classes (.txt with lines
    "FILENAME CLASS").

    Example: `qdq evaluate baseline.yaml quantized.yaml`

    For a classifier: `qdq evaluate experiments/specs/evaluate_classifier.yaml`
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.compat.tao_specs.evaluate import advise_native_layers, compare_evaluations
    from harness.compat.tao_specs.evaluate import evaluate as run
    from harness.compat.tao_specs.spec import read_spec

    specs_by_path = {path: read_spec(path) for path in specs}
    for path in specs:
        add_to_sys_path(path.resolve().parent)
    with TerminalProgress() as terminal:
        results = [run(spec, path, terminal) for path, spec in specs_by_path.items()]
        rows, drops = compare_evaluations(results)
    header = ("spec", "engine or model", "precision", "metric [95 %]", "drop [95 %]", "note")
    print_table(header, rows, as_json=as_json)
    models: set[Path | None] = set()
    compared = zip(results, drops, specs_by_path.items(), strict=True)
    for scored, drop, (path, spec) in compared if suggest and not as_json else ():
        if scored.target.model not in models:
            with TerminalProgress() as terminal:
                lines = advise_native_layers(scored, drop, spec.dataset, path.resolve().parent, terminal)
            for line in lines:
                echo(line)
        models.add(scored.target.model)
