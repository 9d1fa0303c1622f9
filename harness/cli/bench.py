"""`qdq bench tasks`, `run`, `check`, `score`, `surrogate`, `leaderboard` and `export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.base.errors import UserError
from harness.cli.common import ExitStatus, JsonOption, count_option, echo, print_json, print_table

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
