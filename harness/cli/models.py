"""`qdq inspect regions`, `qdq explain`, `qdq inspect check` and `qdq zoo`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.base.errors import UserError
from harness.base.paths import check_path
from harness.base.text import printable
from harness.cli.common import (
    BaseOption,
    DimOption,
    ExitStatus,
    JsonOption,
    ModelArgument,
    ParamOption,
    ShapeOption,
    TargetOption,
    add_to_sys_path,
    count_option,
    echo,
    explain_relative_paths,
    parse_sizes,
    print_json,
    short_path,
)

if TYPE_CHECKING:
    from harness.insight.compiled import CompiledReport


def regions(
    model: ModelArgument,
    shape: ShapeOption = None,
    dim: DimOption = None,
    dialect: Annotated[
        str, typer.Option(help="Dialect (form of Q/DQ pairs of one runtime) whose placement rules apply; see qdq list.")
    ] = "openvino",
    max_sequence_size: Annotated[int, count_option("Largest number of nodes of a sequence in one region.")] = 10,
    include_all_regions: Annotated[
        bool, typer.Option("--include-all-regions", help="Include regions without quantizable operators.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Include the names of nodes and of the tensors between regions.")
    ] = False,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option(help="HTML page to write, with the graph and regions coloured by pattern.")
    ] = None,
) -> None:
    """Show the regions and patterns into which a model is divided, and the insertion points for Q/DQ pairs.

    Example: `qdq inspect regions zoo:resnet18 --html resnet18.html`
    """
    from harness.insight.region_report import inspect_regions

    report = inspect_regions(model, **parse_sizes(shape, dim), dialect=dialect, max_sequence_size=max_sequence_size)
    if html is not None:
        _write_page(html, report.html())
    if as_json:
        print_json(report.data())
    elif html is None:
        echo("\n".join(report.lines(include_all=include_all_regions, verbose=verbose)))


def _write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror or error})") from error
    echo(f"{path}: open it in a browser; it needs no network", err=True)


def explain(
    model: Annotated[
        str, typer.Argument(help="ONNX file, folder to deploy, zoo:NAME or assets:PATH; or a results folder.")
    ],
    row: Annotated[str | None, typer.Argument(help="With a results folder: row of its main table.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Runtime: openvino, onnxruntime, onnxruntime_web, tensorrt, trtexec; or rtx_compile (only compiles) "
            "[default: for a shipped or exported file, the runtime of its measurement with its options; else openvino]."
        ),
    ] = None,
    param: ParamOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    against: Annotated[
        str | None, typer.Option(help="Second model; also show the layers that run differently in it.")
    ] = None,
    base: BaseOption = None,
    top: Annotated[int, count_option("Maximum length of each list.")] = 10,
    runs: Annotated[int, count_option("Number of inferences over which times are averaged.")] = 50,
    target: TargetOption = None,
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(help="HTML page to write, only for the backend rtx_compile.")] = None,
) -> None:
    """Show how a runtime executes a Q/DQ model: quantized layers, and pairs that are not fused with the reasons.

    With a results folder and a row, measure the effect of each part of that row's placement instead.

    Example: `qdq explain out/mine/TASK/models/float.onnx --against out/mine/TASK/models/DIGEST.onnx`
    """
    from harness.results.deploy_folder import bundle_model, is_bundle

    check_path(Path(model))
    if row is None and is_bundle(Path(model)):
        model = str(bundle_model(Path(model)))
    if row is not None or Path(model).is_dir():
        _explain_row(short_path(Path(model)), row, (base or Path.cwd()).resolve(), as_json=as_json)
        return
    from harness.config.yaml_loader import parse_params
    from harness.insight.compiled import compile_report
    from harness.insight.model_report import (
        change_lines,
        choose_backend,
        compare_precisions,
        explain_model,
        report_lines,
    )
    from harness.plugins.api import capabilities_of
    from harness.plugins.registry import load_plugin

    params = parse_params([*(param or ()), *([f"target={target}"] if target else ())])
    spec, sizes = choose_backend(Path(model), backend, params), parse_sizes(shape, dim)
    if capabilities_of(load_plugin("benchmarker", spec.use)).compile_only:
        reports = [compile_report(each, spec, **sizes) for each in (model, against) if each is not None]
        _explain_compiled(reports, top, as_json=as_json, html=html)
        return
    if html is not None:
        raise UserError("--html is for backend rtx_compile; qdq inspect regions --html draws the graph of any model")
    report = explain_model(model, spec, runs, **sizes)
    if against is None:
        _print_report(asdict(report), report_lines(report, top), as_json=as_json)
        return
    other = explain_model(against, spec, runs, **sizes)
    changes = compare_precisions(report.precision, other.precision)
    rows = [{"name": name, "before": old, "after": new} for name, old, new in changes]
    values = {"before": asdict(report), "after": asdict(other), "changes": rows}
    lines = [*report_lines(other, top), "", *change_lines(report, other, top)]
    _print_report(values, lines, as_json=as_json)


def _explain_compiled(reports: Sequence[CompiledReport], top: int, *, as_json: bool, html: Path | None) -> None:
    """Print the report of one model, or of the second model with the differences to the first."""
    from harness.insight.model_report import compare_precisions

    before, after = reports[0], reports[-1]
    if html is not None:
        _write_page(html, after.html())
    values = after.data() if len(reports) == 1 else [report.data() for report in reports]
    _print_report(values, after.lines(top), as_json=as_json)
    for name, old, new in () if as_json else compare_precisions(before.precision, after.precision):
        echo(f"  {name}: {old or 'absent'} -> {new or 'absent'}")


def check(
    model: ModelArgument,
    dialect: Annotated[str, typer.Option(help="Dialect whose rules apply: tensorrt or tensorrt_rtx.")] = "tensorrt",
    target: TargetOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a Q/DQ file by the rules of TensorRT and, with the extra rtx, by NVIDIA's compiler; no GPU is needed.

    The exit status is 1 if the file is refused.

    Example: `qdq inspect check model.onnx --dialect tensorrt`
    """
    from harness.insight.compiled import check_file

    check_path(Path(model))
    verdict = check_file(model, dialect, target or "sm89", **parse_sizes(shape, dim))
    _print_report(verdict.data(), verdict.lines(), as_json=as_json)
    if verdict.is_refused:
        raise typer.Exit(ExitStatus.DOES_NOT_HOLD)


def _print_report(values: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a report as JSON values or as lines."""
    if as_json:
        print_json(values)
    else:
        echo("\n".join(map(printable, lines)))


def _explain_row(folder: Path, row: str | None, base: Path, *, as_json: bool) -> None:
    from harness.base.terminal_progress import TerminalProgress
    from harness.insight.render import explain_and_save

    if row is None:
        raise UserError(f"{folder}: a results folder needs a row: qdq explain {folder} ROW (see qdq report)")
    add_to_sys_path(base)
    with explain_relative_paths(base), TerminalProgress() as terminal:
        path, lines = explain_and_save(folder, row, base=base, observer=terminal)
    echo(path.read_text(encoding="utf-8") if as_json else "\n".join(lines))


def zoo(
    name: Annotated[str, typer.Argument(help="Name of a model of the zoo; see qdq list.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.")],
) -> None:
    """Write a model of the zoo, which code makes without a download, to an ONNX file.

    Example: `qdq zoo resnet18 -o resnet18.onnx`
    """
    from harness import zoo as models

    echo(f"{models.write_model(name, output)}: {models.model_names()[name]}")
