"""Why a row is fast: on the simulated runtime, where it is known what every edge is worth; and on OpenVINO."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small import qdq, save_small
from small_results import read_page_data
from turns import Instant

from harness.base.errors import BuildFailed, UserError
from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.base.statistics import Interval
from harness.config.experiment import load_experiment
from harness.config.sections import Confirmation
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.insight import attribution
from harness.insight.attribution import (
    AblationTimer,
    AblationTiming,
    attribute_row,
    backward_elimination,
    find_explained_row,
    quantized,
    without,
)
from harness.insight.model_report import iter_edge_fusions
from harness.insight.render import attribution_lines, explain_and_save
from harness.measure.turn_log import TWIN, Turn
from harness.plugins.api import Candidate, Layer
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
from search.space import Edge
from search.testing import synthetic_space

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


def run(folder, name, text, row=None):
    (folder / f"{name}.yaml").write_text(text)
    assert qdq("run", str(folder / f"{name}.yaml"), "--out", str(folder / name)) == 0
    if row is not None:
        assert qdq("explain", str(folder / name), row, "--base", str(folder)) == 0
    return folder / name


def attribute(done, row="random"):
    return attribute_row(done, row, base=done.parent, observer=NullProgress())[0]


def text_of(report):
    return "\n".join(attribution_lines(report))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    save_small(folder / "net.onnx")
    return run(folder, "out", EXPERIMENT)


@pytest.fixture(scope="module")
def found(done):
    return attribute(done)


def test_pattern_effects_agree_with_the_simulated_runtime(done, found):
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    summary = load(done).task(TASK).summaries[found.row]
    assert found.speedup.value == pytest.approx(summary.speedup.value, rel=0.01)
    assert len(found.patterns) > 1
    values = [effect.ratio.value for effect in found.patterns]
    assert values == sorted(values, reverse=True)
    assert values[0] > 1 + found.noise_floor
    assert all(effect.pairs > 0 and effect.alone is not None for effect in found.patterns)
    assert {effect.pattern for effect in found.points} <= {effect.pattern for effect in found.patterns}


def test_minimal_placement_keeps_the_gain_with_fewer_pairs(found):
    assert 0 < found.minimal.pairs <= found.pairs
    assert found.minimal.ratio.value <= 1 + found.noise_floor
    assert found.minimal.speedup.value >= found.speedup.value / (1 + 2 * found.noise_floor)
    costly = {effect.part for effect in found.points if effect.ratio.value < 1 - found.noise_floor}
    assert not costly & set(found.minimal.points), "what costs time is no part of the fewest"


def test_untimeable_float_model_is_a_user_error(done, monkeypatch):
    build = SimulatedBenchmarker.build

    def failing(self, candidate, workdir):
        if not candidate.edges:
            raise BuildFailed("out of memory")
        return build(self, candidate, workdir)

    monkeypatch.setattr(SimulatedBenchmarker, "build", failing)
    with pytest.raises(UserError, match=r"the float model could not be timed .*\(build: out of memory\)"):
        attribute(done)


def test_float_failure_with_minimal_points_keeps_first_reading(done, found, monkeypatch):
    time = AblationTimer.time

    def failing(self, placements, title):
        timed = time(self, placements, title)
        late = {"float": AblationTiming(reason="timeout: build took longer than 300 s")}
        return {**timed, **late} if title == "the fewest points" else timed

    monkeypatch.setattr(AblationTimer, "time", failing)
    kept = attribute(done).minimal
    assert kept.speedup.value == pytest.approx(found.speedup.value / kept.ratio.value, rel=0.01)


def test_explanation_is_printed_and_stored_for_the_report(done, found):
    _, lines = explain_and_save(done, "random", base=done.parent, observer=NullProgress())
    text = "\n".join(lines)
    assert re.search(r"\d\.\d\d \[.*\] times the speed of .*, with \d+ Q/DQ pairs on \d+ quantized edges", text)
    assert "carries gain" in text
    assert re.search(r"pairs \(\d+ insertion points\) keep it", text)
    assert "The runtime does not report fusion." in text
    again = read_attribution(next((done / TASK / "explain").glob("*.json")))
    assert again.row == found.row
    assert [step.title for step in again.steps][:3] == ["against float", "patterns left out", "patterns alone"]
    assert qdq("report", str(done)) == 0
    report = done / "report"
    assert (report / f"sensitivity-{TASK}-{found.row}.svg").exists()
    assert not list(report.glob("waterfall-*")), "no layer has a cost"
    page = (report / "index.html").read_text()
    assert "data:image/svg+xml;base64," in page
    (data,) = read_page_data(page)
    assert "without it" in next(iter(data["effects"][found.row]["patterns"].values()))


@pytest.fixture(scope="module")
def priced(done):
    """A runtime on which whatever saves time costs accuracy, explained."""
    scored = "evaluator: {use: 'talking:Near', params: {samples: 24}}, calibration"
    bench = "backends: [{use: 'talking:Bench', params: {seed: 5, noise: 0.0, effect: 0.2}, label: bench}]"
    text = re.sub("backends: .*", bench, EXPERIMENT).replace("calibration", scored)
    return run(done.parent, "priced", text, "random") / "net-bench-int8"


def test_pattern_accuracy_cost_is_listed_with_its_gain(priced):
    found = read_attribution(next((priced / "explain").glob("*.json")))
    assert found.metric == "cosine"
    assert found.drop.low <= found.drop.value <= found.drop.high
    assert found.drop.value > 0
    for effect in found.patterns:
        gained = effect.gain_us(found.latency_ms)
        assert gained.value == pytest.approx(1000 * found.latency_ms * (effect.ratio.value - 1))
        assert np.sign(effect.drop.value) == np.sign(gained.value), "here time is accuracy"
    text = next((priced / "explain").glob("*.md")).read_text()
    assert re.search(r"cosine lost against the float model: \+0\.\d{4} \[", text)
    assert "| costs cosine" in text
    assert re.search(r"[+-]\d+ µs", text)
    assert (priced.parent / "report" / f"price-net-bench-int8-{found.row}.svg").exists()


def test_files_without_accuracy_fields_are_readable(priced, tmp_path):
    body = read_json(next((priced / "explain").glob("*.json")))
    for effect in (*body["patterns"], *body["points"]):
        del effect["drop"]
    for key in ("drop", "metric", "latency_ms"):
        del body[key]
    write_json(tmp_path / "old.json", body)
    old = read_attribution(tmp_path / "old.json")
    assert "lost against" not in text_of(old)
    assert list(draw_attribution("net", old, tmp_path))


def test_evaluator_without_per_item_gives_a_drop_without_ci(found, tmp_path):
    bare = Interval(value=0.25, low=math.nan, high=math.nan)
    patterns = tuple(replace(effect, drop=bare) for effect in found.patterns)
    known = replace(found, metric="mine", drop=bare, latency_ms=4.0, patterns=patterns)
    again = read_attribution(write_attribution(known, tmp_path))
    assert math.isnan(again.drop.low)
    assert "mine lost against the float model: +0.2500." in text_of(again)
    assert any(picture.path.name.startswith("price-") for picture in draw_attribution("net", again, tmp_path))


def test_damaged_file_is_refused_and_another_schema_left_out(done, found, tmp_path, caplog):
    moved = replace(load(done).task(TASK), folder=tmp_path)
    path = write_attribution(found, tmp_path)
    assert [report.row for report in read_attributions(moved)] == [found.row]
    write_json(path, {**read_json(path), "schema": ATTRIBUTION_SCHEMA - 1})
    assert list(read_attributions(moved)) == []
    assert str(path) in caplog.text
    write_json(path, {"schema": ATTRIBUTION_SCHEMA})
    with pytest.raises(UserError, match=r"\.json: damaged .*explain the row again"):
        read_attribution(path)


def test_unexplainable_rows_are_refused_with_a_reason(done):
    with pytest.raises(UserError, match=r"float: .*: all, linear, random$"):
        attribute(done, "float")
    with pytest.raises(UserError, match=r"no row 'rondom'.*random"):
        attribute(done, "rondom")


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
        _, row, _, placement, recovery = find_explained_row(replace(results, tasks=(other,)), where, experiment)
        assert row.id == name
        assert placement.choices == task.rows[found.row].choices
        assert found.row in recovery
    title, note, *_ = attribution_lines(replace(found, recovery=recovery))
    assert "recovery" not in title
    assert "rounding" in note


def test_changed_model_is_refused(done):
    path = done / TASK / "task.json"
    before = path.read_text()
    write_record(path, {**json.loads(before), "model_sha256": "0" * 64})
    try:
        with pytest.raises(UserError, match="the model has changed"):
            attribute(done)
    finally:
        with recorded(path):
            path.write_text(before)


def test_row_without_gain_and_names_with_markdown(found):
    evil = EdgeFusion(
        tensor="<b>|\x1b[31mred", consumer="`x`", slot=0, precision="int8", fusion="not fused", layer="*Eltwise*"
    )
    text = text_of(replace(found, edges=(evil,), minimal=None, points=()))
    assert r"- not fused: \<b>\|\\x1b[31mred at input 0 of \`x\`: \*Eltwise\*" in text
    assert "There is no gain beyond the noise to keep." in text
    assert "None that is beyond the noise." in text


def test_disturbed_step_withholds_only_verdicts_that_depend_on_it(found):
    (floor,) = {effect.noise_floor for effect in found.patterns}
    (step,) = (step for step in found.steps if step.title == "patterns left out")
    assert floor == step.noise_floor
    assert step.ratios == {effect.part: effect.ratio for effect in found.patterns}
    loud, *quiet = found.patterns
    disturbed = (replace(step, noise_floor=9.0), *found.steps[:-1], replace(found.steps[-1], noise_floor=8.0))
    report = replace(found, patterns=(replace(loud, noise_floor=9.0), *quiet), steps=disturbed)
    before, after = map(text_of, (found, report))
    assert "withheld" not in before
    assert "patterns left out (900.0%)" in after
    assert after.count("withheld: noise of 900.0%") == 1
    assert [text.partition("## The fewest")[2].count("noise of 800.0%") for text in (before, after)] == [0, 1]
    assert after.count("carries gain") == before.count("carries gain") - 1


def test_edges_are_fused_where_their_consumer_computes_on_integers():
    g = GraphBuilder("net")
    g.output(g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3, name="conv"), name="relu"))
    model = load_proto(g.build(), source="net", sha256="0")
    layers = (
        Layer(name="a", kind="Convolution", precision="u8", origin=("conv",)),
        Layer(name="b", kind="Eltwise", precision="f32", origin=("relu",)),
    )
    edges = tuple((Edge("t", name, 0), "int8") for name in ("conv", "relu", ""))
    assert [edge.fusion for edge in iter_edge_fusions(edges, model, layers)] == ["fused", "not fused", "unknown"]
    assert [edge.fusion for edge in iter_edge_fusions(edges, model, ())] == ["unknown"] * 3


WORTH = {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.05}  # relative slowdown without a point; other points are worth nothing


@pytest.fixture
def timer(monkeypatch):
    """A function that returns a timer whose steps of the given numbers have a twin that is 40 % slower."""

    def make(*disturbed):
        space, known, steps = synthetic_space(8, groups=4), {}, []

        def candidate(placement):
            known[space.digest(placement)] = placement
            return Candidate(digest=space.digest(placement), edges=(), source=lambda: Path("never asked for"))

        def run(comparison, *_):
            latencies = {comparison.baseline.name: 10.0, TWIN: 14.0 if len(steps) in disturbed else 10.0}
            steps.append(comparison.name)
            for row in comparison.rows:
                kept = quantized(known[row.candidate.digest])
                latencies[row.name] = 10.0 * (1 + sum(cost for i, cost in WORTH.items() if i not in kept))
            return [
                Turn(build=build, group=0, worker=0, round=turn, row=name, samples_ms=(ms,))
                for build in range(3)
                for turn in range(3)
                for name, ms in latencies.items()
            ]

        monkeypatch.setattr(attribution, "run_comparison", run)
        task = SimpleNamespace(space=space, candidate=candidate)
        return AblationTimer(
            task=task, whole=space.quantize_all(), open_engines=Instant().open, observer=NullProgress()
        )

    return make


def test_each_step_has_its_own_noise_floor(timer):
    bench = timer(1)
    slower = {"without 0": without(bench.whole, [0])}
    quiet, loud = (bench.time(slower, title)["without 0"] for title in ("quiet", "disturbed"))
    assert [step.noise_floor for step in bench.steps] == pytest.approx([0.01, 0.4])
    assert (quiet.noise_floor, loud.noise_floor) == pytest.approx((0.01, 0.4))
    assert not quiet.keeps_speed


@pytest.mark.parametrize("disturbed", [(), (4, 5)])
def test_disturbed_step_removes_no_point_that_carries_gain(timer, disturbed):
    bench = timer(*disturbed)
    for title in ("against float", "patterns left out", "patterns alone", "points left out"):
        bench.time({"float": bench.task.space.float_placement()}, title)
    trail, tests = backward_elimination(bench, quantized(bench.whole)[::-1])
    assert quantized(trail[-1]) == list(WORTH)
    assert tests > 0
    names = {dimension.name for dimension in bench.task.space.dimensions}
    removed = [step.ratios for step in bench.steps if step.title.startswith("fewest points")]
    assert removed
    assert {part for ratios in removed for name in ratios for part in name.split(", ")} <= names


def test_openvino_row_names_fused_edges_and_layer_times(tmp_path, monkeypatch):
    """Text and pictures that do not depend on the readings of this machine."""
    save_small(tmp_path / "net.onnx")
    monkeypatch.setattr(attribution, "ATTRIBUTION_SCHEDULE", Confirmation(builds=3, rounds=2, samples=3))
    text = EXPERIMENT.replace("calibration", "evaluator: {use: fidelity, params: {samples: 4}}, calibration")
    text = text.replace("use: simulated, params: {", "use: 'here:OpenVINO', label: openvino, params: {precision: f32")
    text = re.sub("f32.*", "f32}}]", text).replace("[12]", "[4]").replace("samples: 3}", "samples: 3, candidates: 1}")
    text += "sampling: {warmup_ms: 0, min_samples: 3, max_samples: 3, max_ms: 20}\n"
    folder = run(tmp_path, "real", text, "linear")
    found = read_attribution(next((folder / "net-openvino-int8" / "explain").glob("*.json")))
    assert (found.method, found.metric) == ("linear", "sqnr_db")
    assert sum(layer.time_ms or 0.0 for layer in found.before) > 0
    low = [any(layer.precision in ("u8", "i8") for layer in layers) for layers in (found.before, found.after)]
    assert low == [False, True]
    assert "fused" in {edge.fusion for edge in found.edges}
    text = next((folder / "net-openvino-int8" / "explain").glob("*.md")).read_text()
    assert re.search(r"Of \d+ quantized edges \d+ were fused into their consumers", text)
    assert "SQNR lost" not in text, "the float model has no SQNR of its own but a cap"
    assert "## Where the time went, layer by layer" in text
    drawn = {path.name.partition("-")[0] for path in (folder / "report").glob("*-net-openvino-int8-*.svg")}
    assert {"waterfall", "sensitivity", "price"} <= drawn
