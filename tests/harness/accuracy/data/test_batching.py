from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.accuracy.data.batching import describe_sample_count, image_input, image_preparer, make_batches
from harness.accuracy.data.datasets import open_data
from harness.accuracy.data.preprocess import Shapes
from harness.base.errors import UserError

SPLIT = {"use": "shapes", "split": "evaluation", "count": 5}
IMAGE = ("float", (1, 3, 128, 128))
PAIR = ("float", (1, 2))


def arrays(folder: Path, **given: Any) -> Any:
    np.savez(folder / "a.npz", **given)
    return open_data({"use": "npz", "path": "a.npz"}, folder)


def test_images_are_batched_and_the_last_batch_is_padded():
    data = open_data(SPLIT)
    found = list(make_batches(data, "shapes", {"x": ("float", (2, 3, 128, 128))}))
    assert [feed["x"].shape for feed in found] == [(2, 3, 128, 128)] * 3
    images = [Shapes().prepare(data.image(i), (128, 128)).tensor for i in (0, 1, 2, 3, 4, 4)]
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in found]), images)
    assert len(make_batches(data, "shapes", {"x": ("float", (2, 3, 128, 128))}, count=2)) == 1
    last = next(iter(make_batches(data, "shapes", {"x": ("float", (2, 128, 128, 3))})))["x"]
    assert last.flags.c_contiguous
    np.testing.assert_array_equal(last, found[0]["x"].transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [({"mask": ("bool", (1, 4)), "x": IMAGE}, r"only 'x'; use: npz .*'mask'"),
     ({"ids": ("int64", (1, 4))}, "'ids' is 1 x 4"), ({}, "but ''")],
)  # fmt: skip
def test_images_feed_the_only_image_input(inputs, message):
    assert image_input({"x": IMAGE}) == "x"
    with pytest.raises(UserError, match=message):
        image_input(inputs)


@pytest.mark.parametrize(
    ("shape", "layout", "found"),
    [
        ((1, 3, 8, 6), None, (8, 6)),
        ((1, 8, 6, 3), None, (8, 6)),
        ((1, 3, 8, 3), "nhwc", (3, 8)),
        ((1, 3, 8, 3), "nchw", (8, 3)),
        ((1, 3, 8, 3), None, "layout: nhwc"),
        ((1, 8, 6, 3), "nchw", "batch x 3 x height x width"),
        ((1, 8, 6, 4), None, "batch x height x width x 3"),
        ((1, 8, 6, 3), "hwc", "nchw or nhwc, but got 'hwc'"),
    ],
)
def test_the_layout_of_images_is_that_of_the_axis_with_three_channels(shape, layout, found):
    preprocess = {"use": "torch_imagenet", **({"layout": layout} if layout else {})}
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            image_preparer(preprocess, "x", shape)
        return
    size, prepare = image_preparer(preprocess, "x", shape)
    assert size == found
    assert prepare(np.zeros((9, 7, 3), np.uint8)).tensor.shape == shape[1:]


def test_images_feed_an_input_with_the_channels_last():
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    shapes = (1, 3, 8, 6), (1, 8, 6, 3)
    first, last = (image_preparer({"use": "torch_imagenet"}, "x", shape)[1](image).tensor for shape in shapes)
    assert last.flags.c_contiguous
    np.testing.assert_array_equal(last, first.transpose(1, 2, 0))


def test_arrays_give_samples_in_the_batch_and_type_of_the_input(tmp_path):
    data = arrays(tmp_path, **{"a/b": np.arange(6.0).reshape(3, 2), "mask": np.arange(3, dtype=np.int32)})
    feeds = list(make_batches(data, None, {"a/b": PAIR, "mask": ("int64", ())}))
    assert [feed["a/b"].tolist() for feed in feeds] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]]]
    assert feeds[0]["a/b"].dtype == np.float32
    assert [(feed["mask"].dtype, feed["mask"].tolist()) for feed in feeds] == [("int64", 0), ("int64", 1), ("int64", 2)]
    pairs = make_batches(arrays(tmp_path, x=np.arange(10).reshape(5, 2)), None, {"x": ("int64", (2, 2))})
    assert [feed["x"].tolist() for feed in pairs] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [8, 9]]]


def test_an_unnamed_array_feeds_the_only_input(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.uint8).reshape(3, 2))
    data = open_data({"use": "npy", "path": "a.npy"}, tmp_path)
    first = next(iter(make_batches(data, None, {"x": PAIR})))["x"]
    assert (first.dtype, first.tolist()) == ("float32", [[0.0, 1.0]])
    with pytest.raises(UserError, match=r"feeds one input, but the model has 'x', 'y'"):
        make_batches(data, None, {"x": PAIR, "y": ("float", (1,))})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": PAIR}, "the model has no input 'y'; known: x"),
        ({"x": PAIR, "y": ("float", (1,)), "z": ("bool", ())}, "no array for the input 'z'"),
        ({"x": ("float", (1, 3)), "y": ("float", (1,))}, "a sample of array 'x' is 2, but the input takes 1 x 3"),
        ({"x": ("int64", (1, 2)), "y": ("float", (1,))}, "'x' holds float64, but the input takes int64"),
        ({"x": ("float", (3, 2)), "y": ("float", ())}, "by input, {'x': 3, 'y': 1}"),
    ],
)
def test_arrays_that_mismatch_the_model_are_refused(tmp_path, inputs, message):
    with pytest.raises(UserError, match=message):
        make_batches(arrays(tmp_path, x=np.zeros((4, 2)), y=np.zeros(4)), None, inputs)


def test_samples_in_another_layout_are_refused_with_the_transposition(tmp_path):
    first, last = ("float", (1, 3, 8, 6)), ("float", (1, 8, 6, 3))
    axes = {"x": ("batch", 3, 8, 6)}
    for shape, taken, known, hint in (
        ((2, 8, 6, 3), first, None, r"last: x\.transpose\(0, 3, 1, 2\)$"),
        ((2, 8, 6, 3), first, axes, r"last: x\.transpose\(0, 3, 1, 2\), or pad"),
        ((2, 3, 8, 6), last, None, r"first: x\.transpose\(0, 2, 3, 1\)$"),
        ((2, 1, 8, 6), first, axes, r"fixes to 3; pad or cut"),
    ):
        with pytest.raises(UserError, match=hint):
            make_batches(arrays(tmp_path, x=np.zeros(shape)), None, {"x": taken}, axes=known)


def test_integer_data_and_single_samples_are_warned_about(tmp_path, caplog):
    data = arrays(tmp_path, x=np.full((1, 3, 4, 4), 255, np.uint8))
    (batch,) = make_batches(data, None, {"x": ("float", (1, 3, 4, 4))})
    assert batch["x"].max() == 255.0
    assert "array 'x' holds uint8" in caplog.text
    assert "there is one sample" in caplog.text
    assert describe_sample_count(data, None, "x") == "1 sample of x"
