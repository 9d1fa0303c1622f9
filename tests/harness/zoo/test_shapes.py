"""The made-up data set: reproducible, disjoint splits with labels that fit the pixels."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import run_onnxruntime

from harness.base.errors import UserError
from harness.zoo.shapes import CLASS_NAMES, IMAGE_SIZE_PX, draw_split


def test_images_are_rgb_and_labels_refer_to_images():
    shapes = draw_split("evaluation", 12)
    assert [(image.dtype, image.shape) for image in shapes.images] == [
        (np.uint8, (IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3))
    ] * 12
    coco = shapes.coco
    assert [image["id"] for image in coco["images"]] == list(range(1, 13))
    assert [category["name"] for category in coco["categories"]] == list(CLASS_NAMES)
    assert {annotation["image_id"] for annotation in coco["annotations"]} <= set(range(1, 13))
    assert len({annotation["id"] for annotation in coco["annotations"]}) == len(coco["annotations"])


@pytest.mark.parametrize(("name", "count"), [("calibration", 64), ("evaluation", 200)])
def test_default_sizes_and_all_classes_present(name, count):
    shapes = draw_split(name)
    found = [annotation["category_id"] for annotation in shapes.coco["annotations"]]
    assert len(shapes.images) == count
    assert min(found.count(category) for category in (1, 2, 3)) > len(found) / 5


def test_a_smaller_count_is_the_beginning_of_the_split():
    small, large = draw_split("train", 3), draw_split("train", 5)
    assert all(np.array_equal(a, b) for a, b in zip(small.images, large.images, strict=False))
    assert small.coco["annotations"] == [item for item in large.coco["annotations"] if item["image_id"] <= 3]


def test_splits_share_no_image():
    images = [
        image.tobytes() for name in ("train", "calibration", "evaluation") for image in draw_split(name, 20).images
    ]
    assert len(set(images)) == 60


@settings(max_examples=5)
@given(st.sampled_from(["train", "calibration", "evaluation"]), st.integers(1, 8))
def test_boxes_lie_in_the_image_and_hold_their_area(name, count):
    for annotation in draw_split(name, count).coco["annotations"]:
        x, y, width, height = annotation["bbox"]
        assert min(x, y) >= 0
        assert max(x + width, y + height) <= IMAGE_SIZE_PX
        assert 0 < annotation["area"] <= width * height * (1 + 1e-9)


def test_unknown_split_and_count_below_one_are_refused():
    with pytest.raises(UserError, match=r"shapes: no split 'eval'; did you mean 'evaluation'\?"):
        draw_split("eval")
    with pytest.raises(UserError, match=r"shapes: count must be at least 1 .*, but got 0"):
        draw_split("train", 0)


def test_training_is_deterministic_and_its_export_equal(tmp_path):
    torch = pytest.importorskip("torch")
    train_shapes = importlib.import_module("train_shapes")
    data = draw_split("train", 4)
    model, again = (train_shapes.train(data, epochs=1, batch=4, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    image = np.random.default_rng(0).random((1, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX), np.float32)
    with torch.no_grad():
        want = model(torch.from_numpy(image)).numpy()
    with pytest.warns(DeprecationWarning, match="legacy TorchScript-based ONNX export"):
        train_shapes.export(model, tmp_path / "model.onnx")
    (got,) = run_onnxruntime(tmp_path / "model.onnx", {"images": image}, ["detections"])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
