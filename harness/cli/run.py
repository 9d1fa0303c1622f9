"""`qdq init`, `qdq run` and `qdq verify`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.errors import DoesNotHold, UserError, prefix_file
from harness.cli.common import (
    BaseOption,
    ExitStatus,
    JsonOption,
    TargetOption,
    add_to_sys_path,
    count_option,
    echo,
    explain_relative_paths,
    print_json,
    print_remarks,
    replace_change_advice,
    short_path,
)
from harness.cli.report import report_afterwards, show_report

if TYPE_CHECKING:
    from harness.config.experiment import Experiment

VERDICT_WORDS = {True: "ok", False: "MISMATCH", None: "not measured"}
SPECIAL_VERDICT_WORDS = {("bound", False): "BROKEN", ("latency", None): "inconclusive"}
"""Words by check and result; no recorded value needs to differ if a bound is violated."""


def init(
    model: Annotated[Path, typer.Argument(help="ONNX file of the float model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Experiment file to write; must not exist.")],
    images: Annotated[Path | None, typer.Option(help="Folder of images for calibration and score.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Labels of the images: COCO JSON or CSV.")] = None,
    backend: Annotated[str, typer.Option(help="Runtime to measure on.")] = "openvino",
) -> None:
    """Write a first experiment file for a model, with what its inputs and outputs tell; comments say what to fill in.

    Example: `qdq init model.onnx --images val --labels val.json -o mine.yaml`
    """
    from harness.base.files import write_text
    from harness.run.prepare.study_task import first_experiment

    if output.exists():
        raise UserError(f"{output}: exists; give another --output")
    for option, path in (("--images", images), ("--labels", labels)):
        if path is not None and not path.exists():
            raise UserError(f"{option} {path}: no such file or folder")
    write_text(output, first_experiment(model, output, images, labels, backend))
    echo(f"{output}: check it by: qdq run {output} --check")


def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML); with --reproduce a results folder.")],
    out: Annotated[Path | None, typer.Option(help="Results folder [default: results/NAME of the experiment].")] = None,
    reproduce: Annotated[
        bool,
        typer.Option(
            "--reproduce",
            help="Repeat the experiment of a results folder in a new folder [default: FOLDER-again], and compare both.",
        ),
    ] = False,
    base: BaseOption = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="If the inputs of a task changed (model, keys, versions, device), archive its results and start it "
            "anew. An extension (a larger budget; one more searcher, seed or baseline at the end) needs no flag.",
        ),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try failed candidates once more, without using budget.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the file, models and data and show the plan, without a run.")
    ] = False,
    compile_models: Annotated[
        bool,
        typer.Option(
            "--compile", help="With --check: compile the models of TensorRT tasks without a GPU (needs the extra rtx)."
        ),
    ] = False,
    target: TargetOption = None,
    anytime: Annotated[
        bool,
        typer.Option(
            "--anytime",
            help="Confirm the best placement while the search runs, and write each better file to ship/TASK. Takes up "
            "to a fifth of the time of the search.",
        ),
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="Print progress on standard error, as one JSON object per line.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment and print its tables. To continue after an interruption, run the same command again.

    Example: `qdq run experiments/quickstart.yaml --out out/quickstart`, or
    `qdq run results/quickstart --reproduce --out out/again`
    """
    from harness.config.experiment import load_experiment
    from harness.run.prepare.preflight import check_and_time

    if compile_models and not check:
        raise UserError("--compile: only with --check")
    if reproduce:
        return _reproduce(experiment, out, base, as_json=as_json)
    if base is not None:
        raise UserError("--base: only with --reproduce; paths of an experiment file start from its folder")
    config = load_experiment(experiment)
    add_to_sys_path(config.base_dir)
    folder = out or Path("results") / config.experiment
    with prefix_file(experiment):
        remarks, score_s = check_and_time(config, None if check or accept_changes else folder)
        print_remarks(remarks)
    if check:
        _show_plan(experiment, config, folder, score_s, accept_changes)
        if compile_models:
            _compile_models(experiment, config, target)
        return
    run_and_report(
        config,
        folder,
        accept_changes=accept_changes,
        retry_failed=retry_failed,
        anytime=anytime,
        events=events,
        as_json=as_json,
    )


def run_and_report(
    config: Experiment,
    folder: Path,
    *,
    accept_changes: bool = False,
    retry_failed: bool = False,
    anytime: bool = False,
    events: bool = False,
    as_json: bool = False,
) -> None:
    """Run an experiment, print its tables and write the folder to deploy; for the arguments see `run`."""
    from harness.base.terminal_progress import EventProgress, TerminalProgress
    from harness.run.early_answer import EarlyAnswer
    from harness.run.runner import run_experiment
    from harness.ship.results_bundle import ship_answer

    progress = EventProgress() if events else TerminalProgress()
    started_s, answer = time.monotonic(), ""

    def deliver(found: EarlyAnswer) -> None:
        nonlocal answer
        answer = ship_answer(found, short_path(folder), terminal)
        evaluations = f" and {found.evaluations} evaluations" if found.evaluations else ""
        after = f"after {time.monotonic() - started_s:.0f} s{evaluations}"
        terminal.say(f"{after}: {answer}; the search continues, Ctrl-C keeps this file")

    def show() -> None:
        base = None if config.base_dir is None else short_path(config.base_dir)
        show_report(folder, ship=True, base=base, as_json=as_json)

    with report_afterwards(show), progress as terminal:
        try:
            run_experiment(
                config,
                out=folder,
                observer=terminal,
                accept_changes=accept_changes,
                retry_failed=retry_failed,
                answers=deliver if anytime else None,
            )
        except KeyboardInterrupt:
            if answer:
                terminal.say(answer)
            raise


def _show_plan(
    file: Path, config: Experiment, folder: Path, score_s: Mapping[str, float], accept_changes: bool
) -> None:
    """Check the models and the results folder, and print the tasks, the bounds and an estimate of the time."""
    from harness.config.experiment import plan_tasks
    from harness.results.ownership import check_ownership
    from harness.run.prepare.accuracy import bound_lines
    from harness.run.prepare.model_loader import describe_workload
    from harness.run.prepare.preflight import check_models, check_recorded_inputs

    with prefix_file(file):
        print_remarks(check_models(config))
    if extension := check_ownership(folder, config, accept_changes):
        echo(f"{folder}: {extension}: would continue from the existing results")
    if not accept_changes:
        check_recorded_inputs(config, folder)
    for task in plan_tasks(config):
        echo(f"{task.name}: {', '.join(search.name for search in task.runs)}")
    echo("\n".join([*bound_lines(config), describe_workload(config, score_s)]))


def _compile_models(file: Path, config: Experiment, target: str | None) -> None:
    from harness.insight.compiled import SCOPE_NOTE
    from harness.run.prepare.preflight import compile_tasks
    from harness.runtimes.rtx_compile import DEFAULT_TARGET

    with prefix_file(file):
        for line in compile_tasks(config, target or DEFAULT_TARGET):
            echo(line)
    echo(SCOPE_NOTE)


def _reproduce(folder: Path, out: Path | None, base: Path | None, *, as_json: bool) -> None:
    """Repeat calibration, searches and confirmation of a results folder, and print a comparison of both folders."""
    from harness.base.terminal_progress import TerminalProgress
    from harness.config.experiment import load_experiment
    from harness.results.folder import load
    from harness.run.prepare.preflight import check_experiment
    from harness.run.runner import run_experiment

    load(folder)  # fails before hours are spent on results that cannot be compared
    again = folder.resolve().with_name(f"{folder.resolve().name}-again") if out is None else out
    if again.resolve() == folder.resolve():
        raise UserError(f"--out {again}: is the folder to be reproduced; use another one")
    file = folder / "experiment.yaml"
    config = load_experiment(file, (base or Path.cwd()).resolve())
    add_to_sys_path(config.base_dir)
    with explain_relative_paths(config.base_dir), prefix_file(file):
        print_remarks(check_experiment(config, again))

    def show() -> None:
        show_report(again, ship=True, original=folder, base=base, as_json=as_json)

    with replace_change_advice(), report_afterwards(show), TerminalProgress() as terminal:
        run_experiment(config, out=again, observer=terminal)


def verify(
    file: Annotated[
        Path,
        typer.Argument(
            help="Exported model (RESULTS/TASK/models/NAME.onnx), results folder, or folder to deploy (ship/NAME)."
        ),
    ],
    row: Annotated[str | None, typer.Argument(help="With a results folder: row of its main table.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Results folder of an exported model that is outside of it.")
    ] = None,
    base: BaseOption = None,
    runtime_python: Annotated[
        Path | None,
        typer.Option(
            help="With a folder to deploy: Python program of another environment, which is compared with this one."
        ),
    ] = None,
    builds: Annotated[
        int, count_option("With --runtime-python: number of fresh processes of each environment.", least=3, most=1_000)
    ] = 5,
    max_drop: Annotated[
        str | None,
        typer.Option(
            help="Largest allowed loss of the metric: absolute (0.01) or relative to the float model ('1%') [default: "
            "the bound of the experiment]."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure an exported model again and compare it with the tables: hash, Q/DQ edges, accuracy, speedup.

    With only a results folder, compare each of its files with the manifest, and print how to repair damaged files. The
    exit status is 1 if a file is damaged, a value differs from the recorded one, or the measured accuracy violates the
    bound; it is 0 if noise makes the latency inconclusive.

    With a folder to deploy (`ship/NAME`), compare its files with its manifest and run the model. With --runtime-python,
    compare latency, gain over the float model, and outputs of another environment with those of this one. The exit
    status is 1 if the other environment is slower, outputs differ, the gain is gone, or the file fails in it; 2 if it
    lacks the runtime.

    Example: `qdq verify out/mine`, `qdq verify out/mine auto`, or
    `qdq verify out/mine/resnet18-openvino-int8/models/0123456789abcdef.onnx`

    For a new version of the runtime: `qdq verify out/mine/ship/NAME --runtime-python new/bin/python`
    """
    from harness.results.deploy_folder import SHIP_FOLDER, find_bundle, is_bundle

    if file.name == SHIP_FOLDER or is_bundle(file) or runtime_python is not None:
        if row is not None:
            raise UserError(f"{file} {row}: a row is of a results folder, but a folder to deploy holds one model")
        raise typer.Exit(_verify_bundle(short_path(find_bundle(file)), runtime_python, builds, as_json=as_json))
    if file.is_dir() and row is None:
        raise typer.Exit(_check_folder(short_path(file), as_json=as_json))
    from harness.base.terminal_progress import TerminalProgress
    from harness.config.sections import parse_bound
    from harness.report.trace import find_exported_row
    from harness.run.verify.verify import verify as verify_model

    model = find_exported_row(short_path(file), row) if file.is_dir() else file
    if not file.exists():
        raise UserError(f"{file}: no such file or folder")
    if model is file and row is not None:
        raise UserError(f"{file} {row}: a row needs a results folder, but this is a file")
    try:
        bound = None if max_drop is None else parse_bound(max_drop)
    except ValueError as error:
        raise UserError(f"--max-drop: {error}, but got {max_drop!r}") from error
    start = (base or Path.cwd()).resolve()
    add_to_sys_path(start)
    with explain_relative_paths(start), TerminalProgress() as terminal:
        checks = verify_model(model, terminal, results=results, base=start, max_drop=bound)
    if as_json:
        print_json([asdict(check) for check in checks])
    for check in () if as_json else checks:
        word = SPECIAL_VERDICT_WORDS.get((check.what, check.holds), VERDICT_WORDS[check.holds])
        echo(f"{check.what}: {word}: {check.found}")
    if any(check.holds is False for check in checks):
        raise typer.Exit(ExitStatus.DOES_NOT_HOLD)


def _verify_bundle(folder: Path, python: Path | None, builds: int, *, as_json: bool) -> ExitStatus:
    """Check a folder to deploy, print the results, and return the exit status.

    Raises:
        DoesNotHold: The folder is damaged, or its model does not run.
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.base.text import short_version
    from harness.results.deploy_folder import read_bundle
    from harness.ship.bundle import run_bundle
    from harness.ship.runtime_comparison import compare_runtimes

    try:
        facts = read_bundle(folder)
    except UserError as error:
        raise DoesNotHold(str(error)) from error
    if not as_json:
        echo(f"files: ok: as in the manifest; {facts['answer']}")
    if python is None:
        values = run_bundle(folder, facts)
        recorded_ms = facts["latency_ms"][0]
        if as_json:
            print_json({"files": "ok", "run": values, "recorded_ms": recorded_ms})
        else:
            echo(f"run: ok: {values['latency_ms']:.3f} ms in one process ({recorded_ms:.3f} ms recorded, not compared)")
            versions = (values["version"], facts["runtime"].get("version"))
            here, measured = (short_version(each) or "unknown" for each in versions)
            if here != measured:
                echo(
                    f"version: {here}, but the file was measured with {measured}, so speed and outputs may differ; "
                    f"to compare both: qdq verify {folder} --runtime-python PYTHON"
                )
        return ExitStatus.DONE
    with TerminalProgress() as terminal:
        compared = compare_runtimes(folder, str(python), terminal, builds=builds)
    if as_json:
        print_json({"files": "ok", "holds": compared.holds, "lost_gain": compared.lost_gain, **asdict(compared)})
    else:
        echo("\n".join(compared.lines()))
    return ExitStatus(not compared.holds)


def _check_folder(folder: Path, *, as_json: bool) -> ExitStatus:
    """Print the damaged files of a results folder, and return the exit status."""
    from harness.results.deploy_folder import SHIP_FOLDER, check_bundle
    from harness.results.manifest import check_results

    files, complete, problems = check_results(folder)
    repair = f"remove the folder; qdq run writes {SHIP_FOLDER} again"
    for path in sorted(folder.glob(f"{SHIP_FOLDER}/*")):
        if path.is_symlink() or not path.is_dir():
            problems.append(f"{path}: is no folder to deploy; move it away")
        else:
            problems += [f"{problem}; {repair}" for problem in check_bundle(path)]
    if as_json:
        print_json({"files": files, "complete": complete, "problems": problems})
        return ExitStatus(bool(problems))
    for problem in problems:
        echo(problem)
    state = "complete" if complete else "not complete: qdq run continues it"
    damage = f"{len(problems)} damaged" if problems else "none damaged"
    echo(f"{folder}: {files} files compared, {damage}; {state}")
    if not problems:
        echo(f"To measure a row again: qdq verify {folder} ROW")
    return ExitStatus(bool(problems))
