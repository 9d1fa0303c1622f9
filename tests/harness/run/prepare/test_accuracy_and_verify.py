"""Accuracy in the loop, end to end: halves, proxy, fronts, accuracy first. A made-up runtime pays speed in accuracy."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small import qdq, save_chain
from stored import forget_task, read_records, replace_text, unpack, write_records

from harness.base.files import read_json, write_json
from harness.base.statistics import Interval
from harness.graph.io.digests import digest_file
from harness.graph.pattern_cache import read_cache
from harness.results.journal import read_journal
from harness.results.lines import restore_lines
from harness.results.manifest import reopen_results
from harness.results.search_log import PROXY
from harness.run.verify.verify import speedup_agrees

EXPERIMENT = """
experiment: near
models:
  - use: net.onnx
    calibration: {data: {use: npz, path: calibration.npz}, samples: 4}
    evaluator: {use: 'near_plugins:Near', params: {data: {use: npz, path: labelled.npz}}}
backends: [{use: 'talking:Bench', params: {seed: 5, noise: 0.0, wanted_share: 1.0}, label: bench}]
objective: OBJECTIVE
searchers: [SEARCHER]
initial: [float, all, linear]
baselines: [all]
budget: {evaluations: [5, 8]}
sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3, max_ms: 20}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""

PLUGINS = """
from harness.accuracy.metrics.fidelity import Fidelity

class Near(Fidelity):
    metric = "cosine"

    def __init__(self, reference, inputs, data, base=None):
        super().__init__(reference, inputs, data, samples=64, base=base)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("near")
    save_chain(folder / "net.onnx", (8, 8, 8), size=8)
    rng = np.random.default_rng(0)
    for name, rows in (("calibration", 4), ("labelled", 40)):
        np.savez(folder / f"{name}.npz", x=rng.normal(size=(rows, 3, 8, 8)).astype(np.float32))
    (folder / "near_plugins.py").write_text(PLUGINS)
    return folder


def run(folder: Path, name: str, objective: str, searcher: str = "random") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(EXPERIMENT.replace("OBJECTIVE", objective).replace("SEARCHER", searcher))
    assert qdq("run", str(file), "--out", str(folder / name)) == 0
    return folder / name / "net-bench-int8"


@pytest.fixture(scope="module")
def bounded(folder):
    return run(folder, "bounded", "{max_drop: 0.5}").parent


def test_changed_data_with_same_name_are_refused(folder, bounded, tmp_path, capsys):
    for file in ("net.onnx", "near_plugins.py", "calibration.npz", "labelled.npz", "bounded.yaml"):
        shutil.copy(folder / file, tmp_path)
    shutil.copytree(bounded, tmp_path / "out")
    command = ("run", str(tmp_path / "bounded.yaml"), "--out", str(tmp_path / "out"))
    assert qdq(*command, "--check") == 0
    rows = np.random.default_rng(9).normal(size=(40, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "labelled.npz", x=rows)
    for arguments in ((*command, "--check"), command):
        assert qdq(*arguments) == 2
        assert "the data of the evaluator changed (labelled.npz)" in capsys.readouterr().err
    assert qdq("verify", str(tmp_path / "out"), "all", "--base", str(tmp_path)) == 1
    assert "data: MISMATCH: the data of the evaluator changed (labelled.npz)" in capsys.readouterr().out
    assert qdq(*command, "--accept-changes") == 0
    assert (tmp_path / "out" / "net-bench-int8.1").is_dir()


def test_results_without_data_digest_resume(folder, bounded, tmp_path):
    shutil.copytree(bounded, tmp_path / "out")
    task = tmp_path / "out" / "net-bench-int8"
    unpack(task)
    facts = read_json(task / "task.json")
    assert facts.pop("data")
    write_json(task / "task.json", facts)
    for path in task.glob("runs/*.jsonl*"):
        header, *rest = read_records(path)
        del header["fingerprint"]["data"]
        write_records(path, (header, *rest))
    before = (task / "accuracy.json").read_bytes()
    assert qdq("run", str(folder / "bounded.yaml"), "--out", str(tmp_path / "out")) == 0
    assert (task / "accuracy.json").read_bytes() == before, "nothing is scored a second time"


@pytest.fixture(scope="module")
def front(folder):
    return run(folder, "front", "{minimize: pareto, halves: true, proxy: 2}", "nsga2")


def journal(task: Path) -> list[Any]:
    (path,) = (task / "runs").glob("*.jsonl*")
    return [entry.result.outcome for entry in read_journal(path) if entry.result is not None]


def test_searches_see_one_half_and_finalists_are_scored_on_the_other(front):
    scores = read_json(front / "accuracy.json")
    images = {name.partition(" ")[2]: len(score["per_item"]) for name, score in scores.items()}
    assert images.keys() == {"main", "main search", "main proxy"}
    assert images["main"] + images["main search"] == 40
    assert images["main proxy"] == 2
    seen = {len(outcome.per_item) for outcome in journal(front) if outcome.per_item}
    assert seen == {images["main search"]}
    goal = read_json(front / "task.json")["goal"]
    reference = next(score for name, score in scores.items() if name.endswith(" main search"))
    assert goal["reference"] == reference["metrics"]["cosine"]


def test_pareto_search_has_several_finalists_with_scoring_counts(front):
    picks = [pick for pick in read_json(front / "rows.json")["picks"] if pick["kind"] == "search"]
    assert {pick["rank"] for pick in picks if pick["budget"] == 5} == {0}
    assert len([pick for pick in picks if pick["budget"] == 8]) >= 2
    full = sum("cosine" in outcome.metrics for outcome in journal(front))
    assert {pick["scored"] for pick in picks if pick["budget"] == 8} == {full}
    assert all(PROXY in outcome.metrics for outcome in journal(front))
    assert all(pick["agreement"] is None or -1 <= pick["agreement"] <= 1 for pick in picks)
    assert (front.parent / "report" / "main.md").exists()


def test_accuracy_objective_meets_latency_bound(folder):
    task = run(folder, "first", "{minimize: accuracy, max_latency: 90%}")
    goal = read_json(task / "task.json")["goal"]
    assert goal["max_latency_ms"] == pytest.approx(9.0)
    pick = next(p for p in read_json(task / "rows.json")["picks"] if p["kind"] == "search" and p["budget"] == 8)
    fast = [outcome.samples_ms[0] for outcome in journal(task) if outcome.samples_ms[0] <= 9.0]
    assert pick["search_ms"] == pytest.approx(max(fast)), "speed costs accuracy, so the slowest that is fast enough"
    assert all(("cosine" in outcome.metrics) == (outcome.samples_ms[0] <= 9.0) for outcome in journal(task))
    seen = [outcome.metrics["cosine"] for outcome in journal(task) if "cosine" in outcome.metrics]
    assert pick["loss"] == pytest.approx(goal["reference"] - max(seen)), "by which the best of several seeds is chosen"
    schemes = [scheme for pattern in read_cache(task / "patterns.yaml").patterns.values() for scheme in pattern.schemes]
    assert all(scheme.baseline_ms == pytest.approx(10.0) for scheme in schemes), (
        "what is learned of patterns is latency"
    )
    assert {scheme.latency_ms for scheme in schemes} <= {outcome.samples_ms[0] for outcome in journal(task)}


def test_resumed_run_does_not_score_again(front, folder, monkeypatch):
    before = {path: path.read_bytes() for path in (*front.glob("runs/*"), front / "accuracy.json")}
    monkeypatch.setattr(
        "harness.run.prepare.accuracy_store.scoring_progress", lambda *_: pytest.fail("everything is scored already")
    )
    assert qdq("run", str(folder / "front.yaml"), "--out", str(folder / "front")) == 0
    assert before == {path: path.read_bytes() for path in before}


def test_resumed_run_scores_float_model_first(front, folder, tmp_path):
    """Evaluators that compare with it saw it in the earlier process, and what they kept is gone."""
    shutil.copytree(folder / "front", tmp_path / "more")
    unpack(tmp_path / "more" / front.name)
    (path,) = (tmp_path / "more" / front.name / "runs").glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-4]))
    assert qdq("run", str(folder / "front.yaml"), "--out", str(tmp_path / "more")) == 0
    told = [entry.result.outcome for entry in read_journal(path) if entry.proposal.duplicate_of is None]
    assert len(told) == 8
    assert all(PROXY in outcome.metrics for outcome in told)


def test_check_warns_of_half_with_few_samples(folder, capsys):
    file = folder / "few.yaml"
    text = EXPERIMENT.replace("OBJECTIVE", "{max_drop: 0.1, halves: true}").replace("SEARCHER", "random")
    file.write_text(text.replace("path: labelled.npz", "path: labelled.npz, count: 30"))
    assert qdq("run", str(file), "--check") == 0
    said = capsys.readouterr()
    assert "bound: cosine may drop by at most 0.1\n" in said.out
    error = said.err
    assert re.search(r"model 'net': evaluator, search half: only \d+ samples: the interval is too wide", error)
    assert re.search(r"model 'net': evaluator, report half: only \d+ samples: the interval is too wide", error)


@pytest.fixture
def copy(front, tmp_path):
    shutil.copytree(front.parent, tmp_path / "front")
    return tmp_path / "front" / front.name


def models(task: Path) -> dict[str, Path]:
    return {row["id"]: task / "models" / row["file"] for row in read_json(task / "rows.json")["rows"]}


def test_verify_confirms_every_exported_file(front, folder, capsys):
    found = models(front)
    (placement,) = [row["id"] for row in read_json(front / "rows.json")["rows"] if row["choices"] is not None][:1]
    for name in ("float", placement):
        assert qdq("verify", str(found[name]), "--base", str(folder)) == 0
        lines = capsys.readouterr().out.splitlines()
        wanted = ["file: ok", "edges: ok", "accuracy: ok"] + (["latency: ok"] if name != "float" else [])
        assert [line.rpartition(": ")[0].partition(": ok")[0] + ": ok" for line in lines] == wanted
        lost = re.search(r"cosine \S+ recorded, \S+ now; drop [+-]0\.\d{4} \[.*\], no bound$", lines[2])
        assert (lost is not None) == (name != "float")


def placed(task: Path) -> list[str]:
    """The rows of placements, the one with the lowest score first."""
    scores = read_json(task / "accuracy.json")
    rows = [row for row in read_json(task / "rows.json")["rows"] if row["choices"] is not None]
    return [row["id"] for row in sorted(rows, key=lambda row: _cosine(scores, row["sha256"]))]


def _cosine(scores: Any, sha256: str) -> float:
    return float(scores[f"{sha256} main"]["metrics"]["cosine"])


def change_models(copy: Path, change: Any) -> None:
    """Change the models of the stored experiment."""
    reopen_results(copy.parent)
    stored = yaml.safe_load((copy.parent / "experiment.yaml").read_text())
    change(stored)
    (copy.parent / "experiment.yaml").write_text(yaml.safe_dump(stored))


def without_evaluator(stored: Any) -> None:
    stored["models"][0]["evaluator"], stored["objective"] = None, {}


def changed(path: Path, change: Any) -> None:
    forget_task(path.parent)
    body = read_json(path)
    change(body)
    write_json(path, body)


def set_bound(task: Path, bound: float) -> None:
    """Change the bound of a stored task, also in the headers of its journals."""
    changed(task / "task.json", lambda body: body["goal"].update(max_drop=bound))
    for stored in sorted((task / "runs").glob("*.jsonl.gz")):
        restore_lines(stored.with_suffix(""))
        replace_text(stored.with_suffix(""), '"max_drop":null', f'"max_drop":{bound}')


@pytest.mark.parametrize(("bound", "expected"), [(0.0, "beyond the bound 0"), (0.9, "within the bound 0.9")])
def test_verify_compares_drop_with_bound(copy, folder, capsys, bound, expected):
    set_bound(copy, bound)
    worst = placed(copy)[0]
    broken = expected.startswith("beyond")
    assert qdq("verify", str(models(copy)[worst]), "--base", str(folder)) == int(broken)
    lines = {line.partition(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["accuracy"].startswith("accuracy: ok: ")
    assert lines["accuracy"].endswith(f", {expected}")
    assert lines["bound"].startswith(f"bound: {'BROKEN' if broken else 'ok'}: ")
    assert lines["bound"].endswith(f", {expected}")


@pytest.mark.parametrize(("bound", "status"), [("0", 1), ("0%", 1), ("90%", 0), ("0.9", 0), ("-1", 2), ("half", 2)])
def test_verify_max_drop_replaces_experiment_bound(copy, folder, capsys, bound, status):
    """It counts in the place of the experiment's, which has none here; one score fewer does not loosen it."""
    file = models(copy)[placed(copy)[0]]
    changed(copy / "accuracy.json", lambda body: body.pop(f"{digest_file(file)} main"))
    assert qdq("verify", str(file), "--base", str(folder), "--max-drop", bound) == status
    said = capsys.readouterr()
    assert "--max-drop" in said.err if status == 2 else f"bound: {'BROKEN' if status else 'ok'}: drop +" in said.out


def test_verify_reports_unscored_row_as_bound_violation(copy, folder, capsys):
    set_bound(copy, 0.9)
    placement = placed(copy)[0]
    changed(copy / "task.json", lambda body: body.update(metric="other"))
    assert qdq("verify", str(models(copy)[placement]), "--base", str(folder)) == 1
    assert "bound: BROKEN: cannot be checked against 0.9" in capsys.readouterr().out


def test_verify_reports_missing_accuracy(copy, folder, capsys):
    placement = placed(copy)[0]
    changed(copy / "accuracy.json", lambda body: body.clear())
    assert qdq("verify", str(models(copy)[placement]), "--base", str(folder)) == 0
    assert "accuracy: not measured: the folder has no score of this file\n" in capsys.readouterr().out
    change_models(copy, without_evaluator)
    assert qdq("verify", str(models(copy)[placement]), "--base", str(folder)) == 0
    assert "accuracy: not measured: the model has no evaluator\n" in capsys.readouterr().out
    assert qdq("verify", str(models(copy)[placement]), "--base", str(folder), "--max-drop", "0.1") == 2
    assert "--max-drop: model 'net' has no evaluator" in capsys.readouterr().err


def other_choices(body: Any) -> None:
    row = next(row for row in body["rows"] if row["choices"] is not None)
    row["choices"][0] = 1 - row["choices"][0]


def other_figures(body: Any) -> None:
    for score in body.values():
        score["metrics"] = {metric: value - 0.01 for metric, value in score["metrics"].items()}
        score |= {"per_item": [], "evidence": ""}  # which would deny it before anything is repeated


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [("rows.json", other_choices, "edges: MISMATCH"), ("accuracy.json", other_figures, "accuracy: MISMATCH")],
)
def test_verify_exits_1_on_mismatch_with_records(copy, folder, capsys, name, change, expected):
    changed(copy / name, change)
    placement = placed(copy)[0]
    assert qdq("verify", str(models(copy)[placement]), "--base", str(folder)) == 1
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "status", "said"), [(0.5, 1, "MISMATCH: speedup "), (2, 0, "ok: speedup ")])
def test_verify_exits_1_if_speedup_is_not_reproduced(copy, folder, capsys, factor, status, said):
    placement = placed(copy)[0]
    unpack(copy)
    head, *events = read_records(copy / "confirmation.jsonl")
    for event in events:
        if event["row"] == placement:
            event["samples_ms"] = [sample * factor for sample in event["samples_ms"]]
    write_records(copy / "confirmation.jsonl", (head, *events))
    assert qdq("verify", str(models(copy)[placement]), "--base", str(folder)) == status
    checks = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert checks["latency"].startswith(said)
    assert ("faster than recorded" in checks["latency"]) == (status == 0)
    assert all(checks[what].startswith("ok") for what in ("file", "edges", "accuracy"))


@pytest.mark.parametrize(
    ("recorded", "now", "noise", "expected"),
    [
        ((2.9, 3.1), (1.7, 5.0), 3.1, None),
        ((2.9, 3.1), (0.9, 5.0), 0.1, None),
        ((2.9, 3.1), (1.7, 5.0), 0.1, True),
        ((2.9, 3.1), (1.1, 1.2), 0.1, False),
        ((0.8, 0.9), (0.8, 0.9), 0.1, True),
    ],
)
def test_lost_gain_within_the_noise_is_inconclusive(recorded, now, noise, expected):
    intervals = (Interval(value=sum(limits) / 2, low=limits[0], high=limits[1]) for limits in (recorded, now))
    assert speedup_agrees(*intervals, noise) is expected


def test_verify_reports_changed_file(copy, capsys):
    file = models(copy)["all"] if "all" in models(copy) else models(copy)["float"]
    file.write_bytes(file.read_bytes() + b"\n")
    assert qdq("verify", str(file)) == 1
    assert "file: MISMATCH: SHA-256" in capsys.readouterr().out


def test_verify_accepts_row_instead_of_file(front, folder, capsys):
    assert qdq("verify", str(front.parent), "1", "--base", str(folder)) == 0
    assert "edges: ok: 0 Q/DQ pairs recorded" in capsys.readouterr().out, "the first row is the float model"
    assert qdq("verify", str(front.parent)) == 0
    assert "none damaged" in capsys.readouterr().out
    assert qdq("verify", str(models(front)["float"]), "1") == 2
    assert "a row needs a results folder" in capsys.readouterr().err


def test_verify_checks_row_in_its_own_task(front, copy, folder, capsys):
    """The other task comes first, and says something else of that file."""
    other = copy.with_name(f"a-{copy.name}")
    shutil.copytree(copy, other)
    changed(other / "accuracy.json", other_figures)
    change_models(copy, lambda stored: stored["models"].insert(0, {**deepcopy(stored["models"][0]), "label": "a-net"}))
    facts = read_json(other / "task.json")
    write_json(other / "task.json", {**facts, "task": other.name, "model": "a-net"})
    for task, status in ((copy, 0), (other, 1)):
        assert qdq("verify", str(copy.parent), f"{task.name}/all", "--base", str(folder)) == status
        assert f"accuracy: {'MISMATCH' if status else 'ok'}" in capsys.readouterr().out


def test_verify_row_without_file_lists_rows_with_file(copy, folder, capsys):
    models(copy)["float"].unlink()
    assert qdq("verify", str(copy.parent), "1") == 2
    assert "row '1' has no exported model; there are:" in capsys.readouterr().err
    shutil.rmtree(copy / "models")
    assert qdq("verify", str(copy.parent), "1") == 2
    assert "row '1' has no exported model; nothing is exported there" in capsys.readouterr().err


def test_verify_names_base_of_missing_relative_path(front, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert qdq("verify", str(models(front)["float"])) == 2
    assert "start from .: set the folder of its file by --base" in capsys.readouterr().err


def test_verify_refuses_file_outside_results(front, folder, capsys):
    assert qdq("verify", str(folder / "nothing.onnx")) == 2
    assert "nothing.onnx: no such file" in capsys.readouterr().err
    assert qdq("verify", str(folder / "labelled.npz")) == 2
    assert "in no results folder: give RESULTS/TASK/models/NAME.onnx" in capsys.readouterr().err
    assert qdq("verify", str(folder / "labelled.npz"), "--results", str(front.parent)) == 2
    assert "has no row of this file" in capsys.readouterr().err
