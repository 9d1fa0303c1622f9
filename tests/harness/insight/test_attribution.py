"""Why a row is fast: on the simulated runtime, where it is known what every edge is worth."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from small import save_small
from small_results import read_page_data

from harness.base.errors import BuildFailed, UserError
from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.base.statistics import Interval
from harness.cli.main import main
from harness.config.experiment import load_experiment
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.insight.ablation import AblationTimer, AblationTiming, quantized, without
from harness.insight.attribution import attribute_row
from harness.insight.explained_row import find_explained_row
from harness.insight.layers import iter_edge_fusions
from harness.insight.render import attribution_lines, explain_and_save
from harness.plugins.api import Layer
from harness.report.plots.plot_files import draw_attribution
from harness.results.artifacts import recovered_row
from harness.results.folder import load
from harness.results.manifest import recorded, write_record
from harness.results.task_files import (
    ATTRIBUTION_SCHEMA,
    EdgeFusion,
    read_attribution,
    read_attributions,
    write_attribution,
)
from harness.runtimes.simulated import SimulatedBenchmarker
from search.space import Edge, Placement

DRAWN = True

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
TASK = "net-simulated-int8"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    save_small(folder / "net.onnx")
    (folder / "small.yaml").write_text(EXPERIMENT)
    main(["run", str(folder / "small.yaml"), "--out", str(folder / "out")])
    return folder / "out"


@pytest.fixture(scope="module")
def found(done):
    return attribute_row(done, "random", base=done.parent, observer=NullProgress())[0]


def test_pattern_effects_agree_with_the_simulated_runtime(done, found):
    truth = SimulatedBenchmarker(seed=5, noise=0.0, effect=0.2)
    row = load(done).task(TASK).rows[found.row]
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    summary = load(done).task(TASK).summaries[row.id]
    assert found.speedup.value == pytest.approx(summary.speedup.value, rel=0.01)
    assert truth.base_ms == 10.0
    assert len(found.patterns) > 1
    values = [effect.ratio.value for effect in found.patterns]
    assert values == sorted(values, reverse=True)
    assert max(values) > 1 + found.noise_floor
    assert all(effect.pairs > 0 for effect in found.patterns)
    assert {effect.pattern for effect in found.points} <= {effect.pattern for effect in found.patterns}
    assert all(effect.alone is not None for effect in found.patterns)


def test_minimal_placement_keeps_the_gain_with_fewer_pairs(found):
    assert 0 < found.minimal.pairs <= found.pairs
    assert found.minimal.ratio.value <= 1 + found.noise_floor
    assert found.minimal.speedup.value >= found.speedup.value / (1 + 2 * found.noise_floor)
    worth = {effect.part: effect.ratio.value for effect in found.points}
    costly = [name for name, value in worth.items() if value < 1 - found.noise_floor]
    assert not set(costly) & set(found.minimal.points), "what costs time is no part of the fewest"


def test_untimeable_float_model_is_a_user_error(done, monkeypatch):
    build = SimulatedBenchmarker.build

    def failing(self, candidate, workdir):
        if not candidate.edges:
            raise BuildFailed("out of memory")
        return build(self, candidate, workdir)

    monkeypatch.setattr(SimulatedBenchmarker, "build", failing)
    said = r"the float model could not be timed in turns with this row \(build: out of memory\), .*run the same"
    with pytest.raises(UserError, match=said):
        attribute_row(done, "random", base=done.parent, observer=NullProgress())


def test_float_failure_with_minimal_points_keeps_first_reading(done, found, monkeypatch):
    time = AblationTimer.time

    def failing(self, placements, title):
        timed = time(self, placements, title)
        late = {"float": AblationTiming(reason="timeout: build took longer than 300 s")}
        return {**timed, **late} if title == "the fewest points" else timed

    monkeypatch.setattr(AblationTimer, "time", failing)
    kept = attribute_row(done, "random", base=done.parent, observer=NullProgress())[0].minimal
    assert kept.speedup.value == pytest.approx(found.speedup.value / kept.ratio.value, rel=0.01)


def test_explanation_is_printed_and_stored_for_the_report(done, found, capsys):
    _, lines = explain_and_save(done, "random", base=done.parent, observer=NullProgress())
    text = "\n".join(lines)
    assert re.search(
        r"\d\.\d\d \[.*\] times the speed of the float model, with \d+ Q/DQ pairs on \d+ quantized edges", text
    )
    assert "carries gain" in text
    assert "pairs (" in text
    assert "keep it" in text
    assert "The runtime does not report fusion." in text
    path = next((done / TASK / "explain").glob("*.json"))
    again = read_attribution(path)
    assert again.row == found.row
    assert [step.title for step in again.steps][:3] == ["against float", "patterns left out", "patterns alone"]
    main(["report", str(done)])
    report = done / "report"
    assert (report / f"sensitivity-{TASK}-{found.row}.svg").exists()
    assert not list(report.glob("waterfall-*")), "no layer has a cost"
    assert "data:image/svg+xml;base64," in (report / "index.html").read_text()
    (data,) = read_page_data((report / "index.html").read_text())
    assert "without it" in next(iter(data["effects"][found.row]["patterns"].values()))


@pytest.fixture(scope="module")
def priced(done):
    """A runtime on which whatever saves time costs accuracy, explained."""
    folder = done.parent
    scored = "evaluator: {use: 'talking:Near', params: {samples: 24}}, calibration"
    bench = "backends: [{use: 'talking:Bench', params: {seed: 5, noise: 0.0, effect: 0.2}, label: bench}]"
    text = re.sub("backends: .*", bench, EXPERIMENT).replace("calibration", scored)
    (folder / "priced.yaml").write_text(text)
    main(["run", str(folder / "priced.yaml"), "--out", str(folder / "priced")])
    main(["explain", str(folder / "priced"), "random", "--base", str(folder)])
    return folder / "priced"


def test_pattern_accuracy_cost_is_listed_with_its_gain(priced):
    task = priced / "net-bench-int8"
    found = read_attribution(next((task / "explain").glob("*.json")))
    assert found.metric == "cosine"
    assert found.drop.low <= found.drop.value <= found.drop.high
    assert found.drop.value > 0
    for effect in found.patterns:
        gained = effect.gain_us(found.latency_ms)
        assert gained.value == pytest.approx(1000 * found.latency_ms * (effect.ratio.value - 1))
        assert np.sign(effect.drop.value) == np.sign(gained.value), "here time is accuracy"
    text = next((task / "explain").glob("*.md")).read_text()
    assert re.search(r"cosine lost against the float model: \+0\.\d{4} \[", text)
    assert "| costs cosine" in text
    assert "costs: what the whole placement loses in accuracy against itself without the part" in text
    assert re.search(r"[+-]\d+ µs", text)
    assert (priced / "report" / f"price-net-bench-int8-{found.row}.svg").exists()


def test_files_without_accuracy_fields_are_readable(priced, tmp_path):
    path = next((priced / "net-bench-int8" / "explain").glob("*.json"))
    body = read_json(path)
    for effect in (*body["patterns"], *body["points"]):
        del effect["drop"]
    for key in ("drop", "metric", "latency_ms"):
        del body[key]
    write_json(tmp_path / "old.json", body)
    old = read_attribution(tmp_path / "old.json")
    assert "lost against" not in "\n".join(attribution_lines(old))
    assert list(draw_attribution("net", old, tmp_path))


def test_evaluator_without_per_item_gives_a_drop_without_ci(found, tmp_path):
    bare = Interval(value=0.25, low=math.nan, high=math.nan)
    known = replace(found, metric="mine", drop=bare, latency_ms=4.0)
    known = replace(known, patterns=tuple(replace(effect, drop=bare) for effect in found.patterns))
    again = read_attribution(write_attribution(known, tmp_path))
    assert math.isnan(again.drop.low)
    assert "mine lost against the float model: +0.2500." in "\n".join(attribution_lines(again))
    assert any(picture.path.name.startswith("price-") for picture in draw_attribution("net", again, tmp_path))


def test_damaged_explanation_file_is_refused(done, tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"schema": ATTRIBUTION_SCHEMA})
    with pytest.raises(UserError, match=r"x\.json: damaged .*explain the row again"):
        read_attribution(path)


def test_explanation_of_another_schema_is_left_out_of_the_report(done, found, tmp_path, caplog):
    task = load(done).task(TASK)
    moved = replace(task, folder=tmp_path)
    path = write_attribution(found, tmp_path)
    assert [report.row for report in read_attributions(moved)] == [found.row]
    write_json(path, {**read_json(path), "schema": ATTRIBUTION_SCHEMA - 1})
    assert list(read_attributions(moved)) == []
    assert str(path) in caplog.text


def test_unexplainable_rows_are_refused_with_a_reason(done):
    with pytest.raises(UserError, match=r"float: .*: all, linear, random$"):
        attribute_row(done, "float", base=done.parent, observer=NullProgress())
    with pytest.raises(UserError, match=r"no row 'rondom'.*random"):
        attribute_row(done, "rondom", base=done.parent, observer=NullProgress())


def test_recovered_row_is_explained_by_the_placement_it_was_made_from(done, found):
    results, sha256 = load(done), "ab" * 32
    task, name = results.task(TASK), recovered_row(sha256)
    rows = {name: replace(task.rows[found.row], id=name, sha256=sha256, choices=None), "float": task.rows["float"]}
    picks = [replace(pick, row=name) for pick in task.picks if pick.row == found.row]
    facts = {found.row: {"label": "rounding", "within": True, "sha256": sha256}}
    summaries = {**task.summaries, name: task.summaries[found.row]}
    other = replace(task, rows=rows, picks=(*picks, replace(picks[0], seed=1)), recovery=facts, summaries=summaries)
    experiment = load_experiment(done / "experiment.yaml", done.parent)
    for where in (name, found.row, f"{TASK}/{found.row}"):
        explained = find_explained_row(replace(results, tasks=(other,)), where, experiment)
        assert explained.row.id == name
        assert explained.placement.choices == task.rows[found.row].choices
        assert found.row in explained.recovery
    title, note, *_ = attribution_lines(replace(found, recovery=explained.recovery))
    assert "recovery" not in title
    assert "rounding" in note


def test_changed_model_is_refused(done):
    path = done / TASK / "task.json"
    before = path.read_text()
    write_record(path, {**json.loads(before), "model_sha256": "0" * 64})
    try:
        with pytest.raises(UserError, match="the model has changed"):
            attribute_row(done, "random", base=done.parent, observer=NullProgress())
    finally:
        with recorded(path):
            path.write_text(before)


def test_tensor_names_are_escaped(found):
    evil = EdgeFusion(
        tensor="<b>|\x1b[31mred", consumer="`x`", slot=0, precision="int8", fusion="not fused", layer="*Eltwise*"
    )
    text = "\n".join(attribution_lines(replace(found, edges=(evil,))))
    assert r"- not fused: \<b>\|\\x1b[31mred at input 0 of \`x\`: \*Eltwise\*" in text


def test_disturbed_step_withholds_only_verdicts_that_depend_on_it(found):
    (floor,) = {effect.noise_floor for effect in found.patterns}
    (step,) = (step for step in found.steps if step.title == "patterns left out")
    assert floor == step.noise_floor
    assert step.ratios == {effect.part: effect.ratio for effect in found.patterns}
    parts = {effect.part for effect in found.patterns}
    for part in (part for each in found.steps for name in each.ratios for part in name.split(", ")):
        assert part.split("/")[0] in parts or re.fullmatch(r"float|\d+ points", part), part
    loud, *quiet = found.patterns
    disturbed = (replace(step, noise_floor=9.0), *found.steps[:-1], replace(found.steps[-1], noise_floor=8.0))
    report = replace(found, patterns=(replace(loud, noise_floor=9.0), *quiet), steps=disturbed)
    before, after = ("\n".join(attribution_lines(each)) for each in (found, report))
    assert "withheld" not in before
    assert "patterns left out (900.0%)" in after
    assert after.count("withheld: noise of 900.0%") == 1
    assert [text.partition("## The fewest")[2].count("noise of 800.0%") for text in (before, after)] == [0, 1]
    assert after.count("carries gain") == before.count("carries gain") - 1


def test_row_without_gain_has_no_minimal_placement(found):
    flat = type(found)(**{**{f: getattr(found, f) for f in found.__slots__}, "minimal": None, "points": ()})
    text = "\n".join(attribution_lines(flat))
    assert "There is no gain beyond the noise to keep." in text
    assert "None that is beyond the noise." in text


def test_edges_are_fused_where_their_consumer_computes_on_integers():
    g = GraphBuilder("net")
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3, name="conv"), name="relu")
    g.output(x)
    model = load_proto(g.build(), source="net", sha256="0")
    names = [node.name for node in model.nodes]
    layers = (
        Layer(name="a", kind="Convolution", precision="u8", origin=(names[0],)),
        Layer(name="b", kind="Eltwise", precision="f32", origin=(names[1],)),
    )
    edges = tuple((Edge("t", name, 0), "int8") for name in (*names[:2], ""))
    assert [edge.fusion for edge in iter_edge_fusions(edges, model, layers)] == ["fused", "not fused", "unknown"]
    assert [edge.fusion for edge in iter_edge_fusions(edges, model, ())] == ["unknown"] * 3


def test_without_removes_only_the_given_dimensions():
    placement = Placement((1, 0, 2, 1))
    assert quantized(placement) == [0, 2, 3]
    assert without(placement, [2]).choices == (1, 0, 0, 1)
    assert np.count_nonzero(without(placement, [0, 2, 3]).choices) == 0
