"""The budget ablation on made-up tables: its tables and files, and the cache of its searches."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_tables import outcomes_of
from small import qdq

from harness.config.yaml_loader import read_experiment_yaml
from harness.plugins.registry import check_params
from harness.replay import budget_study, path_cache, simulated_selection
from harness.replay.budget_study import BudgetStudy, load_study
from harness.replay.replay import ReplayRequest
from harness.results.ownership import exclusive_lock

SEARCHERS = ["--searcher", "random", "--searcher", "local"]
ORDER = [*SEARCHERS, "--seeds", "4", "--budget", "5", "--budget", "20", "--workers", "1"]
STUDY = """
study: mine
tables: ["*.parquet"]
searchers: [random, {use: local, label: tour, seeds: 2}]
seeds: 4
budgets: [5, 12]
"""


@pytest.fixture(autouse=True)
def few_random_searches(request, monkeypatch):
    """Fifty random searches instead of ten thousand; plots only in the test that reads them."""
    monkeypatch.setattr(simulated_selection, "RANDOM_SEARCHES", 50)
    if request.function is not test_study_compares_searchers_at_every_budget:
        monkeypatch.setattr(budget_study, "_draw_plots", lambda *_: None)


@pytest.fixture
def tables(make_table, tmp_path):
    return [str(make_table(noise=0.01, path=tmp_path / f"{name}.parquet").path) for name in ("one", "two")]


@pytest.fixture
def replayed(monkeypatch):
    """Replayed searches as (table, searcher, seed), with one worker."""
    done: list[tuple[str, str, int]] = []
    replay = path_cache.replay

    def watched(landscape: Any, request: ReplayRequest) -> Any:
        done.extend((request.table.stem, request.searcher.name, seed) for seed in request.seeds)
        return replay(landscape, request)

    monkeypatch.setattr(path_cache, "replay", watched)
    return done


def walks(out: Path) -> dict[tuple[str, str, int], list[int]]:
    """Cached paths of a folder by table, searcher and seed."""
    lines = pq.read_table(out / "walks.parquet").to_pylist()
    return {(line["table"], line["searcher"], line["seed"]): line["walk"] for line in lines}


def test_study_compares_searchers_at_every_budget(make_table, tmp_path, capsys):
    out = tmp_path / "out"
    tables = [make_table(noise=0.01, path=tmp_path / f"{name}.parquet").path for name in ("one", "two", "three")]
    assert qdq("bench", "study", *map(str, tables), "--out", str(out), *ORDER, "--searcher", "annealing") == 0
    printed = capsys.readouterr().out
    names = ["random, 10000 searches", "random", "local", "annealing"]
    read = {name: pd.read_csv(out / f"{name}.csv") for name in ("means", "found", "budget", "reach", "score", "pairs")}
    assert list(read["budget"]["searcher"]) == 3 * names
    assert (read["budget"]["regret_20"] <= read["budget"]["regret_5"]).all()
    by_name = read["budget"].groupby("searcher")[["regret_20", "mean_20"]].mean()
    assert by_name.loc["local", "regret_20"] < by_name.loc["random, 10000 searches", "regret_20"]
    means, found = (read[name].set_index("searcher") for name in ("means", "found"))
    assert list(means.index) == names
    assert means["mean_20"].to_dict() == pytest.approx(by_name["mean_20"].to_dict())
    assert (means["mean_5_low"] <= means["mean_5"]).all()
    assert (found["found_20"] <= means["mean_20"][names[1:]]).all(), "nothing is chosen that was not evaluated"
    assert (found["found_20"] <= found["found_5"]).all()
    pairs = read["pairs"][["budget", "first", "second"]].to_numpy().tolist()
    assert pairs == [[budget, "random", other] for budget in (5, 20) for other in ("local", "annealing")]
    ranks = pd.read_csv(out / "ranks.csv").set_index("searcher")
    assert list(ranks.columns) == ["5", "20"]
    assert ranks.sum().tolist() == [6.0, 6.0], "three searchers share the ranks 1, 2 and 3"
    assert ranks["20"].is_monotonic_increasing
    assert "differ by more than 1.91 are different at 5 % (Nemenyi)" in (out / "ranks.md").read_text()
    files = {path.name for path in out.iterdir()}
    assert files >= {f"{name}.{end}" for name in (*read, "ranks") for end in ("md", "csv", "tex")}
    assert files >= {"ranks-5.png", "ranks-20.png", "curves.png"}
    assert all(f"| {name} " in printed for name in names)


def test_time_to_the_gain_has_no_line_without_gain_and_censors_unreached_targets(tables, make_table, tmp_path, capsys):
    flat, out = (
        make_table(path=tmp_path / "slower.parquet", outcome=outcomes_of(lambda a, b: 1.0 + a + b)),
        tmp_path / "out",
    )
    order = ["--searcher", "random", "--seeds", "3", "--budget", "2", "--workers", "1", "--cold"]
    assert qdq("bench", "study", tables[0], str(flat.path), "--out", str(out), *order) == 0
    (line,) = pd.read_csv(out / "reach.csv").to_dict("records")
    assert (line["table"], line["reached_99"]) == ("one", 0)
    assert math.isnan(line["evaluations_99"])
    assert "> 2 (0 of 3)" in capsys.readouterr().out


def test_interrupted_study_resumes(tables, tmp_path, replayed, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert qdq("bench", "study", *tables, "--out", str(whole), *ORDER) == 0
    assert len(replayed) == len(walks(whole)) == 2 * 2 * 4
    replayed.clear()
    write_paths = path_cache.write_paths

    def stops(path: Path, paths: Any) -> None:
        if "local" in {key.searcher for key in paths}:
            raise KeyboardInterrupt
        write_paths(path, paths)

    with monkeypatch.context() as patch:
        patch.setattr(path_cache, "write_paths", stops)
        assert qdq("bench", "study", *tables, "--out", str(out), *ORDER) == 130
    assert {(table, name) for table, name, _ in replayed} == {("one", "random"), ("one", "local")}
    replayed.clear()
    assert qdq("bench", "study", *tables, "--out", str(out), *ORDER) == 0
    assert {(table, name) for table, name, _ in replayed} == {("one", "local"), ("two", "random"), ("two", "local")}
    assert walks(out) == walks(whole)
    assert (out / "means.csv").read_text() == (whole / "means.csv").read_text()
    assert not (out / "walks").exists(), "part files are merged"


@pytest.mark.parametrize(
    ("change", "searches"),
    [
        ([], 0),
        (["--searcher", "annealing"], 8),
        (["--seeds", "3"], 0),
        (["--seeds", "6"], 8),
        (["--budget", "8"], 0),
        (["--budget", "40"], 16),
        (["--cold"], 16),
    ],
)
def test_only_searches_that_the_cache_lacks_are_replayed(tables, tmp_path, replayed, capsys, change, searches):
    order, out = ["bench", "study", *tables, *SEARCHERS, "--workers", "1"], ["--out", str(tmp_path / "out")]
    limits = [*([] if "--seeds" in change else ["--seeds", "4"]), *([] if "--budget" in change else ["--budget", "20"])]
    assert qdq(*order, *out, "--seeds", "4", "--budget", "20") == 0
    before = walks(tmp_path / "out")
    replayed.clear()
    assert qdq(*order, *out, *limits, *change) == 0
    assert len(replayed) == searches
    assert "Replayed again" not in capsys.readouterr().err
    if change != ["--budget", "40"]:
        assert before.items() <= walks(tmp_path / "out").items(), "searches that were not requested are kept"
    assert qdq(*order, "--out", str(tmp_path / "new"), *limits, *change) == 0
    assert (tmp_path / "out" / "budget.csv").read_text() == (tmp_path / "new" / "budget.csv").read_text()


@pytest.mark.parametrize("walk", [[10_000], [-1], [0] * 20, list(range(21)), [], [5]])
def test_cached_paths_that_cannot_be_searches_are_replayed(tables, tmp_path, capsys, replayed, walk):
    out, order = tmp_path / "out", ["bench", "study", tables[0], "--out", str(tmp_path / "out"), *ORDER]
    assert qdq(*order) == 0
    good, means = pq.read_table(out / "walks.parquet"), (out / "means.csv").read_text()
    lines = [{**line, "walk": walk if line["searcher"] == "local" else line["walk"]} for line in good.to_pylist()]
    pq.write_table(pa.Table.from_pylist(lines, schema=good.schema), out / "walks.parquet")
    replayed.clear()
    assert qdq(*order) == 0
    assert {(name, seed) for _, name, seed in replayed} == {("local", seed) for seed in range(4)}
    assert "or damaged: local\n" in capsys.readouterr().err
    assert (out / "means.csv").read_text() == means


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"walk": [None]}, "a value is missing"),
        ({"table": None}, "a value is missing"),
        ({"table": 1001 * "x"}, "a name of more than 1000"),
        (None, "other columns"),
    ],
)
def test_file_that_is_no_cache_is_refused(tables, tmp_path, capsys, change, message):
    order, file = (
        ["bench", "study", tables[0], "--out", str(tmp_path / "out"), *ORDER],
        tmp_path / "out" / "walks.parquet",
    )
    assert qdq(*order) == 0
    good = pq.read_table(file)
    bad = good.drop_columns("seed")
    if change is not None:
        bad = pa.Table.from_pylist([{**line, **change} for line in good.to_pylist()], schema=good.schema)
    pq.write_table(bad, file)
    assert qdq(*order) == 2
    assert f"no cache of searches ({message}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("limit", [{"MAX_LINES": 15}, {"MAX_EVALUATIONS": 99, "MAX_LINES": 50}])
def test_oversized_cache_is_neither_read_nor_written(tables, tmp_path, capsys, monkeypatch, limit):
    out, order = tmp_path / "out", ["bench", "study", *tables, *ORDER]
    assert qdq(*order, "--out", str(out)) == 0
    before = (out / "walks.parquet").read_bytes()
    for name, value in limit.items():
        monkeypatch.setattr(path_cache, name, value)
    assert qdq(*order, "--out", str(out)) == 2
    assert "no cache of searches (more than" in " ".join(capsys.readouterr().err.split())
    assert qdq(*order, "--out", str(tmp_path / "new")) == 2
    assert "16 searches are more than one file takes" in " ".join(capsys.readouterr().err.split())
    assert any((tmp_path / "new" / "walks").iterdir()), "finished searches are kept"
    assert (out / "walks.parquet").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.parquet", "--budget", "3"], "budgets must be above the 3 initial placements"),
        (["one.parquet", "--searcher", "unknown"], "no searcher is called 'unknown'"),
        (["one.parquet", "copy/one.parquet"], "two tables have one name: one"),
        (["one.parquet", "--out", "."], "the folder has the tables, and walks.parquet would be read as one"),
        (["one.parquet", "--out", "busy"], "is replaying a study; wait for it, or use another --out"),
        (["one.parquet", "--seeds", "9999", "--budget", "5000"], "evaluations are more than one folder takes"),
        (["ok.yaml", "--seeds", "3", "--cold"], "leave out --seeds, --cold, or change the file"),
        (("[5, 12]", "[12, 5]"), "budgets: budgets must increase, but got"),
        (("[5, 12]", "[5, 5001]"), "budgets.1: Input should be less than or equal to 5000"),
        (("seeds: 4", "sedes: 4"), "sedes: unknown key; did you mean 'seeds'"),
        ((STUDY, "- a list"), "a mapping of keys, but got list"),
        (("seeds: 4", "seeds: 10001"), "seeds: Input should be less than or equal to 10000"),
        (("seeds: 4", "initial: [float, lineer]"), "'lineer' is no placement of a replay; did you mean 'linear'?"),
        (("label: tour", "label: random"), "two searchers have one name: random"),
        (("*.parquet", "none/*.parquet"), "tables: no file matches 'none/*.parquet'"),
        (("*.parquet", "none.parquet"), "none.parquet: cannot be read: No such file"),
    ],
)
def test_study_that_cannot_run_is_refused_before_replays(
    tables, tmp_path, capsys, monkeypatch, replayed, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").mkdir()
    shutil.copy("one.parquet", "copy")
    Path("ok.yaml").write_text(STUDY)
    if isinstance(arguments, tuple):
        Path("changed.yaml").write_text(STUDY.replace(*arguments))
        arguments = ["changed.yaml"]
    with exclusive_lock(tmp_path / "busy", "replaying a study"):
        assert qdq("bench", "study", "--out", "out", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not replayed
    assert not Path("out").exists()


def test_study_runs_from_yaml_file_in_another_folder(tables, tmp_path, monkeypatch, capsys):
    """A searcher is found next to the study, and its changed code is replayed."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = "from search.algorithms.random import RandomSearcher\n\n\nclass Mine(RandomSearcher):\n    pass\n"
    searchers = "{use: local, label: tour, seeds: 2}, 'plugin_of_study:Mine'"
    (tmp_path / "study.yaml").write_text(STUDY.replace("{use: local, label: tour, seeds: 2}", searchers))
    for text in (source, f"{source}# a remark\n", f"{source}CHANGED = 1\n"):
        (tmp_path / "plugin_of_study.py").write_text(text)
        assert qdq("bench", "study", "../study.yaml", "--out", "out", "--workers", "1", "--json") == 0
        printed = capsys.readouterr()
        again = "Replayed again, because the cache is of other code, tables or libraries, or damaged: Mine"
        assert (again in printed.err) == ("CHANGED" in text)
    lines = pd.DataFrame(json.loads(printed.out)["budget"])
    assert list(lines["table"].unique()) == ["one", "two"]
    assert list(lines["searcher"].unique()) == ["random, 10000 searches", "random", "tour", "Mine"]
    assert "median over 4 seeds (tour: 2) [quartiles]" in Path("out/budget.md").read_text()
    kept = walks(Path("out"))
    assert [sum(name == each for _, name, _ in kept) for each in ("random", "tour", "Mine")] == [8, 4, 8]
    assert {len(walk) for walk in kept.values()} == {12}


@pytest.mark.parametrize("pattern", ["**/*.parquet", "{}/**/*.parquet"])
def test_tables_of_a_study_are_found_in_any_folder(tables, tmp_path, pattern):
    home = tmp_path / "runs [new]"
    (home / "deeper" / "still").mkdir(parents=True)
    for place, table in zip(("deeper", "deeper/still"), tables, strict=True):
        shutil.copy(table, home / place)
    path = home if "{}" not in pattern else tmp_path / "other"
    path.mkdir(exist_ok=True)
    (path / "study.yaml").write_text(STUDY.replace("*.parquet", pattern.format(tmp_path / "runs [[]new]")))
    assert [Path(name).name for name in load_study(path / "study.yaml").tables] == ["one.parquet", "two.parquet"]


def test_result_is_independent_of_worker_count_and_working_folder(tables, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multiprocessing.py").write_text("raise SystemExit('imported from the working folder')")
    for workers in ("1", "2"):
        assert qdq("bench", "study", *tables, "--out", str(tmp_path / workers), *ORDER[:-1], workers) == 0
    assert walks(tmp_path / "1") == walks(tmp_path / "2")


def test_workers_end_with_a_killed_command(tables, tmp_path):
    endless = ["--searcher", "annealing", "--seeds", "5000", "--budget", "60", "--workers", "2"]
    program = [sys.executable, "-m", "harness.cli.main"]
    command = [*program, "bench", "study", *tables, "--out", str(tmp_path / "out"), *endless]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as study:
        kept = tmp_path / "out" / "walks"
        try:
            assert within(60, lambda: kept.is_dir() and any(kept.iterdir())), "no worker has done anything"
            workers = psutil.Process(study.pid).children(recursive=True)
        finally:
            study.kill()  # leaving the block waits for its end
    assert len(workers) >= 2
    assert within(30, lambda: not any(alive(worker) for worker in workers)), workers


def alive(process: psutil.Process) -> bool:
    """Neither gone nor a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


def test_committed_studies_are_valid():
    paths = list((Path(__file__).resolve().parents[3] / "experiments/studies").glob("*.yaml"))
    assert paths
    for path in paths:
        study = BudgetStudy.model_validate(read_experiment_yaml(path.read_text(encoding="utf-8"), path.name))
        assert study.searchers
        for searcher in study.searchers:
            check_params("searcher", searcher.use, searcher.params, supplied=("space", "seed"))


def test_table_with_optimum_among_initial_placements_is_excluded(tables, make_table, tmp_path, capsys):
    fastest_quantized = outcomes_of(lambda a, b: 10.0 - a - b)
    idle, out = str(make_table(outcome=fastest_quantized, path=tmp_path / "idle.parquet").path), tmp_path / "out"
    assert qdq("bench", "study", tables[0], idle, "--out", str(out), *ORDER) == 0
    printed = capsys.readouterr().out
    reason = "an initial placement is within 1 % of the optimum, so all searchers are equal: idle ('all')"
    assert printed.count(f"Left out: {reason}") == 7, "below each table"
    assert {table for table, _, _ in walks(out)} == {"one"}
    for name in ("budget", "reach", "score"):
        assert set(pd.read_csv(out / f"{name}.csv")["table"]) == {"one"}
    assert "no interval, for 3 tables are needed" in printed
    assert "too few for a test" in printed
    assert "inf]" not in printed
    assert qdq("bench", "study", idle, "--out", str(out), *ORDER) == 2
    assert f"no table is left: {reason}" in capsys.readouterr().err
    assert qdq("bench", "study", idle, "--out", str(out), *ORDER, "--cold") == 0
    assert "Left out" not in capsys.readouterr().out


def test_exhausted_searcher_is_noted_below_each_table(tables, tmp_path, capsys):
    study = tmp_path / "study.yaml"
    walk = "{use: random_mutation, label: walk, params: {scope: per_pattern, schemes_per_pattern: 3}}"
    study.write_text(f"study: mine\ntables: {tables}\nsearchers: [random, {walk}]\nseeds: 2\nbudgets: [10, 40]\n")
    assert qdq("bench", "study", str(study), "--out", str(tmp_path / "out"), "--workers", "1") == 0
    printed = capsys.readouterr().out
    assert printed.count("Nothing more to propose before 40 evaluations: walk (4 of 4 searches, in the median") == 7
    assert "random (" not in printed
