"""The budget ablation on made-up tables: what it says, and that it goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from harness.cli import main
from harness.tables import Table

MakeTable = Callable[..., Table]
SEARCHERS = ["--searcher", "random", "--searcher", "local"]
ORDER = ["--seeds", "4", "--budget", "5", "--budget", "20"]


@pytest.fixture
def tables(make_table: MakeTable, tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{name}.parquet" for name in ("one", "two")]
    for path in paths:
        make_table(noise=0.01, path=path)
    return [str(path) for path in paths]


def test_every_searcher_has_its_line_on_every_table(
    tables: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    printed = capsys.readouterr().out
    assert "random, calculated" in printed
    assert "too few for a test" in printed, "two tables are no sample"
    budget = pd.read_csv(out / "budget.csv")
    assert list(budget["searcher"]) == 2 * ["random, calculated", "random", "local"]
    assert (budget["regret_20"] <= budget["regret_5"]).all()
    by_name = budget.groupby("searcher")["regret_20"].mean()
    assert by_name["local"] < by_name["random, calculated"]
    assert {p.name for p in out.iterdir()} >= {
        f"{name}.{end}" for name in ("budget", "reach", "score", "pairs", "ranks") for end in ("md", "csv", "tex")
    }
    assert (out / "ranks.png").exists()
    ranks = pd.read_csv(out / "ranks.csv")
    assert list(ranks["searcher"]) == ["local", "random"]


def test_what_is_never_reached_is_censored_and_not_left_out(
    make_table: MakeTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = make_table(), tmp_path / "out"
    main(["study", str(table.path), "--out", str(out), "--searcher", "random", "--seeds", "3", "--budget", "4"])
    (line,) = pd.read_csv(out / "reach.csv").to_dict("records")
    assert line["reached_99"] == 0
    assert math.isnan(line["evaluations_99"])
    assert "> 4 (0 of 3)" in capsys.readouterr().out


def test_it_goes_on_where_it_stopped(tables: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(["study", *tables, "--out", str(out), *SEARCHERS, *ORDER])
    kept = {path: path.stat().st_mtime_ns for path in (out / "curves").iterdir()}
    assert len(kept) == 4
    main(["study", *tables, "--out", str(out), *SEARCHERS, "--searcher", "annealing", *ORDER])
    now = {path: path.stat().st_mtime_ns for path in (out / "curves").iterdir()}
    assert len(now) == 6
    assert {path: now[path] for path in kept} == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--budget", "3"], "budgets are above the 3 initial placements"),
        (["--searcher", "nobody"], "no searcher is called 'nobody'"),
    ],
)
def test_mistakes_name_what_would_do(
    make_table: MakeTable, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", str(make_table().path), "--out", str(tmp_path / "out"), "--seeds", "2", *changes])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_two_tables_of_one_name_are_refused(
    make_table: MakeTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_table()
    (tmp_path / "other").mkdir()
    second = make_table(path=tmp_path / "other" / first.path.name)
    with pytest.raises(SystemExit):
        main(["study", str(first.path), str(second.path), "--out", str(tmp_path / "out")])
    assert "two tables have one name" in capsys.readouterr().err
