"""`qdq run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import add_to_sys_path
from harness.cli.report import report_run
from harness.errors import prefix_file

__all__ = ["run"]


def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML).", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Results folder [default: results/NAME of the experiment].")] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Where a cell was begun with something else (model, keys, versions, device), keep that beside it and "
            "begin a new section of the table. What only asks for more (a larger budget, one more searcher, seed or "
            "baseline at the end) needs no flag.",
        ),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Attempt what failed once more; costs no budget.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the file and show the plan; run nothing.")] = False,
) -> None:
    """Run an experiment and print its tables. Run the same command again to go on after an interruption.

    Example: `qdq run experiments/quickstart.yaml --out out/quickstart`
    """
    from harness.config.experiment import load_experiment
    from harness.config.plan import plan_tasks
    from harness.pipeline.runner import run_experiment
    from harness.results_dir.ownership import check_ownership
    from harness.task_setup.accuracy_bound import bound_lines
    from harness.task_setup.preflight import check_experiment, check_models
    from harness.task_setup.workload import describe_workload
    from harness.terminal_progress import TerminalProgress

    config = load_experiment(experiment)
    add_to_sys_path(config.base_dir)
    with prefix_file(experiment):
        remarks = check_experiment(config)
    for remark in remarks:
        typer.echo(remark, err=True)
    folder = out or Path("results") / config.experiment
    if check:
        with prefix_file(experiment):
            remarks = check_models(config)
        for remark in remarks:
            typer.echo(remark, err=True)
        if grown := check_ownership(folder, config, accept_changes):
            typer.echo(f"{folder}: {grown}: would go on with what is there")
        for cell in plan_tasks(config):
            typer.echo(f"{cell.name}: {', '.join(search.name for search in cell.runs)}")
        for line in bound_lines(config):
            typer.echo(line)
        typer.echo(describe_workload(config))
        return
    with report_run(folder), TerminalProgress() as terminal:
        run_experiment(
            config,
            out=folder,
            observer=terminal,
            accept_changes=accept_changes,
            retry_failed=retry_failed,
        )
