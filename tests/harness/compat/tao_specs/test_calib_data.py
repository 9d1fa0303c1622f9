"""`qdq calib-data`: the same inputs as at run time, in one file."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from harness.accuracy.data.preprocess import open_preprocess
from harness.base.errors import UserError
from harness.cli.main import app
from harness.compat.tao_specs.dataset import sample_shape, write_calibration


def test_calib_data_command_of_the_docs(coco, tmp_path):
    output = tmp_path / "calib.npy"
    done = CliRunner().invoke(
        app, ["calib-data", str(coco / "train2017"), "-o", str(output), "--preprocess", "ultralytics", "--samples", "3"]
    )
    assert done.exit_code == 0, done.output
    assert "3 of 8 images, 3 x 3 x 640 x 640 float32, ultralytics" in done.output
    assert "500 or more are advised" in done.output
    array = np.load(output)
    assert array.shape == (3, 3, 640, 640)
    assert array.dtype == np.float32
    files = sorted((coco / "train2017").iterdir())
    for row, index in zip(array, (0, 4, 7), strict=True):  # spread over the folder
        image = np.asarray(Image.open(files[index]).convert("RGB"))
        assert np.array_equal(row, open_preprocess("ultralytics").prepare(image, (640, 640)).tensor)


def test_input_size_from_preprocess_option_or_model(detector):
    assert sample_shape("nanodet", None, None) == (3, 320, 320)
    assert sample_shape("array", "96x128", None) == (3, 96, 128)
    assert sample_shape("array", None, str(detector)) == (3, 128, 128)
    for preprocess, size, model, problem in (
        ("array", None, None, r"--preprocess array: .*--size 640x640 or --model"),
        ("yolo11", None, None, r"no preprocessing is called 'yolo11'; did you mean 'yolox'"),
        ("array", "8x8", str(detector), r"--size and --model: give one"),
        ("array", "1x3x8x8", None, r"--size: height and width, such as 640x640, but got '1x3x8x8'"),
    ):
        with pytest.raises(UserError, match=problem):
            sample_shape(preprocess, size, model)


def test_invalid_inputs_and_outputs_are_refused(coco, tmp_path):
    for name in ("empty", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "bad" / "x.png").write_bytes(b"no image")
    for images, output, preprocess, problem in (
        (tmp_path / "empty", "c.npy", "ultralytics", r"IMAGES: no images \(.*\) in .*empty"),
        (coco / "train2017", "c.npz", "ultralytics", r"\.npy file"),
        (coco / "train2017", "file/c.npy", "ultralytics", r"cannot be written"),
        (coco / "train2017", "c.npy", "yolo", r"no preprocessing is called 'yolo'"),
        (tmp_path / "bad", "c.npy", "ultralytics", r"x.png: cannot be read as an image"),
    ):
        with pytest.raises(UserError, match=problem):
            write_calibration(images, tmp_path / output, {"use": preprocess, "params": {}}, (3, 32, 32), 1)
    assert not list(tmp_path.glob("c.npy*"))
