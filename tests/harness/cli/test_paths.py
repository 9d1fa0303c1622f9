"""Paths in what commands say: no detours, wherever the spec file or the results folder was named from."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import qdq, save_small
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import UserError

SPEC = "gen_trt_engine: {onnx_file: ../net.onnx, trt_engine: ../built/net.openvino}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_engine_is_said_where_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small(here / "net.onnx")
    (here / "specs/engine.yaml").write_text(SPEC)
    assert qdq("gen-trt-engine", "specs/engine.yaml", "--backend", "openvino") == 0
    assert capsys.readouterr().out.startswith("built/net.openvino: openvino ")
    assert (here / "built/net.openvino").exists()


def test_so_is_a_folder_that_is_to_be_explained(here: Path) -> None:
    (here / "out").mkdir()
    done = CliRunner().invoke(app, ["explain", "specs/../out"])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith("out: a results folder needs a row beside it: qdq explain out ROW")
