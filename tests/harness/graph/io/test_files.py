"""Models with their external data: copied into one folder, moved, told apart; and models that have none."""

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import set_external_data

from harness.base.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.graph.io.files import copy_model, model_files, move_model, write_model

ADJACENT, BELOW = "model.onnx.data", "weights/model.bin"


def written(folder: Path, number: float, location: str = ADJACENT) -> Path:
    """A model that adds a number, which lies outside of its file."""
    g = GraphBuilder("adds")
    g.output(g.op("Add", g.input("x", (64,)), g.const(np.full(64, number, np.float32))), name="y")
    proto = g.build()
    (tensor,) = proto.graph.initializer
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    (folder / location).write_bytes(tensor.raw_data)
    set_external_data(tensor, location, offset=0, length=len(tensor.raw_data))
    tensor.ClearField("raw_data")
    return write_model(proto, folder / "model.onnx")


def added(path: Path) -> float:
    """The number that a model adds."""
    (tensor,) = onnx.load(path).graph.initializer
    return float(numpy_helper.to_array(tensor)[0])


def modes(model: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in model_files(model)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_models_that_are_copied_into_one_folder_keep_their_own_data(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    for name, number in (("a", 1.0), ("b", 2.0)):
        copy_model(written(tmp_path / name, number), models, f"{name}.onnx")
    assert names(models) == ["a.onnx", "a.onnx.data", "b.onnx", "b.onnx.data"]
    assert [added(models / "a.onnx"), added(models / "b.onnx")] == [1.0, 2.0]
    assert digest_file(models / "a.onnx") != digest_file(models / "b.onnx")


@pytest.mark.parametrize("location", [ADJACENT, BELOW])
def test_external_data_is_copied_and_moved_with_the_model(location, tmp_path):
    path = written(tmp_path / "in", 1.0, location)
    (tmp_path / "in" / "bystander.txt").write_text("")
    (tmp_path / "out").mkdir()
    copy = copy_model(path, tmp_path / "out", "copy.onnx")
    with pytest.raises(UserError, match=r"bystander\.txt/x\.onnx: cannot be written \([\w ]+\)$"):
        move_model(copy, tmp_path / "in/bystander.txt/x.onnx")
    assert model_files(copy) == [copy, tmp_path / "out" / "copy.onnx.data"]
    assert added(copy) == 1.0
    move_model(copy, tmp_path / "there" / "moved.onnx")
    assert names(tmp_path / "out") == []
    assert names(tmp_path / "there") == ["moved.onnx", "moved.onnx.data"]
    assert added(tmp_path / "there" / "moved.onnx") == 1.0


def test_external_data_is_readable_like_the_model(tmp_path, monkeypatch):
    """A service of another user reads both, also if a tool wrote the data for its owner only, as onnx does."""
    g = GraphBuilder("large")
    g.output(g.conv(g.input("x", (1, 64, 4, 4)), 64, 3))
    monkeypatch.setattr("harness.graph.io.files.MAX_SINGLE_FILE_BYTES", 1000)
    before = os.umask(0o027)
    try:
        made = write_model(g.build(), tmp_path / "model.onnx")
        assert modes(made) == {0o640}
        for file in model_files(made):
            file.chmod(0o600)
        move_model(copy_model(made, tmp_path, "copy.onnx"), tmp_path / "moved.onnx")
        assert modes(tmp_path / "moved.onnx") == {0o640}
        move_model(made, tmp_path / "again.onnx")
        assert modes(tmp_path / "again.onnx") == {0o640}
    finally:
        os.umask(before)


@pytest.mark.parametrize("location", [ADJACENT, BELOW])
def test_digest_covers_external_data_but_not_its_name(location, tmp_path):
    one, same, other = (written(tmp_path / str(n), number, location) for n, number in enumerate((1.0, 1.0, 2.0)))
    assert one.read_bytes() == other.read_bytes()
    assert digest_file(one) == digest_file(same) == digest_file(copy_model(one, tmp_path, "copy.onnx"))
    assert digest_file(one) != digest_file(other)
    assert (copy_model(one, tmp_path).read_bytes() == one.read_bytes()) == (location == ADJACENT)


def test_model_without_external_data_has_one_file(tmp_path):
    """Any text is allowed: here a location, and the name of the file next to it."""
    builder = GraphBuilder(f"location {ADJACENT}")
    builder.output(builder.op("Relu", builder.input("x", (4,))))
    path = builder.save(tmp_path / "in" / "model.onnx")
    (tmp_path / "in" / ADJACENT).write_bytes(b"of another program")
    assert model_files(path) == [path]
    assert digest_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "out").mkdir()
    assert copy_model(path, tmp_path / "out").read_bytes() == path.read_bytes()
    assert names(tmp_path / "out") == ["model.onnx"]


def test_external_data_outside_the_folder_is_refused(tmp_path):
    for location in ("../secret.bin", str(tmp_path / "secret.bin")):
        path = written(tmp_path / "in", 1.0, location)
        for work in (digest_file, model_files, lambda given: copy_model(given, tmp_path)):
            with pytest.raises(UserError, match="outside of the model's folder, which is refused; save"):
                work(path)
    assert names(tmp_path) == ["in", "secret.bin"]
