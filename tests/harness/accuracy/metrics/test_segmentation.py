"""Mean IoU by hand, from masks of both forms, through letterboxes and outputs of other sizes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.accuracy.metrics.base import evaluator_params
from harness.accuracy.metrics.intervals import metric_estimate
from harness.accuracy.metrics.labelled import MeanIoU
from harness.base.errors import EvaluationFailed, UserError
from harness.plugins import registry

DATA = {"use": "images", "images": "images", "masks": "masks"}


def miou(folder: Path, data: Mapping[str, Any] = DATA, size: int = 8, **params: Any) -> MeanIoU:
    supplied = {"input_name": "x", "input_shape": (1, 3, size, size), "base": folder}
    given = {"data": data, "preprocess": "array", **params}
    made = registry.create_plugin("evaluator", "miou", evaluator_params("miou", given, supplied))
    assert isinstance(made, MeanIoU)
    return made


@pytest.fixture
def folder(tmp_path):
    """Two images of 8 x 8; the left half of their masks is 0, the right half 1 and 2; the last row has no class."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in (1, 2):
        Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / "images" / f"{i}.png")
        Image.fromarray(truth(i).astype(np.uint8)).save(tmp_path / "masks" / f"{i}.png")
    return tmp_path


def truth(i: int) -> np.ndarray:
    mask = np.zeros((8, 8), np.int64)
    mask[:, 4:] = i
    mask[7] = 255
    return mask


def answer(feeds: Any) -> np.ndarray:
    """The image's own classes, but the lower half of what is not 0 is taken for 0."""
    mask = truth(int(feeds["x"][0, 0, 0, 0]))
    mask[4:] = 0
    return mask


def logits(feeds: Any) -> dict[str, np.ndarray]:
    return {"logits": np.eye(5, dtype=np.float32)[answer(feeds)].transpose(2, 0, 1)[None]}


def test_miou_of_known_masks_ignores_void_pixels(folder):
    # Class 0: 56 rightly, 24 wrongly. Classes 1 and 2: 16 of 28 each. Classes 3 and 4 have no label.
    expected = np.mean([56 / 80, 16 / 28, 16 / 28])
    accuracy = miou(folder).score(logits)
    assert accuracy.metrics == {"miou": pytest.approx(expected)}
    estimate = metric_estimate(accuracy, "miou")
    assert estimate is not None
    one = np.mean([28 / 40, 16 / 28])  # of a draw with one of the images twice
    assert (estimate.interval.low, estimate.interval.high) == pytest.approx((min(one, expected), max(one, expected)))


def test_a_model_with_the_channels_last_has_the_same_score(folder):
    made = registry.create_plugin(
        "evaluator",
        "miou",
        {"data": DATA, "preprocess": "array", "input_name": "x", "input_shape": (1, 8, 8, 3), "base": folder},
    )

    def channels_last(feeds: Any) -> dict[str, np.ndarray]:
        (found,) = logits({"x": feeds["x"].transpose(0, 3, 1, 2)}).values()
        return {"logits": found.transpose(0, 2, 3, 1)}

    assert made.score(channels_last).metrics == miou(folder).score(logits).metrics


@pytest.mark.parametrize(
    "form", [lambda m: m[None], lambda m: m[None, None], lambda m: m[None, None].astype(np.float32)]
)
def test_a_map_of_classes_is_as_good_as_logits(folder, form):
    expected = miou(folder).score(logits).metrics
    assert miou(folder).score(lambda feeds: {"classes": form(answer(feeds))}).metrics == expected


def test_half_size_output_is_resized_to_the_image(folder):
    whole = miou(folder).score(logits).metrics
    half = miou(folder).score(lambda feeds: {"logits": logits(feeds)["logits"][:, :, ::2, ::2]}).metrics
    assert half == whole


@pytest.mark.parametrize("use", ["yolox", "ultralytics", "rtdetr"])
def test_letterbox_is_removed_from_outputs(tmp_path, use):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    mask = np.zeros((20, 40), np.uint8)
    mask[5:15, 10:30] = 1
    Image.fromarray(np.repeat(mask[:, :, None] * 255, 3, axis=2)).save(tmp_path / "images" / "a.png")
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")

    def bright(feeds: Any) -> dict[str, np.ndarray]:
        middle = 0.6 * float(feeds["x"].max())
        return {"classes": (feeds["x"][:, 0] > middle).astype(np.int64)}

    assert miou(tmp_path, size=80, preprocess=use).score(bright).metrics["miou"] > 0.9


def test_a_crop_is_refused(folder):
    Image.new("RGB", (20, 8)).save(folder / "images" / "1.png")
    Image.new("L", (20, 8)).save(folder / "masks" / "1.png")
    with pytest.raises(
        UserError, match=r"preprocess cuts off a part of the image.*'tf_imagenet' with {resize: stretch}"
    ):
        miou(folder, preprocess="tf_imagenet").score(lambda _: {"logits": np.zeros((1, 2, 8, 8))})


@pytest.fixture
def panoptic(folder):
    """The same masks in COCO's panoptic form: cat is 1, dog is 2, the rest is grass or nothing."""
    ids = {0: (0, 0, 0), 1: (7, 1, 0), 2: (9, 0, 2), 255: (3, 0, 0)}
    for i in (1, 2):
        pixels = np.array([[ids[int(k)] for k in row] for row in truth(i)], np.uint8)
        Image.fromarray(pixels).save(folder / "masks" / f"{i}.png")
    segments = [
        {"id": 7 + 256, "category_id": 17},
        {"id": 9 + 2 * 65536, "category_id": 18},
        {"id": 3, "category_id": 4},
    ]
    annotations = [{"image_id": i, "file_name": f"{i}.png", "segments_info": segments} for i in (2, 1)]
    images = [{"id": i, "file_name": f"{i}.png"} for i in (1, 2)]
    categories = [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}, {"id": 4, "name": "grass"}]
    labels = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "panoptic.json").write_text(json.dumps(labels))
    return folder


def test_panoptic_masks_are_mapped_by_class_names(panoptic):
    data = {**DATA, "labels": "panoptic.json"}
    classes = ["background", "cat", "dog"]
    # What is nothing, and grass, is background: the last row of 8 pixels, found as 0, is right.
    found = miou(panoptic, {**data, "classes": classes}).score(logits).metrics["miou"]
    assert found == pytest.approx(np.mean([72 / 96, 16 / 28, 16 / 28]))
    # Without a class for the rest it counts for nothing.
    found = miou(panoptic, {**data, "classes": ["grass", "cat", "dog"]}).score(logits).metrics["miou"]
    assert found == pytest.approx(np.mean([16 / 40, 16 / 28, 16 / 28]))
    for wrong, message in (
        ({"classes": ["background", "cats"]}, "data.classes: the labels have no category 'cats'; did you mean 'cat'"),
        ({}, "data.classes: the names of the model's classes in the order of its outputs, but got None"),
    ):
        with pytest.raises(UserError, match=message):
            miou(panoptic, {**data, **wrong})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file_name": "../1.png"}, "names the mask '../1.png', outside of the folder"),
        ({"segments_info": [{"id": 1, "category_id": 99}]}, "segment 1: no category with id 99"),
        ({"segments_info": [{"id": 1}]}, r"segments_info: every entry has 'category_id' \(int\)"),
        ({"image_id": 5}, "the image '1.png' has no mask"),
        ({"file_name": "lost.png"}, "data.masks: lost.png is not in"),
    ],
)
def test_malformed_panoptic_labels_are_explained(panoptic, change, message):
    path = panoptic / "panoptic.json"
    labels = json.loads(path.read_text())
    labels["annotations"][1].update(change)
    path.write_text(json.dumps(labels))
    with pytest.raises(UserError, match=message):
        miou(panoptic, {**DATA, "labels": "panoptic.json", "classes": ["background", "cat", "dog"]})


def test_unusable_masks_are_refused(folder):
    path = folder / "masks" / "1.png"
    for image, message in (
        (Image.new("L", (8, 4)), r"1\.png: is 4x8, but its image is 8x8"),
        (Image.new("RGB", (8, 8)), r"1\.png: is coloured; a mask has one channel"),
        (Image.new("L", (8, 8), 5), r"miou: data.masks: class 5 on '1\.png', but the model has 5 outputs"),
    ):
        image.save(path)
        with pytest.raises(UserError, match=message):
            miou(folder).score(logits)
    path.write_bytes(b"hello")
    with pytest.raises(UserError, match=r"1\.png: cannot be read as a mask"):
        miou(folder).score(logits)
    path.unlink()
    with pytest.raises(UserError, match=r"data.masks: 1\.png is not in"):
        miou(folder)
    with pytest.raises(UserError, match=r"miou: data.masks: masks are needed, a folder of PNG files"):
        miou(folder, {"use": "images", "images": "images"})


def test_outputs_that_are_no_map_of_classes_fail_the_candidate(folder):
    with pytest.raises(EvaluationFailed, match=r"a map of logits .* but the output's shape is \(1, 5\)"):
        miou(folder).score(lambda _: {"logits": np.zeros((1, 5))})
    with pytest.raises(UserError, match=r"miou: output: say which of a, b holds the logits"):
        miou(folder).score(lambda _: {"a": np.zeros(1), "b": np.zeros(1)})
    for i in (1, 2):
        Image.new("L", (8, 8), 255).save(folder / "masks" / f"{i}.png")
    with pytest.raises(UserError, match=r"miou: data.masks: no pixel .*has a class"):
        miou(folder).score(logits)
