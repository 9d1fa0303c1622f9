"""`qdq run --reproduce`: the stored experiment once more, and how both compare."""

import json
import shutil

import pytest
from small import qdq, save_chain

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


@pytest.fixture
def done(tmp_path):
    save_chain(tmp_path / "net.onnx", (4,), size=8)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out")) == 0
    return tmp_path / "out"


def test_reproduce_repeats_run_and_compares(done, tmp_path, capsys):
    assert qdq("run", str(done), "--reproduce", "--base", str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "out-again" / "report" / "index.html").exists()
    assert "ratio [CI" in said
    assert "same" in said, "the same seeds on a runtime without noise choose the same file"
    assert "model_sha256" not in said, "what was run is what was stored"
    assert list((tmp_path / "out-again").glob("*/optuna.journal"))
    assert qdq("run", str(done), "--reproduce", "--base", str(tmp_path), "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in values["tables"]["main"]} >= {"all", "random"}
    assert values["comparison"]["rows"]


BREAKS = '''
class Breaks:
    """The check of the experiment makes it too."""

    def __init__(self, space, *, seed):
        pass

    def ask(self, n):
        raise LookupError("a bug in ask")

    def tell(self, observation):
        pass
'''


def test_reproduce_compares_despite_failed_searcher(done, tmp_path, capsys):
    (tmp_path / "breaking.py").write_text(BREAKS)
    (tmp_path / "small.yaml").write_text(EXPERIMENT.replace("[random]", "[random, 'breaking:Breaks']"))
    assert qdq("run", str(tmp_path / "small.yaml"), "--out", str(done)) == 1
    capsys.readouterr()
    assert qdq("run", str(done), "--reproduce", "--base", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "same" in said.out[said.out.index("ratio [CI") :]
    assert "LookupError: a bug in ask (traceback: " in said.err


def test_reproduce_errors_name_the_remedy(done, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(done)
    assert qdq("run", str(done), "--reproduce") == 2
    assert "relative paths of the experiment start from" in capsys.readouterr().err
    assert qdq("run", str(done), "--reproduce", "--out", str(done)) == 2
    assert "is the folder to be reproduced; use another one" in capsys.readouterr().err
    shutil.rmtree(done)
    monkeypatch.chdir(tmp_path)
    assert qdq("run", str(done), "--reproduce") == 2
    assert "no results here" in capsys.readouterr().err
