"""File of an entry of `initial`, which may be a folder to deploy."""

from pathlib import Path

import pytest

from harness.config.sections import PluginSpec
from harness.errors import UserError
from harness.task_setup.initial_design import initial_file


def entry(path: Path) -> PluginSpec:
    return PluginSpec(use="placement", params={"path": str(path)})


def test_a_folder_to_deploy_stands_for_its_model(tmp_path):
    for name in ("net.onnx", "net.dynamic.onnx", "deploy.py"):
        (tmp_path / name).touch()
    assert initial_file(entry(tmp_path)) == tmp_path / "net.onnx"
    assert initial_file(entry(tmp_path / "net.dynamic.onnx")) == tmp_path / "net.dynamic.onnx"


@pytest.mark.parametrize("names", [(), ("one.onnx", "two.onnx")])
def test_a_folder_without_one_model_is_refused_with_what_it_has(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"one model") as raised:
        initial_file(entry(tmp_path))
    assert all(name in str(raised.value) for name in names)
