"""The replay benchmarker returns recorded readings and failures, and refuses other placements."""

from pathlib import Path

import numpy as np
import pytest
from made_up_tables import SPACE, save_table

from harness.base.errors import BuildFailed, EvaluationFailed, MeasureFailed, UserError
from harness.config.experiment import parse_experiment, plan_tasks
from harness.config.sections import Limits, PluginSpec, Sampling
from harness.measure.records import MAIN_BENCHMARKER, Failed, Measured
from harness.plugins import registry
from harness.plugins.api import Candidate
from harness.runtimes.replay import ReplayBenchmarker
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import open_engines
from search.space import Edge, Placement, Resolved, edges_digest

FAILED = {(1, 0): Failed(stage="crash", reason="the worker died"), (0, 1): Failed(stage="measure", reason="no clock")}


def candidate(edges: Resolved) -> Candidate:
    def source() -> Path:
        raise AssertionError("a replay reads no file of a candidate")

    return Candidate(digest=edges_digest(edges), edges=edges, source=source)


@pytest.fixture
def table(tmp_path):
    measured = Measured(samples_ms=(1.0, 2.0, 3.0), build_s=0.75, measure_s=0.1, info={"layers": {"u8": 2}})
    backend = {"name": "onnxruntime", "version": "1.24", "device": "a CPU", "options": {}, "float_precision": "f32"}
    made = save_table(
        tmp_path / "t.parquet",
        2,
        outcome=lambda choices: FAILED.get(choices[:2], measured),
        backend=backend,
        dialect="onnxruntime_s8",
        model="m",
    )
    return made.path


def of(*choices: int) -> Candidate:
    """Return the candidate of some choices of the space of `made_up_tables`, of which the table varies two."""
    return candidate(SPACE.resolve(Placement((*choices, *(0,) * (len(SPACE) - len(choices))))))


def test_samples_are_drawn_from_those_recorded(table, tmp_path):
    replay = ReplayBenchmarker(table, noise_seed=1)
    artifact = replay.build(of(1, 1), tmp_path)
    assert artifact.info == {"layers": {"u8": 2}, "build_s": 0.75, "recorded": True}
    with replay.open(artifact) as probe:
        readings = probe.sample(600)
        with pytest.raises(EvaluationFailed, match="only recorded latencies"):
            probe.infer({})
    assert set(readings) == {1.0, 2.0, 3.0}
    assert np.mean(readings) == pytest.approx(2.0, abs=0.15)
    again = ReplayBenchmarker(table, noise_seed=1)
    with again.open(again.build(of(1, 1), tmp_path)) as probe:
        assert probe.sample(600) == readings


def test_recorded_failures_fail_again(table, tmp_path):
    replay = ReplayBenchmarker(table)
    with pytest.raises(BuildFailed, match="recorded crash: the worker died"):
        replay.build(of(1, 0), tmp_path)
    with pytest.raises(MeasureFailed, match="recorded measure: no clock"):
        replay.build(of(0, 1), tmp_path)


def test_placements_outside_the_table_are_refused(table, tmp_path):
    replay = ReplayBenchmarker(table)
    outside = of(0, 0, 1)
    with pytest.raises(
        BuildFailed, match=r"is not in table t\.parquet, which has the 4 placements of 2 dimensions of m"
    ):
        replay.build(outside, tmp_path)
    foreign = candidate(((Edge("other", "conv", 0), "int8"),))
    with pytest.raises(BuildFailed, match=r"t\.parquet is of another model: m has no edge 'other' -> 'conv'"):
        replay.build(foreign, tmp_path)
    with pytest.raises(UserError, match="no such file"):
        registry.create_plugin("benchmarker", "replay", {"table": str(tmp_path / "none.parquet")})


def test_description_names_the_recorded_device(table):
    replay = ReplayBenchmarker(table)
    facts = replay.describe()
    assert (facts["name"], facts["device"], facts["float_precision"]) == ("replay", "a CPU", "f32")
    assert facts["options"]["recorded_on"]["name"] == "onnxruntime"
    assert len(facts["options"]["table_sha256"]) == 64
    assert replay.capabilities.dialect == "onnxruntime_s8"


def test_replay_works_in_a_worker(table, tmp_path):
    use = PluginSpec(use="replay", params={"table": str(table), "noise_seed": 0})
    with open_engines(WorkerSpec(benchmarkers={MAIN_BENCHMARKER: use}, workdir=tmp_path / "work"), Limits()) as engines:
        built = engines.build(of(1, 1))
        assert not isinstance(built, Failed)
        samples = engines.sample(built.handle, Sampling(min_samples=5, max_samples=9))
        assert not isinstance(samples, Failed)
        assert set(samples.latency_ms) <= {1.0, 2.0, 3.0}
        assert isinstance(engines.build(of(1, 0)), Failed)


def test_relative_table_path_starts_at_the_experiment(table, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = f"experiment: e\nmodels: [m.onnx]\nbackends: [openvino, {{use: replay, params: {{table: {table.name}}}}}]\n"
    experiment = parse_experiment(text, "e.yaml", table.parent)
    openvino, replay = (task.backend for task in plan_tasks(experiment))
    assert registry.create_plugin("benchmarker", replay.use, replay.params).describe()["device"] == "a CPU"
    assert openvino.params == {}, "its constructor has no base"
    with pytest.raises(UserError, match=r"t\.parquet: no such file"):
        registry.create_plugin("benchmarker", "replay", plan_tasks(parse_experiment(text, "e.yaml"))[1].backend.params)
    other = f"{text}initial: [float]\nbaselines: []\n".replace("use: replay", "use: replai")
    assert [task.backend.use for task in plan_tasks(parse_experiment(other, "e.yaml", tmp_path))] == [
        "openvino",
        "replai",
    ]
