"""`qdq regions`, `qdq explain` and `qdq zoo`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import (
    BaseOption,
    DimOption,
    JsonOption,
    ModelArgument,
    ParamOption,
    ShapeOption,
    add_to_sys_path,
    backend_spec,
    count_option,
    echo,
    explain_relative_paths,
    parse_sizes,
    short_path,
)
from harness.errors import UserError
from harness.paths import check_path

__all__ = ["explain", "regions", "zoo"]


def regions(
    model: ModelArgument,
    shape: ShapeOption = None,
    dim: DimOption = None,
    dialect: Annotated[str, typer.Option(help="Dialect whose rules decide which Q/DQ pairs are legal.")] = "openvino",
    max_sequence_size: Annotated[int, count_option("Length of the longest sequence in one region.")] = 10,
    include_all_regions: Annotated[
        bool, typer.Option("--include-all-regions", help="Include regions without quantizable operators.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Include the names of nodes and boundary tensors.")
    ] = False,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option(help="Draw the graph to this file, regions coloured by pattern.", show_default=False)
    ] = None,
) -> None:
    """Show regions, patterns and insertion points of a model.

    Example: `qdq regions zoo:resnet18 --html resnet18.html`
    """
    from harness.analysis.region_report import inspect_regions
    from harness.graph.partition.summary import TreeOptions

    found = inspect_regions(model, **parse_sizes(shape, dim), dialect=dialect, max_sequence_size=max_sequence_size)
    if html is not None:
        try:
            html.write_text(found.html(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {html}: cannot be written ({error.strerror or error})") from error
        echo(f"{html}: open it in a browser; it needs no network", err=True)
    if as_json:
        echo(json.dumps(found.data(), indent=1))
    elif html is None:
        echo("\n".join(found.lines(TreeOptions(include_all=include_all_regions, verbose=verbose))))


def explain(
    model: Annotated[
        str, typer.Argument(help="ONNX file, zoo:NAME or assets:PATH; or a results folder.", show_default=False)
    ],
    row: Annotated[
        str | None, typer.Argument(help="Row of the results folder's main table.", show_default=False)
    ] = None,
    backend: Annotated[str, typer.Option(help="Runtime: openvino, onnxruntime, tensorrt, trtexec.")] = "openvino",
    param: ParamOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    against: Annotated[
        str | None, typer.Option(help="A second model; show what runs differently in it.", show_default=False)
    ] = None,
    base: BaseOption = None,
    top: Annotated[int, count_option("Maximum length of each list.")] = 10,
    runs: Annotated[int, count_option("Number of inferences that times are averaged over.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Show how a runtime executes a Q/DQ model: quantized layers, unfused pairs, and the reasons.

    With a results folder and a row, measure instead the effect of each part of that row's placement.

    Example: `qdq explain out/mine/TASK/models/float.onnx --against out/mine/TASK/models/DIGEST.onnx`
    """
    check_path(Path(model))
    if row is not None or Path(model).is_dir():
        _explain_row(short_path(Path(model)), row, (base or Path.cwd()).resolve())
        return
    from harness.explain.model_report import change_lines, compare_reports, explain_model, report_data, report_lines

    spec, sizes = backend_spec(backend, param), parse_sizes(shape, dim)
    found = explain_model(model, spec, runs, **sizes)
    if against is None:
        echo(json.dumps(report_data(found), indent=1) if as_json else _to_text(report_lines(found, top)))
        return
    other = explain_model(against, spec, runs, **sizes)
    changes = compare_reports(found, other)
    if as_json:
        rows = [{"name": change.name, "before": change.before, "after": change.after} for change in changes]
        echo(json.dumps({"before": report_data(found), "after": report_data(other), "changes": rows}, indent=1))
        return
    echo(_to_text([*report_lines(other, top), "", *change_lines(found, other, changes, top)]))


def _to_text(lines: Iterable[str]) -> str:
    from harness.text import printable

    return "\n".join(map(printable, lines))


def _explain_row(folder: Path, row: str | None, base: Path) -> None:
    from harness.explain.render import explain_and_save
    from harness.terminal_progress import TerminalProgress

    if row is None:
        raise UserError(f"{folder}: a results folder needs a row: qdq explain {folder} ROW (see qdq report)")
    add_to_sys_path(base)
    with explain_relative_paths(base), TerminalProgress() as terminal:
        echo("\n".join(explain_and_save(folder, row, base=base, observer=terminal)))


def zoo(
    name: Annotated[str, typer.Argument(help="Name of a zoo model; see qdq list.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.", show_default=False)],
) -> None:
    """Write a zoo model (made by code, seeded, no download).

    Example: `qdq zoo resnet18 -o resnet18.onnx`
    """
    from harness import zoo as models

    echo(f"{models.write_model(name, output)}: {models.model_names()[name]}")
