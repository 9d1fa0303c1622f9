"""The validation on a simulated GPU: its steps, their records, what is sent, and checks that find a wrong engine."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import BuildFailed, UserError
from harness.base.files import read_json, write_json
from harness.cli.main import main
from harness.graph.builder import GraphBuilder
from harness.insight.gpu_validation import kit, measures, steps
from harness.insight.gpu_validation.conformance import check_benchmarker, file_candidate
from harness.insight.gpu_validation.kit import check_steps, run_validation
from harness.insight.gpu_validation.measures import check_timer, compare_with_trtexec
from harness.insight.gpu_validation.steps import Step, list_steps
from harness.results.manifest import find_changed_files
from harness.workers import helper_process
from harness.workers.helper_process import HelperCallFailed

FAKES = Path(__file__).parents[3] / "fakes"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder, with checks of few rounds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measures, "ROUNDS", 2)
    for problem in (steps._gpu_problem, steps._benchmarker_problem):
        problem.cache_clear()
    return tmp_path


@pytest.fixture
def machine(folder, monkeypatch):
    """A simulated GPU with TensorRT 11 and trtexec, also for programs that are started."""
    program = folder / "bin" / "trtexec"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKES}/fake_trtexec.py" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_TRTEXEC", "11")
    monkeypatch.setenv("FAKE_TRTEXEC_LOG", str(folder / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (FAKES / "gpu_machine", FAKES))))
    monkeypatch.syspath_prepend(str(FAKES / "gpu_machine"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "cuda")]:
        monkeypatch.delitem(sys.modules, name)
    helper_process._process_helper(os.getpid())._stop()  # it may have imported an installed package of that name
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "cuda")]:
        del sys.modules[name]  # PyTorch asks each module of this name for its specification


def records(out: Path) -> dict[str, dict[str, Any]]:
    return {record["name"]: record for record in read_json(out / "send" / "manifest.json")["records"]}


def small_model(path: Path) -> Path:
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 4, 3, pad=1))
    builder.output(builder.conv(x, 2, 1), name="y")
    return builder.save(path)


def python(code: str, **more: Any) -> Step:
    return Step(**{"name": "step", "title": "a program", "needs": (), "program": ("-c", code), **more})


def test_without_a_gpu_all_but_doctor_is_skipped_with_the_remedy(folder, capsys, monkeypatch):
    monkeypatch.setattr(steps, "open_device", lambda: (_ for _ in ()).throw(UserError("no driver; install one")))
    monkeypatch.setattr(kit, "list_steps", lambda: (python("print('found')", name="doctor"), *list_steps()[1:]))
    main(["validate-gpu", "out", "--check"])
    assert "timer\tmissing\tno driver; install one" in capsys.readouterr().out
    assert not (folder / "out").exists()
    main(["validate-gpu", "out"])
    found = records(folder / "out")
    assert [record["status"] for record in found.values()] == ["passed", *["skipped"] * (len(found) - 1)]
    assert all(record["reason"] for record in found.values() if record["status"] == "skipped")


def test_rerun_keeps_failed_runs_skipped_and_repeats_on_request(folder, monkeypatch):
    step = python("from pathlib import Path; p = Path('n'); p.open('a').write('x'); print(p.stat().st_size); exit(3)")
    missing = ["no library"]
    monkeypatch.setitem(steps.REQUIREMENTS, "library", lambda: missing[0])
    monkeypatch.setattr(kit, "list_steps", lambda: (step, python("print(1)", name="late", needs=("library",))))
    first = run_validation(folder / "out", print)
    assert [(record.status, record.reason) for record in first] == [("failed", "1"), ("skipped", "no library")]
    missing[0] = ""
    again = run_validation(folder / "out", print)
    assert [record.status for record in again] == ["failed", "passed"]
    assert (folder / "out/steps/step/n").stat().st_size == 1
    assert list(check_steps(folder / "out")) == [("step", "failed", "1"), ("late", "passed", "")]
    assert run_validation(folder / "out", print, retry_failed=True)[0].reason == "2"
    (folder / "out/steps/step/record.json").unlink()  # as after a step that was cut off
    assert run_validation(folder / "out", print)[0].reason == "3"


def test_a_crash_ends_its_step_alone(folder, monkeypatch):
    crash = python("import os; print('half way', flush=True); os.kill(os.getpid(), 11)", name="crash")
    monkeypatch.setattr(kit, "list_steps", lambda: (crash, python("print(1)")))
    found = run_validation(folder / "out", print)
    assert [record.status for record in found] == ["failed", "passed"]
    assert "signal 11" in found[0].reason
    assert "half way" in found[0].reason


def test_a_step_that_takes_too_long_is_ended(folder, monkeypatch):
    monkeypatch.setattr(kit, "STEP_LIMIT_S", 0.1)
    monkeypatch.setattr(kit, "list_steps", lambda: (python("import time; time.sleep(60)"),))
    (found,) = run_validation(folder / "out", print)
    assert found.status == "failed"
    assert "ended after" in found.reason


def test_an_experiment_that_cannot_be_written_fails_its_step(folder, monkeypatch, capsys):
    def experiment() -> str:
        raise UserError("no images")

    monkeypatch.setattr(kit, "list_steps", lambda: (python("print(1)", experiment=experiment),))
    with pytest.raises(SystemExit) as ended:
        main(["validate-gpu", "out", "--json"])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert [record["reason"] for record in json.loads(text[text.index("[") :])] == ["no images"]


def test_a_damaged_record_is_refused(folder, monkeypatch):
    monkeypatch.setattr(kit, "list_steps", lambda: (python("print(1)"),))
    run_validation(folder / "out", print)
    write_json(folder / "out/steps/step/record.json", {"name": "step", "status": "lost"})
    with pytest.raises(UserError, match=r"step/record\.json: .*remove it to run the step again"):
        run_validation(folder / "out", print)


def test_results_of_other_gpu_are_refused(folder, monkeypatch):
    gpu = {"name": "A", "driver_version": "1"}
    monkeypatch.setattr(kit, "describe_environment", lambda: {"gpus": [dict(gpu)]})
    monkeypatch.setattr(kit, "list_steps", lambda: ())
    run_validation(folder / "out", print)
    gpu["name"] = "B"
    with pytest.raises(UserError, match="started with something else"):
        run_validation(folder / "out", print)


def test_send_folder_has_no_user_or_folder_names(folder, monkeypatch):
    monkeypatch.setattr(kit.getpass, "getuser", lambda: "fridolin")
    code = (
        f"from pathlib import Path; print('{folder.resolve()}/x of fridolin'); Path('a.json').write_text('fridolin'); "
        "Path('b.json').write_text('fine'); Path('m.onnx').write_text('model'); "
        "Path('work').mkdir(); Path('work/c.txt').write_text('scratch')"
    )
    monkeypatch.setattr(kit, "list_steps", lambda: (python(code),))
    run_validation(folder / "out", print)
    sent = folder / "out" / "send"
    manifest = read_json(sent / "manifest.json")
    assert (sent / "steps/step/log.txt").read_text() == "./x of <user>\n"
    assert manifest["left_out"] == ["steps/step/a.json"]
    assert {*manifest["files"]} == {"env.json", *(f"steps/step/{n}" for n in ("b.json", "log.txt", "record.json"))}
    assert not list(find_changed_files(sent, manifest["files"]))


@pytest.mark.parametrize("use", ["openvino", "onnxruntime"])
def test_runtimes_of_the_cpu_keep_the_contract(use):
    found = {check.name: check for check in check_benchmarker(use)}
    failed = [str(check) for check in found.values() if not check.passed]
    assert failed == []
    assert len(found) >= 9


@pytest.mark.usefixtures("machine")
def test_the_contract_finds_a_wrong_engine():
    """The stand-in of TensorRT computes right and lists no layers; that of trtexec always gives the same outputs."""
    found = {use: {c.name: c.passed for c in check_benchmarker(use)} for use in ("tensorrt", "trtexec")}
    assert [name for name, passed in found["tensorrt"].items() if not passed] == ["layers"]
    assert not found["trtexec"]["float model"]
    assert found["trtexec"]["readings"]


@pytest.mark.usefixtures("machine")
def test_the_timer_is_compared_with_itself_and_with_trtexec(folder, monkeypatch):
    assert [check.passed for check in check_timer()] == [True] * 6
    import fake_trt

    from harness.runtimes.tensorrt.benchmarker import TensorRTBenchmarker

    built = TensorRTBenchmarker().build(file_candidate(small_model(folder / "net.onnx")), folder)
    monkeypatch.setattr(TensorRTBenchmarker, "load", lambda self, path: built)
    assert [check.passed for check in compare_with_trtexec("net.onnx")] == [False, False]
    monkeypatch.setattr(fake_trt, "KERNEL_MS", 0.78)
    assert [check.passed for check in compare_with_trtexec("net.onnx")] == [True, True]


class OneCase:
    """The module of the small models, with two of them."""

    def __init__(self, recorded: dict[str, str]) -> None:
        import compiler_cases

        self.recorded, self.real, self.saved = recorded, compiler_cases, 0
        self.node_name = compiler_cases.node_name

    def read_verdicts(self) -> dict[str, str]:
        return self.recorded

    def cases(self) -> list[Any]:
        return [case for case in self.real.cases() if case.name in self.recorded]

    def save(self, case: Any, path: Path) -> Path:
        self.saved += 1
        return self.real.save(case, path)


@pytest.mark.usefixtures("machine")
def test_verdicts_are_compared_and_kept(monkeypatch):
    small = OneCase({"MatMul int8 int8": "int8", "MatMul int8-zero=3 int8": "parser"})
    monkeypatch.setitem(sys.modules, "compiler_cases", small)  # type: ignore[arg-type]
    for _ in range(2):
        found = {check.name: check for check in measures.compare_verdicts()}
        assert found["all verdicts"].passed
        assert "TensorRT-RTX parser, TensorRT" in found["MatMul int8-zero=3 int8"].detail
        assert "MatMul int8 int8" not in found
    assert small.saved == 2


@pytest.mark.parametrize(
    ("failure", "verdict", "message"),
    [
        (BuildFailed("net: cannot parse the model"), "parser", "cannot parse the model"),
        (BuildFailed("net: builds no engine"), "builder", "builds no engine"),
        (HelperCallFailed("net", "was ended by SIGSEGV", crashed=True), "crash", "was ended by SIGSEGV"),
        (KeyError("name"), "error", "KeyError"),
    ],
)
def test_a_failed_build_is_a_verdict_on_one_model(monkeypatch, failure, verdict, message):
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setitem(sys.modules, "compiler_cases", OneCase({"MatMul int8 int8": "int8"}))  # type: ignore[arg-type]
    monkeypatch.setattr(measures, "call_in_helper_process", fail)
    *_, found, whole = measures.compare_verdicts()
    assert found.name == "MatMul int8 int8"
    assert f"TensorRT {verdict}" in found.detail
    assert message in found.detail
    assert whole.passed is (verdict != "error")


def test_a_measure_that_cannot_start_is_a_failed_check(folder, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise UserError("no GPU")

    monkeypatch.setitem(sys.modules, "compiler_cases", OneCase({"MatMul int8 int8": "int8"}))  # type: ignore[arg-type]
    monkeypatch.setattr(measures, "call_in_helper_process", fail)
    assert measures.main(["verdicts"]) == 1
    assert "1 of 1 checks failed (measure)" in capsys.readouterr().out
    assert read_json(folder / "checks.json")["checks"][0]["detail"] == "no GPU"


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_validation_runs_end_to_end_on_simulated_gpu(folder, monkeypatch, capsys):
    """Programs run as on a real machine, but for workers; ModelOpt's steps and the verdicts have tests of their own."""
    pytest.importorskip("modelopt", reason="ModelOpt converts the float model to BF16")
    net = small_model(folder / "net.onnx")
    monkeypatch.setattr(steps, "MODELS", {"net": str(net)})
    monkeypatch.setattr(steps, "EVALUATIONS", 6)
    backend = "{{use: 'fake_machine:BrainAndFull11', label: tensorrt, params: {{precision: f32}}}}"
    short = f"backends: [{backend}]\nconfirmation: {{{{builds: 3, rounds: 2, samples: 3}}}}\n"
    text = steps.EXPERIMENT.replace("backends: [tensorrt]\n", short).replace("[{precisions}]", "[int8]")
    monkeypatch.setattr(steps, "EXPERIMENT", text.replace("samples: 4", "samples: 1"))
    kept = ("timer", "trtexec-timing", "auto-net")
    monkeypatch.setattr(kit, "list_steps", lambda: tuple(s for s in list_steps() if s.name in kept))
    with pytest.raises(SystemExit):
        main(["validate-gpu", "out"])
    found = records(folder / "out")
    assert Counter(record["status"] for record in found.values()) == {"passed": 1, "failed": 2}
    reason = found["auto-net"]["reason"]  # of the stand-in: no BF16 on ONNX Runtime's CPU
    assert reason.startswith("rows without a latency: float (bf16)")
    assert ";" not in reason
    assert "cannot load this engine" in (folder / "out/send/steps/trtexec-timing/log.txt").read_text()
    sent = [
        path.relative_to(folder / "out/send/steps/auto-net") for path in folder.rglob("out/send/steps/auto-net/**/*")
    ]
    assert {"runs", "confirmation.jsonl.gz"} <= {path.name for path in sent}
    assert not [path for path in sent if path.suffix == ".onnx"]
    assert json.loads((folder / "out/send/steps/timer/checks.json").read_text())["checks"]
