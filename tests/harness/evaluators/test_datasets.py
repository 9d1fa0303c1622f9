from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.errors import UserError
from harness.evaluators.datasets import Dataset, open_data, open_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images of 4 x 6; image i is filled with (10 i, 20, 30)."""
    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.fromarray(np.full((4, 6, 3), (10 * i, 20, 30), np.uint8)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def coco(**changes: Any) -> dict[str, Any]:
    return {
        "images": [{"id": 7 - i, "file_name": f"{i}.png", "height": 4, "width": 6} for i in (2, 0, 1)],
        "annotations": [{"image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3]}],
        "categories": [{"id": 9}, {"id": 5}],
        **changes,
    }


def open_with(folder: Path, labels: Any, **spec: Any) -> Dataset:
    name = "labels.json" if isinstance(labels, dict) else "labels.txt"
    (folder / name).write_text(json.dumps(labels) if isinstance(labels, dict) else labels)
    return open_images({"use": "images", "images": "images", "labels": name, **spec}, folder)


def test_an_unlabelled_folder_is_read_by_name(folder: Path) -> None:
    (folder / "images" / "notes.md").write_text("not an image")
    data = open_images({"use": "images", "images": "images", "start": 1}, folder)
    assert [data.id(i) for i in range(len(data))] == ["1.png", "2.png"]
    assert data.image(1).shape == (4, 6, 3)
    assert data.image(1)[0, 0].tolist() == [20, 20, 30]
    assert data.labels is None
    assert data.coco is None


def test_class_labels_give_the_order_and_may_cover_a_part(folder: Path) -> None:
    data = open_with(folder, "2.png 11\n\n0.png 3\n")
    assert data.names == ("2.png", "0.png")
    assert data.labels is not None
    assert data.labels.tolist() == [11, 3]


def test_coco_labels_are_cut_with_the_images(folder: Path) -> None:
    data = open_with(folder, coco(), start=1, count=1)
    assert data.names == ("0.png",)
    assert data.coco is not None
    assert [i["id"] for i in data.coco["images"]] == [7]
    assert data.coco["annotations"] == [
        {"id": 1, "image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3], "area": 6, "iscrowd": 0}
    ]
    numbered = coco(annotations=[{"id": 0, "image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3], "area": 4}])
    own = open_with(folder, numbered, start=1, count=1).coco
    assert own is not None
    assert own["annotations"][0]["id"] == 1, "pycocotools takes a match with id 0 for none"
    assert own["annotations"][0]["area"] == 4
    other = open_with(folder, coco(), start=0, count=1)
    assert other.coco is not None
    assert other.coco["annotations"] == []


def test_grey_images_become_rgb(folder: Path) -> None:
    Image.fromarray(np.full((4, 6), 77, np.uint8)).save(folder / "images" / "0.png")
    data = open_images({"use": "images", "images": "images"}, folder)
    assert data.image(0)[3, 5].tolist() == [77, 77, 77]


def test_the_fingerprint_follows_names_contents_labels_and_cut(folder: Path) -> None:
    seen = {
        open_with(folder, "0.png 1\n1.png 1").fingerprint,
        open_with(folder, "0.png 1\n1.png 2").fingerprint,
        open_with(folder, "0.png 1\n1.png 2", count=1).fingerprint,
    }
    path = folder / "images" / "0.png"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    seen.add(open_with(folder, "0.png 1\n1.png 2").fingerprint)
    assert len(seen) == 4
    assert open_with(folder, "0.png 1\n1.png 2").fingerprint in seen


def test_what_lies_beyond_the_limit_is_neither_read_nor_told_apart(folder: Path) -> None:
    spec = {"use": "images", "images": "images", "start": 1}
    first = open_data(spec, folder, limit=1)
    (folder / "images" / "2.png").write_bytes(b"changed")
    again = open_data(spec, folder, limit=1)
    assert len(first) == len(again) == 1
    assert first.fingerprint == again.fingerprint
    assert open_data(spec, folder, limit=9).fingerprint != first.fingerprint
    assert len(open_data({"use": "shapes", "split": "evaluation"}, limit=2)) == 2
    np.savez(folder / "a.npz", x=np.zeros((4, 2)))
    assert len(open_data({"use": "npz", "path": "a.npz", "start": 1}, folder, limit=2)) == 2


def test_shapes_are_drawn_with_their_labels() -> None:
    data = open_images({"use": "shapes", "split": "evaluation", "count": 3})
    assert len(data) == 3
    assert data.coco is not None
    assert {a["image_id"] for a in data.coco["annotations"]} <= {1, 2, 3}
    later = open_images({"use": "shapes", "split": "evaluation", "start": 2, "count": 1})
    assert (later.image(0) == data.image(2)).all()
    assert later.names == data.names[2:]
    assert later.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"use": "image"}, "data.use: no kind of data is called 'image'; did you mean 'images'"),
        ({"images": "images"}, "data.use: no kind of data is called 'None'"),
        ({"use": "images", "images": "images", "label": 1}, "data.label: unknown key .* did you mean 'labels'"),
        ({"use": "images"}, "data.images: this key is required"),
        ({"use": "images", "images": "nowhere"}, "nowhere: no such file or folder"),
        ({"use": "images", "images": "images/0.png"}, "data.images: images/0.png is no folder"),
        ({"use": "images", "images": "empty"}, r"data.images: no images \(.bmp, .*\) in .*empty"),
        ({"use": "images", "images": "images", "start": 3}, "start 3 reach beyond the end: images has 3"),
        (
            {"use": "images", "images": "images", "start": 2, "count": 2},
            "start 2 and count 2 reach beyond the end: images has 3",
        ),
        ({"use": "images", "images": "images", "start": -1}, "data.start: a whole number from 0, but got -1"),
        ({"use": "images", "images": "images", "count": 0}, "data.count: a whole number from 1, but got 0"),
        ({"use": "images", "images": "images", "count": True}, "data.count: a whole number from 1, but got True"),
        ({"use": "shapes", "split": "test"}, "shapes: no split 'test'"),
        ({"use": "npz", "path": "images/0.png"}, r"0.png: not an .npz file of plain arrays"),
    ],
)
def test_a_wrong_specification_is_explained(folder: Path, spec: dict[str, Any], message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        open_data(spec, folder)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("0.png one", r"labels.txt, line 1: 'FILENAME CLASS' with a class from 0, but got '0.png one'"),
        ("0.png 1\n1.png", r"labels.txt, line 2: .* but got '1.png'"),
        ("0.png -1", "line 1: 'FILENAME CLASS'"),
        ("\n", "labels.txt: lists no images"),
        ("0.png 1\n0.png 2", "labels.txt: lists the image '0.png' twice"),
        ("0.png 1\nlost.png 2", "labels.txt names the image 'lost.png', which is not in"),
        ("../images/0.png 1", r"names the image '../images/0.png', outside of the folder of images, which is refused"),
        ("/etc/passwd 1", "names the image '/etc/passwd', outside of the folder"),
        (r"a\..\..\x.png 1", "outside of the folder of images"),
        (coco(images=[{"id": 7, "file_name": "c:/0.png"}]), "names the image 'c:/0.png', outside of the folder"),
        (coco(images=None), "COCO labels have a list 'images', but there is none"),
        (coco(images=[]), r"lists no images|there is no image with id 7"),
        (coco(images=[{"id": 7}]), r"images: every entry has 'file_name' \(str\)"),
        (coco(categories=[{"name": "cat"}]), r"categories: every entry has 'id' \(int\)"),
        (coco(annotations=[{"image_id": 7, "category_id": 5}]), "annotations: every entry has 'bbox'"),
        (
            coco(annotations=[{"image_id": 7, "category_id": 5, "bbox": [1, 2, 3]}]),
            r"'bbox' is x, y, width, height in pixels, but got \[1, 2, 3\]",
        ),
        (
            coco(annotations=[{"id": 3, "image_id": 70, "category_id": 5, "bbox": [1, 2, 3, 4]}]),
            "annotation 1: there is no image with id 70",
        ),
        (
            coco(annotations=[{"image_id": 7, "category_id": 6, "bbox": [1, 2, 3, 4]}]),
            "annotation 1: there is no category with id 6",
        ),
    ],
)
def test_malformed_labels_are_explained(folder: Path, labels: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_with(folder, labels)


def test_label_files_that_are_none_are_explained(folder: Path) -> None:
    for name, content, message in (
        ("labels.csv", b"0.png,1", r"labels are a .json file \(COCO\) or a .txt file"),
        ("labels.json", b"{", "labels.json: not valid JSON"),
        ("labels.json", b"[]", "COCO labels have a list 'images'"),
        ("labels.txt", b"\xff\xfe", "labels.txt: cannot be read"),
    ):
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_images({"use": "images", "images": "images", "labels": name}, folder)


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_an_unreadable_image_is_named(folder: Path, damage: str) -> None:
    path = folder / "images" / "1.png"
    path.write_bytes({"text": b"hello", "cut": path.read_bytes()[:-30], "empty": b""}[damage])
    data = open_images({"use": "images", "images": "images"}, folder)
    with pytest.raises(UserError, match=r"1\.png: cannot be read as an image"):
        data.image(1)


def test_an_image_of_another_size_than_its_labels_say_is_named(folder: Path) -> None:
    Image.new("RGB", (4, 6)).save(folder / "images" / "1.png")
    data = open_with(folder, coco())
    assert data.image(0).shape == (4, 6, 3)
    with pytest.raises(UserError, match=r"1\.png: is 6x4, but its labels say 4x6"):
        data.image(2)


def test_arrays_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    spec = {"use": "npz", "path": "a.npz"}
    for arrays, message in (
        (
            {"x": np.zeros((2, 3)), "y": np.zeros(3)},
            r"the first axis of every array counts the samples.*'x': 2, 'y': 3",
        ),
        ({"x": np.float32(1)}, "the first axis of every array"),
        ({}, "the first axis of every array"),
        ({"x": np.array([1.0, np.nan])}, "array 'x' has NaN or infinite values"),
        ({"x": np.array([{}])}, "not an .npz file of plain arrays"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(UserError, match=message):
            open_data(spec, tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)))
    with pytest.raises(UserError, match="images are needed here"):
        open_images(spec, tmp_path)
