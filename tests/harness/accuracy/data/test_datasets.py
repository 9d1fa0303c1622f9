import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.accuracy.data import arrays
from harness.accuracy.data.arrays import HALF_NAMES, half_of
from harness.accuracy.data.datasets import open_data
from harness.base.errors import UserError

FOLDER = {"use": "images", "images": "images"}
GOOD = {"image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 3]}


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
        "annotations": [GOOD],
        "categories": [{"id": 9}, {"id": 5}],
        **changes,
    }


def open_with(folder: Path, labels: Any, **spec: Any) -> Any:
    name = "labels.json" if isinstance(labels, dict) else "labels.txt"
    (folder / name).write_text(json.dumps(labels) if isinstance(labels, dict) else labels)
    return open_data({**FOLDER, "labels": name, **spec}, folder)


def open_array(folder: Path, array: np.ndarray, limit: int | None = None, **spec: Any) -> Any:
    np.save(folder / "a.npy", array)
    return open_data({"use": "npy", "path": "a.npy", **spec}, folder, limit)


def test_an_unlabelled_folder_is_read_by_name(folder):
    (folder / "images" / "notes.md").write_text("not an image")
    Image.fromarray(np.full((4, 6), 77, np.uint8)).save(folder / "images" / "1.png")
    data = open_data({**FOLDER, "start": 1}, folder)
    assert [data.sample_name(i) for i in range(len(data))] == ["1.png", "2.png"]
    assert data.image(0)[3, 5].tolist() == [77, 77, 77], "a grey image"
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
    assert data.coco["annotations"] == [{**GOOD, "id": 1, "area": 6, "iscrowd": 0}]
    numbered = open_with(folder, coco(annotations=[{**GOOD, "id": 0, "area": 4}]), start=1, count=1).coco
    assert numbered["annotations"][0]["id"] == 1, "pycocotools takes a match with id 0 for none"
    assert numbered["annotations"][0]["area"] == 4
    assert open_with(folder, coco(), start=0, count=1).coco["annotations"] == []


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
    spec = {**FOLDER, "start": 1}
    first = open_data(spec, folder, limit=1)
    (folder / "images" / "2.png").write_bytes(b"changed")
    again = open_data(spec, folder, limit=1)
    assert len(first) == len(again) == 1
    assert first.fingerprint == again.fingerprint
    assert open_data(spec, folder, limit=9).fingerprint != first.fingerprint
    assert len(open_data({"use": "shapes", "split": "evaluation"}, limit=2)) == 2


def test_limited_rows_are_the_first_or_evenly_spread(folder):
    rows = np.arange(10.0)[:, None]
    found = [open_array(folder, rows, 3, spread=spread) for spread in (False, True)]
    assert [data.arrays[""][:, 0].tolist() for data in found] == [[0, 1, 2], [0, 4, 9]]
    assert found[0].fingerprint != found[1].fingerprint
    assert open_array(folder, rows, 99, spread=True).arrays[""].tolist() == rows.tolist()
    assert (len(found[1]), found[1].available) == (3, 10)
    with pytest.raises(UserError, match="spread"):
        open_array(folder, rows, spread=1)


def test_halves_are_disjoint_and_stable_across_subsets(folder):
    shapes = {"use": "shapes", "split": "evaluation"}

    def names(half: str, **spec: Any) -> set[str]:
        return set(open_data({**shapes, "half": half, **spec}).names)

    search, report = names("search", count=60), names("report", count=60)
    assert not search & report
    assert len(search | report) == 60
    assert 15 < len(search) < 45
    assert names("search", start=20, count=20) <= search
    whole, half = open_data({**shapes, "count": 60}), open_data({**shapes, "count": 60, "half": "report"})
    assert names("report", count=60, every=4) == set(half.names[::4])
    assert half.fingerprint != whole.fingerprint
    assert (half.image(1) == whole.image(whole.names.index(half.names[1]))).all()
    assert [image["file_name"] for image in half.coco["images"]] == list(half.names)
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    parts = [open_array(folder, x, half=half).arrays[""] for half in HALF_NAMES]
    assert sorted(np.concatenate(parts)[:, 0]) == x[:, 0].tolist()
    assert min(map(len, parts)) > 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"use": "image"}, "no kind of data is called 'image'; did you mean 'images'"),
        ({"images": "images"}, "no kind of data is called 'None'"),
        ({**FOLDER, "label": 1}, "data.label: unknown key .* did you mean 'labels'"),
        ({"use": "images"}, "data.images: this key is required"),
        ({"use": "images", "images": "nowhere"}, "nowhere: no such file or folder"),
        ({"use": "images", "images": "images/0.png"}, "is no folder"),
        ({"use": "images", "images": "empty"}, r"no images \(.bmp, .*\) in .*empty"),
        ({**FOLDER, "start": 3}, "start 3 reach beyond the end: images has 3"),
        ({**FOLDER, "start": 2, "count": 2}, "start 2 and count 2 reach beyond the end"),
        ({**FOLDER, "start": -1}, "data.start: a whole number from 0, but got -1"),
        ({**FOLDER, "count": 0}, "data.count: a whole number from 1, but got 0"),
        ({**FOLDER, "count": True}, "but got True"),
        ({"use": "shapes", "split": "test"}, "no split 'test'"),
        ({"use": "npz", "path": "images/0.png"}, "use: npz takes a .npz file, but got 0.png"),
        ({"use": "npy", "path": "broken.npy"}, "broken.npy: not an .npy file"),
        ({"use": "npz", "path": "broken.npz"}, "broken.npz: not an .npz file"),
        ({**FOLDER, "half": "left"}, "data.half: one of search, report, but got 'left'"),
        ({**FOLDER, "count": 1, "half": "OTHER"}, "none of the 1 samples"),
        ({**FOLDER, "masks": "empty"}, "data.masks: 0.png is not in .*empty"),
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
        ("0.png one", "line 1: 'FILENAME CLASS' .* got '0.png one'"),
        ("0.png 1\n1.png", "line 2: .* got '1.png'"),
        ("0.png -1", "line 1"),
        ("\n", "lists no images"),
        ("0.png 1\n0.png 2", "'0.png' twice"),
        ("0.png 1\nlost.png 2", "'lost.png', which is not in"),
        ("../images/0.png 1", "outside of the folder"),
        ("/etc/passwd 1", "outside of the folder"),
        (r"a\..\..\x.png 1", "outside of the folder"),
        (coco(images=[{"id": 7, "file_name": "c:/0.png"}]), "outside of the folder"),
        (coco(images=None), "a list 'images'"),
        (coco(images=[{"id": 7}]), r"images: every entry has 'file_name' \(str\)"),
        (coco(categories=[{"name": "cat"}]), r"categories: every entry has 'id' \(int\)"),
        (coco(annotations=[{"image_id": 7, "category_id": 5}]), "annotations: every entry has 'bbox'"),
        (coco(annotations=[{**GOOD, "bbox": [1, 2, 3]}]), r"'bbox' .* got \[1, 2, 3\]"),
        (coco(annotations=[{**GOOD, "id": 3, "image_id": 70}]), "annotation 1: there is no image with id 70"),
        (coco(annotations=[{**GOOD, "category_id": 6}]), "annotation 1: there is no category with id 6"),
        (coco(annotations=[GOOD, {**GOOD, "bbox": [1, 1, -2, 3]}]), "annotation 2: .*negative"),
        (coco(annotations=[GOOD, {**GOOD, "bbox": [1, 1, float("nan"), 3]}]), "annotation 2: .*bbox"),
    ],
)
def test_malformed_labels_are_explained(folder, labels, message):
    with pytest.raises(UserError, match=message):
        open_with(folder, labels)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("labels.csv", b"0.png,1", "a .json file"), ("labels.json", b"{", "not valid JSON"),
     ("labels.json", b"[]", "a list 'images'"), ("labels.txt", b"\xff\xfe", "not text")],
)  # fmt: skip
def test_invalid_label_files_are_refused(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_data({**FOLDER, "labels": name}, folder)


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "vector", "deep"])
def test_an_unreadable_image_is_named(folder, damage):
    path = folder / "images" / "1.png"
    vector = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\n"
    path.write_bytes({"text": b"hello", "cut": path.read_bytes()[:-30], "vector": vector}.get(damage, b""))
    if damage == "deep":
        Image.fromarray(np.full((4, 6), 1000, np.uint16)).save(path)
    with pytest.raises(UserError, match=r"1\.png: .*(cannot be read as an image|more than 8 bits)"):
        open_data(FOLDER, folder).image(1)


def test_image_size_must_match_its_labels_and_rotation_is_reported(folder, caplog):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 6)).save(folder / "images" / "1.png", exif=exif)
    data = open_with(folder, coco())
    assert data.image(0).shape == (4, 6, 3)
    with pytest.raises(UserError, match=r"1\.png: is 6x4, but its labels say 4x6"):
        data.image(2)
    assert "1.png: EXIF orientation 6 is ignored" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros((2, 3)), "y": np.zeros(3)}, "'x': 2, 'y': 3"),
        ({"x": np.zeros(10), "y": np.int64(1)}, r"'y' is a single number: .*array\[None\]"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "no samples: array 'x' has length 0"),
        ({}, "the first axis of every array"),
        ({"x": np.array([1.0, np.nan])}, "'x' has NaN or infinite values, in row 1"),
        ({"x": np.array([{}])}, "pickles"),
    ],
)
def test_invalid_arrays_are_refused(tmp_path, content, message):
    np.savez(tmp_path / "a.npz", **content)
    with pytest.raises(UserError, match=message):
        open_data({"use": "npz", "path": "a.npz"}, tmp_path)


def test_a_npy_file_is_mapped_and_no_pickle_is_read(tmp_path):
    (array,) = open_array(tmp_path, np.arange(12, dtype=np.float32).reshape(6, 2), 3, start=1, count=4).arrays.values()
    assert isinstance(array, np.memmap)
    assert array.tolist() == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(UserError, match=r"a\.npy: not an \.npy file of plain arrays"):
        open_array(tmp_path, np.array([{}]))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_only_the_chosen_rows_of_an_npz_file_are_kept(tmp_path, save):
    x, y = np.arange(300.0).reshape(10, 5, 6), np.arange(20, dtype=np.int64).reshape(10, 2)
    save(tmp_path / "a.npz", x=x, y=y, by_column=np.asfortranarray(x), single=x[:, 0, 0])
    data = open_data({"use": "npz", "path": "a.npz", "start": 3, "count": 5}, tmp_path, limit=2)
    assert data.arrays["x"].tolist() == data.arrays["by_column"].tolist() == x[3:5].tolist()
    assert data.arrays["y"].tolist() == y[3:5].tolist()
    assert data.arrays["single"].tolist() == x[3:5, 0, 0].tolist()


def test_arrays_beyond_the_memory_limit_are_mapped_or_refused(tmp_path, monkeypatch):
    x, spec = np.arange(1000.0).reshape(10, 100), {"use": "npz", "path": "a.npz"}
    monkeypatch.setattr(arrays, "MAX_ARRAY_BYTES", 5 * 800)
    np.savez_compressed(tmp_path / "a.npz", x=x)
    with pytest.raises(UserError, match=r"10 samples take .* GiB"):
        open_data(spec, tmp_path)
    assert len(open_data(spec, tmp_path, limit=5)) == 5
    np.savez(tmp_path / "a.npz", x=x, empty=np.zeros((10, 0)))
    data = open_data(spec, tmp_path)
    assert isinstance(data.arrays["x"], np.memmap)
    assert data.arrays["x"].tolist() == x.tolist()
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.index(x[5].tobytes())] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match="CRC"):
        open_data(spec, tmp_path)


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


def test_categories_are_reordered_by_class_names(folder):
    boxes = [{**GOOD, "category_id": c} for c in (5, 9)]
    named = coco(categories=[{"id": 9, "name": "cat"}, {"id": 5, "name": "dog"}], annotations=boxes)
    data = open_with(folder, named, classes=["cat", "bird", "dog"])
    assert [a["category_id"] for a in data.coco["annotations"]] == [3, 1]
    assert [c["name"] for c in sorted(data.coco["categories"], key=lambda c: c["id"])] == ["cat", "bird", "dog"]
    for classes, message in ((["cat", "dogs"], "'dog', .* did you mean 'dogs'"), ([1, 2], "data.classes: the names"),
                             (["cat", "dog", "cat"], "'cat' appears twice")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            open_with(folder, named, classes=classes)


def test_duplicate_annotation_is_reported(folder, caplog):
    open_with(folder, coco(annotations=[GOOD, {**GOOD, "bbox": [0, 0, 1, 1]}, GOOD]))
    assert "labels.json: annotation 3 repeats annotation 1" in caplog.text
