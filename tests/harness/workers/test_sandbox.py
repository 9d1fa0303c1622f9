"""Engines in a worker process: a candidate that crashes, hangs or exhausts memory costs a worker and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from harness.base.errors import UserError
from harness.base.statistics import Interval
from harness.config.sections import ExecutorSpec, Limits, PluginSpec, Sampling, TurnSchedule
from harness.measure.records import Failed, Measured
from harness.measure.sampling import Samples
from harness.measure.turn_log import summarize_turns
from harness.plugins.api import Accuracy, Candidate, Infer
from harness.plugins.registry import register_object
from harness.run.confirm.confirmation import TimedRow, confirm
from harness.run.search.trial import measure
from harness.workers.engines import Build, BuiltEngine, Open, Sample, WorkerKilled, WorkerSpec
from harness.workers.locks import timing_lock
from harness.workers.process import WorkerProcess, python_command
from harness.workers.sandbox import InProcess, Sandbox, open_engines
from harness.workers.trial_pool import LocalTarget
from search.space import Edge

REAL_WORKERS = True
HERE = Path(__file__).parent
LIMITS = Limits(build_s=1.0, measure_s=1.0, evaluate_s=1.0)
SAMPLING = Sampling(warmup_ms=0, min_samples=3, max_samples=3)


@pytest.fixture(autouse=True, scope="module")
def _faulty_can_be_imported():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(HERE))
        yield


@pytest.fixture
def candidate(tmp_path):
    def make(text: str) -> Candidate:
        path = tmp_path / f"{text.replace(' ', '-')}.txt"
        path.write_text(text)
        return Candidate(digest=text, edges=((Edge("t", "n", 0), "int8"),), source=lambda: path)

    return make


class ObjectOfThisProgram:
    """Evaluator that no worker can import: it is called here, with inferences of the worker."""

    metric, higher_is_better = "score", True

    def prepare(self, infer: Infer) -> None:
        self.score(infer)

    def score(self, infer: Infer) -> Accuracy:
        infer({})
        return Accuracy(metrics={"score": float(os.getpid())})


def spec(workdir: Path, **params: object) -> WorkerSpec:
    scorers = {"main": {}, "nan": {"score": float("nan")}, "gap": {"per_item": [0.5, float("nan")]},
               "broken": {"broken": True}}  # fmt: skip
    return WorkerSpec(
        benchmarkers={
            "main": PluginSpec(use="faulty:Faulty", params=params),
            "slow": PluginSpec(use="faulty:Faulty", params={"latency_ms": 5.0}),
        },
        evaluators={
            **{name: PluginSpec(use="faulty:Scorer", params=given) for name, given in scorers.items()},
            "object": PluginSpec(use=register_object(ObjectOfThisProgram)),
        },
        workdir=workdir,
    )


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """One sandbox for all tests: failures in one test must not affect the next."""
    with Sandbox(spec(tmp_path_factory.mktemp("work")), LIMITS) as engines:
        yield engines


def built(outcome: BuiltEngine | Failed) -> BuiltEngine:
    assert isinstance(outcome, BuiltEngine), outcome
    return outcome


def failed(outcome: object) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


def test_lock_wait_does_not_count_against_time_limits(sandbox, candidate):
    engine = built(sandbox.build(candidate("ok")))
    with ThreadPoolExecutor(1) as pool:
        with timing_lock():  # held by another run on these cores
            waiting = pool.submit(sandbox.sample, engine.handle, SAMPLING)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.5 * LIMITS.measure_s)
        assert isinstance(waiting.result(timeout=20), Samples)


def test_engines_are_built_timed_scored_and_released(sandbox, candidate):
    first, second = built(sandbox.build(candidate("ok"))), built(sandbox.build(candidate("ok"), "slow"))
    assert first.handle != second.handle
    for engine, latency_ms in ((first, 1.0), (second, 5.0)):
        samples = sandbox.sample(engine.handle, SAMPLING)
        assert isinstance(samples, Samples)
        assert samples.latency_ms == (latency_ms,) * 3
    rival = Interval(value=0.5, low=0.49, high=0.51)
    assert sandbox.sample(first.handle, Sampling(warmup_ms=0, min_samples=11), rival).saved == 5
    assert sandbox.evaluate(first.handle) == Accuracy(metrics={"score": 0.5})
    assert sandbox.prepare(first.handle, "object") is None
    assert sandbox.evaluate(first.handle, "object") == Accuracy(metrics={"score": float(os.getpid())})
    assert sandbox.describe()["name"] == "faulty"
    assert sandbox.describe("slow")["latency_ms"] == 5.0
    assert sandbox.describe()["pid"] != os.getpid()
    sandbox.release(first.handle)
    sandbox.release(first.handle)
    assert "KeyError" in failed(sandbox.sample(first.handle, SAMPLING)).reason
    assert "KeyError" in failed(sandbox.evaluate(first.handle, "object")).reason


@pytest.mark.parametrize(
    ("text", "stage", "reason"),
    [
        ("build refuse", "build", "the runtime refuses this"),
        ("build raise", "build", "KeyError: 'no such kernel'"),
        ("build hang", "timeout", "build took longer than 1 s"),
        ("build exit", "crash", "the worker exited with status 3 during build"),
        ("build segfault", "crash", "the worker was ended by SIGSEGV during build"),
        ("build abort", "crash", "the worker was ended by SIGABRT during build"),
        ("build kill", "crash", "the worker was ended by SIGKILL .* during build"),
        ("build print", "build", "RuntimeError: after much talk"),
        ("sample raise", "measure", "KeyError: 'no such kernel'"),
        ("sample spin", "timeout", "sample took longer than 1 s"),
        ("sample segfault", "crash", "the worker was ended by SIGSEGV during sample"),
        ("infer raise", "evaluate", "KeyError: 'no such kernel'"),
    ],
)
def test_failure_is_returned_and_next_build_works(sandbox, candidate, text, stage, reason):
    outcome: object = sandbox.build(candidate(text))
    if not text.startswith("build"):
        call = sandbox.evaluate if text.startswith("infer") else lambda handle: sandbox.sample(handle, SAMPLING)
        outcome = call(built(outcome).handle)  # type: ignore[arg-type]
    failure = failed(outcome)
    assert failure.stage == stage
    assert re.fullmatch(reason, failure.reason)
    assert failure.wall_s > 0
    assert isinstance(sandbox.build(candidate("ok")), BuiltEngine)


def test_memory_has_a_limit_in_every_step(tmp_path, candidate):
    limits = Limits(build_s=120.0, measure_s=120.0, memory_gb=0.3)  # a busy machine needs time to use so much
    with Sandbox(spec(tmp_path / "work"), limits) as engines:
        outcomes = [engines.build(candidate(text)) for text in ("build eat", "build feast")]
        outcomes += [engines.sample(built(engines.build(candidate("sample eat"))).handle, SAMPLING)]
        for outcome in map(failed, outcomes):
            assert outcome.stage == "crash"
            assert "used more than 0.3 GB of memory (limits.memory_gb" in outcome.reason
        assert isinstance(engines.build(candidate("ok")), BuiltEngine)


@pytest.mark.parametrize(("evaluator", "reason"), [("nan", "score is nan: .*"), ("gap", r"per_item\[1\] is nan: .*")])
def test_scores_that_are_not_finite_fail(sandbox, candidate, evaluator, reason):
    outcome = failed(sandbox.evaluate(built(sandbox.build(candidate("ok"))).handle, evaluator))
    assert outcome.stage == "evaluate"
    assert re.fullmatch(reason, outcome.reason)


def test_log_tail_is_the_end_of_the_workers_output(sandbox, candidate):
    lines = failed(sandbox.build(candidate("build print"))).log_tail.splitlines()
    assert len(lines) == 40
    assert "line 99" in lines
    assert "line 0" not in lines
    tail = failed(sandbox.build(candidate("build segfault"))).log_tail
    assert "about to fall" in tail
    assert "Fatal Python error: Segmentation fault" in tail
    assert "line 99" not in tail


def test_engines_of_a_dead_worker_are_reported_as_lost(sandbox, candidate):
    old, pid = built(sandbox.build(candidate("ok"))).handle, sandbox.describe()["pid"]
    failed(sandbox.build(candidate("build refuse")))
    assert sandbox.describe()["pid"] == pid, "a healthy worker is kept"
    failed(sandbox.build(candidate("build exit")))
    new = built(sandbox.build(candidate("ok"))).handle
    assert new != old
    assert sandbox.describe()["pid"] != pid
    for outcome in (sandbox.sample(old, SAMPLING), sandbox.evaluate(old)):
        assert failed(outcome).stage == "crash"
        assert "build it again" in failed(outcome).reason
    sandbox.release(old)
    assert isinstance(sandbox.sample(new, SAMPLING), Samples)


def test_write_error_is_failed_build_but_full_disk_raises(sandbox, candidate):
    def source() -> Path:
        raise OSError("no such font")

    outcome = failed(sandbox.build(Candidate(digest="x", edges=(), source=source)))
    assert (outcome.stage, outcome.reason) == ("build", "OSError: no such font")
    with pytest.raises(UserError, match=r"build: .*No space left on device"):
        sandbox.build(candidate("build full"))


def test_mistakes_of_the_user_are_raised(tmp_path, sandbox, candidate):
    with pytest.raises(UserError, match="broken: not like this"), Sandbox(spec(tmp_path, broken="user"), LIMITS):
        pass
    with pytest.raises(UserError, match=r"'openvin'.*'openvino'"):
        Sandbox(WorkerSpec(benchmarkers={"main": PluginSpec(use="openvin")}, workdir=tmp_path), LIMITS).__enter__()
    with pytest.raises(UserError, match="no worker could be started: the worker exited with status 7 during start"):
        Sandbox(spec(tmp_path, broken="exit"), LIMITS).__enter__()
    handle = built(sandbox.build(candidate("ok"))).handle
    with pytest.raises(UserError, match=r"data\.json: cannot be read"):
        sandbox.evaluate(handle, "broken")


@pytest.mark.parametrize("engines", [Sandbox, InProcess])
def test_a_scratch_folder_that_cannot_be_made_is_a_user_error(tmp_path, engines):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/work: cannot be written \(Not a directory\)"):
        engines(spec(tmp_path / "file" / "work"), *([LIMITS] if engines is Sandbox else [])).__enter__()


def test_a_scratch_folder_that_vanishes_is_a_user_error(tmp_path, candidate):
    with Sandbox(spec(tmp_path / "work"), LIMITS) as engines:
        shutil.rmtree(tmp_path / "work")
        for _ in range(2):
            with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\)"):
                engines.build(candidate("ok"))


def test_a_process_that_cannot_be_started_is_a_user_error(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(UserError, match=r"no worker could be started: .*Resource temporarily unavailable"):
        Sandbox(spec(tmp_path), LIMITS).__enter__()


def test_files_and_processes_are_removed(tmp_path, candidate):
    with Sandbox(spec(tmp_path / "work"), LIMITS) as engines:
        built(engines.build(candidate("ok")))
        failed(engines.build(candidate("build exit")))
        pid = engines.describe()["pid"]
        assert any((tmp_path / "work").iterdir())
    assert not psutil.pid_exists(pid)
    assert not any((tmp_path / "work").iterdir())


def test_the_worker_loads_no_heavy_library(sandbox, candidate):
    modules = set(built(sandbox.build(candidate("modules"))).info["modules"])
    assert not modules & {"torch", "modelopt", "pandas", "scipy", "onnx", "matplotlib"}


def test_ctrl_c_does_not_end_the_worker(sandbox, candidate):
    pid = sandbox.describe()["pid"]
    os.kill(pid, signal.SIGINT)
    built(sandbox.build(candidate("ok")))
    assert sandbox.describe()["pid"] == pid


DRIVER = """
import sys
from pathlib import Path
from harness.plugins.api import Candidate
from harness.config.sections import Limits, PluginSpec
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import Sandbox
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
with Sandbox(WorkerSpec(benchmarkers={"main": PluginSpec(use="faulty:Faulty")}, workdir=folder), Limits()) as engines:
    engines.build(Candidate(digest="x", edges=(), source=lambda: folder / "busy.txt"))
"""


def test_workers_end_when_the_driver_is_killed(tmp_path):
    (tmp_path / "busy.txt").write_text("build child")
    pids = tmp_path / "pids"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(HERE)], env={**os.environ, "FAULTY_PIDS": str(pids)}
    )
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    driver.kill()
    driver.wait()
    worker, child = (int(pid) for pid in pids.read_text().split())
    wait_until(lambda: not is_alive(worker) and not is_alive(child))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "condition not met in 30 s"
        time.sleep(0.02)


def test_in_process_gives_the_same_values(tmp_path, candidate):
    with InProcess(spec(tmp_path)) as engines:
        handle = built(engines.build(candidate("ok"))).handle
        assert isinstance(engines.sample(handle, SAMPLING), Samples)
        assert engines.evaluate(handle) == Accuracy(metrics={"score": 0.5})
        assert failed(engines.build(candidate("build refuse"))).reason == "the runtime refuses this"
        assert "no such kernel" in failed(engines.build(candidate("build raise"))).log_tail


def test_benchmarkers_without_a_runtime_stay_in_the_driver(tmp_path):
    simulated = WorkerSpec(benchmarkers={"main": PluginSpec(use="simulated")}, workdir=tmp_path)
    assert isinstance(open_engines(simulated, LIMITS), InProcess)
    assert isinstance(open_engines(spec(tmp_path), LIMITS), Sandbox)


def kill(sandbox: Sandbox) -> None:
    os.kill(sandbox.describe()["pid"], signal.SIGKILL)


def test_a_worker_that_is_killed_between_calls_is_replaced(sandbox, candidate):
    old = built(sandbox.build(candidate("ok"))).handle
    kill(sandbox)
    new = built(sandbox.build(candidate("ok"))).handle
    assert isinstance(sandbox.sample(new, SAMPLING), Samples)
    with pytest.raises(WorkerKilled, match="build it again"):
        sandbox.sample(old, SAMPLING)
    kill(sandbox)
    sandbox.release(new)


@pytest.fixture
def kill_once(monkeypatch):
    """Kill the worker that gets the next request of a class, and list the workers that get one; a start is a tuple."""
    send = WorkerProcess.send

    def arrange(kind: type, times: int = 1) -> list[int]:
        seen: list[int] = []

        def send_and_kill(process: WorkerProcess, message: Any) -> None:
            counts = isinstance(message, kind)
            if counts:
                seen.append(process._process.pid)
            kill = counts and len(seen) <= times
            if kill:  # a stopped worker gets the message but cannot answer before it is killed
                os.kill(process._process.pid, signal.SIGSTOP)
            send(process, message)
            if kill:
                process._process.kill()

        monkeypatch.setattr(WorkerProcess, "send", send_and_kill)
        return seen

    return arrange


@pytest.mark.parametrize("call", [tuple, Build, Open, Sample])
def test_a_trial_whose_worker_is_killed_is_repeated(sandbox, candidate, kill_once, call):
    sandbox._stop()
    seen = kill_once(call, 2 if call is tuple else 1)
    assert isinstance(measure(candidate(f"ok {call.__name__}"), None, engines=sandbox, sampling=SAMPLING), Measured)
    assert len(set(seen)) == len(seen) == (3 if call is tuple else 2)


def test_a_candidate_whose_worker_is_killed_each_time_has_failed(sandbox, candidate):
    outcome = failed(measure(candidate("sample kill"), None, engines=sandbox, sampling=SAMPLING))
    assert (outcome.stage, "SIGKILL" in outcome.reason) == ("crash", True)


def test_candidate_that_kills_worker_again_on_resume_has_failed(tmp_path, candidate):
    site = LocalTarget(ExecutorSpec(), LIMITS)
    with site.open(spec(tmp_path)) as engines, pytest.raises(WorkerKilled):
        engines.sample(built(engines.build(candidate("sample kill"))).handle, SAMPLING)
    with site.open(spec(tmp_path)) as engines:  # as a task does after the loss of its worker
        outcome = engines.sample(built(engines.build(candidate("sample kill"))).handle, SAMPLING)
    assert "SIGKILL" in failed(outcome).reason


def test_a_group_of_turns_whose_worker_is_killed_is_timed_again(tmp_path, candidate, kill_once):
    rows = [TimedRow(name=name, candidate=candidate(f"ok {name}")) for name in ("float", "all")]
    seen = kill_once(Sample)
    schedule = TurnSchedule(builds=1, rounds=2, samples=3)
    rng, open_engines = np.random.default_rng(0), lambda: Sandbox(spec(tmp_path), LIMITS)
    events = [*confirm(rows[1:], rows[0], open_engines=open_engines, schedule=schedule, rng=rng)]
    assert len(set(seen)) == 2
    assert summarize_turns(events, "float").rows["all"].builds_ok == 1


def test_child_processes_import_the_modules_of_this_process_and_none_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("value = 3")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "json.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path, ".."])
    code = "import json, own_module; print(own_module.value, sys.argv[1:])"
    done = subprocess.run(python_command(code, "word"), cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == "3 ['word']\n"
