"""One placement, one experiment file and one table are followed through few modules (docs/architecture.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small import save_chain

from harness.base.progress import NullProgress
from harness.config.experiment import load_experiment
from harness.report.frames import main_frame
from harness.report.report_table import render_plain_text
from harness.report.tables.main import main_table
from harness.results.folder import load
from harness.results.journal import Journal
from harness.run.runner import run_experiment

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = """
experiment: ways
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [simulated]
searchers: [random]
initial: [float]
baselines: []
budget: {evaluations: [3]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


class Trace:
    """Modules that are entered while it is on, in order; basic functions, contracts and runtimes are left out."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.is_on = False

    def __call__(self, frame, event, arg) -> None:
        path = Path(frame.f_code.co_filename)
        if self.is_on and event == "call" and path.is_relative_to(ROOT / "harness"):
            name = path.relative_to(ROOT / "harness").as_posix()
            if not name.startswith(("base/", "plugins/", "runtimes/")):
                self.modules[name] = None


@contextmanager
def traced(*, is_on: bool = True) -> Iterator[Trace]:
    trace = Trace()
    trace.is_on = is_on
    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ways")
    save_chain(folder / "net.onnx", (4, 6, 8), size=8)
    (folder / "ways.yaml").write_text(EXPERIMENT)
    return folder


@pytest.fixture(scope="module")
def candidate(folder):
    """Modules from a proposal of the searcher to the journal, which writes its result."""
    append, lines = Journal.append, []
    with traced(is_on=False) as trace, pytest.MonkeyPatch.context() as patch:

        def appended(self, *args, **kwargs):
            if trace.is_on:
                trace.modules["results/journal.py"] = None
            trace.is_on = False
            line = append(self, *args, **kwargs)
            lines.append(line)
            trace.is_on = len(lines) == 3  # after the float model and its result, and the proposal
            return line

        patch.setattr(Journal, "append", appended)
        run_experiment(load_experiment(folder / "ways.yaml"), out=folder / "out", observer=NullProgress())
    return trace.modules


def test_an_experiment_file_becomes_an_experiment_in_few_modules(folder):
    with traced() as trace:
        load_experiment(folder / "ways.yaml")
    assert 0 < len(trace.modules) <= 5, "\n".join(trace.modules)


def test_a_placement_goes_from_ask_to_the_journal_in_few_modules(candidate):
    assert 0 < len(candidate) <= 9, "\n".join(candidate)


def test_a_results_folder_becomes_a_table_in_few_modules(folder, candidate):
    with traced() as trace:
        results = load(folder / "out")
        text = render_plain_text(main_table(results, main_frame(results)))
    assert "random" in text
    assert 0 < len(trace.modules) <= 20, "\n".join(trace.modules)
