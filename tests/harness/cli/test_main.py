"""Errors, help, logging and progress of the command line."""

import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from small import qdq, save_chain

from harness.base.errors import DoesNotHold, UserError
from harness.base.paths import WAIT_VARIABLE
from harness.base.terminal_progress import TerminalProgress
from harness.cli.doctor import plugin_purpose
from harness.cli.main import COMMANDS, TIMING_COMMANDS
from harness.plugins import registry
from harness.plugins.registry import Plugin
from harness.results.lines import read_lines

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
initial: [float, all]
baselines: [all]
budget: {evaluations: [4]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
MODEL = "{use: net.onnx, calibration: {samples: 2}}"
SEARCHER = """
from harness.base.errors import UserError
from search.space import Placement

class Mine:
    def __init__(self, space, *, seed):
        self.space, self.left = space, 3

    def ask(self, n):
        self.left -= 1
        return [Placement((1,) + (0,) * (len(self.space) - 1))] if self.left > 0 else []

    def tell(self, observation):
        pass

class Broken(Mine):
    def __init__(self, space, *, seed):
        raise RuntimeError("no licence")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_chain(tmp_path / "net.onnx", (4, 4), size=8)
    (tmp_path / "my_searcher_of_cli.py").write_text(SEARCHER)
    np.savez(tmp_path / "feeds.npz", x=np.zeros((2, 3, 8, 8), np.float32))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_searcher_of_cli", raising=False)
    return tmp_path


def model(text: str) -> tuple[str, str]:
    return MODEL, "{use: net.onnx, " + text + "}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("[random]", "[{use: evolutionary, params: {population: 0}}]"), "population is at least 1, but got 0"),
        (("[random]", "[{use: random, params: {seed: 1}}]"), "'seed' is set by the harness"),
        (
            ("[random]", "['my_searcher_of_cli:Broken']"),
            "my_searcher_of_cli:Broken' failed in its constructor: RuntimeError: no lic",
        ),
        (("noise: 0.0", "noise: -1.0"), "benchmarker 'simulated': noise: greater than or equal to 0, but got -1.0"),
        (
            ("use: simulated, params: {seed: 5, noise: 0.0}", "use: onnxruntime}]\nprecision: [fp8] # "),
            "precision 'fp8': backend 'onnxruntime' runs int8",
        ),
        ((MODEL, MODEL + ", 'zoo:resnet19'"), "models.1 (model 'resnet19'): zoo:resnet19: no such model; did you mean"),
        ((MODEL, MODEL + ", gone.onnx"), "models.1 (model 'gone'): gone.onnx: no such file or folder"),
        (
            model("calibration: {data: {use: npz, path: no.npz}}"),
            "models.0.calibration (model 'net'): no.npz: no such file",
        ),
        (model("preprocess: shape"), "no preprocessing is called 'shape'; did you mean 'shapes'"),
        (
            model("preprocess: shapes, calibration: {data: {use: images, images: none}}"),
            "models.0.calibration (model 'net'): none: no such file or folder",
        ),
        (
            model("preprocess: shapes, evaluator: {use: coco_map, params: {data: {use: shapes}, decode: shapes}}"),
            "models.0.evaluator (model 'net'): data.split: this key is required",
        ),
        (
            model("evaluator: {use: top1, params: {data: {use: npz, path: feeds.npz}}}"),
            "top1: data.labels: classes are needed, from an array of the .npz file",
        ),
        (
            model("evaluator: {use: top1, params: {data: {use: shapes, split: evaluation, count: 2}}}"),
            "data: images need 'preprocess', the name of what turns an image into an input",
        ),
        (model("evaluator: {use: fidelity, params: {sample: 3}}"), "no parameter 'sample'; did you mean 'samples'"),
        (
            model("evaluator: {use: fidelity, params: {base: 3}}"),
            "evaluator 'fidelity': 'base' is set by the harness, not by the experiment",
        ),
        (
            model(
                "preprocess: shapes, evaluator: {use: coco_map, "
                "params: {data: {use: shapes, split: evaluation, count: 1}, decode: shape}}"
            ),
            "no decoder is called 'shape'; did you mean 'shapes'",
        ),
        (("baselines:", "objective: {max_drop: 0.1}\nbaselines:"), "model 'net' has no evaluator whose metric"),
        (("budget:", "executor: {tasks: 2}\nbudget:"), "tasks: only for the executor 'ray', but use is 'local'"),
        (
            ("budget:", "executor: {use: ray, timing: concurrent}\nbudget:"),
            "timing: only for the executor 'local'",
        ),
        (("evaluations: [4]", "evaluations: [2]"), "budget.evaluations: at least 3, because the 2 placements"),
    ],
)
def test_check_reports_errors_before_run(folder, capsys, change, expected):
    file = folder / "wrong.yaml"
    assert change[0] in EXPERIMENT
    file.write_text(EXPERIMENT.replace(*change))
    for more in (["--check"], ["--out", str(folder / "out")]):
        assert qdq("run", str(file), *more) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run e.yaml --compile", "--compile: only with --check"),
        ("import gone.onnx net.onnx -o x.onnx", "gone.onnx: no such file"),
        ("apply ship gone.onnx --out out", "gone.onnx: no such file"),
        ("insert net.onnx -o x.onnx --calibration folder", "images need --preprocess"),
        ("explain net.onnx --backend onnxruntime --html x.html", "--html is for backend rtx_compile"),
        ("inspect check net.onnx --dialect onnxruntime", "--dialect onnxruntime: no rules about files"),
        ("report net.onnx", "net.onnx: a file, not the results folder"),
        ("report folder", "folder: contains output of ModelOpt's procedure"),
        ("report net.onnx --trace x:speedup", "net.onnx: a file, not the results folder"),
        ("import folder net.onnx -o x.onnx", "folder: no such file"),
        ("insert net.onnx -o x.onnx --placement .", ".: a results folder without a folder to deploy"),
        ("inspect agreement net.onnx --backend onnxruntime", "needs an evaluator whose data have labels"),
        ("explain folder/../out", "out: a results folder needs a row: qdq explain out ROW"),
        ("inspect recover net.onnx --backend onnxruntime", "recovery needs an evaluator"),
        (
            "bench noise net.onnx --backend simulated --placement lineer",
            "unknown placement 'lineer'; did you mean 'linear'",
        ),
        ("inspect regions assets:net.onnx", "assets:net.onnx: set the environment variable QDQ_ASSETS"),
        ("inspect regions ~nobody_here/net.onnx", "~nobody_here/net.onnx: Could not determine home directory"),
    ],
)
def test_arguments_that_a_command_cannot_use_are_named(folder, capsys, monkeypatch, command, expected):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("QDQ_ASSETS", raising=False)
    (folder / "experiment.yaml").touch()
    (folder / "folder").mkdir()
    (folder / "out").mkdir()
    (folder / "folder" / "autotuner_state.yaml").touch()
    assert qdq(*command.split()) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not (folder / "x.onnx").exists()


def test_assets_are_in_their_folder(folder, capsys, monkeypatch):
    monkeypatch.setenv("QDQ_ASSETS", str(folder / "assets"))
    (folder / "assets").mkdir()
    assert qdq("inspect", "regions", "assets:../net.onnx") == 2
    assert "assets:../net.onnx: leads outside of the folder that QDQ_ASSETS names" in capsys.readouterr().err


def test_a_searcher_in_the_experiments_folder_runs_from_any_directory(folder, tmp_path_factory, monkeypatch, capsys):
    (folder / "mine.yaml").write_text(EXPERIMENT.replace("[random]", "['my_searcher_of_cli:Mine']"))
    out = folder / "out"
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert qdq("run", str(folder / "mine.yaml"), "--out", str(out)) == 0
    assert "| Mine" in capsys.readouterr().out
    journal = read_lines(out / "net-simulated-int8" / "runs" / "Mine-0.jsonl")
    asks = [line for line in (json.loads(text) for _, text in journal) if line["kind"] == "proposal"]
    assert [line["origin"] for line in asks[:3]] == ["initial:float", "initial:all", "searcher"]
    assert asks[2]["choices"] == [1] + [0] * (len(asks[2]["choices"]) - 1), "what Mine proposes"


def test_only_own_warnings_are_printed_once(folder, capsys, monkeypatch):
    def noisy():
        for _ in range(3):
            logging.getLogger("harness.graph.load").warning("operators stay float: Foo")
        logging.getLogger("harness.graph.load").info("detail")
        logging.getLogger("matplotlib").warning("chatter")
        return {}

    monkeypatch.setattr("harness.zoo.model_names", noisy)
    assert qdq("list") == 0
    assert capsys.readouterr().err == "operators stay float: Foo\n"
    assert qdq("--verbose", "list") == 0
    assert "harness.graph.load: detail" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (("run", "small.yaml"), "qdq: interrupted; measurements are kept: run the same command again to continue\n"),
        (
            ("explain", "net.onnx"),
            "qdq: interrupted; its measurements are not kept: the same command starts from the beginning\n",
        ),
        (("list",), "qdq: interrupted\n"),
    ],
)
def test_an_interruption_prints_how_to_continue(folder, capsys, monkeypatch, command, printed):
    def stop(*_, **__):
        raise KeyboardInterrupt

    (folder / "small.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("harness.run.runner.run_experiment", stop)
    monkeypatch.setattr("harness.zoo.model_names", stop)
    monkeypatch.setattr("harness.insight.model_report.choose_backend", stop)
    assert qdq(*command) == 130
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_shows_an_example(capsys, command):
    assert qdq(*command.split(), "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Example: " in text
    assert ("an experiment file with one task brings" in text) is (command in ("bench noise", "inspect sensitivity"))


def test_help_imports_no_heavy_library():
    heavy = "{'numpy', 'onnx', 'pandas', 'pydantic', 'scipy'} & set(sys.modules)"
    code = f"import sys; import harness.cli.main; print({heavy} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_regions_command_prints_json(folder, capsys):
    assert qdq("inspect", "regions", str(folder / "net.onnx"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["dialect"] == "openvino"
    assert qdq("inspect", "regions", str(folder / "net.onnx"), "--shape", "1x3") == 2
    assert "--shape 1x3: NAME:SHAPE, for instance" in capsys.readouterr().err


def test_without_a_terminal_long_work_prints_progress_lines(capsys):
    with TerminalProgress(every_s=0.0) as terminal:
        terminal.say("a line that is far longer than eighty columns " * 4)
        with terminal.work("search", 3) as step:
            step.advance("best 2 ms")
            step.advance()
            step.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[1:] == [f"search: {k}/3, about 0:00 min left, best 2 ms" for k in (1, 2)]


def test_progress_omits_early_estimate_and_short_work(capsys):
    with TerminalProgress() as terminal, terminal.work("search", 2) as step:
        step.advance()
    with TerminalProgress(every_s=0.0) as terminal, terminal.work("confirmation", 40) as step:
        step.advance()
        step.advance()
        step.advance("about 1:13 min left with confirmation")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["confirmation: 1/40, 0:00 min so far", "confirmation: 2/40, about 0:00 min left"]
    assert lines[2:] == ["confirmation: 3/40, about 1:13 min left with confirmation"], "one estimate, of the whole task"


def test_a_progress_line_fits_80_columns_and_shows_the_time_left(capsys, monkeypatch):
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr("harness.base.terminal_progress.time.monotonic", lambda: float(next(clock)))
    incumbent = "best 1.500 ms, 2.00x interleaved with float's 3.000 ms"
    with (
        TerminalProgress(every_s=0.0) as terminal,
        terminal.work("a_model_of_a_long_name-openvino-int8 auto", 9) as step,
    ):
        step.advance(incumbent)
        step.advance(f"{incumbent}, about 12:40 min left in all")
        step.advance(incumbent)
    lines = [line for line in capsys.readouterr().err.splitlines() if "/9" in line]
    assert max(map(len, lines)) <= 80
    assert ["min left" in line for line in lines] == [True] * 3
    assert "12:40" in lines[1]
    assert "best 1.500 ms" in lines[0]


def test_the_estimate_grows_while_a_long_step_lasts(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("harness.base.terminal_progress.time.monotonic", lambda: now_s)
    with TerminalProgress() as terminal, terminal.work("recover", 5) as step:
        for now_s in (1.0, 2.0, 3.0, 4.0):  # noqa: B007 - read by the clock
            step.advance()
        now_s = 64.0
        assert "about 1:00 min left" in step.line(80)


def test_the_version_is_printed(capsys):
    assert qdq("--version") == 0
    assert re.fullmatch(r"qdq-bench \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_the_list_shows_the_purpose_of_each_plug_in(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        'class Walk:\n    """Walk about.\n\n    At random.\n    """\n\nraise RuntimeError\n'
    )
    (tmp_path / "broken.py").write_text("class (")
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for name, value in (("walk", "mine:Walk"), ("broken", "broken:Walk"), ("gone", "nowhere:Walk")):
        point = EntryPoint(name=name, value=value, group="qdq.searchers")
        found[name] = plugin_purpose(Plugin(name=name, kind="searcher", origin="mine 1", entry_point=point))
    assert found["walk"] == "Walk about."
    assert all("cannot be read" in found[name] or found[name] == "" for name in ("broken", "gone"))
    real = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda: EntryPoints([point, *real().select(group="qdq.searchers")]))
    assert qdq("list", "searcher") == 0
    assert {"gone", "random"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    monkeypatch.undo()
    assert qdq("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["kind"] for row in rows} >= {"searcher", "benchmarker", "evaluator", "dialect", "zoo model"}
    assert [row for row in rows if not row["what it does"]] == []
    assert any("7 bits" in row["what it does"] for row in rows if row["name"] == "openvino_7bit")


def test_help_shows_no_type_for_flags(capsys):
    assert qdq("run", "--help") == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert "bool" not in shown
    assert qdq("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(status in text for status in ("0 done", "1 a result", "2 wrong", "3 internal", "130 interrupted"))


@pytest.mark.parametrize(
    "exit_in",
    [
        "import sys\nsys.exit(0)\n",
        "def __init__(self, space, *, seed):",
        "def ask(self, n):",
        "def tell(self, observation):",
    ],
    ids=["import", "constructor", "ask", "tell"],
)
def test_a_plug_in_that_ends_the_process_is_a_failed_plug_in(folder, capsys, exit_in):
    body = SEARCHER.replace(exit_in, f"{exit_in}\n        raise SystemExit(0)", 1) if "def" in exit_in else exit_in
    (folder / "my_searcher_of_cli.py").write_text(body)
    (folder / "e.yaml").write_text(EXPERIMENT.replace("[random]", "['my_searcher_of_cli:Mine']"))
    assert qdq("run", str(folder / "e.yaml"), "--out", str(folder / "out")) != 0
    assert "SystemExit" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*sorted(TIMING_COMMANDS), "autotune --output_dir out --onnx_path"])
def test_timing_commands_accept_wait_option(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(WAIT_VARIABLE, "1")
    assert qdq(*command.split(), "none.onnx", "--wait", "7") == 2
    assert float(os.environ[WAIT_VARIABLE]) == 7
    assert qdq(*command.split(), "none.onnx", "--wait", "-1") == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option_is_a_usage_error_of_every_command(command, capsys):
    assert qdq(*command.split(), "--frobnicate") == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (DoesNotHold("it differs"), 1, "qdq: it differs"),
        (UserError("no such file"), 2, "qdq: no such file"),
        (SystemExit(1), 2, "sys.exit(1)"),
        (SystemExit("a text"), 2, "a text"),
        (RuntimeError("a bug"), 3, "internal error"),
        (EOFError(), 3, "internal error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_exit_status_by_error(monkeypatch, capsys, error, status, said):
    def examine():
        if error is not None:
            raise error
        return []

    monkeypatch.setattr("harness.cli.doctor.examine_machine", examine)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # typer replaces it after a broken pipe
    assert qdq("doctor") == status
    found = capsys.readouterr().err
    assert said in found
    assert ("Traceback" in found) == (status == 3)
