"""The float precision of a task is measured once, and what it was chosen for must still be so."""

from functools import partial

import pytest

from harness.base.errors import UserError
from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.config.sections import Limits, PluginSpec
from harness.run.prepare.float_baseline import select_float_baseline
from harness.workers.sandbox import open_engines

PLUG_IN = """
from harness.runtimes.simulated import SimulatedBenchmarker

class Two(SimulatedBenchmarker):
    offered = {"f32": {"base_ms": 10.0}, "bf16": {"base_ms": 5.0}}

    def describe(self):
        return {**super().describe(), "float_open": True, "float_params": self.offered}
"""


@pytest.fixture
def choose(tmp_path, monkeypatch):
    (tmp_path / "plug_in_with_two.py").write_text(PLUG_IN)
    (tmp_path / "model.onnx").write_bytes(b"a model")
    monkeypatch.syspath_prepend(tmp_path)

    def choose():
        use = PluginSpec(use="plug_in_with_two:Two")
        opened = partial(open_engines, limits=Limits())
        return select_float_baseline(use, tmp_path / "model.onnx", tmp_path / "task", opened, NullProgress())

    return choose


def test_fastest_float_precision_is_baseline_and_is_stored(choose, tmp_path):
    first = choose()
    assert {name: use.params for name, use in first.items()} == {"main": {"base_ms": 5.0}, "f32": {"base_ms": 10.0}}
    written = (tmp_path / "task" / "float.json").read_bytes()
    assert choose() == first
    assert (tmp_path / "task" / "float.json").read_bytes() == written


@pytest.mark.parametrize(("f32_ms", "builds"), [(10.0, 1), (5.2, 3)])
def test_a_clear_difference_needs_one_build(choose, tmp_path, monkeypatch, f32_ms, builds):
    import plug_in_with_two

    offered = {"f32": {"base_ms": f32_ms, "noise": 0.001}, "bf16": {"base_ms": 5.0, "noise": 0.001}}
    monkeypatch.setattr(plug_in_with_two.Two, "offered", offered)
    choose()
    record = read_json(tmp_path / "task" / "float.json")
    assert record["fastest"] == "bf16"
    assert {event["build"] for event in record["events"]} == set(range(builds))


def test_configured_float_precision_is_the_baseline_without_measurement(choose, tmp_path, monkeypatch):
    import plug_in_with_two

    described = plug_in_with_two.Two.describe
    monkeypatch.setattr(plug_in_with_two.Two, "describe", lambda self: {**described(self), "float_open": False})
    assert list(choose()) == ["main", "bf16"], "for comparison"
    assert not (tmp_path / "task" / "float.json").exists()


def test_the_choice_for_another_model_is_refused(choose, tmp_path):
    choose()
    (tmp_path / "model.onnx").write_bytes(b"another model")
    with pytest.raises(UserError, match=r"(?s)float.json: this run was started with something else.*model_sha256: '"):
        choose()


def test_stored_precision_no_longer_offered_is_refused(choose, monkeypatch):
    import plug_in_with_two

    choose()
    monkeypatch.setattr(plug_in_with_two.Two, "offered", {"f32": {"base_ms": 10.0}, "f16": {"base_ms": 7.0}})
    with pytest.raises(UserError, match=r"backend\.float_params\.bf16(\.base_ms)?: .* -> None"):
        choose()


def test_damaged_float_baseline_file_is_refused(choose, tmp_path):
    choose()
    (tmp_path / "task" / "float.json").write_text("{")
    with pytest.raises(UserError, match=r"float.json: cannot be read .*; move it away"):
        choose()
    write_json(tmp_path / "task" / "float.json", [])
    with pytest.raises(UserError, match=r"float\.json"):
        choose()
