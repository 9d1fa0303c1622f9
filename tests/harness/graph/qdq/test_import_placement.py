"""Placements read back from the outputs of ModelOpt and of ONNX Runtime."""

import importlib.util
import re
from pathlib import Path

import pytest
from onnx_models import everywhere, loaded, pair

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.graph.qdq.import_placement import import_placement, read_placement
from harness.graph.qdq.insert import Inserter
from harness.graph.rules.dialects import OPENVINO


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_import_from_the_pt2e_program_in_the_docs(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[4] / "docs/how-to/deploy.md").read_text(encoding="utf-8")
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "pt2e" in text)
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)]
    example = (torch.zeros(1, 3, 16, 16),)
    exec(
        program,
        {"module": torch.nn.Sequential(*layers).eval(), "example": example, "batches": [torch.randn(1, 3, 16, 16)]},
    )
    model = load(Path("float.onnx"))
    convolutions = [node.name for node in model.nodes if node.op == "Conv"]
    edges = import_placement(Path("theirs.onnx"), model)
    assert {(name, slot) for name in convolutions for slot in (0, 1)} <= {(edge.consumer, edge.slot) for edge in edges}
    assert len(read_placement(Path("theirs.onnx"), model).ranges) >= len(convolutions)


def test_nodes_with_equal_names_are_imported_separately():
    """Loading tells them apart by numbers in the order of the file; so does the reader of the Q/DQ model."""
    g = GraphBuilder("twice", opset=19, seed=5)
    x = g.conv(g.input("x", (1, 4, 8, 8)), 4, 3, name="conv")
    g.output(g.conv(x, 4, 3, name="conv"), name="y")
    model = loaded(g, "twice")
    asked = everywhere(model, OPENVINO)
    proto = Inserter(model, OPENVINO, {name: (-1.0, 1.0) for name in model.types}).insert(asked)
    for node in proto.graph.node:
        if node.op_type == "Conv":
            node.name = "conv"
    assert import_placement(proto, model) == dict(asked)


def test_a_model_without_matching_pairs_is_refused():
    g, stranger = GraphBuilder("residual"), GraphBuilder("stranger")
    g.output(g.op("Sigmoid", g.input("x", (1, 4))))
    model = loaded(g, "residual")
    with pytest.raises(UserError, match="the Q/DQ model: holds no Q/DQ pair, so there is no placement"):
        import_placement(model.proto, model)
    stranger.output(stranger.op("Relu", pair(stranger, stranger.input("other", (1, 4)), 0.1)))
    with pytest.raises(UserError, match="the Q/DQ model: none of its 1 quantized edges belongs to residual"):
        import_placement(stranger.build(), model)
