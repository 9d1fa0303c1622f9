"""A score belongs to a file, not to a name: what was made again is scored again, and nothing twice."""

import pytest

from harness.api import Accuracy
from harness.graph.files import copy_model, file_digest
from harness.measure.engines import Built
from harness.run.observe import Silent
from harness.run.rows import Row, Table, write_json
from harness.run.scores import ScoreBook, read_scores
from search.space import Space


class Engines:
    def __init__(self):
        self.asked = []

    def build(self, candidate, benchmarker="main"):
        self.asked.append((candidate.source().name, benchmarker))
        return Built(handle=0, build_s=0.0)

    def evaluate(self, handle, evaluator="main"):
        return Accuracy(metrics={"top1": float(len(self.asked))})

    def release(self, handle):
        pass


@pytest.fixture
def score(tmp_path):
    (tmp_path / "models").mkdir()

    def score(contents, evaluator="top1"):
        rows = []
        for name, content in contents.items():
            path = tmp_path / "models" / f"{name}.onnx"
            path.write_bytes(content)
            rows.append(Row(id=name, file=path.name, sha256=file_digest(path), pairs=0))
        body = [{slot: getattr(row, slot) for slot in Row.__slots__} for row in rows]
        write_json(tmp_path / "rows.json", {"rows": body, "picks": []})
        engines = Engines()
        ScoreBook(tmp_path, engines, Silent(), evaluator).score(
            Table(folder=tmp_path, space=Space(()), rows=tuple(rows))
        )
        return engines.asked, {name: found["metrics"]["top1"] for name, found in read_scores(tmp_path).items()}

    return score


def test_a_file_is_scored_once(score):
    assert score({"float": b"1", "abc": b"2"}) == (
        [("float.onnx", "main"), ("abc.onnx", "main")],
        {"float": 1, "abc": 2},
    )
    assert score({"float": b"1", "abc": b"2"}) == ([], {"float": 1, "abc": 2})


def test_a_file_that_was_made_again_is_scored_again(score):
    score({"float": b"1", "abc": b"2"})
    assert score({"float": b"1", "abc": b"3"}) == ([("abc.onnx", "main")], {"float": 1, "abc": 1})


def test_another_evaluator_scores_everything_again(score):
    score({"float": b"1"})
    assert score({"float": b"1"}, evaluator="top5")[0] == [("float.onnx", "main")]


def test_external_data_belong_to_the_file(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "model.onnx").write_bytes(b"location model.onnx.data")
    (here / "model.onnx.data").write_bytes(b"weights")
    (here / "bystander").write_bytes(b"")
    copy = copy_model(here / "model.onnx", there, "float.onnx")
    assert sorted(path.name for path in there.iterdir()) == ["float.onnx", "model.onnx.data"]
    assert file_digest(copy) == file_digest(here / "model.onnx")
    (there / "model.onnx.data").write_bytes(b"other weights")
    assert file_digest(copy) != file_digest(here / "model.onnx")
