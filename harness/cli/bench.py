"""The commands of `qdq bench`, and `qdq inspect sensitivity`, `agreement` and `recover`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from harness.base.errors import UserError
from harness.cli.common import (
    DimOption,
    ExitStatus,
    JsonOption,
    ParamOption,
    ShapeOption,
    StudyArgument,
    StudyBackendOption,
    add_to_sys_path,
    count_option,
    echo,
    frame_values,
    print_json,
    print_table,
    replace_change_advice,
    short_path,
    study_of,
)

if TYPE_CHECKING:
    from harness.base.terminal_progress import TerminalProgress
    from harness.replay.budget_study import BudgetStudy


TierOption = Annotated[
    Literal["lite", "full", "extended"], typer.Option(help="Tier: fixed set of tasks, seeds and budgets.")
]
SubmissionsArgument = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of qdq bench run.")]


def bench_tasks(as_json: JsonOption = False) -> None:
    """List the tasks of QDQ-Bench with model, runtime, processor, threads, split, tier and start.

    Example: `qdq bench tasks`
    """
    from harness.replay.bench.tasks import describe_task, read_catalogue

    rows = [describe_task(name) for name in read_catalogue().tasks]
    print_table(tuple(rows[0]) if rows else ("task",), [tuple(row.values()) for row in rows], as_json=as_json)


def bench_run(
    searcher: Annotated[
        list[str], typer.Argument(metavar="SEARCHER...", help="Names (see qdq list), or module:Class.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the submission; an existing one is extended.")],
    tier: TierOption = "lite",
    seeds: Annotated[
        int | None, count_option("Number of searches on each task. [default: that of the tier]", most=10_000)
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", help="Parameter of the searcher as NAME=VALUE; repeat for each.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Name of the searcher in tables [default: the name of the searcher].")
    ] = None,
    workers: Annotated[int, count_option("Number of replay processes.", most=1_000)] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run searchers on the tasks of a tier and write a submission with searches, versions, digests and times.

    To continue after an interruption, run the same command again.

    Example: `qdq bench run auto --tier lite --out out/mine`
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.config.yaml_loader import parse_params
    from harness.replay.bench.submission import run_searchers
    from harness.replay.budget_study import ReplayedSearcher

    if len(searcher) > 1 and (param or label):
        raise UserError(f"--param and --label are of one searcher, but got {len(searcher)}")
    specs = [
        ReplayedSearcher(use=use, params=parse_params(param), label=label, seeds=seeds)
        for use in dict.fromkeys(searcher)
    ]
    with TerminalProgress() as terminal:
        submission = run_searchers(specs, tier, out, terminal, workers=workers)
    if as_json:
        print_json(submission.model_dump())
        return
    rows = [
        (name, str(len(record.tasks)), str(record.searches), str(record.budget), record.code[:12])
        for name, record in submission.searchers.items()
    ]
    print_table(("searcher", "tasks", "searches", "evaluations", "code"), rows)


def bench_check(
    folder: Annotated[Path, typer.Argument(help="Folder of a submission.")],
    searches: Annotated[int, count_option("Number of searches of each searcher to repeat.", most=10_000)] = 3,
    seed: Annotated[int, count_option("Random seed for the choice of these searches.", least=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check the files of a submission, and repeat a random sample of its searches.

    The exit status is 1 if a file is damaged or a search differs.

    Example: `qdq bench check out/mine`
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.replay.bench.submission import check_submission

    with TerminalProgress() as terminal:
        checks = check_submission(folder, searches=searches, seed=seed, observer=terminal)
    rows = [
        (each.searcher, each.task, str(each.seed), "same" if each.same else "other placements", each.differences)
        for each in checks
    ]
    if as_json:
        print_json([dataclasses.asdict(each) for each in checks])
    else:
        print_table(("searcher", "task", "seed", "result", "differences here"), rows)
    if not all(each.same for each in checks):
        raise typer.Exit(ExitStatus.DOES_NOT_HOLD)


def bench_score(
    experiment: Annotated[
        Path, typer.Argument(help="Experiment file with the models, their calibration data and evaluators.")
    ],
    table: Annotated[
        list[Path], typer.Argument(metavar="TABLE...", help="Parquet files of qdq bench record, or names of tasks.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Parquet file of the scores to write [default: scores/accuracy.parquet next to TABLE]."),
    ] = None,
) -> None:
    """Score the placements of tables on fixed samples: accuracy by labels, and agreement with the float model.

    Placements that already have a score, also by a table with other threads or processors, are skipped. To continue
    after an interruption, run the same command again.

    Example: `qdq bench score experiments/bench_accuracy.yaml results/tables/resnet18-onnxruntime.parquet`
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.config.experiment import load_experiment
    from harness.replay.bench.accuracy import score_tables
    from harness.replay.bench.tasks import scores_file, table_file

    path = out or scores_file(table[0])
    with TerminalProgress() as terminal:
        scored = score_tables(load_experiment(experiment), list(map(table_file, table)), path, terminal)
    echo(f"{path}: {scored} placements scored")


def bench_surrogate(
    table: Annotated[Path, typer.Argument(help="Parquet file of qdq bench record, or name of a task.")],
    out: Annotated[Path, typer.Option(help="ONNX file to write.")],
    as_json: JsonOption = False,
) -> None:
    """Train a model that predicts the latency of any placement from a table, and show its error on held-out ones.

    Example: `qdq bench surrogate results/tables/yolox_nano-onnxruntime.parquet --out out/yolox.onnx`
    """
    from harness.replay.bench.export import write_surrogate
    from harness.replay.bench.tasks import table_file
    from harness.runtimes.replay import read_table

    error = write_surrogate(read_table(table_file(table)), out)
    print_table(tuple(error), [tuple(f"{value:.3g}" for value in error.values())], as_json=as_json)


def bench_leaderboard(
    folder: SubmissionsArgument,
    out: Annotated[Path, typer.Option(help="Markdown page to write; plots are written to the same folder.")],
    tier: TierOption = "lite",
    html: Annotated[bool, typer.Option("--html", help="Also write an HTML page that contains the plots.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the searchers of submissions, and write the leaderboard.

    Example: `qdq bench leaderboard results/bench out/mine --out out/leaderboard.md`
    """
    from harness.replay.bench.leaderboard import compare_searchers, read_results, write_page
    from harness.report.report_table import table_json

    board = compare_searchers(read_results(folder, tier), tier)
    write_page(board, out, tier, html=html)
    if as_json:
        print_json({table.name: table_json(table) for table in board.tables})
    else:
        echo(str(out))


def bench_export(
    out: Annotated[Path, typer.Argument(help="Folder for the files.")],
    form: Annotated[
        Literal["t4", "croissant"],
        typer.Option("--format", help="t4: tables in the format of Kernel Tuner; croissant: metadata of all tables."),
    ] = "t4",
) -> None:
    """Write the tables of QDQ-Bench in the format of another tool, or their metadata.

    Example: `qdq bench export out/t4 --format t4`
    """
    from harness.replay.bench.export import write_croissant, write_t4

    for path in (write_t4 if form == "t4" else write_croissant)(out):
        echo(str(path))


@contextmanager
def study_progress() -> Iterator[TerminalProgress]:
    """Yield the progress in the terminal of a command whose results folder is `--out`."""
    from harness.base.terminal_progress import TerminalProgress

    with replace_change_advice(), TerminalProgress() as terminal:
        yield terminal


def sensitivity(
    model: StudyArgument,
    by: Annotated[
        Literal["pattern", "point"], typer.Option(help="Unit that is quantized, or left in float, at a time.")
    ] = "pattern",
    backend: StudyBackendOption = None,
    param: ParamOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    precision: Annotated[
        str | None, typer.Option(help="Quantized precision: int8, fp8 or mixed [default: int8].")
    ] = None,
    samples: Annotated[int, count_option("Number of samples on which outputs are compared with float.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Output folder [default: sensitivity-MODEL-BACKEND-PRECISION].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the effect of each pattern, or each insertion point, on latency and on agreement with the float model.

    Each is measured alone, and left out of the fully quantized model. The command writes a plot, and sensitivity.json,
    from which searches can start: {use: sensitivity, params: {path: ...}}. A model without an experiment file gets
    random data, so its agreement means little; an experiment file with one task brings real data.

    Example: `qdq inspect sensitivity zoo:resnet18 --param precision=f32`
    """
    from harness.insight.sensitivity import sensitivity_report

    task = study_of(model, backend, param, shape, dim, precision=precision)
    folder = short_path(out or Path(f"sensitivity-{task.spec.name}"))
    with study_progress() as terminal:
        table = sensitivity_report(task, by, folder, terminal, samples)
    print_table(*table, as_json=as_json)


def recover(
    model: StudyArgument,
    placement: Annotated[
        str, typer.Option(help="Fixed placement (all, ...), PTQ tool (which is run), Q/DQ file, or folder to deploy.")
    ] = "linear",
    float_node: Annotated[
        list[str] | None, typer.Option(help="Name or wildcard of nodes that stay float; repeat for each.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Range estimator of activations; repeat to compare.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="Range estimator of weights; repeat to compare.")] = None,
    depthwise: Annotated[
        list[str] | None,
        typer.Option(help="Scales of the inputs of depthwise convolutions: tensor or channel; repeat to compare."),
    ] = None,
    step: Annotated[list[str] | None, typer.Option(help="Recovery step (see qdq list); repeat in order.")] = None,
    subsets: Annotated[
        int, count_option("Number of parts of the calibration samples; calibrate on each part as well.", least=0)
    ] = 0,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Score two files: as given, and with choices that help on calibration samples."),
    ] = False,
    float_groups: Annotated[
        int, count_option("Number of groups of nodes, those that cost most, left float in one more file.", least=0)
    ] = 0,
    backend: StudyBackendOption = None,
    param: ParamOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    out: Annotated[Path | None, typer.Option(help="Output folder [default: recover-MODEL].")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a placement with several choices of ranges and scales, without and with steps that recover accuracy.

    The choices of the experiment file are scored first, then each combination of the given ones. The steps do not
    change latency. A step that does not improve the outputs on held-out calibration samples is undone.

    Example: `qdq inspect recover mobilenet.yaml --method mean --step bias_correction`
    """
    from harness.insight.accuracy_studies import RecoveryRequest, recovery_report
    from harness.results.deploy_folder import bundle_model

    placement = str(bundle_model(Path(placement))) if Path(placement).exists() else placement
    task = study_of(model, backend, param, shape, dim, timed=False)
    if unknown := {*(depthwise or ())} - {"tensor", "channel"}:
        raise UserError(f"--depthwise: tensor or channel, but got {min(unknown)!r}")
    request = RecoveryRequest(
        placement=placement,
        float_nodes=tuple(float_node or ()),
        methods=tuple(method or ()),
        weights=tuple(weights or ()),
        depthwise=cast("tuple[Literal['tensor', 'channel'], ...]", tuple(depthwise or ())),
        steps=tuple(step or ()),
        subsets=subsets,
        auto=auto,
        float_groups=float_groups,
    )
    with study_progress() as terminal:
        table = recovery_report(task, request, short_path(out or Path(f"recover-{task.spec.name}")), terminal)
    print_table(*table, as_json=as_json)


def agreement(
    model: StudyArgument,
    placements: Annotated[int, count_option("Number of random placements.", least=3)] = 16,
    samples: Annotated[int, count_option("Number of samples on which each placement is scored.")] = 200,
    backend: StudyBackendOption = None,
    param: ParamOption = None,
    out: Annotated[Path | None, typer.Option(help="Output folder [default: agreement-MODEL].")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rank correlation of label-free figures with the metric, over random placements of a labelled model.

    The figures are those of the evaluators agreement and fidelity. Example: `qdq inspect agreement mobilenet.yaml`
    """
    from harness.insight.accuracy_studies import agreement_report

    task = study_of(model, backend, param, None, None)
    folder = short_path(out or Path(f"agreement-{task.spec.name}"))
    with study_progress() as terminal:
        table = agreement_report(task, placements, samples, folder, terminal)
    print_table(*table, as_json=as_json)


def record(
    model: StudyArgument,
    dimensions: Annotated[
        int | None,
        typer.Option(
            help="Number N of choices to vary, those with the largest effect; at most 2^N placements are measured "
            "[default: 11, or that of a finished table]."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file [default: MODEL-BACKEND-PRECISION.parquet].")] = None,
    backend: StudyBackendOption = None,
    param: ParamOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    fidelity: Annotated[
        bool, typer.Option("--fidelity", help="Also compare the outputs of each placement with the float model's.")
    ] = False,
    search: Annotated[
        int, count_option("Number of evaluations of a search that first looks for a fast placement.", least=0)
    ] = 0,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Table of the same model, made on another processor or with other threads; measure its placements."
        ),
    ] = None,
    note: Annotated[str, typer.Option(help="Conditions of the recording, stored in the table.")] = "",
) -> None:
    """Measure every placement of a subspace of a model and write a table, on which searchers can be replayed.

    The subspace varies the choices with the largest effect; the others are fixed at the fastest placement found. If
    single changes find no fast placement, as for a Transformer on ONNX Runtime, start with a search: `--search 100`.

    To continue after an interruption, run the same command again. 1,024 placements of a small model take 20 to 30
    minutes; leave the machine idle.

    Example: `qdq bench record zoo:resnet18 --dimensions 11 --param precision=f32`
    """
    from harness.replay.record_table import record as record_table
    from harness.replay.replay_report import table_lines
    from harness.runtimes.replay import read_table

    task = study_of(model, backend, param, shape, dim, fidelity=fidelity)
    path = out or Path(f"{task.spec.name}.parquet")
    with study_progress() as terminal:
        other = None if like is None else read_table(like)
        record_table(task, path, dimensions, terminal, search=search, like=other, note=note)
    echo("\n".join(table_lines(read_table(path))))


def replay(
    recorded: Annotated[Path, typer.Argument(metavar="TABLE", help="Table of qdq bench record, or name of a task.")],
    searcher: Annotated[list[str] | None, typer.Option(help="Searcher, see qdq list; repeat to compare.")] = None,
    seeds: Annotated[int, count_option("Number of searches of each searcher.", most=10_000)] = 100,
    budget: Annotated[int, count_option("Number of evaluations of each search.", most=5_000)] = 100,
    initial: Annotated[
        list[str] | None, typer.Option(help="Initial placement of each search (float, all, linear); repeat for each.")
    ] = None,
    at_least: Annotated[
        str | None, typer.Option(help="Lower bound METRIC=VALUE on the placements, for instance sqnr_db=20.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; refuse a table that was recorded on another one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for curves.csv and curves.png.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run searchers on a recorded table, and compare them with ten thousand random searches from the same start.

    Example: `qdq bench replay resnet18-openvino-int8.parquet --searcher tpe --searcher local --seeds 20`
    """
    from harness.replay.bench.tasks import read_scored_table
    from harness.replay.replay_report import replay_all, table_lines

    table = read_scored_table(recorded)
    if not as_json:
        echo("\n".join(table_lines(table)))
    found = replay_all(
        table,
        searcher or (),
        seeds=seeds,
        budget=budget,
        initial=initial or (),
        at_least=at_least,
        model=model,
        out=out,
    )
    print_table(*found, as_json=as_json)


def study(
    what: Annotated[
        list[Path],
        typer.Argument(metavar="STUDY.yaml|TABLE...", help="A study file, or Parquet files of qdq bench record."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tables, the plots and the search paths.")],
    searcher: Annotated[
        list[str] | None,
        typer.Option(help="Searcher, see qdq list; repeat for each. [default: all but exhaustive and optuna]"),
    ] = None,
    budget: Annotated[
        list[int] | None,
        count_option("Number of evaluations of a search; repeat to compare. [default: 10 to 200]", most=5_000),
    ] = None,
    seeds: Annotated[
        int | None, count_option("Number of searches of each searcher on each table. [default: 100]", most=10_000)
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Start searches without initial placements.")] = False,
    workers: Annotated[
        int | None, count_option("Number of replay processes. [default: one per core]", most=1_000)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare searchers on recorded tables at several budgets, with statistics over seeds and tables.

    Searches run in memory, without the device. To continue after an interruption, run the same command again.

    Example: `qdq bench study experiments/studies/budgets.yaml --out out/budgets`
    """
    from harness.base.terminal_progress import TerminalProgress
    from harness.measure.provenance import count_cores
    from harness.replay.budget_study import study_budgets
    from harness.report.report_table import render_markdown, render_note_markdown

    options: dict[str, Mapping[str, Any]] = {
        "--searcher": {"searchers": [{"use": name} for name in searcher]} if searcher else {},
        "--budget": {"budgets": sorted(set(budget))} if budget else {},
        "--seeds": {"seeds": seeds} if seeds else {},
        "--cold": {"initial": []} if cold else {},
    }
    planned = _load_budget_study(what, {name: keys for name, keys in options.items() if keys})
    with TerminalProgress() as terminal:
        found = study_budgets(planned, out, terminal, workers=workers or count_cores())
    if as_json:
        print_json({table.name: frame_values(table.raw) for table in found})
        return
    for table in found:
        echo(f"{render_markdown(table)}\n\n{render_note_markdown(table)}\n")


def _load_budget_study(what: Sequence[Path], options: Mapping[str, Mapping[str, Any]]) -> BudgetStudy:
    """Return the study of a study file, or of tables and the keys of options."""
    from harness.replay.budget_study import BudgetStudy, load_study

    if what[0].suffix not in (".yaml", ".yml"):
        keys = {key: value for option in options.values() for key, value in option.items()}
        return BudgetStudy.model_validate({"study": "tables", "tables": [str(path) for path in what], **keys})
    if len(what) > 1 or options:
        excluded = ", ".join([*map(str, what[1:]), *options])
        raise UserError(f"{what[0]} is a study file, which is complete; leave out {excluded}, or change the file")
    add_to_sys_path(what[0].resolve().parent)
    return load_study(what[0])


def noise(
    model: StudyArgument,
    backend: StudyBackendOption = None,
    param: ParamOption = None,
    shape: ShapeOption = None,
    dim: DimOption = None,
    placement: Annotated[str, typer.Option(help="Placement to measure: float, all or linear.")] = "float",
    processes: Annotated[int, count_option("Number of fresh processes.", least=2, most=1_000)] = 6,
    builds: Annotated[int, count_option("Number of fresh builds in each process.", least=2, most=1_000)] = 4,
    readings: Annotated[int, count_option("Number of timed inferences of each build.", least=2)] = 30,
    out: Annotated[
        Path | None, typer.Option(help="Output folder [default: noise-MODEL-BACKEND-PARAMETERS-PLACEMENT].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the components of latency noise: within a run, between builds, between processes.

    A model without an experiment file gets random data; an experiment file with one task brings calibration data and
    settings of the sampling.

    Example: `qdq bench noise zoo:resnet18 --param precision=f32`
    """
    from harness.insight.noise import NestedDesign, noise_report
    from harness.run.prepare.study_task import study_name

    task = study_of(model, backend, param, shape, dim)
    design = NestedDesign(processes=processes, builds=builds, readings=readings)
    folder = out or Path(f"noise-{study_name(task, placement)}")
    with study_progress() as terminal:
        table = noise_report(task, placement, design, folder, terminal)
    print_table(*table, as_json=as_json)
