"""Placements of tables are scored once for each model and dialect, and tasks give the accuracy with a reading."""

from __future__ import annotations

import json
import shutil

import pytest
from small import qdq

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.replay.bench import load
from harness.replay.bench.accuracy import ACCURACY_FILE, PlacementScorer, read_accuracy, score_key, score_tables
from harness.replay.bench.export import write_croissant
from harness.replay.record_table import record
from harness.run.prepare.study_task import make_study
from harness.runtimes.replay import read_table

TEXT = "experiment: scores\nmodels: [{model}]\nbackends: [simulated]\nprecision: [int8]\n"


@pytest.fixture
def experiment(tmp_path, tasks, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builder = GraphBuilder("net", seed=1)
    x = builder.op("Relu", builder.conv(builder.input("x", (1, 3, 8, 8)), 3, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", builder.conv(x, 4, 1)))
    model = builder.save(tmp_path / "net.onnx")
    like = None
    for name, base_ms in (("one", 10.0), ("two", 20.0)):
        (tasks / f"{name}.parquet").unlink()
        study = make_study(str(model), backend="simulated", params={"seed": 5, "base_ms": base_ms})
        record(study, tasks / f"{name}.parquet", None if like else 2, NullProgress(), like=like)
        like = read_table(tasks / f"{name}.parquet")
    return parse_experiment(TEXT.format(model=model), "scores", tmp_path)


def test_tables_of_one_model_share_accuracy_scores(experiment, tasks, tmp_path, monkeypatch):
    out, one, two = tasks / ACCURACY_FILE, tasks / "one.parquet", tasks / "two.parquet"
    score, scored = PlacementScorer.score, []

    def cut(self: PlacementScorer, *args: object) -> object:
        scored.append(args)
        if len(scored) == 3:
            raise KeyboardInterrupt
        return score(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(PlacementScorer, "score", cut)
        with pytest.raises(KeyboardInterrupt):
            score_tables(experiment, [one], out, NullProgress())
    with out.with_name(f"{out.name}.jsonl").open("a") as file:
        file.write('{"model": "cut')
    table = read_table(one)
    inside = {table.subspace.full_space.digest(table.subspace.to_full_space(p)) for p in table.subspace.placements()}
    named = {table.subspace.full_space.digest(type(table.subspace.base)(c)) for c in table.metadata.anchors.values()}
    assert score_tables(experiment, [one], out, NullProgress()) == len(inside | named) - 2
    assert score_tables(experiment, [two], out, NullProgress()) == 0, "it differs in the speed of its machine only"
    (tmp_path / "scores.yaml").write_text(TEXT.format(model=tmp_path / "net.onnx"))
    assert qdq("bench", "score", str(tmp_path / "scores.yaml"), "two") == 0
    found = read_accuracy(out)
    quantized = found[score_key(table.metadata, table.subspace.full_space.digest(table.subspace.base))]
    assert (quantized.model, quantized.samples, quantized.data.split(",")[0]) == ("net", 64, "random inputs")
    assert "ONNX Runtime" in quantized.computed_by
    assert (quantized.metric, quantized.accuracy) == ("sqnr_db", quantized.metrics["sqnr_db"])
    task = load("two")
    reading = task.evaluate([1] * len(task.space))
    assert 5 < reading.metrics["sqnr_db"] < 60
    assert 0 <= reading.metrics["agreement"] <= 1
    for table in ("two", str(two)):  # scores serve replays under a bound too
        assert qdq("bench", "replay", table, "--at-least", "agreement=0", "--searcher", "random", "--seeds", "1") == 0
    assert qdq("bench", "replay", str(two), "--at-least", "agreement=1.1", "--seeds", "1") == 2
    names = ["accuracy.parquet", "one.parquet", "two.parquet", "three.parquet", "solved.parquet"]
    croissant = json.loads(write_croissant(tmp_path)[0].read_text())
    assert [each["@id"] for each in croissant["distribution"]] == names
    assert {"metric", "accuracy", "computed_by"} <= {each["name"] for each in croissant["recordSet"][-1]["field"]}


def test_table_of_an_unknown_model_is_refused(experiment, tasks, tmp_path):
    with pytest.raises(UserError, match="no model is called"):
        score_tables(experiment, [tasks / "three.parquet"], tmp_path / "out" / "a.parquet", NullProgress())
    shutil.copy(tasks / "three.parquet", tasks / ACCURACY_FILE.replace("scores/", ""))
    with pytest.raises(UserError, match="no accuracies"):
        read_accuracy(tasks / "accuracy.parquet")
