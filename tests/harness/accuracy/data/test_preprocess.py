import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.accuracy.data.preprocess import (
    RTDETR,
    YOLOX,
    NanoDet,
    Prepared,
    Shapes,
    TFImageNet,
    TorchImageNet,
    Ultralytics,
    open_preprocess,
    preprocess_fingerprint,
)
from harness.base.errors import UserError


def plain(height: int, width: int, colour: tuple[int, int, int] = (200, 100, 50)) -> np.ndarray:
    return np.full((height, width, 3), colour, np.uint8)


def ramp(height: int, width: int) -> np.ndarray:
    """Red counts the columns, green the rows."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns % 256, rows % 256, np.zeros_like(rows)], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("name", ["torch_imagenet", "tf_imagenet", "yolox", "nanodet", "ultralytics", "rtdetr"])
def test_every_preprocessing_gives_float32_channels_first(name):
    tensor = open_preprocess(name).prepare(ramp(37, 61), (32, 64)).tensor
    assert tensor.shape == (3, 32, 64)
    assert tensor.dtype == np.float32
    assert tensor.flags.c_contiguous


def test_torch_imagenet_normalises_red_green_blue():
    tensor = TorchImageNet().prepare(plain(224, 224), (224, 224)).tensor
    expected = (np.array([200, 100, 50]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert tensor[:, 7, 9] == pytest.approx(expected, abs=1e-5)


def test_tf_imagenet_maps_to_plus_minus_one():
    tensor = TFImageNet().prepare(plain(224, 224, (255, 0, 51)), (224, 224)).tensor
    assert tensor[:, 0, 0] == pytest.approx([1.0, -1.0, 51 / 127.5 - 1])


@pytest.mark.parametrize("resize", ["shrink", "center_crop"])
def test_already_cropped_images_keep_their_pixels(resize):
    image = ramp(227, 227)
    prepared = open_preprocess({"use": "tf_imagenet", "params": {"resize": resize}}).prepare(image, (224, 224))
    assert prepared.offset == (-1, -1)
    assert (
        np.rint((prepared.tensor + 1) * 127.5).astype(int).tolist() == image[1:225, 1:225].transpose(2, 0, 1).tolist()
    )


def test_resample_filter_is_configurable():
    image = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    bilinear, bicubic = (TFImageNet(resample=name).prepare(image, (32, 32)).tensor for name in ("bilinear", "bicubic"))
    assert 0 < np.abs(bilinear - bicubic).max() < 1


@pytest.mark.parametrize(
    ("resize", "height", "scale"),
    [
        ("shrink", 512, 0.5),
        ("shrink", 227, 1.0),
        ("shorter_side", 512, 0.5),
        ("shorter_side", 128, 2.0),
        ("center_crop", 512, 1.0),
        ("center_crop", 112, 2.0),
        ("shrink", 112, 2.0),
    ],
)
def test_scale_of_each_resize_mode_before_the_crop(resize, height, scale):
    preprocess = open_preprocess({"use": "torch_imagenet", "params": {"resize": resize}})
    prepared = preprocess.prepare(plain(height, height + 40), (224, 224))
    assert prepared.scale == pytest.approx(scale)
    assert prepared.tensor.shape == (3, 224, 224)


def test_yolox_places_bgr_image_at_the_top_left():
    prepared = YOLOX().prepare(plain(10, 20), (40, 40))
    assert prepared.tensor[:, 19, 39].tolist() == [50, 100, 200]
    assert (prepared.tensor[:, 20:] == 114).all()
    assert (prepared.scale, prepared.offset, prepared.original) == (2.0, (0, 0), (10, 20))


def test_nanodet_centres_image_on_black():
    prepared = NanoDet().prepare(plain(10, 20), (40, 40))
    black = (0 - np.array([103.53, 116.28, 123.675])) / [57.375, 57.12, 58.395]
    inside = (np.array([50, 100, 200]) - [103.53, 116.28, 123.675]) / [57.375, 57.12, 58.395]
    assert prepared.tensor[:, 9, 0] == pytest.approx(black, abs=1e-5)
    assert prepared.tensor[:, 10, 0] == pytest.approx(inside, abs=1e-5)
    assert prepared.tensor[:, 29, 39] == pytest.approx(inside, abs=1e-5)
    assert prepared.offset == (0, 10)


def test_ultralytics_centres_rgb_image_on_grey():
    prepared = Ultralytics().prepare(plain(10, 20, (255, 51, 0)), (40, 40))
    assert prepared.tensor[:, 10, 0] == pytest.approx([1.0, 0.2, 0.0])
    assert prepared.tensor[:, 9, 0] == pytest.approx([114 / 255] * 3)
    assert prepared.tensor[:, 30, 39] == pytest.approx([114 / 255] * 3)
    assert (prepared.scale, prepared.offset) == (2.0, (0, 10))


def test_ultralytics_rounds_and_yolox_truncates_sizes():
    image = plain(427, 640)  # 427 * 0.65 = 277.55
    ground = [(p.prepare(image, (416, 416)).tensor == v).all(axis=(0, 2)).sum() for p, v in
              ((Ultralytics(), np.float32(114) / np.float32(255)), (YOLOX(), 114))]  # fmt: skip
    assert ground == [416 - 278, 416 - 277]


def test_rtdetr_stretches_and_rescales_boxes_per_axis():
    prepared = RTDETR().prepare(plain(10, 20, (255, 51, 0)), (40, 40))
    assert (prepared.tensor == prepared.tensor[:, :1, :1]).all()
    assert prepared.tensor[:, 0, 0] == pytest.approx([1.0, 0.2, 0.0])
    assert prepared.to_image(np.array([[10.0, 20, 30, 40]])).tolist() == [[5.0, 5.0, 15.0, 10.0]]
    assert TFImageNet(resize="stretch").prepare(plain(10, 20), (40, 40)).scale == (2.0, 4.0)


def test_array_leaves_pixels_as_they_are():
    prepared = open_preprocess("array").prepare(plain(8, 8), (8, 8))
    assert prepared.tensor[:, 3, 3].tolist() == [200.0, 100.0, 50.0]
    with pytest.raises(UserError, match="preprocess 'array' does not resize: the image is 9x8, the input 8x8"):
        open_preprocess("array").prepare(plain(9, 8), (8, 8))


def test_shapes_never_resizes():
    assert Shapes().prepare(plain(8, 8, (255, 0, 51)), (8, 8)).tensor[:, 0, 0] == pytest.approx([1.0, 0.0, 0.2])
    with pytest.raises(UserError, match="does not resize: the image is 8x9, the input 8x8"):
        Shapes().prepare(plain(8, 9), (8, 8))


@settings(max_examples=60)
@given(
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    size=st.tuples(st.integers(8, 96), st.integers(8, 96)),
    preprocess=st.sampled_from([YOLOX(), NanoDet(), Ultralytics(), RTDETR()]),
    corners=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_boxes_come_back_from_the_letterbox(height, width, size, preprocess, corners):
    prepared = preprocess.prepare(plain(height, width), size)
    box = np.array([[*sorted(corners[:2]), *sorted(corners[2:])]])[:, [0, 2, 1, 3]] * [width, height, width, height]
    in_input = box * np.tile(prepared.scales, 2) + np.tile(prepared.offset, 2)
    assert prepared.to_image(in_input) == pytest.approx(box, abs=1e-9)
    assert in_input.max() <= max(size) + 1
    assert prepared.tensor.shape == (3, *size)


def test_boxes_are_clipped_to_the_image():
    prepared = Prepared(tensor=np.zeros((3, 4, 4), np.float32), scale=0.5, offset=(1.0, 0.0), original=(6, 8))
    assert prepared.to_image(np.array([[0.0, -1.0, 2.0, 99.0]])).tolist() == [[0.0, 0.0, 2.0, 6.0]]
    assert np.isfinite(prepared.to_image(np.array([[-np.inf, 0.0, np.inf, 1.0]]))).all()


def test_unknown_names_and_parameters_are_explained():
    with pytest.raises(UserError, match="no preprocessing is called 'yolo'; did you mean 'yolox'"):
        open_preprocess("yolo")
    with pytest.raises(UserError, match=r"unknown key 'parms'.*'params'"):
        open_preprocess({"use": "yolox", "parms": {}})
    with pytest.raises(UserError, match=r"resize: .*'stretch', but got 'big'"):
        open_preprocess({"use": "tf_imagenet", "params": {"resize": "big"}})
    with pytest.raises(UserError, match=r"resample: .*'bicubic', but got 'nearest'"):
        open_preprocess({"use": "torch_imagenet", "params": {"resample": "nearest"}})
    with pytest.raises(UserError, match="a mapping of 'use'"):
        open_preprocess({"params": {}})


def test_fingerprint_depends_on_name_parameters_and_source(tmp_path, monkeypatch):
    source = "class Mine:\n    def __init__(self, gain=1): ...\n    def prepare(self, image, size): ...\n"
    (tmp_path / "own_preprocess.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = "own_preprocess:Mine"
    seen = {
        preprocess_fingerprint("torch_imagenet"),
        preprocess_fingerprint({"use": "torch_imagenet", "params": {"resize": "center_crop"}}),
        preprocess_fingerprint(own),
    }
    assert preprocess_fingerprint({"use": own, "params": {}}) in seen
    (tmp_path / "own_preprocess.py").write_text(f"{source}# another one\n")
    assert preprocess_fingerprint(own) not in seen
    assert len(seen) == 3
