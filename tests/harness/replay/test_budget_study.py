"""The budget ablation on made-up tables: what it says, and that it goes on where it stopped."""

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

from harness.cli.main import main
from harness.config.yaml_loader import read_experiment_yaml
from harness.measure.records import Measured, Outcome
from harness.plugins.registry import check_params
from harness.replay import budget_study, path_cache, replay_pool, simulated_selection
from harness.replay.search_key import SearchKey, search_key
from harness.replay.study_file import BudgetStudy, ReplayedSearcher, load_study
from harness.results.ownership import exclusive_lock

SEARCHERS = ["--searcher", "random", "--searcher", "local"]
ORDER = ["--seeds", "4", "--budget", "5", "--budget", "20", "--workers", "1"]


@pytest.fixture(autouse=True)
def few_random_searches(request, monkeypatch):
    """Fifty random searches instead of ten thousand; plots only in the test that reads them."""
    monkeypatch.setattr(simulated_selection, "RANDOM_SEARCHES", 50)
    if request.function is not test_study_tables_have_line_per_searcher_and_table:
        monkeypatch.setattr(budget_study, "_draw_plots", lambda *_: None)


@pytest.fixture
def tables(make_table, tmp_path):
    paths = [tmp_path / f"{name}.parquet" for name in ("one", "two")]
    for path in paths:
        make_table(noise=0.01, path=path)
    return [str(path) for path in paths]


@pytest.fixture
def replayed(monkeypatch):
    """What is replayed from now on: table, searcher, seed. One worker, this process, does it."""
    done: list[tuple[str, str, int]] = []
    replay_walks = replay_pool.replay_paths

    def watched(landscape: Any, use: Any, *, seeds: tuple[int, ...], **rest: Any) -> Any:
        done.extend((landscape.table.path.stem, use.name, seed) for seed in seeds)
        return replay_walks(landscape, use, seeds=seeds, **rest)

    monkeypatch.setattr(replay_pool, "replay_paths", watched)
    return done


def walks(out: Path) -> dict[tuple[str, str, int], list[int]]:
    """What is kept in a folder: by table, searcher and seed."""
    lines = pq.read_table(out / "walks.parquet").to_pylist()
    return {(line["table"], line["searcher"], line["seed"]): line["walk"] for line in lines}


def test_study_tables_have_line_per_searcher_and_table(tables, tmp_path, capsys):
    out = tmp_path / "out"
    main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    printed = capsys.readouterr().out
    assert "random, 10000 searches" in printed
    assert "too few for a test" in printed, "two tables are no sample"
    budget = pd.read_csv(out / "budget.csv")
    assert list(budget["searcher"]) == 2 * ["random, 10000 searches", "random", "local"]
    assert (budget["regret_20"] <= budget["regret_5"]).all()
    found = pd.read_csv(out / "found.csv").set_index("searcher")
    means = pd.read_csv(out / "means.csv").set_index("searcher")
    for name in ("random", "local"):
        assert found.loc[name, "found_20"] <= means.loc[name, "mean_20"], "nothing is handed over that was not found"
        assert found.loc[name, "found_20"] <= found.loc[name, "found_5"]
    by_name = budget.groupby("searcher")["regret_20"].mean()
    assert by_name["local"] < by_name["random, 10000 searches"]
    assert {p.name for p in out.iterdir()} >= {
        f"{name}.{end}"
        for name in ("means", "found", "budget", "reach", "score", "pairs", "ranks")
        for end in ("md", "csv", "tex")
    }
    assert (out / "ranks-5.png").exists()
    assert (out / "ranks-20.png").exists()
    ranks = pd.read_csv(out / "ranks.csv")
    assert list(ranks["searcher"]) == ["local", "random"]


def test_table_without_speedup_is_omitted_from_reach(tables, make_table, tmp_path, capsys):
    def slower(choices: tuple[int, ...]) -> Outcome:
        return Measured(samples_ms=(1.0 + sum(choices),) * 7, build_s=0.1, measure_s=0.1)

    make_table(path=tmp_path / "slower.parquet", outcome=slower)
    main(
        [
            "study",
            tables[0],
            str(tmp_path / "slower.parquet"),
            "--out",
            str(tmp_path / "out"),
            *SEARCHERS,
            *ORDER,
            "--cold",
        ]
    )
    reach = pd.read_csv(tmp_path / "out" / "reach.csv")
    assert set(reach["table"]) == {"one"}
    assert "A table without a placement faster than the float model has no line." in capsys.readouterr().out


def test_unreached_target_is_shown_as_censored(make_table, tmp_path, capsys):
    table, out = make_table(), tmp_path / "out"
    main(
        [
            "study",
            str(table.path),
            "--out",
            str(out),
            "--searcher",
            "random",
            "--seeds",
            "3",
            "--budget",
            "4",
            "--workers",
            "1",
        ]
    )
    (line,) = pd.read_csv(out / "reach.csv").to_dict("records")
    assert line["reached_99"] == 0
    assert math.isnan(line["evaluations_99"])
    assert "> 4 (0 of 3)" in capsys.readouterr().out


def test_interrupted_study_resumes(tables, tmp_path, replayed, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    main(["study", *tables, "--out", str(whole), *SEARCHERS, *ORDER])
    assert len(replayed) == len(walks(whole)) == 2 * 2 * 4
    replayed.clear()
    write_part = replay_pool.write_part

    def stops(path: Path, asked: SearchKey, walks: Any) -> None:
        if asked.searcher == "local":
            raise KeyboardInterrupt
        write_part(path, asked, walks)

    monkeypatch.setattr(replay_pool, "write_part", stops)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    monkeypatch.setattr(replay_pool, "write_part", write_part)
    done = [(table, name) for table, name, _ in replayed]
    assert set(done) == {("one", "random"), ("one", "local")}
    replayed.clear()
    main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    assert {(table, name) for table, name, _ in replayed} == {("one", "local"), ("two", "random"), ("two", "local")}
    assert walks(out) == walks(whole)
    assert (out / "means.csv").read_text() == (whole / "means.csv").read_text()
    assert not (out / "walks").exists(), "parts lie about"
    replayed.clear()
    main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    assert replayed == []


def test_added_searcher_reuses_cached_searches(tables, tmp_path, replayed):
    """As with the folder of a study that somebody else made."""
    out = tmp_path / "out"
    main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    before = walks(out)
    replayed.clear()
    main(["study", *tables, "--out", str(out), *SEARCHERS, "--searcher", "annealing", *ORDER])
    assert {name for _, name, _ in replayed} == {"annealing"}
    replayed.clear()
    main(["study", *tables, "--out", str(out), "--searcher", "random", *ORDER])
    assert replayed == []
    assert before.items() < walks(out).items(), "what is not asked now is kept"


def test_invalid_cached_paths_are_replayed_or_refused(tables, tmp_path, capsys, replayed):
    """A walk that cannot be one of this table is replayed, what is no file of walks is refused."""
    out = tmp_path / "out"
    order = ["study", tables[0], "--out", str(out), *SEARCHERS, *ORDER]
    main(order)
    good, means = pq.read_table(out / "walks.parquet"), (out / "means.csv").read_text()
    lines = good.to_pylist()
    for walk in ([10_000], [-1], [0] * 20, list(range(21)), [], [5]):
        worse = [{**line, "walk": walk if line["searcher"] == "local" else line["walk"]} for line in lines]
        pq.write_table(pa.Table.from_pylist(worse, schema=good.schema), out / "walks.parquet")
        replayed.clear()
        capsys.readouterr()
        main(order)
        assert {(name, seed) for _, name, seed in replayed} == {("local", seed) for seed in range(4)}, walk
        assert "or damaged: local\n" in capsys.readouterr().err
        assert (out / "means.csv").read_text() == means
    for bad, said in (
        ([{**line, "walk": [None]} for line in lines], "no cache of searches (a value is missing)"),
        ([{**line, "table": None} for line in lines], "no cache of searches (a value is missing)"),
        ([{**line, "table": 1001 * "x"} for line in lines], "no cache of searches (a name of more than 1000"),
    ):
        pq.write_table(pa.Table.from_pylist(bad, schema=good.schema), out / "walks.parquet")
        with pytest.raises(SystemExit) as ended:
            main(order)
        assert ended.value.code == 2
        error = " ".join(capsys.readouterr().err.split())
        assert said in error
        assert "remove it to replay them again" in error
    pq.write_table(good.drop_columns("seed"), out / "walks.parquet")
    with pytest.raises(SystemExit):
        main(order)
    assert "no cache of searches (other columns)" in capsys.readouterr().err
    (out / "walks.parquet").write_bytes(b"nothing")
    with pytest.raises(SystemExit):
        main(order)
    assert "walks.parquet: no cache of searches (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"MAX_LINES": 15}, "more than 15 searches"),
        ({"MAX_EVALUATIONS": 99, "MAX_LINES": 50}, "more than 99 evaluations"),
    ],
)
def test_oversized_cache_is_neither_read_nor_written(
    tables, tmp_path, capsys, monkeypatch,
    limit, said,
):  # fmt: skip
    out = tmp_path / "out"
    order = ["study", *tables, "--out", str(out), *SEARCHERS, *ORDER]
    main(order)
    before = (out / "walks.parquet").read_bytes()
    for name, value in limit.items():
        monkeypatch.setattr(path_cache, name, value)
    with pytest.raises(SystemExit):
        main(order)
    assert f"walks.parquet: no cache of searches ({said}" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["study", *tables, "--out", str(tmp_path / "new"), *SEARCHERS, *ORDER])
    assert "16 searches are more than one file takes; use another --out" in " ".join(capsys.readouterr().err.split())
    assert any((tmp_path / "new" / "walks").iterdir()), "the hours are gone"
    assert (out / "walks.parquet").read_bytes() == before


def test_smaller_budget_reuses_cache_and_larger_replays(tables, tmp_path, replayed, capsys):
    def study(out: str, most: int, *more: str) -> str:
        replayed.clear()
        main(["study", *tables, "--out", str(tmp_path / out), *SEARCHERS, "--seeds", "4", "--budget", str(most), *more])
        assert "Replayed again" not in capsys.readouterr().err
        return (tmp_path / out / "budget.csv").read_text()

    study("out", 20, "--workers", "1")
    assert len(replayed) == 16
    assert study("out", 8, "--workers", "1") == study("anew", 8, "--workers", "1")
    assert study("out", 8, "--workers", "1")
    assert replayed == []
    whole = study("out", 40, "--workers", "1")
    assert len(replayed) == 16
    assert study("out", 20, "--cold", "--workers", "1")
    assert len(replayed) == 16
    assert study("out", 40, "--workers", "1") == whole
    assert replayed == [], "another question took the place of what was there"


def test_study_above_evaluation_limit_is_refused_before_replay(tables, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.replay.budget_study.MAX_EVALUATIONS", 319)
    with pytest.raises(SystemExit):
        main(["study", *tables, "--out", str(tmp_path / "out"), *SEARCHERS, *ORDER])
    assert "320 evaluations are more than one folder takes; use fewer seeds" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()


def test_two_studies_of_one_folder_are_refused(tables, tmp_path, capsys):
    with exclusive_lock(tmp_path / "out", "replaying a study"), pytest.raises(SystemExit):
        main(["study", *tables, "--out", str(tmp_path / "out"), *SEARCHERS, *ORDER])
    assert "is replaying a study; wait for it, or use another --out" in " ".join(capsys.readouterr().err.split())


def test_study_output_in_table_folder_is_refused(tables, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["study", *tables, "--out", str(tmp_path), *SEARCHERS, *ORDER])
    assert "the folder has the tables, and walks.parquet would be read as one" in " ".join(
        capsys.readouterr().err.split()
    )


def test_no_worker_outlives_a_command_that_was_killed(tables, tmp_path):
    endless = ["--searcher", "annealing", "--seeds", "5000", "--budget", "60", "--workers", "2"]
    command = [sys.executable, "-m", "harness.cli.main", "study", *tables, "--out", str(tmp_path / "out"), *endless]
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
    """Neither gone nor a corpse that waits for somebody to look at it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--budget", "3"], "budgets must be above the 3 initial placements"),
        (["--searcher", "nobody"], "no searcher is called 'nobody'"),
    ],
)
def test_invalid_options_are_refused_with_remedy(make_table, tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as ended:
        main(["study", str(make_table().path), "--out", str(tmp_path / "out"), "--seeds", "2", *changes])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_two_tables_of_one_name_are_refused(make_table, tmp_path, capsys):
    first = make_table()
    (tmp_path / "other").mkdir()
    second = make_table(path=tmp_path / "other" / first.path.name)
    with pytest.raises(SystemExit):
        main(["study", str(first.path), str(second.path), "--out", str(tmp_path / "out")])
    assert "two tables have one name: made-up" in capsys.readouterr().err


STUDY = """
study: mine
tables: ["*.parquet"]
searchers: [random, {use: local, label: tour, seeds: 2}]
seeds: 4
budgets: [5, 12]
"""


def test_study_runs_from_yaml_file(tables, tmp_path, capsys):
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    path.write_text(STUDY)
    main(["study", str(path), "--out", str(out), "--workers", "1"])
    assert "median over 4 seeds (tour: 2) [quartiles]" in capsys.readouterr().out
    budget = pd.read_csv(out / "budget.csv")
    assert list(budget["table"].unique()) == ["one", "two"]
    assert list(budget["searcher"].unique()) == ["random, 10000 searches", "random", "tour"]
    kept = walks(out)
    assert [sum(name == each for _, name, _ in kept) for each in ("random", "tour")] == [2 * 4, 2 * 2]
    assert {len(walk) for walk in kept.values()} == {12}
    main(["study", str(path), "--out", str(out), "--workers", "1", "--json"])
    assert len(json.loads(capsys.readouterr().out)["budget"]) == len(budget)


def test_tables_accept_absolute_path(tables, tmp_path):
    path = tmp_path / "elsewhere" / "study.yaml"
    path.parent.mkdir()
    path.write_text(STUDY.replace("*.parquet", str(Path(tables[0]).parent / "*.parquet")))
    assert sorted(load_study(path).tables) == sorted(tables)


def test_tables_are_found_below_a_folder_whose_name_has_brackets(tables, tmp_path):
    home = tmp_path / "runs [new]"
    (home / "deeper" / "still").mkdir(parents=True)
    for place, table in zip(("deeper", "deeper/still"), tables, strict=True):
        shutil.copy(table, home / place)
    (home / "study.yaml").write_text(STUDY.replace("*.parquet", "**/*.parquet"))
    assert [Path(name).name for name in load_study(home / "study.yaml").tables] == ["one.parquet", "two.parquet"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (STUDY.replace("[5, 12]", "[12, 5]"), [], "budgets: budgets must increase, but got"),
        (STUDY.replace("[5, 12]", "[5, 5]"), [], "budgets: budgets must increase, but got"),
        (STUDY.replace("[5, 12]", "[5, 5001]"), [], "budgets.1: Input should be less than or equal to 5000"),
        (STUDY.replace("seeds: 4", "seeds: 10001"), [], "seeds: Input should be less than or equal to 10000"),
        (STUDY, ["--seeds", "3", "--cold"], "leave out --seeds, --cold, or change the file"),
        (STUDY.replace("seeds: 4", "sedes: 4"), [], "study.yaml: sedes: unknown key; did you mean 'seeds'"),
        (STUDY.replace("[5, 12]", "[]"), [], "study.yaml: budgets: a list with at least one entry, but got []"),
        (STUDY.replace("label: tour", "label: random"), [], "two searchers have one name: random"),
        (STUDY.replace("*.parquet", "none/*.parquet"), [], "tables: no file matches 'none/*.parquet'; 'qdq record"),
        (STUDY.replace("*.parquet", "none.parquet"), [], "none.parquet: cannot be read: No such file"),
        ("- a list", [], "is a mapping of keys, but got list"),
    ],
)
def test_invalid_study_file_names_location(tables, tmp_path, capsys, text, options, message):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["study", str(path), "--out", str(tmp_path / "out"), *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_result_is_independent_of_worker_count_and_working_folder(tables, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multiprocessing.py").write_text("raise SystemExit('imported from the working folder')")
    for workers in ("1", "2"):
        main(["study", *tables, "--out", str(tmp_path / workers), *SEARCHERS, *ORDER[:-1], workers])
    assert walks(tmp_path / "1") == walks(tmp_path / "2")


def test_more_seeds_keep_the_searches_that_are_done(tables, tmp_path, replayed):
    out, order = tmp_path / "out", ["--searcher", "random", "--budget", "5", "--workers", "1"]
    main(["study", tables[0], "--out", str(out), *order, "--seeds", "10"])
    main(["study", tables[0], "--out", str(out), *order, "--seeds", "14"])
    assert [seed for _, _, seed in replayed] == list(range(14))


def test_changed_file_of_custom_searcher_is_replayed(tables, tmp_path, monkeypatch, replayed, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = "from search.algorithms.random import RandomSearcher\n\n\nclass Mine(RandomSearcher):\n    pass\n"
    (tmp_path / "of_somebody_else.py").write_text(source)
    order = ["--searcher", "of_somebody_else:Mine", "--budget", "5", "--seeds", "2", "--workers", "1"]
    for text, searches in ((source, 2), (source, 0), (f"{source}# a remark\n", 0), (f"{source}CHANGED = 1\n", 2)):
        replayed.clear()
        (tmp_path / "of_somebody_else.py").write_text(text)
        main(["study", tables[0], "--out", "out", *order])
        assert len(replayed) == searches
        again = "Replayed again, because the cache is of other code, tables or libraries, or damaged: Mine"
        assert (again in capsys.readouterr().err) == ("CHANGED" in text)
        assert len(pq.read_table("out/walks.parquet")) == 2, "walks of code that is gone are kept"


def test_committed_studies_are_valid():
    root = Path(__file__).resolve().parents[3]
    paths = list((root / "experiments/studies").glob("*.yaml"))
    assert paths
    for path in paths:
        study = BudgetStudy.model_validate(read_experiment_yaml(path.read_text(encoding="utf-8"), path.name))
        assert study.searchers
        for searcher in study.searchers:
            check_params("searcher", searcher.use, searcher.params, supplied=("space", "seed"))


def told_all(choices: tuple[int, ...]) -> Outcome:
    """The more is quantized the faster, so that whoever is told `all` has the optimum."""
    return Measured(samples_ms=(10.0 - sum(choices[:6]),) * 7, build_s=0.5, measure_s=0.1)


def test_table_with_optimum_among_initial_placements_is_excluded(make_table, tmp_path, capsys):
    telling = make_table(noise=0.01, path=tmp_path / "telling.parquet")
    idle = make_table(outcome=told_all, path=tmp_path / "idle.parquet")
    out = tmp_path / "out"
    main(["study", str(telling.path), str(idle.path), "--out", str(out), *SEARCHERS, *ORDER])
    printed = capsys.readouterr().out
    said = (
        "an initial placement is within 1 % of the optimum, so all searchers are equal: idle ('all'); "
        "start without initial placements there (initial: none, or --cold)"
    )
    assert printed.count(f"Left out: {said}.") == 7, "below each table"
    assert {table for table, _, _ in walks(out)} == {"telling"}, "an hour is spent on it"
    for name in ("budget", "reach", "score"):
        assert set(pd.read_csv(out / f"{name}.csv")["table"]) == {"telling"}
    assert set(pd.read_csv(out / "pairs.csv")["blocks"]) == {1}
    assert "no interval, for 3 tables are needed" in printed
    assert "inf]" not in printed
    assert "over 1 table" in printed
    with pytest.raises(SystemExit) as ended:
        main(["study", str(idle.path), "--out", str(out), *SEARCHERS, *ORDER])
    assert ended.value.code == 2
    assert f"no table is left: {said}" in capsys.readouterr().err
    main(["study", str(idle.path), "--out", str(out), *SEARCHERS, *ORDER, "--cold"])
    assert "Left out" not in capsys.readouterr().out


def test_exhausted_searcher_is_noted_below_each_table(tables, tmp_path, capsys):
    study = tmp_path / "study.yaml"
    walk = "{use: random_mutation, label: walk, params: {scope: per_pattern, schemes_per_pattern: 3}}"
    study.write_text(f"study: mine\ntables: {tables}\nsearchers: [random, {walk}]\nseeds: 2\nbudgets: [10, 40]\n")
    main(["study", str(study), "--out", str(tmp_path / "out"), "--workers", "1"])
    printed = capsys.readouterr().out
    assert printed.count("Nothing more to propose before 40 evaluations: walk (4 of 4 searches, in the median") == 7
    assert "random (" not in printed


@pytest.mark.parametrize(
    ("use", "params"),
    [("per_pattern", {"searcher": "plug_inner:Own"}), ("portfolio", {"members": ["local", "plug_inner:Own"]})],
)
def test_changed_code_of_nested_searcher_changes_search_key(make_table, tmp_path, monkeypatch, use, params):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plug_inner", raising=False)
    table = make_table(path=tmp_path / "one.parquet").path
    study = BudgetStudy(study="mine", tables=(str(table),), seeds=1, budgets=(5,))
    code = "from search.algorithms.random import RandomSearcher\nclass Own(RandomSearcher):\n    {}\n"
    asked = []
    for body in ("pass", "'Other words.'", "other = 'code'"):
        (tmp_path / "plug_inner.py").write_text(code.format(body))
        asked.append(search_key(table, ReplayedSearcher(use=use, params=params), study))
    assert asked[0] == asked[1]
    assert asked[1] != asked[2]


def test_ranks_and_pairs_are_there_for_every_budget(make_table, tmp_path):
    """After the largest most searches are at the optimum of so small a table; what tells them apart comes before."""
    names, out = ("one", "two", "three"), tmp_path / "out"
    tables = [str(make_table(noise=0.01, path=tmp_path / f"{name}.parquet").path) for name in names]
    searchers = [*SEARCHERS, "--searcher", "annealing"]
    main(["study", *tables, "--out", str(out), *searchers, *ORDER])
    ranks = pd.read_csv(out / "ranks.csv").set_index("searcher")
    assert list(ranks.columns) == ["5", "20"]
    assert ranks.sum().tolist() == [6.0, 6.0], "three searchers share the ranks 1, 2 and 3"
    assert ranks["20"].is_monotonic_increasing
    means, budget = (pd.read_csv(out / f"{name}.csv").set_index("searcher") for name in ("means", "budget"))
    assert list(means.index) == ["random, 10000 searches", "random", "local", "annealing"]
    for searcher in means.index:
        assert means.loc[searcher, "mean_20"] == pytest.approx(budget.loc[searcher, "mean_20"].mean())
    assert (means["mean_5_low"] <= means["mean_5"]).all()
    pairs = pd.read_csv(out / "pairs.csv")
    assert pairs[["budget", "first", "second"]].to_numpy().tolist() == [
        [budget, "random", other] for budget in (5, 20) for other in ("local", "annealing")
    ], "the first searcher with each of the others"
    assert (pairs["low"] <= pairs["ratio"]).all()
    note = (out / "ranks.md").read_text()
    assert " at 5, " in note
    assert " at 20; ranks of one budget that differ by more than 1.91 are different at 5 % (Nemenyi)" in note


def test_score_of_random_search_is_0_with_any_initial_placements(make_table, tmp_path):
    table = make_table(noise=0.1)
    order = ["--searcher", "random", "--seeds", "60", "--budget", "20", "--workers", "1"]
    for start in ([], ["--cold"]):
        main(["study", str(table.path), "--out", str(tmp_path / "out"), *order, *start])
        (line,) = pd.read_csv(tmp_path / "out" / "score.csv").to_dict("records")
        half = (line["high"] - line["low"]) / 2
        assert abs(line["score"]) < 2 * half < 0.5, start


def test_fewer_seeds_reuse_cache(tables, tmp_path, replayed):
    out, order = tmp_path / "out", ["--searcher", "random", "--budget", "5", "--workers", "1"]
    main(["study", tables[0], "--out", str(out), *order, "--seeds", "14"])
    for seeds in (12, 7):
        replayed.clear()
        main(["study", tables[0], "--out", str(out), *order, "--seeds", str(seeds)])
        assert replayed == []
        main(["study", tables[0], "--out", str(tmp_path / f"anew{seeds}"), *order, "--seeds", str(seeds)])
        assert (out / "budget.csv").read_text() == (tmp_path / f"anew{seeds}" / "budget.csv").read_text()


def test_searcher_module_in_study_folder_is_found(tables, tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_a_study.py").write_text(
        "from search.algorithms.random import RandomSearcher\n\n\nclass Mine(RandomSearcher):\n    pass\n"
    )
    asked = "searchers: ['beside_a_study:Mine']\nseeds: 2\nbudgets: [5]\ninitial: none\n"
    (tmp_path / "study.yaml").write_text(f"study: mine\ntables: [one.parquet]\n{asked}")
    main(["study", "../study.yaml", "--out", "out", "--workers", "1"])
    printed = capsys.readouterr().out
    assert "Mine" in printed
    assert "0 initial placements of every search" in printed


def test_unknown_initial_placement_is_refused_before_replay(tables, tmp_path, capsys):
    (tmp_path / "study.yaml").write_text(f"{STUDY}initial: [float, lineer]\n")
    with pytest.raises(SystemExit) as ended:
        main(["study", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "initial: 'lineer' is no placement of a replay; did you mean 'linear'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
