"""The noise floor before the searches: measured once, kept, shown by what stands in the folder, refused elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from turns import Listening

from harness.base.errors import UserError
from harness.base.files import read_json
from harness.base.progress import NullProgress, format_incumbent
from harness.config.experiment import Experiment, parse_experiment
from harness.config.sections import Objective, PluginSpec
from harness.plugins.api import Accuracy
from harness.results.turns import baseline_latency, read_noise_floor
from harness.run.confirm.confirmation import measure_noise_floor, reference_latency_if_noisy
from harness.run.prepare.accuracy import Scoring
from harness.workers.engines import WorkerSpec
from harness.workers.sandbox import InProcess, open_engines

FULL_TURNS = True
EXPERIMENT = parse_experiment("{experiment: e, models: [net.onnx]}", "e.yaml")
FACTS = {"name": "simulated", "version": "1"}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"net")
    return path


def noise_floor(
    model: Path, experiment: Experiment = EXPERIMENT, version: str = "1", **params: float
) -> tuple[float, list[str]]:
    observer = Listening()
    use = PluginSpec(use="simulated", params={"build_noise": 0.03, **params})
    worker = WorkerSpec(benchmarkers={"main": use}, workdir=model.parent / "work")
    facts = {**FACTS, "version": version}
    opened = partial(open_engines, limits=experiment.limits)
    return measure_noise_floor(opened, worker, model, facts, model.parent, observer)[0], observer.said


def test_disturbed_turns_of_noise_floor_are_reported(model, monkeypatch):
    sample = InProcess.sample

    def disturbed(self: InProcess, *args: Any) -> Any:
        return replace(sample(self, *args), disturbed="waited for a core")

    monkeypatch.setattr(InProcess, "sample", disturbed)
    _, (_, warning) = noise_floor(model)
    assert "100%" in warning
    assert "disturbed" in warning


def test_noise_floor_measures_rebuilds_and_is_stored(model):
    assert read_noise_floor(model.parent) == 0.0
    found, said = noise_floor(model)
    assert 0.003 < found < 0.6
    assert len(said) == 1
    assert f"{found:.1%}" in said[0]
    assert "confirmation" in said[0], "the floor of the tables is another figure"
    assert noise_floor(model) == (found, [])
    assert read_noise_floor(model.parent) == found
    events = read_json(model.parent / "noise_floor.json")["events"]
    assert {(event["row"], event["build"]) for event in events} == {
        (row, build) for row in ("float", "A/A twin") for build in range(3)
    }


def test_a_quiet_machine_has_a_small_floor(model):
    assert noise_floor(model, build_noise=0.0, noise=0.001)[0] < 0.005


def test_the_floor_of_another_model_or_runtime_is_refused(model):
    noise_floor(model)
    with pytest.raises(UserError, match=r"(?s)floor\.json: .*backend\.version: '1' -> '2'"):
        noise_floor(model, version="2")
    model.write_bytes(b"another net")
    with pytest.raises(UserError, match=r"(?s)floor\.json: .*model_sha256"):
        noise_floor(model)


def test_reference_latency_and_latency_bound_share_scale(model):
    noise_floor(model)
    folder = model.parent
    float_ms = baseline_latency(folder)
    assert float_ms == pytest.approx(10.0, rel=0.5)
    backend = PluginSpec(use="simulated")
    assert reference_latency_if_noisy(folder, backend, "always") == float_ms
    assert reference_latency_if_noisy(folder, backend, "never") is None
    assert reference_latency_if_noisy(folder, PluginSpec(use="trtexec"), "always") is None, "a turn of it is a process"
    objective = Objective(minimize="accuracy", max_latency="50%")
    scoring = Scoring(
        objective=objective, evaluators={"main": PluginSpec(use="e")}, metric="m", higher_is_better=True, facts={}
    )
    goal = scoring.goal(_Scored(), model, folder)
    assert (goal.float_ms, goal.max_latency_ms) == pytest.approx((float_ms, float_ms / 2), rel=1e-12)


class _Scored:
    """A score book that knows the float model's score, and has no engine to ask."""

    observer = NullProgress()

    def known_float_score(self, model_file: Path, evaluator: str) -> Accuracy:
        return Accuracy(metrics={"m": 0.5})


def test_incumbent_note_states_ratio_to_float_and_timing_mode():
    together, apart = (format_incumbent(0.958, 1.080, interleaved=each) for each in (True, False))
    assert all(figure in note for note in (together, apart) for figure in ("0.958 ms", "1.13x", "1.080 ms"))
    assert ["interleaved" in note for note in (together, apart)] == [True, False]
    nothing = format_incumbent(1.102, 1.080, interleaved=True)
    assert "1.080 ms" in nothing
    assert "1.102" not in nothing
    assert format_incumbent(0.958, 1.080, interleaved=True, is_float=True) == nothing, "a low reading of float"
