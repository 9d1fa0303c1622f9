"""Damaged files of results folders: `qdq verify`, `qdq report` and `qdq run` state the same problem.

Each file of a finished folder, and of folders whose run was killed in a search and in the confirmation, is deleted,
cut, replaced and edited in turn.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cheap_runs import cheap_runs
from small import save_chain

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.experiment import Experiment, parse_experiment
from harness.report.frames import main_frame
from harness.results.folder import load
from harness.results.manifest import check_results
from harness.run.runner import run_experiment

__all__ = ["cheap_runs"]

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0, failure_rate: 0.3}}]
searchers: [random, evolutionary]
initial: [float, linear]
baselines: [linear]
budget: {evaluations: [8]}
seeds: [0]
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
#: By state of the results: work in which the run was killed, and the log that was written then.
STATES = {"search": ("evolutionary-0", "evolutionary-0.jsonl"), "confirmation": ("confirmation", "confirmation.jsonl"),
          "finished": ("no work", "no log")}  # fmt: skip
NO_TABLE_KINDS = ("half", "deleted", "folder")
NO_TABLE = re.compile(r"report/|.*/(models|work)/|.*(\.lock|optuna\.journal)$")


class Begun(BaseException):
    """The run has accepted the folder."""


class Listener(NullProgress):
    """Observer that keeps what a run prints, and ends the run at its first work."""

    def __init__(self) -> None:
        self.printed: list[str] = []

    def say(self, text: str) -> None:
        self.printed.append(text)

    def work(self, title: str, total: int):
        raise Begun


class Copier(NullProgress):
    """Observer that copies the results at the sixth step of some works, as a kill would leave them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.title, self.steps = folder, "", 0

    @contextmanager
    def work(self, title: str, total: int) -> Iterator[NullProgress]:
        self.title, self.steps = title, 0
        yield self

    def advance(self, note: str = "") -> None:
        self.steps += 1
        for state, (work, _) in STATES.items():
            if work in self.title and self.steps == 6:
                shutil.copytree(self.folder / "finished", self.folder / state)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_chain(folder / "net.onnx", (8, 8, 12))
    return parse_experiment(EXPERIMENT, "small.yaml", folder)


@pytest.fixture(scope="module")
def runs(experiment, tmp_path_factory):
    """Return the results of two runs of the same experiment, by state."""
    folders = [tmp_path_factory.mktemp("results") for _ in range(2)]
    for folder in folders:
        run_experiment(experiment, out=folder / "finished", observer=Copier(folder))
    return folders


def flip_digit(raw: bytes) -> bytes:
    places = [match.start() for match in re.finditer(rb"[1-8]", raw)] or [len(raw) // 2]
    place = places[len(places) // 2]
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


def on_lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[bytes], bytes]:
    """Return a change of the lines of a file, which may be compressed."""

    def changed(raw: bytes) -> bytes:
        packed = raw[:2] == b"\x1f\x8b"
        text = b"".join(change((gzip.decompress(raw) if packed else raw).splitlines(keepends=True)))
        return gzip.compress(text, mtime=0) if packed else text

    return changed


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda raw: b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "last byte gone": lambda raw: raw[:-1],
    "a number": on_lines(lambda lines: [flip_digit(b"".join(lines))]),
    "last line dropped": on_lines(lambda lines: lines[:-1]),
    "line dropped": on_lines(lambda lines: lines[: len(lines) // 2] + lines[len(lines) // 2 + 1 :]),
    "lines swapped": on_lines(lambda lines: [*lines[:-3], *lines[-3:][::-1]]),
    "last line repeated": on_lines(lambda lines: [*lines, lines[-1]]),
    "line repeated": on_lines(lambda lines: [*lines[:2], *lines[1:]]),
    "line cut": on_lines(lambda lines: [lines[0][:-9] + b"\n", *lines[1:]]),
}
SHORTER = ("emptied", "half", "last byte gone", "last line dropped")


def make_folder(path: Path, twin: Path) -> None:
    path.mkdir()


def copy_neighbour(path: Path, twin: Path) -> None:
    others = sorted(each for each in path.parent.iterdir() if each.is_file() and each.suffix == path.suffix)
    shutil.copy(others[0] if others else twin, path)


REPLACEMENTS: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda path, twin: None,
    "folder": make_folder,
    "link to nothing": lambda path, twin: path.symlink_to("nothing"),
    "link": lambda path, twin: path.symlink_to("task.json"),
    "of another run": lambda path, twin: shutil.copy(twin, path),
    "of another search": copy_neighbour,
}


def damages(folder: Path, other: Path) -> Iterator[tuple[str, str]]:
    """Damage each file in each way, and yield its name and the damage; the file is then restored."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, raw = path.relative_to(folder).as_posix(), path.read_bytes()
        twin, seen = other / name, {raw}
        for kind, change in EDITS.items():
            if (changed := change(raw)) not in seen:
                path.write_bytes(changed)
                seen.add(changed)
                yield name, kind
        for kind, replace in REPLACEMENTS.items():
            path.unlink()
            replace(path, twin if twin.is_file() else other / "experiment.yaml")
            yield from [(name, kind)] if not path.is_file() or path.read_bytes() != raw else []
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(raw)


def verified(folder: Path) -> str:
    try:
        return next(iter(check_results(folder)[2]), "")
    except UserError as error:
        return str(error)


def tables(folder: Path) -> str:
    try:
        return main_frame(load(folder)).to_csv()
    except UserError as error:
        return str(error)


def continued(experiment: Experiment, folder: Path) -> str:
    """Return the error of a run that continues, or else what it prints before its first work."""
    listener = Listener()
    try:
        run_experiment(experiment, out=folder, observer=listener)
    except (UserError, Begun) as end:
        listener.printed.append(str(end))
    return "\n".join(listener.printed)


@pytest.mark.parametrize("state", STATES)
def test_damaged_file_is_named_alike_by_verify_report_and_run(experiment, runs, tmp_path, monkeypatch, state):
    monkeypatch.setattr("harness.run.runner.git_commit", lambda: None)  # it starts three programs
    folder, intact = tmp_path / "out", runs[0] / state
    shutil.copytree(intact, folder)
    shown, count, findings = tables(folder), 0, []
    assert verified(folder) == ""
    continued(experiment, folder)
    for name, kind in damages(folder, runs[1] / state):
        if NO_TABLE.match(name) and kind not in NO_TABLE_KINDS:
            continue
        count += 1
        problem, report, run = verified(folder), tables(folder), continued(experiment, folder)
        if NO_TABLE.match(name):
            right = report == shown or (problem in report and problem in run)
        elif name == "manifest.json":
            right = kind == "last byte gone" or bool(problem and (report == shown or "damaged" in report))
        elif name.endswith("patterns.yaml") and kind == "deleted":
            right = report == shown  # the next run makes it again
        elif name.endswith(STATES[state][1]) and kind in SHORTER and not problem:
            right = "damaged" not in report + run  # the run may have been killed there
        else:
            right = str(folder / name) in problem and problem in report and problem in run
        if not right:
            findings.append((name, kind, problem, report[:300], run[:300]))
        for path in (path for path in intact.rglob("*") if path.is_file()):
            target = folder / path.relative_to(intact)
            if target != folder / name and (not target.is_file() or target.read_bytes() != path.read_bytes()):
                shutil.copy(path, target)
    assert count > 100
    assert not findings, f"{len(findings)} of {count}: {findings[:3]}"
