"""The command `qdq`: its options, its subcommands by name, and what becomes of errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.autotune import autotune
from harness.cli.calib_data import calib_data
from harness.cli.common import add_to_sys_path
from harness.cli.compare import compare
from harness.cli.doctor import doctor
from harness.cli.evaluate import evaluate
from harness.cli.explain import explain
from harness.cli.gen_trt_engine import gen_trt_engine
from harness.cli.list import list_plugins
from harness.cli.noise import noise
from harness.cli.ptq import ptq
from harness.cli.quantize import quantize
from harness.cli.record import record
from harness.cli.regions import regions
from harness.cli.replay import replay
from harness.cli.report import report
from harness.cli.reproduce import reproduce
from harness.cli.run import run
from harness.cli.sensitivity import sensitivity
from harness.cli.study import study
from harness.cli.trace import trace
from harness.cli.verify import verify
from harness.cli.zoo import zoo
from harness.errors import UserError

__all__ = ["app", "main"]

COMMANDS: dict[str, Callable[..., Any]] = {
    "run": run,
    "autotune": autotune,
    "report": report,
    "compare": compare,
    "trace": trace,
    "reproduce": reproduce,
    "regions": regions,
    "explain": explain,
    "quantize": quantize,
    "ptq": ptq,
    "calib-data": calib_data,
    "gen-trt-engine": gen_trt_engine,
    "evaluate": evaluate,
    "verify": verify,
    "sensitivity": sensitivity,
    "record": record,
    "replay": replay,
    "study": study,
    "noise": noise,
    "zoo": zoo,
    "list": list_plugins,
    "doctor": doctor,
}
"""In the order of the help text. A command imports what it needs inside its function, so that `qdq --help` is quick."""

RESUMABLE_COMMANDS = ("run", "reproduce", "record", "study")
"""Given again after an interruption, these go on; autotune does too, and says so itself."""

HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="qdq",
    help="Finds where Q/DQ pairs belong in an ONNX model, by measured latency and measured accuracy.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=HELP_SETTINGS,
)
PASSTHROUGH_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""For a command that reads its own arguments."""
for _name, _function in COMMANDS.items():
    app.command(name=_name, context_settings=PASSTHROUGH_SETTINGS if _name in ("autotune", "ptq") else HELP_SETTINGS)(
        _function
    )


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"qdq-bench {version('qdq-bench')}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the parts log.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    add_to_sys_path(Path.cwd())
    context.with_resource(_log_to_stderr(verbose))
    context.with_resource(_report_interrupt(context.invoked_subcommand))


@contextmanager
def _report_interrupt(command: str | None) -> Iterator[None]:
    """Say of Ctrl-C what becomes of the work; typer would end without a word."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "; what was measured is kept: the same command goes on" if command in RESUMABLE_COMMANDS else ""
        typer.echo(f"qdq: interrupted{kept}", err=True)
        raise


@contextmanager
def _log_to_stderr(verbose: bool) -> Iterator[None]:
    """Show what the parts log while a command runs: our own warnings, others' errors; with `verbose` all."""
    root, handler = logging.getLogger(), _StderrHandler()
    before = root.level
    if verbose:
        root.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler.addFilter(lambda r: r.levelno >= logging.ERROR or r.name.partition(".")[0] in ("harness", "search"))
        handler.setLevel(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


class _StderrHandler(logging.Handler):
    """Writes to what standard error is at the time: progress bars put themselves in its place. Says nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if text not in self._said:
            self._said.add(text)
            typer.echo(text, err=True)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: returns after success; mistakes of the user end with one message and exit code 2."""
    try:
        app(args=arguments)
    except SystemExit as end:  # typer ends so after success too
        if end.code:
            raise
    except UserError as error:
        typer.echo(f"qdq: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
