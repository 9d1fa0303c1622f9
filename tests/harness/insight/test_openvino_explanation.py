"""`qdq explain DIR ROW` on OpenVINO: text and pictures that do not depend on the readings of this machine."""

import re

import pytest

from harness.cli.main import main
from harness.config.sections import Confirmation
from harness.graph.builder import GraphBuilder
from harness.insight import attribution
from harness.results.task_files import read_attribution

EXPERIMENT = """
experiment: small
models:
  - use: net.onnx
    calibration: {samples: 2}
    evaluator: {use: fidelity, params: {samples: 4}}
backends: [{use: 'here:OpenVINO', label: openvino, params: {precision: f32}}]
searchers: [random]
initial: [float, linear]
baselines: [linear]
budget: {evaluations: [3]}
sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3, max_ms: 20}
confirmation: {builds: 3, rounds: 2, samples: 3, candidates: 1}
"""
TASK = "net-openvino-int8"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 16, 32, 32))
    for channels in (32, 32):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    builder.output(builder.op("GlobalAveragePool", builder.op("Add", x, builder.conv(x, 32, 1))))
    builder.save(folder / "net.onnx")
    (folder / "small.yaml").write_text(EXPERIMENT)
    main(["run", str(folder / "small.yaml"), "--out", str(folder / "out")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attribution, "ATTRIBUTION_SCHEDULE", Confirmation(builds=3, rounds=2, samples=3))
        main(["explain", str(folder / "out"), "linear", "--base", str(folder)])
    return folder / "out"


def test_explanation_names_fused_edges_and_layer_times(done):
    found = read_attribution(next((done / TASK / "explain").glob("*.json")))
    assert found.method == "linear"
    assert found.metric == "sqnr_db"
    assert sum(layer.time_ms or 0.0 for layer in found.before) > 0
    assert any(layer.precision in ("u8", "i8") for layer in found.after)
    assert not any(layer.precision in ("u8", "i8") for layer in found.before)
    fusions = {edge.fusion for edge in found.edges}
    assert "fused" in fusions
    text = next((done / TASK / "explain").glob("*.md")).read_text()
    assert re.search(r"Of \d+ quantized edges \d+ were fused into their consumers", text)
    assert "SQNR lost" not in text, "the float model has no SQNR of its own but a cap"
    assert "## Where the time went, layer by layer" in text


def test_explain_draws_figures_immediately(done):
    drawn = {path.name.partition("-")[0] for path in (done / "report").glob(f"*-{TASK}-*.svg")}
    assert {"waterfall", "sensitivity", "price"} <= drawn
