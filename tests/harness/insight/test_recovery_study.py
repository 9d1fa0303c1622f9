"""The study of a placement: rows by contents of the pairs, with and without recovery."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from small import qdq
from small_results import seal_bundle

from harness.base.files import read_json
from harness.graph.builder import GraphBuilder
from harness.graph.qdq.qdq_graph import read_qdq_graph

STUDY = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 8}, evaluator: fidelity}]
backends: [{use: onnxruntime, params: {optimization: disabled}}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Conv, depthwise Conv of channels of different sizes, and Conv."""
    net, rng = GraphBuilder("net", seed=0), np.random.default_rng(0)
    x = net.op(
        "Mul", net.input("x", (1, 4, 8, 8)), net.const(np.array([0.02, 1, 5, 9], np.float32).reshape(1, 4, 1, 1))
    )
    weight = net.const(
        (rng.normal(0.3, 1, (4, 1, 3, 3)) / np.array([0.02, 1, 5, 9]).reshape(4, 1, 1, 1)).astype(np.float32)
    )
    x = net.op("Conv", x, weight, group=4, pads=[1] * 4, kernel_shape=[3, 3], name="depthwise")
    net.output(net.conv(net.op("Relu", x), 4, 1), name="y")
    net.save(tmp_path / "net.onnx")
    (tmp_path / "small.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recover(folder, out, *arguments):
    assert qdq("inspect", "recover", "small.yaml", *arguments, "--out", out) == 0
    return read_json(folder / out / "recovery.json")["rows"]


def test_each_combination_is_scored_with_and_without_recovery(folder, capsys):
    rows = recover(folder, "out", "--depthwise", "channel", "--step", "bias_correction")
    assert [(row["choices"], len(row["steps"])) for row in rows] == [
        ("", 0), ("", 1), ("depthwise channel", 0), ("depthwise channel", 1)
    ]  # fmt: skip
    assert rows[2]["sqnr_db"] > rows[0]["sqnr_db"] + 3
    assert rows[3]["sqnr_db"] >= rows[2]["sqnr_db"] - 0.5
    graphs = [read_qdq_graph(folder / "out/models" / row["file"]) for row in rows]
    assert len({tuple(sorted(graph.edges.items())) for graph in graphs}) == 1, "one placement"
    printed = capsys.readouterr().out
    assert "bias_correction" in printed
    assert "placement linear" in printed


def test_recover_auto_and_placement_of_other_file(folder):
    rows = recover(folder, "out", "--auto")
    assert [bool(row["steps"]) for row in rows] == [False, True]
    assert rows[1]["choices"].endswith("depthwise channel")
    assert rows[1]["sqnr_db"] > rows[0]["sqnr_db"] + 3
    recover(folder, "again", "--placement", "out/models/1.onnx")
    shipped = folder / "results/ship/net"
    shipped.mkdir(parents=True)
    shutil.copy(folder / "out/models/1.onnx", shipped / "net.onnx")
    seal_bundle(shipped, answer="")
    recover(folder, "shipped", "--placement", "results")
    files = [folder / name / "models/0.onnx" for name in ("out", "again", "shipped")]
    assert len({file.read_bytes() for file in files}) == 1, "its places, with the contents of the experiment"


def test_nodes_that_cost_most_are_left_float_and_named_as_options(folder, capsys):
    rows = recover(folder, "out", "--float-groups", "1")
    ((group,),) = [row["left_float"] for row in rows if "left_float" in row]
    assert group["nodes"] == ["depthwise"], "one scale for channels that differ"
    assert rows[1]["sqnr_db"] > rows[0]["sqnr_db"] + 3
    assert "--float-node depthwise" in capsys.readouterr().out
    recover(folder, "named", "--float-node", "depthwise")
    assert (folder / "named/models/0.onnx").read_bytes() == (folder / "out/models/1.onnx").read_bytes()


def test_subsets_show_dependence_on_calibration_samples(folder, capsys):
    rows = recover(folder, "out", "--subsets", "3")
    assert [row.get("samples", "") for row in rows] == ["", *(f"samples {k} of 3" for k in (1, 2, 3))]
    assert len({row["sqnr_db"] for row in rows}) > 1
    printed = capsys.readouterr().out
    parts = [row["sqnr_db"] for row in rows[1:]]
    assert f"3 parts of them: {min(parts):.4f} to {max(parts):.4f}" in printed
    assert "best: out/models/0.onnx" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--placement", "linaer"), "linaer"),
        (("--float-node", "nothing*"), "nothing*"),
        (("--step", "bias"), "recovery step is called 'bias'"),
        (("--depthwise", "pixel"), "'pixel'"),
        (("--depthwise", "channel", "--backend", "onnxruntime"), "depthwise"),
    ],
)
def test_invalid_recover_arguments_are_refused(folder, arguments, words, capsys):
    assert qdq("inspect", "recover", "small.yaml", *arguments) == 2
    assert words in capsys.readouterr().err
