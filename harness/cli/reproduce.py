"""`qdq reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import add_to_sys_path, rewrite_advice
from harness.cli.compare import compare
from harness.cli.report import report_afterwards, report_run
from harness.errors import UserError, prefix_file

__all__ = ["reproduce"]


def reproduce(
    folder: Annotated[Path, typer.Argument(help="Results folder of an experiment.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Results folder of the repetition [default: FOLDER-again].")] = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder that relative paths of the experiment start from [default: here].")
    ] = None,
) -> None:
    """Run the experiment of a results folder again, into a new folder, and print how the two compare.

    Everything is composed, calibrated, searched and confirmed anew. Run the same command again to go on after an
    interruption.

    Example: `qdq reproduce results/quickstart --out out/again`
    """
    from harness.config.experiment import load_experiment
    from harness.pipeline.runner import run_experiment
    from harness.report.load.results import load
    from harness.task_setup.preflight import check_experiment
    from harness.terminal_progress import TerminalProgress

    load(folder)  # before hours are spent on something that cannot be compared
    again = folder.resolve().with_name(f"{folder.resolve().name}-again") if out is None else out
    if again.resolve() == folder.resolve():
        raise UserError(f"--out {again}: is the folder to be reproduced; use another one")
    config = load_experiment(folder / "experiment.yaml", (base or Path.cwd()).resolve())
    add_to_sys_path(config.base_dir)
    try:
        with prefix_file(folder / "experiment.yaml"):
            remarks = check_experiment(config)
    except UserError as error:
        raise UserError(
            f"{error}\nrelative paths of the experiment start from {config.base_dir}; see --base"
        ) from error
    for remark in remarks:
        typer.echo(remark, err=True)

    def show_comparison() -> None:
        typer.echo("")
        compare(folder, again)

    with rewrite_advice(), report_afterwards(show_comparison), report_run(again), TerminalProgress() as terminal:
        run_experiment(config, out=again, observer=terminal)
