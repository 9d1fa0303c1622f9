import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.accuracy.data import arrays
from harness.accuracy.data.arrays import HALF_NAMES, ArrayDataset, half_of
from harness.accuracy.data.datasets import ImageDataset, open_data
from harness.base.errors import UserError


@pytest.fixture
def folder(tmp_path):
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


def open_with(folder: Path, labels: Any, **spec: Any) -> ImageDataset:
    name = "labels.json" if isinstance(labels, dict) else "labels.txt"
    (folder / name).write_text(json.dumps(labels) if isinstance(labels, dict) else labels)
    return open_data({"use": "images", "images": "images", "labels": name, **spec}, folder)


def test_an_unlabelled_folder_is_read_by_name(folder):
    (folder / "images" / "notes.md").write_text("not an image")
    data = open_data({"use": "images", "images": "images", "start": 1}, folder)
    assert [data.sample_name(i) for i in range(len(data))] == ["1.png", "2.png"]
    assert data.image(1).shape == (4, 6, 3)
    assert data.image(1)[0, 0].tolist() == [20, 20, 30]
    assert data.labels is None
    assert data.coco is None


def test_class_labels_decide_order_and_subset(folder):
    data = open_with(folder, "2.png 11\n\n0.png 3\n")
    assert data.names == ("2.png", "0.png")
    assert data.labels.tolist() == [11, 3]


def test_coco_labels_are_limited_to_selected_images(folder):
    data = open_with(folder, coco(), start=1, count=1)
    assert data.names == ("0.png",)
    assert [i["id"] for i in data.coco["images"]] == [7]
    assert data.coco["annotations"] == [
        {"id": 1, "image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3], "area": 6, "iscrowd": 0}
    ]
    numbered = coco(annotations=[{"id": 0, "image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3], "area": 4}])
    own = open_with(folder, numbered, start=1, count=1).coco
    assert own["annotations"][0]["id"] == 1, "pycocotools takes a match with id 0 for none"
    assert own["annotations"][0]["area"] == 4
    other = open_with(folder, coco(), start=0, count=1)
    assert other.coco["annotations"] == []


def test_grey_images_become_rgb(folder):
    Image.fromarray(np.full((4, 6), 77, np.uint8)).save(folder / "images" / "0.png")
    data = open_data({"use": "images", "images": "images"}, folder)
    assert data.image(0)[3, 5].tolist() == [77, 77, 77]


def test_fingerprint_depends_on_contents_labels_and_subset(folder):
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


def test_samples_beyond_the_limit_are_not_read_or_hashed(folder):
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


def test_limited_rows_are_the_first_or_evenly_spread(folder):
    np.save(folder / "a.npy", np.arange(9, dtype=np.float32)[:, None])
    found = []
    for spread in (False, True):
        data = open_data({"use": "npy", "path": "a.npy", "spread": spread}, folder, limit=3)
        assert isinstance(data, ArrayDataset)
        found.append((data.arrays[""][:, 0].tolist(), data.fingerprint))
    (first, first_key), (spread_rows, spread_key) = found
    assert (first, spread_rows) == ([0, 1, 2], [0, 4, 8])
    assert first_key != spread_key
    with pytest.raises(UserError, match="spread"):
        open_data({"use": "npy", "path": "a.npy", "spread": 1}, folder)


def test_halves_are_disjoint_and_stable_across_subsets(folder):
    def names(half: str, **spec: Any) -> set[str]:
        data = open_data({"use": "shapes", "split": "evaluation", "half": half, **spec})
        assert [image["file_name"] for image in data.coco["images"]] == list(data.names)
        return set(data.names)

    search, report = names("search", count=60), names("report", count=60)
    assert not search & report
    assert len(search | report) == 60
    assert 15 < len(search) < 45
    assert names("search", start=20, count=20) <= search
    whole = open_data({"use": "shapes", "split": "evaluation", "count": 60})
    half = open_data({"use": "shapes", "split": "evaluation", "count": 60, "half": "report"})
    assert half.fingerprint != whole.fingerprint
    assert (half.image(1) == whole.image(whole.names.index(half.names[1]))).all()


def test_rows_of_arrays_have_halves_too(folder):
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    np.savez(folder / "a.npz", x=x)
    np.save(folder / "a.npy", x)
    for kind, name in (("npz", "x"), ("npy", "")):
        parts = []
        for half in HALF_NAMES:
            data = open_data({"use": kind, "path": f"a.{kind}", "half": half}, folder)
            assert isinstance(data, ArrayDataset)
            parts.append(data.arrays[name])
        assert sorted(np.concatenate(parts)[:, 0]) == x[:, 0].tolist()
        assert min(map(len, parts)) > 3


def test_shapes_dataset_has_coco_labels():
    data = open_data({"use": "shapes", "split": "evaluation", "count": 3})
    assert len(data) == 3
    assert {a["image_id"] for a in data.coco["annotations"]} <= {1, 2, 3}
    later = open_data({"use": "shapes", "split": "evaluation", "start": 2, "count": 1})
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
        ({"use": "images", "images": "/nowhere"}, "/nowhere: no such file or folder$"),
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
        ({"use": "npz", "path": "images/0.png"}, r"use: npz takes a .npz file, but got 0.png"),
        ({"use": "npy", "path": "broken.npy"}, r"broken.npy: not an .npy file of plain arrays"),
        ({"use": "npz", "path": "broken.npz"}, r"broken.npz: not an .npz file of plain arrays"),
        ({"use": "images", "images": "images", "half": "left"}, "data.half: one of search, report, but got 'left'"),
        ({"use": "images", "images": "images", "count": 1, "half": "OTHER"}, "none of the 1 samples is of the half"),
        ({"use": "images", "images": "images", "masks": "empty"}, "data.masks: 0.png is not in .*empty"),
    ],
)
def test_invalid_data_specification_is_refused(folder, spec, message):
    (folder / "empty").mkdir()
    for suffix in ("npy", "npz"):
        (folder / f"broken.{suffix}").write_bytes(b"hello")
    if spec.get("half") == "OTHER":
        spec = {**spec, "half": next(half for half in HALF_NAMES if half != half_of("0.png"))}
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
def test_malformed_labels_are_explained(folder, labels, message):
    with pytest.raises(UserError, match=message):
        open_with(folder, labels)


def test_invalid_label_files_are_refused(folder):
    for name, content, message in (
        ("labels.csv", b"0.png,1", r"labels are a .json file \(COCO\) or a .txt file"),
        ("labels.json", b"{", "labels.json: not valid JSON"),
        ("labels.json", b"[]", "COCO labels have a list 'images'"),
        ("labels.txt", b"\xff\xfe", "labels.txt: this is not text"),
    ):
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_data({"use": "images", "images": "images", "labels": name}, folder)


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_an_unreadable_image_is_named(folder, damage):
    path = folder / "images" / "1.png"
    path.write_bytes({"text": b"hello", "cut": path.read_bytes()[:-30], "empty": b""}[damage])
    data = open_data({"use": "images", "images": "images"}, folder)
    with pytest.raises(UserError, match=r"1\.png: cannot be read as an image"):
        data.image(1)


def test_image_size_must_match_its_labels(folder):
    Image.new("RGB", (4, 6)).save(folder / "images" / "1.png")
    data = open_with(folder, coco())
    assert data.image(0).shape == (4, 6, 3)
    with pytest.raises(UserError, match=r"1\.png: is 6x4, but its labels say 4x6"):
        data.image(2)


def test_invalid_arrays_are_refused(tmp_path):
    spec = {"use": "npz", "path": "a.npz"}
    for content, message in (
        (
            {"x": np.zeros((2, 3)), "y": np.zeros(3)},
            r"the first axis of every array counts the samples.*'x': 2, 'y': 3",
        ),
        (
            {"x": np.zeros(10), "y": np.int64(1)},
            r"'y' is a single number: .* of shape \(1,\), and inputs .*array\[None\]",
        ),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "there are no samples: array 'x' has length 0"),
        ({}, "the first axis of every array"),
        ({"x": np.array([1.0, np.nan])}, "array 'x' has NaN or infinite values, in row 1"),
        ({"x": np.array([{}])}, "not an .npz file of plain arrays: object arrays are pickles, which are never read"),
    ):
        np.savez(tmp_path / "a.npz", **content)
        with pytest.raises(UserError, match=message):
            open_data(spec, tmp_path)


def test_a_npy_file_is_mapped_and_no_pickle_is_read(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    data = open_data({"use": "npy", "path": "a.npy", "start": 1, "count": 4}, tmp_path, limit=3)
    assert isinstance(data, ArrayDataset)
    (array,) = data.arrays.values()
    assert isinstance(array, np.memmap)
    assert array.tolist() == [[2, 3], [4, 5], [6, 7]]
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match=r"a\.npy: not an \.npy file of plain arrays"):
        open_data({"use": "npy", "path": "a.npy"}, tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_only_the_chosen_rows_of_an_npz_file_are_kept(tmp_path, save):
    x, y = np.arange(300.0).reshape(10, 5, 6), np.arange(20, dtype=np.int64).reshape(10, 2)
    save(tmp_path / "a.npz", x=x, y=y, by_column=np.asfortranarray(x), single=x[:, 0, 0])
    data = open_data({"use": "npz", "path": "a.npz", "start": 3, "count": 5}, tmp_path, limit=2)
    assert isinstance(data, ArrayDataset)
    assert data.arrays["x"].tolist() == data.arrays["by_column"].tolist() == x[3:5].tolist()
    assert data.arrays["y"].tolist() == y[3:5].tolist()
    assert data.arrays["single"].tolist() == x[3:5, 0, 0].tolist()
    assert len(data) == 2


def test_npz_file_beyond_the_memory_limit_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((10, 100)))
    monkeypatch.setattr(arrays, "MAX_ARRAY_BYTES", 5 * 800)
    with pytest.raises(UserError, match=r"10 samples take .* GiB, more than .*; use fewer \('count'\), or .*\.npy"):
        open_data({"use": "npz", "path": "a.npz"}, tmp_path)
    assert len(open_data({"use": "npz", "path": "a.npz"}, tmp_path, limit=5)) == 5


def test_uncompressed_arrays_of_an_archive_are_mapped(tmp_path, monkeypatch):
    x = np.arange(1000.0).reshape(10, 100)
    np.savez(tmp_path / "a.npz", x=x, empty=np.zeros((10, 0)))
    monkeypatch.setattr(arrays, "MAX_ARRAY_BYTES", 5 * 800)
    data = open_data({"use": "npz", "path": "a.npz"}, tmp_path)
    assert isinstance(data, ArrayDataset)
    assert isinstance(data.arrays["x"], np.memmap)
    assert data.arrays["x"].tolist() == x.tolist()
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.index(x[5].tobytes())] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match="CRC"):
        open_data({"use": "npz", "path": "a.npz"}, tmp_path)


@pytest.mark.parametrize(
    ("count", "rows"), [(1, [0]), (3, [0, 4, 9]), (9, [0, 1, 2, 3, 4, 6, 7, 8, 9]), (99, range(10))]
)
def test_a_limit_takes_samples_evenly_where_asked(tmp_path, count, rows):
    np.save(tmp_path / "a.npy", np.arange(10.0).reshape(10, 1))
    data = open_data({"use": "npy", "path": "a.npy"}, tmp_path, limit=count, spread=True)
    assert isinstance(data, ArrayDataset)
    (array,) = data.arrays.values()
    assert array[:, 0].tolist() == list(rows)
    assert data.available == 10


def test_npz_header_with_a_wrong_shape_is_refused(tmp_path):
    np.savez(tmp_path / "good.npz", x=np.zeros((3, 4), np.float32))
    with zipfile.ZipFile(tmp_path / "good.npz") as good, zipfile.ZipFile(tmp_path / "bad.npz", "w") as bad:
        bad.writestr("x.npy", good.read("x.npy").replace(b"(3, 4)", b"(9, 4)"))
    with pytest.raises(UserError, match=r"bad\.npz: not an \.npz file of plain arrays"):
        open_data({"use": "npz", "path": "bad.npz"}, tmp_path)


def test_categories_are_reordered_by_class_names(folder):
    boxes = [{"image_id": 7, "category_id": c, "bbox": [1, 1, 2, 3]} for c in (5, 9)]
    named = coco(categories=[{"id": 9, "name": "cat"}, {"id": 5, "name": "dog"}], annotations=boxes)
    data = open_with(folder, named, classes=["cat", "bird", "dog"])
    assert [a["category_id"] for a in data.coco["annotations"]] == [3, 1]
    assert [c["name"] for c in sorted(data.coco["categories"], key=lambda c: c["id"])] == ["cat", "bird", "dog"]
    with pytest.raises(UserError, match="boxes of category 'dog', which is none of them; did you mean 'dogs'"):
        open_with(folder, named, classes=["cat", "dogs"])
    with pytest.raises(UserError, match=r"data.classes: the names of the model's classes in the order of its outputs"):
        open_with(folder, named, classes=[1, 2])
    with pytest.raises(UserError, match=r"data.classes: 'cat' appears twice"):
        open_with(folder, named, classes=["cat", "dog", "cat"])


@pytest.mark.parametrize(
    ("bbox", "cause"), [([1, 1, -2, 3], "annotation 2: .*negative"), ([1, 1, float("nan"), 3], "annotation 2: .*bbox")]
)
def test_invalid_box_is_refused_naming_its_annotation(folder, bbox, cause):
    good = {"image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3]}
    with pytest.raises(UserError, match=rf"labels\.json: {cause}"):
        open_with(folder, coco(annotations=[good, {**good, "bbox": bbox}]))


def test_duplicate_annotation_is_reported(folder, caplog):
    good = {"image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3]}
    open_with(folder, coco(annotations=[good, {**good, "bbox": [0, 0, 1, 1]}, good]))
    assert "labels.json: annotation 3 repeats annotation 1" in caplog.text


def test_16bit_vector_and_rotated_images_are_reported(folder, caplog):
    images = folder / "images"
    Image.fromarray(np.full((4, 6), 1000, np.uint16)).save(images / "0.png")
    (images / "1.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\n")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(images / "2.png", exif=exif)
    data = open_data({"use": "images", "images": "images"}, folder)
    with pytest.raises(UserError, match=r"0\.png: .*more than 8 bits"):
        data.image(0)
    with pytest.raises(UserError, match=r"1\.png: cannot be read as an image"):
        data.image(1)
    data.image(2)
    assert "2.png: EXIF orientation 6 is ignored" in caplog.text


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_a_header_that_claims_more_than_the_file_has_is_refused(folder, name):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 1000000000), }".ljust(117) + b"\n"
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    if name.endswith(".npz"):
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", raw)
    else:
        (folder / name).write_bytes(raw)
    with pytest.raises(UserError, match=rf"{name}: "):
        open_data({"use": name[2:], "path": name}, folder)
    with pytest.raises(UserError, match=rf"{name}: "):
        arrays.read_rows(folder / name)
