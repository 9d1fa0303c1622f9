"""Sensitivities: what each pattern or point does alone and left out, and searches that start from that."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small import qdq, save_chain

from harness.base.errors import UserError
from harness.base.files import add_checksum, read_json
from harness.base.statistics import Interval
from harness.insight.sensitivity import (
    SensitivityTimer,
    UnitEffect,
    quantization_units,
    write_sensitivities,
)
from harness.measure.records import SCHEMA_VERSION, Failed
from harness.run.prepare.initial_design import ScreenedUnit, nested_prior_placements, read_prior
from harness.workers.engines import BuiltEngine
from search.space import Dimension, Edge, Placement, Space

PLUGINS = """
from talking import Bench

class Paying(Bench):
    "Every quantized edge gains; outputs tell how many there are."
    def __init__(self):
        super().__init__(seed=5, noise=0.0, wanted_share=1.0)

class Noisy(Bench):
    "One of which no reading can be believed."
    def __init__(self):
        super().__init__(seed=5, noise=1.0, noise_seed=7, wanted_share=1.0)
"""


COMMAND = ("inspect", "sensitivity", "net.onnx", "--by", "point", "--samples", "2", "--backend")


def test_invalid_model_leaves_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "cut.onnx").write_bytes(b"hello")
    monkeypatch.chdir(tmp_path)
    assert qdq("inspect", "sensitivity", "cut.onnx") == 2
    assert "cut.onnx: not an ONNX file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["cut.onnx"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sensitivity")
    save_chain(folder / "net.onnx", (8, 8, 8), size=8)
    (folder / "paying_plugin.py").write_text(PLUGINS)
    return folder


@pytest.fixture(scope="module")
def measured(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert qdq(*COMMAND, "paying_plugin:Paying", "--out", "out") == 0
    return folder / "out"


def test_units_have_both_directions_ranked_by_gain_and_noise(measured):
    body = read_json(measured / "sensitivity.json")
    assert body["kind"] == "sensitivity"
    assert len(body["units"]) >= 4
    ranks = []
    for unit in body["units"]:
        assert unit["alone"]["gain_us"] > 0, "this runtime pays for every edge"
        assert unit["left_out"]["gain_us"] > 0, "leaving it out costs"
        assert unit["left_out"]["sqnr_db"] > body["full_db"]["int8"], "leaving it out heals"
        assert unit["alone"]["gain_low_us"] <= unit["alone"]["gain_us"] <= unit["alone"]["gain_high_us"]
        ranks.append(unit["alone"]["gain_us"] * 10 ** (unit["alone"]["sqnr_db"] / 10))
    assert ranks == sorted(ranks, reverse=True)
    assert (measured / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert not (measured / "work").exists()


def test_rank_of_slower_units_decreases_with_noise():
    def rank(gain_us: float, sqnr_db: float) -> float:
        effect = UnitEffect(gain_us=Interval(value=gain_us, low=gain_us, high=gain_us), sqnr_db=sqnr_db)
        return replace(quantization_units(space(), "point")[0], alone=effect).rank

    ranks = [rank(*each) for each in ((10.0, 40.0), (10.0, 10.0), (-10.0, 40.0), (-10.0, 10.0), (-20.0, 10.0))]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize(("backend", "noisy"), [("Paying", False), ("Noisy", True)])
def test_sensitivity_output_has_headings_and_noise_note(folder, monkeypatch, capsys, backend, noisy):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    out = f"../{folder.name}/{backend}"
    assert qdq(*COMMAND, f"paying_plugin:{backend}", "--out", out) == 0
    heads, *lines = capsys.readouterr().out.splitlines()
    assert heads.split("\t")[:5] == ["unit", "precision", "role", "edges", "alone µs [CI]"]
    assert len(lines[0].split("\t")) == len(heads.split("\t"))
    assert any(line.startswith("Too noisy to rank") for line in lines) == noisy
    assert lines[-1].startswith(f"All figures: {backend}/sensitivity.json and ")  # no detour in a path


EXPERIMENT = """
experiment: primed
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: 'paying_plugin:Paying', label: paying}]
searchers: [random]
initial: [float, {use: sensitivity, params: {path: out/sensitivity.json, limit: 3}}]
baselines: [sensitivity]
budget: {evaluations: [5]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def test_sensitivity_file_gives_nested_initial_placements(measured, folder):
    (folder / "primed.yaml").write_text(EXPERIMENT)
    assert qdq("run", str(folder / "primed.yaml"), "--out", str(folder / "primed")) == 0
    facts = read_json(folder / "primed" / "net-paying-int8" / "task.json")
    placements = facts["placements"]
    sizes = [sum(placements[name]) for name in ("float", "sensitivity", "sensitivity-2", "sensitivity-3")]
    assert sizes == sorted(set(sizes)), "each start has more of the best points than the one before"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "damaged"),
        (add_checksum('{"kind":"noise"}'), "no sensitivities of schema"),
        (add_checksum(f'{{"kind":"sensitivity","schema":{SCHEMA_VERSION},"units":[{{}}]}}'), "'alone'"),
    ],
)
def test_invalid_sensitivity_file_is_refused_by_check(folder, capsys, text, expected):
    (folder / "other.json").write_text(text)
    (folder / "wrong.yaml").write_text(EXPERIMENT.replace("out/sensitivity.json", "other.json"))
    assert qdq("run", str(folder / "wrong.yaml"), "--check") == 2
    assert expected in capsys.readouterr().err


def space() -> Space:
    def dimension(name: str, group: str, *choices: str) -> Dimension:
        edges = (Edge(f"t{name}", name, 0),)
        return Dimension(name=name, group=group, kind="node_input", choices=("float", *choices), edges=edges)

    return Space((dimension("a", "g", "int8", "fp8"), dimension("b", "g", "int8"), dimension("c", "h", "int8")))


def test_units_are_patterns_or_points_at_each_precision():
    patterns = [(unit.name, unit.precision, unit.dimensions) for unit in quantization_units(space(), "pattern")]
    assert patterns == [("g", "int8", (0, 1)), ("g", "fp8", (0, 1)), ("h", "int8", (2,))]
    assert [unit.name for unit in quantization_units(space(), "point")] == ["a", "a", "b", "c"]


def test_nested_placements_take_best_first_and_skip_unknown_units():
    units = [ScreenedUnit(dimensions=("c",), precision="int8"), ScreenedUnit(dimensions=("gone",), precision="int8"),
             ScreenedUnit(dimensions=("a", "b"), precision="fp8")]  # fmt: skip
    assert [placement.choices for placement in nested_prior_placements(units, space(), 2)] == [(0, 0, 1), (2, 0, 1)]
    assert nested_prior_placements(units[1:2], space(), 2) == []


def test_missing_sensitivity_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json: no such file"):
        read_prior(tmp_path / "nothing.json")


@pytest.mark.parametrize("step", ["build", "sample", "evaluate"])
@pytest.mark.parametrize(("stage", "float_builds"), [("build", 1), ("crash", 2)])
def test_units_that_fail_are_recorded_and_ranked_last(tmp_path, step, stage, float_builds):
    failed, builds = Failed(stage=stage, reason="no kernel"), []

    def answer(name: str, handle: int, value: Any) -> Any:
        return failed if name == step and any(builds[handle].choices) else value

    def build(placement: Placement) -> Any:
        builds.append(placement)
        return answer("build", -1, BuiltEngine(handle=len(builds) - 1, build_s=0.0, info={}))

    engines: Any = SimpleNamespace(
        build=build,
        sample=lambda handle, _: answer("sample", handle, SimpleNamespace(latency_ms=(1.0, 2.0))),
        evaluate=lambda handle, _: answer("evaluate", handle, SimpleNamespace(metrics={"sqnr_db": 30.0})),
        release=lambda handle: None,
    )
    task: Any = SimpleNamespace(space=space(), candidate=lambda placement: placement, accuracy_only=())
    timer = SensitivityTimer(engines=engines, task=task)
    measured = [unit for unit in quantization_units(space(), "point") if unit.precision == "int8"][:2]
    units = [timer.measure_unit(unit) for unit in measured]
    assert [unit.rank for unit in units] == [-math.inf] * 2
    opened = sum(not any(placement.choices) for placement in builds)
    assert opened == (0 if step == "build" else float_builds), "a worker that died has no base any more"
    write_sensitivities(units, space(), {}, tmp_path / "sensitivity.json")
    (first, *_) = read_json(tmp_path / "sensitivity.json")["units"]
    assert first["alone"] == first["left_out"] == {"failed": stage, "reason": "no kernel"}
    assert read_prior(tmp_path / "sensitivity.json") == ()
