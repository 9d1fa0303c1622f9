"""The best of each search meet before one of them is its choice: the lowest of many noisy readings is a lucky one."""

import shutil
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from small import qdq, save_chain
from stored import read_records, read_text, unpack

from harness.measure.elimination import TURNS_PER_RACING_ROUND
from harness.measure.turn_log import TWIN, TurnMatrix
from harness.results.artifacts import Choice, best_choice, read_finalists
from harness.results.journal import read_journal
from harness.results.turns import read_comparison, turn_speedups

FULL_TURNS = True
TASK = "net-simulated-int8"
EXPERIMENT = """
experiment: final_selection
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, effect: 0.01, wander: 0.15, wander_readings: 3, noise_seed: 7}}]
searchers: [{use: random, without: [rebuilds, racing]}]
initial: none
baselines: []
budget: {evaluations: [10, 40]}
sampling: {warmup_ms: 0.0, min_samples: 3, max_samples: 3, interleave: never}
seeds: [0, 1, 2]
confirmation: {builds: 3, rounds: 2, samples: 3, candidates: CANDIDATES}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("final_selection")
    save_chain(folder / "net.onnx", (8, 8, 12, 12, 12, 8))
    for candidates in (1, 6):
        path = folder / f"{candidates}.yaml"
        path.write_text(EXPERIMENT.replace("CANDIDATES", str(candidates)))
        assert qdq("run", str(path), "--out", str(folder / f"out{candidates}")) == 0
    return folder


def truth_ms(task):
    """Of all evaluated placements."""
    entries = [entry for path in task.glob("runs/*.jsonl*") for entry in read_journal(path)]
    return {entry.proposal.digest: entry.result.outcome.info["truth_ms"] for entry in entries if entry.result}


def chosen_ms(task):
    """True latency of each search's choice."""
    truth = truth_ms(task)
    return [truth[pick.row] for pick in read_finalists(task)[1] if pick.kind == "search" and pick.row in truth]


def test_final_selection_is_faster_than_lowest_reading(folder):
    lowest, winners = (np.mean(chosen_ms(folder / out / TASK)) for out in ("out1", "out6"))
    assert winners < lowest


def test_single_candidate_skips_final_selection(folder):
    task = folder / "out1" / TASK
    assert not (task / "final_selection.jsonl").exists()
    for pick in read_finalists(task)[1]:
        if pick.kind == "search":
            entries = read_journal(task / "runs" / f"{pick.method}-{pick.seed}.jsonl")
            readings = [
                np.median(entry.result.outcome.samples_ms) for entry in list(entries)[: pick.budget] if entry.result
            ]
            assert pick.search_ms == pytest.approx(min(readings))


def test_method_row_is_best_seed_of_final_selection(folder):
    task = folder / "out6" / TASK
    picks = [pick for pick in read_finalists(task)[1] if pick.kind == "search" and pick.budget == 40]
    assert len(picks) == 3
    table = pd.read_csv(folder / "out6" / "report" / "main.csv").set_index("method")
    assert table.loc["random", "row"] == max(picks, key=lambda pick: (not pick.beaten, pick.final_selection)).row
    assert not all(pick.beaten for pick in picks)


def test_best_choice_prefers_unbeaten_choice():
    few = Choice(method="random", kind="search", row="few", search_ms=1.0, final_selection=2.1)
    many = replace(few, row="many", final_selection=2.08)
    lost = Choice(method="random", kind="search", row="failed", search_ms=0.5)
    assert best_choice([few, many]) is few
    assert best_choice([replace(few, beaten=True), many]) is many
    assert best_choice([lost, many]) is many, "the lowest reading of one that failed in the final selection"
    assert best_choice([lost]) is lost
    assert best_choice([]) is None


def test_only_the_winners_are_confirmed_and_delivered(folder):
    task = folder / "out6" / TASK
    rows, picks = read_finalists(task)
    met = set(read_records(task / "final_selection.jsonl")[0]["rows"])
    assert {row.id for row in rows} - {"float"} < met
    assert len(picks) == 1 + 3 * 2  # the float model, and one choice a seed and budget
    assert {path.stem for path in (task / "models").iterdir()} == {row.id for row in rows}


def test_close_candidates_get_more_turns(folder):
    """Each round has a build of its own; a candidate that may still be selected stays in the race."""
    path = folder / "out6" / TASK / "final_selection.jsonl"
    truth = truth_ms(folder / "out6" / TASK)
    heats = defaultdict(set)
    for event in read_comparison(path):
        heats[event.build].add(event.row)
    rows = {heat: names - {"float", TWIN} for heat, names in heats.items()}
    assert set(rows) == set(range(len(TURNS_PER_RACING_ROUND)))
    assert rows[0] > rows[1] >= rows[2]
    turns = {name: len(ratios) for name, ratios in turn_speedups(TurnMatrix(read_comparison(path)), "float").items()}
    assert {turns[name] for name in rows[2]} == {sum(TURNS_PER_RACING_ROUND)}
    assert {turns[name] for name in rows[0] - rows[1]} == {TURNS_PER_RACING_ROUND[0]}
    assert np.mean([truth[name] for name in rows[2]]) < np.mean([truth[name] for name in rows[0] - rows[2]])


def test_interrupted_final_selection_resumes_with_same_readings(folder, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(folder / "out6", out)
    unpack(out / TASK)
    path = out / TASK / "final_selection.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[: len(whole) // 2]) + whole[-1][:40])
    assert qdq("run", str(folder / "6.yaml"), "--out", str(out)) == 0
    again = read_text(path).splitlines(keepends=True)
    assert again[: len(whole) // 2] == whole[: len(whole) // 2]
    assert len(again) >= len(whole)
    shown = (out / "report" / "main.md").read_text()
    assert "random" in shown


def test_a_damaged_record_is_refused_with_the_remedy(folder, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(folder / "out6", out)
    unpack(out / TASK)
    path = out / TASK / "final_selection.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"kind": "turn"}\n', *lines[2:]]))
    assert qdq("run", str(folder / "6.yaml"), "--out", str(out)) == 2
    assert "or move it away: qdq run measures it again" in capsys.readouterr().err.replace("\n", " ")
