"""From the YAML to the table, on a simulated runtime: what a user sees, runs again, interrupts and gets wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main
from harness.graph.build import GraphBuilder
from harness.run.journal import read_journal

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 16, 16))
    for channels in (8, 8, 12, 12):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    x = builder.op("Add", x, builder.conv(x, 12, 1))
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(folder / "net.onnx")
    (folder / "small.yaml").write_text(EXPERIMENT)
    return folder


def qdq(*arguments: str) -> int:
    """Run the command in this process and give its exit code."""
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def done(folder):
    out = folder / "out"
    assert qdq("run", str(folder / "small.yaml"), "--out", str(out)) == 0
    return out


def choices(out: Path) -> dict[str, list[tuple[int, ...]]]:
    return {p.name: [e.asked.choices for e in read_journal(p)] for p in sorted(out.glob("*/runs/*.jsonl"))}


def test_every_method_has_its_row_and_the_tables_are_written(done):
    table = (done / "report" / "main.md").read_text()
    rows = [line.split("|")[4].strip() for line in table.splitlines() if line.startswith("| net")]
    assert rows == ["float", "all", "linear", "random", "evolutionary"]
    assert "baseline" in table
    assert {p.name for p in (done / "report").iterdir()} >= {
        "main.md", "main.csv", "main.tex", "budget.md", "budget.csv", "budget.tex", "anytime-net-simulated-int8.png",
    }  # fmt: skip
    assert "Calibrated on random data (no accuracy): net" in table


def test_a_finished_experiment_run_again_measures_nothing(done, folder):
    before = {p: p.read_bytes() for p in done.glob("*/*.jsonl")} | {p: p.read_bytes() for p in done.glob("*/runs/*")}
    assert qdq("run", str(folder / "small.yaml"), "--out", str(done)) == 0
    assert before == {p: p.read_bytes() for p in before}


def test_the_delivered_file_is_the_confirmed_one(done):
    import hashlib

    cell = done / "net-simulated-int8"
    body = json.loads((cell / "rows.json").read_text())
    confirmed = json.loads((cell / "confirm.jsonl").read_text().splitlines()[0])["rows"]
    for row in body["rows"]:
        assert hashlib.sha256((cell / "models" / row["file"]).read_bytes()).hexdigest() == row["sha256"]
        assert confirmed[row["id"]] == row["sha256"]


def test_another_experiment_does_not_write_into_these_results(done, folder, capsys):
    other = folder / "other.yaml"
    other.write_text(EXPERIMENT.replace("seeds: [0, 1]", "seeds: [0, 2]"))
    assert qdq("run", str(other), "--out", str(done)) == 2
    assert "holds results of another experiment (different: seeds); use another --out" in capsys.readouterr().err


def test_a_folder_with_other_things_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("dear")
    assert qdq("run", str(folder / "small.yaml"), "--out", str(tmp_path)) == 2
    assert "is not empty and holds no experiment" in capsys.readouterr().err


def test_check_shows_the_plan_and_runs_nothing(folder, tmp_path, capsys):
    out = tmp_path / "never"
    assert qdq("run", str(folder / "small.yaml"), "--out", str(out), "--check") == 0
    assert "net-simulated-int8: random-0, evolutionary-0, random-1, evolutionary-1" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("random, evolutionary", "randon"), "no searcher is called 'randon'; did you mean 'random'"),
        (("[random, evolutionary]", "[{use: random, params: {speed: 1}}]"), "has no parameter 'speed'"),
        (("use: simulated", "use: openvinno"), "no benchmarker is called 'openvinno'; did you mean 'openvino'"),
        (("use: net.onnx", "use: not.onnx"), "not.onnx: no such file or folder"),
        (("use: net.onnx", "use: 'zoo:resnet19'"), "did you mean 'resnet18'"),
        (("seeds: [0, 1]", "objective: {max_drop: 0.1}"), "model 'net' has no evaluator whose metric could drop"),
    ],
)
def test_mistakes_end_with_one_message_and_status_2(folder, tmp_path, capsys, change, expected):
    file = folder / "wrong.yaml"
    file.write_text(EXPERIMENT.replace(*change))
    assert qdq("run", str(file), "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


def test_report_of_something_else_names_the_remedy(tmp_path, capsys):
    assert qdq("report", str(tmp_path)) == 2
    assert "no results here (no experiment.yaml); qdq run" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_with_the_same_asks(done, folder, tmp_path):
    command = [sys.executable, "-m", "harness.cli", "run", str(folder / "small.yaml"), "--out", str(tmp_path / "out")]
    rng = random.Random(7)
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
        wanted = len(list(tmp_path.glob("out/*/runs/*.jsonl"))) + rng.randint(0, 1)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(list(tmp_path.glob("out/*/runs/*.jsonl"))) > wanted:
                time.sleep(rng.random() * 0.02)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        process.wait()
    assert kills
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert choices(tmp_path / "out") == choices(done)
    budget = Path("report/budget.md")
    assert (tmp_path / "out" / budget).read_text() == (done / budget).read_text()
