"""Benchmarkers whose candidates misbehave on request.

`Faulty` reads from the candidate's file what to do: a line "STAGE ACTION" acts in that stage ("build", "sample" or
"infer"); other stages work. `Lottery` draws it from the candidate's digest, so that a whole search meets everything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.base.errors import BuildFailed, UserError
from harness.plugins.api import Accuracy, Array, Artifact, Candidate, Capabilities, Infer


def act(text: str, stage: str) -> None:
    wanted, _, action = text.strip().partition(" ")
    if wanted == stage:
        ACTIONS[action]()


def _raise() -> None:
    raise KeyError("no such kernel")


def _refuse() -> None:
    raise BuildFailed("the runtime\nrefuses   this")


def _spin() -> None:
    while True:
        pass


def _segfault() -> None:
    print("about to fall")
    ctypes.string_at(0)


def _print() -> None:
    for number in range(100):
        print(f"line {number}")
    raise RuntimeError("after much talk")


def _eat() -> None:
    hoard = []
    while True:
        hoard.append(b"x" * 10_000_000)
        time.sleep(0.01)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "engine.bin")


def _child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(os.environ["FAULTY_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def _eat_in_child() -> None:
    """As a runtime whose builder is a program of its own; a child of a child."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    eat = "import time\nhoard = []\nwhile True:\n    hoard.append(b'x' * 10_000_000)\n    time.sleep(0.01)"
    subprocess.run([sys.executable, "-c", code.format(eat)])


ACTIONS: Mapping[str, Callable[[], None]] = {
    "raise": _raise,
    "refuse": _refuse,
    "hang": lambda: time.sleep(1000),
    "spin": _spin,
    "exit": lambda: os._exit(3),
    "segfault": _segfault,
    "abort": os.abort,
    "kill": _kill,
    "eat": _eat,
    "feast": _eat_in_child,
    "full": _fill_disk,
    "print": _print,
    "child": _child,
}


class Faulty:
    def __init__(self, latency_ms: float = 1.0, broken: str = "") -> None:
        if broken == "user":
            raise ValueError("broken: not like this")
        if broken == "exit":
            os._exit(7)
        self._latency_ms = latency_ms

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        assert workdir.is_dir()
        text = candidate.source().read_text()
        act(text, "build")
        return Artifact(engine=text, info={"modules": sorted(sys.modules)} if text == "modules" else {})

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[FaultyProbe]:
        yield FaultyProbe(artifact.engine, self._latency_ms)

    def describe(self) -> Mapping[str, Any]:
        return {"name": "faulty", "pid": os.getpid(), "latency_ms": self._latency_ms}


class FaultyProbe:
    def __init__(self, text: str, latency_ms: float) -> None:
        self._text = text
        self._latency_ms = latency_ms

    def sample(self, n: int) -> Sequence[float]:
        act(self._text, "sample")
        return [self._latency_ms] * n

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        act(self._text, "infer")
        return {}


class Lottery:
    """Latency by number of quantized edges; every second candidate has one of the faults. The float model is well."""

    capabilities = Capabilities(dialect="openvino")
    FAULTS = (
        "build segfault", "build abort", "build refuse", "build exit", "build kill", "build eat", "sample raise",
        "sample hang", "sample zero", "sample nan", "sample jump",
    )  # fmt: skip

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        lot = int(candidate.digest, 16) if candidate.edges else 0
        text = self.FAULTS[lot // 2 % len(self.FAULTS)] if lot % 2 else ""
        act(text, "build")
        return Artifact(engine=(text, 10.0 / (1 + len(candidate.edges))))

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[LotteryProbe]:
        yield LotteryProbe(*artifact.engine)

    def describe(self) -> Mapping[str, Any]:
        return {"name": "lottery", "version": "1", "device": "none", "options": {}, "float_precision": "f32"}


class LotteryProbe:
    READINGS: Mapping[str, Callable[[float], float]] = {
        "sample zero": lambda _: 0.0,
        "sample nan": lambda _: float("nan"),
        "sample jump": lambda latency_ms: -latency_ms,
    }

    def __init__(self, text: str, latency_ms: float) -> None:
        self._text = text
        self._latency_ms = latency_ms

    def sample(self, n: int) -> Sequence[float]:
        if self._text in self.READINGS:
            return [self.READINGS[self._text](self._latency_ms)] * n
        act(self._text, "sample")
        return [self._latency_ms] * n

    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        return {}


class Reliable(Lottery):
    """A lottery without faults, whose engines have the outputs of the file."""

    def build(self, candidate: Candidate, workdir: Path) -> Artifact:
        return Artifact(engine=(str(candidate.source()), 10.0 / (1 + len(candidate.edges))))

    @contextmanager
    def open(self, artifact: Artifact) -> Iterator[LotteryProbe]:
        yield ReliableProbe(*artifact.engine)


class ReliableProbe(LotteryProbe):
    def infer(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        from harness.graph.segmented_run import open_reference_session  # not in workers that only time

        session = open_reference_session(self._text)
        return dict(zip([each.name for each in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


class Scorer:
    metric = "score"
    higher_is_better = True

    def __init__(self, score: float = 0.5, broken: bool = False, per_item: Sequence[float] = ()) -> None:
        if broken:
            raise UserError("data.json: cannot be read")
        self._score, self._per_item = score, tuple(per_item)

    def score(self, infer: Infer) -> Accuracy:
        infer({})
        return Accuracy(metrics={"score": self._score}, per_item=self._per_item)
