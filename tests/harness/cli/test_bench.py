"""Names of the results of `qdq bench record` and `qdq bench noise`, and the advice if other results exist there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import qdq, save_chain

from harness.base.files import read_json
from harness.results.journal import CHANGED_RUN_ADVICE, FingerprintMismatch
from harness.run.prepare.study_task import make_study, study_name
from harness.workers.sandbox import InProcess

SIMULATED = ("--backend", "simulated", "--param", "noise=0.0")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return str(save_chain(tmp_path / "net.onnx", (4, 6, 8), size=8))


@pytest.mark.parametrize("level", ["processes", "builds", "readings"])
def test_noise_needs_two_of_each_level(model, capsys, level):
    assert qdq("bench", "noise", model, *SIMULATED, f"--{level}", "1") == 2
    assert f"--{level}" in capsys.readouterr().err
    assert list(Path().iterdir()) == [Path(model).relative_to(Path().absolute())]


def test_a_finished_table_is_not_overwritten_by_another_one(model, capsys):
    table = ("bench", "record", model, *SIMULATED, "--out", "t.parquet", "--dimensions")
    assert qdq(*table, "2") == 0
    said = capsys.readouterr().out
    assert "4 placements of 2 of " in said
    assert "dimensions quantized in it: " in said
    assert " of those that vary, " in said
    written = Path("t.parquet").read_bytes()
    for dimensions, more, difference in (
        ("3", (), "varied in the finished table: 2 -> 3"),
        ("1", (), "varied in the finished table: 2 -> 1"),
        ("2", ("--param", "seed=6"), "backend.options.seed: "),
    ):
        assert qdq(*table, dimensions, *more) == 2
        error = capsys.readouterr().err
        assert "t.parquet: this run was started with something else" in error
        assert difference in error
        assert "use another --out, or move" in error
        assert "accept-changes" not in error
    assert qdq(*table, "2") == 0
    assert qdq(*table[:-1]) == 0, "without --dimensions a finished table is as large as it is"
    assert Path("t.parquet").read_bytes() == written


@pytest.mark.parametrize("disturbed", ["", "waited for a core"])
def test_noise_reports_disturbed_turns(model, disturbed, monkeypatch, capsys):
    sample = InProcess.sample

    def taken(self: InProcess, *args: Any) -> Any:
        return replace(sample(self, *args), disturbed=disturbed)

    monkeypatch.setattr(InProcess, "sample", taken)
    few = ("--processes", "2", "--builds", "2", "--readings", "6", "--out", "n")
    assert qdq("bench", "noise", model, *SIMULATED, *few) == 0
    note = "100% of the turns were disturbed, which distorts speedups, usually upwards: close other work"
    assert (note in capsys.readouterr().out) is bool(disturbed)
    assert read_json(Path("n/noise.json"))["disturbed"] == float(bool(disturbed))


def test_the_advice_of_noise_names_only_its_own_options(model, monkeypatch, capsys):
    def changed(*_: object) -> None:
        raise FingerprintMismatch(CHANGED_RUN_ADVICE)

    monkeypatch.setattr("harness.insight.noise.noise_report", changed)
    assert qdq("bench", "noise", model, *SIMULATED) == 2
    assert capsys.readouterr().err.startswith("qdq: use another --out, or move")


def test_folders_of_noise_are_named_after_the_measurement(model):
    def name(placement: str = "float", shapes: dict[str, str] | None = None, **params: object) -> str:
        return study_name(make_study(model, backend="simulated", params=params, shapes=shapes), placement)

    assert name() == "net-simulated-float"
    assert name("linear") == "net-simulated-linear-int8"
    assert name(seed=1, noise=0.5) == "net-simulated-noise=0.5-seed=1-float"
    assert name(noise=0.5, seed=1) == name(seed=1, noise=0.5)
    others = {name(seed=seed, noise=noise) for seed in range(3) for noise in (0.0, 0.1)}
    assert len(others) == 6
    shaped = name(shapes={"x": "1x3x8x8"})
    assert shaped == "net-simulated-x=1x3x8x8-float"
    odd = name("../../elsewhere")
    assert "/" not in odd
    assert len(odd) < 60
