"""Why a row is fast: on the simulated runtime, where it is known what every edge is worth."""

import json
import re

import numpy as np
import pytest

from harness.api import Layer
from harness.benchmarkers.simulated import SimulatedBenchmarker
from harness.cli import main
from harness.errors import UserError
from harness.explain.attribution import explain_row
from harness.explain.fates import fates_of
from harness.explain.parts import quantized, without
from harness.explain.words import explain_into, explanation_lines
from harness.graph.build import GraphBuilder
from harness.graph.load import from_proto
from harness.report.explained import read_explanation
from harness.report.results import load
from harness.run.observe import Silent
from search.space import Edge, Placement

EXPERIMENT = """
experiment: small
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0005, effect: 0.2}}]
searchers: [random]
initial: [float, all, linear]
baselines: [all, linear]
budget: {evaluations: [12]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
CELL = "net-simulated-int8"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 16, 16))
    for channels in (8, 8, 12, 12):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    x = builder.op("Add", x, builder.conv(x, 12, 1))
    builder.output(builder.op("GlobalAveragePool", x))
    builder.save(folder / "net.onnx")
    (folder / "small.yaml").write_text(EXPERIMENT)
    main(["run", str(folder / "small.yaml"), "--out", str(folder / "out")])
    return folder / "out"


@pytest.fixture(scope="module")
def found(done):
    return explain_row(done, "random", base=done.parent, observer=Silent())[0]


def test_what_is_left_out_is_worth_what_the_runtime_says(done, found):
    truth = SimulatedBenchmarker(seed=5, noise=0.0, effect=0.2)
    row = load(done).cell(CELL).rows[found.row]
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    summary = load(done).cell(CELL).summaries[row.id]
    assert found.speedup.value == pytest.approx(summary.speedup.value, rel=0.01)
    assert truth.base_ms == 10.0
    assert len(found.patterns) > 1
    values = [effect.ratio.value for effect in found.patterns]
    assert values == sorted(values, reverse=True)
    assert max(values) > 1 + found.floor
    assert all(effect.pairs > 0 for effect in found.patterns)
    assert {effect.pattern for effect in found.points} <= {effect.pattern for effect in found.patterns}
    assert all(effect.alone is not None for effect in found.patterns)


def test_the_fewest_points_keep_the_gain_with_fewer_pairs(found):
    assert found.minimal is not None
    assert 0 < found.minimal.pairs <= found.pairs
    assert found.minimal.ratio.value <= 1 + found.floor
    assert found.minimal.speedup.value >= found.speedup.value / (1 + 2 * found.floor)
    worth = {effect.part: effect.ratio.value for effect in found.points}
    costly = [name for name, value in worth.items() if value < 1 - found.floor]
    assert not set(costly) & set(found.minimal.points), "what costs time is no part of the fewest"


def test_it_is_said_in_words_and_kept_for_the_report(done, found, capsys):
    lines = explain_into(done, "random", base=done.parent, observer=Silent())
    text = "\n".join(lines)
    assert re.search(r"\d\.\d\d \[.*\] times the speed of the float model, with \d+ Q/DQ pairs", text)
    assert "carries gain" in text
    assert "pairs (" in text
    assert "keep it" in text
    assert "The runtime does not tell." in text
    path = next((done / CELL / "explain").glob("*.json"))
    again = read_explanation(path)
    assert again.row == found.row
    main(["report", str(done)])
    report = done / "report"
    assert (report / f"sensitivity-{CELL}-{found.row}.svg").exists()
    assert not list(report.glob("waterfall-*")), "no layer was told"
    assert "data:image/svg+xml;base64," in (report / "index.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', (report / "index.html").read_text(), re.DOTALL)[1])
    assert "without it" in next(iter(data["cells"][0]["effects"][found.row]["patterns"].values()))


def test_an_explanation_that_is_damaged_is_named(done, tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"schema": 1}')
    with pytest.raises(UserError, match=r"x\.json: damaged .*explain the row again"):
        read_explanation(path)
    path.write_text('{"schema": 9}')
    with pytest.raises(UserError, match="not of schema 1"):
        read_explanation(path)


def test_rows_that_cannot_be_explained_say_why(done):
    with pytest.raises(UserError, match=r"float: this row has no placement of ours"):
        explain_row(done, "float", base=done.parent, observer=Silent())
    with pytest.raises(UserError, match=r"no row 'rondom'.*random"):
        explain_row(done, "rondom", base=done.parent, observer=Silent())


def test_another_model_is_refused(done):
    path = done / CELL / "cell.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), "model_sha256": "0" * 64}))
    try:
        with pytest.raises(UserError, match="the model is another one today"):
            explain_row(done, "random", base=done.parent, observer=Silent())
    finally:
        path.write_text(before)


def test_no_gain_leaves_nothing_to_keep(found):
    flat = type(found)(**{**{f: getattr(found, f) for f in found.__slots__}, "minimal": None, "points": ()})
    text = "\n".join(explanation_lines(flat))
    assert "There is no gain beyond the noise to keep." in text
    assert "None that is beyond the noise." in text


def test_edges_are_fused_where_their_consumer_computes_on_integers():
    g = GraphBuilder("net")
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3, name="conv"), name="relu")
    g.output(x)
    model = from_proto(g.build(), source="net", sha256="0")
    names = [node.name for node in model.nodes]
    layers = (
        Layer(name="a", kind="Convolution", precision="u8", origin=(names[0],)),
        Layer(name="b", kind="Eltwise", precision="f32", origin=(names[1],)),
    )
    edges = tuple((Edge("t", name, 0), "int8") for name in (*names[:2], ""))
    assert [fate.fate for fate in fates_of(edges, model, layers)] == ["fused", "alone", "unknown"]
    assert [fate.fate for fate in fates_of(edges, model, ())] == ["unknown"] * 3


def test_leaving_out_leaves_the_rest():
    placement = Placement((1, 0, 2, 1))
    assert quantized(placement) == [0, 2, 3]
    assert without(placement, [2]).choices == (1, 0, 0, 1)
    assert np.count_nonzero(without(placement, [0, 2, 3]).choices) == 0
