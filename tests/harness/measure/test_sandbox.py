from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.api import Accuracy, Candidate
from harness.errors import UserError
from harness.measure.engines import Built, WorkerSpec
from harness.measure.sampling import Samples
from harness.measure.sandbox import InProcess, Sandbox, open_engines
from harness.measure.stats import Interval
from harness.measure.stopwatch import stopwatch
from harness.records import Failed
from harness.run.config import Limits, Sampling, Use
from search.space import Edge

HERE = Path(__file__).parent
LIMITS = Limits(build_s=1.0, measure_s=1.0, evaluate_s=1.0)
SHARED = ", which all engines of a worker share"
SAMPLING = Sampling(warmup_ms=0, min_samples=3, max_samples=3)
MakeCandidate = Callable[[str], Candidate]


@pytest.fixture(autouse=True, scope="module")
def _faulty_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(HERE))
        yield


@pytest.fixture
def candidate(tmp_path: Path) -> MakeCandidate:
    def make(text: str) -> Candidate:
        path = tmp_path / f"{text.replace(' ', '-')}.txt"
        path.write_text(text)
        return Candidate(digest=text, edges=((Edge("t", "n", 0), "int8"),), source=lambda: path)

    return make


def spec(workdir: Path, **params: object) -> WorkerSpec:
    return WorkerSpec(
        benchmarkers={
            "main": Use(use="faulty:Faulty", params=params),
            "slow": Use(use="faulty:Faulty", params={"latency_ms": 5.0}),
        },
        evaluators={
            "main": Use(use="faulty:Scorer"),
            "nan": Use(use="faulty:Scorer", params={"score": float("nan")}),
            "gap": Use(use="faulty:Scorer", params={"per_item": [0.5, float("nan")]}),
            "broken": Use(use="faulty:Scorer", params={"broken": True}),
        },
        workdir=workdir,
    )


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One for all tests: what one test breaks must not trouble the next."""
    with Sandbox(spec(tmp_path_factory.mktemp("work")), LIMITS) as engines:
        yield engines


def built(outcome: Built | Failed) -> Built:
    assert isinstance(outcome, Built), outcome
    return outcome


def failed(outcome: object) -> Failed:
    assert isinstance(outcome, Failed), outcome
    return outcome


def test_waiting_for_another_runs_timing_counts_against_no_limit(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    engine = built(sandbox.build(candidate("ok")))
    with ThreadPoolExecutor(1) as pool:
        with stopwatch():  # as another run on these cores has it
            waiting = pool.submit(sandbox.sample, engine.handle, SAMPLING)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.5 * LIMITS.measure_s)
        assert isinstance(waiting.result(timeout=20), Samples)


def test_builds_times_scores_and_releases(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    first, second = built(sandbox.build(candidate("ok"))), built(sandbox.build(candidate("ok"), "slow"))
    assert first.handle != second.handle
    for engine, latency_ms in ((first, 1.0), (second, 5.0)):
        samples = sandbox.sample(engine.handle, SAMPLING)
        assert isinstance(samples, Samples)
        assert samples.latency_ms == (latency_ms,) * 3
    assert sandbox.evaluate(first.handle) == Accuracy(metrics={"score": 0.5})
    assert sandbox.describe()["name"] == "faulty"
    assert sandbox.describe("slow")["latency_ms"] == 5.0
    assert sandbox.describe()["pid"] != os.getpid()
    sandbox.release(first.handle)
    sandbox.release(first.handle)
    assert "KeyError" in failed(sandbox.sample(first.handle, SAMPLING)).reason


@pytest.mark.parametrize(
    ("text", "stage", "reason"),
    [
        ("build refuse", "build", "the runtime refuses this"),
        ("build raise", "build", "KeyError: 'no such kernel'"),
        ("build hang", "timeout", "build took longer than 1 s"),
        ("build exit", "crash", "the worker exited with status 3 during build"),
        ("build segfault", "crash", "the worker was ended by SIGSEGV during build"),
        ("build abort", "crash", "the worker was ended by SIGABRT during build"),
        (
            "build kill",
            "crash",
            "the worker was ended by SIGKILL (the kernel does so when memory runs out) during build",
        ),
        ("build print", "build", "RuntimeError: after much talk"),
    ],
)
def test_a_build_that_fails_is_a_value_and_the_next_one_works(
    sandbox: Sandbox, candidate: MakeCandidate, text: str, stage: str, reason: str
) -> None:
    outcome = failed(sandbox.build(candidate(text)))
    assert (outcome.stage, outcome.reason) == (stage, reason)
    assert outcome.wall_s > 0
    assert isinstance(sandbox.build(candidate("ok")), Built)


@pytest.mark.parametrize(
    ("text", "stage", "reason"),
    [
        ("sample raise", "measure", "KeyError: 'no such kernel'"),
        ("sample spin", "timeout", "sample took longer than 1 s"),
        ("sample segfault", "crash", "the worker was ended by SIGSEGV during sample"),
    ],
)
def test_a_sample_that_fails_is_a_value(
    sandbox: Sandbox, candidate: MakeCandidate, text: str, stage: str, reason: str
) -> None:
    outcome = failed(sandbox.sample(built(sandbox.build(candidate(text))).handle, SAMPLING))
    assert (outcome.stage, outcome.reason) == (stage, reason)
    assert isinstance(sandbox.build(candidate("ok")), Built)


def test_memory_has_a_limit_in_every_step(tmp_path: Path, candidate: MakeCandidate) -> None:
    roomy = Limits(build_s=120.0, measure_s=120.0, memory_gb=0.3)  # a busy machine takes its time to eat so much
    with Sandbox(spec(tmp_path / "work"), roomy) as engines:
        for text in ("build eat", "build feast"):
            outcome = failed(engines.build(candidate(text)))
            assert (outcome.stage, outcome.reason) == (
                "crash",
                f"build used more than 0.3 GB of memory (limits.memory_gb{SHARED})",
            )
        outcome = failed(engines.sample(built(engines.build(candidate("sample eat"))).handle, SAMPLING))
        assert outcome.reason == f"sample used more than 0.3 GB of memory (limits.memory_gb{SHARED})"
        assert isinstance(engines.build(candidate("ok")), Built)


def test_an_evaluation_that_fails_is_a_value(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    bad = built(sandbox.build(candidate("infer raise"))).handle
    good = built(sandbox.build(candidate("ok"))).handle
    outcome = failed(sandbox.evaluate(bad))
    assert (outcome.stage, outcome.reason) == ("evaluate", "KeyError: 'no such kernel'")
    outcome = failed(sandbox.evaluate(good, "nan"))
    assert (outcome.stage, outcome.reason) == ("evaluate", "score is nan: the engine's outputs are not finite")
    outcome = failed(sandbox.evaluate(good, "gap"))
    assert outcome.reason == "per_item[1] is nan: give a figure for every item, or for none"


def test_log_tail_is_what_the_worker_printed_last(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    lines = failed(sandbox.build(candidate("build print"))).log_tail.splitlines()
    assert len(lines) == 40
    assert "line 99" in lines
    assert "line 0" not in lines
    tail = failed(sandbox.build(candidate("build segfault"))).log_tail
    assert "about to fall" in tail
    assert "Fatal Python error: Segmentation fault" in tail
    assert "line 99" not in tail


def test_engines_of_a_worker_that_died_are_lost_by_name(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    old = built(sandbox.build(candidate("ok"))).handle
    failed(sandbox.build(candidate("build exit")))
    new = built(sandbox.build(candidate("ok"))).handle
    assert new != old
    for outcome in (sandbox.sample(old, SAMPLING), sandbox.evaluate(old)):
        assert failed(outcome).stage == "crash"
        assert "died with an earlier worker; build it again" in failed(outcome).reason
    sandbox.release(old)
    assert isinstance(sandbox.sample(new, SAMPLING), Samples)


def test_a_file_that_cannot_be_made_is_a_failed_build(sandbox: Sandbox) -> None:
    def source() -> Path:
        raise OSError("disk is full")

    outcome = failed(sandbox.build(Candidate(digest="x", edges=(), source=source)))
    assert (outcome.stage, outcome.reason) == ("build", "OSError: disk is full")


def test_mistakes_of_the_user_are_raised(tmp_path: Path, sandbox: Sandbox, candidate: MakeCandidate) -> None:
    with pytest.raises(UserError, match="broken: not like this"), Sandbox(spec(tmp_path, broken="user"), LIMITS):
        pass
    with pytest.raises(UserError, match=r"no benchmarker is called 'openvin'.*'openvino'"):
        Sandbox(WorkerSpec(benchmarkers={"main": Use(use="openvin")}, workdir=tmp_path), LIMITS).__enter__()
    with pytest.raises(UserError, match="no worker could be started: the worker exited with status 7 during start"):
        Sandbox(spec(tmp_path, broken="exit"), LIMITS).__enter__()
    handle = built(sandbox.build(candidate("ok"))).handle
    with pytest.raises(UserError, match=r"data\.json: cannot be read"):
        sandbox.evaluate(handle, "broken")


def test_a_disk_that_is_full_is_not_the_candidates_fault(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    with pytest.raises(UserError, match=r"build: .*No space left on device.*make room, then run the same command"):
        sandbox.build(candidate("build full"))


@pytest.mark.parametrize("engines", [Sandbox, InProcess])
def test_a_scratch_folder_that_cannot_be_made_is_a_mistake_of_the_user(tmp_path: Path, engines: type[Any]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/work: cannot be written \(Not a directory\)"):
        engines(spec(tmp_path / "file" / "work"), *([LIMITS] if engines is Sandbox else [])).__enter__()


def test_a_scratch_folder_that_vanishes_stops_the_search_with_the_reason(
    tmp_path: Path, candidate: MakeCandidate
) -> None:
    with Sandbox(spec(tmp_path / "work"), LIMITS) as engines:
        shutil.rmtree(tmp_path / "work")
        with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\)"):
            engines.build(candidate("ok"))
        with pytest.raises(UserError, match=r"worker\.log: cannot be written \(No such file or directory\)"):
            engines.build(candidate("ok"))


def test_no_process_for_a_worker_is_no_riddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(UserError, match=r"no worker could be started: .*Resource temporarily unavailable"):
        Sandbox(spec(tmp_path), LIMITS).__enter__()


def test_a_worker_is_kept_while_it_is_healthy(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    built(sandbox.build(candidate("ok")))
    pid = sandbox.describe()["pid"]
    failed(sandbox.build(candidate("build refuse")))
    assert sandbox.describe()["pid"] == pid
    failed(sandbox.build(candidate("build exit")))
    built(sandbox.build(candidate("ok")))
    assert sandbox.describe()["pid"] != pid


def test_a_race_is_run_in_the_worker(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    handle = built(sandbox.build(candidate("ok"))).handle
    rival = Interval(value=0.5, low=0.49, high=0.51)
    found = sandbox.sample(handle, Sampling(warmup_ms=0, min_samples=11), rival)
    assert isinstance(found, Samples)
    assert (len(found.latency_ms), found.saved) == (6, 5)


def test_nothing_is_left_behind(tmp_path: Path, candidate: MakeCandidate) -> None:
    with Sandbox(spec(tmp_path / "work"), LIMITS) as engines:
        built(engines.build(candidate("ok")))
        failed(engines.build(candidate("build exit")))
        pid = engines.describe()["pid"]
        assert any((tmp_path / "work").iterdir())
    assert not psutil.pid_exists(pid)
    assert not any((tmp_path / "work").iterdir())


def test_the_worker_loads_no_heavy_library(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    modules = set(built(sandbox.build(candidate("modules"))).info["modules"])
    assert not modules & {"torch", "modelopt", "pandas", "scipy", "onnx", "matplotlib"}


def test_ctrl_c_is_the_drivers_affair(sandbox: Sandbox, candidate: MakeCandidate) -> None:
    pid = sandbox.describe()["pid"]
    os.kill(pid, signal.SIGINT)
    built(sandbox.build(candidate("ok")))
    assert sandbox.describe()["pid"] == pid, "it is the worker of before"


DRIVER = """
import sys
from pathlib import Path
from harness.api import Candidate
from harness.measure.engines import WorkerSpec
from harness.measure.sandbox import Sandbox
from harness.run.config import Limits, Use
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
with Sandbox(WorkerSpec(benchmarkers={"main": Use(use="faulty:Faulty")}, workdir=folder), Limits()) as engines:
    engines.build(Candidate(digest="x", edges=(), source=lambda: folder / "busy.txt"))
"""


def test_no_orphans_when_the_driver_is_killed(tmp_path: Path) -> None:
    (tmp_path / "busy.txt").write_text("build child")
    pids = tmp_path / "pids"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(HERE)], env={**os.environ, "FAULTY_PIDS": str(pids)}
    )
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    driver.kill()
    driver.wait()
    worker, child = (int(pid) for pid in pids.read_text().split())
    wait_until(lambda: not alive(worker) and not alive(child))


def alive(pid: int) -> bool:
    """A zombie that nobody reaps yet is dead."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "waited 30 s in vain"
        time.sleep(0.02)


def test_in_process_gives_the_same_values(tmp_path: Path, candidate: MakeCandidate) -> None:
    with InProcess(spec(tmp_path)) as engines:
        handle = built(engines.build(candidate("ok"))).handle
        assert isinstance(engines.sample(handle, SAMPLING), Samples)
        assert engines.evaluate(handle) == Accuracy(metrics={"score": 0.5})
        assert failed(engines.build(candidate("build refuse"))).reason == "the runtime refuses this"
        assert "no such kernel" in failed(engines.build(candidate("build raise"))).log_tail


def test_benchmarkers_without_a_runtime_stay_in_the_driver(tmp_path: Path) -> None:
    simulated = WorkerSpec(benchmarkers={"main": Use(use="simulated")}, workdir=tmp_path)
    assert isinstance(open_engines(simulated, LIMITS), InProcess)
    assert isinstance(open_engines(spec(tmp_path), LIMITS), Sandbox)
