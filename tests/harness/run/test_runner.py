"""From the YAML to the table, on a simulated runtime: what a user sees, runs again, interrupts and gets wrong."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from small import qdq, save_small
from stored import forget_task, read_records, unpack, write_records

from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.config.experiment import load_experiment
from harness.graph.io.digests import digest_file
from harness.measure.records import Failed
from harness.measure.turn_log import summarize_turns
from harness.report.plots.plot_files import draw_plots
from harness.results.artifacts import read_finalists
from harness.results.journal import read_journal
from harness.results.manifest import read_manifest
from harness.results.ownership import owned_results_dir
from harness.results.turns import CONFIRMATION_LOG_NAME, read_comparison
from harness.run.runner import run_experiment

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random, evolutionary]
initial: [float, all, linear]
baselines: [all, linear]
budget: {evaluations: [6, 12]}
seeds: [0, 1]
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
SHORT = EXPERIMENT.replace("[random, evolutionary]", "[random]").replace("[6, 12]", "[4]").replace("[0, 1]", "[0]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    save_small(folder / "net.onnx")
    (folder / "small.yaml").write_text(EXPERIMENT)
    return folder


@pytest.fixture(scope="module")
def done(folder):
    out = folder / "out"
    assert qdq("run", str(folder / "small.yaml"), "--out", str(out)) == 0
    return out


def choices(out: Path) -> dict[str, list[tuple[int, ...]]]:
    return {p.name: [e.proposal.choices for e in read_journal(p)] for p in sorted(out.glob("*/runs/*.jsonl*"))}


def test_every_method_has_its_row_and_the_tables_are_written(done, folder, monkeypatch):
    table = (done / "report" / "main.md").read_text()
    rows = [line.split("|")[4].strip() for line in table.splitlines() if line.startswith("| net")]
    assert rows == ["float", "all", "linear", "random", "evolutionary"]
    assert "baseline" in table
    assert {p.name for p in (done / "report").iterdir()} >= {
        "main.md", "main.csv", "main.tex", "budget.md", "budget.csv", "budget.tex", "index.html",
    }  # fmt: skip
    monkeypatch.setattr(importlib.import_module("harness.report.render"), "draw_plots", draw_plots)
    shutil.rmtree(done / "report")
    assert qdq("run", str(folder / "small.yaml"), "--out", str(done)) == 0
    assert not list((done / "report").glob("*.png")), "the page draws the curves of a task"
    assert qdq("report", str(done)) == 0
    assert (done / "report" / "anytime-net-simulated-int8.png").exists()
    assert "Calibrated on random data (no accuracy): net" in table


def test_a_finished_experiment_run_again_measures_nothing(done, folder):
    before = {p: p.read_bytes() for p in done.glob("*/*.jsonl.gz")} | {p: p.read_bytes() for p in done.glob("*/runs/*")}
    assert qdq("run", str(folder / "small.yaml"), "--out", str(done)) == 0
    assert before == {p: p.read_bytes() for p in before}
    forget_task(done / "net-simulated-int8")
    assert qdq("run", str(folder / "small.yaml"), "--out", str(done)) == 0
    assert before == {p: p.read_bytes() for p in before}


ALONE = """
from harness.plugins.api import Capabilities
import threading
import time
from contextlib import contextmanager
from harness.runtimes.simulated import SimulatedBenchmarker

BUSY = threading.Lock()

class Bench(SimulatedBenchmarker):
    capabilities = Capabilities(dialect="openvino")

    @contextmanager
    def open(self, artifact):
        with super().open(artifact) as probe:
            yield Alone(probe)

class Alone:
    def __init__(self, probe):
        self.probe, self.infer = probe, probe.infer

    def sample(self, n):
        assert BUSY.acquire(blocking=False), "two engines are timed at once"
        time.sleep(0.001)
        BUSY.release()
        return self.probe.sample(n)
"""


def test_parallel_searches_time_one_engine_at_a_time(done, folder, tmp_path):
    (folder / "alone.py").write_text(ALONE)
    text = EXPERIMENT.replace("use: simulated", "use: 'alone:Bench', label: simulated")
    (folder / "at_once.yaml").write_text(f"{text}executor: {{searches: 4}}\n")
    assert qdq("run", str(folder / "at_once.yaml"), "--out", str(tmp_path / "out")) == 0
    assert choices(tmp_path / "out") == choices(done)
    entries = [entry for path in (tmp_path / "out").glob("*/runs/*.jsonl*") for entry in read_journal(path)]
    assert not [entry for entry in entries if entry.result and isinstance(entry.result.outcome, Failed)]


def test_changed_imported_model_is_timed_again(done, folder, tmp_path):
    best = max((done / "net-simulated-int8" / "models").glob("*.onnx"), key=lambda path: path.stat().st_size)
    shutil.copy(best, folder / "mine.onnx")
    mine = "{use: import, label: mine, params: {path: mine.onnx}}"
    text = SHORT.replace("[float, all, linear]", f"[float, {mine}]").replace("[all, linear]", "[mine]")
    (folder / "mine.yaml").write_text(text)
    assert qdq("run", str(folder / "mine.yaml"), "--out", str(tmp_path / "out")) == 0
    proto = onnx.load(folder / "mine.onnx")
    proto.doc_string = "trained once more"
    onnx.save(proto, folder / "mine.onnx")
    assert qdq("run", str(folder / "mine.yaml"), "--out", str(tmp_path / "out")) == 0
    row = next(row for row in read_finalists(tmp_path / "out" / "net-simulated-int8")[0] if row.id == "mine")
    assert row.sha256 == digest_file(folder / "mine.onnx")


def test_imported_models_keep_their_own_external_data(done, folder, tmp_path):
    quantized = next(row.file for row in read_finalists(done / "net-simulated-int8")[0] if row.pairs)
    for label in "ab":
        proto = onnx.load(done / "net-simulated-int8" / "models" / quantized)
        weight = next(tensor for tensor in proto.graph.initializer if len(tensor.dims) == 4)
        weight.raw_data = label.encode() * len(weight.raw_data)
        (folder / label).mkdir()
        path = folder / label / "model.onnx"
        onnx.save(proto, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    theirs = ", ".join(f"{{use: import, label: {label}, params: {{path: {label}/model.onnx}}}}" for label in "ab")
    text = SHORT.replace("[float, all, linear]", f"[float, {theirs}]").replace("[all, linear]", "[a, b]")
    (folder / "both.yaml").write_text(text)
    assert qdq("run", str(folder / "both.yaml"), "--out", str(tmp_path / "out")) == 0
    for label in "ab":
        exported = tmp_path / "out" / "net-simulated-int8" / "models" / f"{label}.onnx"
        assert onnx.load(exported) == onnx.load(folder / label / "model.onnx")


def test_extreme_baseline_has_row_and_task_is_complete(folder, tmp_path):
    (folder / "stress.yaml").write_text(SHORT.replace("baselines: [all, linear]", "baselines: [extreme]"))
    for _ in range(2):
        assert qdq("run", str(folder / "stress.yaml"), "--out", str(tmp_path / "out")) == 0
    assert read_manifest(tmp_path / "out")["complete"]
    assert "extreme" in {row.id for row in read_finalists(tmp_path / "out" / "net-simulated-int8")[0]}


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"config": 1}', '{"complete":true,"files":{}}'])
def test_damaged_manifest_is_refused_and_rewritten_after_removal(copy, folder, damage, capsys):
    (copy / "manifest.json").write_text(damage)
    assert qdq("run", str(folder / "small.yaml"), "--out", str(copy)) == 2
    assert "manifest.json: cannot be read" in capsys.readouterr().err.replace("\n", " ")
    (copy / "manifest.json").unlink()
    assert qdq("run", str(folder / "small.yaml"), "--out", str(copy)) == 0
    assert read_manifest(copy)["complete"]


def test_missing_model_file_is_exported_again(copy, folder):
    file = next((copy / "net-simulated-int8").glob("models/*.onnx"))
    body = file.read_bytes()
    file.unlink()
    assert qdq("run", str(folder / "small.yaml"), "--out", str(copy)) == 0
    assert file.read_bytes() == body


def test_the_delivered_file_is_the_confirmed_one(done):
    import hashlib

    task = done / "net-simulated-int8"
    body = read_json(task / "rows.json")
    confirmed = read_records(task / "confirmation.jsonl")[0]["rows"]
    for row in body["rows"]:
        assert hashlib.sha256((task / "models" / row["file"]).read_bytes()).hexdigest() == row["sha256"]
        assert confirmed[row["id"]] == row["sha256"]


def test_confirmed_latencies_equal_simulated_latencies(done):
    """The simulated runtime has no noise here, so each search's own record tells what the confirmation must find."""
    task = done / "net-simulated-int8"
    truth_ms = {
        entry.proposal.digest: entry.result.outcome.info["truth_ms"]
        for path in task.glob("runs/*.jsonl*")
        for entry in read_journal(path)
        if entry.result is not None
    }
    rows = [row for row in read_finalists(task)[0] if row.id != "float"]
    confirmed = summarize_turns(read_comparison(task / CONFIRMATION_LOG_NAME), baseline="float").rows
    assert len(rows) >= 3
    for row in rows:
        assert confirmed[row.id].latency_ms.value == pytest.approx(truth_ms[row.id])
        assert confirmed[row.id].speedup.value == pytest.approx(10.0 / truth_ms[row.id])
    assert max(confirmed[row.id].speedup.value for row in rows) > 1.05


@pytest.fixture
def copy(done, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done, out)
    return out


def test_resume_on_other_machine_or_version_is_refused(copy, folder, capsys):
    forget_task(copy / "net-simulated-int8")
    path = copy / "net-simulated-int8" / "env.json"
    facts = read_json(path)
    facts["cpu"]["model"], facts["packages"]["numpy"], facts["load_average"] = "i486", "1.0", [99, 99, 99]
    facts["cpu"]["flags"] = ["mmx"]  # processors of one name differ in what multiplies INT8
    write_json(path, facts)
    stopped = path.with_name("stopped.txt")
    stopped.write_text("the disk was full\n")
    assert qdq("run", str(folder / "small.yaml"), "--out", str(copy)) == 2
    error = capsys.readouterr().err
    assert "cpu: 'i486' -> " in error
    assert "packages.numpy: '1.0' -> " in error
    assert "instructions: ['mmx'] -> " in error
    assert "load_average" not in error
    assert read_json(path) == facts
    assert stopped.read_text() == "the disk was full\n", "what is refused changes nothing"


def test_a_changed_confirmation_starts_anew_and_keeps_the_old_one(copy, folder):
    task = copy / "net-simulated-int8"
    unpack(task)
    lines = read_records(task / "confirmation.jsonl")
    old = [{**lines[0], "plan": {**lines[0]["plan"], "rounds": 9}}, *lines[1:]]
    write_records(task / "confirmation.jsonl", old)
    assert qdq("run", str(folder / "small.yaml"), "--out", str(copy)) == 0
    assert read_records(task / "confirmation.1.jsonl") == old
    assert {**read_records(task / "confirmation.jsonl")[0], "id": ""} == {**lines[0], "id": ""}
    assert len(read_records(task / "confirmation.jsonl")) == len(lines)


def test_progress_of_resumed_confirmation_counts_remaining_turns(copy, folder):
    unpack(copy / "net-simulated-int8")
    path = copy / "net-simulated-int8" / "confirmation.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[: 1 + (len(whole) - 1) // 3]))  # one build of three
    bars = {}

    class Bars(NullProgress):
        def work(self, title, total):
            bars[title.partition(":")[0]] = self.bar = [total, 0]
            return super().work(title, total)

        def advance(self, note=""):
            self.bar[1] += 1

    config = load_experiment(folder / "small.yaml")
    run_experiment(config, out=copy, observer=Bars())
    assert bars["confirmation"] == [2 * (len(whole) - 1) // 3] * 2


def test_a_folder_with_other_things_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("dear")
    assert qdq("run", str(folder / "small.yaml"), "--out", str(tmp_path)) == 2
    assert "is not empty and holds no experiment" in capsys.readouterr().err


def test_folder_with_only_lock_file_is_accepted(folder, tmp_path):
    (tmp_path / ".lock").write_text("1")
    with owned_results_dir(tmp_path, load_experiment(folder / "small.yaml")):
        assert (tmp_path / "experiment.yaml").exists()
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()}, since ")


@pytest.mark.parametrize("text", ["a: [", "just words", "\0"])
def test_damaged_stored_experiment_is_refused(folder, tmp_path, capsys, text):
    (tmp_path / "experiment.yaml").write_text(text)
    assert qdq("run", str(folder / "small.yaml"), "--out", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "experiment.yaml: " in error
    assert "use another --out" in error
    assert "Traceback" not in error


def test_changed_description_is_same_experiment(folder, tmp_path):
    config = load_experiment(folder / "small.yaml")
    for description in ("", "with more words"):
        changed = config.model_copy(update={"description": description})
        with owned_results_dir(tmp_path / "out", changed):
            assert (tmp_path / "out" / "experiment.yaml").is_file()


def test_a_task_that_cannot_be_run_does_not_stop_the_others(folder, tmp_path, capsys):
    for name in ("bad", "worse"):
        (folder / f"{name}.onnx").write_bytes(b"no model")
    file = folder / "two.yaml"
    file.write_text(SHORT.replace("models: [", "models: [bad.onnx, worse.onnx, "))
    assert qdq("run", str(file), "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert re.search(r"bad-simulated-int8: .*bad\.onnx", error)
    assert re.search(r"worse-simulated-int8: .*worse\.onnx", error)
    turns = read_comparison(tmp_path / "out" / "net-simulated-int8" / CONFIRMATION_LOG_NAME)
    assert len(summarize_turns(turns, baseline="float").rows) > 1
    assert qdq("report", str(tmp_path / "out")) == 0
    notes = (tmp_path / "out" / "report" / "main.md").read_text()
    assert re.search(r"UNFINISHED.*bad-simulated-int8 stopped: .*bad\.onnx", notes)
    shutil.copy(folder / "net.onnx", folder / "bad.onnx")
    assert qdq("run", str(file), "--out", str(tmp_path / "out")) == 2
    assert qdq("report", str(tmp_path / "out")) == 0
    notes = (tmp_path / "out" / "report" / "main.md").read_text()
    assert "bad-simulated-int8 stopped" not in notes
    assert "worse-simulated-int8 stopped" in notes


def test_error_of_only_task_is_printed_once(folder, tmp_path, capsys):
    (folder / "hello.onnx").write_bytes(b"hello")
    file = folder / "one.yaml"
    file.write_text(EXPERIMENT.replace("net.onnx", "hello.onnx"))
    assert qdq("run", str(file), "--out", str(tmp_path / "out")) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "hello.onnx: " in line]
    assert len(lines) == 1
    assert lines[0].startswith("qdq: ")


FULL = """
import resource, sys
from pathlib import Path
from harness.base.errors import UserError
from harness.run.prepare.task import compose_task
from harness.config.experiment import load_experiment
from harness.base.progress import NullProgress
from harness.config.experiment import plan_tasks

config, work = load_experiment(Path(sys.argv[1])), Path(sys.argv[2])
task = compose_task(config, plan_tasks(config)[0], work, NullProgress())
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    task.candidate(task.space.quantize_all()).source()
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_no_failure_of_the_candidate(folder, tmp_path):
    command = [sys.executable, "-c", FULL, str(folder / "small.yaml"), str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "candidates: cannot be written (File too large)" in done.stdout
    assert "make room, then run the same command again" in done.stdout


def test_check_shows_the_plan_and_runs_nothing(folder, tmp_path, capsys):
    out = tmp_path / "never"
    assert qdq("run", str(folder / "small.yaml"), "--out", str(out), "--check") == 0
    assert "net-simulated-int8: random-0, evolutionary-0, random-1, evolutionary-1" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("random, evolutionary", "randon"), "external searcher is called 'randon'; did you mean 'random'"),
        (("[random, evolutionary]", "[{use: random, params: {speed: 1}}]"), "has no parameter 'speed'"),
        (("use: simulated", "use: openvinno"), "no benchmarker is called 'openvinno'; did you mean 'openvino'"),
        (("use: net.onnx", "use: not.onnx"), "not.onnx: no such file or folder"),
    ],
)
def test_mistakes_end_with_one_message_and_status_2(folder, tmp_path, capsys, change, expected):
    file = folder / "wrong.yaml"
    file.write_text(EXPERIMENT.replace(*change))
    assert qdq("run", str(file), "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
