"""`qdq insert`, `qdq import` and `qdq apply`: placements without a search."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.base.errors import UserError
from harness.base.paths import check_path
from harness.cli.common import (
    BaseOption,
    DimOption,
    JsonOption,
    ModelArgument,
    ParamOption,
    RunOption,
    ShapeOption,
    add_to_sys_path,
    backend_spec,
    count_option,
    echo,
    explain_relative_paths,
    parse_sizes,
    print_json,
    print_remarks,
    replace_change_advice,
    report_check,
    short_path,
)
from harness.cli.run import run_and_report

if TYPE_CHECKING:
    from harness.config.sections import PluginSpec

DEFAULT_SAMPLES = 48
DEFAULT_BUILDS = 5

CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="Calibration data: a .npy or .npz file, a folder of such files, or a folder of images."),
]
PreprocessOption = Annotated[str | None, typer.Option(help="Preprocessing of images; see qdq list.")]
MethodOption = Annotated[
    str, typer.Option(help="Range estimator of activations: minmax, mean, percentile, entropy, mse, l2.")
]


BackendOption = Annotated[
    str, typer.Option("--backend", help="Runtime for which Q/DQ pairs are written; its device may be absent.")
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="Quantized precision: int8, fp8, fp8e5m2, mixed.")]
SamplesOption = Annotated[int, count_option("Maximum number of calibration samples.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.")]


def insert(
    model: ModelArgument,
    output: OutputOption,
    placement: Annotated[
        str,
        typer.Option(help="Fixed placement (all, linear, movers, ...), folder to deploy (ship/NAME), or Q/DQ file."),
    ] = "linear",
    backend: BackendOption = "openvino",
    param: ParamOption = None,
    precision: PrecisionOption = "int8",
    calibration: CalibrationOption = None,
    preprocess: PreprocessOption = None,
    method: MethodOption = "minmax",
    samples: SamplesOption = DEFAULT_SAMPLES,
    shape: ShapeOption = None,
    dim: DimOption = None,
    run: RunOption = True,
    as_json: JsonOption = False,
) -> None:
    """Write a model with the Q/DQ pairs of a fixed or a stored placement, without a search and without timing.

    Where the runtime is installed, the file is compared in it with what the file describes. If the result is wrong or
    the runtime refuses the file, it becomes NAME.wrong.onnx, an older NAME.onnx is removed, and the exit status is 1.

    Example: `qdq insert model.onnx --placement linear --calibration calib.npy -o model-int8.onnx`
    """
    described = {**_ranges_config(calibration, preprocess, samples, method), **parse_sizes(shape, dim), "run": run}
    _insert(model, placement, output, backend_spec(backend, param), as_json, precision=precision, **described)


def import_placement(
    file: Annotated[Path, typer.Argument(help="Q/DQ file that another tool made from the model.")],
    model: ModelArgument,
    output: OutputOption,
    ranges: Annotated[bool, typer.Option("--ranges", help="Use the ranges of the file's Q/DQ pairs too.")] = False,
    backend: BackendOption = "openvino",
    param: ParamOption = None,
    precision: PrecisionOption = "int8",
    calibration: CalibrationOption = None,
    preprocess: PreprocessOption = None,
    method: MethodOption = "minmax",
    samples: SamplesOption = DEFAULT_SAMPLES,
    shape: ShapeOption = None,
    dim: DimOption = None,
    run: RunOption = True,
    as_json: JsonOption = False,
) -> None:
    """Convert the Q/DQ file of another tool (NNCF, ModelOpt, ONNX Runtime) to a file from which searches can start.

    Inputs that must be quantized differently for the runtime are listed, each with the reason. The file is run as by
    `qdq insert`.

    Example: `qdq import theirs.onnx model.onnx -o start.onnx`
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    described = {**_ranges_config(calibration, preprocess, samples, method), **parse_sizes(shape, dim), "run": run}
    runtime = backend_spec(backend, param)
    _insert(model, str(file), output, runtime, as_json, precision=precision, ranges=ranges, **described)
    if not as_json:
        params = f"{{path: {output}{', ranges: true' if ranges else ''}}}"
        entry = f"initial: [float, {{use: placement, params: {params}, label: theirs}}]"
        echo(f"to search from it: qdq autotune -m {model} --start {output}, or in an experiment {entry}")


def _ranges_config(calibration: Path | None, preprocess: str | None, samples: int, method: str) -> dict[str, Any]:
    from harness.accuracy.data.arrays import count_samples, is_array_data
    from harness.ship.placements import calibration_config

    found = calibration_config(calibration, preprocess, samples, method, Path.cwd())
    data = found.get("calibration", {}).get("data")
    if calibration is not None and calibration.exists() and is_array_data(data):
        count = count_samples(data)
        if samples < count:
            echo(f"--samples {samples}: the first {samples} of {count} calibration samples are used", err=True)
    return found


def _insert(model: str, placement: str, output: Path, runtime: PluginSpec, as_json: bool, **described: Any) -> None:
    """Write a model with a placement, and print its facts and the differences from another tool's file."""
    from harness.base.terminal_progress import TerminalProgress
    from harness.ship.placements import insert_placement

    check_path(Path(model))
    if output.exists() and output.resolve() == Path(model).resolve():
        raise UserError(f"--output {output}: is the float model; use another file")
    with TerminalProgress() as terminal:
        made = insert_placement(model, placement, output, terminal, backend=runtime, **described)
    remedies = ["another --placement", "qdq autotune, which leaves out placements with a wrong result"]
    if as_json:
        print_json({**asdict(made), "path": str(made.path)})
        report_check(made.check, made.path, remedies, as_json=True)
        return
    channels = f" ({made.channels} with one scale for each channel)" if made.channels else ""
    echo(
        f"{made.path}: {made.pairs} Q/DQ pairs on {made.edges} quantized edges{channels}, dialect {made.dialect}, "
        f"calibrated on {made.calibrated_on}"
    )
    for difference in made.differences:
        echo(str(difference))
    report_check(made.check, made.path, remedies, as_json=False)


def apply(
    result: Annotated[Path, typer.Argument(help="Folder to deploy of an earlier run (RESULTS/ship/NAME).")],
    model: Annotated[
        Path | None, typer.Argument(help="ONNX file of the retrained float model; none with --recipe.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New results folder.")] = None,
    calibration: CalibrationOption = None,
    preprocess: PreprocessOption = None,
    method: Annotated[str | None, typer.Option(help="Range estimator [default: that of the earlier run].")] = None,
    samples: Annotated[
        int | None, count_option("Maximum number of calibration samples [default: that of the earlier run].")
    ] = None,
    builds: Annotated[
        int | None,
        count_option(
            "Number of fresh builds for the comparison with float [default: as the earlier run], or of fresh processes "
            "with --measure [default: 5].",
            least=3,
            most=1_000,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Write the placement as the input of another quantization tool, and list the differences: ort, "
            "modelopt, nncf, olive, tao or ultralytics.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --recipe: script or spec file to write.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="With --recipe: measure the cost of inputs that the tool cannot leave in float."
        ),
    ] = False,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Apply a shipped placement to the next version of its model: calibrate, compare speed and accuracy, ship.

    Runtime, evaluator, bound and calibration are those of the earlier run unless an option changes them. Under a bound
    on accuracy, the recovery of accuracy is repeated for the new weights (row "recovered"). A model of another
    structure is refused with the first difference.

    With --recipe, write the placement as the input of another quantization tool, and list the inputs that it leaves in
    float and the tool may quantize; without --measure their cost is unknown.

    Example: `qdq apply out/mine/ship/NAME retrained.onnx --calibration calib.npy --out out/retrained`, or
    `qdq apply out/mine/ship/NAME --recipe ort --measure -o quantize.py`
    """
    if recipe is not None:
        if output is None or model is not None:
            raise UserError("--recipe: needs the folder to deploy and --output, and no model")
        return _export_recipe(result, recipe, output, builds or DEFAULT_BUILDS, measure=measure, as_json=as_json)
    if model is None or out is None:
        raise UserError("apply: give the retrained model and --out, or --recipe TOOL --output FILE")
    from harness.results.deploy_folder import find_bundle
    from harness.run.prepare.preflight import check_experiment
    from harness.ship.placements import apply_experiment, calibration_config, check_structure

    if not model.is_file():
        raise UserError(f"{model}: no such file")
    start = (base or Path.cwd()).resolve()
    add_to_sys_path(start)
    changes = calibration_config(calibration, preprocess, samples, method, start)
    with explain_relative_paths(start):
        config = apply_experiment(short_path(find_bundle(result)), model, changes, start, builds=builds)
        print_remarks(check_experiment(config, out))
        check_structure(config)
    with replace_change_advice():
        run_and_report(config, out, as_json=as_json)
    if config.searchers and not as_json:
        from harness.report.tables.notes import recovery_notes
        from harness.results.folder import load

        notes = [note for task in load(out).tasks for note in recovery_notes(task)]
        echo("\n".join(notes or ["Recovery: nothing was gained, so the file is the placement as calibrated."]))


def _export_recipe(result: Path, tool: str, output: Path, builds: int, *, measure: bool, as_json: bool) -> None:
    from harness.base.terminal_progress import TerminalProgress
    from harness.results.deploy_folder import find_bundle, read_bundle
    from harness.ship.recipes import export_recipe as export
    from harness.ship.runtime_comparison import COST_SOURCE, measure_edge_costs

    folder = find_bundle(result)
    facts = read_bundle(folder)
    recipe = export(folder, facts, tool, output)
    with TerminalProgress() as terminal:
        timed = recipe.inexpressible if measure else ()
        costs = measure_edge_costs(folder, facts, timed, terminal, builds=builds) if timed else ()
    source = COST_SOURCE if costs else "unknown"
    if as_json:
        print_json(
            {"path": str(output), **asdict(recipe), "costs": [asdict(cost) for cost in costs], "cost_source": source}
        )
        return
    echo(f"{output}: {', '.join(recipe.op_types)}; {len(recipe.excluded)} nodes of these stay in float")
    by_edge = {edge: str(cost) for cost in reversed(costs) for edge in cost.edges}  # the last one is of all
    for edge in recipe.inexpressible:
        place = f"input {edge.slot} of {edge.consumer} ({edge.tensor})"
        echo(f"not expressed: {place} is float; if the tool quantizes it: {by_edge.get(edge, 'cost unknown')}")
    if len(costs) > 1 and len(costs[-1].edges) == len(recipe.inexpressible):
        echo(f"not expressed: all of these: {costs[-1]}")
    if recipe.inexpressible:
        echo(f"costs: {source}{'' if costs else '; --measure times them'}")
