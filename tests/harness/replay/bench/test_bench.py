"""Tasks by name, submissions that repeat, their leaderboard, and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnx
import pytest
from small import qdq

from harness.base.errors import UserError
from harness.base.files import add_checksum, read_json, write_json
from harness.base.progress import NullProgress
from harness.replay.bench import load, read_catalogue
from harness.replay.bench.export import write_surrogate
from harness.replay.bench.leaderboard import compare_searchers, read_results
from harness.replay.bench.submission import check_submission, read_submission, run_searchers
from harness.replay.bench.tasks import ARCHIVE_FILE, table_path
from harness.replay.budget_study import ReplayedSearcher
from harness.replay.path_cache import PathCache
from harness.replay.replay import load_landscape
from harness.replay.simulated_selection import Searches
from harness.results.manifest import describe_files


def submit(folder: Path, *names: str) -> Path:
    run_searchers([ReplayedSearcher(use=name) for name in names], "lite", folder, NullProgress())
    return folder


def test_task_readings_equal_a_replay():
    task = load("one", seed=3)
    placements = list(task.landscape.table.subspace.placements())
    readings = [task.evaluate(placements[index]) for index in (5, 0, 5, 9)]
    assert readings[2].latency_ms == readings[0].latency_ms
    assert [reading.cost_s for reading in readings] == pytest.approx([0.6, 0.6, 0.0, 0.6], rel=1e-3)
    assert task.history == [5, 0, 9]
    replayed = Searches(task.landscape, {3: np.array([5, 0, 9], dtype=np.int32)}, 3)
    assert [readings[i].latency_ms for i in (0, 1, 3)] == replayed.readings_ms[0].tolist()
    assert task.latency_curve_ms().min() >= task.optimum_ms
    with pytest.raises(ValueError, match="choice"):
        task.evaluate([9] * len(task.space))
    with pytest.raises(UserError, match="no task is called 'on'"):
        load("on")


def test_a_table_of_the_archive_is_a_task(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = load("three").optimum_ms
    with ZipFile(tasks / ARCHIVE_FILE, "w") as file:
        file.write(tasks / "three.parquet", "three.parquet")
    (tasks / "three.parquet").unlink()
    assert load("three").optimum_ms == before
    assert table_path("three").is_relative_to(tmp_path / "cache")
    assert qdq("bench", "export", str(tmp_path), "--format", "croissant") == 0
    files = {each["@id"]: each for each in json.loads((tmp_path / "croissant.json").read_text())["distribution"]}
    assert files["three.parquet"]["containedIn"] == {"@id": ARCHIVE_FILE}
    assert not table_path("four").exists()
    (tasks / ARCHIVE_FILE).write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be read"):
        load("three")


def test_commands_list_tasks_and_submissions(tmp_path, capsys):
    assert qdq("bench", "tasks", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["task"] for row in rows] == ["one", "two", "three", "solved"]
    listed = [list(read_catalogue().tasks_of_tier(tier)) for tier in ("lite", "full", "extended")]
    assert listed == [["one", "two"], ["one", "two", "three"], ["one", "two", "three"]]
    command = ("bench", "run", "random", "--out", str(tmp_path / "mine"))
    assert qdq(*command, "--label", "mine") == 0
    assert "mine\t2\t4\t8" in capsys.readouterr().out
    assert qdq(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["searchers"].keys() == {"mine", "random"}
    assert qdq(*command, "local", "--label", "both") == 2
    assert "--label are of one searcher, but got 2" in capsys.readouterr().err


def test_submission_is_reproducible_and_extensible(tmp_path):
    folder = submit(tmp_path / "mine", "random")
    before = PathCache(folder).paths_by_seed(read_submission(folder).searchers["random"].key("random", "two"))
    submission = read_submission(submit(folder, "local", "random"))
    assert list(submission.searchers) == ["random", "local"]
    assert submission.searchers["local"].versions.keys() >= {"python", "numpy", "qdq-bench"}
    assert sorted(before) == [0, 1]
    assert before[0].indices[0] == 0, "the task starts from the float placement"
    assert all(each.same for each in check_submission(folder, searches=4, seed=0, observer=NullProgress()))
    run_searchers([ReplayedSearcher(use="random", seeds=1)], "lite", folder, NullProgress())
    kept = [task.seeds for task in read_submission(folder).searchers["random"].tasks.values()]
    assert kept == [2, 2], "fewer searches replace none"


def test_check_finds_damage_and_changed_tables(tmp_path, tasks):
    folder, other = submit(tmp_path / "mine", "random"), submit(tmp_path / "other", "local")
    assert qdq("bench", "check", str(folder), "--searches", "1") == 0
    part = folder / "walks" / "other.parquet"
    part.parent.mkdir()
    part.write_bytes((folder / "walks.parquet").read_bytes())
    with pytest.raises(UserError, match=r"other\.parquet: searches of an interrupted run"):
        read_submission(folder)
    part.unlink()
    (folder / "walks.parquet").write_bytes((other / "walks.parquet").read_bytes())
    assert qdq("bench", "check", str(folder)) == 1  # not the file of the manifest
    assert qdq("bench", "check", str(tmp_path / "nothing")) == 2
    (tasks / "one.parquet").write_bytes((tasks / "two.parquet").read_bytes())
    with pytest.raises(UserError, match="another table of one"):
        read_submission(other)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seeds": 10**12}, "seeds"),
        ({"seeds": 0}, "seeds"),
        ({"searcher_s": float("inf")}, "searcher_s"),
        ({"budget": 10**12}, "budget"),
        ({"budget": 0}, "budget"),
        ("../tasks/one", "no task is called"),
        ("x" * 400, "no task is called"),
    ],
)
def test_submission_with_invalid_values_is_refused(tmp_path, changed, message):
    folder = submit(tmp_path / "mine", "random")
    submission = read_json(folder / "submission.json")
    record = submission["searchers"]["random"]
    if isinstance(changed, str):
        record["tasks"][changed] = record["tasks"]["one"]
    else:
        (record if changed.keys() <= record.keys() else record["tasks"]["one"]).update(changed)
    seal(folder, submission)
    with pytest.raises(UserError, match=f"submission.json: .*{message}"):
        read_submission(folder)


def test_submission_requires_named_searchers_and_a_manifest(tmp_path):
    folder = submit(tmp_path / "mine", "random")
    record = read_json(folder / "submission.json")["searchers"]["random"]
    for searchers, expected in (
        ({}, "no searchers"),
        ({"": record}, "printable"),
        ({"a\x1b[31m": record}, "printable"),
    ):
        seal(folder, {"searchers": searchers})
        with pytest.raises(UserError, match=expected):
            read_submission(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json: no manifest"):
        read_submission(folder)
    with pytest.raises(UserError, match="printable"):
        run_searchers([ReplayedSearcher(use="random", label="a\nb")], "lite", tmp_path / "new", NullProgress())


def seal(folder: Path, submission: dict[str, Any]) -> None:
    """Write a submission with checksum and manifest, which needs no key."""
    (folder / "submission.json").write_text(add_checksum(json.dumps(submission)) + "\n")
    files = describe_files(folder, [folder / "submission.json", folder / "walks.parquet"])
    write_json(folder / "manifest.json", {"complete": True, "tasks": {}, "files": files})


def test_unknown_searcher_parameters_are_a_difference(tmp_path):
    folder = submit(tmp_path / "mine", "random")
    submission = read_json(folder / "submission.json")
    submission["searchers"]["random"]["params"] = {"members": 5, "searcher": [1]}
    seal(folder, submission)
    (found,) = check_submission(folder, searches=1, seed=0, observer=NullProgress())
    assert not found.same
    assert "no parameter" in found.differences


def test_check_detects_a_changed_searcher(tmp_path, monkeypatch, capsys):
    text = "from search.algorithms.random import RandomSearcher\n\n\nclass Mine(RandomSearcher):\n    pass\n"
    (tmp_path / "mine_of_bench.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert qdq("bench", "run", "mine_of_bench:Mine", "--out", "out", "--trust-plugins") == 0
    assert qdq("bench", "check", "out", "--trust-plugins", "--json") == 0
    other = np.array([1, 2], dtype=np.int32)
    monkeypatch.setattr(
        "harness.replay.bench.submission.replay", lambda _, request: dict.fromkeys(request.seeds, other)
    )
    capsys.readouterr()
    assert qdq("bench", "check", "out", "--trust-plugins", "--json", "--searches", "1") == 1
    assert [each["same"] for each in json.loads(capsys.readouterr().out)] == [False]


def test_the_leaderboard_compares_searchers_over_blocks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("harness.replay.simulated_selection.RANDOM_SEARCHES", 50)
    monkeypatch.setattr("harness.replay.bench.leaderboard.PLANNED", ("random", "local"))
    monkeypatch.setattr("harness.replay.bench.leaderboard.PLANNED_BUDGET", 8)
    one, two = submit(tmp_path / "one", "auto", "random"), submit(tmp_path / "two", "local")
    board = compare_searchers(read_results([one, two], "lite"), "lite")
    searchers, pairs, tests, splits = board.tables
    assert set(searchers.cells["searcher"]) == {"auto", "random", "local"}
    assert list(pairs.cells.columns) == ["searcher", "4 evaluations", "8 evaluations"]
    assert tests.cells["searcher"].tolist()[:2] == ["random (planned)", "local (planned)"]
    assert tests.cells["evaluations"].tolist() == ["8", "8", "4", "8"]
    assert list(splits.cells.columns) == ["searcher", "development, 1 task", "test, 1 task"]
    assert board.ranks[4].blocks == 2
    assert all(np.diff(curve).min() >= 0 for curve in board.targets.values())
    with pytest.raises(UserError, match="'auto' is in another submission"):
        read_results([one, submit(tmp_path / "three", "auto")], "lite")
    with pytest.raises(UserError, match="lacks tasks"):
        read_results([one], "full")
    assert qdq("bench", "leaderboard", str(one), str(two), "--out", str(tmp_path / "page.md"), "--html") == 0
    assert "| auto" in (tmp_path / "page.md").read_text()
    assert "data:image/png" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.png").stat().st_size > 10_000
    capsys.readouterr()
    assert qdq("bench", "leaderboard", str(one), str(two), "--out", str(tmp_path / "page.md"), "--json") == 0
    table = next(iter(json.loads(capsys.readouterr().out).values()))
    assert [head["text"] for head in table["heads"]] == list(searchers.cells.columns)


def test_exports_have_every_placement_and_every_table(tmp_path):
    assert qdq("bench", "export", str(tmp_path)) == 0
    results = json.loads((tmp_path / "one-T4.json").read_text())["results"]
    assert len(results) == len(load_landscape(table_path("one")).outcomes)
    for result in results:
        assert result.keys() >= {"configuration", "times", "invalidity", "correctness"}
        assert result["invalidity"] == "correct"
    assert qdq("bench", "export", str(tmp_path), "--format", "croissant") == 0
    croissant = json.loads((tmp_path / "croissant.json").read_text())
    assert [each["@id"] for each in croissant["distribution"]] == [
        f"{name}.parquet" for name in ("one", "two", "three", "solved")
    ]


def test_exports_validate_against_external_schemas(tmp_path):
    kernel_tuner, jsonschema = pytest.importorskip("kernel_tuner.file_utils"), pytest.importorskip("jsonschema")
    mlcroissant = pytest.importorskip("mlcroissant")
    assert qdq("bench", "export", str(tmp_path)) == 0
    for kind, schema in (("T4", "results"), ("metadata", "metadata")):
        expected = json.loads((kernel_tuner.schema_dir / f"T4/1.0.0/{schema}-schema.json").read_text())
        jsonschema.validate(json.loads((tmp_path / f"one-{kind}.json").read_text()), expected)
    assert qdq("bench", "export", str(tmp_path), "--format", "croissant") == 0
    assert not mlcroissant.Dataset(str(tmp_path / "croissant.json")).metadata.issues.errors


def test_the_file_predicts_and_states_its_error(tmp_path, make_table):
    onnxruntime = pytest.importorskip("onnxruntime")
    table = make_table(dimensions=7, noise=0.01, path=tmp_path / "t.parquet")
    error = write_surrogate(table, tmp_path / "s.onnx")
    assert error["readings"] == len(table.rows)
    assert 0.9 * error["ceiling"] < error["rank_correlation"] < 1
    assert 0.8 < error["coverage"] < 0.97
    session = onnxruntime.InferenceSession(tmp_path / "s.onnx")
    rows = list(table.rows.values())
    latency, low, high = session.run(None, {"choices": np.array([row.choices for row in rows])})
    recorded = np.array([np.median(row.outcome.samples_ms) for row in rows])
    assert np.corrcoef(latency[:, 0], recorded)[0, 1] > 0.95
    assert ((low < latency) & (latency < high)).all()
    facts = {each.key: each.value for each in onnx.load(tmp_path / "s.onnx").metadata_props}
    assert facts["rank_correlation"] == str(error["rank_correlation"])
    assert qdq("bench", "surrogate", str(tmp_path / "t.parquet"), "--out", str(tmp_path / "again.onnx")) == 0
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "s.onnx").read_bytes()


def test_surrogate_needs_enough_readings(tmp_path, make_table):
    with pytest.raises(UserError, match="fewer than"):
        write_surrogate(make_table(dimensions=4, noise=0.01, path=tmp_path / "t.parquet"), tmp_path / "s.onnx")
