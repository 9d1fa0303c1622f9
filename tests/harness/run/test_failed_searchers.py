"""Searchers with bugs, or with nothing more to propose: messages to their author, and the rest of the run."""

from __future__ import annotations

import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from small import qdq, save_chain
from stored import read_text

from harness.report.frames import main_frame
from harness.results.folder import load
from harness.results.journal import read_journal
from harness.results.termination import read_termination

TASK = "net-simulated-int8"
BUDGET = 8
SEARCHERS = '''
from pathlib import Path

import numpy as np

from search.api import Placement

HERE = Path(__file__).parent


class Plain:
    """Draws; choices are NumPy's."""

    def __init__(self, space, *, seed):
        self.space, self.rng, self.asked = space, np.random.default_rng(seed), 0

    def ask(self, n):
        self.asked += 1
        return [Placement(tuple(self.rng.integers(2, size=len(self.space))))]

    def tell(self, observation):
        pass


class Asks(Plain):
    """Breaks at its third proposal until it is mended; what it proposes before may change with that."""

    def ask(self, n):
        if (HERE / "interrupted").exists():
            raise KeyboardInterrupt
        if self.asked == 2 and not (HERE / "mended").exists():
            raise KeyError("a bug in ask")
        if not self.asked and (HERE / "other").exists():
            self.rng.integers(2)
        return super().ask(n)


class Tells(Plain):
    def tell(self, observation):
        raise RuntimeError("a bug in tell")


class Makes(Plain):
    """The check of the experiment makes it with the seed 0."""

    def __init__(self, space, *, seed):
        if seed:
            raise ZeroDivisionError("a bug in the constructor")


class Wrong(Plain):
    def ask(self, n):
        return [Placement((0,) * (len(self.space) + 1))]


class Greedy(Plain):
    def ask(self, n):
        return super().ask(n) * (n + 1)


class Idle(Plain):
    def ask(self, n):
        return super().ask(n) if self.asked < 3 else []


class Again(Plain):
    def ask(self, n):
        return [self.space.quantize_all()]
'''
NAMES = ("Asks", "Tells", "Makes", "Wrong", "Greedy", "Idle", "Again", "Plain")
EXPERIMENT = f"""
experiment: broken
models: [{{use: net.onnx, calibration: {{samples: 2}}}}]
backends: [{{use: simulated, params: {{seed: 5, noise: 0.0}}}}]
searchers: [{", ".join(f"'searchers_with_bugs:{name}'" for name in NAMES)}]
seeds: [1]
initial: [float, all]
baselines: [all]
budget: {{evaluations: [{BUDGET}]}}
confirmation: {{builds: 3, rounds: 2, samples: 3}}
"""
BREAKS = {
    "Asks": (4, "KeyError: 'a bug in ask'", "in ask"),
    "Tells": (1, "RuntimeError: a bug in tell", "in tell"),
    "Makes": (0, "ZeroDivisionError: a bug in the constructor", "in __init__"),
    "Wrong": (2, "ValueError: a placement here has ", "in validate"),
    "Greedy": (2, "ValueError: ask(1) gave 2 placements", "in propose"),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder, with the exit status and what went to standard error."""
    folder = tmp_path_factory.mktemp("broken")
    save_chain(folder / "net.onnx", (8, 8, 12, 12))
    (folder / "searchers_with_bugs.py").write_text(SEARCHERS)
    (folder / "broken.yaml").write_text(EXPERIMENT)
    return folder, *again(folder)


def again(folder: Path) -> tuple[int, str]:
    with redirect_stderr(StringIO()) as said:
        status = qdq("run", str(folder / "broken.yaml"), "--out", str(folder / "out"))
    return status, said.getvalue()


def journal(folder: Path, name: str) -> Path:
    return folder / "out" / TASK / "runs" / f"{name}-1.jsonl"


def evaluated(folder: Path, name: str) -> list[str]:
    return [entry.proposal.digest for entry in read_journal(journal(folder, name)) if entry.result is not None]


@pytest.mark.parametrize("name", BREAKS)
def test_the_error_of_a_searcher_is_kept_with_its_traceback(ran, name):
    folder, _, said = ran
    spent, reason, where = BREAKS[name]
    assert len(evaluated(folder, name)) == spent
    end = read_termination(journal(folder, name))
    assert end is not None
    assert end.reason.startswith(f"failed at {spent} of {BUDGET}: {reason}")
    assert f"{TASK} {name}-1 {end.reason}\n" in said, "said when it happens"
    assert end.traceback_file == journal(folder, name).with_suffix(".failed.txt")
    trace = end.traceback_file.read_text()
    assert "Traceback (most recent call last)" in trace
    assert where in trace
    assert len(trace.splitlines()) < 60


def test_run_with_failed_searchers_writes_tables_and_exits_1(ran):
    folder, status, said = ran
    assert status == 1
    assert "Traceback" not in said
    last = said[said.rindex("qdq: ") :]
    assert f"qdq: {TASK} Asks-1 failed at 4 of 8: KeyError: 'a bug in ask' (traceback: {folder}" in last
    assert last.endswith("and 2 more; all other work is done: fix it and run the same command again\n")
    results = load(folder / "out")
    assert results.complete
    table = main_frame(results).set_index("method")
    assert table.loc["Plain", "builds"] == BUDGET
    assert table.loc[["all", "Plain", "Asks", "Idle", "Again"], "speedup"].notna().all()
    assert table.loc["Makes", "verdict"] == "nothing measured"


def test_tables_name_failed_and_early_ended_searches(ran):
    report = ran[0] / "out" / "report"
    for name in ("main", "budget", "targets"):
        text = (report / f"{name}.md").read_text().replace("\\", "")
        assert f"{TASK}: Asks-1 failed at 4 of 8: KeyError: 'a bug in ask'" in text
        assert f"traceback: {TASK}/runs/Asks-1.failed.txt." in text
        assert f"{TASK}: Idle-1 ended at " in text
        assert "Plain-1" not in text
    assert "Asks-1" not in (report / "cost.md").read_text()
    assert "own readings" in (report / "targets.md").read_text()
    assert "Asks-1 failed at 4 of 8" in (report / "index.html").read_text()


def test_exhausted_search_records_its_reason(ran):
    folder, _, said = ran
    spent = len(evaluated(folder, "Idle"))
    assert f"{TASK} Idle-1 ended at {spent} of 8: it had nothing more to propose\n" in said
    known = "it proposed only placements that were proposed before, 200 in a row"
    assert f"{TASK} Again-1 ended at 2 of 8: {known}\n" in said
    assert journal(folder, "Again").with_suffix(".ended.txt").read_text() == f"ended at 2 of 8: {known}\n"
    assert read_termination(journal(folder, "Plain")) is None


@pytest.fixture
def copy(ran, tmp_path):
    """Only `Asks`, whose class looks for its marks in the first folder."""
    folder = tmp_path / "copy"
    shutil.copytree(ran[0], folder)
    return folder


@pytest.fixture
def marks(ran):
    """Makes the files that mend `Asks`; they are gone afterwards."""
    made: list[Path] = []

    def mark(name: str) -> None:
        made.append(ran[0] / name)
        made[-1].touch()

    yield mark
    for path in made:
        path.unlink(missing_ok=True)


def test_fixed_searcher_resumes_its_journal(copy, marks):
    before = read_text(journal(copy, "Asks"))
    marks("mended")
    status, said = again(copy)
    assert status == 1, "the others are broken still"
    assert read_text(journal(copy, "Asks")).startswith(before)
    assert len(evaluated(copy, "Asks")) == BUDGET
    assert read_termination(journal(copy, "Asks")) is None
    assert "Asks-1 failed" not in said
    assert "Asks-1 failed" not in (copy / "out" / "report" / "main.md").read_text()
    marks("other")
    status, said = again(copy)
    assert (status, "resume refused at proposal 2" in said) == (2, True)


def test_fixed_searcher_with_other_proposals_starts_again(copy, marks):
    before = read_text(journal(copy, "Asks"))
    marks("mended")
    marks("other")
    status, said = again(copy)
    assert status == 1
    assert f"{TASK} Asks-1 failed and now has other proposals, so it starts again (old journal: Asks-1.1.jsonl)" in said
    assert read_text(journal(copy, "Asks").with_name("Asks-1.1.jsonl")) == before
    assert len(evaluated(copy, "Asks")) == BUDGET
    assert [search.searcher for search in load(copy / "out").tasks[0].searches].count("Asks") == 1


def test_fixed_searcher_restarts_after_interruption(copy, ran, marks):
    marks("mended")
    marks("other")
    marks("interrupted")
    assert "interrupted; measurements are kept" in again(copy)[1]
    end = read_termination(journal(copy, "Asks"))
    assert end is not None
    assert end.reason.startswith("failed at 4 of 8")
    (ran[0] / "interrupted").unlink()
    assert "it starts again (old journal: Asks-1.1.jsonl)" in again(copy)[1]
    assert len(evaluated(copy, "Asks")) == BUDGET
    assert read_termination(journal(copy, "Asks")) is None
