"""The command `qdq`: global options, subcommands, logging and error messages."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from harness.base.errors import DoesNotHold, UserError
from harness.base.paths import HOST_VARIABLE, TRUST_VARIABLE, WAIT_VARIABLE, check_path
from harness.cli.bench import (
    agreement,
    bench_check,
    bench_export,
    bench_leaderboard,
    bench_run,
    bench_score,
    bench_surrogate,
    bench_tasks,
    noise,
    record,
    recover,
    replay,
    sensitivity,
    study,
)
from harness.cli.common import ExitStatus, add_to_sys_path, echo
from harness.cli.compat import autotune, calib_data, evaluate, gen_trt_engine, ptq, quantize
from harness.cli.doctor import doctor, list_plugins, tools
from harness.cli.models import check, explain, regions, zoo
from harness.cli.placements import apply, import_placement, insert
from harness.cli.report import report
from harness.cli.run import init, run, verify

#: Commands in the order of the help text; the first of two words is a group. Commands import modules inside their
#: functions, to keep `qdq --help` fast.
COMMANDS: dict[str, Callable[..., Any]] = {
    "autotune": autotune,
    "init": init,
    "run": run,
    "report": report,
    "verify": verify,
    "explain": explain,
    "insert": insert,
    "apply": apply,
    "import": import_placement,
    "evaluate": evaluate,
    "inspect regions": regions,
    "inspect sensitivity": sensitivity,
    "inspect check": check,
    "inspect agreement": agreement,
    "inspect recover": recover,
    "bench record": record,
    "bench replay": replay,
    "bench study": study,
    "bench noise": noise,
    "bench tasks": bench_tasks,
    "bench run": bench_run,
    "bench check": bench_check,
    "bench score": bench_score,
    "bench surrogate": bench_surrogate,
    "bench leaderboard": bench_leaderboard,
    "bench export": bench_export,
    "zoo": zoo,
    "list": list_plugins,
    "doctor": doctor,
    "tools": tools,
    "quantize": quantize,
    "ptq": ptq,
    "calib-data": calib_data,
    "gen-trt-engine": gen_trt_engine,
}
#: Commands that continue after an interruption.
RESUMABLE_COMMANDS = ("run", "autotune", "bench record", "bench study", "bench run")
#: Commands that measure and keep nothing of an interrupted run.
RESTARTED_COMMANDS = (
    "verify", "explain", "inspect sensitivity", "inspect recover", "inspect agreement", "bench noise",
)  # fmt: skip
#: Names of TAO Toolkit and ModelOpt, which `qdq --help --all` lists.
HIDDEN_COMMANDS = frozenset({"quantize", "ptq", "calib-data", "gen-trt-engine"})


class _WithoutFlagTypes:
    """Mixin for commands whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class _Command(_WithoutFlagTypes, TyperCommand):
    pass


class _Group(_WithoutFlagTypes, TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta.setdefault("words", [word for word in args if not word.startswith("-")])
        if "--all" in args and not {"-h", "--help"}.isdisjoint(args):
            for command in self.commands.values():
                command.hidden = False
            args = [word for word in args if word != "--all"]
        found: list[str] = super().parse_args(ctx, args)
        return found


HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="qdq",
    cls=_Group,
    help="Find the best placement of Q/DQ pairs in an ONNX model, by measured latency and accuracy.",
    epilog="Exit status: 0 done, or the result holds; 1 a result does not hold; 2 wrong usage or input; 3 internal "
    "error; 130 interrupted. Names of TAO Toolkit and ModelOpt: qdq --help --all.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings=HELP_SETTINGS,
)
#: Settings of commands that parse their arguments themselves.
PASSTHROUGH_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
#: Commands that load plug-ins. The two that parse their arguments themselves read only the environment variable.
TRUSTING_COMMANDS = frozenset(COMMANDS) - {
    "autotune",
    "bench export",
    "bench leaderboard",
    "bench tasks",
    "doctor",
    "inspect check",
    "list",
    "ptq",
    "report",
    "tools",
    "zoo",
}
#: Commands that write results.
RESULTS_COMMANDS = frozenset({"run", "apply", "bench record", "report"})
#: Commands that time engines; `autotune` parses its own `--wait`.
TIMING_COMMANDS = frozenset({
    "run", "apply", "verify", "explain", "inspect sensitivity", "inspect recover", "inspect agreement", "bench record",
    "bench noise",
})  # fmt: skip


#: Shared options: the environment variable that each sets, because child processes read these, and its commands.
SHARED_OPTIONS: dict[str, tuple[str, frozenset[str], Any]] = {
    "trust_plugins": (
        TRUST_VARIABLE,
        TRUSTING_COMMANDS,
        Annotated[
            bool,
            typer.Option(
                "--trust-plugins",
                help="Allow code that a file names: module:Class, programs, libraries "
                "[environment: QDQ_TRUST_PLUGINS=1].",
            ),
        ],
    ),
    "wait": (
        WAIT_VARIABLE,
        TIMING_COMMANDS,
        Annotated[
            float | None,
            typer.Option(
                metavar="SECONDS",
                min=0,
                help="Longest wait for other timing runs on this machine [default: no limit; environment: QDQ_WAIT].",
            ),
        ],
    ),
    "with_host": (
        HOST_VARIABLE,
        RESULTS_COMMANDS,
        Annotated[
            bool,
            typer.Option(
                "--with-host",
                help="Keep absolute paths and the names of user and host in the results "
                "[environment: QDQ_WITH_HOST=1].",
            ),
        ],
    ),
}


def _with_shared_options(name: str, command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that also checks its paths and has the shared options."""
    signature, shared = inspect.signature(command, eval_str=True), list[inspect.Parameter]()
    for option, (_, commands, annotation) in SHARED_OPTIONS.items():
        if name in commands:
            default = False if annotation.__origin__ is bool else None
            kind = inspect.Parameter.KEYWORD_ONLY
            shared.append(inspect.Parameter(option, kind, default=default, annotation=annotation))

    @functools.wraps(command)
    def run(**arguments: Any) -> Any:
        for each in shared:
            value = arguments.pop(each.name)
            if value not in (None, False):
                os.environ[SHARED_OPTIONS[each.name][0]] = "1" if value is True else f"{value}"
        add_to_sys_path(Path.cwd())
        for value in arguments.values():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path):
                    check_path(path)
        return command(**arguments)

    parameters = [*signature.parameters.values(), *shared]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


#: Lines of the short help.
SUMMARIES = {
    "autotune": "Search the fastest placement for one model",
    "init": "Write a first experiment file for a model",
    "run": "Run an experiment, or reproduce a results folder",
    "report": "Print tables; compare two folders; trace a cell",
    "verify": "Measure a file again and compare it with the tables",
    "explain": "Show fused layers, and pairs without effect",
    "insert": "Write a model with the Q/DQ pairs of a rule",
    "apply": "Apply a shipped placement to a retrained model",
    "import": "Convert a Q/DQ file of another tool",
    "evaluate": "Score a model or engine on labelled images",
    "zoo": "Write a model that code makes",
    "list": "List plug-ins and zoo models",
    "doctor": "Show the runtimes that work on this machine",
    "tools": "Install tools that need a separate environment",
}
GROUPS = {
    "": app,
    "inspect": typer.Typer(cls=_Group, help="Look at regions, sensitivities, compiler, recovery", no_args_is_help=True),
    "bench": typer.Typer(cls=_Group, help="Record tables, replay and compare searchers", no_args_is_help=True),
}
for _name, _function in COMMANDS.items():
    _group, _, _word = _name.rpartition(" ")
    if _group and not GROUPS[_group].registered_commands:
        app.add_typer(GROUPS[_group], name=_group, context_settings=HELP_SETTINGS)
    GROUPS[_group].command(
        name=_word,
        cls=_Command,
        hidden=_name in HIDDEN_COMMANDS,
        short_help=SUMMARIES.get(_name),
        context_settings=PASSTHROUGH_SETTINGS if _name in ("autotune", "ptq") else HELP_SETTINGS,
    )(_with_shared_options(_name, _function))


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        echo(f"qdq-bench {version('qdq-bench')}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    context.with_resource(_log_to_stderr(verbose))
    context.with_resource(_report_interrupt(context.meta["words"]))


@contextmanager
def _report_interrupt(words: Sequence[str]) -> Iterator[None]:
    """Print after Ctrl-C whether the work can be continued, and keep typer from choosing the exit status of errors.

    Raises:
        RuntimeError: A read came to its end; typer would take an `EOFError` for the end of the user's input.
    """
    try:
        yield
    except KeyboardInterrupt:
        advice, names = "", {words[0], " ".join(words[:2])} if words else set()
        if not names.isdisjoint(RESUMABLE_COMMANDS):
            advice = "; measurements are kept: run the same command again to continue"
        elif not names.isdisjoint(RESTARTED_COMMANDS):
            advice = "; its measurements are not kept: the same command starts from the beginning"
        echo(f"qdq: interrupted{advice}", err=True)
        raise
    except SystemExit as end:
        if end.code == ExitStatus.USAGE:
            raise
        code = end.code or 0
        raise UserError(f"a plug-in or a library called sys.exit({code!r}) before the command was finished") from end
    except EOFError as error:
        raise RuntimeError("a pipe or a file ended too early") from error


@contextmanager
def _log_to_stderr(verbose: bool) -> Iterator[None]:
    """Print log messages of a command: own warnings and errors of other packages; with `verbose` all messages."""
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
    """Handler that writes each message once, to the current `sys.stderr`, which progress bars replace."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if text not in self._printed:
            self._printed.add(text)
            echo(text, err=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an exception ends it with a message and an `ExitStatus`.

    Args:
        arguments: Arguments of `qdq`; None: those of the process.
    """
    # With the default threshold, garbage collection takes an eighth of the time of the start of a run.
    gc.set_threshold(50_000, 20, 20)
    try:
        app(args=arguments)
    except SystemExit as end:  # typer raises it after success too
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(ExitStatus.PIPE_CLOSED)
        if end.code:
            raise
    except UserError as error:
        echo(f"qdq: {error}", err=True)
        sys.exit(ExitStatus.DOES_NOT_HOLD if isinstance(error, DoesNotHold) else ExitStatus.USAGE)
    except Exception as error:  # the exit status of Python would be that of a result that does not hold
        if isinstance(error, OSError) and error.filename is not None:  # of a file that no reader or writer explains
            echo(f"qdq: {error.filename}: {error.strerror}", err=True)
            sys.exit(ExitStatus.USAGE)
        echo(f"{traceback.format_exc()}qdq: internal error, please report it: {type(error).__name__}", err=True)
        sys.exit(ExitStatus.INTERNAL)


if __name__ == "__main__":
    main()
