"""A score belongs to a file, not to a name: what was made again is scored again, and nothing twice."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.config.sections import Limits, Objective, PluginSpec
from harness.graph.io.digests import digest_file
from harness.plugins.api import Accuracy
from harness.results.artifacts import ExportedModel, FinalistSet
from harness.results.scores import read_scores
from harness.run.prepare import accuracy_store
from harness.run.prepare.accuracy import Scoring
from harness.run.prepare.accuracy_store import AccuracyStore, score_tool_files
from harness.workers.engines import BuiltEngine, WorkerSpec
from search.space import Space


class Engines:
    def __init__(self, words=(), note=""):
        self.asked, self.words, self.note = [], words, note

    def build(self, candidate, benchmarker="main"):
        self.asked.append((candidate.source().name, benchmarker))
        return BuiltEngine(handle=0, build_s=0.0)

    def evaluate(self, handle, evaluator="main", watch=None):
        for done in self.words:
            watch(done, 4)
        return Accuracy(metrics={"top1": float(len(self.asked))}, note=self.note)

    def prepare(self, handle, evaluator="main", watch=None):
        return None

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
            rows.append(ExportedModel(id=name, file=path.name, sha256=digest_file(path), pairs=0))
        body = [{slot: getattr(row, slot) for slot in ExportedModel.__slots__} for row in rows]
        write_json(tmp_path / "rows.json", {"rows": body, "picks": []})
        engines = Engines()
        AccuracyStore(tmp_path, engines, NullProgress(), evaluator).score_rows(
            FinalistSet(folder=tmp_path, space=Space(()), rows=tuple(rows))
        )
        return engines.asked, {name: found["metrics"]["top1"] for name, found in read_scores(tmp_path).items()}

    return score


def test_a_file_is_scored_once(score):
    assert score({"float": b"1", "abc": b"2"}) == (
        [("float.onnx", "main"), ("abc.onnx", "main")],
        {"float": 1, "abc": 2},
    )
    assert score({"float": b"1", "abc": b"2"}) == ([], {"float": 1, "abc": 2})


def test_changed_file_is_scored_again(score):
    score({"float": b"1", "abc": b"2"})
    assert score({"float": b"1", "abc": b"3"}) == ([("abc.onnx", "main")], {"float": 1, "abc": 1})


def test_another_evaluator_scores_everything_again(score):
    score({"float": b"1"})
    assert score({"float": b"1"}, evaluator="top5")[0] == [("float.onnx", "main")]


def test_files_of_tools_are_scored_by_a_reference_too(tmp_path, monkeypatch):
    opened = []

    @contextmanager
    def open_reference(worker, limits):
        engines = Engines()
        opened.append((worker.benchmarkers["main"].use, engines.asked))
        yield engines

    monkeypatch.setattr(accuracy_store, "open_engines", open_reference)
    (tmp_path / "models").mkdir()
    rows = []
    for name, file in (("ort_static", "a.onnx"), ("nncf_ptq", "b.xml"), ("all", "c.onnx")):
        path = tmp_path / "models" / file
        path.write_text(name)
        path.with_suffix(".bin").write_text("weights")
        rows.append(ExportedModel(id=name, file=file, sha256=digest_file(path), pairs=1))
    table = FinalistSet(folder=tmp_path, space=Space(()), rows=tuple(rows))
    worker = WorkerSpec(benchmarkers={"main": PluginSpec(use="tensorrt")}, workdir=tmp_path)
    for scored in (["a.onnx"], []):
        opened.clear()
        score_tool_files(table, worker, Limits(), NullProgress(), "top1")
        assert [use for use, _ in opened] == ["onnxruntime", "openvino"]
        assert [file for file, _ in opened[0][1]] == scored, "once"


class Watcher:
    """An observer that keeps what it was shown."""

    def __init__(self):
        self.said, self.bars, self.open = [], {}, []

    def say(self, text):
        self.said.append(text)

    @contextmanager
    def work(self, title, total):
        self.bars[title] = [0, total]
        self.open.append(title)
        yield SimpleNamespace(advance=lambda note="": self._advance(title))
        self.open.remove(title)

    def _advance(self, title):
        self.bars[title][0] += 1


def test_long_scoring_has_its_own_progress_bar(tmp_path):
    (tmp_path / "float.onnx").write_bytes(b"1")
    watcher = Watcher()
    AccuracyStore(tmp_path, Engines(words=(1, 3, 4)), watcher).float_score(tmp_path / "float.onnx")
    assert watcher.bars == {"score the float model": [1, 1], "inferences of the float model": [4, 4]}
    assert watcher.open == []


def test_short_scoring_has_no_progress_bar(tmp_path):
    (tmp_path / "float.onnx").write_bytes(b"1")
    watcher = Watcher()
    AccuracyStore(tmp_path, Engines(), watcher).float_score(tmp_path / "float.onnx")
    assert watcher.bars == {"score the float model": [1, 1]}


def test_evaluator_note_is_reported_once_and_stored(tmp_path):
    (tmp_path / "float.onnx").write_bytes(b"1")
    watcher = Watcher()
    book = AccuracyStore(tmp_path, Engines(note="half of it was guessed"), watcher)
    for _ in range(2):
        assert book.float_score(tmp_path / "float.onnx").note == "half of it was guessed"
    again = AccuracyStore(tmp_path, Engines(), watcher).float_score(tmp_path / "float.onnx")
    assert again.note == "half of it was guessed"
    assert watcher.said == ["half of it was guessed"] * 2, "once in each run"


def test_score_without_note_is_stored_without_note_key(tmp_path):
    (tmp_path / "float.onnx").write_bytes(b"1")
    AccuracyStore(tmp_path, Engines(), NullProgress()).float_score(tmp_path / "float.onnx")
    (kept,) = read_json(tmp_path / "accuracy.json").values()
    assert kept == {"evaluator": "", "metrics": {"top1": 1.0}, "per_item": [], "evidence": ""}


def scoring(metric="top1", *, higher_is_better=True, params=None):
    return Scoring(
        objective=Objective(),
        evaluators={"main": PluginSpec(use="top1", params=params or {})},
        metric=metric,
        higher_is_better=higher_is_better,
        facts={},
    )


def said_at_the_start(folder, scoring, value):
    """Of a run whose float model scores so."""
    model, watcher = folder / "net-openvino-int8" / "float.onnx", Watcher()
    model.parent.mkdir(exist_ok=True)
    model.write_bytes(b"1")
    engines = Engines()
    engines.evaluate = lambda handle, evaluator, watch: Accuracy(metrics={"top1": value}, per_item=(value, value))
    scoring.goal(AccuracyStore(model.parent, engines, watcher), model, model.parent)
    return watcher.said


def test_float_model_with_zero_score_gives_a_warning(tmp_path):
    params = {"preprocess": {"use": "tf_imagenet", "params": {}}, "decode": "yolox", "input_shape": (1, 3, 8, 8)}
    for _ in range(2):  # a continued run reports it again
        (said,) = said_at_the_start(tmp_path, scoring(params=params), 0.0)
        assert said.startswith("net-openvino-int8: the float model itself has top1 0.0000, so no drop from there says")
        for part in (
            "preprocess (now 'tf_imagenet'; qdq list",
            "decode (now 'yolox'",
            "(now 1x3x8x8)",
            "key 'classes'",
        ):
            assert part in said


@pytest.mark.parametrize(("value", "higher_is_better"), [(0.01, True), (0.5, True), (0.0, False), (-0.7, True)])
def test_plausible_float_scores_give_no_warning(tmp_path, value, higher_is_better):
    (said,) = said_at_the_start(tmp_path, scoring(higher_is_better=higher_is_better), value)
    assert said == f"net-openvino-int8: the float model scores top-1 {value:.4f} on 2 samples"
