import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.accuracy.data.preprocess import Prepared, TFImageNet, open_preprocess, preprocess_fingerprint
from harness.base.errors import UserError

RGB = np.array([200, 100, 50])
NAMES = ["torch_imagenet", "tf_imagenet", "yolox", "nanodet", "ultralytics", "rtdetr"]


def plain(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), RGB, np.uint8)


def ramp(height: int, width: int) -> np.ndarray:
    """Red counts the columns, green the rows."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns % 256, rows % 256, np.zeros_like(rows)], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_every_preprocessing_gives_float32_channels_first(name):
    tensor = open_preprocess(name).prepare(ramp(37, 61), (32, 64)).tensor
    assert tensor.shape == (3, 32, 64)
    assert tensor.dtype == np.float32
    assert tensor.flags.c_contiguous


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch_imagenet", (RGB / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]),
        ("tf_imagenet", RGB / 127.5 - 1),
        ("array", RGB),
        ("shapes", RGB / 255),
        ("rtdetr", RGB / 255),
    ],
)
def test_pixels_are_normalized(name, expected):
    prepared = open_preprocess(name).prepare(plain(224, 224), (224, 224))
    assert prepared.tensor[:, 7, 9] == pytest.approx(expected, abs=1e-5)
    if name in ("array", "shapes"):
        with pytest.raises(UserError, match=f"'{name}' does not resize: the image is 9x8, the input 8x8"):
            open_preprocess(name).prepare(plain(9, 8), (8, 8))


@pytest.mark.parametrize(
    ("name", "ground", "inside", "top"),
    [
        ("yolox", [114] * 3, RGB[::-1], 0),
        ("nanodet", (0 - np.array([103.53, 116.28, 123.675])) / [57.375, 57.12, 58.395],
         (RGB[::-1] - [103.53, 116.28, 123.675]) / [57.375, 57.12, 58.395], 10),
        ("ultralytics", [114 / 255] * 3, RGB / 255, 10),
    ],
)  # fmt: skip
def test_letterboxes_place_the_image_on_their_ground(name, ground, inside, top):
    prepared = open_preprocess(name).prepare(plain(10, 20), (40, 40))
    for row in range(40):
        expected = inside if top <= row < top + 20 else ground
        assert prepared.tensor[:, row, 39] == pytest.approx(np.asarray(expected), abs=1e-5), row
    assert (prepared.scale, prepared.offset, prepared.original) == (2.0, (0, top), (10, 20))


def test_ultralytics_rounds_and_yolox_truncates_sizes():
    image = plain(427, 640)  # 427 * 0.65 = 277.55
    for name, ground, rows in (("ultralytics", np.float32(114) / np.float32(255), 138), ("yolox", 114, 139)):
        tensor = open_preprocess(name).prepare(image, (416, 416)).tensor
        assert (tensor == ground).all(axis=(0, 2)).sum() == rows


@pytest.mark.parametrize("resize", ["shrink", "center_crop"])
def test_already_cropped_images_keep_their_pixels(resize):
    image = ramp(227, 227)
    prepared = open_preprocess({"use": "tf_imagenet", "params": {"resize": resize}}).prepare(image, (224, 224))
    assert prepared.offset == (-1, -1)
    pixels = np.rint((prepared.tensor + 1) * 127.5).astype(int)
    assert pixels.tolist() == image[1:225, 1:225].transpose(2, 0, 1).tolist()


def test_resample_filter_is_configurable():
    image = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    bilinear, bicubic = (TFImageNet(resample=name).prepare(image, (32, 32)).tensor for name in ("bilinear", "bicubic"))
    assert 0 < np.abs(bilinear - bicubic).max() < 1


@pytest.mark.parametrize(
    ("resize", "height", "scale"),
    [("shrink", 512, 0.5), ("shrink", 227, 1.0), ("shrink", 112, 2.0), ("shorter_side", 512, 0.5),
     ("shorter_side", 128, 2.0), ("center_crop", 512, 1.0), ("center_crop", 112, 2.0),
     ("stretch", 448, (224 / 488, 0.5))],
)  # fmt: skip
def test_scale_of_each_resize_mode_before_the_crop(resize, height, scale):
    preprocess = open_preprocess({"use": "torch_imagenet", "params": {"resize": resize}})
    prepared = preprocess.prepare(plain(height, height + 40), (224, 224))
    assert prepared.scale == pytest.approx(scale)
    assert prepared.tensor.shape == (3, 224, 224)


@settings(max_examples=60)
@given(
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    size=st.tuples(st.integers(8, 96), st.integers(8, 96)),
    name=st.sampled_from(["yolox", "nanodet", "ultralytics", "rtdetr"]),
    corners=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_boxes_come_back_from_the_input(height, width, size, name, corners):
    prepared = open_preprocess(name).prepare(plain(height, width), size)
    box = np.array([[*sorted(corners[:2]), *sorted(corners[2:])]])[:, [0, 2, 1, 3]] * [width, height, width, height]
    in_input = box * np.tile(prepared.scales, 2) + np.tile(prepared.offset, 2)
    assert prepared.to_image(in_input) == pytest.approx(box, abs=1e-9)
    assert in_input.max() <= max(size) + 1
    if name == "rtdetr":
        assert prepared.scale == (size[1] / width, size[0] / height)


def test_boxes_are_clipped_to_the_image():
    prepared = Prepared(tensor=np.zeros((3, 4, 4), np.float32), scale=0.5, offset=(1.0, 0.0), original=(6, 8))
    assert prepared.to_image(np.array([[0.0, -1.0, 2.0, 99.0]])).tolist() == [[0.0, 0.0, 2.0, 6.0]]
    assert np.isfinite(prepared.to_image(np.array([[-np.inf, 0.0, np.inf, 1.0]]))).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("yolo", "did you mean 'yolox'"),
        ({"use": "yolox", "parms": {}}, "unknown key 'parms'.*'params'"),
        ({"use": "tf_imagenet", "params": {"resize": "big"}}, "resize: .*'stretch', but got 'big'"),
        ({"use": "torch_imagenet", "params": {"resample": "nearest"}}, "resample: .*'bicubic', but got 'nearest'"),
        ({"params": {}}, "a mapping of 'use'"),
    ],
)
def test_unknown_names_and_parameters_are_explained(spec, message):
    with pytest.raises(UserError, match=message):
        open_preprocess(spec)


def test_fingerprint_depends_on_name_parameters_and_source(tmp_path, monkeypatch):
    source = "class Mine:\n    def __init__(self, gain=1): ...\n    def prepare(self, image, size): ...\n"
    (tmp_path / "own_preprocess.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = "own_preprocess:Mine"
    crop = {"use": "torch_imagenet", "params": {"resize": "center_crop"}}
    seen = {preprocess_fingerprint(spec) for spec in ("torch_imagenet", crop, own)}
    assert preprocess_fingerprint({"use": own, "params": {}}) in seen
    (tmp_path / "own_preprocess.py").write_text(f"{source}# another one\n")
    assert preprocess_fingerprint(own) not in seen
    assert len(seen) == 3
